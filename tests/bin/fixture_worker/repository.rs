//! A tool that runs git in the session's files, as a coding agent's would. It is safe to repeat: its files are put back first.

#[path = "../../support/git_identity.rs"]
mod git_identity;

use async_trait::async_trait;
use git_identity::ENVIRONMENT;
use serde_json::{Value, json};
use wakeful::tool::{Effect, FileUse, Tool, ToolCallContext, ToolDefinition, ToolError, ToolOutput};

pub struct RunGit;

#[async_trait]
impl Tool for RunGit {
    fn definition(&self) -> ToolDefinition {
        let parameters = json!({
            "type": "object",
            "properties": {"arguments": {"type": "array", "items": {"type": "string"}}},
            "required": ["arguments"],
            "additionalProperties": false,
        });
        ToolDefinition::new("run_git", "Runs git in the workspace.", parameters, Effect::Idempotent)
    }

    fn file_use(&self) -> FileUse {
        FileUse::Writes
    }

    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let arguments = arguments["arguments"].as_array().into_iter().flatten().filter_map(Value::as_str);
        std::fs::create_dir_all(&call.workspace.path).map_err(|error| ToolError::new(error.to_string()))?;
        let mut command = tokio::process::Command::new("git");
        command.current_dir(&call.workspace.path).args(arguments).envs(ENVIRONMENT);
        let output = command.output().await.map_err(|error| ToolError::new(error.to_string()))?;
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        if output.status.success() { Ok(ToolOutput::text(text)) } else { Err(ToolError::new(text)) }
    }
}
