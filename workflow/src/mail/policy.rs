//! Decides what a mail's session may do, from the mail and its mailbox's rules.

use super::{MailFacts, Person, domain_of};
use crate::policy::{ReplyRoute, SessionPolicy, WebPolicy};
use serde_json::{Value, json};

/// Maximum number of participants.
const PARTICIPANTS: usize = 50;
/// Maximum number of ids in a reply's `References`.
const REFERENCES: usize = 20;

/// Rules of one mailbox.
#[derive(Clone, Debug, Default)]
pub struct MailboxRules {
    /// Addresses of all mailboxes of this system, in lower case.
    pub own: Vec<String>,
    /// Recipients that the mailbox's sessions may write to. If given, they replace the agent's recipients.
    pub recipients: Option<Vec<String>>,
    /// Hosts that the sessions' tools may reach.
    pub web: Option<WebPolicy>,
}

/// Facts of one mail that shape its session's policy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Extracted {
    /// Reasons to think that a machine wrote the mail, which then gets no answer. Empty if a person wrote it.
    pub machine: Vec<String>,
    /// Addresses of the sender and the recipients, without this system's own mailboxes.
    pub participants: Vec<String>,
    /// The sender's address, unless it is one of this system's mailboxes. Without proof, only the sender
    /// takes part.
    pub sender: Option<String>,
    pub recipients: Option<Vec<String>>,
    pub web: Option<WebPolicy>,
}

/// Reads a mail's policy facts.
pub fn extract(facts: &MailFacts, rules: &MailboxRules) -> Extracted {
    Extracted {
        machine: machine(facts, rules),
        participants: participants(facts.from.iter().chain(&facts.to).chain(&facts.cc), rules),
        sender: participants(facts.from.iter(), rules).pop(),
        recipients: rules.recipients.clone(),
        web: rules.web.clone(),
    }
}

/// How many mails an exchange had within the last hour, not counting the current one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exchange {
    /// Mails of the conversation, or from the same sender about the same subject.
    pub mails: i64,
    /// How many of them had exactly the same text.
    pub same_body: i64,
    /// Mails of the same sender that joined no conversation, whatever they were about.
    pub of_sender: i64,
    /// Mails of any sender that joined no conversation and whose answers go to the same address.
    pub answered: i64,
}

/// A person may send "Yes." two or three times. Only a machine sends the same text more often.
const SAME_TEXTS: i64 = 3;

/// Reasons to suspect that two machines answer each other.
pub fn loop_suspicion(exchange: Exchange, limit: i64) -> Vec<String> {
    let mut reasons = Vec::new();
    if exchange.mails >= limit {
        reasons.push(format!(
            "{} mails have come in this exchange within an hour, and email.loop_limit is {limit}",
            exchange.mails + 1
        ));
    }
    if exchange.same_body >= SAME_TEXTS {
        reasons.push(format!(
            "the same text has come {} times in this exchange within an hour",
            exchange.same_body + 1
        ));
    }
    reasons
}

/// The reason not to answer one more mail if nothing proves that the person who would get the answer wrote the mail. Anybody can
/// name a victim as the sender or in `Reply-To`, with a new subject each time, and every answer would go to the victim.
pub fn sender_suspicion(exchange: Exchange, limit: i64) -> Option<String> {
    let (count, what) = if exchange.of_sender >= limit {
        (exchange.of_sender, "have come from this sender")
    } else if exchange.answered >= limit {
        (exchange.answered, "have asked for an answer to this address")
    } else {
        return None;
    };
    Some(format!(
        "{} mails {what} within an hour, none of them proved to be of a conversation, and email.sender_limit is {limit}",
        count + 1
    ))
}

/// The policy of the mail's session: what it may do and where it replies. `proved` means that the sender is
/// proved, or that the mail came to an address that only a conversation's participants know.
pub fn of_session(
    extracted: &Extracted,
    suspicion: Vec<String>,
    reply: Option<ReplyRoute>,
    proved: bool,
) -> SessionPolicy {
    let cut_off = !suspicion.is_empty();
    // Anybody can put any address into `Cc` and then ask the agent to write to all of them. So without proof
    // only the sender takes part.
    let participants =
        if proved { extracted.participants.clone() } else { extracted.sender.iter().cloned().collect() };
    SessionPolicy {
        reply: reply.filter(|_| !cut_off),
        participants,
        recipients: if cut_off { Some(Vec::new()) } else { extracted.recipients.clone() },
        web: extracted.web.clone(),
        loop_suspicion: suspicion,
        ..SessionPolicy::default()
    }
}

