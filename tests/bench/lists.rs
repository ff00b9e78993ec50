//! A large installation: each list, search and page of the console, over HTTP, in the runtime role; and what open pages cost.

use crate::fixture::Database;
use crate::process::{self, Serve, Site};
use crate::report::{Paint, Progress, number};
use crate::server::Server;
use anyhow::{Context, Result, ensure};
use reqwest::{Client, Url};
use serde::Serialize;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

const FILL: &str = include_str!("lists/fill.sql");
const REQUESTS: &str = include_str!("lists/requests.txt");
/// In the longest session.
const MESSAGES: usize = 20_000;
/// Whose lists are measured: an admin of the installation, and operators of a space with a fifth of all sessions and of one
/// with 40 old ones.
const SPACES: [&str; 2] = ["large", "tiny"];

/// How long one request took, in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Looked {
    pub who: &'static str,
    pub path: &'static str,
    pub p50: f64,
    pub p95: f64,
    pub most: f64,
}

/// What the bench measured of a large installation.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Lists {
    pub sessions: usize,
    pub database_gb: f64,
    pub fill_s: f64,
    pub times: usize,
    pub looked: Vec<Looked>,
    /// Open pages of sessions that are at rest, and of lists: how many, and what they cost the server and the process, in percent of
    /// a core.
    pub open: Vec<Open>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Open {
    pub name: &'static str,
    pub pages: usize,
    pub database_percent: f64,
    pub process_percent: f64,
    pub statements_per_s: f64,
}

