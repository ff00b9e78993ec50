//! Bounces of mail that Wakeful sent, as each provider reports them.

use super::{MAIL, MAILGUN, POSTMARK, SES, TOKEN, World, mailgun_signature, notification, now, with};
use crate::support::{SmtpServer, eventually};
use reqwest::{StatusCode, header};
use serde_json::{Value, json};

/// What each provider posts about a mail that did not arrive: the example of its documentation, with our ids.
fn bounces(delivery_id: &str) -> [(&'static str, Value); 4] {
    let ours = format!("{delivery_id}@example.org");
    let postmark = json!({
        "RecordType": "Bounce", "ID": 692560173, "Type": "HardBounce", "TypeCode": 1, "Name": "Hard bounce", "Tag": "",
        "MessageID": "2c1b63fe-43f2-4db5-91b0-8bdfa44a9316", "ServerID": 23, "MessageStream": "outbound",
        "Description": "The server was unable to deliver your message (ex: unknown user, mailbox not found).",
        "Details": "action: failed\r\n", "Email": "ann@example.com", "From": "agent@example.org",
        "BouncedAt": "2026-11-22T08:41:33.0000000Z", "Inactive": true, "DumpAvailable": true, "CanActivate": true,
        "Subject": "Re: A question", "Content": "", "Metadata": {"delivery_id": delivery_id},
    });
    let mailgun = json!({
        "event": "failed", "id": "G9Bn5sl1TC6nu79C8C0bwg", "timestamp": 1795337093.98, "severity": "permanent",
        "log-level": "error", "reason": "suppress-bounce", "recipient": "ann@example.com", "recipient-domain": "example.com",
        "storage": {"key": "k", "url": "https://storage.example.com/k"}, "tags": [], "campaigns": [],
        "envelope": {"sender": "agent@example.org", "transport": "smtp", "targets": "ann@example.com"},
        "flags": {"is-routed": false, "is-authenticated": true, "is-system-test": false, "is-test-mode": false},
        "delivery-status": {"attempt-no": 1, "code": 605, "message": "", "description": "Not delivering to previously bounced \
         address", "session-seconds": 0.0, "bounce-type": "hard"},
        "message": {"headers": {"to": "ann@example.com", "message-id": ours, "from": "agent@example.org",
         "subject": "Re: A question"}, "attachments": [], "size": 111},
        "user-variables": {"delivery_id": delivery_id},
    });
    let bounce = json!({
        "bounceType": "Permanent", "bounceSubType": "General", "feedbackId": "01000138", "timestamp": "2026-11-22T08:59:38.605Z",
        "reportingMTA": "dns; email.example.com", "remoteMtaIp": "127.0.2.0",
        "bouncedRecipients": [{"emailAddress": "ann@example.com", "action": "failed", "status": "5.1.1",
         "diagnosticCode": "smtp; 550 5.1.1 <ann@example.com>... User"}],
    });
    let sent = json!({
        "timestamp": "2026-11-22T08:59:38.237Z", "source": "agent@example.org", "sourceIp": "127.0.3.0",
        "sourceArn": "arn:aws:ses:eu-central-1:888888888888:identity/example.org", "sendingAccountId": "123456789012",
        "messageId": "00000138111222aa-33322211", "destination": ["ann@example.com"], "headersTruncated": false,
    });
    let mut notified = json!({"notificationType": "Bounce", "bounce": bounce, "mail": sent});
    notified["mail"]["headers"] = json!([
        {"name": "From", "value": "agent@example.org"}, {"name": "To", "value": "ann@example.com"},
        {"name": "Message-ID", "value": format!("<{ours}>")}, {"name": "Subject", "value": "Re: A question"},
    ]);
    notified["mail"]["commonHeaders"] =
        json!({"from": ["agent@example.org"], "messageId": format!("<{ours}>")});
    let mut published = json!({"eventType": "Bounce", "bounce": bounce, "mail": sent});
    // SES replaces the Message-ID, so the tag finds the delivery.
    published["mail"]["headers"] =
        json!([{"name": "Message-ID", "value": "<0100@eu-central-1.amazonses.com>"}]);
    published["mail"]["tags"] = json!({"ses:configuration-set": ["ConfigSet"], "ses:from-domain": ["example.org"], "delivery_id": [delivery_id]});
    [("Postmark", postmark), ("Mailgun", mailgun), ("SES", notified), ("SES, event", published)]
}

#[tokio::test]
async fn a_bounce_of_each_provider_finds_its_delivery() {
    let server = SmtpServer::start().await;
    let world = World::with(&server.config(), |options| options).await;
    for (at, what) in ["Postmark", "Mailgun", "SES", "SES, event"].into_iter().enumerate() {
        // Vary the text: four equal mails would look like a machine's.
        let mail =
            MAIL.replace("<one@", &format!("<{at}@")).replace("What time", &format!("{at}: what time"));
        let raw = world.client.post_request("/v1/triggers/email/raw").bearer_auth(TOKEN);
        let raw = raw.header(header::CONTENT_TYPE, "message/rfc822").body(mail);
        let taken: Value = raw.send().await.unwrap().json().await.unwrap();
        let session_id = taken["session_id"].as_str().unwrap();
        eventually("the reply to go out", || async {
            let sent = "select count(*) from deliveries where session_id = $1 and status = 'sent'";
            (world.database.value::<i64>(sent, session_id).await == 1).then_some(())
        })
        .await;
        let delivery = "select delivery_id from deliveries where session_id = $1";
        let delivery_id: String = world.database.value(delivery, session_id).await;
        let (provider, told) = bounces(&delivery_id)[at].clone();
        assert_eq!(provider, what);
        let request = match what {
            "Postmark" => {
                let request = world.client.post_request(POSTMARK);
                request.basic_auth("wakeful", Some("postmark-secret")).json(&told)
            }
            "Mailgun" => {
                let signature: serde_json::Map<String, Value> =
                    mailgun_signature("signing-key", now(), &format!("{at:050}"))
                        .into_iter()
                        .map(|(name, value)| (name.to_owned(), json!(value)))
                        .collect();
                world.client.post_request(MAILGUN).json(&json!({"signature": signature, "event-data": told}))
            }
            _ => {
                let message = with(notification(MAIL), "Message", &told.to_string());
                world.client.post_request(SES).body(world.sns.sign(message).to_string())
            }
        };
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK, "{what}");
        assert_eq!(answer.json::<Value>().await.unwrap(), json!({"bounced": 1}), "{what}");
        let noted = "select undelivered from deliveries where session_id = $1";
        let noted: Value = world.database.value(noted, session_id).await;
        let found = (&noted[0]["recipient"], &noted[0]["how"]);
        assert_eq!(found, (&json!("ann@example.com"), &json!("bounced")), "{what}: {noted}");
    }
}
