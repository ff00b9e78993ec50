//! Sessions on a terminal: listed, shown, tailed, sent messages, cancelled and retried.

use super::*;

#[tokio::test]
async fn a_list_is_of_what_came_in_and_copies_are_shown_when_asked_for() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
    let options = options(&model);
    let process = options.serve(&database).await;
    let client = process.client();
    for (conversation, trigger_type) in [("c1", "chat"), ("c2", "replay"), ("c3", "import"), ("c4", "fork")] {
        let answer = client.chat(conversation, "Hi").await;
        client.wait_for(answer["session_id"].as_str().unwrap(), "completed").await;
        sqlx::query("update conversation_sessions set trigger_type = $2 where conversation_id = $1")
            .bind(format!("default/{conversation}"))
            .bind(trigger_type)
            .execute(&database.pool)
            .await
            .unwrap();
    }
    let cases: [(&[&str], &str, &[&str]); 4] = [
        (&[], "", &["c4", "c1"]),
        (&["--all"], "?all=true", &["c4", "c3", "c2", "c1"]),
        (&["--trigger", "replay"], "?trigger_type=replay", &["c2"]),
        (&["--conversation", "c3"], "?conversation_id=c3", &["c3"]),
    ];
    for (arguments, query, expected) in cases {
        let args = [&["session", "list", "-o", "json"][..], arguments].concat();
        let listed = run(&options, &database.url, &args).await.json();
        let (_, page) = client.get(&format!("/v1/sessions{query}")).await;
        for items in [&listed, &page["items"]] {
            let items = items.as_array().unwrap();
            let found: Vec<&str> = items.iter().map(|one| one["conversation_id"].as_str().unwrap()).collect();
            assert_eq!(found, expected, "{args:?}");
        }
    }
    let refused = run(&options, &database.url, &["session", "list", "--trigger", "bogus"]).await;
    assert!(refused.code == 2 && refused.err.contains("there are: chat, email, message"), "{}", refused.err);
    let (status, problem) = client.get("/v1/sessions?trigger_type=bogus").await;
    assert_eq!(status.as_u16(), 400, "{problem}");
    // A program's own route can set a trigger type of its own.
    sqlx::query("update conversation_sessions set trigger_type = 'ticket' where trigger_type = 'fork'")
        .execute(&database.pool)
        .await
        .unwrap();
    assert_eq!(
        run(&options, &database.url, &["session", "list", "--trigger", "ticket"]).await.out.lines().count(),
        1
    );
    assert_eq!(run(&options, &database.url, &["session", "list", "--trigger", "fork"]).await.code, 0);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_session_is_listed_shown_and_tailed() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![
        Answer::call("reserve", json!({"persons": 2})),
        Answer::text("Your table is reserved."),
    ])
    .await;
    let options = options(&model);
    let process = options.serve(&database).await;
    let client = process.client();
    let answer = client.chat("c1", "A table for two, please.").await;
    let id = answer["session_id"].as_str().unwrap();
    client.wait_for(id, "completed").await;
    let cli = async |args: &[&str]| run(&options, &database.url, args).await;

    let list = cli(&["session", "list"]).await;
    assert_eq!((list.code, list.out.lines().count()), (0, 1), "{}", list.err);
    assert!(list.out.starts_with(&format!("{id}\tcompleted\t2\t")) && list.is_tame(), "{}", list.out);
    let list = cli(&["session", "list", "--conversation", "c1", "-o", "json"]).await;
    assert_eq!(list.json()[0]["session_id"], id);
    assert_eq!(cli(&["session", "list", "--status", "failed", "-o", "json"]).await.json(), json!([]));
    assert_eq!(cli(&["session", "list", "--conversation", "other"]).await.out, "");
    let table = cli(&["session", "list", "-o", "table"]).await;
    assert!(table.out.starts_with("SESSION") && table.is_tame(), "{}", table.out);

    let show = cli(&["session", "show", id]).await;
    assert_eq!(show.code, 0, "{}", show.err);
    for part in [
        "A table for two, please.",
        "→ reserve {\"persons\":2}",
        "Your table is reserved.",
        "Reserved for 2.",
    ] {
        assert!(show.out.contains(part), "{part}: {}", show.out);
    }
    for heading in ["Transcript", "Steps", "Tool calls"] {
        assert!(show.out.lines().any(|line| line == heading), "{heading}: {}", show.out);
    }
    assert!(show.is_tame());
    assert_eq!(cli(&["session", "show", id, "-o", "json"]).await.json(), client.session(id).await);

    let tail = cli(&["session", "tail", id]).await;
    assert!(
        tail.out.contains("MESSAGE_RECEIVED") && tail.out.contains("running → completed"),
        "{}",
        tail.out
    );
    let lines = cli(&["session", "tail", id, "--after", "2", "-o", "jsonl"]).await;
    let seqs: Vec<i64> = lines
        .out
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["seq"].as_i64().unwrap())
        .collect();
    assert_eq!(seqs, (3..3 + seqs.len() as i64).collect::<Vec<_>>(), "dense, after 2");
    assert_eq!(
        cli(&["session", "tail", id, "-o", "json"]).await.json().as_array().unwrap().len(),
        seqs.len() + 2
    );
}

