//! Replays: a separate process runs the same loop again and reads the log of the source. A replay sends and
//! writes nothing, and its source stays as it is. With recorded answers and tools every request and every
//! message is the same.

mod stage;

use crate::support::checker::Traces;
use crate::support::{Answer, Database, Options};
use serde_json::{Value, json};
use stage::{Stage, answered, messages};

#[tokio::test]
async fn recorded_answers_and_tools_give_every_request_and_every_message_again() {
    let stage = Stage::eventful().await;
    let before = stage.dump().await;
    let asked = stage.model.bodies().len();

    let told = stage.replay(&["--model", "recorded", "--tools", "recorded"]).await;
    assert_eq!(told.status, 0, "{}", told.log);
    assert_eq!(told.json["diff"]["verdict"], "equal", "{:#}", told.json);
    let (source, replay) = (stage.source().await, told.traces(&stage).await);
    assert_eq!(messages(&replay), messages(&source));
    assert_eq!(answered(&replay), answered(&source), "hashes of the requests, by the answer's number");
    assert_eq!(told.json["diff"]["requests"]["equal"], answered(&source).len());
    assert_eq!(told.json["replay"]["unrecorded"], json!([]));
    assert_eq!(replay.session["total_cost_micros"], source.session["total_cost_micros"]);
    assert_eq!(stage.model.bodies().len(), asked, "no model was called");
    stage.assert_untouched(&before, &told).await;
}

