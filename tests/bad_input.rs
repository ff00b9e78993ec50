//! Refused input: each refusal says why, and nothing is written.

use crate::support::client::texts;
use crate::support::wire::Proxy;
use crate::support::{Answer, Database, ModelServer, Options, Process, eventually};
use reqwest::{Method, RequestBuilder, Response, StatusCode, header};
use serde_json::{Value, json};

const LIMIT: usize = 1 << 20;

#[tokio::test]
async fn a_body_that_is_no_message_is_refused_and_nothing_is_written() {
    let (database, _model, process) = api().await;
    let client = process.client();
    let before = database.rows().await;
    let chat = "/v1/chat/c1/messages";
    let not_utf8: &[u8] = b"{\"text\":\"\xff\"}";
    let cases: [(&[u8], StatusCode, &str); 13] = [
        (b"", StatusCode::BAD_REQUEST, "empty"),
        (b"  \n", StatusCode::BAD_REQUEST, "empty"),
        (b"{\"text\":", StatusCode::BAD_REQUEST, "line 1 column 8"),
        (b"{\"text\":\"a\"}\n}", StatusCode::BAD_REQUEST, "line 2 column 1"),
        (b"[]", StatusCode::BAD_REQUEST, "line 1"),
        (b"{}", StatusCode::BAD_REQUEST, "`text`"),
        (b"{\"text\":5}", StatusCode::BAD_REQUEST, "`text` is 5: it must be a string"),
        (b"{\"text\":\"\"}", StatusCode::BAD_REQUEST, "`text` is empty"),
        (b"{\"text\":\"a\",\"txt\":1}", StatusCode::BAD_REQUEST, "`txt`"),
        (b"{\"text\":\"a\\u0000b\"}", StatusCode::BAD_REQUEST, "NUL"),
        (b"{\"text\":\"a\",\"client_key\":\"\"}", StatusCode::BAD_REQUEST, "`client_key`"),
        (b"{\"text\":\"a\",\"agent\":\"nobody\"}", StatusCode::BAD_REQUEST, "nobody"),
        (not_utf8, StatusCode::BAD_REQUEST, "byte 9"),
    ];
    for (body, status, says) in cases {
        let shown = String::from_utf8_lossy(body).into_owned();
        let request = client.post_request(chat).body(body.to_vec());
        refused(request, status, says).await.unwrap_or_else(|error| panic!("{shown}: {error}"));
    }
    for path in ["/v1/chat/%00/messages", "/v1/chat/a%0Ab/messages", "/v1/chat/%FF/messages"] {
        let request = client.post_request(path).body("{\"text\":\"a\"}");
        refused(request, StatusCode::BAD_REQUEST, "").await.unwrap_or_else(|error| panic!("{path}: {error}"));
    }
    assert_eq!(database.rows().await, before);
}

#[tokio::test]
async fn a_body_of_one_mebibyte_is_taken_and_one_byte_more_is_not() {
    let (database, _model, process) = api().await;
    let client = process.client();
    let body = |bytes: usize| {
        let frame = json!({"text": ""}).to_string().len();
        json!({"text": "x".repeat(bytes - frame)}).to_string()
    };
    let before = database.rows().await;
    let request = client.post_request("/v1/chat/c1/messages").body(body(LIMIT + 1));
    refused(request, StatusCode::PAYLOAD_TOO_LARGE, "1048576 bytes").await.unwrap();
    // The same for a body without a Content-Length.
    let chunks = body(LIMIT + 1).into_bytes();
    let stream = futures::stream::iter(
        chunks.chunks(65536).map(|chunk| Ok::<_, std::io::Error>(chunk.to_vec())).collect::<Vec<_>>(),
    );
    let request = client.post_request("/v1/chat/c1/messages").body(reqwest::Body::wrap_stream(stream));
    refused(request, StatusCode::PAYLOAD_TOO_LARGE, "1048576 bytes").await.unwrap();
    assert_eq!(database.rows().await, before);

    let taken = client.post_request("/v1/chat/c1/messages").body(body(LIMIT)).send().await.unwrap();
    assert_eq!(taken.status(), StatusCode::ACCEPTED);
    let answer: Value = taken.json().await.unwrap();
    let session = client.wait_for(answer["session_id"].as_str().unwrap(), "completed").await;
    assert_eq!(texts(&session, "user")[0].len(), LIMIT - json!({"text": ""}).to_string().len());
}

