//! A worker with one more tool.
//!
//! `cargo run -p wakeful --example tool -- dev` starts it with a Postgres of its own. An agent uses the tool when the
//! `tools` of its configuration name `charge`. `wakeful dev` without a configuration gives every tool to the
//! default agent.

use serde_json::{Value, json};
use wakeful::App;
use wakeful::tool::{Effect, Tool, ToolCallContext, ToolDefinition, ToolError, ToolOutput};

/// Charges a card through a payment service that knows idempotency keys.
struct Charge;

#[async_trait::async_trait]
impl Tool for Charge {
    fn definition(&self) -> ToolDefinition {
        let parameters = json!({
            "type": "object",
            "properties": {"cents": {"type": "integer", "minimum": 1}},
            "required": ["cents"],
            "additionalProperties": false,
        });
        // A service without idempotency keys needs `Effect::Guarded`: Wakeful then runs each call at most once.
        ToolDefinition::new("charge", "Charges the customer's card.", parameters, Effect::Idempotent)
    }

    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let cents = arguments["cents"].as_i64().ok_or_else(|| ToolError::new("Give the amount in cents."))?;
        // After a crash the call runs again with the same id. The service charges each key once.
        let receipt = pay(&call.idempotency_key(), cents);
        Ok(ToolOutput::text(format!("Charged {cents} cents, receipt {receipt}.")))
    }
}

/// Stands for the request to the payment service.
fn pay(idempotency_key: &str, _cents: i64) -> String {
    format!("rcpt_{idempotency_key}")
}

fn main() -> std::process::ExitCode {
    App::new().tool(Charge).main()
}
