//! One storm: sessions work while processes and connections break. Then nothing breaks any more, and the
//! storm waits until all work is done.

use super::fleet::Fleet;
use super::plan::{Blow, Message, Plan};
use super::summary::Summary;
use super::verdict;
use crate::support::model::turns_since_user;
use crate::support::proxy::Proxy;
use crate::support::server::Server;
use crate::support::{Answer, Client, Database, ModelServer, Options, checker, timeout};
use futures::FutureExt;
use futures::future::join_all;
use reqwest::StatusCode;
use serde_json::{Value, json};
use sqlx::PgPool;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A short lease, so that a dead worker's jobs are soon taken up.
pub const LEASE: Duration = Duration::from_secs(2);

/// What a failed storm leaves for its reader.
pub struct Wrong {
    pub reason: String,
    /// The processes' logs and the database's rows.
    pub logs: PathBuf,
}

/// Runs the storm of `plan` on a server that no other test uses meanwhile.
pub async fn run(plan: Plan, server: &mut Server) -> Result<Summary, Wrong> {
    let seed = plan.seed;
    let began = Instant::now();
    let database = Database::on(&server.url(), "pg_default").await;
    let proxy = Proxy::start(&database.url);
    let model = ModelServer::start(|body, _| say(body)).await;
    model.pace(Duration::from_millis(60));
    let options = Options::new()
        .model("openai/test")
        // Allow many attempts, so that no job fails here. Other tests check the limit.
        .config("[agents.default.limits]\nattempts = 100")
        .env("OPENAI_BASE_URL", &model.url)
        .env("FIXTURE_TAKE_MS", "60");
    let options = if plan.at_defaults {
        options
    } else {
        options
            .env("WAKEFUL_QUEUE__LEASE_S", LEASE.as_secs().to_string())
            .env("WAKEFUL_QUEUE__HEARTBEAT_S", "1")
            .arg("--concurrency=2")
    };
    let mut fleet = Fleet::new(&plan, &options, &proxy.url);
    let mut storm = Storm { plan: &plan, fleet: &mut fleet, database: &database, proxy: &proxy, server };
    let verdict = async {
        let sessions = storm.rage().await;
        let unwell = storm.fleet.end().await;
        assert!(unwell.is_empty(), "after the storm a process does not end well: {unwell:?}");
        let mut summary = storm.fleet.summary.clone();
        summary.took = began.elapsed();
        verdict::check(verdict::Left {
            plan: &plan,
            sessions: &sessions,
            database: &database,
            bodies: &model.bodies(),
            options: &options,
            logs: &storm.fleet.logs,
            summary: &mut summary,
        })
        .await;
        summary
    };
    let ended = AssertUnwindSafe(verdict).catch_unwind().await;
    fleet.abandon();
    match ended {
        Ok(summary) => Ok(summary),
        Err(panic) => {
            let reason = panic.downcast_ref::<String>().cloned();
            let reason = reason.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            let logs = keep(seed, &fleet, &database, &model, &options).await;
            Err(Wrong { reason: reason.unwrap_or_else(|| "it panicked".to_owned()), logs })
        }
    }
}

/// What the model answers: the message's plan, turn by turn, and then its reply.
fn say(body: &Value) -> Answer {
    let messages = body["messages"].as_array().expect("messages");
    let text =
        messages.iter().rfind(|message| message["role"] == "user").expect("a user's message")["content"]
            .as_str()
            .expect("text");
    let (name, turns) = text.split_once(" do ").unwrap_or((text, ""));
    let turn = turns.split(';').filter(|turn| !turn.is_empty()).nth(turns_since_user(body));
    let Some(turn) = turn else { return Answer::text(&format!("This ends {name}.")) };
    let calls = turn.split('+').map(|tool| {
        let arguments = match tool {
            "charge" => json!({"cents": 1250}),
            "reserve" => json!({"persons": 2}),
            "compose_email" => json!({"to": ["ann@example.org"], "subject": name, "body": "It is yours."}),
            "ask_user" => json!({"question": format!("What of {name}?")}),
            _ => json!({}),
        };
        (tool.to_owned(), arguments.to_string())
    });
    Answer::Calls(calls.collect())
}

struct Storm<'a> {
    plan: &'a Plan,
    fleet: &'a mut Fleet,
    database: &'a Database,
    proxy: &'a Proxy,
    server: &'a mut Server,
}

/// A job that waits for longer than this after its worker's death is shown.
const SLOW: Duration = Duration::from_secs(3);

/// A job whose worker died while it held the lease.
struct Held {
    job_id: i64,
    lease: i64,
    since: Instant,
    /// Its row as it was seen last, once it has waited for long.
    row: Option<Value>,
}

