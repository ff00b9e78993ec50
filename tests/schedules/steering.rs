//! Schedules by HTTP and by the command line: made, shown, paused, resumed and triggered. A schedule from the
//! configuration cannot be edited.

use super::{SPACE, at, compose, definition};
use crate::support::{Answer, Database, ModelServer, Options};
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;
use wakeful_store::schedule::Definition;

const NIGHTLY: &str = "[schedules.nightly]\ncron = \"0 3 * * *\"\nprompt = \"Tidy up.\"\n";

async fn cli(options: &Options, database: &Database, args: &[&str]) -> (i32, String, String) {
    let command = Options {
        config: options.config.clone(),
        args: args.iter().map(|&arg| arg.to_owned()).collect(),
        env: options.env.clone(),
        dir: Arc::clone(&options.dir),
    };
    let (status, process) = command.spawn(&database.url).ended().await;
    (status.code().expect("it was not killed"), process.output(), process.log())
}

async fn stage() -> (Database, ModelServer, Options) {
    let model = ModelServer::turns(vec![Answer::text("Done.")]).await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url).config(NIGHTLY);
    (Database::new().await, model, options)
}

#[tokio::test]
async fn schedules_are_made_changed_paused_resumed_triggered_and_deleted_by_http() {
    let (database, _model, options) = stage().await;
    let process = options.serve(&database).await;
    process.wait_for_log("\"Scheduling\"").await;
    let client = process.client();

    let asked = json!({"name": "weekly", "cron": "0 9 * * MON", "time_zone": "America/New_York", "prompt": "Report."});
    let (status, made) = client.post("/v1/schedules", &asked).await;
    assert_eq!(
        (status, &made["state"], &made["source"]),
        (StatusCode::CREATED, &json!("active"), &json!("api"))
    );
    assert_eq!(made["conversation_id"], "schedule-weekly");
    assert_eq!(client.post("/v1/schedules", &asked).await.0, StatusCode::OK, "the same again");
    let other = json!({"name": "weekly", "cron": "0 8 * * MON", "prompt": "Report."});
    assert_eq!(client.post("/v1/schedules", &other).await.0, StatusCode::CONFLICT);
    for (wrong, says) in [
        (json!({"cron": "61 * * * *"}), "`cron`: \"61 * * * *\" is no cron pattern: its minute is \"61\""),
        (json!({"cron": null}), "`cron` is missing"),
        (json!({"time_zone": "Mars/Base"}), "`time_zone`: \"Mars/Base\" is no time zone"),
        (json!({"name": "a b"}), "`name` is \"a b\""),
        // The name equals this schedule's id, so a lookup by id would find the wrong schedule.
        (json!({"name": made["schedule_id"]}), "does not begin with sched_"),
        (json!({"prompt": " "}), "`prompt`"),
        (json!({"agent": "nobody"}), "nobody"),
        (json!({"missed_limit": 1000}), "`missed_limit`"),
        (json!({"missed": "some"}), "`missed` is \"some\": it must be skip, one or all"),
        (json!({"overlap": 1}), "`overlap` is 1: it must be skip or queue"),
        (json!({"mail_to": ["ann"]}), "`mail_to` has \"ann\""),
        (json!({"mail_to": "ann@example.org"}), "`mail_to` is \"ann@example.org\": it must be a list"),
        (json!({"colour": "red"}), "colour"),
    ] {
        let mut asked = json!({"name": "w", "cron": "@daily", "prompt": "x"});
        for (key, value) in wrong.as_object().unwrap() {
            asked[key] = value.clone();
        }
        let (status, problem) = client.post("/v1/schedules", &asked).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{asked} {problem}");
        assert!(problem["detail"].as_str().unwrap().contains(says), "{asked} {problem}");
    }

    let (_, list) = client.get("/v1/schedules").await;
    let names: Vec<&str> =
        list["items"].as_array().unwrap().iter().filter_map(|one| one["name"].as_str()).collect();
    assert_eq!(names, ["nightly", "weekly"]);
    let (_, next) = client.get("/v1/schedules/weekly/next?count=3").await;
    let ticks = next["items"].as_array().unwrap();
    assert_eq!(ticks.len(), 3);
    assert!(ticks.iter().all(|one| one["local"].as_str().unwrap().contains(" 09:00:00 ")), "{next}");
    let id = made["schedule_id"].as_str().unwrap();
    assert_eq!(client.get(&format!("/v1/schedules/{id}")).await.1["name"], "weekly", "by its id as well");

    // A person triggers the schedule: it fires once per key, even while it is paused.
    let (_, paused) = client.post("/v1/schedules/weekly/pause", &json!({})).await;
    assert_eq!((&paused["state"], &paused["next_at"]), (&json!("paused"), &Value::Null));
    let (_, next) = client.get("/v1/schedules/weekly/next?count=1").await;
    assert_eq!(next["state"], "paused", "ticks of which none fires");
    let (status, first) = client.post("/v1/schedules/weekly/trigger", &json!({"client_key": "k1"})).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{first}");
    let (status, again) = client.post("/v1/schedules/weekly/trigger", &json!({"client_key": "k1"})).await;
    assert_eq!((status, &again["session_id"]), (StatusCode::OK, &first["session_id"]));
    client.wait_for(first["session_id"].as_str().unwrap(), "completed").await;
    let (_, firings) = client.get("/v1/schedules/weekly/firings").await;
    assert_eq!(firings["items"].as_array().unwrap().len(), 1);
    assert_eq!(
        (&firings["items"][0]["manual"], &firings["items"][0]["status"]),
        (&json!(true), &json!("completed"))
    );
    let (_, resumed) = client.post("/v1/schedules/weekly/resume", &json!({})).await;
    assert!(resumed["state"] == "active" && resumed["next_at"].is_string(), "{resumed}");

    let put = |name: &str, body: Value| {
        let url = format!("{}/v1/schedules/{name}", client.url);
        async move { crate::support::http().put(url).body(body.to_string()).send().await.unwrap() }
    };
    let changed = put("weekly", other.clone()).await;
    assert_eq!(changed.status(), StatusCode::OK);
    let (_, shown) = client.get("/v1/schedules/weekly").await;
    assert_eq!((&shown["cron"], &shown["revision"]), (&json!("0 8 * * MON"), &json!(2)));
    assert_eq!(shown["time_zone"], "UTC", "a PUT replaces everything: missing fields get their defaults");

    // Schedules from the configuration can be paused and triggered, but not edited.
    let nightly = json!({"cron": "@daily", "prompt": "x"});
    let refused = put("nightly", nightly).await;
    assert_eq!(refused.status(), StatusCode::CONFLICT);
    let refused = refused.text().await.unwrap();
    assert!(refused.contains("the file decides"), "{refused}");
    let delete = |name: &str| {
        let url = format!("{}/v1/schedules/{name}", client.url);
        async move { crate::support::http().delete(url).send().await.unwrap().status() }
    };
    assert_eq!(delete("nightly").await, StatusCode::CONFLICT);
    assert_eq!(client.post("/v1/schedules/nightly/pause", &json!({})).await.1["state"], "paused");
    assert_eq!(client.post("/v1/schedules/nightly/trigger", &json!({})).await.0, StatusCode::ACCEPTED);
    assert_eq!(delete("weekly").await, StatusCode::NO_CONTENT);
    assert_eq!(client.get("/v1/schedules/weekly").await.0, StatusCode::NOT_FOUND);
    assert!(process.terminate().success());

    // A person's pause survives a restart. A schedule that left the configuration is paused, not deleted.
    let process = options.serve(&database).await;
    process.wait_for_log("\"Scheduling\"").await;
    assert_eq!(process.client().get("/v1/schedules/nightly").await.1["paused_by"], "person");
    process.client().post("/v1/schedules/nightly/resume", &json!({})).await;
    drop(process);
    let without = Options { config: options.config.replace(NIGHTLY, ""), ..options.clone() };
    let process = without.serve(&database).await;
    process.wait_for_log("Paused schedule nightly").await;
    let client = process.client();
    assert_eq!(client.get("/v1/schedules/nightly").await.1["paused_by"], "config");
    assert_eq!(client.post("/v1/schedules/nightly/resume", &json!({})).await.0, StatusCode::CONFLICT);
    let (_, out, _) = cli(&options, &database, &["doctor", "-o", "json"]).await;
    assert!(out.contains("nightly is paused: a scheduler of this deployment"), "{out}");
    drop(process);
    let process = options.serve(&database).await;
    process.wait_for_log("Took up schedule nightly").await;
    assert_eq!(process.client().get("/v1/schedules/nightly").await.1["state"], "active");
}

