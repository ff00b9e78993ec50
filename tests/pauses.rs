//! Pauses: what waits says so, goes on when the pause ends, and costs the claims nothing.

use crate::support::{Answer, Client, Database, ModelServer, Options, Process, eventually};
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;
use std::sync::Arc;
use std::time::Duration;
use wakeful_store::Store;
use wakeful_workflow::pause::{Kind, Subject};

struct House {
    database: Database,
    model: ModelServer,
    options: Options,
    process: Process,
    client: Client,
    store: Store,
}

impl House {
    async fn new() -> House {
        let model = ModelServer::start(|body, _| {
            let messages = body["messages"].as_array().unwrap();
            let last = messages.last().unwrap();
            match (last["role"].as_str().unwrap(), last["content"].as_str().unwrap_or_default()) {
                ("user", "reserve") => Answer::call("reserve", json!({"persons": 2})),
                _ => Answer::text("Done."),
            }
        })
        .await;
        let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
        let database = Database::new().await;
        let process = options.serve(&database).await;
        let (client, store) = (process.client(), database.store().await);
        House { database, model, options, process, client, store }
    }

    async fn run(&self, args: &[&str]) -> (i32, String) {
        let command = Options {
            config: self.options.config.clone(),
            args: args.iter().map(|&arg| arg.to_owned()).collect(),
            env: self.options.env.clone(),
            dir: Arc::clone(&self.options.dir),
        };
        let (status, process) = command.spawn(&self.database.url).ended().await;
        (status.code().unwrap(), format!("{}{}", process.output(), process.log()))
    }

    async fn is_held(&self, id: &str) -> Value {
        eventually("the session to be held", || async {
            let session = self.client.session(id).await;
            session["job"]["held_by"].is_string().then_some(session)
        })
        .await
    }

    async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&self.database.pool).await.unwrap()
    }
}

