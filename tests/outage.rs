//! The database is away, full, read-only or faulty. No process ends, nothing that was acknowledged is lost,
//! nothing is sent while its result cannot be recorded, and work resumes by itself. K33 and K44 of the crash
//! matrix.

mod longer;

use crate::support::checker::check;
use crate::support::model::turns_since_user;
use crate::support::{
    Answer, Client, Database, ModelServer, Options, Process, Server, World, eventually, within,
};
use reqwest::StatusCode;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How long Postgres is away.
const AWAY: Duration = Duration::from_secs(30);

/// A model that answers each message with a mail of `body_bytes`, then with a reply.
async fn mailing_model(body_bytes: usize) -> ModelServer {
    ModelServer::start(move |body, _| {
        let arguments = json!({"to": ["ann@example.org"], "subject": "As asked", "body": noise(body_bytes)});
        match turns_since_user(body) {
            0 => Answer::call("compose_email", arguments),
            _ => Answer::text("It is on its way."),
        }
    })
    .await
}

/// Text that does not compress, so that it fills a disk.
fn noise(bytes: usize) -> String {
    let mut state = 7_u64;
    let mut letter = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        char::from(b'a' + ((state >> 33) % 26) as u8)
    };
    (0..bytes).map(|_| letter()).collect()
}

/// A process whose mail uses the channel of `fixture_worker`, which keeps a ledger.
fn options(model: &ModelServer) -> Options {
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let path = |name: &str| options.path(name).display().to_string();
    let (sent, says) = (path("sent"), path("says"));
    let options = options.env("FIXTURE_POST", "idempotent").env("FIXTURE_SENT", sent);
    options.env("FIXTURE_POST_SAYS", says)
}

/// The keys in the channel's ledger.
fn sent(options: &Options) -> Vec<String> {
    let text = std::fs::read_to_string(options.path("sent")).unwrap_or_default();
    text.lines().map(|line| line.split(' ').next().unwrap().to_owned()).collect()
}

/// The status of `/readyz`, and its text about the database.
async fn ready(client: &Client) -> (StatusCode, String) {
    let (status, body) = client.get("/readyz").await;
    (status, body["checks"]["database"].as_str().unwrap().to_owned())
}

async fn is_unready(client: &Client, word: &str) {
    eventually(&format!("/readyz to say {word:?}"), || async {
        let (status, database) = ready(client).await;
        (status == StatusCode::SERVICE_UNAVAILABLE && database.contains(word)).then_some(())
    })
    .await;
}

async fn is_ready(client: &Client) {
    eventually("/readyz to say ok", || async {
        (ready(client).await == (StatusCode::OK, "ok".to_owned())).then_some(())
    })
    .await;
}

/// Posts a message that must be refused, with this word in the reason and a time to retry.
async fn is_refused(client: &Client, word: &str) {
    is_refused_with(client, StatusCode::SERVICE_UNAVAILABLE, word).await;
}

async fn is_refused_with(client: &Client, status: StatusCode, word: &str) {
    let body = json!({"user_id": "ann", "text": "Hello?"});
    let request = client.post_request("/v1/chat/refused/messages").body(body.to_string());
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), status);
    assert!(response.headers().contains_key("retry-after"));
    let text = response.text().await.unwrap();
    assert!(text.contains(word) && text.contains("nothing was taken"), "{text}");
}

async fn every_job_ends(database: &Database) {
    eventually("every job to end", || async {
        let jobs: i64 = database.value("select count(*) from jobs where $1 <> ''", "all").await;
        (jobs == 0).then_some(())
    })
    .await;
}

/// Asserts that the channel's ledger has exactly the deliveries that the outbox calls sent.
async fn ledgers_agree(database: &Database, options: &Options) {
    let logged: Vec<String> =
        sqlx::query_scalar("select delivery_id from deliveries where status = 'sent' order by 1")
            .fetch_all(&database.pool)
            .await
            .unwrap();
    let sent: BTreeSet<String> = sent(options).into_iter().collect();
    assert_eq!(sent.into_iter().collect::<Vec<_>>(), logged);
}

/// How often the process logged `message`.
fn logged(process: &Process, message: &str) -> usize {
    process.log().lines().filter(|line| line.contains(message)).count()
}

/// The answers that one poster got.
#[derive(Default)]
struct Answers {
    /// Sessions whose messages were accepted.
    taken: BTreeSet<String>,
    /// (conversation, client_key) of refused messages.
    refused: Vec<(String, String)>,
    strange: Vec<String>,
}

async fn post(client: &Client, conversation: &str, key: &str) -> Result<reqwest::Response, reqwest::Error> {
    let body = json!({"user_id": "ann", "text": "Write to Ann.", "client_key": key});
    client.post_request(&format!("/v1/chat/{conversation}/messages")).body(body.to_string()).send().await
}

