//! `ask_user`: puts a question to the user and pauses the run.

use super::{Tool, ToolCallContext, ToolError, ToolOutput, parse_arguments};
use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Value, json};
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::effect::Effect;

/// Asks the user a question. The run waits for the answer, which becomes this call's result. `ask_expires_s`
/// limits the wait, if it is set.
pub struct AskUser;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Arguments {
    question: String,
}

#[async_trait]
impl Tool for AskUser {
    fn definition(&self) -> ToolDefinition {
        ToolDefinition::new(
            "ask_user",
            "Ask the user one question and wait for the answer, which is this call's result. Use it \
                          when you cannot go on without knowing.",
            json!({
                "type": "object",
                "properties": {
                    "question": {
                        "type": "string",
                        "description": "The question, complete in itself.",
                        "minLength": 1,
                        "maxLength": 4000,
                    },
                },
                "required": ["question"],
                "additionalProperties": false,
            }),
            Effect::Pure,
        )
    }

    async fn call(&self, _: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let Arguments { question } = parse_arguments(arguments)?;
        let question = question.trim();
        if question.is_empty() {
            return Err(ToolError::new("The question is empty. Ask it in a full sentence."));
        }
        Ok(ToolOutput { question: Some(question.to_owned()), ..ToolOutput::default() }.without_nul())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::files::tests::context;
    use std::path::Path;

    async fn ask(question: &str) -> Result<ToolOutput, ToolError> {
        AskUser.call(&context(Path::new("none"), false), json!({"question": question})).await
    }

    #[tokio::test]
    async fn a_question_pauses_the_run() {
        let output = ask("  Which\0 colour? ").await.unwrap();
        assert_eq!(output.question.as_deref(), Some("Which\u{fffd} colour?"));
        assert_eq!(output.content, "");
    }

    #[tokio::test]
    async fn a_blank_question_is_refused() {
        assert!(ask(" \n ").await.unwrap_err().to_string().contains("empty"));
    }
}
