use super::*;
use serde_json::json;

const NOW: i64 = 1_795_337_000;

fn mailgun() -> Mailgun {
    let signing_keys = ["old-key", "new-key"].map(|one| SecretString::from(one.to_owned())).to_vec();
    Mailgun { signing_keys, max_age_s: 43_200 }
}

fn sign(key: &str, timestamp: &str, token: &str) -> Signed {
    let mut mac = Hmac::<Sha256>::new_from_slice(key.as_bytes()).unwrap();
    mac.update(format!("{timestamp}{token}").as_bytes());
    let signature = hex::encode(mac.finalize().into_bytes());
    Signed { timestamp: timestamp.to_owned(), token: token.to_owned(), signature }
}

#[test]
fn only_a_signature_of_one_of_our_keys_that_is_not_too_old_proves_anything() {
    let at = |seconds: i64| (NOW + seconds).to_string();
    let good = || sign("new-key", &at(0), "token1");
    let cases = [
        ("the new key", good(), true),
        ("the old key, too", sign("old-key", &at(0), "token1"), true),
        ("the last of eight hours' attempts", sign("new-key", &at(-28_900), "token1"), true),
        ("twelve hours ago", sign("new-key", &at(-43_200), "token1"), true),
        ("five minutes ahead", sign("new-key", &at(300), "token1"), true),
        ("older", sign("new-key", &at(-43_201), "token1"), false),
        ("further ahead", sign("new-key", &at(301), "token1"), false),
        ("another key", sign("other-key", &at(0), "token1"), false),
        ("another token", Signed { token: "token2".into(), ..good() }, false),
        ("another time", Signed { timestamp: at(1), ..good() }, false),
        // A digit moved from the token to the timestamp leaves the signed bytes unchanged.
        (
            "a digit moved over",
            Signed { timestamp: at(0) + "1", token: "2".into(), ..sign("new-key", &at(0), "12") },
            false,
        ),
        ("cut", Signed { signature: good().signature[..62].to_owned(), ..good() }, false),
        ("no hex", Signed { signature: "x".repeat(64), ..good() }, false),
        ("no signature", Signed { signature: String::new(), ..good() }, false),
        ("no token", sign("new-key", &at(0), ""), false),
        ("no time", sign("new-key", "", "token1"), false),
        ("a time that is none", sign("new-key", "soon", "token1"), false),
        ("a huge time", sign("new-key", "99999999999999999999", "token1"), false),
    ];
    for (what, signed, proves) in cases {
        assert_eq!(signed.prove(&mailgun(), NOW).is_ok(), proves, "{what}");
    }
}

fn field(name: &str, text: &str) -> Field {
    Field { name: name.to_owned(), file_name: None, media_type: None, bytes: text.as_bytes().to_vec() }
}

#[test]
fn the_whole_mail_is_taken_where_it_is_given() {
    let raw = "From: ann@example.com\r\nAuthentication-Results: mx; dmarc=pass\r\n\r\nHi";
    let envelope = [field("recipient", "agent@example.org, other@example.org"), field("sender", "")];
    let fields = [envelope.to_vec(), vec![field("body-mime", raw)]].concat();
    let arrived = mail(fields).unwrap();
    assert_eq!(&arrived.raw[..], raw.as_bytes());
    assert_eq!(arrived.recipients, ["agent@example.org", "other@example.org"]);
    assert_eq!(arrived.mail_from.as_deref(), Some(""), "the null return path");
    assert_eq!(arrived.dmarc, Some(Dmarc::Unknown));
}

/// Mailgun also posts each header of the mail as a field of its name. So a sender can add such a field.
#[test]
fn a_field_that_decides_and_is_there_twice_is_refused() {
    let good = [field("recipient", "agent@example.org"), field("body-mime", "From: a@b.de\r\n\r\nHi")];
    assert!(mail(good.to_vec()).is_ok());
    for name in ["recipient", "body-mime", "message-headers"] {
        let before = [vec![field(name, "x"), field(name, "x")], good.to_vec()].concat();
        assert!(mail(before).is_err(), "{name}");
    }
    let senders = [good.to_vec(), vec![field("sender", "a@b.de"), field("sender", "")]].concat();
    assert_eq!(mail(senders).unwrap().mail_from, None, "it is unclear");
}