impl Storm<'_> {
    /// Runs until all messages are posted and all work is done. Returns the sessions' ids in the plan's
    /// order.
    async fn rage(&mut self) -> Vec<String> {
        self.fleet.start(self.plan).await;
        let began = Instant::now();
        let api = self.fleet.api.subscribe();
        let posting = self.plan.sessions.iter().enumerate().map(|(number, messages)| {
            let api = api.clone();
            async move { post_all(api, &format!("c{number}"), messages, began).await }
        });
        let posting = join_all(posting);
        tokio::pin!(posting);
        let mut sessions: Option<Vec<String>> = None;
        let mut blows = self.plan.blows.iter().peekable();
        let mut refused_until: Option<Instant> = None;
        let mut held: Vec<Held> = Vec::new();
        let mut answering: Option<JoinHandle<()>> = None;
        let mut tick = tokio::time::interval(Duration::from_millis(20));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        for look in 0.. {
            tokio::select! {
                ids = &mut posting, if sessions.is_none() => sessions = Some(ids),
                _ = tick.tick() => {}
            }
            let mut died = Vec::new();
            while let Some((_, blow)) = blows.next_if(|(at, _)| *at <= began.elapsed()) {
                if let Blow::Refuse(how_long) = blow {
                    refused_until = Some(Instant::now() + *how_long);
                }
                died.extend(self.strike(blow).await);
            }
            if refused_until.take_if(|until| *until <= Instant::now()).is_some() {
                self.proxy.refuse(false);
            }
            died.extend(self.fleet.look_after(self.plan));
            for pid in died {
                held.extend(self.held_by(pid).await);
            }
            if look % 3 == 0 && !held.is_empty() {
                self.notice_resumed(&mut held).await;
            }
            if look % 10 == 0 {
                // An answer may wait for a stopped API. Nothing else waits for it.
                if answering.as_ref().is_none_or(JoinHandle::is_finished) {
                    answering = Some(tokio::spawn(answer_questions(self.database.pool.clone(), api.clone())));
                }
                if sessions.is_some() && blows.peek().is_none() && self.nothing_is_owed().await {
                    break;
                }
            }
            if began.elapsed() > self.plan.window + timeout() {
                panic!("it does not come to rest: {:#}", self.owed().await);
            }
        }
        self.proxy.clear_cuts();
        self.fleet.summary.cut_statements = self.proxy.cut_count();
        sessions.expect("all was said")
    }

    /// Returns the pid of the worker that this blow killed, if any.
    async fn strike(&mut self, blow: &Blow) -> Option<i32> {
        match blow {
            Blow::KillWorker(worker) => return self.fleet.kill(Some(*worker)),
            Blow::KillApi => return self.fleet.kill(None),
            Blow::StopWorker(worker, how_long) => self.fleet.stop(*worker, Instant::now() + *how_long),
            Blow::TerminateBackends(one_in) => {
                let sql = "select count(pg_terminate_backend(pid)) from pg_stat_activity
                    where datname = current_database() and application_name = 'wakeful' and pid % $1 = 0";
                let ended: Result<i64, _> =
                    sqlx::query_scalar(sql).bind(one_in).fetch_one(&self.database.pool).await;
                self.fleet.summary.cuts += usize::from(ended.is_ok_and(|ended| ended > 0));
            }
            Blow::Cut => {
                self.proxy.cut();
                self.fleet.summary.cuts += 1;
            }
            Blow::Refuse(_) => {
                self.proxy.refuse(true);
                self.proxy.cut();
                self.fleet.summary.cuts += 1;
            }
            Blow::CutStatement(text, at) => self.proxy.cut_when(text, *at),
            Blow::RestartPostgres => {
                self.server.restart().await;
                self.fleet.summary.restarts += 1;
            }
        }
        None
    }

    async fn held_by(&self, pid: i32) -> Vec<Held> {
        let since = Instant::now();
        let sql = "select job_id, lease from jobs
            where lease is not null and worker_id in (select worker_id from workers where pid = $1)";
        let rows: Vec<(i64, i64)> =
            sqlx::query_as(sql).bind(pid).fetch_all(&self.database.pool).await.unwrap_or_default();
        rows.into_iter().map(|(job_id, lease)| Held { job_id, lease, since, row: None }).collect()
    }

    /// Records which of these jobs were resumed: another worker has claimed the job, or has given it back for a while, or it is
    /// gone. Before that claim it has no lease for a moment, and could be claimed.
    async fn notice_resumed(&mut self, held: &mut Vec<Held>) {
        let sql = "select job_id, lease, run_at > clock_timestamp(), to_jsonb(jobs) from jobs";
        let rows = sqlx::query_as::<_, (i64, Option<i64>, bool, Value)>(sql);
        let Ok(rows) = rows.fetch_all(&self.database.pool).await else { return };
        held.retain_mut(|one| {
            let row = rows.iter().find(|(job_id, ..)| *job_id == one.job_id);
            let waits = row.is_some_and(|(_, lease, later, _)| match lease {
                Some(lease) => *lease == one.lease,
                None => !later,
            });
            let since = one.since.elapsed();
            if waits {
                one.row = row.map(|(.., row)| row.clone()).filter(|_| since > SLOW);
            } else {
                if let Some(row) = &one.row {
                    eprintln!("a job waited for {since:?}; at last its row was {row}");
                }
                self.fleet.summary.to_resume.push(since);
            }
            waits
        });
    }

    async fn nothing_is_owed(&self) -> bool {
        let sql = "select not exists (select from jobs) and not exists (select from conversation_sessions
            where status not in ('completed', 'failed', 'needs_attention'))";
        sqlx::query_scalar(sql).fetch_one(&self.database.pool).await.unwrap_or(false)
    }

    async fn owed(&self) -> Value {
        let sql = "select json_build_object(
            'now', clock_timestamp(),
            'jobs', (select json_agg(jobs) from jobs),
            'workers', (select json_agg(workers) from workers),
            'sessions', (select json_agg(json_build_array(session_id, conversation_id, status, error))
                from conversation_sessions))";
        sqlx::query_scalar(sql).fetch_one(&self.database.pool).await.unwrap_or(Value::Null)
    }
}

