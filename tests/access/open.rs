//! A server without a token: who is this machine, and who is not.

use super::stage::{Stage, send};
use crate::support::Database;
use reqwest::{Method, StatusCode};

#[tokio::test]
async fn a_wrong_bearer_is_refused_though_none_is_needed() {
    let stage = Stage::on(Database::new().await, "", None).await;
    for wrong in ["anything", "wkt_", "wku_", "x y"] {
        let (status, body) = stage.get(wrong, "/v1/sessions").await;
        assert_eq!(status, StatusCode::UNAUTHORIZED, "{wrong}: {body}");
    }
    for header in ["Basic YTpi", "Bearer", "Bearer ", "bearer\tx", "anything"] {
        let request = stage.process.client().get_request("/v1/sessions").header("authorization", header);
        let (status, body) = send(request).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED, "{header:?}: {body}");
    }
    assert_eq!(stage.process.client().get("/v1/sessions").await.0, StatusCode::OK);
}

/// What proxies add to a request that they pass on.
const PROXIES: [&str; 7] =
    ["Forwarded", "X-Forwarded-For", "X-Real-IP", "Via", "X-Client-IP", "True-Client-IP", "CF-Connecting-IP"];

#[tokio::test]
async fn what_a_proxy_passes_on_is_not_this_machine() {
    let stage = Stage::on(Database::new().await, "", None).await;
    let reader = stage.token(&["--scope", "read"]).await;
    for header in PROXIES {
        let request = stage.process.client().get_request("/v1/sessions").header(header, "127.0.0.1");
        let (status, body) = send(request).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED, "{header}: {body}");
        let request = stage.request(&reader, Method::GET, "/v1/sessions").header(header, "192.0.2.1");
        assert_eq!(send(request).await.0, StatusCode::OK, "{header}");
    }
    // nginx with nothing but `proxy_pass` adds no header.
    let old = |request: reqwest::RequestBuilder| send(request.version(reqwest::Version::HTTP_10));
    let (status, body) = old(stage.process.client().get_request("/v1/sessions")).await;
    assert_eq!(status, StatusCode::FORBIDDEN, "{body}");
    assert_eq!(old(stage.request(&reader, Method::GET, "/v1/sessions")).await.0, StatusCode::OK);
}

#[tokio::test]
async fn the_console_takes_nobody_behind_a_proxy_for_this_machine() {
    let stage = Stage::on(Database::new().await, "", None).await;
    let page = || stage.process.client().get_request("/console/sessions");
    assert_eq!(page().send().await.unwrap().status(), StatusCode::OK);
    for header in PROXIES {
        let answer = page().header(header, "127.0.0.1").send().await.unwrap();
        assert!(is_refused(answer).await, "{header}");
    }
    assert!(is_refused(page().version(reqwest::Version::HTTP_10).send().await.unwrap()).await);
}

/// Whether a page shows nothing but that it is refused, or where to log in.
async fn is_refused(answer: reqwest::Response) -> bool {
    let status = answer.status();
    let page = answer.text().await.unwrap();
    let refused = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
    refused && !page.contains("name=\"word\"") || page.contains("name=\"token\"")
}

#[tokio::test]
async fn a_token_for_an_open_server_comes_with_a_warning_that_it_is_open() {
    let stage = Stage::on(Database::new().await, "", None).await;
    for (options, warned) in [
        (stage.options.clone(), true),
        (stage.options.clone().env("WAKEFUL_TOKEN", super::stage::TOKEN), false),
    ] {
        let mut command = options;
        command.args = ["token", "create", "--scope", "read", "-o", "json"].map(str::to_owned).to_vec();
        let (status, ended) = command.spawn(&stage.database.url).ended().await;
        assert!(status.success(), "{}", ended.log());
        let said = ended.log();
        assert_eq!(said.contains("WAKEFUL_TOKEN"), warned, "{said}");
    }
}