/// Who gets the answer to the mail: its `Reply-To` if that has the domain of `From` or if DMARC passed, otherwise its `From`. `None`
/// if the mail has no sender.
pub fn answered(facts: &MailFacts, dmarc_passed: bool) -> Option<&Person> {
    let sender = facts.from.as_ref()?;
    let asked = facts.reply_to.first().filter(|asked| {
        dmarc_passed || domain_of(&asked.address).eq_ignore_ascii_case(domain_of(&sender.address))
    });
    Some(asked.unwrap_or(sender))
}

/// The address in lower case, without what follows a `+` before the `@`: most servers deliver all of those to one person. Only ASCII
/// has a lower case here: that of the Kelvin sign is a `k`, and its mailbox is another person's.
pub fn person_of(address: &str) -> String {
    let address = address.to_ascii_lowercase();
    match address.rsplit_once('@') {
        Some((local, domain)) => {
            let person = local.split_once('+').map_or(local, |(person, _)| person);
            format!("{person}@{domain}")
        }
        None => address,
    }
}

/// How replies to the mail are sent. `from` is the mailbox that answers. `reply_to` is the address that brings answers back into
/// the conversation. `None` if the mail has no sender.
pub fn reply_route(
    facts: &MailFacts,
    from: &str,
    dmarc_passed: bool,
    reply_to: Option<String>,
) -> Option<ReplyRoute> {
    let to = answered(facts, dmarc_passed)?;
    let subject = facts.subject.trim();
    let is_reply = subject.get(..3).is_some_and(|mark| mark.eq_ignore_ascii_case("re:"));
    let subject = if is_reply { subject.to_owned() } else { format!("Re: {subject}") };
    // RFC 5322, 3.6.4: the parent's references (without any, its `In-Reply-To`), then the parent.
    let before = if facts.references.is_empty() { &facts.in_reply_to } else { &facts.references };
    // Keep the first id, which names the thread, and the newest ones.
    let skipped = before.len().saturating_sub(REFERENCES - 2).max(1);
    let references: Vec<&String> =
        before.iter().take(1).chain(before.iter().skip(skipped)).chain(&facts.message_id).collect();
    Some(ReplyRoute {
        channel: "email".to_owned(),
        to: json!({
            "from": from,
            "to": [to.address],
            "cc": [],
            "subject": subject.trim_end(),
            "in_reply_to": facts.message_id,
            "references": references,
            "reply_to": reply_to,
        }),
        split_at: None,
    })
}