#[tokio::test]
async fn schedules_are_made_paused_resumed_triggered_and_told_by_the_command_line() {
    let (database, _model, options) = stage().await;
    let run = async |args: &[&str]| cli(&options, &database, args).await;
    let json =
        |out: &str| serde_json::from_str::<Value>(out).unwrap_or_else(|error| panic!("{error}: {out}"));

    let create = [
        "schedule",
        "create",
        "hourly",
        "--cron",
        "0 * * * *",
        "--prompt",
        "Look.",
        "--time-zone",
        "Asia/Kathmandu",
    ];
    let (code, out, err) = run(&create).await;
    assert_eq!((code, out.as_str()), (0, "hourly is made\n"), "{err}");
    assert_eq!(run(&create).await.1, "hourly is there already\n");
    let wrong = ["schedule", "create", "x", "--cron", "often", "--prompt", "Look."];
    let (code, _, err) = run(&wrong).await;
    assert!(code == 2 && err.contains("is no cron pattern"), "{code} {err}");

    let (_, out, _) = run(&["schedule", "list", "-o", "json"]).await;
    assert_eq!((&json(&out)[0]["name"], &json(&out)[0]["source"]), (&json!("hourly"), &json!("api")));
    let (_, out, _) = run(&["schedule", "next", "hourly", "--count", "2", "-o", "json"]).await;
    assert_eq!(json(&out).as_array().unwrap().len(), 2);
    assert!(json(&out)[0]["local"].as_str().unwrap().ends_with(":00:00 +05:45 Asia/Kathmandu"), "{out}");

    assert_eq!(run(&["schedule", "pause", "hourly"]).await.1, "hourly is paused\n");
    let (code, out, err) = run(&["schedule", "next", "hourly", "--count", "1"]).await;
    assert!(code == 0 && out.contains("Asia/Kathmandu"), "{out} {err}");
    assert!(err.contains("hourly is paused") && err.contains("`wakeful schedule resume hourly`"), "{err}");

    // An edit changes only the fields that it names.
    let edit = ["schedule", "edit", "hourly", "--cron", "30 * * * *", "--mail-to", "ann@example.org"];
    assert_eq!(run(&edit).await.1, "hourly is changed\n");
    let (_, out, _) = run(&["schedule", "show", "hourly", "-o", "json"]).await;
    let shown = &json(&out)["schedule"];
    assert_eq!((&shown["cron"], &shown["time_zone"]), (&json!("30 * * * *"), &json!("Asia/Kathmandu")));
    assert_eq!((&shown["prompt"], &shown["mail_to"]), (&json!("Look."), &json!(["ann@example.org"])));
    assert_eq!((&shown["state"], &shown["conversation_id"]), (&json!("paused"), &json!("schedule-hourly")));
    assert_eq!(run(&["schedule", "edit", "hourly", "--mail-to", ""]).await.0, 0);
    let (_, out, _) = run(&["schedule", "show", "hourly", "-o", "json"]).await;
    assert_eq!(json(&out)["schedule"]["mail_to"], json!([]));
    let (code, _, err) = run(&["schedule", "edit", "hourly"]).await;
    assert!(code == 2 && err.contains("say what is to be another"), "{code} {err}");
    let (code, _, err) = run(&["schedule", "edit", "hourly", "--cron", "often"]).await;
    assert!(code == 2 && err.contains("is no cron pattern"), "{code} {err}");
    assert_eq!(run(&["schedule", "edit", "nobody", "--cron", "@daily"]).await.0, 3);
    let (_, out, _) = run(&["schedule", "trigger", "hourly", "--client-key", "k", "-o", "json"]).await;
    let (_, again, _) = run(&["schedule", "trigger", "hourly", "--client-key", "k", "-o", "json"]).await;
    assert_eq!(json(&out)["session_id"], json(&again)["session_id"]);
    let (_, out, _) = run(&["schedule", "show", "hourly"]).await;
    assert!(out.contains("state         paused\n") && out.contains("prompt        Look.\n"), "{out}");
    let (_, out, _) = run(&["schedule", "show", "hourly", "-o", "json"]).await;
    assert_eq!(json(&out)["firings"].as_array().unwrap().len(), 1);
    assert_eq!(run(&["schedule", "resume", "hourly"]).await.1, "hourly is active\n");
    assert_eq!(run(&["schedule", "pause", "nobody"]).await.0, 3);
    assert_eq!(run(&["schedule", "delete", "hourly"]).await.1, "hourly is deleted\n");
    assert_eq!(run(&["schedule", "delete", "hourly"]).await.0, 3);

    // For a schedule from the configuration the file decides.
    let scheduler = options.clone().arg("--roles").arg("scheduler").spawn(&database.url);
    scheduler.wait_for_log("\"Scheduling\"").await;
    for verb in [&["schedule", "delete", "nightly"][..], &["schedule", "edit", "nightly", "--cron", "@daily"]]
    {
        let (code, _, err) = run(verb).await;
        assert!(code == 4 && err.contains("the file decides"), "{code} {err}");
    }
}

