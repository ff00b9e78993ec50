//! Bounces: a mail server's reports about mail that it could not deliver (RFC 3464, in a multipart/report of
//! RFC 3462).
//!
//! Anybody who knows one of our Message-IDs can forge a bounce. So a bounce only adds a note to the delivery,
//! and only for that delivery's own recipients ([`wakeful_store::Store::note_bounce`]).

use wakeful_engine::ctx::Ctx;
use wakeful_store::Result;
use wakeful_store::bounce::Noted;

/// Maximum number of parts, and of recipients, that are read.
const MAX_PARTS: usize = 20;
const MAX_RECIPIENTS: usize = 100;

/// How many bytes of a report are read. Servers cut the mail that they return.
const MAX_BYTES: usize = 1 << 20;

/// A recipient whom a delivery did not reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bounce {
    /// `dlv_…`: the part before the `@` in the returned Message-ID.
    pub delivery_id: String,
    pub recipient: String,
    /// The enhanced status, `5.1.1`.
    pub status: String,
    /// The remote server's reply if the report has one, else the reporter's text.
    pub diagnostic: String,
    /// The server gave up. If `false`, the mail is only late, and another report may follow.
    pub permanent: bool,
}

/// The bounces in a mail, one per recipient. Empty if it is not a delivery report, or reports mail that is
/// not ours.
pub fn read(raw: &[u8]) -> Vec<Bounce> {
    let raw = &raw[..raw.len().min(MAX_BYTES)];
    let text = String::from_utf8_lossy(raw).replace("\r\n", "\n");
    let (head, body) = text.split_once("\n\n").unwrap_or((&text, ""));
    let head = headers(head);
    let content_type = value(&head, "content-type").unwrap_or_default();
    if !content_type.to_ascii_lowercase().starts_with("multipart/report") {
        return Vec::new();
    }
    let Some(boundary) = parameter(content_type, "boundary") else { return Vec::new() };
    let (mut status, mut returned) = (None, None);
    for part in parts(body, &boundary) {
        let (part_head, part_body) = match part.strip_prefix('\n') {
            Some(body) => ("", body),
            None => part.split_once("\n\n").unwrap_or((part, "")),
        };
        let part_head = headers(part_head);
        let kind = value(&part_head, "content-type").unwrap_or("text/plain").to_ascii_lowercase();
        let kind = kind.split(';').next().unwrap_or_default().trim().to_owned();
        match kind.as_str() {
            "message/delivery-status" | "message/global-delivery-status" => {
                status.get_or_insert(part_body.to_owned());
            }
            "message/rfc822" | "text/rfc822-headers" | "message/global" | "message/global-headers" => {
                let inner = part_body.split("\n\n").next().unwrap_or_default();
                returned = returned.or_else(|| delivery_of(value(&headers(inner), "message-id")?));
            }
            _ => {}
        }
    }
    let answered =
        || ["in-reply-to", "references"].into_iter().find_map(|name| delivery_of(value(&head, name)?));
    match (status, returned.or_else(answered)) {
        (Some(status), Some(delivery_id)) => recipients(&status, &delivery_id),
        (None, _) | (_, None) => Vec::new(),
    }
}

/// Records a permanent bounce at its delivery and in the session's journal. Ignores a report of late mail,
/// which may still arrive.
///
/// # Errors
/// The errors of [`wakeful_store::Store::note_bounce`].
pub async fn take_bounce(ctx: &Ctx, bounce: &Bounce) -> Result<Noted> {
    if !bounce.permanent {
        return Ok(Noted::Known);
    }
    let Bounce { delivery_id, recipient, status, diagnostic, .. } = bounce;
    let noted = ctx.store.note_bounce(delivery_id, recipient, status, diagnostic).await?;
    if let Noted::New { session_id } = &noted {
        tracing::warn!(delivery.id = %delivery_id, session.id = %session_id, status, "A mail came back");
        ctx.bus.notifier.session(session_id);
    }
    Ok(noted)
}

/// Returns one bounce for each group of a delivery status. Skips the first group, because it describes the
/// message.
fn recipients(status: &str, delivery_id: &str) -> Vec<Bounce> {
    let groups = status.split("\n\n").map(headers).filter(|fields| !fields.is_empty());
    let bounces = groups.filter_map(|fields| {
        let address = |name: &str| value(&fields, name).map(typed).filter(|text| !text.is_empty());
        let recipient = address("original-recipient").or_else(|| address("final-recipient"))?;
        let action = value(&fields, "action").unwrap_or_default().trim().to_ascii_lowercase();
        let permanent = match action.as_str() {
            "failed" => true,
            "delayed" => false,
            // Delivered, relayed or expanded: not a bounce.
            _ => return None,
        };
        let status = value(&fields, "status").unwrap_or_default();
        let status = status.split_whitespace().next().unwrap_or_default().to_owned();
        let diagnostic = value(&fields, "diagnostic-code").map(typed).unwrap_or_else(|| action.clone());
        Some(Bounce { delivery_id: delivery_id.to_owned(), recipient, status, diagnostic, permanent })
    });
    bounces.take(MAX_RECIPIENTS).collect()
}

/// The part after the type, as in `rfc822; ann@example.com` or `smtp; 550 …`.
fn typed(value: &str) -> String {
    let text = value.split_once(';').map_or(value, |(_, text)| text).trim();
    text.strip_prefix('<').and_then(|text| text.strip_suffix('>')).unwrap_or(text).trim().to_owned()
}

/// The delivery that a Message-ID of ours names, anywhere in the text.
fn delivery_of(text: &str) -> Option<String> {
    let ids = text.split('<').skip(1).filter_map(|rest| rest.split_once('>').map(|(id, _)| id));
    let left = ids.filter_map(|id| id.split_once('@').map(|(left, _)| left.trim()));
    left.filter(|left| is_delivery(left)).last().map(str::to_owned)
}

/// Returns whether a text has the form of a delivery's id.
pub(crate) fn is_delivery(id: &str) -> bool {
    id.strip_prefix("dlv_").is_some_and(|rest| {
        (1..=64).contains(&rest.len()) && rest.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    })
}

/// The headers: names in lower case, values unfolded.
fn headers(text: &str) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    for line in text.lines() {
        if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = found.last_mut() {
                value.push(' ');
                value.push_str(line.trim());
            }
        } else if let Some((name, value)) = line.split_once(':') {
            found.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    found
}

fn value<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
}

/// A parameter of a content type, quoted or not.
fn parameter(content_type: &str, name: &str) -> Option<String> {
    content_type.split(';').skip(1).find_map(|one| {
        let (found, value) = one.split_once('=')?;
        let value = value.trim().trim_matches('"');
        (found.trim().eq_ignore_ascii_case(name) && !value.is_empty()).then(|| value.to_owned())
    })
}

/// The parts between the boundary lines.
fn parts<'a>(body: &'a str, boundary: &str) -> Vec<&'a str> {
    let mark = format!("--{boundary}");
    let mut parts = Vec::new();
    let (mut began, mut at) = (None, 0);
    for line in body.split_inclusive('\n') {
        let plain = line.trim_end();
        if let Some(rest) = plain.strip_prefix(&mark)
            && (rest.is_empty() || rest == "--")
        {
            if let Some(began) = began {
                parts.push(&body[began..at]);
            }
            began = (rest.is_empty() && parts.len() < MAX_PARTS).then_some(at + line.len());
        }
        at += line.len();
    }
    if let Some(began) = began {
        parts.push(&body[began..]);
    }
    parts
}

#[cfg(test)]
#[path = "bounce_tests.rs"]
mod tests;
