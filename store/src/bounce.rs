//! Mail that was sent but did not arrive. The store records each recipient that it did not reach, in the
//! delivery's row and in the journal. The agent learns about it with the conversation's next message.
//!
//! A bounce never wakes a session. Otherwise a machine's mail could start runs, and an agent could answer
//! machines without end.

use crate::encryption::{Seal, seal_in};
use crate::error::bounded;
use crate::run::{Wakes, append_events};
use crate::space::{self, Scope};
use crate::{Result, Store};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::PgConnection;
use wakeful_workflow::event::Event;
use wakeful_workflow::mail::plain_address;

/// Sender name of the notices to the agent. No trigger uses this name for a person.
pub(crate) const TELLER: &str = "wakeful";

/// Longest text of a remote server that is stored. The model sees it.
const REASON_CHARS: usize = 200;

/// How many deliveries one notice reports at most. The conversation's next message brings the rest.
const TOLD_AT_ONCE: i64 = 20;

/// Why a recipient did not get the mail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum How {
    /// The server refused this recipient during sending, and accepted others.
    Refused,
    /// The mail came back later.
    Bounced,
}

impl How {
    fn as_str(self) -> &'static str {
        match self {
            How::Refused => "refused",
            How::Bounced => "bounced",
        }
    }
}

/// One recipient who did not get the delivery.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Undelivered {
    pub recipient: String,
    pub how: How,
    /// The enhanced status (`5.1.1`), or the first word of the server's reply.
    pub status: String,
    /// The server's own words, on one line and bounded.
    pub reason: String,
}

/// Result of a bounce notice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Noted {
    New {
        session_id: String,
    },
    /// This recipient's bounce was already recorded.
    Known,
    /// We sent no such mail to that recipient. Nothing was written.
    NotOurs,
}

impl Store {
    /// Records that a sent mail did not reach `recipient`, once for each recipient, in whatever space. Ignores the notice if the
    /// delivery was never begun or had another recipient, because anyone can forge a bounce.
    ///
    /// # Errors
    /// [`crate::Error::Database`], [`crate::Error::Corrupt`].
    pub async fn note_bounce(
        &self,
        delivery_id: &str,
        recipient: &str,
        status: &str,
        reason: &str,
    ) -> Result<Noted> {
        // The notice comes to a mailbox of one space, and the id that it names may be a delivery of another.
        let noted = self.try_note_bounce(delivery_id, recipient, status, reason);
        let noted = space::within(Scope::All, noted).await;
        self.note_refusal(noted)
    }

    async fn try_note_bounce(
        &self,
        delivery_id: &str,
        recipient: &str,
        status: &str,
        reason: &str,
    ) -> Result<Noted> {
        let mut tx = self.pool.begin().await?;
        let delivery = sqlx::query!(
            r#"select session_id, channel, content::text as "content!" from deliveries where delivery_id = $1"#,
            delivery_id
        )
        .fetch_optional(&mut *tx)
        .await?;
        let Some(delivery) = delivery else { return Ok(Noted::NotOurs) };
        let content: Value = crate::json::from_text("delivery", &delivery.content)?;
        let Some(recipient) = addressee(&content, recipient) else { return Ok(Noted::NotOurs) };
        // Lock the session, then its delivery, in the same order as every settlement.
        sqlx::query!(
            "select session_id from conversation_sessions where session_id = $1 for update",
            delivery.session_id
        )
        .fetch_optional(&mut *tx)
        .await?;
        let row = sqlx::query!(
            "select status, undelivered from deliveries where delivery_id = $1 for update",
            delivery_id
        )
        .fetch_one(&mut *tx)
        .await?;
        // `sending` too: a bounce may arrive before our own commit, and it proves that the mail was sent.
        if !matches!(row.status.as_str(), "sent" | "sending" | "uncertain") {
            return Ok(Noted::NotOurs);
        }
        let before: Vec<Undelivered> = read(row.undelivered)?;
        if before.iter().any(|one| one.how == How::Bounced && one.recipient == recipient) {
            return Ok(Noted::Known);
        }
        let missed = Undelivered {
            recipient,
            how: How::Bounced,
            status: line(status, 20),
            reason: line(reason, REASON_CHARS),
        };
        note(&mut tx, &delivery.session_id, delivery_id, &delivery.channel, &[missed]).await?;
        tx.commit().await?;
        Ok(Noted::New { session_id: delivery.session_id })
    }
}