/// Posts to one new conversation after the other.
async fn keep_posting(
    client: Client,
    poster: usize,
    stop: Arc<AtomicBool>,
    told: Arc<watch::Sender<Answers>>,
) {
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        number += 1;
        let (conversation, key) = (format!("c{poster}-{number}"), format!("k{poster}-{number}"));
        let response = post(&client, &conversation, &key).await.unwrap();
        let (status, retry) = (response.status(), response.headers().contains_key("retry-after"));
        let body: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
        told.send_modify(|told| match (status, retry) {
            (StatusCode::ACCEPTED, _) => {
                told.taken.insert(body["session_id"].as_str().unwrap().to_owned());
            }
            (StatusCode::SERVICE_UNAVAILABLE, true) => told.refused.push((conversation, key)),
            _ => told.strange.push(format!("{status} {body}")),
        });
        // The pace limits the work so that the test ends in time. Correctness does not depend on it.
        let pace_ms = if status == StatusCode::ACCEPTED { 250 } else { 2000 };
        tokio::time::sleep(Duration::from_millis(pace_ms)).await;
    }
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn k33_postgres_stopped_for_30_s_under_load_loses_nothing_and_work_resumes_by_itself() {
    let mut server = Server::start().await;
    let database = Database::on(&server.url(), "pg_default").await;
    let model = mailing_model(10).await;
    let options = options(&model);
    let process = options.serve(&database).await;
    let client = process.client();
    let (stop, told) = (Arc::new(AtomicBool::new(false)), Arc::new(watch::channel(Answers::default()).0));
    let posters: Vec<_> = (0..2)
        .map(|poster| {
            tokio::spawn(keep_posting(client.clone(), poster, Arc::clone(&stop), Arc::clone(&told)))
        })
        .collect();
    let mut news = told.subscribe();
    within("a load", news.wait_for(|told| told.taken.len() > 10)).await.expect("posters post");

    server.stop().await;
    let stopped = Instant::now();
    is_unready(&client, "the database cannot be reached").await;
    let (live, _) = client.get("/healthz").await;
    assert_eq!(live, StatusCode::OK, "a process is not killed for its database's sake");
    // The promise is to survive an outage this long.
    tokio::time::sleep(AWAY.saturating_sub(stopped.elapsed())).await;
    let refused = told.borrow().refused.len();
    assert!(refused > 0, "messages during the outage are refused");
    server.start_again().await;
    let back = Instant::now();
    eventually("LISTEN", || async {
        let sql = "select count(*) from pg_stat_activity where application_name = 'wakeful' and query like 'LISTEN%'
            and state = 'idle' and datname = $1";
        let listening = sqlx::query_scalar::<_, i64>(sql).bind(&database.name).fetch_one(&database.pool).await;
        (listening.unwrap_or(0) > 0).then_some(())
    })
    .await;
    eprintln!("LISTEN was back {:?} after Postgres took connections", back.elapsed());
    is_ready(&client).await;
    let before = told.borrow().taken.len();
    let again = news.wait_for(|told| told.taken.len() > before + 5);
    within("messages to be taken again", again).await.expect("posters post");
    stop.store(true, Ordering::Relaxed);
    for poster in posters {
        poster.await.unwrap();
    }

    let mut told = told.send_replace(Answers::default());
    assert!(told.strange.is_empty(), "{:?}", told.strange);
    // A refused message may be sent again under its key. It is taken once, whatever happened to the first
    // try.
    for (conversation, key) in &told.refused {
        let response = post(&client, conversation, key).await.unwrap();
        assert!(response.status().is_success(), "{}", response.status());
        let body: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
        told.taken.insert(body["session_id"].as_str().unwrap().to_owned());
    }
    every_job_ends(&database).await;
    for session_id in &told.taken {
        let traces = check(&database, session_id, &[]).await;
        assert_eq!(traces.records.iter().filter(|record| record["role"] == "user").count(), 1);
        assert_eq!(traces.journal("GEN_SENT").len(), 1);
    }
    let sessions: i64 =
        database.value("select count(*) from conversation_sessions where $1 <> ''", "all").await;
    assert_eq!(sessions, told.taken.len() as i64, "every stored message was acknowledged");
    ledgers_agree(&database, &options).await;
    let again = model.bodies().len() as i64 - 2 * sessions;
    eprintln!("{sessions} sessions, {refused} refused while it was away, {again} model calls repeated");
    assert!(process.terminate().success(), "it is the same process");
}

