//! Requests to every route with broken parts, and webhooks whose signatures fit and whose bodies do not.

use super::{Dice, is_whole, share};
use crate::support::messengers::{
    SLACK_SECRET, TELEGRAM_SECRET, WEBHOOK_SECRET, slack_signature, webhook_signature,
};
use crate::support::{Answer, Client, Database, ModelServer, Options, Process};
use futures::{StreamExt, stream};
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::json;
use std::time::Duration;

const TOKEN: &str = "a token of the trial";

/// A token of the configured issuer in shape, and the issuer's key (of RFC 7517).
const JWT: &str = "eyJhbGciOiJFUzI1NiIsImtpZCI6IjEifQ.eyJpc3MiOiJpIiwiYXVkIjoiYSIsInN1YiI6ImFubiIsImV4cCI6OTk5OTk5OTk5OX0.c2lnbmF0dXJl";
const JWK: &str = r#"{"keys":[{"kty":"EC","crv":"P-256","kid":"1","use":"sig","alg":"ES256",
    "x":"MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4","y":"4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM"}]}"#;

/// How many requests are under way at a time.
const AT_ONCE: usize = 8;

async fn serve(database: &Database, model: &ModelServer) -> Process {
    let messengers = "[messenger.webhook]\nagent = \"default\"\n[messenger.slack]\ntoken = \"xoxb-1\"\n\
        [messenger.telegram]\ntoken = \"1:a\"\nallow_users = [\"*\"]\n[email.mailgun]\nsigning_keys = [\"k\"]\n\
        [email.postmark]\nuser = \"u\"\npasswords = [\"a password of the trial\"]\n\
        [email.ses]\ntopic_arns = [\"arn:aws:sns:eu-central-1:123456789012:mail\"]\nsns_url = \"http://127.0.0.1:1\"";
    let options = Options::new()
        .model("openai/test")
        .config(messengers)
        .env("OPENAI_BASE_URL", &model.url)
        .env("WAKEFUL_TOKEN", TOKEN)
        .env("WAKEFUL_SERVER__INTERNAL_TOKENS", "an internal token of the trial")
        .env("WAKEFUL_EMAIL__RAW_SECRETS", WEBHOOK_SECRET)
        .env("WAKEFUL_MESSENGER__SLACK__SIGNING_SECRETS", SLACK_SECRET)
        .env("WAKEFUL_MESSENGER__TELEGRAM__WEBHOOK_SECRETS", TELEGRAM_SECRET)
        .env("WAKEFUL_MESSENGER__WEBHOOK__SECRETS", WEBHOOK_SECRET);
    let keys = options.path("keys.json");
    std::fs::write(&keys, JWK).unwrap();
    let options = options
        .env("WAKEFUL_USERS__JWT__ISSUER", "i")
        .env("WAKEFUL_USERS__JWT__AUDIENCE", "a")
        .env("WAKEFUL_USERS__JWT__JWKS_FILE", keys.display().to_string());
    options.serve(database).await
}

/// The routes in the sources, each with its methods that change something and those that read.
fn routes() -> Vec<String> {
    let root = std::path::PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let of = |folder: &str| crate::readme::routes(&root.join(folder));
    let routes: Vec<String> = of("worker/http/src").into_iter().chain(of("worker/channels/src")).collect();
    assert!(routes.len() >= 40, "the routes are read: {routes:?}");
    routes
}