#[tokio::test]
async fn what_does_not_exist_is_404_and_what_is_not_taken_is_405() {
    let (database, _model, process) = api().await;
    let client = process.client();
    let before = database.rows().await;
    for path in [
        "/v1/sessions/sess_none",
        "/v1/sessions/sess_none/messages",
        "/v1/sessions/sess_none/steps",
        "/v1/sessions/sess_none/events",
        "/v1/sessions/sess_none/stream",
        "/v1/conversations/none/sessions",
        "/v1/chat/none",
        "/nothing",
        "/v1/nothing",
    ] {
        refused(client.get_request(path), StatusCode::NOT_FOUND, "")
            .await
            .unwrap_or_else(|error| panic!("{path}: {error}"));
    }
    for verb in ["messages", "retry", "cancel", "wake", "archive", "terminate"] {
        let request = client.post_request(&format!("/v1/sessions/sess_none/{verb}")).body("{\"text\":\"a\"}");
        // The other verbs take only a reason.
        let request = if verb == "messages" { request } else { request.body("") };
        refused(request, StatusCode::NOT_FOUND, "sess_none")
            .await
            .unwrap_or_else(|error| panic!("{verb}: {error}"));
    }
    for (method, path, allowed) in [
        (Method::GET, "/v1/chat/c1/messages", "POST"),
        (Method::PUT, "/v1/chat/c1/messages", "POST"),
        (Method::DELETE, "/v1/sessions/sess_none", "GET"),
        (Method::POST, "/v1/sessions", "GET"),
        (Method::POST, "/healthz", "GET"),
    ] {
        let request = crate::support::http().request(method.clone(), format!("{}{path}", client.url));
        let headers = refused(request, StatusCode::METHOD_NOT_ALLOWED, path).await.unwrap();
        let allow = headers.get(header::ALLOW).unwrap_or_else(|| panic!("{method} {path}: no Allow"));
        assert!(allow.to_str().unwrap().contains(allowed), "{method} {path}: {allow:?}");
    }
    assert_eq!(database.rows().await, before);
}

#[tokio::test]
async fn a_query_or_a_header_that_cannot_be_read_is_400() {
    let (database, _model, process) = api().await;
    let client = process.client();
    let answer = client.chat("c1", "one").await;
    let id = answer["session_id"].as_str().unwrap();
    client.wait_for(id, "completed").await;
    let before = database.rows().await;
    for path in [
        format!("/v1/sessions/{id}/messages?limit=many"),
        format!("/v1/sessions/{id}/messages?cursor=x"),
        format!("/v1/sessions/{id}/messages?page=2"),
        format!("/v1/sessions/{id}/stream?after=x"),
        format!("/v1/sessions/{id}/stream?last=1"),
        "/v1/sessions?status=busy".to_owned(),
        "/v1/sessions?cursor=%00".to_owned(),
        "/v1/sessions/%00".to_owned(),
        "/v1/sessions/%FF".to_owned(),
        "/v1/sessions/a%00b/stream".to_owned(),
        "/v1/conversations/%00/sessions".to_owned(),
    ] {
        refused(client.get_request(&path), StatusCode::BAD_REQUEST, "")
            .await
            .unwrap_or_else(|error| panic!("{path}: {error}"));
    }
    let no_cursor = "`cursor` does not belong to this list";
    let no_size = "`limit` is from 1 to 500";
    for (path, says) in [
        ("/v1/sessions?cursor=zzz", no_cursor),
        ("/v1/sessions?cursor=dlv_0", no_cursor),
        ("/v1/replays?cursor=zzz", no_cursor),
        ("/v1/conversations/c1/sessions?cursor=zzz", no_cursor),
        ("/v1/deliveries?cursor=zzz", no_cursor),
        ("/v1/batches?cursor=zzz", no_cursor),
        ("/v1/effects?cursor=zzz", no_cursor),
        ("/v1/effects?tool=x&channel=y", "`tool` is of calls"),
        ("/v1/notifications?cursor=zzz", no_cursor),
        ("/v1/tokens?cursor=zzz", no_cursor),
        ("/v1/errors?cursor=zzz", no_cursor),
        ("/v1/sessions?limit=0", no_size),
        ("/v1/sessions?limit=501", no_size),
        ("/v1/deliveries?limit=0", no_size),
        ("/v1/schedules?limit=9999", no_size),
        ("/v1/sessions?since=yesterday", "`since` must be a time such as 20"),
        ("/v1/sessions?cost_over=abc", "`cost_over` must be a number such as 0.25"),
    ] {
        refused(client.get_request(path), StatusCode::BAD_REQUEST, says)
            .await
            .unwrap_or_else(|error| panic!("{path}: {error}"));
    }
    let spaced = client.get_request("/v1/sessions").header("X-Wakeful-Space", "bad space");
    refused(spaced, StatusCode::BAD_REQUEST, "1 to 64 letters, digits").await.unwrap();
    // The beginning of an id finds its session.
    let (status, found) = client.get(&format!("/v1/sessions/{}", &id[..id.len() - 4])).await;
    assert_eq!((status, found["session_id"].as_str()), (StatusCode::OK, Some(id)), "{found}");
    for last in ["x", "", "1.5", "-1", "99999999999999999999"] {
        let request = client.get_request(&format!("/v1/sessions/{id}/stream")).header("Last-Event-ID", last);
        refused(request, StatusCode::BAD_REQUEST, "Last-Event-ID")
            .await
            .unwrap_or_else(|error| panic!("{last}: {error}"));
    }
    assert_eq!(database.rows().await, before);
}

