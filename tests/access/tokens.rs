//! Tokens that `wakeful token` and `/v1/tokens` make.

use super::stage::{Stage, TOKEN, problem, send};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

#[tokio::test]
async fn a_token_is_shown_once_and_kept_as_a_hash() {
    let stage = Stage::new("").await;
    let made =
        stage.run(&["token", "create", "--scope", "operate", "--name", "ci", "--expires", "90d"]).await;
    let (token, id) = (made["token"].as_str().unwrap(), made["token_id"].as_str().unwrap());
    let secret = token.rsplit('_').next().unwrap();
    assert_eq!(secret.len(), 64, "256 bits in hex");
    let (_, listed) = stage.get(TOKEN, "/v1/tokens").await;
    let printed = stage.run(&["token", "list"]).await;
    assert_eq!(listed["items"], printed);
    assert_eq!(
        (&printed[0]["token_id"], &printed[0]["scope"], &printed[0]["name"]),
        (&json!(id), &json!("operate"), &json!("ci"))
    );
    assert!(!printed.to_string().contains(secret));
    let stored: String =
        stage.database.value("select string_agg(t::text, '') from api_tokens t where $1 <> ''", "x").await;
    assert!(!stored.contains(secret), "{stored}");
    let left: bool = stage
        .database
        .value("select expires_at between now() + '89 days' and now() + '91 days' from api_tokens where token_id = $1", id)
        .await;
    assert!(left);
}

#[tokio::test]
async fn the_api_makes_lists_and_revokes_tokens_as_the_command_line_does() {
    let stage = Stage::new("").await;
    let asked = json!({"scope": "read", "name": "dashboard", "expires_s": 3600});
    let (status, made) = stage.post(TOKEN, "/v1/tokens", &asked).await;
    assert_eq!(status, StatusCode::CREATED, "{made}");
    let (token, id) = (made["token"].as_str().unwrap(), made["token_id"].as_str().unwrap());
    assert_eq!(stage.get(token, "/v1/sessions").await.0, StatusCode::OK);
    let path = format!("/v1/tokens/{id}");
    for _ in 0..2 {
        let (status, revoked) = send(stage.request(TOKEN, Method::DELETE, &path)).await;
        assert_eq!((status, revoked["revoked_at"].is_string()), (StatusCode::OK, true), "{revoked}");
    }
    let (status, body) = stage.get(token, "/v1/sessions").await;
    assert_eq!((status, problem(&body)), (StatusCode::UNAUTHORIZED, "this token was revoked"));
    assert_eq!(
        send(stage.request(TOKEN, Method::DELETE, "/v1/tokens/tok_none")).await.0,
        StatusCode::NOT_FOUND
    );
    for wrong in [
        json!({"scope": "root"}),
        json!({"scope": "admin", "space": "acme"}),
        json!({"scope": "read", "space": "a/b"}),
        json!({"scope": "read", "expires_s": 0}),
        json!({"scope": "read", "name": ""}),
    ] {
        assert_eq!(stage.post(TOKEN, "/v1/tokens", &wrong).await.0, StatusCode::BAD_REQUEST, "{wrong}");
    }
}

#[tokio::test]
async fn a_revoked_and_an_expired_token_are_refused_at_once_by_every_process() {
    let stage = Stage::new("").await;
    let other = stage.options.serve(&stage.database).await;
    let made = stage.run(&["token", "create", "--scope", "read"]).await;
    let expiring = stage.run(&["token", "create", "--scope", "read", "--expires", "1h"]).await;
    let text = |made: &Value, key: &str| made[key].as_str().unwrap().to_owned();
    let status = async |token: &str| {
        let request = |url: &str| crate::support::http().get(format!("{url}/v1/sessions")).bearer_auth(token);
        let (first, _) = send(request(&stage.process.url())).await;
        let (second, body) = send(request(&other.url())).await;
        assert_eq!(first, second);
        (first.as_u16(), problem(&body).to_owned())
    };
    for token in [&made, &expiring] {
        assert_eq!(status(&text(token, "token")).await.0, 200);
    }
    stage.run(&["token", "revoke", &text(&made, "token_id")]).await;
    assert_eq!(status(&text(&made, "token")).await, (401, "this token was revoked".to_owned()));
    stage.execute("update api_tokens set expires_at = now() where revoked_at is null").await;
    assert_eq!(status(&text(&expiring, "token")).await, (401, "this token has expired".to_owned()));
    // Without the secret, the id of a token tells nothing.
    let guessed = format!("{}{}", &text(&made, "token")[..21], "0".repeat(64));
    assert_eq!(status(&guessed).await, (401, "this token is unknown".to_owned()));
    assert_eq!(stage.try_run(&["token", "revoke", "tok_none"]).await.0.code(), Some(3));
}

