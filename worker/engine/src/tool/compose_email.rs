//! `compose_email`: puts an email into the outbox.

use super::{Tool, ToolCallContext, ToolError, ToolOutput, parse_arguments};
use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Value, json};
use wakeful_config::address::is_address;
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::effect::Effect;

const MAX_RECIPIENTS: usize = 50;
const MAX_SUBJECT_CHARS: usize = 500;
const MAX_BODY_BYTES: usize = 1024 * 1024;

/// Composes an email but does not send it. The step's commit turns the call's details (`sentEmail`) into a
/// delivery, which the deliverer sends. So a call that runs again before its commit sends nothing twice, and
/// the tool is pure.
pub struct ComposeEmail;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Arguments {
    to: Vec<String>,
    #[serde(default)]
    cc: Vec<String>,
    subject: String,
    body: String,
}

#[async_trait]
impl Tool for ComposeEmail {
    fn definition(&self) -> ToolDefinition {
        let addresses = |minimum: usize, description: &str| {
            json!({
                "type": "array",
                "items": {"type": "string"},
                "minItems": minimum,
                "maxItems": MAX_RECIPIENTS,
                "description": description,
            })
        };
        ToolDefinition::new(
            "compose_email",
            "Queue an email. It is sent soon after this turn and cannot be taken back.",
            json!({
                "type": "object",
                "properties": {
                    "to": addresses(1, "Plain addresses such as \"ann@example.com\", without display names."),
                    "cc": addresses(0, "Plain addresses that get a copy."),
                    "subject": {"type": "string", "minLength": 1, "maxLength": MAX_SUBJECT_CHARS},
                    "body": {"type": "string", "minLength": 1, "description": "Plain text."},
                },
                "required": ["to", "subject", "body"],
                "additionalProperties": false,
            }),
            Effect::Pure,
        )
    }

    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        compose(call, parse_arguments(arguments)?).map(ToolOutput::without_nul)
    }
}

fn compose(call: &ToolCallContext, arguments: Arguments) -> Result<ToolOutput, ToolError> {
    let mut seen = Vec::new();
    let to = recipients("to", &arguments.to, &mut seen)?;
    let cc = recipients("cc", &arguments.cc, &mut seen)?;
    if to.is_empty() {
        return Err(ToolError::new("The email has no recipient. Give at least one address in `to`."));
    }
    if seen.len() > MAX_RECIPIENTS {
        return Err(ToolError::new(format!(
            "The email has {} recipients; at most {MAX_RECIPIENTS} are allowed. Send it to fewer.",
            seen.len()
        )));
    }
    if let Some(stranger) = seen.iter().find(|address| !call.may_write_to(address)) {
        return Err(ToolError::new(format!(
            "Mail to {stranger} is not allowed here, and nothing was sent. Whom this agent may write to is in its \
             configuration (`recipients`) and cannot be changed from within the conversation."
        )));
    }
    let subject = arguments.subject.trim();
    if subject.is_empty() {
        return Err(ToolError::new("The subject is empty. Say in a few words what the email is about."));
    }
    if subject.chars().count() > MAX_SUBJECT_CHARS {
        return Err(ToolError::new(format!(
            "The subject is longer than {MAX_SUBJECT_CHARS} characters. Shorten it."
        )));
    }
    // A line break would end the header, and the rest would be read as further headers.
    if subject.chars().any(char::is_control) {
        return Err(ToolError::new(
            "The subject has a line break or another control character. Use one line.",
        ));
    }
    if arguments.body.trim().is_empty() {
        return Err(ToolError::new("The body is empty. Write the text of the email."));
    }
    if arguments.body.len() > MAX_BODY_BYTES {
        return Err(ToolError::new(format!("The body is larger than {MAX_BODY_BYTES} bytes. Shorten it.")));
    }
    let content = format!("The email to {} is queued and will be sent soon.", seen.join(", "));
    let details =
        json!({"type": "sentEmail", "to": to, "cc": cc, "subject": subject, "body": arguments.body});
    Ok(ToolOutput { content, details: Some(details), question: None })
}

