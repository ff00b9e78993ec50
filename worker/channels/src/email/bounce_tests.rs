use super::*;

/// A report by Postfix, with the headers of the returned mail.
const POSTFIX: &str = "Return-Path: <>
From: MAILER-DAEMON@mx.example.net (Mail Delivery System)
Subject: Undelivered Mail Returned to Sender
To: desk@example.org
Auto-Submitted: auto-replied
MIME-Version: 1.0
Content-Type: multipart/report; report-type=delivery-status;
\tboundary=\"4A1B2C.1700000000/mx.example.net\"
Message-Id: <20261122.4A1B2C@mx.example.net>

This is a MIME-encapsulated message.

--4A1B2C.1700000000/mx.example.net
Content-Description: Notification
Content-Type: text/plain; charset=us-ascii

Your message could not be delivered.

--4A1B2C.1700000000/mx.example.net
Content-Description: Delivery report
Content-Type: message/delivery-status

Reporting-MTA: dns; mx.example.net
X-Postfix-Queue-ID: 4A1B2C
Arrival-Date: Sun, 22 Nov 2026 08:00:00 +0000 (UTC)

Final-Recipient: rfc822; bob@example.com
Original-Recipient: rfc822;Bob@example.com
Action: failed
Status: 5.1.1
Remote-MTA: dns; mail.example.com
Diagnostic-Code: smtp; 550 5.1.1 <bob@example.com>: Recipient address rejected:
    User unknown

Final-Recipient: rfc822; eve@example.com
Action: delayed
Status: 4.4.1
Diagnostic-Code: X-Postfix; connect to mail.example.com: Connection timed out

--4A1B2C.1700000000/mx.example.net
Content-Description: Undelivered Message Headers
Content-Type: text/rfc822-headers

Message-ID: <dlv_0123abc@example.org>
From: desk@example.org
To: bob@example.com
Subject: Your table

--4A1B2C.1700000000/mx.example.net--
";

/// A report by Exim. It returns the whole mail and has no diagnosis of a remote server.
const EXIM: &str =
    "Content-Type: multipart/report; report-type=delivery-status; boundary=1700000000-eximdsn-123
From: Mail Delivery System <Mailer-Daemon@host.example.net>

--1700000000-eximdsn-123
Content-type: text/plain; charset=us-ascii

This message was created automatically by mail delivery software.

--1700000000-eximdsn-123
Content-type: message/delivery-status

Reporting-MTA: dns; host.example.net

Action: failed
Final-Recipient: rfc822;bob@example.com
Status: 5.0.0

--1700000000-eximdsn-123
Content-type: message/rfc822

Received: from app by host.example.net
Message-ID: <dlv_77@desk.example.org>
Subject: Hello

Body with a line
--that-is-no-boundary
--1700000000-eximdsn-123--
";

/// A report by Gmail. Its own headers name the thread, and a nested multipart comes before the status.
const GMAIL: &str = "In-Reply-To: <dlv_g1@example.org>
References: <first@example.net> <dlv_g1@example.org>
From: Mail Delivery Subsystem <mailer-daemon@googlemail.com>
X-Failed-Recipients: bob@gmail.example
Content-Type: multipart/report; boundary=\"000000000000aa\"; report-type=delivery-status

--000000000000aa
Content-Type: multipart/related; boundary=\"000000000000bb\"

--000000000000bb
Content-Type: text/html; charset=\"UTF-8\"

<p>Address not found</p>
--000000000000bb--
--000000000000aa
Content-Type: message/delivery-status

Reporting-MTA: dns; googlemail.com
Arrival-Date: Sun, 22 Nov 2026 00:00:00 -0800 (PST)

Final-Recipient: rfc822; bob@gmail.example
Action: failed
Status: 5.1.1 (Bad destination mailbox address)
Diagnostic-Code: smtp; 550-5.1.1 The email account that you tried to reach does not exist.
 550 5.1.1 Learn more
Last-Attempt-Date: Sun, 22 Nov 2026 00:00:01 -0800 (PST)

--000000000000aa
Content-Type: message/rfc822

From: Desk <desk@example.org>
Subject: cut short
--000000000000aa--
";

fn one(raw: &str) -> Bounce {
    let read = read(raw.as_bytes());
    assert_eq!(read.len(), 1, "{read:?}");
    read.into_iter().next().unwrap()
}

#[test]
fn a_report_of_two_recipients_is_two_and_the_one_who_is_late_is_not_given_up() {
    for raw in [POSTFIX.to_owned(), POSTFIX.replace('\n', "\r\n")] {
        let found = read(raw.as_bytes());
        let bounce = |recipient: &str, status: &str, diagnostic: &str, permanent| Bounce {
            delivery_id: "dlv_0123abc".into(),
            recipient: recipient.into(),
            status: status.into(),
            diagnostic: diagnostic.into(),
            permanent,
        };
        assert_eq!(
            found,
            [
                bounce(
                    "Bob@example.com",
                    "5.1.1",
                    "550 5.1.1 <bob@example.com>: Recipient address rejected: User unknown",
                    true
                ),
                bounce(
                    "eve@example.com",
                    "4.4.1",
                    "connect to mail.example.com: Connection timed out",
                    false
                ),
            ]
        );
    }
}

#[test]
fn other_servers_write_other_reports() {
    let exim = one(EXIM);
    assert_eq!((exim.delivery_id.as_str(), exim.recipient.as_str()), ("dlv_77", "bob@example.com"));
    assert_eq!((exim.status.as_str(), exim.diagnostic.as_str(), exim.permanent), ("5.0.0", "failed", true));
    let gmail = one(GMAIL);
    assert_eq!((gmail.delivery_id.as_str(), gmail.recipient.as_str()), ("dlv_g1", "bob@gmail.example"));
    assert_eq!(gmail.status, "5.1.1");
    assert!(gmail.diagnostic.ends_with("550 5.1.1 Learn more"), "{}", gmail.diagnostic);
}

#[test]
fn what_is_no_report_or_of_no_mail_of_ours_is_no_bounce() {
    for raw in [
        String::new(),
        "Subject: Hi\n\nHello <dlv_1@example.org>".to_owned(),
        POSTFIX.replace("dlv_0123abc", "0123abc"),
        POSTFIX.replace("dlv_0123abc", "dlv_../../x"),
        POSTFIX.replace("multipart/report", "multipart/mixed"),
        POSTFIX.replace("Action: failed", "Action: delivered").replace("Action: delayed", "Action: relayed"),
        POSTFIX.replace("message/delivery-status", "text/plain"),
    ] {
        assert_eq!(read(raw.as_bytes()), [], "{raw}");
    }
}

#[test]
fn no_report_makes_it_stumble() {
    for raw in [POSTFIX, EXIM, GMAIL] {
        for end in 0..raw.len() {
            let _ = read(&raw.as_bytes()[..end]);
        }
        let many = raw.repeat(200);
        assert!(read(many.as_bytes()).len() <= MAX_RECIPIENTS);
    }
    let _ = read(&[0xff; 4096]);
}
