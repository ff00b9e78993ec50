//! Mail that arrives while the server is at its intake limit.

use super::lmtp::Lmtp;
use super::{SUPPORT, mail, options, post, says, taken};
use crate::support::{Database, eventually};
use reqwest::StatusCode;
use serde_json::json;
use sqlx::{Connection, PgConnection};

#[tokio::test]
async fn a_mail_that_is_one_too_many_is_told_so_by_each_door_and_not_that_the_database_is_away() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    // Two connections serve intake. A request that gets none in 100 ms is refused.
    let options = options(&model)
        .config("[database]\nmax_connections = 8")
        .env("WAKEFUL_SERVER__INGEST_WAIT_MS", "100")
        .arg("--roles=api");
    let process = options.serve(&database).await;
    let client = process.client();
    let mut lock = PgConnection::connect(&database.url).await.unwrap();
    sqlx::raw_sql("begin; lock table conversation_sessions in access exclusive mode")
        .execute(&mut lock)
        .await
        .unwrap();
    let chats: Vec<_> = (0..2)
        .map(|number| {
            let client = client.clone();
            let body = json!({"user_id": "ann", "text": "Hello?"});
            tokio::spawn(async move { client.post(&format!("/v1/chat/held{number}/messages"), &body).await })
        })
        .collect();
    eventually("both connections to wait", || async {
        let waiting = "select count(*) from pg_stat_activity
            where datname = current_database() and wait_event_type = 'Lock' and $1 <> ''";
        (database.value::<i64>(waiting, "any").await >= 2).then_some(())
    })
    .await;
    let text = mail("m1@example.com", "Lunch", "", "Shall we?");
    let (status, answer) = post(&client, text.clone()).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{answer}");
    assert!(answer["detail"].as_str().unwrap().contains("too many messages come in at once"), "{answer}");
    let reply = Lmtp::greeted(&process).await.send(SUPPORT, &text).await;
    assert!(reply.starts_with("451 4.3.2 too many messages come in at once"), "{reply}");
    sqlx::raw_sql("commit").execute(&mut lock).await.unwrap();
    for chat in chats {
        assert_eq!(chat.await.unwrap().0, StatusCode::ACCEPTED);
    }
    // Later it is taken, once.
    taken(&client, text).await;
}