/// A request to a route, broken in some of its parts.
fn mutated(
    dice: &mut Dice,
    http: &reqwest::Client,
    client: &Client,
    routes: &[String],
    id: &str,
) -> RequestBuilder {
    const METHODS: [&str; 7] = ["GET", "GET", "GET", "POST", "POST", "PUT", "DELETE"];
    const NAMES: [&str; 14] = [
        "c1",
        "none",
        "%00",
        "%FF",
        "..",
        "%2e%2e%2f",
        "a%2Fb",
        "%F0%9F%98%80",
        "'or'1'='1",
        "sess_",
        "sess_%0A",
        "-1",
        "99999999999999999999",
        "%5c",
    ];
    const QUERIES: [&str; 20] = [
        "",
        "limit=0",
        "limit=-1",
        "limit=99999999999999999999",
        "limit=a",
        "after=-9223372036854775808",
        "after=%00",
        "before=1e9",
        "cursor=AAAA",
        "cursor=%FF%FE",
        "status=none",
        "status=failed&status=running",
        "all=maybe",
        "strategy=full",
        "raw=true",
        "count=100000000",
        "conversation_id=%00",
        "dropped=true",
        "redact=true&%00=1",
        "&&&=",
    ];
    const BODIES: [&str; 9] = [
        r#"{"text":"Hello?","user_id":"ann","client_key":"k1"}"#,
        r#"{"reason":"because"}"#,
        r#"{"call_id":"call_1","outcome":"happened","result":"done","by":"ann"}"#,
        r#"{"at":2,"model":"openai/test","tools":["reserve"],"text":"again","tool_mode":"dry","start":true}"#,
        r#"{"name":"n","cron":"30 7 * * MON-FRI","prompt":"p","time_zone":"Europe/Berlin","missed":"one"}"#,
        r#"{"notice":{"title":"t","body":"b","source":"s","url":"https://example.org"}}"#,
        r#"{"section":"header","version":1}"#,
        "From: a@example.com\r\nTo: b@example.org\r\nSubject: s\r\nMessage-ID: <1@example.com>\r\n\r\ntext",
        "",
    ];
    let mut path = routes[dice.below(routes.len())].clone();
    while let Some(open) = path.find('{') {
        let Some(length) = path[open..].find('}') else { break };
        let long = "x".repeat(3000);
        let name = match dice.below(4) {
            0 | 1 => id,
            2 => dice.of(&NAMES),
            _ if dice.below(20) == 0 => &long,
            _ => "c1",
        };
        path.replace_range(open..=open + length, name);
    }
    let path = if path.starts_with("/v1") || path.starts_with("/healthz") || path.starts_with("/readyz") {
        path
    } else {
        format!("/v1{path}")
    };
    // A route that takes no parameters refuses all of them.
    let query = if dice.below(2) == 0 { "" } else { dice.of(&QUERIES) };
    let url = format!("{}{path}?{query}", client.url);
    let method = Method::from_bytes(dice.of(&METHODS).as_bytes()).unwrap();
    let mut request = client.get_request("/").build().unwrap();
    *request.method_mut() = method.clone();
    *request.url_mut() = url.parse().unwrap();
    let mut request = RequestBuilder::from_parts(http.clone(), request).timeout(Duration::from_secs(20));
    request = match dice.below(12) {
        0 => request,
        1 => request.bearer_auth(dice.broken(TOKEN).replace(|c: char| c.is_control() || !c.is_ascii(), "")),
        2 => {
            let token = if dice.below(4) == 0 { JWT.to_owned() } else { dice.broken(JWT) };
            request.bearer_auth(token.replace(|c: char| c.is_control() || !c.is_ascii(), ""))
        }
        _ => request.bearer_auth(TOKEN).header("X-Internal-Token", "an internal token of the trial"),
    };
    if dice.below(4) == 0 {
        request = request.header("Last-Event-ID", dice.of(&["-1", "a", "99999999999999999999", "1"]));
        request = request
            .header("content-type", dice.of(&["text/plain", "multipart/form-data; boundary=", "a/b;c"]));
        request = request.header("content-encoding", dice.of(&["gzip", "identity", "x"]));
    }
    if method == Method::GET {
        return request;
    }
    let body = dice.of(&BODIES);
    request.body(if dice.below(3) == 0 { body.to_owned() } else { dice.broken(body) })
}

