use super::*;
use secrecy::SecretString;
use serde_json::json;

/// A mail as Postmark posts it without "include raw email".
fn inbound() -> Value {
    json!({
        "FromName": "Ann Lee", "MessageStream": "inbound", "From": "ann@example.com",
        "FromFull": {"Email": "ann@example.com", "Name": "Ann Lee", "MailboxHash": ""},
        "To": "\"Agent\" <agent@example.org>",
        "ToFull": [{"Email": "agent@example.org", "Name": "Agent", "MailboxHash": ""}],
        "Cc": "", "CcFull": [{"Email": "bob@example.com", "Name": "", "MailboxHash": ""}],
        "Bcc": "", "BccFull": [], "OriginalRecipient": "agent+x1@example.org",
        "Subject": "Grüße", "MessageID": "73e6d360-66eb-11e1-8e72-a8904824019b", "ReplyTo": "",
        "MailboxHash": "x1", "Date": "Sun, 22 Nov 2026 08:00:00 +0000",
        "TextBody": "Hello\nworld", "HtmlBody": "<p>Hello <img src=\"cid:pic@x\"></p>", "StrippedTextReply": "", "Tag": "",
        "Headers": [
            {"Name": "Return-Path", "Value": "<bounces@example.com>"},
            {"Name": "Message-ID", "Value": "<one@example.com>"},
            {"Name": "In-Reply-To", "Value": "<zero@example.org>"},
            {"Name": "References", "Value": "<a@example.org> <zero@example.org>"},
            {"Name": "Auto-Submitted", "Value": "no"},
            {"Name": "MIME-Version", "Value": "1.0"},
            {"Name": "Content-Type", "Value": "multipart/mixed; boundary=gone"}
        ],
        "Attachments": [
            {"Name": "note.txt", "Content": "bm90ZQ==", "ContentType": "text/plain", "ContentLength": 4, "ContentID": ""},
            {"Name": "pic.png", "Content": "iVBORw==", "ContentType": "image/png", "ContentLength": 4, "ContentID": "pic@x"}
        ]
    })
}

fn read(posted: &Value) -> Result<Notice, Problem> {
    translate(posted.to_string().as_bytes())
}

fn arrived(posted: &Value) -> Arrived {
    match read(posted).unwrap() {
        Notice::Mail(arrived) => arrived,
        other => panic!("{other:?}"),
    }
}

/// The server that delivers puts its `Return-Path` above what the sender wrote.
#[test]
fn the_topmost_return_path_counts() {
    let mut posted = inbound();
    posted["Headers"][0]["Value"] = json!("<>");
    let forged = json!({"Name": "Return-Path", "Value": "<ann@example.com>"});
    posted["Headers"].as_array_mut().unwrap().push(forged);
    assert_eq!(arrived(&posted).mail_from.as_deref(), Some(""));
}

#[test]
fn the_parts_become_the_mail_that_they_were() {
    let arrived = arrived(&inbound());
    assert_eq!(arrived.mail_from.as_deref(), Some("bounces@example.com"));
    assert_eq!(arrived.recipients, ["agent+x1@example.org"]);
    assert_eq!(arrived.dmarc, Some(Dmarc::Unknown));
    let text = String::from_utf8(arrived.raw.to_vec()).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    for line in [
        "Message-ID: <one@example.com>",
        "In-Reply-To: <zero@example.org>",
        "References: <a@example.org> <zero@example.org>",
        "Auto-Submitted: no",
        "From: \"Ann Lee\" <ann@example.com>",
        "To: \"Agent\" <agent@example.org>",
        "Cc: bob@example.com",
        "Subject: Grüße",
        "Date: Sun, 22 Nov 2026 08:00:00 +0000",
    ] {
        assert!(head.lines().any(|one| one == line), "{line} is not in\n{head}");
    }
    assert!(!head.contains("boundary=gone") && head.matches("MIME-Version").count() == 1, "{head}");
    assert!(!head.contains("Bcc") && !head.contains("Reply-To: \r\n"), "{head}");
    for part in ["Hello\r\nworld", "cid:pic@x", "Content-ID: <pic@x>", "note.txt", "bm90ZQ==", "iVBORw=="] {
        assert!(body.contains(part), "{part} is not in\n{body}");
    }
}

#[test]
fn the_raw_mail_is_taken_where_there_is_one() {
    let raw = "From: ann@example.com\r\nAuthentication-Results: mx; dmarc=pass\r\n\r\nHi\r\n";
    let mut posted = inbound();
    posted["RawEmail"] = json!(raw);
    let arrived = arrived(&posted);
    assert_eq!(&arrived.raw[..], raw.as_bytes());
    assert_eq!(arrived.dmarc, Some(Dmarc::Unknown), "a header that the sender wrote proves nothing");
}