#[tokio::test]
async fn the_last_use_is_kept_without_a_write_for_each_request() {
    let stage = Stage::new("").await;
    let token = stage.token(&["--scope", "read"]).await;
    let used = async || -> Option<String> {
        stage.database.value("select last_used_at::text from api_tokens where $1 <> ''", "x").await
    };
    assert_eq!(used().await, None);
    stage.get(&token, "/v1/sessions").await;
    let first = used().await;
    assert!(first.is_some());
    stage.get(&token, "/v1/sessions").await;
    assert_eq!(used().await, first, "within a minute nothing is written");
    stage.execute("update api_tokens set last_used_at = now() - interval '2 minutes'").await;
    stage.get(&token, "/v1/sessions").await;
    assert!(used().await > first);
}

#[tokio::test]
async fn a_flood_of_forged_tokens_holds_up_no_work() {
    let stage = Stage::new("").await;
    let forged = (0..400).map(|number| {
        let token = format!("wkt_{number:016x}_{}", "0".repeat(64));
        let request = stage.request(&token, Method::GET, "/v1/sessions");
        async move { send(request).await.0.as_u16() }
    });
    let work = async {
        let id = stage.chat(TOKEN, "c1", json!({"text": "Hi"})).await;
        crate::support::eventually("the session to rest", || async {
            let (_, session) = stage.get(TOKEN, &format!("/v1/sessions/{id}")).await;
            (session["status"] == "completed").then_some(())
        })
        .await;
    };
    let (statuses, ()) = tokio::join!(futures::future::join_all(forged), work);
    assert!(statuses.iter().all(|status| matches!(status, 401 | 503)), "{statuses:?}");
    assert!(statuses.contains(&401));
}

/// What another space's caller gets for the session `id`, and for one that does not exist.
async fn compare(stage: &Stage, token: &str, method: &str, path: &str, id: &str) {
    let ask = async |id: &str| {
        let request = stage.request(token, method.parse().unwrap(), &path.replace("{id}", id)).body("{}");
        let (status, body) = send(request).await;
        (status, body.to_string().replace(id, "ID"))
    };
    let (foreign, missing) = (ask(id).await, ask("sess_none").await);
    assert_eq!(foreign.0, StatusCode::NOT_FOUND, "{method} {path}: {}", foreign.1);
    assert_eq!(foreign, missing, "{method} {path}");
}

