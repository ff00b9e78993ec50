//! The operator's commands, which use the database and need no server, while a worker runs.

mod sessions;
mod widths;

use crate::support::{Answer, Database, ModelServer, Options, Program, eventually};
use serde_json::{Value, json};
use std::sync::Arc;

/// The result of a command.
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Ran {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}{}", self.out, self.err))
    }

    /// Returns whether the output has no control characters that act on a terminal or change the text
    /// direction.
    fn is_tame(&self) -> bool {
        let acts =
            |c: char| c != '\n' && c != '\t' && (c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c));
        !self.out.contains(acts)
    }
}

/// Another command with the configuration and folder of `options`.
fn command(options: &Options, args: &[&str]) -> Options {
    Options {
        config: options.config.clone(),
        args: args.iter().map(|&arg| arg.to_owned()).collect(),
        env: options.env.clone(),
        dir: Arc::clone(&options.dir),
    }
}

pub async fn run(options: &Options, database_url: &str, args: &[&str]) -> Ran {
    let (status, process) = command(options, args).spawn(database_url).ended().await;
    Ran { code: status.code().expect("it was not killed"), out: process.output(), err: process.log() }
}

fn options(model: &ModelServer) -> Options {
    Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url)
}

#[tokio::test]
async fn each_failure_of_a_command_has_its_exit_status() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Done.")]).await;
    let options = options(&model);
    let process = options.serve(&database).await;
    let client = process.client();
    let answer = client.chat("c1", "Hello.").await;
    let id = answer["session_id"].as_str().unwrap();
    client.wait_for(id, "completed").await;
    let cli = async |args: &[&str]| run(&options, &database.url, args).await;

    for verb in ["show", "tail", "why", "retry", "cancel", "wake", "archive", "terminate"] {
        let ran = cli(&["session", verb, "sess_none"]).await;
        assert_eq!((ran.code, ran.out.as_str()), (3, ""), "{verb}: {}", ran.err);
        assert!(ran.err.contains("session sess_none does not exist"), "{}", ran.err);
    }
    assert_eq!(cli(&["session", "send", "sess_none", "x"]).await.code, 3);
    assert_eq!(cli(&["session", "resolve", "sess_none", "call_1", "--did-not-happen"]).await.code, 3);
    assert_eq!(cli(&["session", "resolve", id, "call_1"]).await.code, 2, "an outcome is needed");
    for verb in ["retry", "cancel"] {
        let ran = cli(&["session", verb, id]).await;
        assert_eq!(ran.code, 4);
        assert!(
            ran.err.contains(&format!("is completed: {verb} is not possible now; possible: send")),
            "{}",
            ran.err
        );
    }
    assert_eq!(cli(&["session", "list", "--status", "done"]).await.code, 2);
    assert_eq!(cli(&["session", "list", "--limit", "0"]).await.code, 2);
    assert_eq!(cli(&["session", "send", id, " "]).await.code, 2);
    assert_eq!(cli(&["session", "list", "-o", "yaml"]).await.code, 2);

    let sent = cli(&["session", "send", id, "Again.", "--client-key", "k1", "-o", "json"]).await;
    assert_eq!(sent.json()["outcome"], "new_run");
    assert_eq!(
        cli(&["session", "send", id, "Again.", "--client-key", "k1", "-o", "json"]).await.json(),
        sent.json()
    );
    assert_eq!(cli(&["session", "send", id, "Other.", "--client-key", "k1"]).await.code, 4);

    let ran = cli(&["session", "retry"]).await;
    assert!(ran.code == 2 && ran.err.contains("--filter"), "{}", ran.err);
    let ran = cli(&["session", "verify"]).await;
    assert!(ran.code == 2 && ran.err.contains("--all"), "{}", ran.err);
    let ran = cli(&["session", "list", "--cost-over", "abc"]).await;
    assert!(ran.code == 2 && ran.err.contains("a number of dollars"), "{}", ran.err);
    let new = cli(&["session", "new", "c1", "-o", "json"]).await.json();
    assert_eq!(cli(&["session", "terminate", new["session_id"].as_str().unwrap()]).await.code, 0);
    let ran = cli(&["session", "send", new["session_id"].as_str().unwrap(), "x"]).await;
    assert!(
        ran.code == 4
            && ran
                .err
                .contains("send is not possible now; to go on in its conversation: wakeful session new c1"),
        "{}",
        ran.err
    );
    let ran = cli(&["absurd", "--from", &database.url, "scan"]).await;
    assert!(ran.code == 3 && ran.err.contains("is not Absurd's database: --from"), "{}", ran.err);
    let ran = cli(&["absurd", "--from", "postgres://localhost:1/x", "scan"]).await;
    assert!(ran.code == 6 && ran.err.contains("check --from"), "{}", ran.err);

    let nowhere = "postgres://someone:secret-word@127.0.0.1:1/nothing";
    let ran = run(&options, nowhere, &["session", "list"]).await;
    assert_eq!(ran.code, 6, "{}", ran.err);
    assert!(ran.err.contains("127.0.0.1:1/nothing") && !ran.err.contains("secret-word"), "{}", ran.err);
    let empty = Database::without_schema().await;
    let ran = run(&options, &empty.url, &["queue", "status"]).await;
    assert_eq!(ran.code, 6);
    assert!(ran.err.contains("wakeful migrate"), "{}", ran.err);
}

