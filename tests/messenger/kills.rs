//! A process that dies at each stage of a messenger's message: K1 and K2, K12 to K14 of the crash matrix.

use super::*;
use crate::support::messengers::Says;

#[tokio::test]
#[ignore = "slow: make soak"]
async fn k01_k02_a_message_whose_webhook_was_not_answered_is_one_message_when_it_comes_again() {
    for medium in ALL {
        for failpoint in ["K1=1*return", "K2=1*return"] {
            let desk = Desk::new().await;
            let process = desk.serve_until(failpoint).await;
            let post = Post::new(medium, 1, 1, "Hello");
            let unanswered = post.request(&process.client()).send().await;
            assert!(unanswered.is_err(), "{medium:?} {failpoint}: {unanswered:?}");
            let (status, process) = process.ended().await;
            assert!(!status.success() && process.log().contains("failpoint"), "{}", process.log());
            let committed = i64::from(failpoint.starts_with("K2"));
            assert_eq!(desk.taken().await.1, committed, "{medium:?} {failpoint}");

            let process = desk.serve().await;
            post.send(&process.client()).await;
            desk.messengers.has(1).await;
            desk.is_done().await;
            assert_eq!(desk.taken().await, (1, 1, 1), "{medium:?} {failpoint}");
            assert_eq!(desk.messengers.texts(), ["Re: Hello"], "{medium:?} {failpoint}");
            assert!(process.terminate().success());
        }
    }
}

/// Posts a message to a process that dies at `failpoint`, backdates the attempt so that its time is over, and
/// lets another process finish. Returns how the delivery ended and how often its text was sent.
async fn dies_and_comes_back(desk: &Desk, medium: Medium, failpoint: &str) -> (String, usize) {
    let process = desk.serve_until(failpoint).await;
    Post::new(medium, 1, 1, "Hello").send(&process.client()).await;
    let (status, process) = process.ended().await;
    assert!(!status.success() && process.log().contains("failpoint"), "{}", process.log());
    sqlx::query(
        "update deliveries set sending_at = sending_at - interval '1 hour',
            settled_by = settled_by - interval '1 hour'",
    )
    .execute(&desk.database.pool)
    .await
    .unwrap();
    let process = desk.serve().await;
    desk.is_done().await;
    assert_eq!(desk.taken().await, (1, 1, 1));
    let outbox = desk.outbox().await;
    assert_eq!(outbox.len(), 1, "{outbox:?}");
    let sent = desk.messengers.sent();
    assert!(sent.iter().all(|each| each.text == "Re: Hello" && each.key == sent[0].key), "{sent:?}");
    assert!(process.terminate().success());
    (outbox[0].0.clone(), sent.len())
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn k12_k13_k14_a_kill_around_a_send_is_settled_as_each_messenger_allows() {
    // How the delivery ends, and how often its text was sent.
    let table = [
        (Medium::Slack, [("sent", 1), ("sent", 1), ("sent", 1), ("sent", 1)]),
        (Medium::Telegram, [("sent", 1), ("uncertain", 0), ("uncertain", 1), ("sent", 1)]),
        // Sent twice under the same key, which tells the receiver that it is the same message.
        (Medium::Webhook, [("sent", 1), ("sent", 1), ("sent", 2), ("sent", 1)]),
    ];
    let each = table.into_iter().map(async |(medium, ends)| {
        for (failpoint, (status, times)) in ["K12_claim", "K12", "K13", "K14"].into_iter().zip(ends) {
            let desk = Desk::new().await;
            let end = dies_and_comes_back(&desk, medium, &format!("{failpoint}=1*return")).await;
            assert_eq!((end.0.as_str(), end.1), (status, times), "{medium:?} {failpoint}");
        }
    });
    futures::future::join_all(each).await;
}

#[tokio::test]
async fn k13_slack_is_believed_only_where_the_token_sees_what_messages_bear() {
    for scopes in ["chat:write,channels:history", "chat:write"] {
        let desk = Desk::new().await;
        desk.messengers.scopes(scopes);
        let end = dies_and_comes_back(&desk, Medium::Slack, "K13=1*return").await;
        assert_eq!((end.0.as_str(), end.1), ("uncertain", 1), "{scopes}");
    }
}

#[tokio::test]
async fn a_send_whose_answer_is_lost_is_looked_for_and_not_sent_again() {
    let desk = Desk::new().await;
    desk.messengers.says(Says { takes: true, ..Says::new(504, "the answer got lost") });
    let process = desk.serve().await;
    Post::new(Medium::Slack, 1, 1, "Hello").send(&process.client()).await;
    desk.messengers.has(1).await;
    desk.is_done().await;
    assert_eq!(desk.outbox().await[0].0, "sent");
    assert_eq!(desk.messengers.sent().len(), 1);
    assert!(process.terminate().success());
}
