//! Who gets in, and what the token lets a person see and press.

use super::browser::{Browser, Form};
use super::pages;
use crate::access::stage::{Stage, TOKEN};
use reqwest::{Method, StatusCode};
use serde_json::json;

/// Logs in with a token.
async fn logged_in(stage: &Stage, token: &str) -> Browser {
    let browser = Browser::new(&stage.process.url());
    let login = browser.get("/console/login?next=/console/sessions").await;
    let page = browser.press(&login, "/login", &[("token", token)]).await;
    assert_eq!((page.status, page.path.as_str()), (StatusCode::OK, "/console/sessions"));
    browser
}

#[tokio::test]
async fn a_token_opens_the_pages_and_stays_in_a_cookie_that_only_the_server_reads() {
    let stage = Stage::new("").await;
    let browser = Browser::new(&stage.process.url());
    let sent = browser.get("/console/audit?verb=x").await;
    assert_eq!(
        (sent.status, sent.location().as_str()),
        (StatusCode::SEE_OTHER, "/console/login?next=%2Fconsole%2Faudit%3Fverb%3Dx")
    );
    let login = browser.get("/console/login").await;
    let wrong = browser.post(&login.form("/login"), &[("token", "not a token")]).await;
    assert_eq!(wrong.status, StatusCode::UNAUTHORIZED);
    assert!(
        wrong.html.contains("this bearer token is not the server")
            && browser.cookie("wakeful_local").is_none()
    );
    let answer = browser.post(&login.form("/login"), &[("token", TOKEN)]).await;
    let cookie = answer.header("set-cookie");
    assert!(
        cookie.starts_with("wakeful_local=") && cookie.contains("; HttpOnly; SameSite=Strict"),
        "{cookie}"
    );
    assert!(!cookie.contains(TOKEN));
    assert_eq!(browser.open("/").await.status, StatusCode::OK);
    // Somebody else's changes make it worthless.
    let own = browser.cookie("wakeful_local").unwrap();
    let (begins, ends) = own.split_at(own.len() / 2);
    let other = if ends.starts_with('x') { "y" } else { "x" };
    browser.set_cookie("wakeful_local", &format!("{begins}{other}{}", &ends[1..]));
    assert_eq!(browser.get("/console/").await.status, StatusCode::SEE_OTHER);
    browser.set_cookie("wakeful_local", &own);
    let out = browser.press(&browser.open("/").await, "/logout", &[]).await;
    assert!(out.html.contains("Log in") && browser.cookie("wakeful_local").is_none());
}

#[tokio::test]
async fn a_login_that_a_person_has_ended_is_refused_also_by_a_copy_of_its_cookie() {
    let stage = Stage::new("").await;
    let (browser, other) = (logged_in(&stage, TOKEN).await, logged_in(&stage, TOKEN).await);
    let page = browser.open("/").await;
    let copy = browser.cookie("wakeful_local").unwrap();
    browser.press(&page, "/logout", &[]).await;
    browser.set_cookie("wakeful_local", &copy);
    let sent = browser.get("/console/sessions").await;
    assert_eq!(sent.status, StatusCode::SEE_OTHER, "{}", sent.html);
    assert!(sent.location().starts_with("/console/login"), "{}", sent.location());
    let answer = browser.post(&page.form("/space"), &[("space", "acme")]).await;
    assert_eq!(answer.status, StatusCode::FORBIDDEN, "{}", answer.html);
    // Another login of the same token goes on.
    other.open("/sessions").await;
}

#[tokio::test]
async fn over_tls_the_cookie_is_of_this_host_and_without_it_no_token_is_taken_from_afar() {
    let stage = Stage::new("").await;
    let far = |proto: &str| {
        let mut browser = Browser::new(&stage.process.url());
        browser.headers =
            vec![("host", "ops.example.org".to_owned()), ("origin", format!("{proto}://ops.example.org"))];
        browser
    };
    let browser = far("https");
    let form = browser.get("/console/login").await.form("/login");
    let answer = browser.post(&form, &[("token", TOKEN)]).await;
    let cookie = answer.header("set-cookie");
    assert!(
        cookie.starts_with("__Host-wakeful=") && cookie.contains("; Path=/;") && cookie.ends_with("; Secure"),
        "{cookie}"
    );
    assert_eq!(browser.open("/").await.status, StatusCode::OK);
    let browser = far("http");
    let form = browser.get("/console/login").await.form("/login");
    let answer = browser.post(&form, &[("token", TOKEN)]).await;
    assert_eq!(answer.status, StatusCode::FORBIDDEN);
    assert!(answer.html.contains("over https") && answer.header("set-cookie").is_empty());
}

