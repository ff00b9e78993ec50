//! Composes a delivery as a mail. Everything that sends mail uses this composer.
//!
//! Every attempt of a delivery gives the same bytes, except for the date. The Message-ID is made from the
//! delivery id, so a recipient can recognise a duplicate, and a reply or a bounce names the delivery.

use lettre::Message;
use lettre::address::Envelope;
use lettre::message::header::{ContentType, HeaderName, HeaderValue, MIME_VERSION_1_0};
use lettre::message::{Mailbox, MessageBuilder};
use serde_json::Value;
use wakeful_engine::channel::{Outbound, SendError};

/// Maximum number of ids in `References`: the first one, which names the thread, and the newest ones.
const MAX_REFERENCES: usize = 50;

/// A longer id is dropped; mail programs make none like it.
const MAX_ID_BYTES: usize = 900;

/// A mail, ready to be handed over.
#[derive(Clone, Debug)]
pub struct Composed {
    pub envelope: Envelope,
    /// The whole message, RFC 5322.
    pub bytes: Vec<u8>,
    /// The domain of its sender's address.
    pub from_domain: String,
}

/// The fields of a delivery that make a mail.
struct Fields<'a> {
    from: Option<&'a str>,
    to: &'a Value,
    cc: &'a Value,
    subject: &'a str,
    body: &'a str,
    /// The mail that this one replies to, if it belongs to a thread.
    thread: Option<&'a Value>,
}

/// The mail of a delivery, whose content is that of a reply (`{"type": "reply", "text", "to"}`, where `to` is an email
/// route's address) or of `compose_email` (`{"type": "sentEmail", "to", "cc", "subject", "body", "thread"?}`). `from` is the
/// sender where the delivery names none.
///
/// # Errors
/// [`SendError::Refused`]: no mail can be made of it, and a retry would not help.
pub fn compose(from: Option<&Mailbox>, message: &Outbound<'_>) -> Result<Composed, SendError> {
    let refused = |error: String| SendError::Refused(format!("the message cannot be composed: {error}"));
    let fields = fields(message.content);
    let from = match fields.from {
        Some(text) => mailbox(text).map_err(refused)?,
        None => from
            .cloned()
            .ok_or_else(|| refused("it names no sender, and [email] from is not set".to_owned()))?,
    };
    let from_domain = from.email.domain().to_owned();
    let mut builder = Message::builder()
        .message_id(Some(format!("<{}@{from_domain}>", message.delivery_id)))
        .from(from)
        .subject(line(fields.subject))
        .header(MIME_VERSION_1_0)
        .header(ContentType::TEXT_PLAIN);
    for to in addresses(fields.to).map_err(refused)? {
        builder = builder.to(to);
    }
    for cc in addresses(fields.cc).map_err(refused)? {
        builder = builder.cc(cc);
    }
    builder = threaded(builder, fields.thread).map_err(refused)?;
    // lettre would convert line ends one by one, each time moving the rest: minutes for a mebibyte of short
    // lines.
    // A lone CR is made a line end as well: some servers take it for one, and then text behind it could end the mail and say commands
    // of SMTP.
    let body = fields.body.replace("\r\n", "\n").replace('\r', "\n").replace('\n', "\r\n");
    let mail = builder.body(body).map_err(|error| refused(error.to_string()))?;
    Ok(Composed { envelope: mail.envelope().clone(), bytes: mail.formatted(), from_domain })
}

fn fields(content: &Value) -> Fields<'_> {
    if content["type"] == "reply" {
        let to = &content["to"];
        return Fields {
            from: named(&to["from"]),
            to: &to["to"],
            cc: &to["cc"],
            subject: to["subject"].as_str().unwrap_or_default(),
            body: content["text"].as_str().unwrap_or_default(),
            thread: Some(to),
        };
    }
    let thread = &content["thread"];
    // A mail to other people gets no thread headers. Otherwise their answer would come back into this thread.
    let of_thread = shares(&content["to"], &thread["to"]) || shares(&content["cc"], &thread["to"]);
    Fields {
        from: named(&thread["from"]),
        to: &content["to"],
        cc: &content["cc"],
        subject: content["subject"].as_str().unwrap_or_default(),
        body: content["body"].as_str().unwrap_or_default(),
        thread: of_thread.then_some(thread),
    }
}