/// Records the recipients that the server refused while it accepted others. The receipt lists them: `refused:
/// [{address, reply}]`.
pub(crate) async fn note_refused(
    tx: &mut PgConnection,
    session_id: &str,
    delivery_id: &str,
    channel: &str,
    receipt: &Value,
) -> Result<()> {
    let refused = receipt["refused"].as_array().map(Vec::as_slice).unwrap_or_default();
    let missed: Vec<Undelivered> = refused
        .iter()
        .filter_map(|one| {
            let reply = one["reply"].as_str().unwrap_or_default();
            let status = reply.split_whitespace().next().unwrap_or_default();
            Some(Undelivered {
                recipient: line(one["address"].as_str()?, 320),
                how: How::Refused,
                status: line(status, 20),
                reason: line(reply, REASON_CHARS),
            })
        })
        .collect();
    if missed.is_empty() {
        return Ok(());
    }
    note(tx, session_id, delivery_id, channel, &missed).await
}

/// Adds `missed` to the delivery and to the journal, and marks the delivery for the next notice. The caller
/// has locked the session's row.
async fn note(
    tx: &mut PgConnection,
    session_id: &str,
    delivery_id: &str,
    channel: &str,
    missed: &[Undelivered],
) -> Result<()> {
    let seal = seal_in(&mut *tx, session_id).await?;
    let count = sqlx::query_scalar!(
        r#"update deliveries set undelivered = undelivered || $2::jsonb, untold = true
        where delivery_id = $1
        returning jsonb_array_length(undelivered)::bigint as "count!""#,
        delivery_id,
        seal.with_reasons(json!(missed))
    )
    .fetch_one(&mut *tx)
    .await?;
    let first = count - missed.len() as i64;
    for (place, one) in (first..).zip(missed) {
        let event = Event::DeliveryBounced {
            delivery_id: delivery_id.to_owned(),
            channel: channel.to_owned(),
            recipient: one.recipient.clone(),
            how: one.how.as_str().to_owned(),
            status: one.status.clone(),
            reason: one.reason.clone(),
        };
        let dedupe = format!("{}/{delivery_id}/{place}", one.how.as_str());
        append_events(&mut *tx, session_id, None, Some(&dedupe), Wakes::Nothing, &[event]).await?;
    }
    Ok(())
}

/// Returns the reports about the conversation's mail that the agent has not seen yet, and marks them as told.
/// `None`: no delivery needs a report. A delivery that is being sent again gets its report when it has ended.
pub(crate) async fn take_reports(
    tx: &mut PgConnection,
    seal: &Seal,
    conversation_id: &str,
) -> Result<Option<String>> {
    let rows = sqlx::query!(
        r#"
        with due as (
            select delivery_id, told_unsent and status = 'sent' as after_all from deliveries
            where conversation_id = $1 and untold and status not in ('queued', 'sending')
            order by ordinal
            limit $2
            for update
        )
        update deliveries d set untold = false, told_unsent = d.told_unsent and not due.after_all
        from due
        where d.delivery_id = due.delivery_id
        returning d.ordinal, d.delivery_id, d.content::text as "content!", d.status, d.last_error, d.undelivered,
            due.after_all as "after_all!"
        "#,
        conversation_id,
        TOLD_AT_ONCE
    )
    .fetch_all(tx)
    .await?;
    let mut told = Vec::new();
    for row in rows {
        let content: Value = crate::json::from_text("delivery", &seal.open_json(row.content)?)?;
        let missed: Vec<Undelivered> = read(seal.open_value(row.undelivered)?)?;
        let error = seal.open(row.last_error.unwrap_or_default())?;
        let end = match row.status.as_str() {
            "failed" | "expired" => DeliveryEnd::Unsent(&error),
            "uncertain" => DeliveryEnd::Unknown,
            _ => DeliveryEnd::Sent { after_all: row.after_all },
        };
        let text = notice(&row.delivery_id, &content, &end, &missed);
        told.push((row.ordinal, text));
    }
    told.sort_unstable();
    let lines: Vec<String> = told.into_iter().map(|(_, text)| text).collect();
    Ok((!lines.is_empty()).then(|| lines.join("\n")))
}