/// One who looks.
struct Visitor {
    who: &'static str,
    token: String,
    /// What stands for the words in braces.
    words: Vec<(&'static str, String)>,
}

struct Request {
    visitor: usize,
    path: &'static str,
    url: String,
    ms: Vec<f64>,
}

pub async fn measure(
    server: &mut Server,
    sessions: usize,
    times: usize,
    progress: &mut Progress,
) -> Result<Lists> {
    let database = Database::create(server.url(), "lists").await?;
    progress.say(&format!("filling a database with {sessions} sessions"));
    let began = Instant::now();
    let fill = FILL.replace("{sessions}", &sessions.to_string()).replace("{messages}", &MESSAGES.to_string());
    let mut owner = database.connect().await?;
    sqlx::raw_sql(AssertSqlSafe(fill)).execute(&mut owner).await?;
    sqlx::raw_sql("vacuum analyze").execute(&mut owner).await?;
    let mut lists = Lists { sessions, times, fill_s: began.elapsed().as_secs_f64(), ..Lists::default() };
    let size = "select pg_database_size(current_database())::float8 / 1e9";
    lists.database_gb = sqlx::query_scalar(size).fetch_one(&mut owner).await?;
    let agents: Vec<String> =
        sqlx::query_scalar("select distinct agent from conversation_sessions").fetch_all(&mut owner).await?;
    let site = Site::with_agents(agents.iter().map(String::as_str))?;
    let api = site.serve(&database.runtime_url().await?, "api").await?;
    lists.looked = look(&api, &mut owner, sessions, times, progress).await?;
    progress.say("open pages");
    lists.open = open_pages(server, &database, &api, &mut owner).await?;
    owner.close().await?;
    api.kill().await?;
    database.remove().await?;
    Ok(lists)
}

async fn look(
    api: &Serve,
    owner: &mut PgConnection,
    sessions: usize,
    times: usize,
    progress: &mut Progress,
) -> Result<Vec<Looked>> {
    let (client, base) = (Client::builder().no_proxy().build()?, api.url()?);
    let mut visitors = Vec::new();
    for who in std::iter::once("installation").chain(SPACES) {
        let space = if who == "installation" { "default" } else { who };
        let wish = match who {
            "installation" => json!({"scope": "admin"}),
            space => json!({"scope": "operate", "space": space}),
        };
        let made = client.post(format!("{base}/v1/tokens")).json(&wish).send().await?.error_for_status()?;
        let made: Value = made.json().await?;
        let token = made["token"].as_str().context("a token")?.to_owned();
        visitors.push(Visitor { who, token, words: words(owner, space, sessions).await? });
    }
    let mut requests = Vec::new();
    for line in REQUESTS.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (deep, line) = line.strip_prefix('+').map_or((false, line), |line| (true, line));
        let (whole, path) = line.strip_prefix('!').map_or((false, line), |line| (true, line));
        for (at, visitor) in visitors.iter().enumerate() {
            // The console's pages ask the same lists, and need a login: without a token one is this machine's.
            if at > 0 && (whole || path.starts_with("/console")) {
                continue;
            }
            let filled =
                visitor.words.iter().fold(path.to_owned(), |path, (word, value)| path.replace(word, value));
            if filled.contains("none") {
                continue;
            }
            let mut url = format!("{base}{filled}");
            if deep {
                match after_ten(&client, &visitor.token, &url).await? {
                    Some(cursor) => url = cursor,
                    None => continue,
                }
            }
            requests.push(Request { visitor: at, path, url, ms: Vec::new() });
        }
    }
    // Every connection of the process meets every statement, as it does in production: so the requests come in turns.
    for round in 0..=times {
        progress.say(&format!("{} requests, round {round} of {times}", requests.len()));
        for request in &mut requests {
            let began = Instant::now();
            let mut asked = client.get(&request.url);
            if !request.path.starts_with("/console") {
                asked = asked.bearer_auth(&visitors[request.visitor].token);
            }
            let answer = asked.send().await?;
            let status = answer.status();
            let body = answer.bytes().await?;
            ensure!(status.is_success(), "{}: {status} {}", request.url, String::from_utf8_lossy(&body));
            // The first round reads from the disk and prepares.
            if round > 0 {
                request.ms.push(began.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    Ok(requests
        .into_iter()
        .map(|mut request| {
            request.ms.sort_by(f64::total_cmp);
            let at = |share: f64| {
                let place = (request.ms.len() as f64 * share).ceil() as usize;
                request.ms[place.clamp(1, request.ms.len()) - 1]
            };
            let who = visitors[request.visitor].who;
            Looked { who, path: request.path, p50: at(0.5), p95: at(0.95), most: at(1.0) }
        })
        .collect())
}

/// The page after ten of 500. `None` if there are fewer.
async fn after_ten(client: &Client, token: &str, url: &str) -> Result<Option<String>> {
    let (mut page, mut next) = (Url::parse(url)?, Url::parse(url)?);
    page.query_pairs_mut().append_pair("limit", "500");
    let first = page.clone();
    for _ in 0..10 {
        let body: Value =
            client.get(page).bearer_auth(token).send().await?.error_for_status()?.json().await?;
        let cursor = match &body["next"] {
            Value::Null => return Ok(None),
            Value::String(cursor) => cursor.clone(),
            other => other.to_string(),
        };
        page = first.clone();
        page.query_pairs_mut().append_pair("cursor", &cursor);
        next = Url::parse(url)?;
        next.query_pairs_mut().append_pair("cursor", &cursor);
    }
    Ok(Some(next.into()))
}

/// What stands for the words in braces, in a space.
async fn words(
    owner: &mut PgConnection,
    space: &str,
    sessions: usize,
) -> Result<Vec<(&'static str, String)>> {
    let nth = "order by session_id offset 20 limit 1";
    let of = |table: &str, column: &str, order: &str| {
        format!("select {column} from {table} where space_id = '{space}' {order} limit 1")
    };
    let asked = [
        (
            "{deep}",
            format!(
                "select substr(session_id, 6) from conversation_sessions order by session_id offset {} limit 1",
                sessions / 2
            ),
        ),
        ("{long}", "select session_id from conversation_sessions where agent = 'long'".to_owned()),
        (
            "{longc}",
            "select split_part(conversation_id, '/', 2) from conversation_sessions where agent = 'long'"
                .to_owned(),
        ),
        ("{since}", "select to_char(now() - interval '1 day', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')".to_owned()),
        (
            "{then}",
            format!(
                "select to_char(now() - interval '{} s', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')",
                sessions * 15
            ),
        ),
        ("{audit}", "select (max(audit_id) / 2)::text from audit_log".to_owned()),
        (
            "{one}",
            format!(
                "select session_id from conversation_sessions where space_id = '{space}' and status = 'completed' {nth}"
            ),
        ),
        (
            "{c}",
            format!(
                "select split_part(conversation_id, '/', 2) from conversation_sessions where space_id = '{space}' and status = 'completed' {nth}"
            ),
        ),
        ("{error}", of("error_groups", "fingerprint", "order by last_at")),
        ("{batch}", of("batches", "batch_id", "order by members desc")),
        ("{schedule}", of("schedules", "schedule_id", "")),
    ];
    let mut words = Vec::new();
    sqlx::raw_sql("set time zone 'UTC'").execute(&mut *owner).await?;
    for (word, sql) in asked {
        let found: Option<String> =
            sqlx::query_scalar(AssertSqlSafe(sql)).fetch_optional(&mut *owner).await?;
        words.push((word, found.unwrap_or_else(|| "none".to_owned())));
    }
    Ok(words)
}

/// 200 pages that stay open while nothing happens: of sessions, which follow their journals; and of lists, which look again by
/// themselves.
async fn open_pages(
    server: &mut Server,
    database: &Database,
    api: &Serve,
    owner: &mut PgConnection,
) -> Result<Vec<Open>> {
    const PAGES: usize = 200;
    const SECONDS: f64 = 20.0;
    process::raise_descriptors()?;
    let (client, base, pid) = (Client::builder().no_proxy().build()?, api.url()?, api.pid()?);
    let ids: Vec<String> = sqlx::query_scalar(
        "select session_id from conversation_sessions where space_id = 'default' and status = 'completed' order by session_id desc limit $1",
    )
    .bind(PAGES as i64)
    .fetch_all(&mut *owner)
    .await?;
    let mut open = Vec::new();
    for name in ["of sessions, by server-sent events", "of the list of sessions", "of the overview"] {
        let mut tasks = tokio::task::JoinSet::new();
        let (opens, mut opened) = tokio::sync::mpsc::channel(ids.len().max(1));
        for (n, id) in ids.iter().enumerate() {
            let (client, base, id, opens) = (client.clone(), base.clone(), id.clone(), opens.clone());
            tasks.spawn(async move {
                // People do not open their pages at one moment.
                tokio::time::sleep(Duration::from_secs_f64(5.0 * n as f64 / PAGES as f64)).await;
                if name.starts_with("of sessions") {
                    client.get(format!("{base}/console/sessions/{id}")).send().await?.bytes().await?;
                    let stream = format!("{base}/console/sessions/{id}/stream?after=1000000");
                    let stream = client.get(stream).send().await?.error_for_status()?;
                    let mut bytes = stream;
                    opens.send(()).await?;
                    while bytes.chunk().await?.is_some() {}
                    anyhow::bail!("the stream ended");
                }
                let path = if name.ends_with("sessions") { "sessions" } else { "" };
                let mut ticks = tokio::time::interval(Duration::from_secs(5));
                let mut opens = Some(opens);
                loop {
                    ticks.tick().await;
                    // As the page's script asks.
                    let look = client.get(format!("{base}/console/{path}")).header("x-look-again", "1");
                    let page = look.send().await?;
                    page.error_for_status()?.bytes().await?;
                    if let Some(opens) = opens.take() {
                        opens.send(()).await?;
                    }
                }
            });
        }
        for _ in 0..ids.len() {
            opened.recv().await.context("a page does not open")?;
        }
        let (before, meter) = (process::cpu_seconds(pid), server.start(database).await?);
        tokio::time::sleep(Duration::from_secs_f64(SECONDS)).await;
        let spent = server.stop(database, meter).await?;
        let own = process::cpu_seconds(pid) - before;
        if let Some(ended) = tasks.try_join_next() {
            let ended: Result<()> = ended?;
            ended.context("a page was closed")?;
        }
        tasks.shutdown().await;
        open.push(Open {
            name,
            pages: PAGES,
            database_percent: 100.0 * spent.cpu_s / SECONDS,
            process_percent: 100.0 * own / SECONDS,
            statements_per_s: spent.statements.unwrap_or(f64::NAN) / SECONDS,
        });
    }
    Ok(open)
}

impl Lists {
    fn head(&self) -> String {
        format!(
            "{} sessions, one of {MESSAGES} messages: {} GB, filled and analysed in {} s; {} requests, each {} times after one that is not counted",
            self.sessions,
            number(self.database_gb),
            number(self.fill_s),
            self.looked.len(),
            self.times
        )
    }

    /// The slowest first.
    fn slowest(&self) -> Vec<&Looked> {
        let mut slowest: Vec<&Looked> = self.looked.iter().collect();
        slowest.sort_by(|one, other| other.p95.total_cmp(&one.p95));
        slowest
    }
}

pub fn print(paint: &Paint, lists: &Lists) {
    if lists.looked.is_empty() {
        return;
    }
    println!("\n  {}\n  {}", paint.bold("Lists, searches and pages"), lists.head());
    println!("  {:>9} {:>9} {:>9}  ms", "p50", "p95", "most");
    for one in lists.slowest() {
        println!(
            "  {:>9} {:>9} {:>9}  {:<13}{}",
            number(one.p50),
            number(one.p95),
            number(one.most),
            one.who,
            one.path
        );
    }
    for open in &lists.open {
        println!(
            "  {} open pages {}: {} % of a core for Postgres, {} % for the process, {} statements a second",
            open.pages,
            open.name,
            number(open.database_percent),
            number(open.process_percent),
            number(open.statements_per_s)
        );
    }
}

pub fn write_markdown(text: &mut String, lists: &Lists) -> Result<()> {
    if lists.looked.is_empty() {
        return Ok(());
    }
    let over = lists.looked.iter().filter(|one| one.p95 > 100.0).count();
    write!(
        text,
        "\n{}; {over} of them above 100 ms.\n\n| p50 ms | p95 ms | most ms | token of | the 40 slowest |\n|---|---|---|---|---|\n",
        lists.head()
    )?;
    for one in lists.slowest().into_iter().take(40) {
        let path = one.path.replace('|', "\\|");
        writeln!(
            text,
            "| {} | {} | {} | {} | `{path}` |",
            number(one.p50),
            number(one.p95),
            number(one.most),
            one.who
        )?;
    }
    write!(text, "\n| 200 open pages | Postgres | the process | statements a second |\n|---|---|---|---|\n")?;
    for open in &lists.open {
        let (server, own) = (number(open.database_percent), number(open.process_percent));
        writeln!(
            text,
            "| {} | {server} % of a core | {own} % | {} |",
            open.name,
            number(open.statements_per_s)
        )?;
    }
    Ok(())
}
