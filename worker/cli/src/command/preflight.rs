//! `wakeful preflight`: what of the open sessions cannot go on under another binary or configuration.

use super::output::{
    Cell, Column, Output, OutputArgs, Table, Tone, count, print, printable, until_reader_goes,
};
use super::{Exit, Usage};
use crate::App;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;
use wakeful_config::Config;
use wakeful_engine::jobs::notify::channel_of;
use wakeful_engine::tool::registry;
use wakeful_engine::web::{self, Reach};
use wakeful_store::Store;
use wakeful_workflow::preflight::{
    Capabilities, Kind, Obstacle, judge, judge_channel, judge_encryption, judge_resting, judge_rule,
    judge_schedule,
};

/// Sessions that a finding names.
const SAMPLES: usize = 3;
/// How long the other server may take to answer.
const SERVER: Duration = Duration::from_secs(10);

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  wakeful preflight --against new/wakeful.toml      # this program with another configuration, and this environment
  wakeful preflight --against https://next:7070     # another program that runs already (WAKEFUL_TOKEN)
  new/wakeful preflight --against new/wakeful.toml --config old/wakeful.toml  # another program: its own `preflight`

Exit status: 0 nothing stands in the way; 9 something does, or there are more sessions than --limit.")]
pub(super) struct Args {
    /// The configuration that is to be deployed, or the address of a server that runs with it.
    #[arg(long, value_name = "CONFIG|URL")]
    against: String,
    /// Look at no more open sessions than this.
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    space: super::space::Space,
}

/// One obstacle and what it stops.
#[derive(Debug, Serialize)]
struct Finding {
    kind: Kind,
    what: String,
    /// How many sessions it stops. 0: it stops a schedule, or everything.
    sessions: usize,
    /// Some of them.
    samples: Vec<String>,
    remedy: String,
}

#[derive(Debug, Serialize)]
struct Report {
    findings: Vec<Finding>,
    /// Sessions and schedules that were looked at.
    open_sessions: usize,
    schedules: usize,
    /// Sessions that cannot go on as they would now.
    stopped: usize,
    /// Sessions that rest and whose next message would wait; at most --limit of an agent.
    resting: usize,
    /// There are more open sessions than were looked at.
    more: bool,
}

pub(super) async fn run(app: &App, mut config: Config, args: Args) -> anyhow::Result<Exit> {
    super::say_without_file(&config);
    // Beside `wakeful dev` both are what it would make of them.
    super::dev::apply_with_samples(&mut config, app)?;
    let old = app.capabilities(&config)?;
    let new = match args.against.split_once("://") {
        Some(("http" | "https", _)) => of_server(&config, &args.against).await?,
        Some(_) => {
            return Err(Usage("--against: a file, or an address with http:// or https://".to_owned()).into());
        }
        None => {
            let mut new = app.load(Some(Path::new(&args.against)))?;
            super::dev::apply_with_samples(&mut new, app)?;
            app.capabilities(&new)?
        }
    };
    let store = super::open_store(&config, "wakeful preflight").await?;
    let report = report(&store, &config, &args, &old, &new).await;
    store.close().await;
    let report = report?;
    let exit = if report.findings.is_empty() && !report.more { Exit::Ok } else { Exit::Doctor };
    let output = Output::new(&args.output);
    until_reader_goes(show(&output, &report).map(|()| exit))
}

async fn of_server(config: &Config, url: &str) -> anyhow::Result<Capabilities> {
    use anyhow::Context as _;
    use secrecy::ExposeSecret as _;
    let asked = format!("{}/v1/capabilities", url.trim_end_matches('/'));
    let client = web::client(Reach::Named(&[&asked])).timeout(SERVER).build()?;
    let request = client.get(&asked);
    let request = match &config.server.token {
        Some(token) => request.bearer_auth(token.expose_secret()),
        None => request,
    };
    let answer = request.send().await.with_context(|| format!("no answer from {url}"))?;
    let status = answer.status();
    anyhow::ensure!(
        status.is_success(),
        "{url} answers {status} to /v1/capabilities: is it a Wakeful of this version, and is WAKEFUL_TOKEN its token?"
    );
    answer.json().await.with_context(|| format!("what {url} says of itself cannot be read"))
}

