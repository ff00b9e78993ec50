//! The person is told when a run fails for good, and when it takes long: once each, whatever dies meanwhile (K63).

use super::*;
use crate::support::checker::Traces;

const SORRY: &str = "Sorry, that did not work.";
const LATER: &str = "This takes longer than usual.";

/// Adds these lines to the desk's agent.
fn agent(desk: &mut Desk, lines: &str) {
    let section = "[agents.default]\n";
    assert!(desk.options.config.contains(section), "{}", desk.options.config);
    desk.options.config = desk.options.config.replacen(section, &format!("{section}{lines}\n"), 1);
}

/// A desk whose model refuses every request, and whose agent says so to the person.
async fn refusing() -> Desk {
    let mut desk = Desk::whose_model(|_| Answer::Error(401)).await;
    agent(&mut desk, &format!("on_failed = {SORRY:?}"));
    desk
}

#[tokio::test]
async fn k63_a_person_is_told_once_that_a_run_failed_whichever_commit_is_killed() {
    for failpoint in ["", "K5=1*off->1*return", "K22=1*off->1*return"] {
        let desk = refusing().await;
        let process = desk.serve_until(failpoint).await;
        Post::new(Medium::Webhook, 1, 1, "Hello").send(&process.client()).await;
        let process = if failpoint.is_empty() {
            process
        } else {
            let (status, dead) = process.ended().await;
            assert!(!status.success() && dead.log().contains("failpoint"), "{failpoint}: {}", dead.log());
            desk.serve().await
        };
        desk.messengers.has(1).await;
        desk.is_done().await;
        assert_eq!(desk.messengers.texts(), [SORRY], "{failpoint}");
        let id = desk.session("default/w1").await;
        let client = process.client();
        client.wait_for(&id, "failed").await;

        // The same run fails again: the person knows that.
        let (status, _) = client.post(&format!("/v1/sessions/{id}/retry"), &json!({})).await;
        assert_eq!(status, StatusCode::ACCEPTED);
        desk.is_done().await;
        client.wait_for(&id, "failed").await;
        assert_eq!(desk.messengers.texts(), [SORRY], "{failpoint}");

        // Their next message is another run.
        Post::new(Medium::Webhook, 1, 2, "And now?").send(&client).await;
        desk.messengers.has(2).await;
        desk.is_done().await;
        assert_eq!(desk.messengers.texts(), [SORRY, SORRY], "{failpoint}");
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn a_chat_reads_in_its_stream_that_its_run_failed() {
    let desk = refusing().await;
    let process = desk.serve().await;
    let client = process.client();
    let id = client.chat("c1", "Hello").await["session_id"].as_str().unwrap().to_owned();
    client.wait_for(&id, "failed").await;
    let told =
        Traces::of(&desk.database, &id).await.journal("PERSON_TOLD").into_iter().cloned().collect::<Vec<_>>();
    assert_eq!(told, [json!({"reason": "failed", "text": SORRY})]);
    assert!(desk.outbox().await.is_empty());
}

#[tokio::test]
async fn k63_a_person_is_told_once_that_a_run_takes_long_and_gets_the_reply_all_the_same() {
    for failpoint in ["", "K63_tell=1*return", "K63_told=1*return"] {
        let mut desk = Desk::new().await;
        agent(&mut desk, &format!("on_delayed = {{ after_s = 0.3, text = {LATER:?} }}"));
        desk.model.hold();
        let process = desk.serve_until(failpoint).await;
        Post::new(Medium::Webhook, 1, 1, "Hello").send(&process.client()).await;
        let process = if failpoint.is_empty() {
            process
        } else {
            let (status, dead) = process.ended().await;
            assert!(!status.success() && dead.log().contains("failpoint"), "{failpoint}: {}", dead.log());
            desk.serve().await
        };
        desk.messengers.has(1).await;
        assert_eq!(desk.messengers.texts(), [LATER], "{failpoint}");
        desk.model.release();
        desk.messengers.has(2).await;
        desk.is_done().await;
        assert_eq!(desk.messengers.texts(), [LATER, "Re: Hello"], "{failpoint}");
        assert!(process.terminate().success());
    }
}
