use super::*;

const MAIL: &str = "Authentication-Results: mx.example.org;\r\n dmarc=pass header.from=example.com\r\n\
    Return-Path: <ann@example.com>\r\nFrom: Ann <Ann@Example.com>\r\nTo: support@example.org, b@c.de\r\n\
    Subject: =?utf-8?q?Gr=C3=BC=C3=9Fe?=\r\nDate: Sat, 31 Jan 2026 12:00:00 +0100\r\nMessage-ID: <m1@example.com>\r\n\
    In-Reply-To: <dlv_1@example.org>\r\nReferences: <a@x> <dlv_1@example.org>\r\nList-ID: <l>\r\n\
    Content-Type: multipart/mixed; boundary=b\r\n\r\n\
    --b\r\nContent-Type: text/plain\r\n\r\nHello\r\nthere\r\n\
    --b\r\nContent-Type: application/pdf; name=\"../../etc/pass\\\\wd.pdf\"\r\n\
    Content-Transfer-Encoding: base64\r\n\r\nAAEC\r\n--b--\r\n";

#[test]
fn a_mail_is_read() {
    let read = read(MAIL.as_bytes()).unwrap();
    let facts = &read.facts;
    let ann = Person { name: Some("Ann".into()), address: "ann@example.com".into() };
    assert_eq!(facts.from, Some(ann));
    assert_eq!((facts.subject.as_str(), facts.message_id.as_deref()), ("Grüße", Some("m1@example.com")));
    assert_eq!(facts.to.len(), 2);
    assert_eq!(facts.date.as_deref(), Some("2026-01-31T12:00:00+01:00"));
    assert_eq!(facts.references, ["a@x", "dlv_1@example.org"]);
    assert_eq!(facts.in_reply_to, ["dlv_1@example.org"]);
    assert_eq!(facts.authentication_results, ["mx.example.org; dmarc=pass header.from=example.com"]);
    assert_eq!(facts.return_path.as_deref(), Some("ann@example.com"));
    assert_eq!(facts.machine_headers, [("list-id".to_owned(), "<l>".to_owned())]);
    assert_eq!(facts.body.trim(), "Hello\nthere");
    assert_eq!(read.files.len(), 1);
    let file = &read.files[0];
    assert_eq!((file.file_name.as_str(), file.media_type.as_str()), ("wd.pdf", "application/pdf"));
    assert_eq!(file.bytes, [0, 1, 2]);
}

#[test]
fn of_two_senders_none_is_believed() {
    for from in [
        "From: a@b.de\r\nFrom: c@d.de",
        "From: a@b.de, c@d.de",
        "From: nobody, a@b.de",
        "From: <eve evil.org>, Ann <a@b.de>",
        "From: Eve <eve@evil.org\u{7}>, a@b.de",
        "From: all: a@b.de, nobody;",
        "Subject: x",
    ] {
        let read = read(format!("{from}\r\nTo: x@y.de\r\n\r\nx").as_bytes()).unwrap();
        assert_eq!(read.facts.from, None, "{from}");
    }
}

#[test]
fn a_sender_is_no_other_one_because_a_letter_of_his_looks_alike() {
    let from = |address: &str| {
        let read = read(format!("From: {address}\r\nTo: x@y.de\r\n\r\nx").as_bytes()).unwrap();
        read.facts.from.map(|from| from.address)
    };
    assert_eq!(from("Kim@Example.com").as_deref(), Some("kim@example.com"));
    // The Kelvin sign.
    assert_eq!(from("\u{212a}im@example.com").as_deref(), Some("\u{212a}im@example.com"));
}

#[test]
fn only_html_is_text_as_well_and_a_long_text_is_a_file_too() {
    let mail = "From: a@b.de\r\nContent-Type: text/html\r\n\r\n<style>x</style><p>Hello <b>you</b></p>";
    assert_eq!(read(mail.as_bytes()).unwrap().facts.body, "Hello you");
    let long = format!("From: a@b.de\r\n\r\n{}", "é".repeat(BODY_BYTES));
    let read = read(long.as_bytes()).unwrap();
    assert!(read.facts.body_cut && read.facts.body.len() <= BODY_BYTES);
    assert_eq!(
        (read.files[0].file_name.as_str(), read.files[0].bytes.len()),
        ("message.txt", 2 * BODY_BYTES)
    );
}

#[test]
fn html_beside_an_empty_text_is_the_text() {
    for blank in ["", " ", "\r\n", "\u{a0}"] {
        let mail = format!(
            "From: a@b.de\r\nContent-Type: multipart/alternative; boundary=b\r\n\r\n--b\r\n\
            Content-Type: text/plain; charset=utf-8\r\n\r\n{blank}\r\n--b\r\n\
            Content-Type: text/html\r\n\r\n<p>A table for <b>two</b></p>\r\n--b--\r\n"
        );
        assert_eq!(read(mail.as_bytes()).unwrap().facts.body, "A table for two", "{blank:?}");
    }
}

#[test]
fn names_of_files_are_plain() {
    for (given, plain) in [
        ("a.txt", "a.txt"),
        ("/etc/passwd", "passwd"),
        ("C:\\x\\a.txt", "a.txt"),
        ("..", ""),
        (".bashrc", "bashrc"),
        ("a\0\r\nb.txt", "ab.txt"),
        ("invoice\u{202e}fdp.exe", "invoicefdp.exe"),
    ] {
        assert_eq!(file_name(given), plain, "{given:?}");
    }
    assert!(file_name(&"é".repeat(500)).len() <= FILE_NAME_BYTES);
}

#[test]
fn a_report_names_what_it_is_about() {
    let mail = "From: MAILER-DAEMON@x.de\r\nContent-Type: multipart/report; report-type=delivery-status; boundary=b\r\n\r\n\
        --b\r\nContent-Type: text/plain\r\n\r\nIt did not arrive.\r\n--b\r\nContent-Type: message/delivery-status\r\n\r\n\
        Action: failed\r\n\r\n--b\r\nContent-Type: message/rfc822\r\n\r\nMessage-ID: <dlv_9@example.org>\r\n\r\nx\r\n--b--\r\n";
    let facts = read(mail.as_bytes()).unwrap().facts;
    assert_eq!(facts.report.as_deref(), Some("delivery-status"));
    assert!(facts.reported.contains(&"dlv_9@example.org".to_owned()), "{:?}", facts.reported);
}

#[test]
fn files_beyond_the_limits_are_named_and_not_kept() {
    let with = |parts: &str| {
        let head = "From: a@b.de\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n";
        read(format!("{head}{parts}--b--\r\n").as_bytes()).unwrap()
    };
    let part = |text: &str| {
        format!("--b\r\nContent-Type: application/x\r\nContent-Disposition: attachment\r\n\r\n{text}\r\n")
    };
    let many = with(&part("x").repeat(ATTACHMENTS + 1));
    assert_eq!((many.files.len(), many.facts.attachments.len()), (ATTACHMENTS, ATTACHMENTS + 1));
    assert!(many.facts.attachments[ATTACHMENTS].left_out && !many.facts.attachments[0].left_out);
    let large = with(&part(&"x".repeat(ATTACHMENT_BYTES + 1)));
    assert!(large.files.is_empty() && large.facts.attachments[0].left_out);
    assert_eq!(with(&part(&"x".repeat(ATTACHMENT_BYTES))).files.len(), 1);
}

#[test]
fn what_is_no_mail_is_refused() {
    for raw in [&b""[..], b"\r\n\r\nonly a body", b"\0\0\0"] {
        assert!(matches!(read(raw), Err(Unreadable::NoMail)), "{raw:?}");
    }
}
