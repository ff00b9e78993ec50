use super::*;
use axum::http::StatusCode;
use rcgen::{CertificateParams, KeyPair, PKCS_RSA_SHA256, SigningKey};
use serde_json::{Value, json};

const TOPIC: &str = "arn:aws:sns:eu-central-1:123456789012:mail";

struct Signer {
    key: KeyPair,
    certificate: CertificateDer<'static>,
}

impl Signer {
    fn new() -> Signer {
        let key = KeyPair::generate_for(&PKCS_RSA_SHA256).unwrap();
        let params = CertificateParams::new(["sns.amazonaws.com".to_owned()]).unwrap();
        let certificate = params.self_signed(&key).unwrap().der().clone();
        Signer { key, certificate }
    }

    /// Signs as AWS documents it, without using the code under test.
    fn sign(&self, mut message: Value) -> Value {
        let names: &[&str] = match message["Type"].as_str() {
            Some("Notification") => &["Message", "MessageId", "Subject", "Timestamp", "TopicArn", "Type"],
            _ => &["Message", "MessageId", "SubscribeURL", "Timestamp", "Token", "TopicArn", "Type"],
        };
        let text: String =
            names.iter().filter_map(|name| Some(format!("{name}\n{}\n", message[*name].as_str()?))).collect();
        message["Signature"] = json!(STANDARD.encode(self.key.sign(text.as_bytes()).unwrap()));
        message
    }
}

fn now() -> DateTime<Utc> {
    "2026-11-22T09:00:00Z".parse().unwrap()
}

fn notification() -> Value {
    json!({
        "Type": "Notification", "MessageId": "22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324", "TopicArn": TOPIC,
        "Subject": "Amazon SES Email Receipt Notification", "Message": "{\"notificationType\":\"Received\"}",
        "Timestamp": "2026-11-22T08:59:00.123Z", "SignatureVersion": "2",
        "SigningCertURL": "https://sns.eu-central-1.amazonaws.com/SimpleNotificationService-9c6465fa7f48f5cacd23014631ec1136.pem",
        "UnsubscribeURL": "https://sns.eu-central-1.amazonaws.com/?Action=Unsubscribe"
    })
}

fn confirmation() -> Value {
    let url = format!(
        "https://sns.eu-central-1.amazonaws.com/?Action=ConfirmSubscription&TopicArn={TOPIC}&Token=2336412f37"
    );
    let mut message = notification();
    message["Type"] = json!("SubscriptionConfirmation");
    message["Token"] = json!("2336412f37");
    message["SubscribeURL"] = json!(url);
    message.as_object_mut().unwrap().remove("Subject");
    message
}

/// Verifies a message without fetching the certificate.
fn prove(message: &Value, signer: &Signer) -> Result<Envelope, Problem> {
    let envelope: Envelope =
        serde_json::from_value(message.clone()).map_err(|error| unauthorized(error.to_string()))?;
    let topics = ["arn:aws:sns:eu-central-1:123456789012:other".to_owned(), TOPIC.to_owned()];
    envelope.certificate_url(&topics, now())?;
    envelope.verify(&signer.certificate)?;
    Ok(envelope)
}

fn with(mut message: Value, key: &str, value: &str) -> Value {
    message[key] = json!(value);
    message
}

#[test]
fn what_sns_signed_is_proved() {
    let signer = Signer::new();
    prove(&signer.sign(notification()), &signer).unwrap();
    let mut bare = notification();
    bare.as_object_mut().unwrap().remove("Subject");
    prove(&signer.sign(bare), &signer).unwrap();
    prove(&signer.sign(confirmation()), &signer).unwrap();
    prove(&signer.sign(with(confirmation(), "Type", "UnsubscribeConfirmation")), &signer).unwrap();
}

#[test]
fn a_change_in_anything_that_is_signed_is_refused() {
    let signer = Signer::new();
    for key in ["Message", "MessageId", "Subject", "Timestamp"] {
        let mut signed = signer.sign(notification());
        signed[key] = json!(if key == "Timestamp" { "2026-11-22T08:59:01.123Z" } else { "changed" });
        assert_eq!(prove(&signed, &signer).unwrap_err().status(), StatusCode::UNAUTHORIZED, "{key}");
    }
    for key in ["Token", "SubscribeURL"] {
        let signed = with(signer.sign(confirmation()), key, "changed");
        assert_eq!(prove(&signed, &signer).unwrap_err().status(), StatusCode::UNAUTHORIZED, "{key}");
    }
    let signed = signer.sign(notification());
    let topic = with(signed.clone(), "TopicArn", "arn:aws:sns:eu-central-1:123456789012:other");
    assert!(prove(&topic, &signer).is_err(), "another topic of ours");
    assert!(prove(&with(signed.clone(), "Type", "UnsubscribeConfirmation"), &signer).is_err());
    assert!(prove(&signed, &Signer::new()).is_err(), "another key");
    for signature in ["", "AAAA", "not base64!"] {
        assert!(prove(&with(signed.clone(), "Signature", signature), &signer).is_err(), "{signature}");
    }
}