/// The reply route of a session after someone answered its question by mail. Later messages answer that mail,
/// in one thread with everything before. `asked` is the route of the question and `question` its Message-ID.
/// `answer` is the [`reply_route`] of the answer. `proved` means that the answer passed DMARC. Without proof,
/// the recipients stay the same. With proof, messages go to the answer's sender, and the earlier recipients
/// get copies.
pub fn route_after_answer(
    asked: &ReplyRoute,
    question: Option<&str>,
    answer: &ReplyRoute,
    proved: bool,
) -> ReplyRoute {
    let texts = |list: &Value| -> Vec<String> {
        list.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let (before, named) = (texts(&asked.to["references"]), texts(&answer.to["references"]));
    let answered = answer.to["in_reply_to"].as_str();
    // The answer's references come from its sender and may be missing, so the known ones come first.
    let mut references: Vec<String> = Vec::new();
    for id in before.into_iter().chain(question.map(str::to_owned)).chain(named) {
        if Some(id.as_str()) != answered && !references.contains(&id) {
            references.push(id);
        }
    }
    references.extend(answered.map(str::to_owned));
    if references.len() > REFERENCES {
        references.drain(1..=references.len() - REFERENCES);
    }
    let mut route = answer.clone();
    route.to["references"] = references.into();
    let (was, is) = (texts(&asked.to["to"]), texts(&answer.to["to"]));
    let cc = texts(&asked.to["cc"]);
    if proved {
        let mut copies: Vec<String> = Vec::new();
        for one in was.into_iter().chain(cc) {
            if copies.len() < PARTICIPANTS
                && !is.iter().chain(&copies).any(|known| known.eq_ignore_ascii_case(&one))
            {
                copies.push(one);
            }
        }
        route.to["cc"] = copies.into();
    } else {
        (route.to["to"], route.to["cc"]) = (was.into(), cc.into());
    }
    route
}

/// Values of `Precedence` that machines use.
const BULK: [&str; 3] = ["bulk", "junk", "list"];
/// Values of `Auto-Submitted` (RFC 3834, and RFC 5436 for the last).
const AUTOMATIC: [&str; 3] = ["auto-generated", "auto-replied", "auto-notified"];

/// Reasons to think that a machine wrote the mail: RFC 3834, and other marks of automatic mail.
fn machine(facts: &MailFacts, rules: &MailboxRules) -> Vec<String> {
    let mut reasons = Vec::new();
    for (name, value) in &facts.machine_headers {
        let word = value.split([';', ' ', '\t', '(']).find(|word| !word.is_empty()).unwrap_or_default();
        let is = |one: &&&str| word.eq_ignore_ascii_case(one);
        let tells = match name.as_str() {
            "auto-submitted" => !word.eq_ignore_ascii_case("no"),
            "precedence" => BULK.iter().any(|one| is(&one)),
            "x-auto-response-suppress" => !word.eq_ignore_ascii_case("none"),
            "x-loop" | "x-autoreply" | "x-autorespond" => true,
            _ => name.starts_with("list-"),
        };
        if tells {
            // The reason is written to the log, unsealed. So it quotes only words of the standards, and none of the sender's.
            let known = BULK.iter().chain(&AUTOMATIC).find(is).map(|word| format!(": {word}"));
            reasons.push(format!("it has the header {name}{}", known.unwrap_or_default()));
        }
    }
    if facts.return_path.as_deref() == Some("") {
        reasons.push("its return path is null".to_owned());
    }
    if let Some(kind) = &facts.report {
        reasons.push(format!("it is a report ({kind})"));
    }
    match &facts.from {
        None => reasons.push("it does not have one sender".to_owned()),
        Some(from) => {
            if is_own(rules, &from.address) {
                reasons.push("it is from one of this system's mailboxes".to_owned());
            }
            if nobody_reads(from) {
                reasons.push(format!("no person reads {}", from.address));
            }
        }
    }
    reasons
}

/// Whether an address is one of this system's mailboxes, also with a `+` and more before its `@`. A mailbox's own address may have
/// a `+` too.
fn is_own(rules: &MailboxRules, address: &str) -> bool {
    let (local, domain) = address.rsplit_once('@').unwrap_or((address, ""));
    rules.own.iter().filter_map(|own| own.rsplit_once('@')).any(|(own, own_domain)| {
        let begins = local.get(..own.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(own));
        begins
            && own_domain.eq_ignore_ascii_case(domain)
            && (local.len() == own.len() || local[own.len()..].starts_with('+'))
    })
}

fn nobody_reads(from: &Person) -> bool {
    let local = from.address.rsplit_once('@').map_or(from.address.as_str(), |(local, _)| local);
    let local: String = local.split('+').next().unwrap_or_default().replace(['-', '_', '.'], "");
    matches!(local.as_str(), "mailerdaemon" | "postmaster" | "noreply" | "donotreply" | "bounce" | "bounces")
}

fn participants<'a>(people: impl Iterator<Item = &'a Person>, rules: &MailboxRules) -> Vec<String> {
    let mut participants: Vec<String> = Vec::new();
    for person in people {
        let address = person.address.to_ascii_lowercase();
        if !is_own(rules, &address) && !domain_of(&address).is_empty() && !participants.contains(&address) {
            participants.push(address);
        }
    }
    participants.truncate(PARTICIPANTS);
    participants
}

#[cfg(test)]
mod tests;