#[tokio::test]
async fn a_time_that_the_database_does_not_have_is_refused() {
    let (_database, _model, process) = api().await;
    let client = process.client();
    for time in ["%2B262142-12-31T23:59:59Z", "-262143-01-01T00:00:00Z", "%2B10000-01-01T00:00:00Z"] {
        for list in ["sessions", "replays", "effects", "errors", "audit"] {
            let request = client.get_request(&format!("/v1/{list}?since={time}"));
            let refused = refused(request, StatusCode::BAD_REQUEST, "within the years 0000 to 9999").await;
            refused.unwrap_or_else(|error| panic!("{list} {time}: {error}"));
        }
        let request = client.get_request(&format!("/v1/sessions?until={time}"));
        refused(request, StatusCode::BAD_REQUEST, "`until`")
            .await
            .unwrap_or_else(|error| panic!("{time}: {error}"));
    }
}

#[tokio::test]
async fn a_client_key_makes_one_message_of_many_and_never_two_of_one() {
    let (database, _model, process) = api().await;
    let client = process.client();
    let body = json!({"user_id": "ann", "text": "one", "client_key": "k1"});
    let (status, first) = client.post("/v1/chat/c1/messages", &body).await;
    assert_eq!((status, &first["outcome"]), (StatusCode::ACCEPTED, &json!("new_run")));
    let id = first["session_id"].as_str().unwrap();
    client.wait_for(id, "completed").await;

    let before = database.rows().await;
    let (status, again) = client.post("/v1/chat/c1/messages", &body).await;
    assert_eq!((status, &again), (StatusCode::OK, &first), "the first answer, although the run is over");
    let other = json!({"user_id": "ann", "text": "two", "client_key": "k1"}).to_string();
    let request = client.post_request("/v1/chat/c1/messages").body(other.clone());
    refused(request, StatusCode::UNPROCESSABLE_ENTITY, "k1").await.unwrap();
    let header = client.post_request("/v1/chat/c1/messages").header("Idempotency-Key", "k1");
    refused(header.body("{\"text\":\"two\"}"), StatusCode::UNPROCESSABLE_ENTITY, "k1").await.unwrap();
    for path in ["/v1/chat/c1/messages", &format!("/v1/sessions/{id}/messages")] {
        let both = client.post_request(path).header("Idempotency-Key", "k3");
        let both = both.body(json!({"text": "three", "client_key": "k2"}).to_string());
        refused(both, StatusCode::BAD_REQUEST, "has two keys").await.unwrap();
    }
    let same = client.post_request("/v1/chat/c1/messages").header("Idempotency-Key", "k1");
    assert_eq!(same.body(body.to_string()).send().await.unwrap().status(), StatusCode::OK);
    assert_eq!(database.rows().await, before);
    assert_eq!(texts(&client.session(id).await, "user"), ["one"]);

    // A key belongs to its conversation.
    let (status, _) = client.post("/v1/chat/c2/messages", &serde_json::from_str(&other).unwrap()).await;
    assert_eq!(status, StatusCode::ACCEPTED);
}

