//! The command against a database with open sessions.

use crate::cli::run;
use crate::support::{Answer, Database, ModelServer, Options};
use serde_json::json;

#[tokio::test]
async fn preflight_counts_what_a_configuration_would_stop_shows_some_and_exits_with_nine() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, _| Answer::call("ask_user", json!({"question": "Which day?"}))).await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();
    let mut waiting = Vec::new();
    for n in 0..5 {
        let answer = client.chat(&format!("c{n}"), "Hello.").await;
        waiting.push(answer["session_id"].as_str().unwrap().to_owned());
    }
    for id in &waiting {
        client.wait_for(id, "waiting_input").await;
    }
    // The configuration that runs, one without the agent, and one whose agent may not ask.
    let present = std::fs::read_to_string(options.path("wakeful.toml")).unwrap();
    let gone = options.path("gone.toml");
    std::fs::write(&gone, present.replace("[agents.default]", "[agents.other]")).unwrap();
    let silent = options.path("silent.toml");
    std::fs::write(
        &silent,
        present
            .replace("\"ask_user\", ", "")
            .replace("[server]", "[agents.default.limits]\nsteps = 1\n[server]"),
    )
    .unwrap();
    let cli = async |args: &[&str]| run(&options, &database.url, args).await;

    let same = options.path("wakeful.toml").display().to_string();
    let ran = cli(&["preflight", "--against", &same]).await;
    assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("Everything can go on: 5 open sessions"), "{}", ran.out);
    let ran = cli(&["preflight", "--against", &process.url()]).await;
    assert_eq!(ran.code, 0, "the server that runs: {}{}", ran.out, ran.err);

    let ran = cli(&["preflight", "--against", &gone.display().to_string(), "-o", "json"]).await;
    assert_eq!(ran.code, 9, "{}{}", ran.out, ran.err);
    let report = ran.json();
    assert_eq!((&report["stopped"], &report["open_sessions"]), (&json!(5), &json!(5)), "{report}");
    let finding = &report["findings"][0];
    assert_eq!((&finding["kind"], &finding["sessions"]), (&json!("agent_gone"), &json!(5)), "{report}");
    let samples: Vec<&str> =
        finding["samples"].as_array().unwrap().iter().map(|id| id.as_str().unwrap()).collect();
    assert_eq!(samples.len(), 3);
    assert!(samples.iter().all(|id| waiting.iter().any(|one| one == id)), "{report}");

    let ran = cli(&["preflight", "--against", &silent.display().to_string()]).await;
    assert_eq!(ran.code, 9, "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("may not use tool ask_user"), "{}", ran.out);
    assert!(ran.out.contains("at most 1 steps a run") && ran.out.contains("→ keep"), "{}", ran.out);
    assert!(ran.out.contains("5 sessions cannot go on as now"), "{}", ran.out);

    // Ann has written by Telegram, and the new configuration lists others.
    let by_telegram = format!(
        "update conversation_sessions
        set policy = coalesce(policy, '{{}}') || '{{\"reply\": {{\"channel\": \"telegram\", \"to\": {{\"chat_id\": 1}}}}}}'
        where session_id = '{}'",
        waiting[0]
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(by_telegram)).execute(&database.pool).await.unwrap();
    let telegram = |users: &str| {
        format!(
            "[messenger.telegram]\ntoken = \"1:a\"\nwebhook_secrets = [\"0123456789abcdef\"]\nallow_users = [\"{users}\"]"
        )
    };
    let open = options.clone().config(&telegram("*"));
    let fewer = options.path("fewer.toml");
    std::fs::write(&fewer, format!("{present}\n{}\n", telegram("bob"))).unwrap();
    let against = ["preflight", "--against", &fewer.display().to_string(), "-o", "json"];
    let ran = run(&open, &database.url, &against).await;
    assert_eq!(ran.code, 9, "{}{}", ran.out, ran.err);
    let report = ran.json();
    let finding = &report["findings"][0];
    assert_eq!(report["findings"].as_array().unwrap().len(), 1, "{report}");
    assert_eq!((&finding["kind"], &finding["sessions"]), (&json!("speaker_shut_out"), &json!(1)), "{report}");
    assert_eq!(finding["what"], "telegram takes no message of user ann", "{report}");
    sqlx::raw_sql("update conversation_sessions set policy = policy - 'reply'")
        .execute(&database.pool)
        .await
        .unwrap();

    // Those that were not looked at may be stopped.
    let ran = cli(&["preflight", "--against", &same, "--limit", "3"]).await;
    assert_eq!(ran.code, 9, "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("What was looked at can go on") && ran.out.contains("--limit"), "{}", ran.out);

    // A session has ended, and its message waits.
    let ended = &waiting[0];
    let wait = format!(
        "update conversation_sessions set status = 'completed' where session_id = '{ended}';
        insert into deliveries (delivery_id, space_id, conversation_id, channel, ordinal, session_id, source_key, content)
        select 'dlv_1', space_id, conversation_id, 'pigeon', 1, session_id, '1', '{{}}' from conversation_sessions
        where session_id = '{ended}'"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(wait)).execute(&database.pool).await.unwrap();
    let ran = cli(&["preflight", "--against", &same, "-o", "json"]).await;
    assert_eq!(ran.code, 9, "{}{}", ran.out, ran.err);
    let report = ran.json();
    let finding = &report["findings"][0];
    assert_eq!((&finding["kind"], &finding["sessions"]), (&json!("channel_gone"), &json!(1)), "{report}");
    assert_eq!((&finding["samples"], &report["open_sessions"]), (&json!([ended]), &json!(4)), "{report}");

    let ran = cli(&["preflight", "--against", "ftp://example.org"]).await;
    assert_eq!(ran.code, 2, "{}", ran.err);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn conversations_that_rest_are_counted_if_their_agent_would_be_gone() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Done.")]).await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();
    let mut resting = Vec::new();
    for n in 0..4 {
        let answer = client.chat(&format!("c{n}"), "Hello.").await;
        resting.push(answer["session_id"].as_str().unwrap().to_owned());
        client.wait_for(&resting[n], "completed").await;
    }
    assert!(process.terminate().success());
    // The first conversation has gone on in a newer session, and the last one's session takes no more messages.
    let sql = format!(
        "update conversation_sessions set agent = 'old' where session_id <> '{}';
        update conversation_sessions set conversation_id = 'default/c1' where session_id = '{}';
        update conversation_sessions set status = 'archived' where session_id = '{}'",
        resting[2], resting[0], resting[3]
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&database.pool).await.unwrap();
    const OLD: &str = "[agents.old]\nsystem_prompt = \"Old.\"\nmodel = \"openai/test\"";
    let text = std::fs::read_to_string(options.path("wakeful.toml")).unwrap();
    let (with, without) = (options.path("with.toml"), options.path("without.toml"));
    std::fs::write(&with, format!("{text}\n{OLD}\n")).unwrap();
    std::fs::write(&without, text).unwrap();
    let (with, without) = (with.display().to_string(), without.display().to_string());
    let now = options.clone().config(OLD);

    let ran = run(&now, &database.url, &["preflight", "--against", &without, "-o", "json"]).await;
    assert_eq!(ran.code, 9, "{}{}", ran.out, ran.err);
    let report = ran.json();
    let finding = &report["findings"][0];
    assert_eq!((&finding["kind"], &finding["sessions"]), (&json!("agent_of_resting"), &json!(1)), "{report}");
    assert_eq!((&finding["samples"], &report["resting"]), (&json!([resting[1]]), &json!(1)), "{report}");
    let remedy = finding["remedy"].as_str().unwrap();
    assert!(remedy.contains("archive --filter agent=old --reason"), "{remedy}");
    assert_eq!(
        (&report["stopped"], report["findings"].as_array().unwrap().len()),
        (&json!(0), 1),
        "{report}"
    );
    let ran = run(&now, &database.url, &["preflight", "--against", &without]).await;
    assert!(
        ran.out.contains("agent old is gone") && ran.out.contains("and 1 conversation at rest could not"),
        "{}",
        ran.out
    );
    // An agent that stays is no obstacle, and neither is one that is missing already.
    for (configured, against) in [(&now, &with), (&options, &without)] {
        let ran = run(configured, &database.url, &["preflight", "--against", against]).await;
        assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    }
}