/// Posts a session's messages, each until it is taken. Returns the session's id.
/// Answers each open question. The key comes from the question, so posting twice gives one answer.
async fn answer_questions(pool: PgPool, api: watch::Receiver<Option<String>>) {
    let sql = "select conversation_id, call_id from tool_calls join conversation_sessions using (session_id)
        where tool_calls.status = 'waiting' and conversation_sessions.status = 'waiting_input'";
    let rows: Vec<(String, String)> = sqlx::query_as(sql).fetch_all(&pool).await.unwrap_or_default();
    for (conversation, call_id) in rows {
        let conversation = conversation.trim_start_matches("default/");
        let key = format!("{conversation}-{call_id}");
        post(&api, conversation, &key, &format!("The answer to {call_id}")).await;
    }
}

async fn post_all(
    mut api: watch::Receiver<Option<String>>,
    conversation: &str,
    messages: &[Message],
    began: Instant,
) -> String {
    let mut session_id = String::new();
    for message in messages {
        // This sleep is the storm's timetable.
        tokio::time::sleep(message.at.saturating_sub(began.elapsed())).await;
        session_id = loop {
            // The fleet outlives the clients, so the address comes.
            let _ = api.wait_for(Option::is_some).await;
            if let Some(id) = post(&api, conversation, &message.key, &message.text).await {
                break id;
            }
            // A client pauses before it tries again, unless the API comes up elsewhere. No test depends on the length.
            let _ = tokio::time::timeout(Duration::from_millis(50), api.changed()).await;
        };
    }
    session_id
}

/// Tries once. Returns the session's id if the message was taken, now or before.
async fn post(
    api: &watch::Receiver<Option<String>>,
    conversation: &str,
    key: &str,
    text: &str,
) -> Option<String> {
    let url = api.borrow().clone()?;
    let body = json!({"user_id": "ann", "text": text, "client_key": key});
    let request = Client::new(&url).post_request(&format!("/v1/chat/{conversation}/messages"));
    let answer = async {
        let response = request.body(body.to_string()).send().await.ok()?;
        let status = response.status();
        let text = response.text().await.ok()?;
        // A worker that was stopped within a commit keeps its sessions locked for some seconds. Messages to them wait for
        // all places of the intake, and the API tells others to come again.
        let comes_again = status == StatusCode::TOO_MANY_REQUESTS;
        assert!(comes_again || !status.is_client_error(), "a good message is refused: {text}");
        let answer: Value = serde_json::from_str(&text).ok().filter(|_| status.is_success())?;
        Some(answer["session_id"].as_str()?.to_owned())
    };
    tokio::time::timeout(Duration::from_secs(5), answer).await.ok().flatten()
}

/// Saves everything about a failed storm: a log per process, the rows, the model's requests, the effects.
async fn keep(
    seed: u64,
    fleet: &Fleet,
    database: &Database,
    model: &ModelServer,
    options: &Options,
) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("storm-{seed}"));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a folder for the logs");
    for (number, (name, log)) in fleet.logs.iter().enumerate() {
        std::fs::write(dir.join(format!("{number:02}-{name}.log")), log).expect("a log");
    }
    let rows = AssertUnwindSafe(checker::dump(database)).catch_unwind().await.unwrap_or_default();
    for (table, rows) in rows {
        let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
        std::fs::write(dir.join(format!("{table}.jsonl")), lines.join("\n")).expect("the rows");
    }
    std::fs::write(dir.join("requests.jsonl"), model.bodies().join("\n")).expect("the requests");
    std::fs::write(dir.join("effects"), options.effects().join("\n")).expect("the effects");
    dir
}
