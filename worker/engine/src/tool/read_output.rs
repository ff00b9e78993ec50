//! `read_output`: reads more of the output of an earlier call, if the conversation shows only a part of it.

use super::{Outputs, Tool, ToolCallContext, ToolError, ToolOutput, paging, parse_arguments};
use async_trait::async_trait;
use serde::Deserialize;
use serde_json::Value;
use std::fmt;
use tracing::warn;
use wakeful_store::Store;
use wakeful_store::outputs::OutputSlice;
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::id::{CallId, SessionId};
use wakeful_workflow::record::Attachment;

/// Reads a part of an earlier output. Pure: it reads the session's own messages and blobs.
pub struct ReadOutput;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Arguments {
    call_id: String,
    #[serde(default)]
    offset: usize,
    bytes: Option<usize>,
}

#[async_trait]
impl Tool for ReadOutput {
    fn definition(&self) -> ToolDefinition {
        ToolDefinition::new(
            "read_output",
            "Read a part of what an earlier tool call of this conversation gave, where only its beginning \
             and end, or nothing of it, is shown.",
            paging::parameters("call_id", "The id of the earlier call."),
            Effect::Pure,
        )
    }

    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let Arguments { call_id, offset, bytes } = parse_arguments(arguments)?;
        let call_id = CallId::from(call_id);
        let Some(slice) = call.outputs.read(&call_id, offset, paging::amount(bytes)).await? else {
            return Err(ToolError::new(format!(
                "No call of this conversation with the id {call_id:?} has a result. Take the id as it is shown there."
            )));
        };
        paging::check_offset("The output", offset, slice.bytes)?;
        Ok(ToolOutput::text(paging::shown(&slice, "Bytes", slice.bytes)))
    }
}

/// The outputs of a session, read from the database.
pub struct StoredOutputs {
    store: Store,
    session_id: SessionId,
}

impl StoredOutputs {
    pub fn new(store: Store, session_id: SessionId) -> Self {
        StoredOutputs { store, session_id }
    }
}

impl fmt::Debug for StoredOutputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredOutputs").field("session_id", &self.session_id).finish_non_exhaustive()
    }
}

#[async_trait]
impl Outputs for StoredOutputs {
    async fn read(
        &self,
        call_id: &CallId,
        offset: usize,
        bytes: usize,
    ) -> Result<Option<OutputSlice>, ToolError> {
        let read = self.store.tool_output(&self.session_id, call_id, offset, bytes).await;
        read.map_err(|error| {
            warn!(session.id = %self.session_id, call.id = %call_id, %error, "An output could not be read");
            ToolError::new("The output cannot be read now. Try again.".to_owned())
        })
    }

    async fn attachments(&self) -> Result<Vec<Attachment>, ToolError> {
        let read = self.store.attachments(&self.session_id).await;
        read.map_err(|error| {
            warn!(session.id = %self.session_id, %error, "A session's attachments could not be read");
            ToolError::new("The files cannot be read now. Try again.".to_owned())
        })
    }

    async fn attachment(
        &self,
        file: &Attachment,
        offset: usize,
        bytes: usize,
    ) -> Result<Option<OutputSlice>, ToolError> {
        let read = self.store.attachment(&self.session_id, &file.sha256, offset, bytes).await;
        read.map_err(|error| {
            warn!(session.id = %self.session_id, blob = %file.sha256, %error, "An attachment could not be read");
            ToolError::new("The file cannot be read now. Try again.".to_owned())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::files::tests::context;
    use serde_json::json;
    use std::path::Path;
    use std::sync::Arc;

    /// One output of ten bytes, that of the call `call_1`.
    #[derive(Debug)]
    struct Ten;

    #[async_trait]
    impl Outputs for Ten {
        async fn read(
            &self,
            call_id: &CallId,
            offset: usize,
            bytes: usize,
        ) -> Result<Option<OutputSlice>, ToolError> {
            let start = offset.min(10);
            let text = "0123456789"[start..(start + bytes).min(10)].to_owned();
            Ok((call_id.as_str() == "call_1").then_some(OutputSlice { text, offset: start, bytes: 10 }))
        }
    }

    async fn read(arguments: Value) -> Result<String, String> {
        let context = ToolCallContext { outputs: Arc::new(Ten), ..context(Path::new("none"), false) };
        let read = ReadOutput.call(&context, arguments).await;
        read.map(|output| output.content).map_err(|error| error.text)
    }

    #[tokio::test]
    async fn a_part_says_where_it_is_and_where_to_read_on() {
        let part = read(json!({"call_id": "call_1", "offset": 2, "bytes": 3})).await.unwrap();
        assert_eq!(part, "234\n\n[Bytes 2 to 5 of 10; read on at offset 5]");
        assert_eq!(read(json!({"call_id": "call_1"})).await.unwrap(), "0123456789\n\n[Bytes 0 to 10 of 10]");
    }

    #[tokio::test]
    async fn what_is_not_there_is_said() {
        assert!(read(json!({"call_id": "call_2"})).await.unwrap_err().contains("\"call_2\""));
        assert!(read(json!({"call_id": "call_1", "offset": 10})).await.unwrap_err().contains("10 bytes"));
    }
}