#[tokio::test]
async fn forms_of_other_sites_and_forms_without_the_word_do_nothing() {
    let stage = Stage::new("").await;
    let browser = logged_in(&stage, TOKEN).await;
    let form = browser.open("/chat").await.form("/console/chat");
    let url = stage.process.url();
    let body = |form: &Form| {
        let fields: Vec<(&str, &str)> =
            form.fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        Some(super::browser::encoded(&[fields.as_slice(), &[("text", "Hello?")]].concat()))
    };
    let mut headers = vec![vec![], vec![("origin", "https://evil.example")], vec![("origin", "null")]];
    headers.push(vec![("origin", url.as_str()), ("sec-fetch-site", "cross-site")]);
    for own in headers {
        let answer = browser.ask(Method::POST, "/console/chat", body(&form), &own).await;
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{own:?}");
    }
    let others = logged_in(&stage, TOKEN).await.open("/chat").await.form("/console/chat");
    for fields in [Vec::new(), vec![("word".to_owned(), "guessed".to_owned())], others.fields] {
        let forged = Form { fields, ..form.clone() };
        assert_eq!(
            browser.post(&forged, &[("text", "Hello?")]).await.status,
            StatusCode::FORBIDDEN,
            "{forged:?}"
        );
    }
    assert_eq!(
        stage.database.value::<i64>("select count(*) from session_inbox where $1 <> ''", "all").await,
        0
    );
    assert_eq!(browser.post(&form, &[("text", "Hello?")]).await.status, StatusCode::SEE_OTHER);
}

#[tokio::test]
async fn a_login_leads_to_pages_of_this_console_only() {
    let stage = Stage::new("").await;
    for next in [
        "https://evil.example",
        "//evil.example",
        "/console/\\evil",
        "/consoleevil",
        "/v1/sessions",
        "/console/../v1",
    ] {
        let browser = Browser::new(&stage.process.url());
        let mut form = browser.get("/console/login").await.form("/login");
        form.fields.retain(|(name, _)| name != "back");
        let answer = browser.post(&form, &[("token", TOKEN), ("back", next)]).await;
        assert_eq!(answer.location(), "/console/", "{next}");
    }
}

#[tokio::test]
async fn a_token_that_only_reads_sees_no_button_and_pressing_one_by_hand_is_refused_and_audited() {
    let stage = Stage::new("").await;
    let session = stage.chat(TOKEN, "desk", json!({"text": "Hello?"})).await;
    let browser = logged_in(&stage, &stage.token(&["--scope", "read", "--name", "looker"]).await).await;
    for path in pages(&session, "desk", &session, "none", "none") {
        let page = browser.get(&format!("/console{path}")).await;
        let own = ["/theme", "/space", "/logout"];
        let buttons: Vec<String> = page
            .forms()
            .into_iter()
            .filter(|form| {
                form.fields.iter().any(|(name, _)| name == "word")
                    && !own.iter().any(|end| form.action.ends_with(end))
            })
            .map(|form| form.action)
            .collect();
        assert!(buttons.is_empty(), "{path}: {buttons:?}");
    }
    let form = browser.open("/").await.form("/theme");
    for action in [
        format!("sessions/{session}/retry"),
        format!("sessions/{session}/cancel"),
        format!("sessions/{session}/wake"),
        format!("sessions/{session}/archive"),
        format!("sessions/{session}/terminate"),
        format!("sessions/{session}/resolve"),
        format!("sessions/{session}/approval"),
        format!("sessions/{session}/messages"),
        format!("sessions/{session}/fork"),
        "chat/desk".to_owned(),
        "chat".to_owned(),
        "deliveries/none/resend".to_owned(),
        "schedules/none/pause".to_owned(),
        "schedules/none/resume".to_owned(),
        "notifications/none/resend".to_owned(),
        "schedules/none/trigger".to_owned(),
        "tokens".to_owned(),
        "tokens/none/revoke".to_owned(),
        "batches".to_owned(),
        "batches/none/resume".to_owned(),
        "effects/resolve".to_owned(),
        "errors/none/mute".to_owned(),
        "pauses".to_owned(),
    ] {
        let by_hand = Form { action: format!("/console/{action}"), ..form.clone() };
        let answer = browser
            .post(&by_hand, &[("text", "Hello?"), ("outcome", "happened"), ("decision", "approve")])
            .await;
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{action}: {}", answer.html);
    }
    let refused = stage
        .database
        .value::<i64>(
            "select count(distinct verb) from audit_log where outcome = 'refused' and actor = $1",
            "looker",
        )
        .await;
    assert!(refused >= 8, "the audit has them: {refused}");
    for path in ["/audit", "/tokens"] {
        assert_eq!(browser.get(&format!("/console{path}")).await.status, StatusCode::FORBIDDEN, "{path}");
    }
}

