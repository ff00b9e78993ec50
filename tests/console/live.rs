//! Pages that stay open: what they cost the database, counted in statements.

use super::*;
use crate::support::eventually;
use crate::support::recorder::Recorder;
use futures::StreamExt as _;

#[tokio::test]
async fn two_hundred_open_pages_of_sixteen_sessions_cost_one_look_for_all_of_them() {
    const PAGES: usize = 200;
    let scene = Scene::new("").await;
    let mut sessions = Vec::new();
    for number in 0..16 {
        sessions.push(scene.session(&format!("desk{number}"), "Hello?", "completed").await);
    }
    let recorder = Recorder::start(&scene.database.url);
    let api = Options::new().model("openai/test").arg("--roles=api").spawn(&recorder.url);
    api.wait_for_log("\"Listening\"").await;
    let client = reqwest::Client::new();
    let open = (0..PAGES).map(|number| {
        let url = format!("{}/console/sessions/{}/stream", api.url(), sessions[number % sessions.len()]);
        let request = client.get(url).send();
        async move {
            let answer = request.await.unwrap();
            assert_eq!(answer.status(), StatusCode::OK);
            let mut body = answer.bytes_stream();
            // It has begun to send what there is.
            body.next().await.unwrap().unwrap();
            body
        }
    });
    let pages = futures::future::join_all(open).await;
    let is_look = |sql: &str| sql.contains("s.session_id, s.last_event_seq") && sql.contains("any($1)");
    // Each page reads what there is; from then on nothing happens.
    let (mut looks, mut others) = (0, Vec::new());
    eventually("three looks in a row after which no page asks for itself", || async {
        let sent: Vec<String> =
            recorder.take().into_iter().filter(|one| !one.is_ping).map(|one| one.sql).collect();
        let of_pages = |sql: &&String| sql.contains("session_events") && !is_look(sql);
        (!sent.iter().any(|sql| of_pages(&sql))).then_some(())
    })
    .await;
    recorder.take();
    eventually("five looks", || {
        for one in recorder.take().into_iter().filter(|one| !one.is_ping) {
            if is_look(&one.sql) {
                looks += 1;
            } else {
                others.push(one.sql);
            }
        }
        let enough = looks >= 5;
        async move { enough.then_some(()) }
    })
    .await;
    assert!(!others.iter().any(|sql| sql.contains("session_events")), "{others:#?}");
    // The process has its own: the pulse of its listeners, the follower of notifications, the sample of the queue.
    assert!(
        others.len() < looks * 6,
        "{} statements beside {looks} looks for {PAGES} pages: {others:#?}",
        others.len()
    );
    drop(pages);
}
