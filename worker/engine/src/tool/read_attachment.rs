//! `read_attachment`: reads a file that came with a message of the session.

use super::{Tool, ToolCallContext, ToolError, ToolOutput, paging, parse_arguments};
use async_trait::async_trait;
use serde::Deserialize;
use serde_json::Value;
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::effect::Effect;

/// Reads a part of an attachment. Pure: it reads the session's own messages and blobs.
pub struct ReadAttachment;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Arguments {
    file: String,
    #[serde(default)]
    offset: usize,
    bytes: Option<usize>,
}

#[async_trait]
impl Tool for ReadAttachment {
    fn definition(&self) -> ToolDefinition {
        ToolDefinition::new(
            "read_attachment",
            "Read a text file that came with a message of this conversation, or a part of it.",
            paging::parameters(
                "file",
                "The file's name, or its number among all files of this conversation: \"1\" is the first.",
            ),
            Effect::Pure,
        )
    }

    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let Arguments { file, offset, bytes } = parse_arguments(arguments)?;
        let files = call.outputs.attachments().await?;
        // Take the newest file of that name, because a file sent again replaces the old one. A name wins over
        // a number.
        let named = files.iter().rposition(|one| one.file_name == file);
        let numbered = || file.trim().parse::<usize>().ok()?.checked_sub(1).filter(|at| *at < files.len());
        let Some(at) = named.or_else(numbered) else {
            let known: Vec<String> =
                files.iter().zip(1..).map(|(one, number)| format!("{number}. {}", one.file_name)).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            let shown: String = file.chars().take(80).collect();
            return Err(ToolError::new(format!(
                "There is no file {shown:?} here. The files of this conversation: {known}."
            )));
        };
        let file = &files[at];
        paging::check_offset(format_args!("{:?}", file.file_name), offset, file.bytes)?;
        let part = call.outputs.attachment(file, offset, paging::amount(bytes)).await?;
        let Some(part) = part.filter(|part| !looks_binary(&part.text)) else {
            return Err(ToolError::new(format!(
                "{:?} ({}) is no text and cannot be read here. Ask its sender what it says.",
                file.file_name, file.media_type
            )));
        };
        let shown = paging::shown(&part, &format!("{}: bytes", file.file_name), file.bytes);
        Ok(ToolOutput::text(shown).without_nul())
    }
}

fn looks_binary(text: &str) -> bool {
    text.is_empty()
        || text.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\r' | '\t' | '\u{c}' | '\u{1b}'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::Outputs;
    use crate::tool::files::tests::context;
    use serde_json::json;
    use std::path::Path;
    use std::sync::Arc;
    use wakeful_store::outputs::OutputSlice;
    use wakeful_workflow::id::CallId;
    use wakeful_workflow::record::Attachment;

    /// Two files of the same name, and a binary one.
    #[derive(Debug)]
    struct Three;

    const TEXTS: [&str; 3] = ["old", "0123456789", "\u{1}\0"];

    #[async_trait]
    impl Outputs for Three {
        async fn read(&self, _: &CallId, _: usize, _: usize) -> Result<Option<OutputSlice>, ToolError> {
            Ok(None)
        }

        async fn attachments(&self) -> Result<Vec<Attachment>, ToolError> {
            let names = ["a.txt", "a.txt", "b.bin"].into_iter().zip(TEXTS);
            Ok(names
                .map(|(name, text)| Attachment {
                    file_name: name.into(),
                    media_type: "text/plain".into(),
                    bytes: text.len(),
                    sha256: text.into(),
                })
                .collect())
        }

        async fn attachment(
            &self,
            file: &Attachment,
            offset: usize,
            bytes: usize,
        ) -> Result<Option<OutputSlice>, ToolError> {
            let text = file.sha256[offset..(offset + bytes).min(file.bytes)].to_owned();
            Ok(Some(OutputSlice { text, offset, bytes: file.bytes }))
        }
    }

    async fn read(arguments: Value) -> Result<String, String> {
        let context = ToolCallContext { outputs: Arc::new(Three), ..context(Path::new("none"), false) };
        let read = ReadAttachment.call(&context, arguments).await;
        read.map(|output| output.content).map_err(|error| error.text)
    }

    #[tokio::test]
    async fn a_file_is_read_by_its_name_or_its_number() {
        assert_eq!(
            read(json!({"file": "a.txt", "offset": 2, "bytes": 3})).await.unwrap(),
            "234\n\n[a.txt: bytes 2 to 5 of 10; read on at offset 5]"
        );
        assert_eq!(read(json!({"file": "1"})).await.unwrap(), "old\n\n[a.txt: bytes 0 to 3 of 3]");
    }

    #[tokio::test]
    async fn what_cannot_be_read_is_said() {
        for (arguments, said) in [
            (json!({"file": "c.txt"}), "1. a.txt, 2. a.txt, 3. b.bin"),
            (json!({"file": "0"}), "There is no file"),
            (json!({"file": "4"}), "There is no file"),
            (json!({"file": "b.bin"}), "no text"),
            (json!({"file": "a.txt", "offset": 10}), "has 10 bytes"),
        ] {
            let error = read(arguments).await.unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
