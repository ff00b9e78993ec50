use super::*;
use serde_json::json;

fn composed(content: &Value) -> String {
    let from: Mailbox = "Agent <agent@example.com>".parse().unwrap();
    let message = Outbound::new("dlv_1", content);
    String::from_utf8(compose(Some(&from), &message).unwrap().bytes).unwrap()
}

/// The unfolded headers and the body.
fn parts(mail: &str) -> (Vec<String>, &str) {
    let (head, body) = mail.split_once("\r\n\r\n").unwrap();
    (head.replace("\r\n ", " ").split("\r\n").map(str::to_owned).collect(), body)
}

fn header(mail: &str, name: &str) -> Option<String> {
    let start = format!("{name}: ");
    let found: Vec<String> =
        parts(mail).0.into_iter().filter_map(|line| line.strip_prefix(&start).map(str::to_owned)).collect();
    assert!(found.len() <= 1, "{name} twice: {mail}");
    found.into_iter().next()
}

fn reply() -> Value {
    json!({"type": "reply", "text": "It is done.", "part": 1, "parts": 1, "to": {
        "from": "Desk <desk@example.org>", "to": ["Ann <ann@example.com>"], "cc": ["bob@example.com"],
        "subject": "Re: Your table", "in_reply_to": "<m2@example.com>",
        "references": ["<m1@example.com>", "<m2@example.com>"], "reply_to": "desk+c1.abc@example.org",
    }})
}

#[test]
fn a_reply_stands_in_its_thread_and_says_that_a_machine_wrote_it() {
    let mail = composed(&reply());
    for (name, value) in [
        ("Message-ID", "<dlv_1@example.org>"),
        ("From", "Desk <desk@example.org>"),
        ("To", "Ann <ann@example.com>"),
        ("Cc", "bob@example.com"),
        ("Subject", "Re: Your table"),
        ("In-Reply-To", "<m2@example.com>"),
        ("References", "<m1@example.com> <m2@example.com>"),
        ("Reply-To", "desk+c1.abc@example.org"),
        ("Auto-Submitted", "auto-replied"),
        ("MIME-Version", "1.0"),
    ] {
        assert_eq!(header(&mail, name).as_deref(), Some(value), "{mail}");
    }
    assert!(header(&mail, "Date").is_some());
    assert_eq!(parts(&mail).1, "It is done.");
}

#[test]
fn a_composed_mail_is_in_the_thread_only_where_it_goes_to_one_of_it() {
    let thread = &reply()["to"];
    let mail = |to: &str| {
        composed(
            &json!({"type": "sentEmail", "to": [to], "cc": [], "subject": "A word", "body": "b", "thread": thread}),
        )
    };
    let inside = mail("ANN@example.com");
    assert_eq!(header(&inside, "Subject").as_deref(), Some("A word"));
    assert_eq!(header(&inside, "In-Reply-To").as_deref(), Some("<m2@example.com>"));
    assert_eq!(header(&inside, "Auto-Submitted").as_deref(), Some("auto-replied"));
    let outside = mail("eve@example.net");
    for name in ["In-Reply-To", "References", "Reply-To"] {
        assert_eq!(header(&outside, name), None, "{outside}");
    }
    assert_eq!(header(&outside, "From").as_deref(), Some("Desk <desk@example.org>"));
    assert_eq!(header(&outside, "Auto-Submitted").as_deref(), Some("auto-generated"));
    let alone = composed(&json!({"to": ["ann@example.com"], "subject": "s", "body": "b"}));
    assert_eq!(header(&alone, "From").as_deref(), Some("Agent <agent@example.com>"));
    assert_eq!(header(&alone, "Auto-Submitted").as_deref(), Some("auto-generated"));
}

