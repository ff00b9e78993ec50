//! What a press is: the same button of the same page with the same fields. And what a form says that cannot be carried out.

use super::Scene;
use super::browser::Form;
use crate::support::eventually;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;

#[tokio::test]
async fn two_buttons_of_one_page_are_two_presses() {
    let scene = Scene::new("").await;
    let client = scene.process.client();
    for name in ["charge", "compose_email"] {
        let (status, pause) =
            client.post("/v1/pauses", &json!({"kind": "tool", "name": name, "reason": "wrong"})).await;
        assert!(status.is_success(), "{pause}");
    }
    let browser = scene.browser();
    let page = browser.open("/queue").await;
    let ends: Vec<Form> =
        page.forms().into_iter().filter(|form| form.action.ends_with("/pauses/end")).collect();
    assert_eq!(ends.len(), 2, "{}", page.html);
    // Both are pressed before the page is another one.
    for form in &ends {
        assert_eq!(browser.post(form, &[]).await.status, StatusCode::SEE_OTHER);
    }
    let page = browser.open("/queue").await;
    assert!(page.forms().iter().all(|form| !form.action.ends_with("/pauses/end")), "{}", page.html);
}

#[tokio::test]
async fn an_act_whose_browser_goes_away_is_carried_out_and_the_second_press_gets_its_outcome() {
    let scene = Scene::new("").await;
    let session = scene.session("desk", "Hello?", "completed").await;
    let browser = scene.browser();
    let form = browser.open(&format!("/sessions/{session}")).await.form("/archive");
    // The act waits for another transaction. Meanwhile the browser leaves, as it does when somebody double-clicks.
    let mut other = scene.database.pool.begin().await.unwrap();
    sqlx::query("select from conversation_sessions for update").execute(&mut *other).await.unwrap();
    let waits = "select count(*) from pg_stat_activity
        where datname = current_database() and wait_event_type = 'Lock' and $1 <> ''";
    let left = || scene.process.log().matches("A connection ended").count();
    let before = left();
    tokio::select! {
        answer = browser.post(&form, &[("reason", "old")]) => panic!("it was not held up: {}", answer.html),
        () = eventually("the act to wait", || async { (scene.count(waits).await > 0).then_some(()) }) => {}
    }
    eventually("the server to see that the browser is gone", || async { (left() > before).then_some(()) })
        .await;
    other.rollback().await.unwrap();
    scene.process.client().wait_for(&session, "archived").await;
    let second = browser.post(&form, &[("reason", "old")]).await;
    let led = browser.get(&second.location()).await;
    assert!(led.html.contains("The session is archived."), "{}", led.html);
}

#[tokio::test]
async fn a_token_is_made_once_shown_once_and_never_by_mistake_for_ever() {
    let scene = Scene::new("").await;
    let browser = scene.browser();
    let form = browser.open("/tokens").await.form("/console/tokens");
    for days in ["7 days", "0.5", "-1"] {
        let answer = browser.post(&form, &[("scope", "read"), ("days", days)]).await;
        assert_eq!(answer.status, StatusCode::SEE_OTHER, "{days}");
        let told = browser.get(&answer.location()).await;
        assert!(told.html.contains("none was made"), "{}", told.html);
        assert!(
            told.html.contains(&format!("value=\"{days}\"")),
            "what was typed is still there: {}",
            told.html
        );
    }
    let made = "select count(*) from api_tokens where $1 <> ''";
    assert_eq!(scene.count(made).await, 0);
    let fields = [("scope", "read"), ("days", "7")];
    let first = browser.post(&form, &fields).await;
    assert!(first.status == StatusCode::OK && first.html.contains("wkt_"), "{}", first.html);
    let second = browser.post(&form, &fields).await;
    assert_eq!(second.status, StatusCode::SEE_OTHER, "{}", second.html);
    let list = browser.get(&second.location()).await;
    assert!(list.html.contains("made at the first press") && !list.html.contains("wkt_"), "{}", list.html);
    assert_eq!(scene.count(made).await, 1);
    let expires = "select count(*) from api_tokens where expires_at < now() + interval '8 days' and $1 <> ''";
    assert_eq!(scene.count(expires).await, 1);
}

#[tokio::test]
async fn what_an_act_says_waits_for_the_page_that_the_person_was_led_to() {
    let scene = Scene::new("").await;
    let session = scene.session("desk", "Hello?", "completed").await;
    let browser = scene.browser();
    let page = browser.open(&format!("/sessions/{session}")).await;
    let answer = browser.post(&page.form("/archive"), &[("reason", "old")]).await;
    // Another page of the browser looks again by itself meanwhile.
    browser.ask(Method::GET, "/console/sessions", None, &[("sec-fetch-mode", "cors")]).await;
    let led = browser.ask(Method::GET, &answer.location(), None, &[("sec-fetch-mode", "navigate")]).await;
    assert!(led.html.contains("The session is archived."), "{}", led.html);
    let again = browser.get(&answer.location()).await;
    assert!(!again.html.contains("The session is archived."), "it is said once");
}

