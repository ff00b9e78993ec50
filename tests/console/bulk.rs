//! Many at once: errors in groups, batches that are made after a preview, the search of sessions, and pauses.

use super::browser::{Browser, Form, Page};
use super::{Scene, first};
use crate::support::eventually;
use futures::future::join_all;
use reqwest::StatusCode;
use serde_json::json;
use std::sync::atomic::Ordering;

impl Scene {
    /// A server whose search is filled every second.
    async fn quick(variables: &[(&str, &str)]) -> Scene {
        Scene::with(&[variables, &[("WAKEFUL_QUEUE__SEARCH_S", "1")]].concat(), "").await
    }

    /// Lets sessions fail, and returns the fingerprint of their group when the search knows all of them.
    async fn failed(&self, conversations: &[&str]) -> String {
        self.model_fails.store(true, Ordering::SeqCst);
        for conversation in conversations {
            self.session(conversation, "Hello?", "failed").await;
        }
        self.model_fails.store(false, Ordering::SeqCst);
        let client = self.process.client();
        eventually("the group has all of them", || async {
            let (_, groups) = client.get("/v1/errors").await;
            let group = groups["items"][0]["fingerprint"].as_str()?.to_owned();
            let (_, found) = client.get(&format!("/v1/sessions?status=failed&error={group}")).await;
            let all = groups["items"][0]["count"] == conversations.len()
                && found["items"].as_array()?.len() == conversations.len();
            all.then_some(group)
        })
        .await
    }
}

impl Browser {
    /// The page below the console's root, when it shows this.
    async fn comes(&self, path: &str, shown: &str) -> Page {
        eventually(&format!("{path} shows {shown}"), || async {
            let page = self.open(path).await;
            page.html.contains(shown).then_some(page)
        })
        .await
    }
}

/// The address of a page, below the console's root.
fn below(path: &str) -> String {
    path.strip_prefix("/console").unwrap_or_else(|| panic!("{path}")).to_owned()
}

/// The forms of a page that change something other than how it looks.
fn buttons(page: &Page) -> Vec<String> {
    let acts = |form: &Form| {
        let own = ["/theme", "/space", "/logout"].iter().any(|end| form.action.ends_with(end));
        form.fields.iter().any(|(name, _)| name == "word") && !own
    };
    page.forms().into_iter().filter(acts).map(|form| form.action).collect()
}

#[tokio::test]
async fn an_error_is_found_noted_muted_and_its_sessions_are_retried_as_one_batch() {
    let scene = Scene::quick(&[]).await;
    let group = scene.failed(&["one", "two"]).await;
    let browser = scene.browser();
    let overview = browser.open("/").await;
    assert!(overview.html.contains("Errors of the last day"), "{}", overview.html);
    let page = browser.get(&overview.link("/errors/")).await;
    assert!(page.path.ends_with(&group) && page.html.contains("400"), "{}", page.html);
    assert!(page.html.contains(">one</a>") && page.html.contains(">two</a>"), "{}", page.html);
    let page = browser.press(&page, "/note", &[("note", "ticket 311: the key has expired")]).await;
    assert!(page.html.contains("written down") && page.html.contains("ticket 311"), "{}", page.html);
    assert!(browser.open("/errors?kind=refused&within=hour").await.html.contains("ticket 311"));
    assert!(!browser.open("/errors?kind=rate+limited").await.html.contains("ticket 311"));
    let wrong = browser.get("/console/errors?kind=nosuch").await;
    assert_eq!(wrong.status, StatusCode::BAD_REQUEST);
    let is_said = wrong.html.contains("it is one of rate_limited") && wrong.html.contains("value=\"nosuch\"");
    assert!(is_said && !wrong.html.contains("No run has failed"), "{}", wrong.html);
    let page = browser.press(&page, "/mute", &[("for_s", "3600"), ("reason", "known")]).await;
    assert!(page.html.contains("The group is muted") && page.html.contains("known"), "{}", page.html);
    assert!(!browser.open("/errors").await.html.contains(&group));
    assert!(browser.open("/errors?muted=true").await.html.contains(&group));
    let page = browser.press(&page, "/mute", &[]).await;
    assert!(page.html.contains("listed again") && !page.html.contains("End the mute"), "{}", page.html);

    // The plan shows what it would do, and does nothing.
    let plan = browser.get(&page.link("/batches/new")).await;
    assert!(plan.html.contains("<strong>2 sessions</strong>"), "{}", plan.html);
    assert_eq!(scene.count("select count(*) from batches where $1 <> ''").await, 0);
    let form = plan.form("/console/batches");
    let presses = (0..16).map(|_| browser.post(&form, &[("reason", "the key is new"), ("rate", "100")]));
    let answers = join_all(presses).await;
    let led: Vec<String> = answers.iter().map(Page::location).collect();
    assert!(led.iter().all(|to| *to == led[0] && to.starts_with("/console/batches/batch_")), "{led:?}");
    assert_eq!(scene.count("select count(*) from batches where $1 <> ''").await, 1);
    let done = browser.comes(&below(&led[0]), "aria-label=\"2 passed of 2\"").await;
    assert!(done.html.contains("the key is new") && done.html.contains(&group), "{}", done.html);
    // The batch itself is over at a later look of its worker.
    let list = browser.comes("/batches?status=done", "2 passed of 2").await;
    assert!(list.html.contains("Retry 2 sessions"), "{}", list.html);
    let acted =
        "select count(*) from audit_log where verb = 'session.retry' and outcome = 'done' and $1 <> ''";
    assert_eq!(scene.count(acted).await, 2);
}

