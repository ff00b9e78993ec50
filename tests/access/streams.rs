//! Streams of callers: a bounded number for each, and none for a token that is no longer in force.

use super::stage::{Stage, TOKEN, problem};
use eventsource_stream::Eventsource;
use futures::StreamExt;
use reqwest::{Method, Response, StatusCode};
use serde_json::json;

async fn stream(stage: &Stage, token: &str, id: &str) -> Response {
    stage.request(token, Method::GET, &format!("/v1/sessions/{id}/stream")).send().await.unwrap()
}

/// A server with eight streams, two of them for one user.
async fn few_streams() -> Stage {
    let mut stage = Stage::new("").await;
    let limits = [("WAKEFUL_SERVER__STREAMS", "8"), ("WAKEFUL_SERVER__USER_STREAMS", "2")];
    let limited =
        limits.iter().fold(stage.options.clone(), |options, (name, value)| options.env(name, *value));
    stage.process = limited.serve(&stage.database).await;
    stage
}

#[tokio::test]
async fn one_user_or_token_cannot_take_all_streams() {
    let stage = few_streams().await;
    let ann = stage.user(TOKEN, "ann").await;
    let id = stage.chat(&ann, "c1", json!({"text": "Hi"})).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let response = stream(&stage, &ann, &id).await;
        assert_eq!(response.status(), StatusCode::OK);
        held.push(response);
    }
    // A second token of the same user is the same caller.
    let again = stage.user(TOKEN, "ann").await;
    for token in [&ann, &again] {
        let response = stream(&stage, token, &id).await;
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert!(response.headers().contains_key("retry-after"));
        let body: serde_json::Value = response.json().await.unwrap();
        assert!(problem(&body).contains("server.user_streams"), "{body}");
    }
    // A token of an application gets half of all.
    let token = stage.token(&["--scope", "read"]).await;
    for _ in 0..4 {
        let response = stream(&stage, &token, &id).await;
        assert_eq!(response.status(), StatusCode::OK);
        held.push(response);
    }
    assert_eq!(stream(&stage, &token, &id).await.status(), StatusCode::TOO_MANY_REQUESTS);
    let response = stream(&stage, TOKEN, &id).await;
    assert_eq!(response.status(), StatusCode::OK);
    held.push(response);
    drop(held);
    crate::support::eventually("the places to be free", || async {
        (stream(&stage, &ann, &id).await.status() == StatusCode::OK).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_token_gets_no_more_streams_by_the_tokens_of_users_that_it_asks_for() {
    let stage = few_streams().await;
    let application = stage.token(&["--scope", "operate"]).await;
    let mut held = Vec::new();
    for user in ["u1", "u2", "u3"] {
        let token = stage.user(&application, user).await;
        let id = stage.chat(&token, user, json!({"text": "Hi"})).await;
        for _ in 0..2 {
            held.push(stream(&stage, &token, &id).await);
        }
    }
    let statuses: Vec<u16> = held.iter().map(|response| response.status().as_u16()).collect();
    assert_eq!(statuses, [200, 200, 200, 200, 429, 429], "half of all");
    // Others have the other half.
    let ann = stage.user(TOKEN, "ann").await;
    let id = stage.chat(&ann, "c1", json!({"text": "Hi"})).await;
    assert_eq!(stream(&stage, &ann, &id).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_stream_with_nothing_to_show_ends_with_the_token_that_opened_it() {
    let stage = Stage::new("").await;
    let made = stage.run(&["token", "create", "--scope", "operate"]).await;
    let (application, token_id) = (made["token"].as_str().unwrap(), made["token_id"].as_str().unwrap());
    let ann = stage.user(application, "ann").await;
    let id = stage.chat(&ann, "c1", json!({"text": "Hi"})).await;
    let asked = json!({"user_id": "ann", "expires_s": 2});
    let (_, brief) = stage.post(TOKEN, "/v1/user-tokens", &asked).await;
    let mut events = Vec::new();
    for token in [application, &ann, brief["token"].as_str().unwrap(), TOKEN] {
        let response = stream(&stage, token, &id).await;
        assert_eq!(response.status(), StatusCode::OK);
        events.push(Box::pin(response.bytes_stream().eventsource()));
    }
    for events in &mut events {
        while let Some(event) = events.next().await {
            if event.unwrap().event == "invocation_result" {
                break;
            }
        }
    }
    stage.run(&["token", "revoke", token_id]).await;
    let mut of_server = events.pop().unwrap();
    for mut events in events {
        while let Some(event) = events.next().await {
            event.unwrap();
        }
    }
    let more = json!({"text": "More"});
    assert_eq!(
        stage.post(TOKEN, &format!("/v1/sessions/{id}/messages"), &more).await.0,
        StatusCode::ACCEPTED
    );
    assert!(of_server.next().await.is_some(), "the configured token's goes on");
}

#[tokio::test]
async fn one_user_sends_no_more_messages_a_minute_than_one_may_and_others_go_on() {
    let mut stage = Stage::new("").await;
    let limited = stage.options.clone().env("WAKEFUL_SERVER__USER_MESSAGES", "2");
    stage.process = limited.serve(&stage.database).await;
    let (ann, bob) = (stage.user(TOKEN, "ann").await, stage.user(TOKEN, "bob").await);
    let one = json!({"text": "One", "client_key": "k1"});
    let first = stage.chat(&ann, "c1", one.clone()).await;
    // A repetition begins nothing, and takes nobody's place.
    for _ in 0..2 {
        assert_eq!(stage.post(&ann, "/v1/chat/c1/messages", &one).await.0, StatusCode::OK);
    }
    let post = async |token: &str, path: &str| {
        stage.request(token, Method::POST, path).body(json!({"text": "Hi"}).to_string()).send().await.unwrap()
    };
    assert_eq!(post(&ann, &format!("/v1/sessions/{first}/messages")).await.status(), StatusCode::ACCEPTED);
    // Another conversation and another token of the same user change nothing.
    let again = stage.user(TOKEN, "ann").await;
    let refused = post(&again, "/v1/chat/c2/messages").await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.headers().contains_key("retry-after"));
    let body: serde_json::Value = refused.json().await.unwrap();
    assert!(problem(&body).contains("server.user_messages"), "{body}");
    stage.chat(&bob, "c3", json!({"text": "Hi"})).await;
    for number in 0..4 {
        stage.chat(TOKEN, &format!("own{number}"), json!({"text": "Hi"})).await;
    }
}