#[test]
fn an_envelope_that_a_forwarder_made_names_nobody() {
    let mut posted = inbound();
    posted["OriginalRecipient"] = json!("451d9b70cf9364d2@Inbound.PostmarkApp.com");
    assert!(arrived(&posted).recipients.is_empty());
    posted["Headers"] = json!([{"Name": "return-path", "Value": "<>"}]);
    assert_eq!(arrived(&posted).mail_from.as_deref(), Some(""), "the null return path");
    posted["Headers"] = json!([]);
    assert_eq!(arrived(&posted).mail_from, None);
}

#[test]
fn what_is_no_webhook_is_refused() {
    let deep = format!("{{\"Metadata\":{{\"a\":{}1{}}}}}", "[".repeat(100_000), "]".repeat(100_000));
    let mut bad_file = inbound();
    bad_file["Attachments"][0]["Content"] = json!("not base64!");
    let text = inbound().to_string();
    let cases: [(&str, &str); 7] = [
        ("", "EOF"),
        (&text[..text.len() / 2], "EOF"),
        ("[1]", "no webhook"),
        ("{}", "`From`"),
        ("{\"From\":5}", "invalid type"),
        (&deep, "recursion limit"),
        (&bad_file.to_string(), "note.txt"),
    ];
    for (body, says) in cases {
        let problem = translate(body.as_bytes()).unwrap_err();
        assert_eq!(problem.status(), StatusCode::BAD_REQUEST);
        assert!(problem.to_string().contains(says), "{problem}");
    }
}

#[test]
fn bounces_are_told_of_the_delivery_that_they_name() {
    let bounce = |kind: &str, more: Value| {
        let mut posted = json!({
            "RecordType": "Bounce", "Type": kind, "Email": "gone@example.com", "ID": 42,
            "Details": "smtp;550 5.1.1 The email account does not exist", "Description": "The server was unable to deliver",
        });
        posted.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        read(&posted).unwrap()
    };
    let named = json!({"Metadata": {"delivery_id": "dlv_01"}});
    let content = "Return-Path: <>\r\nMessage-ID: <bounce@example.com>\r\n\r\nReturned:\r\nReferences: <dlv_00@example.org>\r\n\
                   Message-Id:\r\n <dlv_01@example.org>\r\n";
    let quoted = json!({"Content": content});
    for (kind, more, permanent) in [
        ("HardBounce", &named, true),
        ("Transient", &named, false),
        ("SoftBounce", &named, true),
        ("HardBounce", &quoted, true),
    ] {
        let Notice::Bounced(bounces) = bounce(kind, more.clone()) else { panic!("{kind} is a bounce") };
        let expected = Bounce {
            delivery_id: "dlv_01".into(),
            recipient: "gone@example.com".into(),
            status: "5.1.1".into(),
            diagnostic: "smtp;550 5.1.1 The email account does not exist".into(),
            permanent,
        };
        assert_eq!(bounces, [expected], "{kind}");
    }
    let others = [
        ("HardBounce", json!({})),
        ("AutoResponder", named.clone()),
        ("HardBounce", json!({"RecordType": "Open"})),
    ];
    for (kind, more) in others {
        assert!(matches!(bounce(kind, more), Notice::Irrelevant { .. }), "{kind}");
    }
    let complaint = json!({"RecordType": "SpamComplaint", "Metadata": {"delivery_id": "dlv_01"}});
    assert!(matches!(bounce("SpamComplaint", complaint), Notice::Bounced(_)));
}

#[test]
fn only_our_user_and_passwords_prove_anything() {
    let passwords = ["old", "new"].map(|one| SecretString::from(one.to_owned())).to_vec();
    let postmark = Postmark { user: "wakeful".into(), passwords };
    let basic = |pair: &str| format!("Basic {}", STANDARD.encode(pair));
    let cases = [
        (basic("wakeful:old"), true),
        (basic("wakeful:new"), true),
        (basic("wakeful:new").replace("Basic", "basic"), true),
        (basic("wakeful:ne"), false),
        (basic("wakeful:newer"), false),
        (basic("wakeful:"), false),
        (basic("Wakeful:new"), false),
        (basic(":new"), false),
        (basic("wakeful"), false),
        (basic("wakeful:new").replace("Basic", "Bearer"), false),
        ("Basic !!!".to_owned(), false),
        ("Basic".to_owned(), false),
        (String::new(), false),
    ];
    for (given, proves) in cases {
        let headers = HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_str(&given).unwrap())]);
        assert_eq!(prove(&postmark, &headers).is_ok(), proves, "{given}");
    }
    assert!(prove(&postmark, &HeaderMap::new()).is_err());
}