#[tokio::test]
async fn two_operators_who_retry_the_same_sessions_act_on_each_once_and_are_told() {
    let scene = Scene::quick(&[]).await;
    scene.failed(&["one", "two", "three"]).await;
    let (ann, ben) = (scene.browser(), scene.browser());
    let plan = "/batches/new?verb=retry&status=failed";
    let of_ann = ann.open(plan).await.form("/console/batches");
    let of_ben = ben.open(plan).await.form("/console/batches");
    let how = |reason| [("reason", reason), ("rate", "100")];
    let (how_ann, how_ben) = (how("ann knows why"), how("ben knows too"));
    let (one, other) = tokio::join!(ann.post(&of_ann, &how_ann), ben.post(&of_ben, &how_ben));
    // Ann clicks twice, and goes back and presses again.
    for _ in 0..2 {
        assert_eq!(ann.post(&of_ann, &how_ann).await.location(), one.location());
    }
    let mut batches = 0;
    for (browser, answer) in [(&ann, one), (&ben, other)] {
        let led = answer.location();
        if led.starts_with("/console/batches/batch_") {
            batches += 1;
            browser.comes(&below(&led), ">done</span>").await;
        } else {
            // The other batch had taken all of them before this one was made.
            assert!(browser.get(&led).await.html.contains("Nothing was done"), "{led}");
        }
    }
    assert!(batches > 0);
    let acted = "select count(*) from batch_members where outcome = 'acted' and $1 <> ''";
    assert_eq!(scene.count(acted).await, 3);
    let refused =
        "select count(*) from batch_members where outcome = 'refused' and detail <> '' and $1 <> ''";
    assert_eq!(scene.count(refused).await, 3 * (batches - 1), "the other batch says why it did nothing");
    let retried =
        "select count(*) from audit_log where verb = 'session.retry' and outcome = 'done' and $1 <> ''";
    assert_eq!(scene.count(retried).await, 3);
}

