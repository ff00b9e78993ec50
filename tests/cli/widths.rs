//! What a terminal of 80 columns shows: no line is longer, and nothing is lost without a word.

use super::*;
use crate::support::messengers::WEBHOOK_SECRET;

/// A command as `watch` would run it: a table that is 80 columns wide.
async fn narrow(options: &Options, database: &Database, args: &[&str]) -> Ran {
    let args = [args, &["-o", "table"]].concat();
    let ran = run(&command(options, &[]).env("COLUMNS", "80"), &database.url, &args).await;
    assert_eq!(ran.code, 0, "{args:?}: {}", ran.err);
    ran
}

#[tokio::test]
async fn no_line_is_wider_than_a_terminal_of_eighty_columns() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| match body["messages"].to_string() {
        said if said.contains("fail") => Answer::Error(400),
        said if said.contains("\"role\":\"tool\"") => Answer::text("Your table is reserved."),
        _ => Answer::call("reserve", json!({"persons": 2})),
    })
    .await;
    let options = options(&model).config(&format!(
        "[web]\nprivate_hosts = [\"127.0.0.1\"]\n[[notify]]\nname = \"operators\"\nto = \"webhook\"\n\
         url = \"http://127.0.0.1:9/\"\nsecrets = [\"{WEBHOOK_SECRET}\"]\nwindow_s = 0.2",
    ));
    let process = options.serve(&database).await;
    let client = process.client();
    let reserved = client.chat("a-table-for-two", "A table for two, please.").await;
    let id = reserved["session_id"].as_str().unwrap();
    client.wait_for(id, "completed").await;
    let failed = client.chat("c2", "This will fail.").await;
    client.wait_for(failed["session_id"].as_str().unwrap(), "failed").await;
    eventually("a notification", || async {
        let listed = run(&options, &database.url, &["notification", "list"]).await;
        (!listed.out.is_empty()).then_some(())
    })
    .await;
    let why = "the prompt of this agent was mended by the people of the second floor";
    let archive = ["session", "archive", "--filter", "status=failed", "--yes", "--reason", why];
    let acts: [&[&str]; 4] = [
        &["session", "send", id, "And a window seat, if there is one."],
        &["pause", "begin", "agent", "another-agent", "--reason", why, "--for", "2h"],
        &["token", "create", "--scope", "read", "--name", "the dashboard of the second floor"],
        &archive,
    ];
    // A worker groups the failures beside its steps.
    let group = eventually("a group of failures", || async {
        let errors = run(&options, &database.url, &["errors", "list", "-o", "json"]).await.json();
        errors[0]["fingerprint"].as_str().map(str::to_owned)
    })
    .await;
    let shown = narrow(&options, &database, &["errors", "show", &group]).await;
    assert!(shown.out.contains("--filter error="), "{}", shown.out);
    let mut seen = vec![("errors show".to_owned(), shown.out)];
    for args in acts {
        let ran = run(&options, &database.url, args).await;
        assert_eq!(ran.code, 0, "{args:?}: {}", ran.err);
    }
    client.wait_for(id, "completed").await;
    let commands: [&[&str]; 19] = [
        &["session", "list", "--all"],
        &["session", "show", id],
        &["session", "why", id],
        &["conversation", "sessions", "a-table-for-two"],
        &["conversation", "history", "a-table-for-two"],
        &["audit", "list"],
        &["batch", "list"],
        &["effect", "list"],
        &["errors", "list"],
        &["notification", "list"],
        &["delivery", "list"],
        &["mail", "list"],
        &["pause", "list"],
        &["queue", "status"],
        &["schedule", "list"],
        &["token", "list"],
        &["conversation", "holds"],
        &["worker", "list"],
        &["session", "tree", id],
    ];
    for args in commands {
        seen.push((args.join(" "), narrow(&options, &database, args).await.out));
    }
    let of = |name: &str| &seen.iter().find(|(args, _)| args == name).expect("it ran").1;
    assert!(of("audit list").contains(&format!("why: {why}")), "{}", of("audit list"));
    assert!(of("batch list").contains(&format!("why: {why}")), "{}", of("batch list"));
    assert!(of("notification list").contains("rule: operators"), "{}", of("notification list"));
    let wide: Vec<String> = seen
        .iter()
        .flat_map(|(args, out)| out.lines().map(move |line| (args, line)))
        .filter(|(_, line)| line.chars().count() > 80)
        .map(|(args, line)| format!("{args}: {}: {line}", line.chars().count()))
        .collect();
    assert!(wide.is_empty(), "{}", wide.join("\n"));
}