#[tokio::test]
async fn dry_tools_say_what_they_would_have_done_and_do_nothing() {
    let stage = Stage::eventful().await;
    let before = stage.dump().await;
    let told = stage.replay(&[]).await;
    assert!(told.log.contains("calls openai/test at http://127.0.0.1:"), "{}", told.log);
    assert_eq!(told.status, 8, "charge and reserve have no outcome of their own: {}", told.log);
    assert_eq!(told.json["diff"]["verdict"], "prose", "{:#}", told.json["diff"]["first_divergence"]);
    let (source, replay) = (stage.source().await, told.traces(&stage).await);
    let said = |traces: &Traces, tool: &str| -> Vec<Value> {
        let blocks = traces.records.iter().filter_map(|record| record["content"].get(0).cloned());
        blocks.filter(|block| block["type"] == "tool_result" && block["name"] == tool).collect()
    };
    for tool in ["compose_email", "write_file", "read_file", "ask_user"] {
        let (dry, live) = (said(&replay, tool), said(&source, tool));
        assert!(!live.is_empty(), "{tool} was called");
        assert_eq!(dry, live, "{tool}: the same text and details as live");
    }
    for tool in ["charge", "reserve"] {
        assert!(said(&replay, tool)[0]["content"].as_str().unwrap().contains("was not carried out"));
    }
    assert!(replay.calls.iter().all(|call| call["started_at"].is_null()), "none was ever started");
    assert_eq!(replay.session["state"], source.session["state"]);
    stage.assert_untouched(&before, &told).await;
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn k40_a_replay_that_is_killed_again_and_again_goes_on_where_it_stood() {
    let stage = Stage::eventful().await;
    let before = stage.dump().await;
    let asked = stage.model.bodies().len();
    let mut kept: Vec<Value> = Vec::new();
    let kills = ["K29=1*return", "K22=1*return", "K6=1*return", "K21=1*off->1*return", "K5=1*return"];
    for at in kills {
        let killed = stage.killed_replay(at, &["--tools", "recorded"]).await;
        let Some(killed) = killed else {
            assert_eq!(at, "K29=1*return", "only a kill in the middle of the fork leaves no session");
            continue;
        };
        let committed = messages(&Traces::of(&stage.world.database, &killed).await);
        assert_eq!(committed[..kept.len()], kept, "{at}: what was committed stays");
        kept = committed;
    }
    assert!(kept.len() > 5, "it came some way between its deaths: {kept:?}");
    let told = stage.replay(&["--tools", "recorded"]).await;
    assert_eq!(told.status, 0, "{:#}\n{}", told.json["diff"]["first_divergence"], told.log);
    assert_eq!(told.json["replay"]["resumed"], true);
    assert!(told.log.contains("by the same command (--fresh begins anew)"), "{}", told.log);
    assert!(told.log.contains("is held by another process"), "{}", told.log);
    let forks: i64 = stage
        .world
        .database
        .value(
            "select count(*) from conversation_sessions where parent_session_id = $1",
            &stage.world.session_id,
        )
        .await;
    assert_eq!(forks, 1, "it is one replay all the time");
    let replay = told.traces(&stage).await;
    assert_eq!(messages(&replay)[..kept.len()], kept);
    assert_eq!(messages(&replay), messages(&stage.source().await));
    // Only calls whose answer was not committed are made again.
    let repeated = stage.model.bodies().len() - asked - answered(&replay).len();
    assert!(repeated < kills.len(), "{repeated} calls were made again");
    stage.assert_untouched(&before, &told).await;
    // The report is finished, so the same command begins another replay.
    let again = stage.replay(&["--tools", "recorded"]).await;
    assert_ne!(again.json["replay"]["session_id"], told.json["replay"]["session_id"]);
    assert_eq!(again.json["replay"]["resumed"], false);
}

#[tokio::test]
async fn a_replay_and_the_deployed_workers_leave_each_others_jobs_alone() {
    let stage = Stage::eventful().await;
    let killed = stage.killed_replay("K22=1*return", &["--model", "recorded", "--tools", "recorded"]).await;
    let killed = killed.expect("a fork");
    let job = "select json_build_object('runner', runner, 'attempt', attempt, 'lease', lease) from jobs where session_id = $1";
    let left: Value = stage.world.database.value(job, &killed).await;
    assert!(left["runner"].as_str().unwrap().starts_with("replay-"), "{left}");

    // The replay's lease ends. A deployed worker takes every other job.
    let process = stage.world.serve().await;
    let client = process.client();
    sqlx::query("update jobs set run_at = clock_timestamp() - interval '1 hour' where session_id = $1")
        .bind(&killed)
        .execute(&stage.world.database.pool)
        .await
        .unwrap();
    let other = client.chat("another", "Hello there.").await;
    client.wait_for(other["session_id"].as_str().unwrap(), "completed").await;
    let still: Value = stage.world.database.value(job, &killed).await;
    assert_eq!(still, left, "no deployed worker claims it");
    assert!(process.terminate().success());

    // The other way round: an ordinary job waits for a deployed worker.
    let api = stage.world.options.clone().arg("--roles=api").serve(&stage.world.database).await;
    let waits = api.client().chat("another", "Hello there.").await;
    let told = stage.replay(&["--model", "recorded", "--tools", "recorded"]).await;
    assert_eq!((told.status, &told.json["replay"]["resumed"]), (0, &json!(true)), "{}", told.log);
    let waiting = api.client().session(waits["session_id"].as_str().unwrap()).await;
    assert_eq!(waiting["status"], "queued");
    assert!(api.terminate().success());
}

#[tokio::test]
async fn a_replay_whose_process_is_gone_takes_no_messages_and_is_cancelled() {
    let stage = Stage::eventful().await;
    let killed = stage.killed_replay("K22=1*return", &["--tools", "recorded"]).await.expect("a fork");
    let process = stage.world.serve().await;
    let client = process.client();
    for (path, body) in [("messages", json!({"text": "Hello?"})), ("retry", json!({}))] {
        let (status, problem) = client.post(&format!("/v1/sessions/{killed}/{path}"), &body).await;
        assert_eq!(status, 409, "{path}: {problem}");
        assert!(problem.to_string().contains("belongs to a replay"), "{path}: {problem}");
    }
    let asked = stage.model.bodies().len();
    let (status, answer) = client.post(&format!("/v1/sessions/{killed}/cancel"), &json!({})).await;
    assert!(status.is_success(), "{answer}");
    let ended = client.wait_for(&killed, "cancelled").await;
    assert!(ended["error"].as_str().unwrap().contains("cancelled"), "{ended}");
    assert_eq!(stage.model.bodies().len(), asked, "it only stops");
    assert!(process.terminate().success());
    // The same command then begins another replay.
    let told = stage.replay(&["--tools", "recorded"]).await;
    assert_eq!((told.status, &told.json["replay"]["resumed"]), (0, &json!(false)), "{}", told.log);
    assert_ne!(told.session_id(), killed);
}

#[tokio::test]
async fn a_fresh_replay_ends_the_ones_before_it() {
    let stage = Stage::eventful().await;
    let killed = stage.killed_replay("K22=1*return", &["--tools", "recorded"]).await.expect("a fork");
    let told = stage.replay(&["--tools", "recorded", "--fresh"]).await;
    assert_eq!((told.status, &told.json["replay"]["resumed"]), (0, &json!(false)), "{}", told.log);
    assert_ne!(told.session_id(), killed);
    let left = "select count(*) from jobs where session_id = $1 and runner <> ''";
    assert_eq!(stage.world.database.value::<i64>(left, &killed).await, 0, "no later replay works for it");
    // Two commands at once share one replay.
    let (one, other) =
        tokio::join!(stage.replay(&["--tools", "recorded"]), stage.replay(&["--tools", "recorded"]));
    assert_eq!((one.status, other.status), (0, 0), "{:#}\n{}\n{}", one.json, one.log, other.log);
    let runs =
        "select count(*) from conversation_sessions where parent_session_id = $1 and replayed_at is null";
    assert_eq!(stage.world.database.value::<i64>(runs, &stage.world.session_id).await, 0);
}

#[tokio::test]
async fn what_the_code_would_let_out_the_database_keeps_in() {
    let stage = Stage::eventful().await;
    let told = stage.replay(&[]).await;
    let id = told.session_id();
    let deliver = "insert into deliveries (delivery_id, space_id, conversation_id, channel, ordinal, session_id, source_key, content)
        select 'dlv_' || $1, space_id, conversation_id, 'email', 1000, session_id, 'call', '{}'
        from conversation_sessions where session_id = $1";
    let start = "update tool_calls set status = 'started' where session_id = $1";
    for (sql, of) in [(deliver, &id), (start, &id)] {
        let refused = sqlx::query(sql).bind(of).execute(&stage.world.database.pool).await;
        let refused = refused.expect_err("it is refused").to_string();
        assert!(refused.contains("tools of session") && refused.contains("not live"), "{refused}");
    }
    // The database restricts only replays: a session whose tools are live may enqueue a delivery.
    sqlx::query(deliver).bind(&stage.world.session_id).execute(&stage.world.database.pool).await.unwrap();
}

#[tokio::test]
async fn another_model_is_given_the_users_messages_in_their_order_and_the_difference_is_told() {
    let stage = Stage::eventful().await;
    let before = stage.dump().await;
    // This model calls no tool and asks nothing. From its first answer on, the turns differ from the
    // source's.
    let other = crate::support::ModelServer::start(|body, _| {
        let messages = body["messages"].as_array().unwrap();
        let said = messages.iter().rev().find(|message| message["role"] == "user").unwrap();
        Answer::text(&format!("Heard: {}", said["content"].as_str().unwrap_or_default()))
    })
    .await;
    let page = stage.world.options.path("report.html");
    let told = stage
        .replay_with(
            |options| options.env("OPENAI_BASE_URL", &other.url),
            &["--model", "openai/other", "--report", page.to_str().unwrap()],
        )
        .await;
    assert_eq!(told.status, 8, "{}", told.log);
    assert_eq!(told.json["diff"]["verdict"], "tools");
    let replay = told.traces(&stage).await;
    let texts = |traces: &Traces| -> Vec<String> {
        let users = traces.records.iter().filter(|record| record["role"] == "user");
        users.map(|record| record["content"][0]["text"].as_str().unwrap().to_owned()).collect()
    };
    let mut given = texts(&stage.source().await);
    // The source's answer to a question becomes an ordinary message, because this model did not ask.
    given.insert(3, "Friday".to_owned());
    assert_eq!(texts(&replay), given);
    assert_eq!(other.bodies().len(), given.len(), "each is answered");
    let html = std::fs::read_to_string(page).unwrap();
    assert!(html.contains("Heard: A table for two, please."), "the page shows what it said");
    stage.assert_untouched(&before, &told).await;
}

#[tokio::test]
async fn what_follows_a_message_is_run_again_with_another_prompt() {
    let stage = Stage::eventful().await;
    let source = stage.source().await;
    let prompt = stage.world.options.path("prompt.txt");
    std::fs::write(&prompt, "You are another test.").unwrap();
    let last_user = messages(&source).iter().rposition(|message| message[1] == "user").unwrap();
    let from = source.records[last_user]["message_number"].as_i64().unwrap();
    let told = stage
        .replay(&[
            "--model",
            "recorded",
            "--tools",
            "recorded",
            "--from-message",
            &from.to_string(),
            "--system-prompt",
            prompt.to_str().unwrap(),
        ])
        .await;
    // The messages are the same, but the requests had other bytes. The report must say so.
    assert_eq!((told.status, &told.json["diff"]["verdict"]), (8, &json!("equal")), "{}", told.log);
    assert_eq!(told.json["replay"]["requests_differ"], true);
    let replay = told.traces(&stage).await;
    assert_eq!(messages(&replay), messages(&source));
    let own = answered(&replay).len();
    assert!(own > 0 && own < answered(&source).len(), "only the messages after the cut are run");
    assert_eq!(told.json["diff"]["requests"]["differ"], own);
}

#[tokio::test]
async fn a_replay_says_what_is_wrong_with_how_it_was_asked_for() {
    let stage = Stage::eventful().await;
    let id = stage.world.session_id.clone();
    for (args, status, said) in [
        (vec!["sess_none"], 3, "sess_none"),
        (vec!["no-such-file.jsonl"], 2, "neither a session's id"),
        (vec![id.as_str(), "--tools", "live"], 2, "--yes"),
        (vec![id.as_str(), "--from-message", "4711"], 4, "no message 4711"),
        (vec![id.as_str(), "--system-prompt", "missing.txt"], 2, "missing.txt"),
        (vec![id.as_str(), "--model", "nobody/nothing"], 2, "nobody"),
        (vec![id.as_str(), "--model", "anthropic/claude"], 2, "ANTHROPIC_API_KEY is not set"),
        (vec![id.as_str(), "--report", "no-such-folder/page.html"], 2, "no-such-folder"),
        (vec!["--suite", "."], 2, "no bundle"),
    ] {
        let told = stage.command(|options| options, &args).await;
        assert_eq!(told.status, status, "{args:?}: {}", told.log);
        assert!(told.log.contains(said) || told.output.contains(said), "{args:?}: {}", told.log);
    }
}

#[tokio::test]
async fn live_tools_do_it_again() {
    let stage = Stage::eventful().await;
    let (effects, mails) = (stage.world.options.effects().len(), stage.world.mails());
    let told = stage.replay(&["--model", "recorded", "--tools", "live", "--yes"]).await;
    assert_eq!(told.status, 0, "{}", told.log);
    assert_eq!(stage.world.options.effects().len(), effects + 2, "charge and reserve");
    // The mail that the replay composed waits for the deployed workers.
    let process = stage.world.serve().await;
    stage.world.has_mails(mails + 1).await;
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_bundle_is_replayed_where_nobody_knows_its_agent_its_model_or_its_tools() {
    let stage = Stage::eventful().await;
    let bundle = stage.bundle("bundle.jsonl").await;
    let elsewhere = Database::new().await;
    let mut options = Options::new();
    options.dir = std::sync::Arc::clone(&stage.world.options.dir);
    let args = ["replay", &bundle, "--model", "recorded", "--tools", "recorded", "-o", "json"];
    options.args = args.map(str::to_owned).to_vec();
    let (status, process) = options.spawn(&elsewhere.url).ended().await;
    assert_eq!(status.code(), Some(0), "{}\n{}", process.output(), process.log());
    let told: Value = serde_json::from_str(&process.output()).unwrap();
    let replay = Traces::of(&elsewhere, told["replay"]["session_id"].as_str().unwrap()).await;
    let source = stage.source().await;
    assert_eq!(messages(&replay), messages(&source));
    assert_eq!(answered(&replay), answered(&source));
    assert_eq!(told["diff"]["verdict"], "equal");
}

#[tokio::test]
async fn a_folder_of_bundles_is_a_suite_with_a_line_each() {
    let stage = Stage::eventful().await;
    for name in ["suite/one.jsonl", "suite/two.jsonl"] {
        stage.bundle(name).await;
    }
    let dir = stage.world.options.path("suite");
    let suite = async |args: &[&str]| {
        let all: Vec<&str> = ["--suite", dir.to_str().unwrap(), "--model", "recorded", "-o", "json"]
            .into_iter()
            .chain(args.iter().copied())
            .collect();
        let told = stage.command(|options| options, &all).await;
        let lines: Value = serde_json::from_str(&told.output).unwrap_or_else(|_| panic!("{}", told.log));
        (told.status, lines)
    };
    // Dry runs of charge and reserve return other texts. No other tool is called.
    let (status, lines) = suite(&["--fail-on", "tools"]).await;
    assert_eq!(status, 0, "{lines:#}");
    let verdicts: Vec<&Value> = lines.as_array().unwrap().iter().map(|line| &line["verdict"]).collect();
    assert_eq!(verdicts, ["prose", "prose"]);
    assert_eq!(suite(&["--fail-on", "any"]).await.0, 8);
    let (status, lines) = suite(&["--fail-on", "any", "--tools", "recorded", "--jobs", "1"]).await;
    assert_eq!((status, &lines[0]["verdict"]), (0, &json!("equal")), "{lines:#}");
    assert_eq!(lines[0]["requests_differ"], 0);

    std::fs::write(dir.join("broken.jsonl"), "{}\n").unwrap();
    let (status, lines) = suite(&["--fail-on", "none"]).await;
    assert_eq!((status, &lines[0]["bundle"]), (1, &json!("broken.jsonl")));
    assert_eq!(lines[0]["verdict"], "failed");
    assert_eq!(lines.as_array().unwrap().len(), 3, "the others are run all the same");
}