#[tokio::test]
async fn a_batch_is_tried_dry_waits_for_a_person_and_goes_on_in_stages() {
    let scene = Scene::quick(&[]).await;
    scene.failed(&["one", "two", "three"]).await;
    let browser = scene.browser();
    let plan = browser.open("/batches/new?verb=retry&status=failed").await;
    // What the API does not take is said, and what was typed is still there.
    let wrong = [("reason", "the key is new"), ("prove", "1"), ("canary", "1;2")];
    let told = browser.press(&plan, "/console/batches", &wrong).await;
    assert!(told.html.contains("Nothing was done") && told.html.contains("value=\"the key is new\""));
    let how = [("reason", "the key is new"), ("prove", "1"), ("canary", "1"), ("stop_share", "50")];
    let made = browser.press(&told, "/console/batches", &how).await;
    assert!(made.html.contains("tried dry") && made.html.contains("50 % fail again"), "{}", made.html);
    let path = below(&made.path);
    let waits = browser.comes(&path, "/resume\"").await;
    assert!(waits.html.contains("1 of 1 would pass"), "{}", waits.html);
    assert!(waits.html.contains("aria-label=\"3 to do of 3\""), "{}", waits.html);
    let goes_on = browser.press(&waits, "/resume", &[]).await;
    assert!(goes_on.html.contains("The batch goes on."), "{}", goes_on.html);
    let done = browser.comes(&path, "aria-label=\"3 passed of 3\"").await;
    assert!(done.html.contains("Stage 1") && done.html.contains("Stage 2"), "{}", done.html);
    eventually("the batch is over, and has no buttons any more", async || {
        buttons(&browser.open(&path).await).is_empty().then_some(())
    })
    .await;
    assert!(browser.open(&path).await.html.contains(">done</span>"));
    let passed = browser.open(&format!("{path}?members=passed")).await;
    assert_eq!(passed.html.matches("class=\"row-link\"").count(), 3, "{}", passed.html);
    assert!(browser.open(&format!("{path}?members=refused")).await.html.contains("No member is like this"));
    // A page that was opened before is stale.
    let mut stale = waits.form("/resume");
    stale.fields.retain(|(name, _)| name != "press");
    let answer = browser.post(&stale, &[("press", "another")]).await;
    let told = browser.get(&answer.location()).await;
    assert!(told.html.contains("Nothing was done"), "{}", told.html);

    let plan = browser.open("/batches/new?verb=archive&status=completed").await;
    assert!(!plan.html.contains("name=\"prove\""), "only a retry is tried dry");
    let slow = [("reason", "old ones"), ("rate", "0.01")];
    let page = browser.press(&plan, "/console/batches", &slow).await;
    let page = browser.press(&page, "/pause", &[]).await;
    assert!(page.html.contains("The batch is paused"), "{}", page.html);
    let page = browser.press(&page, "/cancel", &[]).await;
    assert!(page.html.contains("The batch is cancelled") && buttons(&page).is_empty(), "{}", page.html);
}

#[tokio::test]
async fn sessions_are_searched_by_a_form_that_needs_no_javascript() {
    let scene = Scene::quick(&[]).await;
    let desk = scene.session("desk", "write a note", "completed").await;
    let other = scene.session("other", "Hello?", "completed").await;
    let browser = scene.browser();
    let page = browser.open("/sessions").await;
    for field in
        ["text", "user", "from", "tool", "error", "agent", "since", "until", "cost_over", "steps_over"]
    {
        assert!(page.html.contains(&format!("name=\"{field}\"")), "{field}");
    }
    assert!(page.html.contains("<details class=\"options\">"), "they are behind “More filters”");
    let found = browser.comes("/sessions?tool=compose_email", &desk).await;
    assert!(!found.html.contains(&other), "{}", found.html);
    assert!(found.html.contains("<details class=\"options\" open>"), "what is asked for is seen");
    let plan = browser.get(&found.link("/batches/new")).await;
    let asked = plan.forms().into_iter().find(|form| form.action.ends_with("/batches/new"));
    assert!(asked.is_some() && plan.html.contains("value=\"compose_email\""), "{}", plan.html);
    let words = browser.comes("/sessions?text=hello&agent=default", &other).await;
    assert!(!words.html.contains(&desk), "{}", words.html);
    let both = browser.open("/sessions?since=2020-01-01T00:00&until=2099-12-31T23:59").await;
    assert!(both.html.contains(&desk) && both.html.contains(&other), "{}", both.html);
    for nothing in ["until=2020-01-01T00%3A00", "cost_over=99", "steps_over=99", "user=missing", "error=none"]
    {
        let page = browser.open(&format!("/sessions?{nothing}")).await;
        assert!(page.html.contains("No session is like this"), "{nothing}: {}", page.html);
    }
    let wrong = browser.get("/console/sessions?cost_over=much&tool=compose_email").await;
    assert_eq!(wrong.status, StatusCode::BAD_REQUEST);
    assert!(wrong.html.contains("This cannot be looked for") && wrong.html.contains("value=\"much\""));
}