#[tokio::test]
async fn hostile_text_reaches_no_terminal() {
    const HOSTILE: &str =
        "x\u{1b}[2J\u{1b}]0;owned\u{7}\n#9 assistant\nsess_0\tcompleted\r\u{9b}1m\u{202e}fdp.exe";
    let database = Database::new().await;
    let model = ModelServer::turns(vec![
        Answer::call("ask_user", json!({"question": HOSTILE})),
        Answer::text(HOSTILE),
    ])
    .await;
    let options = options(&model);
    let process = options.serve(&database).await;
    let client = process.client();
    let answer = client.chat("c1", HOSTILE).await;
    let id = answer["session_id"].as_str().unwrap();
    client.wait_for(id, "waiting_input").await;
    for done in [false, true] {
        if done {
            client.chat("c1", HOSTILE).await;
            client.wait_for(id, "completed").await;
        }
        for args in [
            &["session", "list"][..],
            &["session", "list", "-o", "table"],
            &["session", "show", id, "--full"],
            &["session", "tail", id],
            &["session", "tail", id, "-o", "jsonl"],
            &["session", "why", id],
            &["session", "why", id, "-o", "json"],
        ] {
            let ran = run(&options, &database.url, args).await;
            assert_eq!(ran.code, 0, "{}", ran.err);
            assert!(ran.is_tame(), "{args:?}: {:?}", ran.out);
        }
        let list = run(&options, &database.url, &["session", "list"]).await;
        assert_eq!(list.out.lines().count(), 1, "a row is a line: {}", list.out);
        let show = run(&options, &database.url, &["session", "show", id]).await;
        assert!(show.out.contains("\\u{1b}[2J"), "{}", show.out);
        assert!(!show.out.lines().any(|line| line.starts_with("  #9")), "no forged heading: {}", show.out);
    }
    let json = run(&options, &database.url, &["session", "show", id, "-o", "json"]).await.json();
    assert_eq!(json["messages"][0]["text"], HOSTILE, "programs get it as it was");
}

/// The checks of a report, by level.
fn checks<'a>(report: &'a Value, level: &str) -> Vec<&'a Value> {
    report.as_array().expect("checks").iter().filter(|check| check["level"] == level).collect()
}

#[tokio::test]
async fn the_doctor_finds_a_healthy_system_healthy() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Done.")]).await;
    let options = options(&model);
    let process = options.serve(&database).await;
    let listen = process.url().trim_start_matches("http://").to_owned();
    eventually("a heartbeat", || async {
        (database.value::<i64>("select count(*) from workers where $1 = ''", "").await > 0).then_some(())
    })
    .await;
    // With this address, doctor also asks the running process for its health.
    let beside = command(&options, &[]).env("WAKEFUL_SERVER__LISTEN", &listen);

    let ran = run(&beside, &database.url, &["doctor", "-o", "json"]).await;
    let report = ran.json();
    assert_eq!((ran.code, checks(&report, "problem").len()), (0, 0), "{report:#}");
    let ok: Vec<&str> = checks(&report, "ok").iter().map(|check| check["name"].as_str().unwrap()).collect();
    for name in [
        "configuration",
        "agents",
        "workspace",
        "maildir",
        "server",
        "database",
        "notifications",
        "schema",
        "workers",
    ] {
        assert!(ok.contains(&name), "{name}: {report:#}");
    }
    let warned = checks(&report, "warning");
    let role = warned.iter().find(|check| check["name"] == "role").expect("the tests log in as a superuser");
    assert!(role["text"].as_str().unwrap().contains("superuser"), "{role}");
    let plain = run(&beside, &database.url, &["doctor"]).await;
    assert!(plain.is_tame() && plain.out.contains(&format!("{listen} is ready")), "{}", plain.out);
    assert!(!plain.out.contains("PROBLEM"));
}