#[tokio::test]
async fn without_a_token_no_page_of_a_browser_gets_in() {
    let database = Database::new().await;
    let process = Options::new().model("scripted/demo").serve(&database).await;
    let client = process.client();
    for (name, value) in [("Origin", "http://evil.example"), ("Host", "evil.example"), ("Origin", "null")] {
        let sent = client
            .post_request("/v1/chat/c1/messages")
            .header(name, value)
            .body(json!({"text": "Hi"}).to_string())
            .send()
            .await
            .unwrap();
        assert_eq!(sent.status(), StatusCode::FORBIDDEN, "{name}: {value}");
    }
    for origin in ["http://localhost:3000", "http://127.0.0.1:7070", "http://[::1]:1"] {
        let sent = client.get_request("/v1/sessions").header("Origin", origin).send().await.unwrap();
        assert_eq!(sent.status(), StatusCode::OK, "{origin}");
    }
    assert!(client.get("/v1/sessions").await.1["items"].as_array().unwrap().is_empty(), "nothing was taken");
}

#[tokio::test]
async fn without_the_token_nothing_below_v1_answers() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
    let process = options(&model).env("WAKEFUL_TOKEN", "s3cret-token-of-the-tests").serve(&database).await;
    let client = process.client();
    let before = database.rows().await;
    for given in [
        None,
        Some("Bearer wrong"),
        Some("Bearer "),
        Some("Basic s3cret-token-of-the-tests"),
        Some("s3cret-token-of-the-tests"),
    ] {
        for request in [
            client.get_request("/v1/sessions"),
            client.get_request("/v1/sessions/sess_none/stream"),
            client.post_request("/v1/chat/c1/messages").body("{\"text\":\"a\"}"),
        ] {
            let request = match given {
                Some(given) => request.header(header::AUTHORIZATION, given),
                None => request,
            };
            let headers = refused(request, StatusCode::UNAUTHORIZED, "bearer token").await.unwrap();
            assert!(headers[header::WWW_AUTHENTICATE].to_str().unwrap().starts_with("Bearer"), "{given:?}");
        }
    }
    assert_eq!(database.rows().await, before);
    for path in ["/healthz", "/readyz"] {
        assert_eq!(client.get(path).await.0, StatusCode::OK, "{path} is for whoever runs the process");
    }
    for scheme in ["Bearer", "bearer"] {
        let request = client
            .get_request("/v1/sessions")
            .header(header::AUTHORIZATION, format!("{scheme} s3cret-token-of-the-tests"));
        assert_eq!(request.send().await.unwrap().status(), StatusCode::OK, "{scheme}");
    }
    assert!(!process.log().contains("s3cret"), "the token is in no log");
}

#[tokio::test]
async fn a_database_that_is_away_is_named_and_what_comes_meanwhile_is_refused() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
    let mut proxy = Proxy::start(&database.url);
    let process = options(&model).spawn(&proxy.url);
    process.wait_for_log("\"Listening\"").await;
    let client = process.client();
    let (status, ready) = client.get("/readyz").await;
    assert_eq!((status, &ready["checks"]["database"]), (StatusCode::OK, &json!("ok")));
    proxy.go_away().await;

    // All who ask share one look, so the answer may be half a second old.
    let (status, ready) = crate::support::eventually("the database to be missed", || async {
        let answer = client.get("/readyz").await;
        (answer.0 != StatusCode::OK).then_some(answer)
    })
    .await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{ready}");
    assert_ne!(ready["checks"]["database"], "ok");
    assert_eq!(ready["checks"]["draining"], "ok");
    assert_eq!(client.get("/healthz").await.0, StatusCode::OK, "the process itself is well");
    let request = client.post_request("/v1/chat/c1/messages").body("{\"text\":\"one\"}");
    let headers = refused(request, StatusCode::SERVICE_UNAVAILABLE, "nothing was taken").await.unwrap();
    assert!(headers.contains_key(header::RETRY_AFTER));

    proxy.come_back();
    eventually("the database to be back", || async {
        (client.get("/readyz").await.0 == StatusCode::OK).then_some(())
    })
    .await;
    let answer = client.chat("c1", "one").await;
    let session = client.wait_for(answer["session_id"].as_str().unwrap(), "completed").await;
    assert_eq!(texts(&session, "user"), ["one"]);
}

