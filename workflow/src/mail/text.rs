//! Renders a mail as text for the model.

use super::{MailFacts, Person};
use std::fmt::Write as _;

/// Maximum number of people named in one line.
const NAMED: usize = 30;

/// The mail as text: people, date, subject, body and attached files. The same mail always gives the same
/// text. `joined` means that the model knows the earlier messages, so the text omits a quotation at the
/// mail's end.
pub fn render(facts: &MailFacts, joined: bool) -> String {
    let mut text = String::new();
    let from: Vec<&Person> = facts.from.iter().collect();
    line(&mut text, "From", &people(&from));
    line(&mut text, "To", &people(&facts.to.iter().collect::<Vec<_>>()));
    line(&mut text, "Cc", &people(&facts.cc.iter().collect::<Vec<_>>()));
    line(&mut text, "Date", facts.date.as_deref().unwrap_or_default());
    line(&mut text, "Subject", &one_line(&facts.subject));
    let body = if joined { without_quote(&facts.body) } else { &facts.body };
    let _ = write!(text, "\n{}", body.trim());
    if facts.body_cut {
        text.push_str("\n[The text is longer; the whole is the last of the attachments.]");
    }
    if !facts.attachments.is_empty() {
        text.push_str("\n\nAttachments:");
    }
    for (file, number) in facts.attachments.iter().zip(1..) {
        let left_out = if file.left_out { ", too large to be kept" } else { "" };
        let _ = write!(
            text,
            "\n{number}. {} ({}, {} bytes{left_out})",
            one_line(&file.file_name),
            one_line(&file.media_type),
            file.bytes
        );
    }
    text
}

/// The subject and the body of a text that [`render`] made. `None`: it made no such text.
pub fn subject_and_body(text: &str) -> Option<(&str, &str)> {
    let (head, body) = text.split_once("\n\n")?;
    let is_of_mail = |line: &str| {
        let name = line.split_once(": ").map_or("", |(name, _)| name);
        ["From", "To", "Cc", "Date", "Subject"].contains(&name)
    };
    let subject = head.lines().find_map(|line| line.strip_prefix("Subject: ")).unwrap_or_default();
    head.lines().all(is_of_mail).then_some((subject, body))
}

fn line(text: &mut String, name: &str, value: &str) {
    if !value.is_empty() {
        let _ = writeln!(text, "{name}: {value}");
    }
}

fn people(people: &[&Person]) -> String {
    let mut named: Vec<String> = people
        .iter()
        .take(NAMED)
        .map(|person| match person.name.as_deref().map(one_line).filter(|name| !name.is_empty()) {
            Some(name) => format!("{name} <{}>", person.address),
            None => person.address.clone(),
        })
        .collect();
    if people.len() > NAMED {
        named.push(format!("and {} more", people.len() - NAMED));
    }
    named.join(", ")
}

/// `text` on one line, so that a header's value cannot begin another header.
fn one_line(text: &str) -> String {
    let plain: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    plain.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// `body` without the quotation at its end. Returns the whole body if the quotation is unclear, or if nothing
/// else remains.
fn without_quote(body: &str) -> &str {
    let lines: Vec<(usize, &str)> = {
        let mut at = 0;
        body.split_inclusive('\n')
            .map(|line| {
                let start = at;
                at += line.len();
                (start, line.trim())
            })
            .collect()
    };
    let is_quoted = |line: &str| line.is_empty() || line.starts_with('>');
    let mut first = lines.len();
    while first > 0 && is_quoted(lines[first - 1].1) {
        first -= 1;
    }
    if !lines[first..].iter().any(|(_, line)| line.starts_with('>')) {
        return body;
    }
    // One or two lines that introduce the quotation: "On … Ann wrote:".
    let introduced = (1..=2).find(|count| {
        first >= *count
            && lines[first - 1].1.ends_with(':')
            && lines[first - *count..first].iter().all(|(_, line)| !line.is_empty())
            && {
                let whole: String = lines[first - *count..first].iter().map(|(_, line)| *line).collect();
                whole.contains(|c: char| c.is_ascii_digit())
                    && (whole.contains('@')
                        || ["On ", "Am ", "Le ", "El ", "Il ", "Op ", "Den "]
                            .iter()
                            .any(|on| whole.starts_with(on)))
            }
    });
    let Some(introduced) = introduced else { return body };
    let kept = body[..lines[first - introduced].0].trim_end();
    if kept.is_empty() { body } else { kept }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mail::AttachmentFacts;

    #[test]
    fn a_mail_reads_alone() {
        let facts = MailFacts {
            from: Some(Person { name: Some("Ann\r\nTo: eve".into()), address: "ann@example.com".into() }),
            to: vec![Person { name: None, address: "support@example.org".into() }],
            date: Some("2026-01-31T12:00:00Z".into()),
            subject: "Lunch\nBcc: eve".into(),
            body: "Shall we?\n".into(),
            attachments: vec![AttachmentFacts {
                file_name: "menu.txt".into(),
                media_type: "text/plain".into(),
                bytes: 12,
                left_out: false,
            }],
            ..MailFacts::default()
        };
        assert_eq!(
            render(&facts, false),
            "From: Ann To: eve <ann@example.com>\nTo: support@example.org\nDate: 2026-01-31T12:00:00Z\nSubject: Lunch Bcc: \
             eve\n\nShall we?\n\nAttachments:\n1. menu.txt (text/plain, 12 bytes)"
        );
        assert_eq!(
            subject_and_body(&render(&facts, false)),
            Some(("Lunch Bcc: eve", "Shall we?\n\nAttachments:\n1. menu.txt (text/plain, 12 bytes)"))
        );
        assert_eq!(subject_and_body("Shall we?\n\nSubject: lunch"), None);
    }

    #[test]
    fn a_quotation_at_the_end_goes_and_every_other_stays() {
        let quoted = "On Mon, 5 Jan 2026 at 10:00, Ann <ann@example.com> wrote:\n> Shall we?\n>\n> Ann\n";
        for (body, kept) in [
            (format!("Yes.\n\n{quoted}"), "Yes."),
            (
                String::from(
                    "Yes.\n\nOn Mon, 5 Jan 2026 at 10:00,\nAnn <ann@example.com> wrote:\n\n> Shall we?\n",
                ),
                "Yes.",
            ),
            ("Ja.\n\nAm 05.01.26 um 10:00 schrieb Ann:\n> Shall we?".to_owned(), "Ja."),
        ] {
            assert_eq!(without_quote(&body), kept);
        }
        for whole in [
            "Yes.\n",
            "> Shall we?\n\nYes.\n",
            "He said:\n> x\n",
            "Yes.\n> Shall we?\n",
            quoted,
            "",
            "> only\n",
        ] {
            assert_eq!(without_quote(whole), whole);
        }
    }
}
