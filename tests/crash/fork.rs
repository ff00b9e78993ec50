//! A kill while a session is forked.

use crate::support::World;
use crate::support::checker::{self, dump};
use reqwest::StatusCode;
use serde_json::json;

#[tokio::test]
async fn k29_a_kill_in_the_middle_of_a_fork_leaves_none_of_it_and_the_parent_as_it_was() {
    let mut world = World::new("killed", &["charge", "reserve"]).await;
    let process = world.serve_until("K29=1*return").await;
    let client = process.client();
    world.begin(&client).await;
    client.wait_for(&world.session_id, "completed").await;
    let before = dump(&world.database).await;
    let path = format!("/v1/sessions/{}/fork", world.session_id);
    let body = json!({"at": "last-user", "client_key": "k"});
    // The process dies after the fork's messages are copied and before its journal begins.
    let lost = client.post_request(&path).body(body.to_string()).send().await;
    assert!(lost.is_err(), "nothing is acknowledged");
    let (_, process) = process.ended().await;
    assert!(process.log().contains("failpoint K29"), "{}", process.log());
    assert_eq!(
        dump(&world.database).await,
        before,
        "the fork has no row, and the parent's rows are unchanged"
    );

    let process = world.serve().await;
    let client = process.client();
    let (status, forked) = client.post(&path, &body).await;
    assert_eq!(status, StatusCode::CREATED, "{forked}");
    let child = forked["session_id"].as_str().unwrap();
    client.wait_for(child, "completed").await;
    // Send the same request again, as a client does that lost the first answer.
    let (status, again) = client.post(&path, &body).await;
    assert_eq!((status, &again), (StatusCode::OK, &forked));
    let forks: i64 = world
        .database
        .value("select count(*) from conversation_sessions where parent_session_id = $1", &world.session_id)
        .await;
    assert_eq!(forks, 1);
    let effects = world.options.effects();
    for session_id in [child, &world.session_id] {
        checker::check(&world.database, session_id, &effects).await;
    }
    let of = |session_id: &str| effects.iter().filter(|line| line.contains(session_id)).count();
    assert_eq!((of(&world.session_id), of(child)), (2, 2), "each session made its own two effects, once");
    assert!(process.terminate().success());
}
