use super::*;
use aws_sdk_sesv2::config::Credentials;
use std::io::{Read, Write};
use std::net::TcpListener;
use wiremock::matchers::{method, path};
use wiremock::{Mock, MockServer, Request, ResponseTemplate};

/// Uses its own credentials, so that the SDK does not look for the machine's.
fn ses(url: &str, credentials: bool) -> Ses {
    let ses = Ses::new(&Config::default(), "Agent <agent@example.org>").unwrap();
    let config = aws_sdk_sesv2::Config::builder()
        .behavior_version(BehaviorVersion::v2026_01_12())
        .region(Region::new("eu-central-1"))
        .retry_config(RetryConfig::disabled())
        .timeout_config(TimeoutConfig::builder().operation_timeout(Duration::from_secs(2)).build())
        .endpoint_url(url);
    let config = if credentials {
        config.credentials_provider(Credentials::new("key", "secret", None, None, "test"))
    } else {
        config
    };
    let _ = ses.client.set(Client::from_conf(config.build()));
    ses
}

async fn send(ses: &Ses) -> Result<Value, SendError> {
    let content =
        json!({"to": ["ann@example.com"], "cc": ["bob@example.com"], "subject": "Grüße", "body": "Hello"});
    ses.send(&Outbound::new("dlv_01", &content)).await
}

async fn answering(answer: ResponseTemplate) -> MockServer {
    let server = MockServer::start().await;
    Mock::given(method("POST"))
        .and(path("/v2/email/outbound-emails"))
        .respond_with(answer)
        .mount(&server)
        .await;
    server
}

#[tokio::test]
async fn the_mail_goes_as_it_was_composed_and_to_whom_it_names() {
    let server = answering(ResponseTemplate::new(200).set_body_json(json!({"MessageId": "0102"}))).await;
    let receipt = send(&ses(&server.uri(), true)).await.unwrap();
    assert_eq!(receipt, json!({"ses": {"message_id": "0102"}}));
    let requests: Vec<Request> = server.received_requests().await.unwrap();
    let asked: Value = serde_json::from_slice(&requests[0].body).unwrap();
    assert_eq!(asked["FromEmailAddress"], "agent@example.org");
    assert_eq!(asked["Destination"]["ToAddresses"], json!(["ann@example.com", "bob@example.com"]));
    assert_eq!(asked["EmailTags"], json!([{"Name": "delivery_id", "Value": "dlv_01"}]));
    let raw = base64::Engine::decode(
        &base64::engine::general_purpose::STANDARD,
        asked["Content"]["Raw"]["Data"].as_str().unwrap(),
    );
    let raw = String::from_utf8(raw.unwrap()).unwrap();
    assert!(raw.contains("Message-ID: <dlv_01@example.org>") && raw.contains("To: ann@example.com"), "{raw}");
}

#[tokio::test]
async fn each_answer_says_whether_it_may_have_gone_out() {
    #[derive(Debug, PartialEq)]
    enum Said {
        Refused,
        Later,
        Unknown,
    }
    let cases = [
        (400, "MessageRejected", Said::Refused),
        (400, "BadRequestException", Said::Refused),
        (400, "MailFromDomainNotVerifiedException", Said::Refused),
        (404, "NotFoundException", Said::Refused),
        (429, "TooManyRequestsException", Said::Later),
        (400, "ThrottlingException", Said::Later),
        (400, "LimitExceededException", Said::Later),
        (400, "SendingPausedException", Said::Later),
        (400, "AccountSuspendedException", Said::Later),
        (403, "AccessDeniedException", Said::Later),
        (403, "ExpiredTokenException", Said::Later),
        (500, "InternalFailure", Said::Unknown),
        (503, "ServiceUnavailable", Said::Unknown),
        (502, "", Said::Unknown),
    ];
    for (status, code, expected) in cases {
        let mut answer = ResponseTemplate::new(status).set_body_json(json!({"message": "the reason"}));
        if !code.is_empty() {
            answer = answer.insert_header("x-amzn-ErrorType", code);
        }
        let server = answering(answer).await;
        let error = send(&ses(&server.uri(), true)).await.unwrap_err();
        let said = match &error {
            SendError::Refused(_) => Said::Refused,
            SendError::Later(_) => Said::Later,
            SendError::Unknown(_) => Said::Unknown,
            other => panic!("SES names no time to wait: {other}"),
        };
        assert_eq!(said, expected, "{status} {code}: {error}");
        assert!(error.to_string().contains(code), "{error}");
        assert_eq!(server.received_requests().await.unwrap().len(), 1, "{code}: the SDK tries nothing again");
    }
}

#[tokio::test]
async fn a_connection_that_ends_in_silence_leaves_a_doubt_and_none_that_was_never_made() {
    // One server reads the mail and hangs up; the other reads it and stays silent until the time limit.
    for silence_s in [0, 5] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut seen = [0; 4096];
            let _ = stream.read(&mut seen);
            std::thread::sleep(Duration::from_secs(silence_s));
            let _ = stream.flush();
        });
        let error = send(&ses(&url, true)).await.unwrap_err();
        assert!(matches!(error, SendError::Unknown(_)), "{silence_s}: {error}");
    }
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = send(&ses(&format!("http://{free}"), true)).await.unwrap_err();
    assert!(matches!(error, SendError::Later(_)), "{error}");
    let server = answering(ResponseTemplate::new(200)).await;
    let error = send(&ses(&server.uri(), false)).await.unwrap_err();
    assert!(matches!(error, SendError::Later(_)), "without credentials nothing is sent: {error}");
    assert!(server.received_requests().await.unwrap().is_empty());
}
