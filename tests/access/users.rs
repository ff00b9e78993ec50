//! Tokens of users, and the user that a conversation belongs to.

use super::stage::{Stage, TOKEN, problem, send};
use eventsource_stream::Eventsource;
use futures::StreamExt;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

#[tokio::test]
async fn a_user_reaches_only_its_own_conversations_and_others_do_not_exist() {
    let stage = Stage::new("").await;
    let (ann, bob) = (stage.user(TOKEN, "ann").await, stage.user(TOKEN, "bob").await);
    let id = stage.chat(&ann, "c1", json!({"text": "Hi"})).await;
    let of_server = stage.chat(TOKEN, "c2", json!({"user_id": "ann", "text": "Hi"})).await;
    let unowned = stage.chat(TOKEN, "c3", json!({"text": "Hi"})).await;
    let sessions = async |token: &str| {
        let (_, listed) = stage.get(token, "/v1/sessions").await;
        let ids = listed["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["session_id"].as_str().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    };
    assert_eq!(sessions(&ann).await, [of_server.clone(), id.clone()]);
    assert!(sessions(&bob).await.is_empty());
    for session in [&id, &of_server] {
        for path in ["", "/messages", "/stream"] {
            let path = format!("/v1/sessions/{session}{path}");
            let response = stage.request(&ann, Method::GET, &path).send().await.unwrap();
            assert_eq!(response.status(), StatusCode::OK, "{path}");
            let (status, refused) = stage.get(&bob, &path).await;
            let (_, missing) = stage.get(&bob, &path.replace(session.as_str(), "sess_none")).await;
            assert_eq!(status, StatusCode::NOT_FOUND, "{path}");
            assert_eq!(refused.to_string().replace(session.as_str(), "sess_none"), missing.to_string());
        }
        let (status, _) =
            stage.post(&bob, &format!("/v1/sessions/{session}/messages"), &json!({"text": "Hi"})).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
    }
    for conversation in ["c1", "c2", "c3"] {
        let path = format!("/v1/chat/{conversation}/messages");
        let (status, body) = stage.post(&bob, &path, &json!({"text": "Hi"})).await;
        assert_eq!(status, StatusCode::NOT_FOUND, "{body}");
    }
    assert_eq!(stage.get(&ann, &format!("/v1/sessions/{unowned}")).await.0, StatusCode::NOT_FOUND);
    let (status, _) =
        stage.post(&ann, &format!("/v1/sessions/{id}/messages"), &json!({"text": "More"})).await;
    assert_eq!(status, StatusCode::ACCEPTED);
    // The token says who speaks.
    let (status, _) =
        stage.post(&ann, "/v1/chat/c1/messages", &json!({"text": "Hi", "user_id": "bob"})).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    let (status, _) = stage.post(&ann, &format!("/v1/sessions/{id}/cancel"), &json!({})).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    let sender: String = stage
        .database
        .value("select sender from session_inbox where session_id = $1 order by inbox_id limit 1", &id)
        .await;
    assert_eq!(sender, "ann");
}

#[tokio::test]
async fn a_token_of_a_user_is_short_lived_and_cannot_be_forged() {
    let stage = Stage::new("").await;
    let ann = stage.user(TOKEN, "ann").await;
    let other = stage.options.serve(&stage.database).await;
    let request = crate::support::http().get(format!("{}/v1/sessions", other.url())).bearer_auth(&ann);
    assert_eq!(send(request).await.0, StatusCode::OK, "each process has the same key");
    // The configuration's token is replaced: what it signed for ends with it.
    let rotated = stage.options.clone().env("WAKEFUL_TOKEN", "another-configured-token-of-the-tests");
    let rotated = rotated.serve(&stage.database).await;
    let request = crate::support::http().get(format!("{}/v1/sessions", rotated.url())).bearer_auth(&ann);
    let (status, refused) = send(request).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED, "{refused}");
    let (body, signature) = ann.strip_prefix("wku_").unwrap().split_once('.').unwrap();
    let forged = [
        format!("wku_{}.{signature}", body.replace(&body[..4], "eyJ1")),
        format!("wku_{body}."),
        format!("wku_{body}.{}", "A".repeat(signature.len())),
        format!("wku_{body}"),
        "wku_.".to_owned(),
    ];
    for token in &forged {
        assert_eq!(stage.get(token, "/v1/sessions").await.0, StatusCode::UNAUTHORIZED, "{token}");
    }
    let asked = json!({"user_id": "ann", "expires_s": 1});
    let (_, made) = stage.post(TOKEN, "/v1/user-tokens", &asked).await;
    let brief = made["token"].as_str().unwrap().to_owned();
    crate::support::eventually("the token to expire", || async {
        let (status, body) = stage.get(&brief, "/v1/sessions").await;
        (status == StatusCode::UNAUTHORIZED)
            .then(|| assert_eq!(problem(&body), "this user's token has expired"))
    })
    .await;
    for wrong in [json!({"user_id": ""}), json!({"user_id": "ann", "expires_s": 86_401}), json!({})] {
        assert_eq!(stage.post(TOKEN, "/v1/user-tokens", &wrong).await.0, StatusCode::BAD_REQUEST, "{wrong}");
    }
    assert_eq!(
        stage.post(&ann, "/v1/user-tokens", &json!({"user_id": "bob"})).await.0,
        StatusCode::FORBIDDEN
    );
}

#[tokio::test]
async fn a_token_of_a_user_ends_with_the_token_that_asked_for_it_and_so_does_its_stream() {
    let stage = Stage::new("").await;
    let made = stage.run(&["token", "create", "--scope", "operate", "--space", "acme"]).await;
    let application = made["token"].as_str().unwrap();
    let ann = stage.user(application, "ann").await;
    let id = stage.chat(&ann, "c1", json!({"text": "Hi"})).await;
    let (_, session) = stage.get(&ann, &format!("/v1/sessions/{id}")).await;
    assert_eq!(session["space_id"], "acme");
    let stream = stage.request(&ann, Method::GET, &format!("/v1/sessions/{id}/stream")).send().await.unwrap();
    let mut events = stream.bytes_stream().eventsource();
    while let Some(event) = events.next().await {
        if event.unwrap().event == "invocation_result" {
            break;
        }
    }
    stage.run(&["token", "revoke", made["token_id"].as_str().unwrap()]).await;
    assert_eq!(stage.get(&ann, "/v1/sessions").await.0, StatusCode::UNAUTHORIZED);
    let shown: i64 = stage
        .database
        .value("select last_event_seq from conversation_sessions where session_id = $1", &id)
        .await;
    let more = stage
        .request(TOKEN, Method::POST, &format!("/v1/sessions/{id}/messages"))
        .header("x-wakeful-space", "acme")
        .body(json!({"text": "A secret"}).to_string());
    assert_eq!(send(more).await.0, StatusCode::ACCEPTED);
    let rest: Vec<_> = events.map(Result::unwrap).collect().await;
    let old = |id: &str| id.parse::<i64>().is_ok_and(|number| number <= shown);
    assert!(rest.iter().all(|event| old(&event.id)), "{rest:?}");
}

#[tokio::test]
async fn a_conversation_belongs_to_the_first_user_unless_the_agent_lets_others_in() {
    let config = "[agents.room]\nmodel = \"openai/test\"\nsystem_prompt = \"x\"\nparticipants = \"anyone\"";
    let stage = Stage::new(config).await;
    let says = async |conversation: &str, user: Option<&str>, agent: Option<&str>| -> (u16, Value) {
        let body = json!({"user_id": user, "text": "Hi", "agent": agent});
        let (status, body) = stage.post(TOKEN, &format!("/v1/chat/{conversation}/messages"), &body).await;
        (status.as_u16(), body)
    };
    assert_eq!(says("c1", None, None).await.0, 202);
    assert_eq!(says("c1", Some("ann"), None).await.0, 202, "the first user");
    assert_eq!(says("c1", Some("ann"), None).await.0, 202);
    let (status, body) = says("c1", Some("bob"), None).await;
    assert_eq!((status, problem(&body).starts_with("conversation c1 belongs to another user")), (403, true));
    assert_eq!(says("c1", None, None).await.0, 202, "the application itself");
    // Naming a more open agent does not help.
    assert_eq!(says("c1", Some("bob"), Some("room")).await.0, 403);
    assert_eq!(says("c2", Some("ann"), Some("room")).await.0, 202);
    assert_eq!(says("c2", Some("bob"), None).await.0, 202);
    let owners: String = stage
        .database
        .value("select string_agg(user_id, ',' order by conversation_id) from conversation_counters where $1 <> ''", "x")
        .await;
    assert_eq!(owners, "ann,ann");
}

#[tokio::test]
async fn of_two_users_that_begin_one_conversation_at_once_one_gets_it() {
    let stage = Stage::new("").await;
    let (ann, bob) = (stage.user(TOKEN, "ann").await, stage.user(TOKEN, "bob").await);
    for round in 0..10 {
        let path = format!("/v1/chat/race-{round}/messages");
        let message = json!({"text": "Hi"});
        let (one, other) = tokio::join!(stage.post(&ann, &path, &message), stage.post(&bob, &path, &message));
        let mut statuses = [one.0.as_u16(), other.0.as_u16()];
        statuses.sort_unstable();
        assert_eq!(statuses, [202, 404], "{one:?} {other:?}");
    }
}

#[tokio::test]
async fn a_user_does_not_choose_the_agent_and_the_application_does() {
    let other = "[agents.other]\nmodel = \"openai/test\"\nsystem_prompt = \"x\"";
    let stage = Stage::new(other).await;
    let ann = stage.user(TOKEN, "ann").await;
    let asks = |agent: &str| json!({"text": "Hi", "agent": agent});
    let (status, body) = stage.post(&ann, "/v1/chat/c1/messages", &asks("other")).await;
    assert_eq!((status, problem(&body).contains("names no agent")), (StatusCode::FORBIDDEN, true), "{body}");
    assert_eq!(stage.post(&ann, "/v1/chat/c1/messages", &asks("default")).await.0, StatusCode::ACCEPTED);
    let (_, made) = stage.post(TOKEN, "/v1/user-tokens", &json!({"user_id": "ann", "agent": "other"})).await;
    let to_other = made["token"].as_str().unwrap();
    assert_eq!(stage.post(to_other, "/v1/chat/c2/messages", &asks("other")).await.0, StatusCode::ACCEPTED);
    // In a conversation that she has, the agent is the conversation's.
    let (status, body) = stage.post(&ann, "/v1/chat/c2/messages", &json!({"text": "Hi"})).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{body}");
}

#[tokio::test]
async fn what_an_operator_forks_is_not_the_users_unless_the_operator_says_so() {
    let stage = Stage::new("").await;
    let ann = stage.user(TOKEN, "ann").await;
    let id = stage.chat(&ann, "c1", json!({"text": "Hi"})).await;
    let fork = async |body: Value| {
        let (status, forked) = stage.post(TOKEN, &format!("/v1/sessions/{id}/fork"), &body).await;
        assert_eq!(status, StatusCode::CREATED, "{forked}");
        (
            forked["session_id"].as_str().unwrap().to_owned(),
            forked["conversation_id"].as_str().unwrap().to_owned(),
        )
    };
    let (own, conversation) = fork(json!({"at": 2, "start": false})).await;
    let (for_user, _) = fork(json!({"at": 2, "start": false, "for_user": true})).await;
    let (_, listed) = stage.get(&ann, "/v1/sessions").await;
    let seen: Vec<_> =
        listed["items"].as_array().unwrap().iter().map(|one| one["session_id"].as_str()).collect();
    assert_eq!(seen, [Some(for_user.as_str()), Some(id.as_str())]);
    assert_eq!(stage.get(&ann, &format!("/v1/sessions/{own}")).await.0, StatusCode::NOT_FOUND);
    let into = format!("/v1/chat/{conversation}/messages");
    assert_eq!(stage.post(&ann, &into, &json!({"text": "Hi"})).await.0, StatusCode::NOT_FOUND);
}
