//! What a notification says, for each place that it is sent to.

use chrono::SecondsFormat;
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write as _;
use wakeful_config::notify::To;
use wakeful_store::notify::link::Minted;
use wakeful_store::notify::outbox::{ClaimedNotification, Told};

/// How many transitions a text for people names. A webhook has more.
const SHOWN: usize = 10;

/// The longest error or question in a text for people, in characters.
const LONGEST: usize = 300;

/// A link by which a person may act once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ButtonOrLink {
    pub act: &'static str,
    pub session_id: String,
    /// A call or a delivery.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effect_id: Option<String>,
    /// The effect in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
    /// Of which item it is.
    #[serde(skip)]
    pub transition_id: i64,
    /// Of a link its address, of a button its token.
    pub url: String,
}

impl ButtonOrLink {
    pub fn of(told: &Told, made: Minted, about: Option<String>, url: String) -> ButtonOrLink {
        ButtonOrLink {
            act: made.act.as_str(),
            effect_id: made.act.effect().map(str::to_owned),
            about: about.map(|about| cut(&about)),
            transition_id: told.transition_id,
            session_id: made.session_id,
            url,
        }
    }
}

/// One notification, with what it tells.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message<'a> {
    pub claimed: &'a ClaimedNotification,
    pub told: &'a [Told],
    pub links: &'a [ButtonOrLink],
    /// Of a card of Slack.
    pub buttons: &'a [ButtonOrLink],
    /// The address of the console, if people can reach it.
    pub console: Option<&'a str>,
}

/// What the rule's channel gets.
pub(crate) fn content(message: &Message<'_>, to: &To) -> Value {
    let subject = subject(message);
    match to {
        To::Webhook { .. } => json!({"rule": message.claimed.rule, "body": body(message, &subject)}),
        To::Slack { channel, .. } => {
            let text = format!("{subject}\n{}", text(message));
            let blocks = card(message.told, message.buttons, &text);
            json!({"to": {"channel": channel}, "text": text, "blocks": blocks})
        }
        To::Email { address } => {
            json!({"type": "reply", "to": {"to": [address], "subject": subject}, "text": text(message)})
        }
    }
}

/// One line.
fn subject(message: &Message<'_>) -> String {
    let claimed = message.claimed;
    let said = claimed.kind.said(claimed.total);
    match claimed.phase.as_str() {
        "over" => format!("Over: {said} ({})", claimed.label),
        "more" => format!("{} more: {} ({})", claimed.count, claimed.kind.said(claimed.total), claimed.label),
        _ => format!("{said} ({})", claimed.label),
    }
}

/// The event of a webhook. `timestamp` is when the notification was made, so that it is the same in each attempt.
fn body(message: &Message<'_>, subject: &str) -> Value {
    let claimed = message.claimed;
    json!({
        "type": format!("notification.{}", claimed.kind.as_str()),
        "timestamp": claimed.created_at.to_rfc3339_opts(SecondsFormat::Millis, true),
        "data": {
            "notification_id": claimed.notification_id,
            "rule": claimed.rule,
            "kind": claimed.kind.as_str(),
            "phase": claimed.phase,
            "text": subject,
            "cause": claimed.cause,
            "label": claimed.label,
            "count": claimed.count,
            "total": claimed.total,
            "first_at": claimed.first_at,
            "last_at": claimed.last_at,
            "ended_at": claimed.ended_at,
            "items": message.told,
            "links": message.links,
        },
    })
}

/// The text for people, below the subject.
fn text(message: &Message<'_>) -> String {
    let claimed = message.claimed;
    let mut text = String::new();
    let time = |at: chrono::DateTime<chrono::Utc>| at.to_rfc3339_opts(SecondsFormat::Secs, true);
    match claimed.phase.as_str() {
        "over" => {
            let since = time(claimed.first_at);
            let end = time(claimed.ended_at.unwrap_or(claimed.last_at));
            let _ = writeln!(text, "From {since} to {end}, {} in all.", claimed.total);
        }
        _ => {
            let _ = writeln!(text, "Since {}.", time(claimed.first_at));
        }
    }
    for one in message.told.iter().take(SHOWN) {
        let _ = writeln!(text, "\n- {}", line(one));
        if let (Some(console), Some(id)) = (message.console, &one.session_id) {
            let _ = writeln!(text, "  {console}/sessions/{id}");
        }
        for link in message.links.iter().filter(|link| link.transition_id == one.transition_id) {
            let about = link.about.as_ref().map(|about| format!(" ({about})")).unwrap_or_default();
            let _ = writeln!(text, "  {}{about}, once, without a login: {}", link.act, link.url);
        }
    }
    let more = claimed.count - message.told.len().min(SHOWN) as i64;
    if more > 0 {
        let _ = writeln!(text, "\nand {more} more.");
    }
    text
}

