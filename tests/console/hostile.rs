//! Whatever a user, a mail or a model says stays text on every page: 300 payloads through every field.

use super::{Browser, pages};
use crate::support::payloads::payloads;
use crate::support::{Answer, Database, ModelServer, Options};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Says `text` in every place that takes text from outside, and returns the tags of all pages that show it.
async fn said(text: &str, short: &str) -> (BTreeSet<String>, String) {
    let echoed = text.to_owned();
    let model = ModelServer::start(move |body, _| {
        let said = body["messages"].to_string();
        match said.matches("\"role\":\"tool\"").count() {
            _ if said.contains("break") => Answer::Error(400),
            0 if said.contains("ask me") => {
                Answer::call("ask_user", json!({"question": echoed.chars().take(300).collect::<String>()}))
            }
            0 => Answer::call(
                "compose_email",
                json!({"to": ["bob@example.com"], "subject": echoed.lines().next(), "body": echoed}),
            ),
            _ => Answer::text(&echoed),
        }
    })
    .await;
    let database = Database::new().await;
    let config = format!(
        "[schedules.daily]\ncron = \"0 9 * * *\"\nprompt = {}\n",
        Value::from(short.replace(['\u{1b}', '\u{7}'], ""))
    );
    let options = Options::new().model("openai/test").config(&config).env("OPENAI_BASE_URL", &model.url);
    let options = options.env("WAKEFUL_QUEUE__SEARCH_S", "1");
    let process = options.serve(&database).await;
    let client = process.client();
    let chat = async |conversation: &str, text: &str, status: &str| {
        let conversation = conversation.bytes().map(|byte| format!("%{byte:02X}")).collect::<String>();
        let (code, woken) =
            client.post(&format!("/v1/chat/{conversation}/messages"), &json!({"text": text})).await;
        assert!(code.is_success(), "{woken}");
        let id = woken["session_id"].as_str().unwrap().to_owned();
        client.wait_for(&id, status).await;
        (id, conversation)
    };
    let plain: String = short.chars().filter(|one| !one.is_control()).collect();
    let (session, conversation) = chat(&plain, text, "completed").await;
    let (asks, _) = chat(&format!("ask{plain}"), "ask me", "waiting_input").await;
    let (broken, _) = chat(&format!("broken{plain}"), &format!("break {text}"), "failed").await;
    let reason: String = plain.chars().take(200).collect();
    client.post(&format!("/v1/sessions/{broken}/archive"), &json!({"reason": reason})).await;
    let group = crate::support::eventually("the group of the failed run", || async {
        let (_, groups) = client.get("/v1/errors?muted=all").await;
        groups["items"][0]["fingerprint"].as_str().map(str::to_owned)
    })
    .await;
    client.post(&format!("/v1/errors/{group}/note"), &json!({"note": reason})).await;
    client.post(&format!("/v1/errors/{group}/mute"), &json!({"reason": reason})).await;
    let many = json!({"verb": "archive", "session_ids": [session], "reason": reason, "rate": 0.01});
    let (_, batch) = client.post("/v1/batches", &many).await;
    let batch = batch["batch_id"].as_str().unwrap_or_else(|| panic!("{batch}")).to_owned();
    client.post(&format!("/v1/batches/{batch}/cancel"), &json!({"reason": reason})).await;
    client.post("/v1/pauses", &json!({"kind": "tool", "name": "none", "reason": reason})).await;
    let encoded = |text: &str| base64::Engine::encode(&base64::prelude::BASE64_STANDARD, text.as_bytes());
    for kind in ["plain", "html"] {
        let (name, body) = (encoded(&plain), encoded(text));
        let body: Vec<&str> =
            body.as_bytes().chunks(76).map(|line| std::str::from_utf8(line).unwrap()).collect();
        let mail = format!(
            "From: =?utf-8?B?{name}?= <x@example.com>\r\nTo: w@localhost\r\nSubject: =?utf-8?B?{name}?=\r\n\
             Message-ID: <{kind}@example.com>\r\nContent-Type: text/{kind}; charset=utf-8\r\n\
             Content-Transfer-Encoding: base64\r\n\r\n{}\r\n",
            body.join("\r\n")
        );
        let mailed = client.post_request("/v1/triggers/email/raw").header("content-type", "message/rfc822");
        assert!(mailed.body(mail).send().await.unwrap().status().is_success());
    }
    let (_, mailed) = client.get("/v1/sessions?trigger_type=email").await;
    let mailed =
        mailed["items"].as_array().unwrap().iter().map(|one| one["session_id"].as_str().unwrap().to_owned());
    let mailed: Vec<String> = mailed.collect();
    assert_eq!(mailed.len(), 2, "both mails begin a session");
    let name: String = plain.chars().take(60).collect();
    let (made, token) = client.post("/v1/tokens", &json!({"scope": "read", "name": name})).await;
    assert!(made.is_success(), "{token}");
    let first = async |path: &str, key: &str| {
        let (_, list) = client.get(path).await;
        list["items"][0][key].as_str().unwrap_or_else(|| panic!("{path}: {list}")).to_owned()
    };
    let (delivery, schedule) =
        (first("/v1/deliveries", "delivery_id").await, first("/v1/schedules", "schedule_id").await);
    let browser = Browser::new(&process.url());
    let (mut tags, mut all) = (BTreeSet::new(), String::new());
    let mut paths = pages(&session, &conversation, &asks, &delivery, &schedule);
    for id in [&asks, &broken].into_iter().chain(&mailed) {
        paths.extend(["", "timeline", "journal"].map(|tab| format!("/sessions/{id}?tab={tab}")));
    }
    paths.extend(["/errors?muted=all".to_owned(), format!("/errors/{group}"), format!("/batches/{batch}")]);
    for field in [
        "/sessions?conversation=",
        "/sessions?text=",
        "/errors?text=",
        "/batches/new?text=",
        "/audit?actor=",
        "/deliveries?channel=",
        "/nothing/x?y=",
    ] {
        let short: String = plain.bytes().take(60).map(|byte| format!("%{byte:02X}")).collect();
        paths.push(format!("{field}{short}"));
    }
    for path in paths {
        let page = browser.get(&format!("/console{path}")).await;
        assert!(!page.status.is_server_error(), "{path}: {}", page.html);
        tags.extend(page.tags());
        // What the address itself says is the visitor's own.
        if !path.contains(['=']) || path.contains("tab=") || path.contains("left=") {
            all.push_str(&page.html);
        }
    }
    (tags, all)
}

#[tokio::test]
async fn three_hundred_payloads_through_every_field_are_text_on_every_page() {
    let payloads = payloads();
    assert_eq!(payloads.len(), 300);
    let (mut known, _) = said("harmless\nwords", "harmless").await;
    let (more, _) = said("one two\nthree", "a (b) [c]").await;
    known.extend(more);
    // All of them in the long texts; the worst of them in ids, subjects and reasons.
    let long = payloads.join("\n");
    for short in ["\"><script>alert(1)</script>", "'\"><img src=x onerror=alert(1)>\u{202e}</title>"] {
        let (tags, html) = said(&long, short).await;
        let unknown: Vec<&String> = tags.difference(&known).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
        for running in ["<script>alert", "onerror=alert(1)>\"", "javascript:alert(1)\"", "\u{202e}", "\u{1b}"]
        {
            assert!(!html.contains(running), "{running:?}");
        }
        assert!(html.contains("&#60;script&#62;alert(1)"), "it is shown as text");
        assert!(html.contains("49") || html.contains("7*7"), "templates of others are text too");
    }
}
