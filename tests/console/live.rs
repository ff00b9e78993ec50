//! Pages that stay open: what they cost the database, counted in statements.

use super::*;
use crate::support::eventually;
use crate::support::recorder::Recorder;
use futures::StreamExt as _;
use reqwest::Method;

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
    let client = crate::support::http();
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
    let mut quiet = 0;
    eventually("three looks in a row without a page that asks for itself", || {
        for one in recorder.take().into_iter().filter(|one| !one.is_ping) {
            if is_look(&one.sql) {
                quiet += 1;
            } else if one.sql.contains("session_events") || one.sql.contains("generations") {
                quiet = 0;
            }
        }
        let enough = quiet >= 3;
        async move { enough.then_some(()) }
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

#[tokio::test]
async fn pages_that_look_again_share_an_answer_and_a_person_who_loads_one_is_told_anew() {
    const PAGES: usize = 40;
    let scene = Scene::new("").await;
    scene.session("desk", "Hello?", "completed").await;
    let recorder = Recorder::start(&scene.database.url);
    let api = Options::new().model("openai/test").arg("--roles=api").spawn(&recorder.url);
    api.wait_for_log("\"Listening\"").await;
    let browser = Browser::new(&api.url());
    let again = [("x-look-again", "1")];
    // The process reads the same table beside the pages. Only a list begins like this.
    let lists = |sent: Vec<crate::support::recorder::Sent>| {
        sent.into_iter()
            .filter(|one| {
                !one.is_ping && one.sql.contains("select s.session_id from conversation_sessions s")
            })
            .count()
    };
    browser.open("/sessions").await;
    recorder.take();
    browser.open("/sessions").await;
    let one = lists(recorder.take());
    assert!(one > 0, "a page that a person loads is read from the database");
    for _ in 0..PAGES {
        let page = browser.ask(Method::GET, "/console/sessions", None, &again).await;
        assert_eq!(page.status, StatusCode::OK, "{}", page.html);
    }
    // An answer lasts four seconds, and the machine may be slow.
    let shared = lists(recorder.take());
    assert!(
        shared <= one * PAGES / 4,
        "{PAGES} pages that looked again sent {shared} statements, one sends {one}"
    );
    browser.open("/sessions").await;
    assert_eq!(lists(recorder.take()), one, "a person who loads the page is told anew");
}