#[tokio::test]
async fn each_kind_of_pause_holds_its_sessions_and_no_others_until_it_ends() {
    let house = House::new().await;
    for (kind, name, text, asked) in [
        (Kind::Queue, "", "hello", 0),
        (Kind::Space, "default", "hello", 0),
        (Kind::Agent, "default", "hello", 0),
        (Kind::Trigger, "chat", "hello", 0),
        (Kind::Provider, "openai", "hello", 0),
        (Kind::Conversation, "c-conversation", "hello", 0),
        (Kind::Conversation, "slack/T1/C2", "hello", 0),
        (Kind::Tool, "reserve", "reserve", 1),
    ] {
        let word = kind.as_str();
        let before = house.model.bodies().len();
        let body =
            json!({"kind": word, "name": (!name.is_empty()).then_some(name), "reason": "wrong prices"});
        let (status, pause) = house.client.post("/v1/pauses", &body).await;
        assert_eq!((status.as_u16(), &pause["reason"]), (201, &json!("wrong prices")), "{pause}");
        // A notification tells the worker; it has read the pause when it holds this one.
        let known = format!(
            "Paused now: {}",
            Subject::named(kind, (!name.is_empty()).then_some(name), "default").unwrap().id()
        );
        house.process.wait_for_log(&known).await;
        let conversation = match kind {
            Kind::Conversation => name.replace('/', "%2F"),
            _ => format!("c-{word}"),
        };
        let id = house.client.chat(&conversation, text).await["session_id"].as_str().unwrap().to_owned();
        let session = house.is_held(&id).await;
        assert_eq!(session["job"]["held_for"], "wrong prices", "{session}");
        assert_eq!(house.model.bodies().len() - before, asked, "{word}");
        if kind == Kind::Agent {
            let (_, why) = house.run(&["session", "why", &id]).await;
            assert!(why.contains("It waits, because") && why.contains("wrong prices"), "{why}");
            for list in [["session", "list"], ["pause", "list"], ["queue", "status"]] {
                let (_, listed) = house.run(&list).await;
                assert!(listed.contains("wrong prices"), "{list:?}: {listed}");
            }
        }
        let body = json!({"kind": word, "name": (!name.is_empty()).then_some(name)});
        let (status, ended) = house.client.post("/v1/pauses/end", &body).await;
        assert_eq!(status.as_u16(), 202, "{ended}");
        house.client.wait_for(&id, "completed").await;
        eventually("the pause to be over", || async {
            (house.count("select count(*) from pauses").await == 0).then_some(())
        })
        .await;
    }
    // What is not concerned goes on.
    house
        .store
        .pause(&Subject::named(Kind::Agent, Some("another"), "default").unwrap(), "x", None, None)
        .await
        .unwrap();
    let id = house.client.chat("c-free", "hello").await["session_id"].as_str().unwrap().to_owned();
    house.client.wait_for(&id, "completed").await;
    assert_eq!(house.client.post("/v1/pauses/end", &json!({"kind": "queue"})).await.0.as_u16(), 404);
    // A pause that would be over at once is none.
    for span in ["0s", "367d"] {
        let (code, said) = house.run(&["pause", "begin", "queue", "--reason", "x", "--for", span]).await;
        assert!(code == 2 && said.contains("--for is from 1s to 366d"), "{span}: {said}");
    }
    assert_eq!(house.count("select count(*) from pauses where kind = 'queue'").await, 0);
    // A name that nothing has is paused, with a warning.
    for (kind, name) in [
        ("agent", "nosuch"),
        ("space", "nosuch"),
        ("trigger", "nosuch"),
        ("provider", "nosuch"),
        ("tool", "nosuch"),
        ("conversation", "nosuch"),
        ("schedule", "nosuch"),
        ("channel", "nosuch"),
    ] {
        let (code, said) = house.run(&["pause", "begin", kind, name, "--reason", "x"]).await;
        assert!(code == 0 && said.contains("nothing here has been called"), "{kind}: {said}");
        let (status, made) =
            house.client.post("/v1/pauses", &json!({"kind": kind, "name": name, "reason": "x"})).await;
        let warning = made["warning"].as_str().unwrap_or_default();
        assert!(
            status == 201 && warning.contains(&format!("nothing here has been called {kind} ")),
            "{made}"
        );
    }
    for (kind, name) in [
        ("agent", "default"),
        ("space", "default"),
        ("trigger", "chat"),
        ("provider", "openai"),
        ("tool", "ask_user"),
        ("conversation", "c-free"),
    ] {
        let (code, said) = house.run(&["pause", "begin", kind, name, "--reason", "x"]).await;
        assert!(code == 0 && !said.contains("nothing here has been called"), "{kind}: {said}");
        let (_, made) =
            house.client.post("/v1/pauses", &json!({"kind": kind, "name": name, "reason": "x"})).await;
        assert!(made["name"].is_string() && made["warning"].is_null(), "{made}");
    }
    // Who has to pause does not mend the configuration first.
    let secret = "[messenger.slack]\nsigning_secrets = [\"0123456789abcdef0123456789abcdef\"]";
    let lacking = house.options.clone().config(secret);
    let pause = ["pause", "begin", "channel", "email", "--reason", "x"];
    let ran = crate::cli::run(&lacking, &house.database.url, &pause).await;
    assert!(ran.code == 0 && ran.out.contains("channel email is paused"), "{} {}", ran.out, ran.err);
    assert_eq!(
        house.client.post("/v1/pauses", &json!({"kind": "queue", "reason": " "})).await.0.as_u16(),
        400
    );
}

#[tokio::test]
async fn a_pause_ends_by_itself_and_a_held_session_can_be_cancelled() {
    let house = House::new().await;
    let queue = Subject::named(Kind::Queue, None, "default").unwrap();
    house.store.pause(&queue, "a deploy", None, None).await.unwrap();
    house.process.wait_for_log("Paused now: queue").await;
    let (stays, goes) = (house.client.chat("c1", "hello").await, house.client.chat("c2", "hello").await);
    let id = |answer: &Value| answer["session_id"].as_str().unwrap().to_owned();
    let (stays, goes) = (id(&stays), id(&goes));
    house.is_held(&stays).await;
    house.is_held(&goes).await;
    let (code, said) = house.run(&["session", "cancel", &goes]).await;
    assert_eq!(code, 0, "{said}");
    house.client.wait_for(&goes, "cancelled").await;
    assert_eq!(house.model.bodies().len(), 0);
    // The same pause, with an end.
    house.store.pause(&queue, "a deploy", Some(Duration::from_millis(200)), None).await.unwrap();
    house.client.wait_for(&stays, "completed").await;
}

