use super::*;

const RAW: &str = "From: ann@example.com\r\nSubject: Hello\r\n\r\nHi\r\n";

fn received() -> Value {
    json!({
        "notificationType": "Received",
        "mail": {
            "timestamp": "2026-11-22T08:59:00.000Z", "source": "bounces@example.com", "messageId": "o3vrnil0e2ic28tr",
            "destination": ["agent@example.org", "bob@example.com"], "headersTruncated": false,
            "headers": [{"name": "Message-ID", "value": "<one@example.com>"}],
            "commonHeaders": {"from": ["ann@example.com"], "messageId": "<one@example.com>", "subject": "Hello"}
        },
        "receipt": {
            "timestamp": "2026-11-22T08:59:00.000Z", "processingTimeMillis": 222, "recipients": ["agent@example.org"],
            "spamVerdict": {"status": "PASS"}, "virusVerdict": {"status": "PASS"}, "spfVerdict": {"status": "PASS"},
            "dkimVerdict": {"status": "PASS"}, "dmarcVerdict": {"status": "PASS"},
            "action": {"type": "SNS", "topicArn": "arn:aws:sns:eu-central-1:123456789012:mail", "encoding": "BASE64"}
        },
        "content": STANDARD.encode(RAW)
    })
}

fn read(published: &Value) -> Notice {
    translate(&published.to_string()).unwrap()
}

fn arrived(published: &Value) -> Arrived {
    match read(published) {
        Notice::Mail(arrived) => arrived,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_mail_comes_with_its_envelope_and_its_verdict() {
    let mail = arrived(&received());
    assert_eq!(&mail.raw[..], RAW.as_bytes());
    assert_eq!(mail.mail_from.as_deref(), Some("bounces@example.com"));
    assert_eq!(mail.recipients, ["agent@example.org"], "the rule's recipients, not the header's");
    assert_eq!(mail.dmarc, Some(Dmarc::Passed));

    let mut plain = received();
    plain["receipt"]["action"]["encoding"] = json!("UTF8");
    plain["content"] = json!(RAW);
    assert_eq!(&arrived(&plain).raw[..], RAW.as_bytes());
    for (verdict, is) in [
        ("FAIL", Dmarc::Failed),
        ("GRAY", Dmarc::Unknown),
        ("PROCESSING_FAILED", Dmarc::Unknown),
        ("", Dmarc::Unknown),
    ] {
        let mut other = received();
        other["receipt"]["dmarcVerdict"]["status"] = json!(verdict);
        assert_eq!(arrived(&other).dmarc, Some(is), "{verdict}");
    }
    let mut none = received();
    none["receipt"].as_object_mut().unwrap().remove("dmarcVerdict");
    assert_eq!(arrived(&none).dmarc, Some(Dmarc::Unknown));
}

#[test]
fn spam_and_viruses_are_kept_from_the_agents() {
    for verdict in ["spamVerdict", "virusVerdict"] {
        let mut bad = received();
        bad["receipt"][verdict]["status"] = json!("FAIL");
        let unwanted = arrived(&bad).unwanted.unwrap();
        assert!(unwanted.starts_with("SES takes it for"), "{verdict}: {unwanted}");
    }
}

#[test]
fn a_mail_that_is_elsewhere_or_broken_is_refused_with_what_to_do() {
    let mut elsewhere = received();
    elsewhere.as_object_mut().unwrap().remove("content");
    elsewhere["receipt"]["action"] = json!({"type": "S3", "bucketName": "b", "objectKey": "k"});
    let mut broken = received();
    broken["content"] = json!("not base64!");
    let deep = format!("{{\"mail\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let cases = [
        (elsewhere.to_string(), "not S3"),
        (broken.to_string(), "base64"),
        ("{\"notificationType\":".to_owned(), "EOF"),
        ("{\"mail\":5}".to_owned(), "invalid type"),
        (deep, "invalid type"),
    ];
    for (message, says) in cases {
        let refused = translate(&message).unwrap_err();
        assert_eq!(refused.status(), StatusCode::UNPROCESSABLE_ENTITY);
        assert!(refused.to_string().contains(says), "{refused}");
    }
    let hello = "Successfully validated SNS topic for Amazon SES event publishing.";
    assert!(matches!(translate(hello), Ok(Notice::Irrelevant { .. })));
}

#[test]
fn bounces_and_complaints_are_told_of_the_delivery_that_they_name() {
    let told = |kind_key: &str, kind: &str, mail: Value| {
        read(&json!({
            kind_key: kind, "mail": mail,
            "bounce": {"bounceType": "Permanent", "bounceSubType": "General", "bouncedRecipients": [
                {"emailAddress": "gone@example.com", "action": "failed", "status": "5.1.1", "diagnosticCode": "smtp; 550 no such user"},
                {"emailAddress": "also@example.com"}
            ]},
            "complaint": {"complainedRecipients": [{"emailAddress": "ann@example.com"}], "complaintFeedbackType": "abuse"}
        }))
    };
    let headers = json!({"headers": [{"name": "Message-ID", "value": "<dlv_01@example.org>"}]});
    let common = json!({"commonHeaders": {"messageId": "<dlv_01@example.org>"}});
    let tags = json!({"tags": {"delivery_id": ["dlv_01"], "ses:source-ip": ["192.0.2.1"]}});
    for (key, mail) in [("notificationType", &headers), ("notificationType", &common), ("eventType", &tags)] {
        let Notice::Bounced(bounces) = told(key, "Bounce", mail.clone()) else { panic!("{mail}") };
        assert_eq!(bounces.len(), 2);
        let expected = Bounce {
            delivery_id: "dlv_01".into(),
            recipient: "gone@example.com".into(),
            status: "5.1.1".into(),
            diagnostic: "smtp; 550 no such user".into(),
            permanent: true,
        };
        assert_eq!(bounces[0], expected);
        assert_eq!(
            (bounces[1].status.as_str(), bounces[1].recipient.as_str()),
            ("5.0.0", "also@example.com")
        );
        let Notice::Bounced(complaints) = told(key, "Complaint", mail.clone()) else { panic!("{mail}") };
        assert_eq!(complaints[0].recipient, "ann@example.com");
        assert!(complaints[0].diagnostic.contains("abuse"));
    }
    let forged = json!({"tags": {"delivery_id": ["x' or 1=1"]}});
    for (kind, mail) in
        [("Bounce", json!({})), ("Complaint", json!({})), ("Bounce", forged), ("Delivery", headers)]
    {
        assert!(matches!(told("eventType", kind, mail), Notice::Irrelevant { .. }), "{kind}");
    }
}