#[tokio::test]
async fn forms_of_strangers_and_short_ones_are_small() {
    let stage = Stage::new("").await;
    let (stranger, browser) = (Browser::new(&stage.process.url()), logged_in(&stage, TOKEN).await);
    let login = stranger.get("/console/login").await.form("/login");
    let theme = browser.open("/").await.form("/theme");
    let chat = browser.open("/chat").await.form("/console/chat");
    let text = "x".repeat(17 << 10);
    for (browser, form) in [(&stranger, &login), (&stranger, &chat), (&browser, &theme)] {
        let answer = browser.post(form, &[("text", &text)]).await;
        assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE, "{}", form.action);
        assert!(answer.html.contains("more than 16 KiB"), "{}", answer.html);
    }
    assert_eq!(browser.post(&chat, &[("text", &text)]).await.status, StatusCode::SEE_OTHER);
}

#[tokio::test]
async fn a_token_of_one_space_sees_that_space_only() {
    let stage = Stage::new("").await;
    let foreign = stage.chat(TOKEN, "secret-desk", json!({"text": "Hello?"})).await;
    let token = stage.token(&["--scope", "operate", "--space", "acme"]).await;
    let browser = logged_in(&stage, &token).await;
    for path in [
        "/",
        "/sessions",
        "/chat",
        "/errors",
        "/effects",
        "/batches",
        "/batches/new?status=completed",
        "/deliveries",
        "/schedules",
        "/mails",
    ] {
        let page = browser.open(path).await;
        assert!(page.html.contains("acme") && !page.html.contains("secret-desk"), "{path}: {}", page.html);
    }
    for path in ["/queue", "/tokens", "/audit"] {
        assert_eq!(browser.get(&format!("/console{path}")).await.status, StatusCode::FORBIDDEN, "{path}");
    }
    assert_eq!(browser.get(&format!("/console/sessions/{foreign}")).await.status, StatusCode::NOT_FOUND);
    let form = browser.open("/").await.form("/theme");
    let by_hand = Form { action: format!("/console/sessions/{foreign}/archive"), ..form };
    assert_eq!(browser.post(&by_hand, &[]).await.status, StatusCode::NOT_FOUND);
    // A token of the whole installation looks at the space that it names.
    let whole = logged_in(&stage, TOKEN).await;
    let login = whole.cookie("wakeful_local").unwrap();
    // Another server of this host can set cookies for it, but none that counts.
    whole.set_cookie("wakeful_space", "acme");
    assert!(whole.open("/sessions").await.html.contains("secret-desk"));
    let page = whole.press(&whole.open("/").await, "/space", &[("space", "acme")]).await;
    assert!(page.html.contains("Space: acme"));
    assert!(whole.cookie("wakeful_local").unwrap() != login, "the login holds it");
    assert!(!whole.open("/sessions").await.html.contains("secret-desk"));
}