#[tokio::test]
async fn a_call_that_a_pause_kept_from_starting_is_not_reported_as_uncertain() {
    let house = House::new().await;
    let pause = json!({"kind": "tool", "name": "reserve", "reason": "wrong prices"});
    assert_eq!(house.client.post("/v1/pauses", &pause).await.0, 201);
    house.process.wait_for_log("Paused now: ").await;
    let id = house.client.chat("c", "reserve").await["session_id"].as_str().unwrap().to_owned();
    house.is_held(&id).await;
    let sql = "select string_agg(name || ' ' || status, ', ') from tool_calls";
    let statuses: String = sqlx::query_scalar(sql).fetch_one(&house.database.pool).await.unwrap();
    assert_eq!(statuses, "reserve invoked", "the row proves that it never ran");
    let (status, answer) = house.client.post(&format!("/v1/sessions/{id}/cancel"), &json!({})).await;
    assert!(status.is_success(), "{answer}");
    house.client.wait_for(&id, "cancelled").await;
    assert_eq!(house.count("select count(*) from tool_calls where status = 'uncertain'").await, 0);
    let uncertain = "select count(*) from session_events where type = 'TOOL_FAILED_UNCERTAIN'";
    assert_eq!(house.count(uncertain).await, 0);
}

#[tokio::test]
async fn a_pause_that_ends_lets_its_jobs_go_at_the_rate_the_oldest_first() {
    let database = Database::new().await;
    let store = database.store().await;
    let agent = Subject::named(Kind::Agent, Some("support"), "default").unwrap();
    store.pause(&agent, "a fix", None, Some(2.0)).await.unwrap();
    sqlx::raw_sql(
        "insert into jobs (kind, space_id, conversation_id, session_id, step_number, run_at, held_by, held_since)
        select 'step', 'default', 'default/c' || n, 'sess_' || n, 1, clock_timestamp() + interval '1 hour',
            'agent:support', clock_timestamp() + n * interval '1 second'
        from generate_series(1, 5) as n",
    )
    .execute(&database.pool)
    .await
    .unwrap();
    let held = async || {
        let sql = "select array(select session_id from jobs where held_by is not null order by session_id) where $1 = ''";
        database.value::<Vec<String>>(sql, "").await
    };
    assert_eq!(store.tend_pauses().await.unwrap(), 0, "it has not ended");
    store.resume(&agent, None).await.unwrap();
    for (freed, left) in [(2, &["sess_3", "sess_4", "sess_5"][..]), (2, &["sess_5"]), (1, &[])] {
        // A second passes.
        let second = "update pauses set tended_at = clock_timestamp() - interval '1.1 seconds'";
        sqlx::raw_sql(second).execute(&database.pool).await.unwrap();
        assert_eq!(store.tend_pauses().await.unwrap(), freed);
        assert_eq!(held().await, left);
    }
    assert!(store.pauses().await.unwrap().is_empty(), "nothing waits any more");
    let passes = "select count(*) from jobs where pause_passes is not null and run_at <= clock_timestamp() and $1 = ''";
    assert_eq!(database.value::<i64>(passes, "").await, 5);
}

#[tokio::test]
async fn a_fallback_whose_provider_is_paused_is_not_called() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, number| match number {
        0 => Answer::Busy(503, 3_600_000),
        _ => Answer::text("Here I am."),
    })
    .await;
    let options = Options::new()
        .model("openai/test")
        .config("fallback = [\"scripted/spare\"]\n[scripted]\ndir = \".\"\n[gate]\nprobe_s = 0.2\nprobe_max_s = 0.4")
        .env("OPENAI_BASE_URL", &model.url);
    let script = "[[turn]]\n[[turn.reply]]\ntext = \"The spare one answers.\"\n";
    std::fs::write(options.path("spare.toml"), script).unwrap();
    let store = database.store().await;
    let scripted = Subject::named(Kind::Provider, Some("scripted"), "default").unwrap();
    store.pause(&scripted, "an incident", None, None).await.unwrap();
    let process = options.serve(&database).await;
    let client = process.client();
    let id = client.chat("c1", "Hello.").await["session_id"].as_str().unwrap().to_owned();
    eventually("the session to wait for its provider", || async {
        let session = client.session(&id).await;
        session["job"]["waits_for"].is_string().then_some(())
    })
    .await;
    store.resume(&scripted, None).await.unwrap();
    let session = client.wait_for(&id, "completed").await;
    let said = session["messages"].as_array().unwrap().last().unwrap()["text"].clone();
    assert_eq!(said, "The spare one answers.", "the pause is over");
    assert!(process.terminate().success());
}