#[tokio::test]
async fn a_transient_fault_in_the_steps_statement_is_tried_again_without_asking_the_model_again() {
    for code in ["40001", "40P01", "53100", "53300", "58030"] {
        let mut world = World::new("faulty", &["reserve"]).await;
        let faults = format!(
            "create sequence faults;
            create function fail() returns trigger language plpgsql as $$
            begin
                if nextval('faults') <= 3 then
                    raise exception 'as told' using errcode = '{code}';
                end if;
                return new;
            end $$;
            create trigger fail before insert on session_steps for each row execute function fail();"
        );
        sqlx::raw_sql(AssertSqlSafe(faults)).execute(&world.database.pool).await.unwrap();
        let process = world.serve().await;
        let client = process.client();
        world.begin(&client).await;
        world.finish(&client).await;
        // A commit that fails in a lane is written alone at once. So the first try meets two of the faults, and the
        // second one the third.
        assert_eq!(logged(&process, "The commit failed; trying again"), 1, "{code}");
        let asked: i64 = world.database.value("select last_value from faults where $1 <> ''", "all").await;
        assert_eq!(asked, 3 + 4, "{code}: three refusals and four steps");
        assert_eq!(world.model.bodies().len(), 4, "{code}: no answer was thrown away");
        assert_eq!(world.effects("reserve"), 2);
        is_ready(&client).await;
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn a_full_pool_is_said_in_readyz_and_refuses_in_words_until_it_is_free() {
    let database = Database::new().await;
    let model = mailing_model(10).await;
    let options = options(&model).config("[database]\nmax_connections = 8");
    let process = options.serve(&database).await;
    let client = process.client();
    let first = client.chat("first", "Write to Ann.").await;
    every_job_ends(&database).await;
    // Every statement on a session now waits and keeps a connection of the pool.
    let mut lock = PgConnection::connect(&database.url).await.unwrap();
    sqlx::raw_sql("begin; lock table conversation_sessions, jobs in access exclusive mode")
        .execute(&mut lock)
        .await
        .unwrap();
    let waiting: Vec<_> = (0..4)
        .map(|number| {
            let (client, conversation) = (client.clone(), format!("waiting{number}"));
            tokio::spawn(async move {
                // Each gives up after the time that a statement waits for a lock, and comes again.
                loop {
                    let status = post(&client, &conversation, "k").await.unwrap().status();
                    if status != StatusCode::TOO_MANY_REQUESTS && status != StatusCode::SERVICE_UNAVAILABLE {
                        return status;
                    }
                }
            })
        })
        .collect();
    is_unready(&client, "no connection to the database is free").await;
    // A further message exceeds the intake limit, or gets the turn of one that gave up. Its answer does not claim that the
    // database is away.
    let answer = post(&client, "refused", "k").await.unwrap();
    assert!(answer.headers().contains_key("retry-after"));
    let (status, text) = (answer.status(), answer.text().await.unwrap());
    assert!(matches!(status.as_u16(), 429 | 503), "{status}");
    assert!(text.contains("nothing was taken") && !text.contains("cannot be reached"), "{text}");
    sqlx::raw_sql("commit").execute(&mut lock).await.unwrap();
    is_ready(&client).await;
    for status in waiting {
        assert_eq!(status.await.unwrap(), StatusCode::ACCEPTED);
    }
    client.chat("first", "And once more.").await;
    client.wait_for(first["session_id"].as_str().unwrap(), "completed").await;
    every_job_ends(&database).await;
    ledgers_agree(&database, &options).await;
    assert!(process.terminate().success());
}

#[tokio::test]
async fn k44_a_server_that_turns_read_only_stops_the_sending_and_says_so() {
    let server = Server::start().await;
    let database = Database::on(&server.url(), "pg_default").await;
    let model = mailing_model(10).await;
    let options = options(&model);
    std::fs::write(options.path("says"), "later the line is busy").unwrap();
    let process = options.serve(&database).await;
    let client = process.client();
    let session = client.chat("mail", "Write to Ann.").await;
    let session_id = session["session_id"].as_str().unwrap();
    client.wait_for(session_id, "completed").await;
    process.wait_for_log("Delivering failed").await;
    is_ready(&client).await;

    server.run(&["alter system set default_transaction_read_only = on", "select pg_reload_conf()"]).await;
    is_unready(&client, "read-only").await;
    // From here on a send would succeed but could not be recorded.
    std::fs::write(options.path("says"), "").unwrap();
    is_refused(&client, "read-only").await;
    let claims = logged(&process, "Claiming failed");
    eventually("more claims to be refused", || async {
        (logged(&process, "Claiming failed") >= claims + 4).then_some(())
    })
    .await;
    assert!(sent(&options).is_empty(), "{:?}", sent(&options));
    let shown = client.session(session_id).await;
    assert_eq!(shown["status"], "completed", "stored data can still be read");

    server.run(&["alter system reset default_transaction_read_only", "select pg_reload_conf()"]).await;
    is_ready(&client).await;
    every_job_ends(&database).await;
    assert_eq!(sent(&options).len(), 1);
    ledgers_agree(&database, &options).await;
    check(&database, session_id, &[]).await;
    assert!(process.terminate().success());
}

/// A small filesystem in memory. Dropping it unmounts it.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(dir: &Path) -> SmallDisk {
        std::fs::create_dir(dir).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=48m", "tmpfs"]).arg(dir);
        let mounted = mount.output().expect("mount");
        assert!(mounted.status.success(), "{}", String::from_utf8_lossy(&mounted.stderr));
        SmallDisk(dir.to_owned())
    }

    fn ballast(&self) -> PathBuf {
        self.0.join("ballast")
    }

    /// Fills the disk to the last byte.
    fn fill(&self) {
        use std::io::Write;
        let mut file = std::fs::File::create(self.ballast()).unwrap();
        while file.write_all(&[7; 4096]).is_ok() {}
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily, because the server may still have files open there.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[tokio::test]
#[ignore = "needs root, for a filesystem of its own: make soak"]
async fn k44_a_full_disk_stops_the_sending_and_says_so() {
    let server = Server::start().await;
    let disk = SmallDisk::mount(&server.dir().join("small"));
    // Only the database's files are on it: a server stops when its log's disk is full, which another test
    // covers.
    let data = disk.0.join("data");
    std::fs::create_dir(&data).unwrap();
    give_to_server(&server, &data).await;
    let database = Database::on(&server.url(), "small").await;
    let model = mailing_model(200_000).await;
    let options = options(&model);
    let process = options.serve(&database).await;
    let client = process.client();
    model.hold();
    let session = client.chat("mail", "Write to Ann.").await;
    let session_id = session["session_id"].as_str().unwrap();
    model.asked(1).await;
    disk.fill();
    model.release();

    process.wait_for_log("The commit failed; trying again").await;
    is_unready(&client, "its disk is full").await;
    assert!(logged(&process, "No space left on device") > 0, "{}", process.log());
    assert!(sent(&options).is_empty());
    let tried = logged(&process, "The commit failed; trying again");
    assert!(tried < 10, "it backs off: {tried}");

    std::fs::remove_file(disk.ballast()).unwrap();
    client.wait_for(session_id, "completed").await;
    every_job_ends(&database).await;
    is_ready(&client).await;
    assert_eq!(sent(&options).len(), 1);
    ledgers_agree(&database, &options).await;
    check(&database, session_id, &[]).await;
    assert!(process.terminate().success());
}

/// Gives the folder to the server's user, and makes the tablespace `small` in it.
async fn give_to_server(server: &Server, data: &Path) {
    use std::os::unix::fs::{MetadataExt, chown};
    let mut files = std::fs::read_dir(server.dir()).unwrap().flatten().map(|entry| entry.path());
    let pgdata = files.find(|path| path.join("PG_VERSION").exists()).unwrap();
    let owner = std::fs::metadata(pgdata).unwrap();
    chown(data, Some(owner.uid()), Some(owner.gid())).unwrap();
    server.run(&[&format!("create tablespace small location '{}'", data.display())]).await;
}

#[tokio::test]
async fn a_database_that_fails_a_step_again_and_again_is_seen_and_after_a_while_the_run_fails() {
    for (code, transient) in [("40001", true), ("XX000", false)] {
        let mut world = World::new("refused", &["reserve"]).await;
        let refuse = format!(
            "create function refuse() returns trigger language plpgsql as $$
            begin raise exception 'refused as told' using errcode = '{code}'; end $$;
            create trigger refuse before insert on session_steps for each row execute function refuse();"
        );
        sqlx::raw_sql(AssertSqlSafe(refuse)).execute(&world.database.pool).await.unwrap();
        let process = world.serve().await;
        let client = process.client();
        world.begin(&client).await;
        // The next claim after this one is the last.
        let seen = "select count(*) from jobs where last_error like '%refused as told%' and $1 <> ''";
        eventually("the fault on the job's row", || async {
            (world.database.value::<i64>(seen, "all").await == 1).then_some(())
        })
        .await;
        if !transient {
            sqlx::query("update jobs set stuck = 19").execute(&world.database.pool).await.unwrap();
            let session = client.wait_for(&world.session_id, "failed").await;
            let error = session["error"].as_str().unwrap();
            assert!(error.contains("refused as told") && error.contains("Remedy:"), "{error}");
        }
        process.kill();
    }
}