fn named(value: &Value) -> Option<&str> {
    value.as_str().filter(|text| !text.trim().is_empty())
}

/// Adds In-Reply-To, References and Reply-To of the thread. `Auto-Submitted` marks the mail as automatic, so
/// that other machines do not answer it.
fn threaded(mut builder: MessageBuilder, thread: Option<&Value>) -> Result<MessageBuilder, String> {
    let none = Value::Null;
    let thread = thread.unwrap_or(&none);
    let answered = thread["in_reply_to"].as_str().and_then(message_id);
    if let Some(reply_to) = named(&thread["reply_to"]) {
        builder = builder.reply_to(mailbox(reply_to)?);
    }
    if let Some(answered) = &answered {
        builder = builder.raw_header(ids("In-Reply-To", std::slice::from_ref(answered))?);
    }
    let references = references(thread, answered.as_deref());
    if !references.is_empty() {
        builder = builder.raw_header(ids("References", &references)?);
    }
    let word = if answered.is_some() { "auto-replied" } else { "auto-generated" };
    Ok(builder.raw_header(raw("Auto-Submitted", word.to_owned(), word.to_owned())?))
}

/// The thread's ids, each once, with the answered one last. If there are too many, the first and the newest.
fn references(thread: &Value, answered: Option<&str>) -> Vec<String> {
    let listed = thread["references"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut ids: Vec<String> = Vec::new();
    for id in listed.iter().filter_map(Value::as_str).filter_map(message_id) {
        if Some(id.as_str()) != answered && !ids.contains(&id) {
            ids.push(id);
        }
    }
    ids.extend(answered.map(str::to_owned));
    if ids.len() > MAX_REFERENCES {
        let newest = ids.split_off(ids.len() - (MAX_REFERENCES - 1));
        ids.truncate(1);
        ids.extend(newest);
    }
    ids
}

/// The id as `<left@right>`, given with brackets or without. `None` if it is not an id or could end a header.
fn message_id(text: &str) -> Option<String> {
    let text = text.trim();
    let bare = text.strip_prefix('<').map_or(text, |rest| rest.strip_suffix('>').unwrap_or(rest));
    let plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'<' | b'>');
    let sound =
        !bare.is_empty() && bare.len() <= MAX_ID_BYTES && bare.bytes().all(plain) && bare.contains('@');
    sound.then(|| format!("<{bare}>"))
}

/// A header of ids, one per line, because a header may be folded between two ids but not within one.
fn ids(name: &str, ids: &[String]) -> Result<HeaderValue, String> {
    raw(name, ids.join(" "), ids.join("\r\n "))
}

fn raw(name: &str, plain: String, folded: String) -> Result<HeaderValue, String> {
    let name = HeaderName::new_from_ascii(name.to_owned()).map_err(|error| error.to_string())?;
    Ok(HeaderValue::dangerous_new_pre_encoded(name, plain, folded))
}

/// Replaces control characters, so the text cannot end a header.
fn line(text: &str) -> String {
    text.split(|c: char| c.is_control()).collect::<Vec<_>>().join(" ").trim().to_owned()
}

fn mailbox(text: &str) -> Result<Mailbox, String> {
    if text.chars().any(char::is_control) {
        return Err(format!("{text:?} has a control character"));
    }
    text.trim().parse().map_err(|error| format!("{text:?}: {error}"))
}

fn addresses(list: &Value) -> Result<Vec<Mailbox>, String> {
    let list = list.as_array().map(Vec::as_slice).unwrap_or_default();
    list.iter().map(|one| mailbox(one.as_str().unwrap_or_default())).collect()
}

/// Returns whether two lists of addresses share an address.
fn shares(one: &Value, other: &Value) -> bool {
    let plain = |list: &Value| -> Vec<String> {
        let all = addresses(list).unwrap_or_default();
        all.into_iter().map(|one| one.email.to_string().to_ascii_lowercase()).collect()
    };
    let other = plain(other);
    plain(one).iter().any(|address| other.contains(address))
}

#[cfg(test)]
#[path = "compose_tests.rs"]
mod tests;
