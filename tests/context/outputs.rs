//! Large outputs: stored whole next to the message that shows their ends, and exported with it.

use super::*;

/// A model that writes a file, reads it, reads the rest of that output, and then replies.
fn reader(body: &Value) -> Answer {
    let results =
        body["messages"].as_array().unwrap().iter().filter(|message| message["role"] == "tool").count();
    match results {
        0 => Answer::call("write_file", json!({"path": "long.txt", "content": long_text()})),
        1 => Answer::call("read_file", json!({"path": "long.txt"})),
        2 => {
            let excerpt = last_text(body);
            let id = excerpt.split("call_id \"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
            let offset: usize = excerpt
                .split("offset ")
                .nth(1)
                .and_then(|rest| rest.split('.').next())
                .unwrap()
                .parse()
                .unwrap();
            Answer::call("read_output", json!({"call_id": id, "offset": offset, "bytes": 1000}))
        }
        _ => Answer::text("I have read it."),
    }
}

/// 40,000 bytes in which every line names its number.
fn long_text() -> String {
    (0..4000).map(|line| format!("line {line:04}\n")).collect()
}

#[tokio::test]
async fn a_large_output_is_kept_whole_beside_the_message_that_shows_its_ends() {
    let talk = Talk::new("[agents.default.context]\nkeep_results = 0\ntrim_at_bytes = 600", reader).await;
    let process = talk.options.serve(&talk.database).await;
    let client = process.client();
    let id = talk.says(&client, &["Read it."]).await;
    weighs_the_same_without_messages(&client, &id).await;
    let trimmed = client.get(&format!("/v1/sessions/{id}/context?strategy=trim_tool_results")).await.1;
    assert!(trimmed["shown"].to_string().contains("of 40000 bytes is not shown any more"), "{trimmed}");
    let traces = talk.traces(&id).await;
    let results: Vec<&Value> = traces.records.iter().filter(|record| record["role"] == "tool").collect();
    let read = &results[1]["content"][0];
    let shown = read["content"].as_str().unwrap();
    assert!(
        shown.len() < 10_000 && shown.starts_with("line 0000\n") && shown.ends_with("line 3999\n"),
        "{shown}"
    );
    assert!(shown.contains("of 40000 bytes are left out here. Read on with read_output"), "{shown}");
    assert_eq!(read["output"]["bytes"], 40_000);
    let whole: Vec<u8> = sqlx::query_scalar("select bytes from blobs where sha256 = $1")
        .bind(read["output"]["sha256"].as_str().unwrap())
        .fetch_one(&talk.database.pool)
        .await
        .unwrap();
    assert_eq!(String::from_utf8(whole).unwrap(), long_text());
    let entry = traces.journal("TOOL_RESULT")[1];
    assert_eq!((&entry["bytes"], &entry["output_sha256"]), (&json!(40_000), &read["output"]["sha256"]));
    let part = results[2]["content"][0]["content"].as_str().unwrap();
    let offset = shown.find("\n\n[").unwrap();
    assert!(part.starts_with(&long_text()[offset..offset + 1000]), "{part}");
    assert!(part.ends_with(&format!(
        "[Bytes {offset} to {} of 40000; read on at offset {}]",
        offset + 1000,
        offset + 1000
    )));

    // A call id gives no access to another session's output.
    let store = talk.store().await;
    let call_id = CallId::from(read["call_id"].as_str().unwrap());
    let own = store.tool_output(&SessionId::from(id.as_str()), &call_id, 0, 9).await.unwrap().unwrap();
    assert_eq!((own.text.as_str(), own.bytes), ("line 0000", 40_000));
    assert_eq!(store.tool_output(&SessionId::from("sess_other"), &call_id, 0, 9).await.unwrap(), None);
}

#[tokio::test]
async fn k30_an_output_and_its_message_are_committed_together_or_not_at_all() {
    let talk = Talk::new("", reader).await;
    // The second step that ends is the one that reads the file.
    let killed = talk.options.clone().env("FAILPOINTS", "K21=1*off->1*return").serve(&talk.database).await;
    let answer = killed.client().chat("c1", "Read it.").await;
    let id = answer["session_id"].as_str().unwrap();
    let (status, _killed) = killed.ended().await;
    assert!(!status.success());
    let texts = "select count(*) from blobs where media_type like 'text/plain%' and $1 <> ''";
    let results = "select count(*) from conversation_records where role = 'tool' and session_id = $1";
    let found: (i64, i64) = (talk.database.value(texts, "all").await, talk.database.value(results, id).await);
    assert_eq!(found, (0, 1), "neither the output nor its message");

    let process = talk.options.serve(&talk.database).await;
    process.client().wait_for(id, "completed").await;
    let found: (i64, i64) = (talk.database.value(texts, "all").await, talk.database.value(results, id).await);
    assert_eq!(found, (1, 3));
    talk.traces(id).await;

    // A blob that someone deleted is noticed.
    sqlx::query("delete from blobs where media_type like 'text/plain%'")
        .execute(&talk.database.pool)
        .await
        .unwrap();
    let store = talk.store().await;
    assert!(!store.verify(id).await.unwrap().agrees);
}

#[tokio::test]
async fn a_bundle_has_the_outputs_that_its_messages_point_at() {
    let talk = Talk::new("", reader).await;
    let process = talk.options.serve(&talk.database).await;
    let id = talk.says(&process.client(), &["Read it."]).await;
    let traces = talk.traces(&id).await;
    let call_id = CallId::from(traces.records[3]["content"][0]["call_id"].as_str().unwrap());
    let store = talk.store().await;
    let (whole, redacted) = (bundle(&store, &id, false).await, bundle(&store, &id, true).await);
    sqlx::query("delete from blobs where media_type like 'text/plain%'")
        .execute(&talk.database.pool)
        .await
        .unwrap();
    let imported = SessionId::from(import(&store, &whole).await);
    let end = store.tool_output(&imported, &call_id, 39_990, 100).await.unwrap().unwrap();
    assert_eq!(end.text, "line 3999\n");
    let text = std::fs::read_to_string(redacted.path()).unwrap();
    assert!(!text.contains("line 0000") && !text.contains("bGluZSAwMDAw"), "neither as text nor encoded");
    let imported = SessionId::from(import(&store, &redacted).await);
    let shown = store.tool_output(&imported, &call_id, 0, 100).await.unwrap().unwrap();
    assert!(shown.text.starts_with("[redacted: 40000 bytes"), "{}", shown.text);
}