#[tokio::test]
async fn a_pause_is_begun_and_ended_on_the_page_of_the_queue() {
    let scene = Scene::quick(&[]).await;
    let browser = scene.browser();
    let queue = browser.open("/queue").await;
    assert!(queue.html.contains("Nothing is paused"), "{}", queue.html);
    // Where the form was sent to, and a browser reloads.
    assert_eq!(browser.get("/console/pauses").await.status, StatusCode::SEE_OTHER);
    let nameless = [("kind", "agent"), ("reason", "wrong prices")];
    let told = browser.press(&queue, "/console/pauses", &nameless).await;
    assert!(told.html.contains("Nothing was done") && told.html.contains("Nothing is paused"));
    let given =
        [("kind", "agent"), ("name", "default"), ("reason", "<b>wrong</b> prices"), ("minutes", "60")];
    let paused = browser.press(&told, "/console/pauses", &given).await;
    assert!(paused.html.contains("<b>agent default</b>"), "{}", paused.html);
    assert!(paused.html.contains("&#60;b&#62;wrong") && paused.html.contains("in 59 min"), "{}", paused.html);
    let client = scene.process.client();
    let woken = client.chat("desk", "Hello?").await;
    let session = woken["session_id"].as_str().unwrap();
    eventually("the session is held", || async {
        client.session(session).await["job"]["held_by"].is_string().then_some(())
    })
    .await;
    for page in ["/", "/sessions", &format!("/sessions/{session}")] {
        let shown = browser.open(page).await.html;
        assert!(shown.contains("is paused") && shown.contains("wrong"), "{page}: {shown}");
        assert!(!shown.contains("is at work"), "{page}: {shown}");
    }
    let ended = browser.press(&paused, "/pauses/end", &[("rate", "5")]).await;
    assert!(ended.html.contains("what waits goes on"), "{}", ended.html);
    client.wait_for(session, "completed").await;
    browser.comes("/queue", "Nothing is paused").await;
    let mut stale = paused.form("/pauses/end");
    stale.fields.retain(|(name, _)| name != "press");
    let answer = browser.post(&stale, &[("press", "another")]).await;
    assert!(browser.get(&answer.location()).await.html.contains("it is not paused any more"));
}

#[tokio::test]
async fn a_token_that_only_reads_looks_at_errors_batches_and_pauses_and_presses_nothing() {
    let scene = Scene::quick(&[]).await;
    let group = scene.failed(&["one"]).await;
    let client = scene.process.client();
    let archived = json!({"verb": "archive", "filter": {"status": "failed"}, "reason": "old", "rate": 0.01});
    assert_eq!(client.post("/v1/batches", &archived).await.0, StatusCode::CREATED);
    let batch = first(&scene, "/v1/batches", "batch_id").await;
    let pause = json!({"kind": "agent", "name": "default", "reason": "wrong prices"});
    assert_eq!(client.post("/v1/pauses", &pause).await.0, StatusCode::CREATED);
    let (_, made) = client.post("/v1/tokens", &json!({"scope": "read", "name": "looker"})).await;
    let mut browser = scene.browser();
    browser.headers = vec![("authorization", format!("Bearer {}", made["token"].as_str().unwrap()))];
    for (path, shown) in [
        ("/".to_owned(), group.as_str()),
        ("/errors".to_owned(), &group),
        (format!("/errors/{group}"), "Still failed"),
        ("/batches".to_owned(), &batch),
        (format!("/batches/{batch}"), "Archive 1 session"),
        ("/queue".to_owned(), "wrong prices"),
        ("/sessions?status=failed".to_owned(), "More filters"),
    ] {
        let page = browser.open(&path).await;
        assert!(page.html.contains(shown), "{path}: {}", page.html);
        assert_eq!(buttons(&page), [""; 0], "{path}");
        assert!(!page.html.contains("/batches/new"), "{path}");
    }
    assert_eq!(browser.get("/console/batches/new?status=failed").await.status, StatusCode::FORBIDDEN);
    let form = browser.open("/").await.form("/theme");
    for action in [
        format!("errors/{group}/mute"),
        format!("errors/{group}/note"),
        "batches".to_owned(),
        format!("batches/{batch}/pause"),
        format!("batches/{batch}/resume"),
        format!("batches/{batch}/cancel"),
        "pauses".to_owned(),
        "pauses/end".to_owned(),
    ] {
        let by_hand = Form { action: format!("/console/{action}"), ..form.clone() };
        let fields = [("verb", "archive"), ("status", "failed"), ("kind", "agent"), ("name", "default")];
        let answer = browser.post(&by_hand, &fields).await;
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{action}: {}", answer.html);
    }
    let sql = "select count(distinct verb) from audit_log where outcome = 'refused' and actor = 'looker' and $1 <> ''";
    assert!(scene.count(sql).await >= 6);
}
