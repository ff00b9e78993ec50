//! A tool of a program that asks people a question of its own: `ask_user` asks what the model says, this one does not.

use async_trait::async_trait;
use serde_json::{Value, json};
use wakeful::tool::{Effect, Tool, ToolCallContext, ToolDefinition, ToolError, ToolOutput};

/// Asks whether an order is to be paid, with the price that this program knows. The model's words are not what people read.
pub struct Confirm;

#[async_trait]
impl Tool for Confirm {
    fn definition(&self) -> ToolDefinition {
        ToolDefinition::new(
            "confirm",
            "Asks the customer whether an order is to be paid.",
            json!({
                "type": "object",
                "properties": {"order": {"type": "string"}, "question": {"type": "string"}},
                "required": ["order"],
                "additionalProperties": false,
            }),
            Effect::Pure,
        )
    }

    async fn call(&self, _: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let order = arguments["order"].as_str().unwrap_or_default();
        Ok(ToolOutput::question(format!("Pay 40 euros for order {order}?")))
    }
}