#[tokio::test]
async fn doctor_names_a_schedule_that_nobody_fires() {
    let (database, _model, options) = stage().await;
    let store = database.store().await;
    let before = Definition { agent: "gone".to_owned(), ..definition("late", "* * * * *") };
    store.create_schedule(SPACE, &before, Some(at("2026-01-01T00:00:00Z"))).await.unwrap();
    let ahead = definition("ahead", "0 0 1 1 *");
    store.create_schedule(SPACE, &ahead, Some(at("2199-01-01T00:00:00Z"))).await.unwrap();
    let others = definition("others", "* * * * *");
    store.create_schedule("acme", &others, Some(at("2026-01-02T00:00:00Z"))).await.unwrap();
    let (_, out, _) = cli(&options, &database, &["doctor", "-o", "json"]).await;
    let checks: Value = serde_json::from_str(&out).unwrap();
    let texts: Vec<String> = checks
        .as_array()
        .unwrap()
        .iter()
        .filter(|check| check["name"] == "schedules")
        .map(|check| format!("{}; {}", check["text"].as_str().unwrap(), check["remedy"]))
        .collect();
    assert_eq!(texts.len(), 3, "{texts:?}");
    assert!(
        texts[1].contains("others of the space acme should")
            && texts[1].contains("pause others --space acme"),
        "{texts:?}"
    );
    assert!(
        texts[0].contains("late should have fired") && texts[0].contains("--roles scheduler"),
        "{texts:?}"
    );
    assert!(
        texts[2].contains("ahead of the database's clock") && texts[2].contains("schedule resume ahead"),
        "{texts:?}"
    );

    // The remedies that doctor names help.
    store.pause_schedule(SPACE, "late").await.unwrap();
    store.pause_schedule("acme", "others").await.unwrap();
    store.resume_schedule(SPACE, "ahead", None).await.unwrap();
    let (_, out, _) = cli(&options, &database, &["doctor", "-o", "json"]).await;
    assert!(out.contains("none is late"), "{out}");
    assert!(
        store.fire_due(None, &["default".to_owned()], &mut Vec::new(), &compose).await.unwrap().is_none()
    );
}