#[test]
fn the_parsed_form_becomes_the_mail_that_it_was() {
    let headers = json!([
        ["Received", "by one"],
        ["Received", "by two"],
        ["Message-Id", "<one@example.com>"],
        ["From", "Ann <ann@example.com>"],
        ["To", "agent@example.org"],
        ["Subject", "Hello"],
        ["Content-Type", "multipart/mixed; boundary=gone"],
        ["Auto-Submitted", "auto-replied"]
    ]);
    let file = Field {
        name: "attachment-1".into(),
        file_name: Some("pic.png".into()),
        media_type: Some("image/png".into()),
        bytes: vec![0, 1, 2],
    };
    let fields = vec![
        field("recipient", "agent@example.org"),
        field("sender", "bounces@example.com"),
        field("from", "Ann <ann@example.com>"),
        field("subject", "Hello"),
        field("message-headers", &headers.to_string()),
        field("body-plain", "Hi there"),
        field("body-html", "<p>Hi</p>"),
        field("content-id-map", "{\"<pic@x>\": \"attachment-1\"}"),
        file,
    ];
    let text = String::from_utf8(mail(fields).unwrap().raw.to_vec()).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert_eq!(head.matches("Received: by").count(), 2);
    assert_eq!(head.matches("From:").count(), 1);
    assert!(head.contains("Auto-Submitted: auto-replied\r\n") && !head.contains("boundary=gone"), "{head}");
    for part in ["Hi there", "<p>Hi</p>", "Content-ID: <pic@x>", "AAEC"] {
        assert!(body.contains(part), "{part} is not in\n{body}");
    }
    assert!(mail(vec![field("recipient", "a@example.org")]).unwrap_err().to_string().contains("body-mime"));
}

#[tokio::test]
async fn a_digest_is_of_the_mail_and_not_of_how_it_was_posted() {
    let form = |boundary: &str, text: &str| {
        let part = |name: &str, text: &str| {
            format!("--{boundary}\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{text}\r\n")
        };
        let body =
            part("recipient", "a@example.org") + &part("body-mime", text) + &format!("--{boundary}--\r\n");
        (Encoding::Multipart { boundary: boundary.to_owned() }, Bytes::from(body))
    };
    let mut digests = Vec::new();
    for (boundary, text) in [("one", "Hi"), ("two", "Hi"), ("one", "Ho")] {
        let (encoding, body) = form(boundary, text);
        digests.push(translate(&encoding, &body).await.unwrap().1);
    }
    assert_eq!(digests[0], digests[1]);
    assert_ne!(digests[0], digests[2]);
}

#[test]
fn failures_for_good_are_told_of_the_delivery_that_they_name() {
    let read = |kind: &str, severity: &str, message_id: &str| {
        let data = json!({
            "event": kind, "severity": severity, "reason": "bounce", "recipient": "gone@example.com",
            "message": {"headers": {"message-id": message_id, "to": "gone@example.com"}},
            "delivery-status": {"code": 550, "enhanced-code": "5.1.1", "message": "5.1.1 no such user", "attempt-no": 1},
            "user-variables": {}
        });
        event(json!({"signature": {}, "event-data": data}).to_string().as_bytes()).unwrap().0
    };
    let Notice::Bounced(bounces) = read("failed", "permanent", "dlv_01@example.org") else {
        panic!("a bounce")
    };
    let expected = Bounce {
        delivery_id: "dlv_01".into(),
        recipient: "gone@example.com".into(),
        status: "5.1.1".into(),
        diagnostic: "5.1.1 no such user".into(),
        permanent: true,
    };
    assert_eq!(bounces, [expected]);
    assert!(matches!(read("complained", "", "dlv_01@example.org"), Notice::Bounced(_)));
    let others = [
        ("failed", "temporary", "dlv_01@example.org"),
        ("opened", "", "dlv_01@example.org"),
        ("failed", "permanent", "x@example.org"),
    ];
    for (kind, severity, message_id) in others {
        assert!(matches!(read(kind, severity, message_id), Notice::Irrelevant { .. }), "{kind} {severity}");
    }
    assert!(event(b"{\"signature\":{}}").is_err());
}