#[tokio::test]
async fn a_form_acts_in_the_space_of_its_page_and_not_in_the_one_that_another_tab_chose() {
    let stage = Stage::new("").await;
    let browser = logged_in(&stage, TOKEN).await;
    let (chat, start) = (browser.open("/chat").await, browser.open("/").await);
    // Another tab.
    browser.press(&browser.open("/").await, "/space", &[("space", "acme")]).await;
    let answer = browser.post(&chat.form("/console/chat"), &[("text", "Hello?")]).await;
    assert_eq!(answer.status, StatusCode::FORBIDDEN, "{}", answer.html);
    assert!(answer.html.contains("opened in another space") && answer.html.contains("nothing was done"));
    let spaces = "select coalesce(string_agg(space_id, ','), '') from conversation_sessions where $1 <> ''";
    assert_eq!(stage.database.value::<String>(spaces, "all").await, "");
    // The old page still leads on to a space of one's choice, to the other theme, and back to its own space.
    assert_eq!(browser.post(&start.form("/theme"), &[]).await.status, StatusCode::SEE_OTHER);
    assert!(browser.press(&start, "/space", &[("space", "other")]).await.html.contains("Space: other"));
    assert!(browser.press(&start, "/space", &[("space", "default")]).await.html.contains("Space: default"));
    assert_eq!(
        browser.post(&chat.form("/console/chat"), &[("text", "Hello?")]).await.status,
        StatusCode::SEE_OTHER
    );
    assert_eq!(stage.database.value::<String>(spaces, "all").await, "default");
}

#[tokio::test]
async fn an_answer_is_shared_with_those_who_may_see_the_same_and_with_nobody_else() {
    let stage = Stage::new("").await;
    let session = stage.chat(TOKEN, "secret-desk", json!({"text": "Hello?"})).await;
    let acme = stage.token(&["--scope", "operate", "--space", "acme"]).await;
    let other = stage.token(&["--scope", "operate", "--agent", "other"]).await;
    let (whole, acme, other) =
        (logged_in(&stage, TOKEN).await, logged_in(&stage, &acme).await, logged_in(&stage, &other).await);
    let look = async |browser: &Browser, path: &str| {
        browser.ask(Method::GET, &format!("/console{path}"), None, &[("x-look-again", "1")]).await
    };
    for path in ["/", "/sessions"] {
        // The answer for the whole installation is kept from here on.
        assert!(look(&whole, path).await.html.contains("secret-desk"), "{path}");
        for others in [&acme, &other] {
            let page = look(others, path).await;
            assert!(page.status.is_success() && !page.html.contains("secret-desk"), "{path}: {}", page.html);
        }
        assert!(look(&whole, path).await.html.contains("secret-desk"), "{path}");
    }
    // Somebody acts, and the others' next look has it.
    crate::support::eventually("the reply", || async {
        let (_, one) = stage.get(TOKEN, &format!("/v1/sessions/{session}")).await;
        (one["status"] == "completed").then_some(())
    })
    .await;
    look(&whole, "/sessions").await;
    let colleague = logged_in(&stage, TOKEN).await;
    colleague
        .press(&colleague.open(&format!("/sessions/{session}")).await, "/archive", &[("reason", "done")])
        .await;
    let page = look(&whole, "/sessions?status=archived").await;
    assert!(page.html.contains("secret-desk"), "{}", page.html);
    // An answer that is kept is not given to a token that was revoked meanwhile.
    let tokens = whole.open("/tokens").await;
    assert!(look(&acme, "/sessions").await.status.is_success());
    for form in tokens.forms().into_iter().filter(|form| form.action.ends_with("/revoke")) {
        assert_eq!(whole.post(&form, &[]).await.status, StatusCode::SEE_OTHER);
    }
    assert_eq!(look(&acme, "/sessions").await.status, StatusCode::SEE_OTHER, "it leads to the login");
}

#[tokio::test]
async fn a_new_token_is_shown_once_works_and_is_refused_when_revoked() {
    let stage = Stage::new("").await;
    let browser = logged_in(&stage, TOKEN).await;
    let page = browser.open("/tokens").await;
    let made = browser
        .post(&page.form("/console/tokens"), &[("name", "mine"), ("scope", "read"), ("days", "1")])
        .await;
    let token = made.html.split("data-copy=\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    assert!(token.starts_with("wkt_") && made.header("cache-control") == "no-store", "{token}");
    let list = browser.open("/tokens").await;
    assert!(list.html.contains("mine") && !list.html.contains(&token));
    let theirs = logged_in(&stage, &token).await;
    theirs.open("/sessions").await;
    let after = browser.press(&list, "/revoke", &[]).await;
    assert!(after.html.contains("revoked"), "{}", after.html);
    assert_eq!(theirs.get("/console/sessions").await.status, StatusCode::SEE_OTHER, "it leads to the login");
}