#[tokio::test]
async fn a_draining_process_is_not_ready_and_ends_its_step() {
    let (_database, model, process) = api().await;
    let client = process.client();
    model.hold();
    let answer = client.chat("c1", "one").await;
    model.asked(1).await;
    process.signal(libc::SIGTERM);
    let (status, ready) = eventually("the drain", || async {
        let answer = client.get("/readyz").await;
        (answer.0 != StatusCode::OK).then_some(answer)
    })
    .await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        (&ready["checks"]["draining"], &ready["checks"]["database"]),
        (&json!("draining"), &json!("ok"))
    );
    assert_eq!(client.get("/healthz").await.0, StatusCode::OK);
    let id = answer["session_id"].as_str().unwrap();
    assert_eq!(client.session(id).await["status"], "running", "it still answers");
    model.release();
    let (status, process) = process.ended().await;
    assert!(status.success());
    assert!(process.log().contains("The run is completed"));
}

#[tokio::test]
async fn arguments_that_are_nested_too_deep_to_be_stored_go_back_to_the_model_and_the_session_can_be_read() {
    let database = Database::new().await;
    // As deep as a reader of JSON takes it. Within a message it would be too deep to be read back.
    let deep = format!("{{\"persons\":{}1{}}}", "[".repeat(125), "]".repeat(125));
    assert!(serde_json::from_str::<Value>(&deep).is_ok());
    let model = ModelServer::start(move |_, number| match number {
        0 => Answer::Calls(vec![("reserve".to_owned(), deep.clone())]),
        1 => Answer::text("It did not work."),
        _ => Answer::text("I am still here."),
    })
    .await;
    let options = options(&model);
    let process = options.serve(&database).await;
    let client = process.client();
    let id = client.chat("c1", "A table.").await["session_id"].as_str().unwrap().to_owned();
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "assistant").last().map(String::as_str), Some("It did not work."));
    assert!(texts(&session, "tool")[0].contains("nested too deep"), "{session}");
    assert!(options.effects().is_empty(), "the tool did not run");
    process.kill();
    // Another process has no copy of it.
    let process = options.serve(&database).await;
    let client = process.client();
    client.chat("c1", "Are you there?").await;
    model.asked(3).await;
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "assistant").last().map(String::as_str), Some("I am still here."));
    assert!(process.terminate().success());
}

async fn api() -> (Database, ModelServer, Process) {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
    let process = options(&model).serve(&database).await;
    (database, model, process)
}

fn options(model: &ModelServer) -> Options {
    Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url)
}

/// Sends a request that must be refused with this status, as a problem of RFC 9457 whose detail contains
/// `says`. Returns the headers.
async fn refused(
    request: RequestBuilder,
    status: StatusCode,
    says: &str,
) -> Result<header::HeaderMap, String> {
    let response: Response = request.send().await.map_err(|error| format!("no answer: {error:?}"))?;
    let (got, headers) = (response.status(), response.headers().clone());
    let text = response.text().await.map_err(|error| error.to_string())?;
    if got != status {
        return Err(format!("{got} and not {status}: {text}"));
    }
    if headers.get(header::CONTENT_TYPE).is_none_or(|kind| kind != "application/problem+json") {
        return Err(format!("{:?}: {text}", headers.get(header::CONTENT_TYPE)));
    }
    let problem: Value = serde_json::from_str(&text).map_err(|error| format!("{error}: {text}"))?;
    let complete = problem["type"].is_string()
        && problem["title"].as_str().is_some_and(|title| !title.is_empty())
        && problem["status"] == status.as_u16()
        && problem["detail"].as_str().is_some_and(|detail| !detail.is_empty() && detail.contains(says));
    if complete { Ok(headers) } else { Err(format!("{problem}, which should say {says:?}")) }
}