#[test]
fn who_may_speak_is_decided_before_anything_is_fetched() {
    let signer = Signer::new();
    let path = "/SimpleNotificationService-9c6465fa7f48f5cacd23014631ec1136.pem";
    let url = |text: &str| with(notification(), "SigningCertURL", text);
    let of = |host: &str| url(&format!("https://{host}{path}"));
    let good = "sns.eu-central-1.amazonaws.com";
    let cases = [
        ("a stranger's topic", with(notification(), "TopicArn", "arn:aws:sns:eu-central-1:666:mail"), 403),
        ("no topic", with(notification(), "TopicArn", ""), 403),
        ("version 1", with(notification(), "SignatureVersion", "1"), 403),
        ("version 3", with(notification(), "SignatureVersion", "3"), 403),
        ("an hour and a half ago", with(notification(), "Timestamp", "2026-11-22T07:29:59Z"), 401),
        ("as far ahead", with(notification(), "Timestamp", "2026-11-22T10:30:01Z"), 401),
        ("no time", with(notification(), "Timestamp", "now"), 401),
        ("another host", of("sns.example.com"), 403),
        ("another region", of("sns.us-east-1.amazonaws.com"), 403),
        ("a host that begins so", of("sns.eu-central-1.amazonaws.com.example.com"), 403),
        ("a host that ends so", of("example.sns.eu-central-1.amazonaws.com"), 403),
        ("a bucket", of("sns.eu-central-1.s3.amazonaws.com"), 403),
        ("China", of("sns.eu-central-1.amazonaws.com.cn"), 403),
        ("a user", of(&format!("sns@{good}")), 403),
        ("a host as user", of(&format!("{good}@example.com")), 403),
        ("a port", of(&format!("{good}:8443")), 403),
        ("http", url(&format!("http://{good}{path}")), 403),
        ("a file", url(&format!("file://{good}{path}")), 403),
        ("another path", url(&format!("https://{good}/evil.pem")), 403),
        ("a path around", url(&format!("https://{good}/SimpleNotificationService-../x.pem")), 403),
        ("a query", url(&format!("https://{good}{path}?x=1")), 403),
        ("a fragment", url(&format!("https://{good}{path}#x")), 403),
        ("no address", url(""), 403),
    ];
    for (what, message, status) in cases {
        let refused = prove(&signer.sign(message), &signer).unwrap_err();
        assert_eq!(refused.status().as_u16(), status, "{what}: {refused}");
    }
}

#[test]
fn only_the_address_that_confirms_this_topic_is_asked() {
    let signer = Signer::new();
    let envelope = |message: Value| prove(&signer.sign(message), &signer).unwrap();
    let url = envelope(confirmation()).confirmation().unwrap();
    assert_eq!(url.host_str(), Some("sns.eu-central-1.amazonaws.com"));
    let host = "https://sns.eu-central-1.amazonaws.com";
    let query = format!("Action=ConfirmSubscription&TopicArn={TOPIC}&Token=2336412f37");
    for wrong in [
        format!("https://example.com/?{query}"),
        format!("http://sns.eu-central-1.amazonaws.com/?{query}"),
        format!("{host}:444/?{query}"),
        format!("{host}/path?{query}"),
        format!("{host}/?{}", query.replace("Confirm", "Un")),
        format!("{host}/?{}", query.replace(":mail", ":other")),
        format!("{host}/?{}", query.replace("2336412f37", "1")),
        format!("{host}/?{query}&Action=DeleteTopic"),
        format!("{host}/"),
        "nothing".to_owned(),
    ] {
        let refused = envelope(with(confirmation(), "SubscribeURL", &wrong)).confirmation();
        assert_eq!(refused.unwrap_err().status(), StatusCode::FORBIDDEN, "{wrong}");
    }
    let mut without = confirmation();
    without.as_object_mut().unwrap().remove("SubscribeURL");
    assert!(envelope(without).confirmation().is_err());
}

#[tokio::test]
async fn what_is_no_message_is_not_proved() {
    let certificates =
        Certificates::new(Some("http://127.0.0.1:1".parse().unwrap()), &["http://127.0.0.1:1"]);
    let whole = notification().to_string();
    let deep = format!("{{\"Message\":{}", "[".repeat(100_000));
    for body in ["", "{}", "[]", &whole[..whole.len() - 20], &deep, "\u{0}"] {
        let refused =
            Envelope::prove(body.as_bytes(), &[TOPIC.to_owned()], &certificates, now()).await.unwrap_err();
        assert_eq!(refused.status(), StatusCode::UNAUTHORIZED, "{refused}");
    }
    // Everything is right, but the certificate cannot be fetched now: SNS must retry.
    let signed = Signer::new().sign(notification()).to_string();
    let later =
        Envelope::prove(signed.as_bytes(), &[TOPIC.to_owned()], &certificates, now()).await.unwrap_err();
    assert_eq!(later.status(), StatusCode::SERVICE_UNAVAILABLE, "{later}");
}