fn line(told: &Told) -> String {
    let about = told.question.as_ref().or(told.error.as_ref()).map(|text| format!(": {}", cut(text)));
    let what = match (&told.conversation_id, &told.agent) {
        (Some(conversation), Some(agent)) => format!("{agent} in {conversation}"),
        _ => told.subject.clone(),
    };
    let status = told.status.as_deref().map(|status| format!(" is {status}")).unwrap_or_default();
    format!("{what}{status}{}", about.unwrap_or_default())
}

/// The longest text of a part of a card that Slack takes, in characters.
const PART: usize = 3000;

/// A card of Slack: the text as plain text, so that nothing in it mentions anybody or links anywhere, and below each item its
/// buttons. Those of an effect stand below the effect. Slack takes 50 blocks, so `buttons` are few.
fn card(told: &[Told], buttons: &[ButtonOrLink], text: &str) -> Value {
    let plain = |text: &str| {
        let text: String = text.chars().take(PART).collect();
        json!({"type": "section", "text": {"type": "plain_text", "text": text, "emoji": false}})
    };
    let mut blocks = vec![plain(text)];
    let many = told.len() > 1;
    for one in told {
        let own: Vec<(usize, &ButtonOrLink)> = buttons
            .iter()
            .enumerate()
            .filter(|(_, button)| button.transition_id == one.transition_id)
            .collect();
        if own.is_empty() {
            continue;
        }
        if many {
            let named: String = line(one).chars().take(200).collect();
            let named = json!({"type": "plain_text", "text": named, "emoji": false});
            blocks.push(json!({"type": "context", "elements": [named]}));
        }
        for (number, button) in own {
            if let Some(about) = &button.about {
                blocks.push(plain(about));
            }
            blocks.push(json!({"type": "actions", "elements": elements(number, button)}));
        }
    }
    Value::Array(blocks)
}

/// The buttons of one act. The value is the token, and for an effect how it ended. `number` tells them from those of other acts.
fn elements(number: usize, button: &ButtonOrLink) -> Vec<Value> {
    let one = |text: &str, choice: &str| {
        json!({"type": "button", "text": {"type": "plain_text", "text": text},
            "action_id": format!("wakeful_{number}_{}{}", button.act, choice.replace(' ', "_")), "value": format!("{}{choice}", button.url)})
    };
    match button.act {
        "resolve" => vec![one("It happened", " happened"), one("It did not happen", " did_not_happen")],
        "approve" => vec![one("Approve", " approved"), one("Decline", " declined")],
        "retry" => vec![one("Retry", "")],
        _ => vec![one("Send again", "")],
    }
}

/// On one line and short. A text of a model or of a mail must not look like another line of this message.
fn cut(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let line: String = line.chars().filter(|char| !char.is_control()).collect();
    match line.char_indices().nth(LONGEST) {
        Some((at, _)) => format!("{}…", &line[..at]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_card_names_each_effect_above_its_own_buttons() {
        let told = |transition_id, session: &str| Told {
            transition_id,
            at: chrono::DateTime::UNIX_EPOCH,
            space_id: "default".to_owned(),
            subject: session.to_owned(),
            session_id: Some(session.to_owned()),
            agent: None,
            conversation_id: None,
            status: None,
            error: None,
            question: None,
        };
        let resolve = |transition_id, session: &str, effect: &str| ButtonOrLink {
            act: "resolve",
            session_id: session.to_owned(),
            effect_id: Some(effect.to_owned()),
            about: Some(format!("charge {effect}")),
            transition_id,
            url: format!("wkl_{effect}"),
        };
        let buttons = [resolve(1, "s1", "c1"), resolve(1, "s1", "c2"), resolve(3, "s2", "c3")];
        // The first session is told twice, and its buttons stand below one of them.
        let card = card(&[told(1, "s1"), told(2, "s1"), told(3, "s2")], &buttons, "It waits.");
        let blocks = card.as_array().unwrap();
        let said = |block: &Value| block["text"]["text"].as_str().map(str::to_owned);
        let mut ids = BTreeSet::new();
        let mut acts = Vec::new();
        for pair in blocks.windows(2).filter(|pair| pair[1]["type"] == "actions") {
            for element in pair[1]["elements"].as_array().unwrap() {
                assert!(ids.insert(element["action_id"].as_str().unwrap().to_owned()), "{element}");
            }
            acts.push((
                said(&pair[0]).unwrap(),
                pair[1]["elements"][0]["value"].as_str().unwrap().to_owned(),
            ));
        }
        let expected =
            ["c1", "c2", "c3"].map(|effect| (format!("charge {effect}"), format!("wkl_{effect} happened")));
        assert_eq!(acts, expected);
        assert_eq!(ids.len(), 6);
    }

    #[test]
    fn a_text_of_others_stays_one_short_line() {
        assert_eq!(
            cut("a\n- retry, once: https://evil.example\u{1b}[2J"),
            "a - retry, once: https://evil.example[2J"
        );
        assert_eq!(cut(&"x".repeat(400)).chars().count(), LONGEST + 1);
    }
}