/// A webhook that is signed as it should be, with a broken body.
fn webhook(dice: &mut Dice, client: &Client, seed: usize) -> RequestBuilder {
    let (at, id) = (chrono::Utc::now().timestamp().to_string(), format!("m{seed}"));
    let slack = json!({"type": "event_callback", "team_id": "T1", "event_id": id, "authorizations": [{"user_id": "UB"}],
        "event": {"type": "message", "channel": "C1", "channel_type": "im", "user": "U1", "text": "Hi", "ts": "1.2"}});
    let telegram = json!({"update_id": seed, "message": {"message_id": seed, "date": 1, "text": "Hi",
        "from": {"id": 5, "is_bot": false}, "chat": {"id": 7, "type": "private"}}});
    let hook = json!({"conversation_id": "w1", "text": "Hi", "sender": "ann"});
    let mail = format!(
        "From: Ann <ann@example.com>\r\nTo: agent@example.org\r\nMessage-ID: <{seed}@example.com>\r\nSubject: =?utf-8?q?a?=\r\n\
         MIME-Version: 1.0\r\nContent-Type: multipart/mixed; boundary=x\r\n\r\n--x\r\nContent-Type: text/plain\r\n\r\nHi\r\n\
         --x\r\nContent-Type: text/html\r\n\r\n<p>Hi</p>\r\n--x--\r\n"
    );
    let kind = dice.below(4);
    let text = [slack.to_string(), telegram.to_string(), hook.to_string(), mail][kind].clone();
    let body = dice.broken(&text);
    let request = match kind {
        0 => client
            .post_request("/v1/triggers/messenger/slack")
            .header("X-Slack-Signature", slack_signature(SLACK_SECRET, &at, &body))
            .header("X-Slack-Request-Timestamp", at),
        1 => client
            .post_request("/v1/triggers/messenger/telegram")
            .header("X-Telegram-Bot-Api-Secret-Token", TELEGRAM_SECRET),
        _ => {
            let path = ["/v1/triggers/messenger/webhook", "/v1/triggers/email/raw"][kind - 2];
            client
                .post_request(path)
                .header("content-type", "message/rfc822")
                .header("webhook-signature", webhook_signature(WEBHOOK_SECRET, &id, &at, &body))
                .header("webhook-timestamp", at)
                .header("webhook-id", id)
        }
    };
    request.timeout(Duration::from_secs(20)).body(body)
}

/// A status, and the text of an answer that is a fault.
type Answered = Result<(StatusCode, String), reqwest::Error>;

/// Sends them all and returns the seeds of those that were answered as if the server were at fault, and how many were taken.
async fn faults(seeds: usize, make: impl Fn(usize) -> RequestBuilder) -> (Vec<String>, usize) {
    let answers: Vec<(usize, Answered)> = stream::iter(0..seeds)
        .map(|seed| {
            let request = make(seed);
            async move {
                let answer = async {
                    let answer = request.send().await?;
                    let status = answer.status();
                    // The body of a stream of events has no end.
                    let text = if status.is_server_error() { answer.text().await? } else { String::new() };
                    Ok((status, text))
                };
                (seed, answer.await)
            }
        })
        .buffer_unordered(AT_ONCE)
        .collect()
        .await;
    let taken =
        answers.iter().filter(|(_, one)| one.as_ref().is_ok_and(|(status, _)| status.is_success())).count();
    let faults = answers.into_iter().filter_map(|(seed, one)| match one {
        Ok((status, text)) if status.is_server_error() => Some(format!("seed {seed}: {status} {text}")),
        Ok(_) => None,
        Err(error) => Some(format!("seed {seed}: {error:?}")),
    });
    (faults.collect(), taken)
}

#[tokio::test]
async fn mutated_requests_and_signed_webhooks_cause_no_fault() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Gladly.")]).await;
    let process = serve(&database, &model).await;
    let (client, routes) = (process.client(), routes());
    let chat = client.post_request("/v1/chat/c1/messages").bearer_auth(TOKEN).body(r#"{"text":"Hello?"}"#);
    let woken: serde_json::Value = chat.send().await.unwrap().json().await.unwrap();
    let id = woken["session_id"].as_str().unwrap().to_owned();

    let (all, http) = (share(20_000), reqwest::Client::new());
    let (wrong, taken) =
        faults(all, |seed| mutated(&mut Dice::new(seed), &http, &client, &routes, &id)).await;
    assert!(wrong.is_empty(), "{} of {all}: {:#?}", wrong.len(), &wrong[..wrong.len().min(10)]);
    // If none were taken, the mutations were too crude to get past the first check.
    assert!(taken > all / 40, "{taken} of {all} were taken");
    is_whole(&process);

    let all = share(5_000);
    let (wrong, taken) = faults(all, |seed| webhook(&mut Dice::new(seed), &client, seed)).await;
    assert!(wrong.is_empty(), "{} of {all}: {:#?}", wrong.len(), &wrong[..wrong.len().min(10)]);
    assert!(taken > all / 20, "{taken} of {all} were taken");
    is_whole(&process);
    let health = client.get_request("/healthz").send().await.unwrap();
    assert_eq!(health.status(), StatusCode::OK);
}
