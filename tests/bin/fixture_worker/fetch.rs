//! A tool that fetches what the model names, through the call's own door to the web.

use async_trait::async_trait;
use serde_json::{Value, json};
use wakeful::tool::{Effect, Tool, ToolCallContext, ToolDefinition, ToolError, ToolOutput};

pub struct Fetch;

#[async_trait]
impl Tool for Fetch {
    fn definition(&self) -> ToolDefinition {
        let parameters = json!({
            "type": "object",
            "properties": {"url": {"type": "string"}},
            "required": ["url"],
            "additionalProperties": false,
        });
        ToolDefinition::new("fetch", "Fetches a page.", parameters, Effect::Pure)
    }

    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let page = call.web.get(arguments["url"].as_str().unwrap_or_default()).await?;
        Ok(ToolOutput::text(format!("{}: {}", page.status, page.text())))
    }
}
