//! `wakeful replay`: runs a session again, or a folder of exported ones, and compares it with the original.

mod progress;
mod suite;

use super::output::{Output, OutputArgs, count, printable, until_reader_goes};
use super::space::Space;
use super::{CONNECT, Exit, Usage, report};
use crate::App;
use crate::replay::{self, Observer, ReplayEnd, Replayed, Request};
use anyhow::Context as _;
use progress::Shown;
use serde::Serialize;
use sha2::Digest;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use wakeful_config::Config;
use wakeful_engine::ctx::Ctx;
use wakeful_workflow::diff::{self, Level, Report};
use wakeful_workflow::id::SessionId;
use wakeful_workflow::policy::{Answers, ToolMode};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    space: Space,
    /// The session to run again, or a file that `wakeful session export` made.
    #[arg(value_name = "SESSION|FILE", required_unless_present = "suite", conflicts_with = "suite")]
    source: Option<String>,
    /// Call this model instead of the session's own. `recorded` calls no model: each call gets the session's
    /// recorded answer.
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// Keep the messages up to this one, and run what follows. Without it, run everything again.
    #[arg(long, value_name = "N", conflicts_with = "suite")]
    from_message: Option<i64>,
    /// Use this system prompt instead of the session's own.
    #[arg(long, value_name = "FILE")]
    system_prompt: Option<PathBuf>,
    /// How to handle tool calls. dry: pure tools run, others only say what they would have done. recorded:
    /// each call gets its recorded result. live: tools act on the real world (needs --yes).
    #[arg(long, value_enum, default_value = "dry")]
    tools: Tools,
    /// Write the comparison to this file, as one HTML page.
    #[arg(long, value_name = "FILE.html", conflicts_with = "suite")]
    report: Option<PathBuf>,
    /// Run every bundle in this folder, and print one line for each.
    #[arg(long, value_name = "DIR")]
    suite: Option<PathBuf>,
    /// Which differences make the exit status 8. tools: different tool calls. state: these, or a different
    /// state. any: every difference. none: no difference.
    #[arg(long, value_enum, default_value = "any")]
    fail_on: FailOn,
    /// Write the results of the suite to this file, as a JUnit report. In a GitHub workflow, bundles that failed or diverged
    /// are annotated too.
    #[arg(long, value_name = "FILE.xml", requires = "suite")]
    junit: Option<PathBuf>,
    /// Number of bundles to run at the same time.
    #[arg(long, value_name = "N", requires = "suite", default_value_t = 4)]
    jobs: usize,
    /// Show long texts whole.
    #[arg(long)]
    full: bool,
    /// Start over, even if an interrupted run of the same command could be continued.
    #[arg(long)]
    fresh: bool,
    /// Confirm that tools may act on the real world.
    #[arg(long)]
    yes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Tools {
    Dry,
    Recorded,
    Live,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum FailOn {
    Tools,
    State,
    Any,
    None,
}

/// A replay and its source.
#[derive(Debug, Serialize)]
struct Compared {
    replay: Summary,
    /// The source is on the left, the replay on the right.
    diff: Report,
}

/// The result of a replay.
#[derive(Debug, Serialize)]
struct Summary {
    session_id: String,
    source_session_id: String,
    /// An earlier, interrupted command started this replay.
    resumed: bool,
    /// Why fewer messages were kept than asked for.
    moved: Option<String>,
    /// Calls for which the source has no result; they were dry runs.
    unrecorded: Vec<String>,
    /// Why the replay did not finish.
    failed: Option<String>,
    /// The model requests should equal the source's, but they differ.
    requests_differ: bool,
}

impl FailOn {
    fn is_reached(self, compared: &Compared) -> bool {
        let level = compared.diff.verdict;
        match self {
            FailOn::Tools => level >= Level::Tools,
            FailOn::State => level >= Level::State,
            FailOn::Any => level > Level::Equal || compared.replay.requests_differ,
            FailOn::None => false,
        }
    }
}

impl From<Tools> for ToolMode {
    fn from(tools: Tools) -> ToolMode {
        match tools {
            Tools::Dry => ToolMode::Dry,
            Tools::Recorded => ToolMode::Recorded,
            Tools::Live => ToolMode::Live,
        }
    }
}

pub(super) async fn run(app: App, mut config: Config, args: Args) -> anyhow::Result<Exit> {
    if args.tools == Tools::Live && !args.yes {
        let text =
            "--tools live sends and writes once more what the session sent and wrote: say --yes as well";
        return Err(Usage(text.to_owned()).into());
    }
    if args.jobs == 0 {
        return Err(Usage("--jobs 0 would run nothing".to_owned()).into());
    }
    let system_prompt = match &args.system_prompt {
        Some(path) => Some(std::fs::read_to_string(path).map_err(|error| {
            Usage(format!("--system-prompt: {} cannot be read: {error}", path.display()))
        })?),
        None => None,
    };
    if let Some(path) = &args.report {
        report::check_page(path)?;
    }
    super::say_without_file(&config);
    if let Some(model) = args.model.as_deref().filter(|model| *model != "recorded") {
        app.models(&config)?.get(model).map_err(|fault| Usage(format!("--model: {fault}")))?;
        if let Some(variable) = config.missing_key(model) {
            return Err(Usage(format!("--model: {variable} is not set, and {model} needs it")).into());
        }
    }
    // A session of `wakeful dev` ran with dev's recipients and folders. Its replay needs the same ones.
    super::dev::apply_if_dev_database(&mut config, &app)?;
    let url = super::database_url(&config)?;
    wakeful_store::diagnosis::reach(&url, CONNECT)
        .await
        .with_context(|| wakeful_store::diagnosis::address(&url).unwrap_or_default())?;
    let ctx = match args.tools {
        Tools::Live => app.context(config, &url).await?,
        Tools::Dry | Tools::Recorded => app.dry_context(config, &url).await?,
    };
    let signals = tokio::spawn(crate::serve::drain_on_signal(Arc::clone(&ctx)));
    let output = Output::new(&args.output);
    let options = SharedOptions { system_prompt, args };
    let ran = match (&options.args.suite, &options.args.source) {
        (Some(dir), _) => suite::run(&ctx, &options, dir, &output).await,
        (None, Some(source)) => single(&ctx, &options, source, &output).await,
        (None, None) => Err(Usage("name a session or a file, or a folder with --suite".to_owned()).into()),
    };
    signals.abort();
    // No step is running, so the listening tasks can stop.
    ctx.shutdown.draining.cancel();
    ctx.shutdown.abort.cancel();
    ctx.store.close().await;
    until_reader_goes(ran)
}

/// Options that every replay of this command shares.
struct SharedOptions {
    system_prompt: Option<String>,
    args: Args,
}

async fn single(
    ctx: &Arc<Ctx>,
    options: &SharedOptions,
    source: &str,
    output: &Output,
) -> anyhow::Result<Exit> {
    let shown = Shown::start();
    let compared = replayed(ctx, options, source, &shown).await;
    shown.end();
    let Some(compared) = compared? else {
        eprintln!("interrupted: the same command goes on where this one stopped");
        return Ok(Exit::Failed);
    };
    let printed = output.one(&compared, || format_comparison(&compared, output, options.args.full));
    if let Some(path) = &options.args.report {
        report::write_page(&compared.diff, path)?;
    }
    // The result is printed, so the replay is finished. A command that is killed before this prints it again.
    ctx.store.end_replay(&compared.replay.session_id).await?;
    printed?;
    Ok(match &compared.replay.failed {
        Some(_) => Exit::Failed,
        None if options.args.fail_on.is_reached(&compared) => Exit::Divergence,
        None => Exit::Ok,
    })
}

/// Runs one replay to its end and compares it with its source. Returns `None` when it was interrupted.
async fn replayed(
    ctx: &Arc<Ctx>,
    options: &SharedOptions,
    source: &str,
    observer: &dyn Observer,
) -> anyhow::Result<Option<Compared>> {
    let mut request = request(options, source)?;
    if is_session(source) {
        options.args.space.has(&ctx.store, &[source]).await?;
    }
    let unfinished = if options.args.fresh {
        None
    } else {
        ctx.store.unfinished_replays(&request.runner()).await?.into_iter().next()
    };
    request.source_session_id = match (&unfinished, Path::new(source)) {
        // Use the source that the unfinished replay began with. For a file, that is its first import.
        (Some(found), _) => {
            let session = ctx.store.hydrate(&found.session_id).await?;
            session.policy.replay.context("a replay without a source")?.source_session_id
        }
        (None, _) if is_session(source) => source.into(),
        (None, path) => SessionId::from(import_file(ctx, options.args.space.of_names(), path).await?),
    };
    let replayed = replay::run(ctx, &request, options.args.fresh, observer).await?;
    let Replayed { session_id, resumed, end, cut_note: moved, unrecorded } = replayed;
    let failed = match end {
        ReplayEnd::Over => None,
        ReplayEnd::Failed(reason) => Some(reason),
        ReplayEnd::Interrupted => return Ok(None),
    };
    let source_session_id = request.source_session_id.as_str().to_owned();
    let (left, right) = (ctx.store.side(&source_session_id).await?, ctx.store.side(&session_id).await?);
    let diff = diff::diff(&left, &right);
    let requests_differ = request.answers == Answers::Recorded && diff.requests.differ > 0;
    let replay =
        Summary { session_id, source_session_id, resumed, moved, unrecorded, failed, requests_differ };
    Ok(Some(Compared { replay, diff }))
}

/// Builds the request. The caller sets the source session, which a file does not have yet.
fn request(options: &SharedOptions, source: &str) -> anyhow::Result<Request> {
    let (answers, model) = match options.args.model.as_deref() {
        Some("recorded") => (Answers::Recorded, None),
        Some(model) => (Answers::Live, Some(model.to_owned())),
        None => (Answers::Live, None),
    };
    Ok(Request {
        source_session_id: SessionId::from(""),
        source_name: if is_session(source) { source.to_owned() } else { sha256_of(Path::new(source))? },
        from_message: options.args.from_message,
        answers,
        model,
        system_prompt: options.system_prompt.clone(),
        tool_mode: options.args.tools.into(),
    })
}

/// Returns whether `source` is a session id. An id wins over a file of the same name.
fn is_session(source: &str) -> bool {
    source.starts_with("sess_") && !source.contains(['/', '.'])
}

fn sha256_of(path: &Path) -> anyhow::Result<String> {
    let unreadable =
        || format!("{} is neither a session's id (sess_...) nor a file that can be read", path.display());
    super::check_regular(path)?;
    let mut file = std::fs::File::open(path).map_err(|error| Usage(format!("{}: {error}", unreadable())))?;
    let mut sha256 = sha2::Sha256::new();
    let mut piece = vec![0; 64 * 1024];
    loop {
        match file.read(&mut piece).with_context(unreadable)? {
            0 => return Ok(hex::encode(sha256.finalize())),
            read => sha256.update(&piece[..read]),
        }
    }
}

/// Imports a bundle to replay from. An import starts no run.
async fn import_file(ctx: &Ctx, space: &str, path: &Path) -> anyhow::Result<String> {
    let limits = ctx.config.server.import_limits();
    let checked = wakeful_store::import::check(path, limits, |_| {}).await?;
    if checked.redacted {
        let text = "the bundle is redacted: its texts are removed, so it cannot be run again";
        anyhow::bail!("{}: {text}", path.display());
    }
    let imported = ctx.store.import(path, space, limits, |_| {}).await?;
    imported.session_id.context("an import without a session")
}

/// Formats the result for people: the comparison, then facts about the replay itself.
fn format_comparison(compared: &Compared, output: &Output, full: bool) -> String {
    let replay = &compared.replay;
    let mut text = report::text(output, &compared.diff, full);
    let mut line = |said: String| text.push_str(&format!("{}\n", printable(&said)));
    line(format!("replay   {}", replay.session_id));
    if replay.resumed {
        line("         went on where an earlier command was cut off".to_owned());
    }
    if let Some(moved) = &replay.moved {
        line(format!("cut      {moved}"));
    }
    if replay.requests_differ {
        let requests = &compared.diff.requests;
        let turn = requests.first_that_differs.unwrap_or(1);
        line(format!(
            "requests {} of {} are not the source's bytes, the first in turn {turn}",
            requests.differ,
            requests.equal + requests.differ
        ));
    }
    if !replay.unrecorded.is_empty() {
        let calls = count(replay.unrecorded.len() as i64, "call");
        let shown = replay.unrecorded.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
        line(format!("dry runs {calls} had no recorded result: {shown}"));
    }
    if let Some(reason) = &replay.failed {
        line(format!("failed   {reason}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_an_id_is_no_file() {
        assert!(is_session("sess_019a"));
        assert!(!is_session("sess_019a.jsonl"));
        assert!(!is_session("./sess_019a"));
        assert!(!is_session("bundle.jsonl"));
    }
}