#[test]
fn no_field_ends_its_header() {
    let mut content = reply();
    content["to"]["subject"] = json!("Hi\r\nBcc: eve@example.net\r\n\r\nBody");
    content["to"]["in_reply_to"] = json!("<a@b>\r\nX-Evil: 1");
    content["to"]["references"] =
        json!(["<ok@example.com>", "<a@b> \r\nX-Evil: 1", "no-at", "<sp ace@x>", "<é@x>"]);
    let mail = composed(&content);
    assert_eq!(header(&mail, "Bcc"), None, "{mail}");
    assert_eq!(header(&mail, "X-Evil"), None, "{mail}");
    assert_eq!(header(&mail, "In-Reply-To"), None);
    assert_eq!(header(&mail, "References").as_deref(), Some("<ok@example.com>"));
    assert!(header(&mail, "Subject").unwrap().contains("Bcc: eve@example.net"), "{mail}");
    let from: Mailbox = "agent@example.com".parse().unwrap();
    for (field, value) in [
        ("from", json!("a@b.org>\r\nX: 1 <c@d.org>")),
        ("to", json!(["ann@example.com\r\nBcc: eve@example.net"])),
        ("reply_to", json!("x@y.org\r\nBcc: eve@example.net")),
        ("to", json!([])),
        ("to", json!(["nobody"])),
    ] {
        let mut content = reply();
        content["to"][field] = value;
        if field == "to" {
            content["to"]["cc"] = json!([]);
        }
        let message = Outbound::new("dlv_1", &content);
        let sent = compose(Some(&from), &message);
        assert!(matches!(sent, Err(SendError::Refused(_))), "{field}: {sent:?}");
    }
}

#[test]
fn a_long_thread_keeps_its_first_mail_and_its_newest() {
    let ids: Vec<String> =
        (0..200).map(|number| format!("<{number}.{}@example.com>", "x".repeat(70))).collect();
    let mut content = reply();
    content["to"]["references"] = json!(ids);
    content["to"]["in_reply_to"] = json!("last@example.com");
    let mail = composed(&content);
    let references = header(&mail, "References").unwrap();
    let kept: Vec<&str> = references.split_whitespace().collect();
    assert_eq!(kept.len(), MAX_REFERENCES);
    assert_eq!((kept[0], kept[1]), (ids[0].as_str(), ids[152].as_str()));
    assert_eq!(*kept.last().unwrap(), "<last@example.com>");
    let longest = mail.split("\r\n").map(str::len).max().unwrap();
    assert!(longest <= 998, "{longest}");
}

#[test]
fn any_text_is_seven_bit_lines_that_servers_take() {
    let body = format!("Grüße\n.\n{}\r\nlast", "long ".repeat(600));
    let content = json!({"to": ["ann@example.com"], "subject": "Grüße 🎉 ".repeat(20), "body": body});
    let mail = composed(&content);
    assert!(mail.is_ascii());
    assert!(
        mail.split("\r\n").all(|line| line.len() <= 998 && !line.contains('\n') && !line.contains('\r')),
        "{mail}"
    );
    assert!(header(&mail, "Content-Transfer-Encoding").is_some_and(|word| word != "8bit"), "{mail}");
}

#[test]
fn the_same_delivery_is_the_same_bytes_but_for_its_date() {
    let undated = |mail: String| {
        parts(&mail).0.into_iter().filter(|line| !line.starts_with("Date:")).collect::<Vec<_>>()
    };
    assert_eq!(undated(composed(&reply())), undated(composed(&reply())));
}

#[test]
fn a_body_of_short_lines_is_composed_in_one_go() {
    // Inserting half a million line ends one by one would move a hundred gigabytes or more.
    let body = "\n".repeat(1 << 19) + "a\r\nb";
    let content = json!({"to": ["ann@example.com"], "subject": "s", "body": body});
    let from = "desk@example.org".parse().unwrap();
    let message = Outbound::new("dlv_1", &content);
    let bytes = compose(Some(&from), &message).unwrap().bytes;
    let text = String::from_utf8(bytes).unwrap();
    let (_, written) = text.split_once("\r\n\r\n").unwrap();
    assert_eq!(written.len(), 2 * (1 << 19) + 4);
    assert!(written.ends_with("\r\n\r\na\r\nb"));
}

#[test]
fn every_line_end_of_a_body_is_crlf_so_that_none_can_end_the_mail_early() {
    let body = "Hi\r.\r\nMAIL FROM:<ceo@example.com>\nRCPT TO:<victim@example.net>\r\r\nDATA\r";
    let mail = composed(&json!({"to": ["ann@example.com"], "subject": "s", "body": body}));
    let rest = mail.replace("\r\n", "");
    assert!(!rest.contains(['\r', '\n']), "{mail:?}");
    assert!(mail.contains("MAIL FROM"), "{mail}");
    let mut content = reply();
    content["text"] = json!(body);
    assert!(!composed(&content).replace("\r\n", "").contains(['\r', '\n']));
}