/// Returns the addresses of one field. `seen` holds the recipients of earlier fields, which are left out.
fn recipients(field: &str, addresses: &[String], seen: &mut Vec<String>) -> Result<Vec<String>, ToolError> {
    let mut kept = Vec::new();
    for address in addresses {
        let address = address.trim();
        let plain = !address.chars().any(|c| c.is_control() || c.is_whitespace());
        if !plain || !is_address(address) {
            let shown: String = address.chars().take(80).collect();
            return Err(ToolError::new(format!(
                "{shown:?} in `{field}` is no email address. Give plain addresses such as \"ann@example.com\"."
            )));
        }
        if !seen.iter().any(|other: &String| other.eq_ignore_ascii_case(address)) {
            seen.push(address.to_owned());
            kept.push(address.to_owned());
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::files::tests::context;
    use std::path::Path;

    async fn call(arguments: Value) -> Result<ToolOutput, ToolError> {
        ComposeEmail.call(&context(Path::new("none"), false), arguments).await
    }

    async fn refusal(to: &[&str], subject: &str, body: &str) -> String {
        call(json!({"to": to, "subject": subject, "body": body})).await.unwrap_err().to_string()
    }

    #[tokio::test]
    async fn an_email_is_queued_with_its_details() {
        let output = call(json!({
            "to": ["ann@example.com"], "cc": ["bob@example.com"], "subject": " Hello ", "body": "Hi\n\nAnn",
        }))
        .await
        .unwrap();
        assert_eq!(
            output.content,
            "The email to ann@example.com, bob@example.com is queued and will be sent soon."
        );
        assert_eq!(
            output.details,
            Some(json!({
                "type": "sentEmail", "to": ["ann@example.com"], "cc": ["bob@example.com"],
                "subject": "Hello", "body": "Hi\n\nAnn",
            }))
        );
        assert_eq!(output.question, None);
    }

    #[tokio::test]
    async fn a_recipient_gets_an_email_once() {
        let output = call(json!({
            "to": ["ann@example.com", "ANN@example.com"], "cc": ["ann@example.com", "bob@example.com"],
            "subject": "s", "body": "b",
        }))
        .await
        .unwrap();
        let details = output.details.unwrap();
        assert_eq!(details["to"], json!(["ann@example.com"]));
        assert_eq!(details["cc"], json!(["bob@example.com"]));
    }

    #[tokio::test]
    async fn what_is_no_plain_address_is_refused() {
        for hostile in [
            "",
            "ann",
            "ann@",
            "@example.com",
            "Ann <ann@example.com>",
            "ann@example.com, bob@example.com",
            "ann@example.com\r\nBcc: bob@example.com",
            "ann@example.com\0",
            "a b@example.com",
        ] {
            let error = refusal(&[hostile], "s", "b").await;
            assert!(error.contains("no email address"), "{hostile:?}: {error}");
        }
        assert!(refusal(&[&"x".repeat(100_000)], "s", "b").await.len() < 500);
    }

    #[tokio::test]
    async fn a_subject_cannot_bring_headers() {
        let error = refusal(&["ann@example.com"], "Hi\r\nBcc: bob@example.com", "b").await;
        assert!(error.contains("line break"), "{error}");
        assert!(refusal(&["ann@example.com"], "a\0b", "b").await.contains("control"));
    }

    #[tokio::test]
    async fn empty_and_oversize_parts_are_refused() {
        assert!(refusal(&[], "s", "b").await.contains("no recipient"));
        assert!(refusal(&["a@b.de"], " ", "b").await.contains("subject is empty"));
        assert!(refusal(&["a@b.de"], "s", "\n").await.contains("body is empty"));
        assert!(refusal(&["a@b.de"], &"s".repeat(501), "b").await.contains("longer"));
        assert!(refusal(&["a@b.de"], "s", &"b".repeat(MAX_BODY_BYTES + 1)).await.contains("larger"));
        let many: Vec<String> = (0..51).map(|n| format!("a{n}@example.com")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(refusal(&many, "s", "b").await.contains("at most 50"));
    }

    #[tokio::test]
    async fn a_nul_in_the_body_is_replaced() {
        let output = call(json!({"to": ["a@b.de"], "subject": "s", "body": "x\0y"})).await.unwrap();
        assert_eq!(output.details.unwrap()["body"], json!("x\u{fffd}y"));
    }
}