#[tokio::test]
async fn a_session_is_there_as_json_and_its_journal_page_by_page() {
    let scene = Scene::new("").await;
    let session = scene.session("desk", "Hello?", "completed").await;
    let browser = scene.browser();
    let raw = browser.open(&format!("/sessions/{session}/raw")).await;
    assert_eq!(raw.header("content-type"), "application/json");
    let raw: Value = serde_json::from_str(&raw.html).unwrap();
    assert_eq!(raw["session_id"], json!(session));
    for _ in 0..40 {
        scene.session("desk", "And now?", "completed").await;
    }
    let mut page = browser.open(&format!("/sessions/{session}?tab=journal")).await;
    let mut pages = 1;
    while let Some((before, _)) = page.html.split_once("\">Earlier entries") {
        let link = before.rsplit("href=\"").next().unwrap().replace("&#38;", "&").replace("&amp;", "&");
        page = browser.get(&link).await;
        pages += 1;
    }
    assert!(pages >= 3 && page.html.contains("id=\"e1\""), "{pages}: {}", page.html);
}

#[tokio::test]
async fn what_was_typed_into_a_refused_form_is_still_in_it() {
    let scene = Scene::new("").await;
    let browser = scene.browser();
    let form = browser.open("/queue").await.form("/console/pauses");
    // A rate that no pause may have.
    let typed =
        [("kind", "agent"), ("name", "supp\"ort"), ("reason", "the <prompt> is wrong"), ("rate", "-1")];
    let answer = browser.post(&form, &typed).await;
    assert_eq!(answer.status, StatusCode::SEE_OTHER, "{}", answer.html);
    // Another page of the browser looks again by itself meanwhile.
    browser.ask(Method::GET, &answer.location(), None, &[("sec-fetch-mode", "cors")]).await;
    let page = browser.get(&answer.location()).await;
    assert!(page.html.contains("Nothing was done: "), "{}", page.html);
    for kept in ["value=\"supp&#34;ort\"", "value=\"the &#60;prompt&#62; is wrong\"", "value=\"-1\""] {
        assert!(page.html.contains(kept), "{kept}: {}", page.html);
    }
    assert!(!page.html.contains("data-typed-else"), "{}", page.html);
    let again = browser.get(&answer.location()).await;
    assert!(!again.html.contains("supp&#34;ort"), "it is there once");
    // Pressed again with what was wrong put right, it acts. The agent is none that this server knows, so the name may be wrong.
    let answer = browser.post(&page.form("/console/pauses"), &[&typed[..3], &[("rate", "1")]].concat()).await;
    let page = browser.get(&answer.location()).await;
    assert!(
        page.html.contains("It is paused.") && page.html.contains("nothing here has been called"),
        "{}",
        page.html
    );
}

#[tokio::test]
async fn a_message_that_was_refused_is_shown_where_its_form_is_gone() {
    let scene = Scene::new("").await;
    let session = scene.session("desk", "Hello?", "completed").await;
    let browser = scene.browser();
    let form = browser.open(&format!("/sessions/{session}")).await.form("/messages");
    scene.process.client().post(&format!("/v1/sessions/{session}/terminate"), &json!({})).await;
    let answer = browser.post(&form, &[("text", "A long message.")]).await;
    let page = browser.get(&answer.location()).await;
    assert!(
        page.html.contains("Nothing was done: ") && page.html.contains("A long message."),
        "{}",
        page.html
    );
}

#[tokio::test]
async fn a_conversation_gets_a_new_session_by_a_button() {
    let scene = Scene::new("").await;
    let first = scene.session("desk", "Hello?", "completed").await;
    let browser = scene.browser();
    let page = browser.open("/chat/desk").await;
    let answer = browser.post(&page.form("/chat/desk/new"), &[]).await;
    let page = browser.get(&answer.location()).await;
    assert!(page.html.contains("A new session has begun") && page.html.contains(&first), "{}", page.html);
    assert!(
        !page.forms().iter().any(|form| form.action.ends_with("/new")),
        "it is new already: {}",
        page.html
    );
    let second = scene.session("desk", "And now?", "completed").await;
    assert_ne!(second, first);
}

#[tokio::test]
async fn the_overview_leads_to_what_it_does_not_show() {
    let scene = Scene::new("").await;
    scene.model_fails.store(true, Ordering::SeqCst);
    let browser = scene.browser();
    for number in 0..6 {
        scene.session(&format!("c{number}"), "Hello?", "failed").await;
        let page = browser.open("/").await;
        let has_more = page.html.contains("sessions?status=failed\">All 6 that failed");
        assert_eq!(has_more, number == 5, "{}", page.html);
    }
}