#[tokio::test]
async fn a_failed_run_says_why_and_a_retry_wakes_a_worker_at_once() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, number| match number {
        0 => Answer::Error(400),
        _ => Answer::text("Now it works."),
    })
    .await;
    // It polls once an hour, so only a notification can wake the worker.
    let options = options(&model).env("WAKEFUL_QUEUE__POLL_MS", "3600000");
    let process = options.serve(&database).await;
    let client = process.client();
    let answer = client.chat("c1", "Hello.").await;
    let id = answer["session_id"].as_str().unwrap();
    client.wait_for(id, "failed").await;
    let cli = async |args: &[&str]| run(&options, &database.url, args).await;

    let why = cli(&["session", "why", id]).await;
    assert_eq!(why.code, 0, "{}", why.err);
    assert!(why.out.contains("refused the request (status 400)"), "{}", why.out);
    assert!(why.out.contains(&format!("wakeful session retry {id}")), "{}", why.out);
    let list = cli(&["session", "list", "--status", "failed"]).await;
    assert!(list.out.contains("status 400"), "{}", list.out);

    let retry = cli(&["session", "retry", id, "--reason", "the model is back", "-o", "json"]).await;
    assert_eq!(retry.json()["run_id"], answer["run_id"], "the same run goes on");
    client.wait_for(id, "completed").await;
    assert!(cli(&["session", "why", id]).await.out.contains("Nothing holds it up"));
}

#[tokio::test]
async fn a_provider_that_fails_is_named_with_the_next_attempt() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, _| Answer::Error(500)).await;
    let options = options(&model).config("[agents.default.limits]\nattempts = 50");
    let process = options.serve(&database).await;
    let client = process.client();
    let answer = client.chat("c1", "Hello.").await;
    let id = answer["session_id"].as_str().unwrap();
    // Wait until the failed attempts have made the delay before the next one long enough.
    let why = eventually("a delayed step", || async {
        let why = run(&options, &database.url, &["session", "why", id]).await;
        why.out.contains("is tried again in").then_some(why)
    })
    .await;
    assert!(why.out.contains("(status 500)"), "{}", why.out);
    let json = run(&options, &database.url, &["session", "why", id, "-o", "json"]).await.json();
    assert!(json["standing"]["jobs"][0]["last_error"].as_str().unwrap().contains("500"), "{json}");
}

#[tokio::test]
async fn a_running_session_names_its_worker_takes_messages_and_is_cancelled() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("A long answer.")]).await;
    model.hold();
    let options = options(&model);
    let process = options.serve(&database).await;
    let client = process.client();
    let answer = client.chat("c1", "Hello.").await;
    let id = answer["session_id"].as_str().unwrap();
    model.asked(1).await;
    let cli = async |args: &[&str]| run(&options, &database.url, args).await;

    let why = eventually("a heartbeat", || async {
        let why = cli(&["session", "why", id]).await;
        why.out.contains("and alive").then_some(why)
    })
    .await;
    assert!(why.out.contains("is at step 1"), "{}", why.out);
    let status = cli(&["queue", "status", "-o", "json"]).await.json();
    assert_eq!(status["queues"][0]["leased"], 1, "{status}");
    assert_eq!(status["workers"][0]["leases"], 1, "{status}");
    let status = cli(&["queue", "status"]).await;
    assert!(
        status.out.contains("queue\tstep\t0\t1\t0") && status.out.contains("\talive\t"),
        "{}",
        status.out
    );

    let sent = cli(&["session", "send", id, "And one more thing.", "-o", "json"]).await;
    assert_eq!(sent.json()["outcome"], "queued");
    assert!(cli(&["session", "why", id]).await.out.contains("1 message waits for the next step boundary"));
    assert_eq!(cli(&["session", "retry", id]).await.code, 4);
    assert_eq!(cli(&["session", "cancel", id, "--reason", "enough"]).await.code, 0);
    let session = client.wait_for(id, "cancelled").await;
    assert_eq!(session["error"], "cancelled");
    assert!(cli(&["session", "why", id]).await.out.contains("was cancelled"));
}

#[tokio::test]
async fn a_tail_goes_on_as_entries_are_written() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Done.")]).await;
    let options = options(&model);
    let process = options.serve(&database).await;
    let client = process.client();
    let answer = client.chat("c1", "First.").await;
    let id = answer["session_id"].as_str().unwrap();
    client.wait_for(id, "completed").await;

    let tail = command(&options, &["session", "tail", id, "--follow"]).spawn(&database.url);
    eventually("what was", || async { tail.output().contains("completed").then_some(()) }).await;
    client.chat("c1", "Second.").await;
    eventually("what comes", || async {
        let seen = tail.output();
        let after = seen.split_once("Second.").map(|(_, after)| after.to_owned())?;
        after.contains("→ completed").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_message_to_a_session_that_has_ended_names_the_way_on() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Done.")]).await;
    let options = options(&model);
    let process = options.serve(&database).await;
    let client = process.client();
    let answer = client.chat("c1", "First.").await;
    let id = answer["session_id"].as_str().unwrap();
    client.wait_for(id, "completed").await;
    for (end, possible) in [("archive", "possible: terminate; "), ("terminate", "")] {
        assert_eq!(run(&options, &database.url, &["session", end, id]).await.code, 0);
        let refused = run(&options, &database.url, &["session", "send", id, "Second."]).await;
        let expected = format!(
            "send is not possible now; {possible}to go on in its conversation: wakeful session new c1\n"
        );
        assert!(refused.code == 4 && refused.err.ends_with(&expected), "{}", refused.err);
    }
    assert_eq!(run(&options, &database.url, &["session", "new", "c1"]).await.code, 0);
}
