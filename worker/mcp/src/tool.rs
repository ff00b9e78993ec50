//! A tool of a server, as a tool of Wakeful.

use crate::connection::Connection;
use crate::content;
use crate::failure::CallFailure;
use crate::pinned::PinnedTool;
use async_trait::async_trait;
use serde_json::Value;
use std::sync::Arc;
use wakeful_engine::tool::{Tool, ToolCallContext, ToolError, ToolOutput};
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::effect::Effect;

/// One pinned tool, and the connection that its calls share with the server's other tools.
#[derive(Debug)]
pub(crate) struct McpTool {
    pub pinned: PinnedTool,
    pub connection: Arc<Connection>,
}

#[async_trait]
impl Tool for McpTool {
    fn definition(&self) -> ToolDefinition {
        let PinnedTool { name, description, parameters, effect, .. } = self.pinned.clone();
        ToolDefinition::new(name, description, parameters, effect)
    }

    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let Value::Object(arguments) = arguments else {
            return Err(ToolError::new("The arguments are no object."));
        };
        let key = call.idempotency_key();
        let first = self.connection.call(&self.pinned.calls, arguments.clone(), &key).await;
        let may_repeat = match &first {
            // The server, or what is between, may have closed an old connection.
            Err(CallFailure::NotSent(_)) => true,
            // The worker itself repeats an idempotent call whose outcome is unknown.
            Err(CallFailure::Unknown(_)) => self.pinned.effect == Effect::Pure,
            Ok(_) | Err(CallFailure::Refused(_)) => false,
        };
        let ended = match (may_repeat, first) {
            (true, first) => match (self.connection.call(&self.pinned.calls, arguments, &key).await, first) {
                // What the second attempt did not do, the first may have done.
                (Err(_), Err(CallFailure::Unknown(why))) => Err(CallFailure::Unknown(why)),
                (second, _) => second,
            },
            (false, first) => first,
        };
        let server = self.connection.name();
        match ended {
            Ok(result) => content::output(result),
            Err(CallFailure::Refused(why)) => Err(ToolError::new(why)),
            Err(CallFailure::NotSent(why)) => Err(ToolError::new(format!(
                "The server {server} of this tool cannot be reached, so nothing was done: {why}."
            ))),
            Err(CallFailure::Unknown(why)) => Err(ToolError::outcome_unknown(format!(
                "The server {server} of this tool did not answer: {why}."
            ))),
        }
    }

    async fn close(&self) {
        self.connection.close().await;
    }
}
