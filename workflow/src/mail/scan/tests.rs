//! Tests of the limits, of ambiguous structures, and of what a lenient parser would find.

use super::loosely::MAIL_TYPES;
use super::*;

fn nested(depth: usize) -> String {
    let mut mail = String::from("From: a@b.c\r\n");
    for level in 0..depth {
        mail.push_str(&format!(
            "Content-Type: multipart/mixed; boundary=\"b{level}x\"\r\n\r\n--b{level}x\r\n"
        ));
    }
    mail + "\r\nhello\r\n"
}

#[test]
fn what_is_counted_is_refused_one_above_the_limit_and_taken_at_it() {
    let parts = |count: usize| {
        "Content-Type: multipart/mixed; boundary=b\n\n".to_owned() + &"--b\n\nx\n".repeat(count)
    };
    let headers = |bytes: usize| format!("Subject: {}\n\nx", "a".repeat(bytes - 11));
    let mails = |depth: usize| "Content-Type: message/rfc822\n\n".repeat(depth) + "Subject: x\n\nhi";
    for (what, mail, expected) in [
        ("parts", parts(PARTS), Ok(())),
        ("parts", parts(PARTS + 1), Err(Hostile::Parts)),
        ("depth", nested(DEPTH), Ok(())),
        ("depth", nested(DEPTH + 1), Err(Hostile::Depth)),
        ("mails", mails(DEPTH), Ok(())),
        ("mails", mails(DEPTH + 1), Err(Hostile::Depth)),
        ("headers", headers(HEADER_BYTES), Ok(())),
        ("headers", headers(HEADER_BYTES + 1), Err(Hostile::Headers)),
        ("size", "a".repeat(MAIL_BYTES + 1), Err(Hostile::TooLarge)),
    ] {
        assert_eq!(scan(mail.as_bytes()).map(|_| ()), expected, "{what}");
    }
}

#[test]
fn lines_that_look_like_boundaries_and_are_none_count_nothing() {
    let sql = "Subject: x\n\n".to_owned() + &"-- a comment\n--b\n".repeat(5000);
    assert!(scan(sql.as_bytes()).is_ok());
}

#[test]
fn a_structure_that_two_readers_read_differently_is_refused() {
    for header in [
        "Content-Type: multipart/mixed; boundary=a; boundary=b",
        "Content-Type: multipart/mixed; boundary*0=a; boundary*1=b",
        "Content-Type: multipart/mixed;\n boundary=a\nContent-Type: multipart/mixed; boundary=b",
    ] {
        assert_eq!(scan(format!("{header}\n\nx").as_bytes()), Err(Hostile::Ambiguous), "{header}");
    }
}

#[test]
fn what_a_lenient_reader_would_find_is_counted_too() {
    let multipart = "Content-Type: multipart/mixed; boundary=b\n\n--b\n\n";
    let mails = |name: &str, count: usize| format!("{name}: message/rfc822\n\n").repeat(count);
    let inner = "--b\nContent-Type: multipart/mixed; boundary=\"inner\"\n\n--inner\n\nx\n--b\n\n";
    let popped = |count: usize| multipart.to_owned() + inner + &"--inner\n\nx\n".repeat(count);
    let within = |mails: String| format!("{multipart}x--b\n{mails}");
    for (what, mail, expected) in [
        ("mails", within(mails("Content-Type", MAIL_TYPES)), Ok(())),
        ("mails", within(mails("Content-Type", MAIL_TYPES + 1)), Err(Hostile::Depth)),
        ("spaced", within(mails("CONTENT - type ", MAIL_TYPES + 1)), Err(Hostile::Depth)),
        ("boundaries", multipart.to_owned() + &"x--b\n\n".repeat(PARTS - 1), Ok(())),
        ("boundaries", multipart.to_owned() + &"x--b\n\n".repeat(PARTS), Err(Hostile::Parts)),
        ("popped", popped(10), Ok(())),
        ("popped", popped(PARTS), Err(Hostile::Parts)),
        ("prose", "Subject: x\n\n".to_owned() + &"message/rfc822, says Ann.\n".repeat(1000), Ok(())),
        ("a line", "\nContent-Type: x; boundary=".to_owned() + &"boundary=".repeat(100_000), Ok(())),
    ] {
        assert_eq!(scan(mail.as_bytes()).map(|_| ()), expected, "{what}");
    }
}

#[test]
fn a_boundary_that_is_escaped_or_commented_is_refused_and_one_with_a_parenthesis_is_not() {
    for value in [
        r#""a\"b""#,
        "(c)a",
        "a(c)",
        "=?utf-8?q?a?=",
        "\"=?utf-8?q?a?=\"",
        "\"a\n b\"",
        "\"\u{e9}\"",
        "\" \"",
    ] {
        for header in ["Content-Type", "Subject: x\n\nx--a\nContent-Type"] {
            let mail = format!("{header}: multipart/mixed; boundary={value}\n\nx");
            assert_eq!(scan(mail.as_bytes()), Err(Hostile::Ambiguous), "{mail}");
        }
    }
    let ordinary = b"Content-Type: multipart/mixed; boundary=\"Boundary_(ID_x)\"\n\n--Boundary_(ID_x)\n\nx";
    assert!(scan(ordinary).is_ok());
}

#[test]
fn mails_that_only_a_lenient_reader_would_decode_are_disarmed() {
    let mail = b"Content-Type: multipart/digest; boundary=b\n\nx--b\nContent-Transfer - Encoding: Base64\n\
        Content-Type: \"message\" / rfc822\n\nU3ViamVjdDogeAo=\n--b\nContent-Type: message/rfc822\n\nSubject: x\n\nx";
    let disarmed = scan(mail).unwrap();
    let text = String::from_utf8(disarmed.disarm(mail).into_owned()).unwrap();
    assert!(text.starts_with("Content-Type: multipart/mixed ; boundary=b\n"), "{text}");
    assert!(text.contains("Content-Type: \"x-email\" / rfc822\n"), "{text}");
    assert!(text.contains("Content-Type: message/rfc822\n"), "{text}");
}

#[test]
fn a_mail_that_is_encoded_within_a_mail_is_disarmed() {
    let mail = b"Content-Type: Message/rfc822\nContent-Transfer-Encoding: BASE64\n\nU3ViamVjdDogeAo=";
    let disarmed = scan(mail).unwrap();
    let text = String::from_utf8(disarmed.disarm(mail).into_owned()).unwrap();
    assert!(text.starts_with("Content-Type: x-email/rfc822\n"), "{text}");
    assert_eq!(text.len(), mail.len());
    let plain = b"Content-Type: text/plain\n\nx";
    assert!(matches!(scan(plain).unwrap().disarm(plain), std::borrow::Cow::Borrowed(_)));
}