#[tokio::test]
async fn a_token_of_a_space_sees_and_changes_nothing_of_another() {
    let stage = Stage::new("").await;
    let acme = stage.token(&["--scope", "operate", "--space", "acme"]).await;
    let umbrella = stage.token(&["--scope", "operate", "--space", "umbrella"]).await;
    let id = stage.chat(&acme, "c1", json!({"text": "Hi"})).await;
    let other = stage.chat(&umbrella, "c1", json!({"text": "Hi"})).await;
    assert_ne!(id, other, "two spaces never share a conversation");
    let (_, session) = stage.get(&acme, &format!("/v1/sessions/{id}")).await;
    assert_eq!((&session["space_id"], &session["conversation_id"]), (&json!("acme"), &json!("c1")));
    for token in [umbrella.as_str(), TOKEN] {
        for (method, path) in [
            ("GET", "/v1/sessions/{id}"),
            ("GET", "/v1/sessions/{id}/messages"),
            ("GET", "/v1/sessions/{id}/steps"),
            ("GET", "/v1/sessions/{id}/events"),
            ("GET", "/v1/sessions/{id}/context"),
            ("GET", "/v1/sessions/{id}/tree"),
            ("GET", "/v1/sessions/{id}/stream"),
            ("GET", "/v1/sessions/{id}/diff/{id}"),
            ("POST", "/v1/sessions/{id}/retry"),
            ("POST", "/v1/sessions/{id}/cancel"),
            ("POST", "/v1/sessions/{id}/wake"),
            ("POST", "/v1/sessions/{id}/archive"),
            ("POST", "/v1/sessions/{id}/terminate"),
            ("POST", "/v1/sessions/{id}/fork"),
        ] {
            compare(&stage, token, method, path, &id).await;
        }
        let (status, _) =
            stage.post(token, &format!("/v1/sessions/{id}/messages"), &json!({"text": "Hi"})).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
    }
    let (_, listed) = stage.get(&umbrella, "/v1/sessions").await;
    let listed: Vec<&str> =
        listed["items"].as_array().unwrap().iter().map(|one| one["session_id"].as_str().unwrap()).collect();
    assert_eq!(listed, [other.as_str()]);
    let (status, _) = stage.get(&acme, "/v1/conversations/c2/sessions").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    // A token of the installation names the space that it means.
    let named =
        stage.request(TOKEN, Method::GET, &format!("/v1/sessions/{id}")).header("x-wakeful-space", "acme");
    assert_eq!(send(named).await.0, StatusCode::OK);
    let named = stage.request(&umbrella, Method::GET, "/v1/sessions").header("x-wakeful-space", "acme");
    assert_eq!(send(named).await.0, StatusCode::FORBIDDEN);
    let named = stage.request(TOKEN, Method::GET, "/v1/sessions").header("x-wakeful-space", "a/b");
    assert_eq!(send(named).await.0, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn schedules_of_a_space_are_its_own_and_wake_its_sessions() {
    let stage = Stage::new("").await;
    let acme = stage.token(&["--scope", "operate", "--space", "acme"]).await;
    let schedule = json!({"name": "daily", "cron": "0 9 * * *", "prompt": "Go."});
    assert_eq!(stage.post(&acme, "/v1/schedules", &schedule).await.0, StatusCode::CREATED);
    assert_eq!(stage.get(TOKEN, "/v1/schedules/daily").await.0, StatusCode::NOT_FOUND);
    let (status, woken) = stage.post(&acme, "/v1/schedules/daily/trigger", &json!({})).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{woken}");
    let path = format!("/v1/sessions/{}", woken["session_id"].as_str().unwrap());
    assert_eq!(stage.get(&acme, &path).await.1["space_id"], "acme");
    assert_eq!(stage.get(TOKEN, &path).await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_token_of_an_agent_starts_and_reads_only_its_sessions() {
    let config = "[agents.helper]\nmodel = \"openai/test\"\nsystem_prompt = \"You help.\"";
    let stage = Stage::new(config).await;
    let helper = stage.token(&["--scope", "operate", "--agent", "helper"]).await;
    let own = stage.chat(&helper, "c1", json!({"text": "Hi"})).await;
    let other = stage.chat(TOKEN, "c2", json!({"text": "Hi"})).await;
    let (_, session) = stage.get(&helper, &format!("/v1/sessions/{own}")).await;
    assert_eq!(session["agent"], "helper");
    compare(&stage, &helper, "GET", "/v1/sessions/{id}", &other).await;
    compare(&stage, &helper, "POST", "/v1/sessions/{id}/cancel", &other).await;
    let (_, listed) = stage.get(&helper, "/v1/sessions").await;
    assert_eq!(listed["items"].as_array().unwrap().len(), 1);
    let (status, _) = stage.post(&helper, "/v1/chat/c2/messages", &json!({"text": "Hi"})).await;
    assert_eq!(status, StatusCode::NOT_FOUND, "the conversation is another agent's");
    let asked = json!({"text": "Hi", "agent": "default"});
    assert_eq!(stage.post(&helper, "/v1/chat/c3/messages", &asked).await.0, StatusCode::FORBIDDEN);
    let notice = json!({"notice": "News", "agent": "default"});
    assert_eq!(stage.post(&helper, "/v1/triggers/herald", &notice).await.0, StatusCode::FORBIDDEN);
}