async fn report(
    store: &Store,
    config: &Config,
    args: &Args,
    old: &Capabilities,
    new: &Capabilities,
) -> anyhow::Result<Report> {
    let (space_id, limit) = (args.space.named(), args.limit as usize);
    let mut found: BTreeMap<Obstacle, BTreeSet<String>> = BTreeMap::new();
    if let Some(oldest) = store.oldest_served().await?.filter(|oldest| *oldest > new.schema_number) {
        let what =
            format!("the schema serves binaries from {oldest} on, and the new one is {}", new.schema_number);
        found.entry(Obstacle::new(Kind::Schema, what)).or_default();
    }
    if let Some(obstacle) = judge_encryption(store.sealed_conversations().await?, old, new) {
        found.entry(obstacle).or_default();
    }
    let needs = store.needs(space_id, limit).await?;
    let mut stopped = BTreeSet::new();
    for need in &needs.sessions {
        let obstacles = judge(need, old, new, &|tool, arguments| registry::fits(tool, arguments));
        for obstacle in obstacles {
            stopped.insert(need.session_id.clone());
            found.entry(obstacle).or_default().insert(need.session_id.clone());
        }
    }
    // A message may wait although its session has ended.
    for (channel, session_id) in store.unsent_by_channel(space_id, limit).await? {
        if let Some(obstacle) = judge_channel(&channel, new) {
            stopped.insert(session_id.clone());
            found.entry(obstacle).or_default().insert(session_id);
        }
    }
    for name in store.untold_rules().await? {
        let rule = config.notify.iter().find(|one| one.rule.name == name);
        if let Some(obstacle) = judge_rule(&name, rule.map(|rule| channel_of(&rule.to)), new) {
            found.entry(obstacle).or_default();
        }
    }
    let schedules = store.schedule_needs(space_id).await?;
    for schedule in &schedules {
        for obstacle in judge_schedule(schedule, new) {
            found.entry(obstacle).or_default();
        }
    }
    let mut resting = 0;
    for (agent, space_id) in store.agents_of_sessions(space_id).await? {
        if let Some(obstacle) = judge_resting(&agent, &space_id, old, new) {
            let sessions = store.resting_sessions(&agent, &space_id, limit).await?;
            if !sessions.is_empty() {
                resting += sessions.len();
                found.entry(obstacle).or_default().extend(sessions);
            }
        }
    }
    let findings = found.into_iter().map(|(obstacle, sessions)| {
        let count = sessions.len();
        Finding {
            remedy: obstacle.remedy(sessions.first().map(String::as_str)),
            kind: obstacle.kind,
            what: obstacle.what,
            sessions: count,
            samples: sessions.into_iter().take(SAMPLES).collect(),
        }
    });
    Ok(Report {
        findings: findings.collect(),
        open_sessions: needs.sessions.len(),
        schedules: schedules.len(),
        stopped: stopped.len(),
        resting,
        more: needs.more,
    })
}

fn show(output: &Output, report: &Report) -> anyhow::Result<()> {
    if output.format().is_some() {
        return output.one(report, String::new);
    }
    let mut table =
        Table::new(&[Column::fixed(""), Column::number("SESSIONS"), Column::flexible("")]).wrapped();
    for finding in &report.findings {
        let stops = if finding.sessions == 0 { "-".to_owned() } else { finding.sessions.to_string() };
        table.row([Cell::new("STOPS", Tone::Bad), stops.into(), finding.what.as_str().into()]);
        if !finding.samples.is_empty() {
            let more = if finding.sessions > finding.samples.len() { " …" } else { "" };
            table.row(["".into(), "".into(), format!("{}{more}", finding.samples.join(" ")).into()]);
        }
        table.row(["".into(), "".into(), format!("→ {}", finding.remedy).into()]);
    }
    if !table.is_empty() {
        print(&output.aligned(&table, 0))?;
    }
    let looked = format!(
        "{} and {} were looked at",
        count(report.open_sessions as i64, "open session"),
        count(report.schedules as i64, "schedule")
    );
    let more = if report.more { "; there are more sessions, see --limit" } else { "" };
    let end = if report.findings.is_empty() {
        let what = if report.more { "What was looked at can go on" } else { "Everything can go on" };
        format!("{what}: {looked}{more}.")
    } else {
        let resting = match report.resting {
            0 => String::new(),
            resting => format!(", and {} at rest could not", count(resting as i64, "conversation")),
        };
        format!("{} cannot go on as now{resting}: {looked}{more}.", count(report.stopped as i64, "session"))
    };
    print(&format!("{}\n", printable(&end)))
}
