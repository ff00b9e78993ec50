//! An outage that lasts, at the gate's default times: `WAKEFUL_OUTAGE_S=600` for ten minutes.

use super::{Provider, WAITING, count};
use crate::support::{Database, Options, eventually};
use futures::StreamExt as _;
use serde_json::json;
use std::time::{Duration, Instant};

const SESSIONS: i64 = 1000;

#[tokio::test]
#[ignore = "slow: make soak"]
async fn a_thousand_sessions_wait_for_a_provider_and_all_end_when_it_is_back() {
    let lasts = std::env::var("WAKEFUL_OUTAGE_S").ok();
    let lasts = Duration::from_secs(lasts.map_or(60, |seconds| seconds.parse().expect("seconds")));
    let (database, provider) = (Database::new().await, Provider::default());
    let model = provider.start().await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let mut processes = Vec::new();
    for _ in 0..3 {
        processes.push(options.serve(&database).await);
    }
    let client = processes[0].client();
    let posted = |prefix: &'static str| {
        let client = &client;
        async move {
            futures::stream::iter(0..SESSIONS)
                .for_each_concurrent(8, |n| async move {
                    let path = format!("/v1/chat/{prefix}{n}/messages");
                    let body = json!({"user_id": "ann", "text": "Hello."});
                    eventually("the message to be taken", || async {
                        let (status, answer) = client.post(&path, &body).await;
                        // On a busy machine it refuses some, and asks to send them again.
                        assert!(status == 202 || status == 429, "{status} {answer}");
                        (status == 202).then_some(())
                    })
                    .await;
                })
                .await;
        }
    };
    let completed = "select count(*) from conversation_sessions where status = 'completed' and $1 <> ''";
    // The same work without an outage.
    let began = Instant::now();
    posted("before-").await;
    eventually("the sessions of before", || async {
        (count(&database, completed).await == SESSIONS).then_some(())
    })
    .await;
    let work = began.elapsed();

    provider.is(503);
    let (asked, began) = (model.bodies().len(), Instant::now());
    posted("during-").await;
    eventually("all to wait", || async { (count(&database, WAITING).await >= SESSIONS - 1).then_some(()) })
        .await;
    let at_first = model.bodies().len() - asked;
    // The outage itself is what is tested: it lasts this long.
    tokio::time::sleep(lasts.saturating_sub(began.elapsed())).await;
    let refused = model.bodies().len() - asked;
    let minutes = began.elapsed().as_secs_f64() / 60.0;
    assert!(refused >= at_first, "the calls are counted");
    // 64 slots in each of three processes may have called when it began. Then one probe at a time, the first ones quickly.
    assert!(at_first <= 3 * 64 + 6, "{at_first}");
    assert!(
        (refused - at_first) as f64 <= 6.0 + 4.0 * minutes,
        "{refused} less {at_first} in {minutes} minutes"
    );

    provider.is(0);
    let back = Instant::now();
    eventually("all sessions", || async {
        (count(&database, completed).await == 2 * SESSIONS).then_some(())
    })
    .await;
    let took = back.elapsed();
    let failed = "select count(*) from session_events where payload ->> 'to_state' = 'failed' and $1 <> ''";
    assert_eq!(count(&database, failed).await, 0);
    assert_eq!(count(&database, "select count(*) from jobs where $1 <> ''").await, 0);
    println!(
        "{minutes:.1} minutes of outage: {at_first} calls refused at its begin, {} later, 0 runs failed. {SESSIONS} sessions took \
         {work:.1?} without an outage, and {took:.1?} after it.",
        refused - at_first
    );
    for process in processes {
        assert!(process.terminate().success());
    }
}
