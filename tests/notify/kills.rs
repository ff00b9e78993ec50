//! A process dies at each point around a notification: each transition is told once, counted at the receiver.

use super::*;

/// Where it dies: before and after the commit that makes the message, before and after the post.
const POINTS: [&str; 4] = ["K78_follow", "K79_followed", "K80_notify", "K81_notified"];

/// Fails some sessions while processes die one after another, and counts what the receiver got.
async fn told_once(kills: usize) {
    const EACH: i64 = 3;
    let mut stage = Stage::new("when = [\"failed\"]").await;
    // Each kill's transitions get a message of their own soon, and none waits for a lease.
    stage.options.config = stage
        .options
        .config
        .replace("quiet_s = 2", "quiet_s = 0.1")
        .replace("window_s = 0.2", "window_s = 0.1");
    stage.options =
        stage.options.env("WAKEFUL_QUEUE__LEASE_S", "0.6").env("WAKEFUL_QUEUE__HEARTBEAT_S", "0.2");
    let process = stage.serve().await;
    let first = stage.session(&process, "fine", 0, "completed").await;
    assert!(process.terminate().success());
    let all = EACH * kills as i64;
    stage.copies(&first, 1, all).await;
    // Without workers: their healer would take up the copies, which run and have no job, and each would fail a second time.
    stage.options = stage.options.arg("--roles=api");
    for kill in 0..kills {
        let point = POINTS[kill % POINTS.len()];
        let dying = stage.options.clone().env("FAILPOINTS", format!("{point}=1*return"));
        let process = dying.spawn(&stage.database.url);
        let from = kill as i64 * EACH + 1;
        stage.fail(from, from + EACH - 1).await;
        let (status, process) = process.ended().await;
        assert!(!status.success() && process.log().contains("failpoint"), "{point}: {}", process.log());
    }
    let process = stage.serve().await;
    let told = |messages: &[Value]| messages.iter().map(|one| one["count"].as_i64().unwrap()).sum::<i64>();
    stage.sink.until("everything to be told", |messages| told(messages) >= all).await;
    eventually("everything to be settled", || async {
        let open = "select count(*) from notifications where status in ('queued', 'sending') and $1 <> ''";
        (stage.count(open).await == 0).then_some(())
    })
    .await;
    assert!(process.terminate().success());
    let messages = stage.sink.messages();
    let mut told: Vec<i64> = messages
        .iter()
        .flat_map(|one| one["items"].as_array().unwrap())
        .map(|item| item["session_id"].as_str().unwrap().trim_start_matches("sess_copy_").parse().unwrap())
        .collect();
    // A message names at most fifty, and counts all.
    for one in &messages {
        let named = one["items"].as_array().unwrap().len() as i64;
        assert_eq!(named, one["count"].as_i64().unwrap().min(50), "{one}");
    }
    let named = told.len();
    told.sort_unstable();
    told.dedup();
    assert_eq!(told.len(), named, "no transition is told twice");
    assert_eq!(messages.iter().map(|one| one["count"].as_i64().unwrap()).sum::<i64>(), all);
    let members = "select count(*) from notification_members where $1 <> ''";
    let of_sessions = "select count(distinct session_id) from notification_members where $1 <> ''";
    assert_eq!([stage.count(members).await, stage.count(of_sessions).await], [all, all], "each once");
}

#[tokio::test]
async fn k78_k79_k80_k81_a_kill_around_a_notification_tells_each_transition_once() {
    told_once(8).await;
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn five_hundred_kills_around_notifications_tell_each_transition_once() {
    told_once(500).await;
}
