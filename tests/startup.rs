//! A process that cannot start exits with a status for scripts and a message that says what to do. stdout is
//! for data.

use crate::support::{Answer, Database, ModelServer, Options};
use std::process::ExitStatus;

const USAGE: i32 = 2;
const UNAVAILABLE: i32 = 6;
/// Nothing listens at port 1.
const NO_SERVER: &str = "postgres://nobody:s3cret@127.0.0.1:1/none";

struct Ended {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

impl Ended {
    /// Asserts that it ended with `code`, wrote no data, and said each of `says` on stderr.
    fn refuses(&self, code: i32, says: &[&str]) {
        assert_eq!(self.status.code(), Some(code), "{}", self.stderr);
        assert_eq!(self.stdout, "", "messages are no data");
        for text in says {
            assert!(self.stderr.contains(text), "{text:?} is not in:\n{}", self.stderr);
        }
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
    }
}

async fn run(options: &Options, database_url: &str) -> Ended {
    let (status, process) = options.spawn(database_url).ended().await;
    Ended { status, stdout: process.output(), stderr: process.log() }
}

fn command(args: &[&str]) -> Options {
    let mut options = Options::new();
    options.args = args.iter().map(|arg| (*arg).to_owned()).collect();
    options
}

/// A server that needs nothing but its database.
fn serve() -> Options {
    Options::new().model("scripted/demo")
}

#[tokio::test]
async fn a_wrong_configuration_names_the_key_and_the_nearest_known_one() {
    let wrong = serve().config("[qeue]\nconcurrency = 1");
    run(&wrong, NO_SERVER).await.refuses(USAGE, &["qeue", "did you mean queue?", "wakeful.toml:"]);
    let wrong = serve().env("WAKEFUL_QUEUE__CONCURENCY", "4");
    run(&wrong, NO_SERVER)
        .await
        .refuses(USAGE, &["WAKEFUL_QUEUE__CONCURENCY", "did you mean queue.concurrency?"]);
    let wrong = serve().config("[queue]\nconcurrency = 0");
    run(&wrong, NO_SERVER).await.refuses(USAGE, &["queue.concurrency"]);
    let wrong = serve().config("this is no toml");
    run(&wrong, NO_SERVER).await.refuses(USAGE, &["wakeful.toml:"]);
    let wrong = Options::new().model("openai/test");
    run(&wrong, NO_SERVER).await.refuses(USAGE, &["OPENAI_API_KEY"]);
}

#[tokio::test]
async fn a_tool_that_nobody_has_and_a_flag_that_nobody_knows_are_usage_errors() {
    let wrong =
        Options::new().config("[agents.default]\nmodel = \"scripted/demo\"\ntools = [\"compose_emial\"]");
    run(&wrong, NO_SERVER).await.refuses(USAGE, &["compose_emial", "agents.default.tools"]);
    let wrong = command(&["serve", "--rolls", "api"]);
    run(&wrong, NO_SERVER).await.refuses(USAGE, &["--rolls"]);
}

#[tokio::test]
async fn serve_without_a_database_url_has_no_fallback() {
    let mut options = serve();
    options.env.insert("DATABASE_URL".into(), String::new());
    run(&options, "").await.refuses(USAGE, &["DATABASE_URL"]);
    let mut options = command(&["migrate"]);
    options.env.insert("DATABASE_URL".into(), String::new());
    run(&options, "").await.refuses(USAGE, &["DATABASE_URL"]);
}

#[tokio::test]
async fn a_server_for_everybody_wants_a_token() {
    let database = Database::new().await;
    let open = serve().arg("--listen=0.0.0.0:0");
    run(&open, &database.url).await.refuses(USAGE, &["0.0.0.0", "WAKEFUL_TOKEN"]);
    let guarded = open.env("WAKEFUL_TOKEN", "s3cret-token-of-the-tests").serve(&database).await;
    assert!(guarded.terminate().success());
}

#[tokio::test]
async fn a_database_that_does_not_answer_is_unavailable() {
    let serve = run(&serve(), NO_SERVER).await;
    serve.refuses(UNAVAILABLE, &["refused"]);
    assert!(!serve.stderr.contains("s3cret"), "no password in a message: {}", serve.stderr);
}

#[tokio::test]
async fn serve_on_an_empty_database_says_to_migrate_and_does_not() {
    let database = Database::without_schema().await;
    run(&serve(), &database.url).await.refuses(UNAVAILABLE, &["older", "wakeful migrate"]);
    let tables: i64 = sqlx::query_scalar("select count(*) from pg_tables where schemaname = 'public'")
        .fetch_one(&database.pool)
        .await
        .unwrap();
    assert_eq!(tables, 0, "serve never migrates");
}

#[tokio::test]
async fn a_schema_of_a_newer_binary_is_left_alone() {
    let database = Database::new().await;
    sqlx::query(
        "insert into _sqlx_migrations (version, description, success, checksum, execution_time)
        values (99990101000001, 'of tomorrow', true, 'x', 1)",
    )
    .execute(&database.pool)
    .await
    .unwrap();
    sqlx::query("update schema_serves set oldest = 99990101000001").execute(&database.pool).await.unwrap();
    let before = database.rows().await;
    for args in [&["serve"][..], &["migrate"], &["migrate", "--check"]] {
        let options = if args == ["serve"] { serve() } else { command(args) };
        run(&options, &database.url).await.refuses(UNAVAILABLE, &["newer", "99990101000001"]);
    }
    assert_eq!(database.rows().await, before);
}

#[tokio::test]
async fn a_port_in_use_is_unavailable() {
    let database = Database::new().await;
    let first = serve().serve(&database).await;
    let taken = first.url().replace("http://", "");
    let second = serve().arg(&format!("--listen={taken}"));
    run(&second, &database.url).await.refuses(UNAVAILABLE, &[&taken, "in use"]);
    assert_eq!(first.client().get("/healthz").await.0, 200, "the first one does not mind");
    assert!(first.terminate().success());
}

#[tokio::test]
async fn migrate_brings_an_empty_database_up_once_and_says_so() {
    let database = Database::without_schema().await;
    run(&command(&["migrate", "--check"]), &database.url)
        .await
        .refuses(UNAVAILABLE, &["older", "wakeful migrate"]);
    let status = run(&command(&["migrate", "status"]), &database.url).await;
    assert!(status.status.success(), "{}", status.stderr);
    let missing = status.stdout.lines().filter(|line| line.contains("missing")).count();
    assert!(missing > 3 && missing == status.stdout.lines().count(), "{}", status.stdout);

    let up = run(&command(&["migrate"]), &database.url).await;
    assert!(up.status.success(), "{}", up.stderr);
    assert_eq!(up.stdout, format!("{missing} migrations applied\n"));
    assert_eq!(
        up.stderr.lines().filter(|line| line.starts_with("applied ")).count(),
        missing,
        "{}",
        up.stderr
    );

    let again = run(&command(&["migrate", "up"]), &database.url).await;
    assert_eq!((again.status.code(), again.stdout.as_str()), (Some(0), "0 migrations applied\n"));
    let check = run(&command(&["migrate", "--check"]), &database.url).await;
    assert_eq!((check.status.code(), check.stdout.lines().count()), (Some(0), 1));
    let status = run(&command(&["migrate", "status"]), &database.url).await;
    assert_eq!(status.stdout.lines().filter(|line| line.contains("applied")).count(), missing);
    let process = serve().serve(&database).await;
    assert!(process.terminate().success());
}

#[tokio::test]
async fn of_two_that_migrate_at_once_each_applies_what_the_other_has_not() {
    let database = Database::without_schema().await;
    let migrate = command(&["migrate"]);
    let both = [migrate.spawn(&database.url), migrate.spawn(&database.url), migrate.spawn(&database.url)];
    let mut applied = 0;
    for process in both {
        let (status, process) = process.ended().await;
        assert!(status.success(), "{}", process.log());
        let count: usize = process.output().split(' ').next().unwrap().parse().unwrap();
        assert_eq!(process.log().lines().filter(|line| line.starts_with("applied ")).count(), count);
        applied += count;
    }
    let rows: i64 =
        sqlx::query_scalar("select count(*) from _sqlx_migrations").fetch_one(&database.pool).await.unwrap();
    assert_eq!(applied as i64, rows, "no migration is counted twice");
    database.store().await.check_schema().await.unwrap();
}

#[tokio::test]
async fn what_a_server_says_is_on_stderr() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
    let process =
        Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url).serve(&database).await;
    let client = process.client();
    let answer = client.chat("c1", "one").await;
    client.wait_for(answer["session_id"].as_str().unwrap(), "completed").await;
    process.signal(libc::SIGTERM);
    let (status, process) = process.ended().await;
    assert!(status.success());
    assert_eq!(process.output(), "");
    assert!(process.log().contains("The run is completed"));
}