#[tokio::test]
async fn the_doctor_says_what_is_wrong_and_what_to_do() {
    let database = Database::new().await;
    let options = Options::new()
        .model("scripted/none-such")
        .config("[agents.other]\nmodel = \"anthropic/claude-x\"\ntools = [\"read_fil\"]");
    let ran = run(&options, &database.url, &["doctor"]).await;
    assert_eq!(ran.code, 9, "{}", ran.out);
    assert!(
        ran.out.contains("did you mean `read_file`?") && ran.out.contains("[agents.other] tools"),
        "{}",
        ran.out
    );
    assert!(ran.out.contains("scripted/none-such"), "{}", ran.out);
    assert!(ran.out.contains("warning\tmodel key\tANTHROPIC_API_KEY is not set"), "{}", ran.out);
    assert!(ran.out.contains("warning\tworkers\tnone is alive"), "{}", ran.out);

    let sound = Options::new().model("openai/test").env("OPENAI_API_KEY", "sk-hidden");
    let empty = Database::without_schema().await;
    let ran = run(&sound, &empty.url, &["doctor"]).await;
    assert_eq!(ran.code, 9);
    assert!(
        ran.out.contains("PROBLEM\tschema\t") && ran.out.contains("→ Run `wakeful migrate`"),
        "{}",
        ran.out
    );

    let newer = Database::new().await;
    sqlx::query(
        "insert into _sqlx_migrations (version, description, success, checksum, execution_time)
        values (99990101000000, 'of tomorrow', true, '', 0)",
    )
    .execute(&newer.pool)
    .await
    .unwrap();
    sqlx::query("update schema_serves set oldest = 99990101000000").execute(&newer.pool).await.unwrap();
    let ran = run(&sound, &newer.url, &["doctor"]).await;
    assert_eq!(ran.code, 9);
    assert!(ran.out.contains("newer than this binary"), "{}", ran.out);

    let ran = run(&sound, "postgres://someone:secret-word@127.0.0.1:1/nothing", &["doctor"]).await;
    assert_eq!(ran.code, 9);
    assert!(
        ran.out.contains("PROBLEM\tdatabase\t127.0.0.1:1/nothing") && ran.out.contains("DATABASE_URL"),
        "{}",
        ran.out
    );
    assert!(
        !ran.out.contains("secret-word")
            && !ran.err.contains("secret-word")
            && !ran.out.contains("sk-hidden")
    );

    let wrong = Options::new().config("[queue]\nconcurency = 3");
    let ran = run(&wrong, &database.url, &["doctor", "-o", "json"]).await;
    assert_eq!(ran.code, 9);
    assert!(ran.json()[0]["text"].as_str().unwrap().contains("concurrency"), "{}", ran.out);
}

#[tokio::test]
async fn the_doctor_names_the_session_whose_effect_is_uncertain() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Done.")]).await;
    let options = options(&model);
    let process = options.serve(&database).await;
    let client = process.client();
    let answer = client.chat("c1", "Hello.").await;
    let id = answer["session_id"].as_str().unwrap();
    client.wait_for(id, "completed").await;
    sqlx::query(
        "insert into tool_calls
            (space_id, session_id, call_id, run_id, step_number, message_number, name, args_sha256, effect, status)
        values ('default', $1, 'call_1', 'run_1', 1, 2, 'charge', '', 'guarded', 'uncertain')",
    )
    .bind(id)
    .execute(&database.pool)
    .await
    .unwrap();
    let ran = run(&options, &database.url, &["doctor"]).await;
    assert_eq!(ran.code, 0, "a warning is no failure: {}", ran.out);
    assert!(ran.out.contains(&format!("wakeful session why {id}")), "{}", ran.out);
    let why = run(&options, &database.url, &["session", "why", id]).await;
    assert!(why.out.contains("It is not known whether charge took effect"), "{}", why.out);
    let command = format!("wakeful session resolve {id} call_1");
    for said in [&ran.out, &why.out, &run(&options, &database.url, &["session", "show", id]).await.out] {
        let said: Vec<&str> = said.split_whitespace().collect();
        assert!(said.join(" ").contains(&command), "{said:?}");
    }
}

#[test]
fn a_command_that_goes_by_the_configuration_says_that_it_found_none() {
    let folder = tempfile::TempDir::new().unwrap();
    for args in [&["replay", "sess_none"][..], &["preflight", "--against", "http://127.0.0.1:1"]] {
        let ran = Program::command(folder.path()).args(args).output().unwrap();
        let said = String::from_utf8(ran.stderr).unwrap();
        assert!(!ran.status.success() && said.contains("no wakeful.toml here"), "{args:?}: {said}");
    }
}
