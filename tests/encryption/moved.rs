//! A sealed value that somebody has out of a backup, and writes where he can.

use super::{MASTER, options};
use crate::support::{Answer, Database, ModelServer};
use serde_json::json;

#[tokio::test]
async fn a_sealed_value_opens_in_no_row_of_another_conversation() {
    let (database, model) = (Database::new().await, ModelServer::turns(vec![Answer::text("Gladly.")]).await);
    let keys = tempfile::tempdir().unwrap();
    let options = options(&model, keys.path().to_str().unwrap(), MASTER).arg("--roles=api");
    let process = options.serve(&database).await;
    let client = process.client();
    client.chat("sealed", "the secret word").await;
    let sealed: String =
        database.value("select content from session_inbox where content like $1", "%wks1%").await;
    assert!(!sealed.contains("secret"), "{sealed}");
    let body = json!({"user_id": "eve", "text": "Hi", "agent": "open"});
    let (_, open) = client.post("/v1/chat/open/messages", &body).await;
    let own: String =
        database.value("select session_id from conversation_sessions where agent = $1", "default").await;
    // As the subject of a mail to another conversation, to none, and to its own.
    for (message_id, session_id) in
        [("of_another", open["session_id"].as_str()), ("of_none", None), ("own", Some(&own))]
    {
        sqlx::query(
            "insert into mails (space_id, mailbox_id, message_id, session_id, conversation_id, subject, subject_key, body_sha256,
                answers, dropped)
            values ('default', 'default', $1, $2, (select conversation_id from conversation_sessions where session_id = $2), $3,
                '', '', '{}', case when $2 is null then 'for a test' end)",
        )
        .bind(message_id)
        .bind(session_id)
        .bind(&sealed)
        .execute(&database.pool)
        .await
        .unwrap();
    }
    let (_, mails) = client.get("/v1/mails").await;
    for mail in mails["items"].as_array().unwrap() {
        let is_read = mail["subject"].to_string().contains("the secret word");
        assert_eq!(is_read, mail["message_id"] == "own", "{mail}");
    }
    assert_eq!(mails["items"].as_array().unwrap().len(), 3);
}
