//! Messengers in a space of their own: the same chat in two spaces is two conversations.

use super::*;

/// The desk's options, with each messenger in this space.
fn within(desk: &Desk, space: &str) -> Options {
    ["SLACK", "TELEGRAM", "WEBHOOK"].iter().fold(desk.options.clone(), |options, messenger| {
        options.env(&format!("WAKEFUL_MESSENGER__{messenger}__SPACE"), space)
    })
}

/// The conversations, each with what its rows say of the space.
async fn spaces(desk: &Desk) -> Vec<(String, String)> {
    sqlx::query_as(
        "select s.conversation_id, string_agg(distinct of_it.space_id, ' ')
        from conversation_sessions s
        join lateral (
            select s.space_id
            union all select space_id from conversation_counters where conversation_id = s.conversation_id
            union all select space_id from session_inbox where session_id = s.session_id
            union all select space_id from conversation_records where session_id = s.session_id
            union all select space_id from deliveries where session_id = s.session_id
        ) as of_it on true
        group by s.conversation_id
        order by s.conversation_id",
    )
    .fetch_all(&desk.database.pool)
    .await
    .unwrap()
}

#[tokio::test]
async fn one_chat_in_two_spaces_is_two_conversations() {
    let desk = Desk::new().await;
    for space in ["acme", "bolt"] {
        let process = within(&desk, space).serve(&desk.database).await;
        let client = process.client();
        for medium in ALL {
            // The same message with the same key.
            Post::new(medium, 1, 1, "Hello").send(&client).await;
            Post::new(medium, 1, 1, "Hello").send(&client).await;
        }
        desk.is_done().await;
        assert!(process.terminate().success());
    }
    let ids = ["slack/T1/C1/1.000001", "telegram/4242/1", "webhook/w1"];
    let found = spaces(&desk).await;
    assert_eq!(found.len(), 6, "{found:?}");
    for (conversation, spaces) in &found {
        let (space, id) = conversation.split_once('/').unwrap();
        assert!(["acme", "bolt"].contains(&space) && spaces == space, "{found:?}");
        assert_eq!(ids.iter().filter(|known| **known == id).count(), 1, "{found:?}");
    }
    assert_eq!(desk.taken().await, (6, 6, 6));
    let sent: i64 = desk.count("select count(*) from deliveries where status = 'sent' and $1 = ''").await;
    assert_eq!(sent, 6);
}

#[tokio::test]
async fn a_slack_thread_of_another_space_is_not_known() {
    let desk = Desk::new().await;
    let plain = |number, text: &str| Post {
        medium: Medium::Slack,
        id: String::new(),
        body: slack_event(1, number, text).to_string(),
    };
    let process = within(&desk, "acme").serve(&desk.database).await;
    let client = process.client();
    plain(1, "<@UBOT> lunch?").send(&client).await;
    plain(2, "Where?").send(&client).await;
    assert_eq!(desk.taken().await.1, 2);
    desk.is_done().await;
    assert!(process.terminate().success());
    let process = within(&desk, "bolt").serve(&desk.database).await;
    plain(3, "When?").send(&process.client()).await;
    assert_eq!(desk.taken().await.1, 2, "the agent of this space was not mentioned");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn in_a_full_chat_the_sender_is_told_in_its_space() {
    let desk = Desk::new().await;
    let process = within(&desk, "acme").arg("--roles=api").serve(&desk.database).await;
    let client = process.client();
    Post::new(Medium::Telegram, 1, 1, "one").send(&client).await;
    let session = desk.session("acme/telegram/4242/1").await;
    sqlx::query(
        "insert into session_inbox (space_id, session_id, client_key, content, content_sha256, run_id, outcome)
        select i.space_id, $1, 'filled-' || n, 'x', '', i.run_id, 'queued'
        from generate_series(1, 1000) n, session_inbox i
        where i.session_id = $1",
    )
    .bind(&session)
    .execute(&desk.database.pool)
    .await
    .unwrap();
    Post::new(Medium::Telegram, 1, 2, "is not taken").send(&client).await;
    let told: String =
        desk.database.value("select distinct space_id from deliveries where session_id = $1", &session).await;
    assert_eq!(told, "acme");
    assert!(process.terminate().success());
}