const NOTE: &str = "[A note of the system, not of a person]";

/// How a delivery ended. Each end has its own notice.
enum DeliveryEnd<'a> {
    /// It was sent to no recipient, for this reason.
    Unsent(&'a str),
    Unknown,
    /// `after_all`: an earlier notice said that it was not sent.
    Sent {
        after_all: bool,
    },
}

/// The notice of one delivery. The server's text is quoted, so that the model does not take it for an instruction.
fn notice(delivery_id: &str, content: &Value, end: &DeliveryEnd<'_>, missed: &[Undelivered]) -> String {
    let subject =
        content["subject"].as_str().or_else(|| content["to"]["subject"].as_str()).unwrap_or_default();
    let mail = format!("{NOTE} Your mail {:?} ({delivery_id})", line(subject, 100));
    let before = match end {
        DeliveryEnd::Unsent(error) => {
            return format!("{mail} was not sent to anybody: {:?}", line(error, REASON_CHARS));
        }
        DeliveryEnd::Unknown if missed.is_empty() => {
            return format!("{mail} may not have been sent: nobody saw its sending end.");
        }
        DeliveryEnd::Sent { after_all: true } if missed.is_empty() => {
            return format!("{mail} has been sent after all.");
        }
        DeliveryEnd::Sent { after_all: true } => "has been sent after all, and ",
        DeliveryEnd::Sent { after_all: false } | DeliveryEnd::Unknown => "",
    };
    let mut text = format!("{mail} {before}did not reach everybody:");
    for one in missed {
        let how = match one.how {
            How::Refused => "refused by the mail server",
            How::Bounced => "came back",
        };
        text.push_str(&format!("\n- {}: {how} ({}): {:?}", one.recipient, one.status, one.reason));
    }
    text
}

/// Returns the delivery's recipient that a bounce for `recipient` is about. If the delivery has only one
/// recipient, a bounce for another address is about that one, because the mail was forwarded.
fn addressee(content: &Value, recipient: &str) -> Option<String> {
    let list = |of: &Value| -> Vec<String> {
        let list = of.as_array().map(Vec::as_slice).unwrap_or_default();
        list.iter().filter_map(|one| one.as_str().map(str::to_owned)).collect()
    };
    let fields = if content["type"] == "reply" { &content["to"] } else { content };
    let mut all = list(&fields["to"]);
    all.extend(list(&fields["cc"]));
    let named = all.iter().find(|one| plain_address(one).eq_ignore_ascii_case(plain_address(recipient)));
    match (named, all.as_slice()) {
        (Some(one), _) | (None, [one]) => Some(plain_address(one).to_ascii_lowercase()),
        (None, _) => None,
    }
}

fn line(text: &str, chars: usize) -> String {
    let text = bounded(text);
    let words: Vec<&str> = text.split(|c: char| c.is_whitespace() || c.is_control()).collect();
    words
        .into_iter()
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
        .chars()
        .take(chars)
        .collect()
}

fn read(undelivered: Value) -> Result<Vec<Undelivered>> {
    serde_json::from_value(undelivered).map_err(|error| crate::Error::corrupt("undelivered", error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bounce_is_about_a_recipient_of_the_mail_or_about_nobody() {
        let two = json!({"type": "sentEmail", "to": ["Ann@example.com"], "cc": ["Bob <bob@example.com>"]});
        assert_eq!(addressee(&two, "ann@EXAMPLE.com").as_deref(), Some("ann@example.com"));
        assert_eq!(addressee(&two, "<bob@example.com>").as_deref(), Some("bob@example.com"));
        assert_eq!(addressee(&two, "eve@example.com"), None);
        let one = json!({"type": "reply", "text": "Hi", "to": {"to": ["ann@example.com"]}});
        assert_eq!(addressee(&one, "forwarded@example.net").as_deref(), Some("ann@example.com"));
        assert_eq!(addressee(&json!({"type": "reply", "to": {"channel": "C1"}}), "x@y"), None);
    }

    #[test]
    fn what_a_server_says_is_one_bounded_line() {
        assert_eq!(line("550 5.1.1\r\n no \u{0} such  user", 100), "550 5.1.1 no \u{fffd} such user");
        assert_eq!(line(&"x".repeat(5000), REASON_CHARS).len(), REASON_CHARS);
    }
}
