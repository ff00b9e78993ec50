//! A tool that runs git in the session's files, as a coding agent's would. It is safe to repeat: its files are put back first.

use async_trait::async_trait;
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
        command.current_dir(&call.workspace.path).args(arguments).env("GIT_CONFIG_NOSYSTEM", "1");
        for (name, value) in [
            ("GIT_CONFIG_GLOBAL", "/dev/null"),
            ("GIT_AUTHOR_NAME", "Ann"),
            ("GIT_AUTHOR_EMAIL", "ann@example.com"),
            ("GIT_AUTHOR_DATE", "2026-01-01T00:00:00Z"),
            ("GIT_COMMITTER_NAME", "Ann"),
            ("GIT_COMMITTER_EMAIL", "ann@example.com"),
            ("GIT_COMMITTER_DATE", "2026-01-01T00:00:00Z"),
        ] {
            command.env(name, value);
        }
        let output = command.output().await.map_err(|error| ToolError::new(error.to_string()))?;
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        if output.status.success() { Ok(ToolOutput::text(text)) } else { Err(ToolError::new(text)) }
    }
}
