//! Tests: both protocols against a server that others wrote.

use super::NoDeltas;
use super::faults::{endpoint, models};
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::context::{Context, Message};
use wakeful_workflow::effect::Effect;
use wakeful_workflow::record::{Block, Role, ToolResult, text_of};

#[tokio::test]
#[ignore = "wants an aimock that plays a tool loop; AIMOCK_URL names it"]
async fn a_loop_of_two_tool_calls_ends_in_text() {
    let url = std::env::var("AIMOCK_URL").expect("AIMOCK_URL is set");
    for (which, base_url) in [url.clone(), format!("{url}/v1")].iter().enumerate() {
        let endpoint = endpoint(base_url);
        let model = models(&endpoint).into_iter().nth(which).unwrap();
        let tool = ToolDefinition {
            name: "current_time".to_owned(),
            description: "Tells the time.".to_owned(),
            parameters: serde_json::json!({"type": "object"}),
            effect: Effect::Pure,
        };
        let content = vec![Block::Text { text: "Please tick twice.".to_owned() }];
        let messages = vec![Message { role: Role::User, content }];
        let mut context = Context { system: "Be exact.".to_owned(), tools: vec![tool], messages };
        let mut asked = Vec::new();
        let last = loop {
            let reply = model.call(&model.request(&context), &mut NoDeltas).await.unwrap();
            context.messages.push(Message { role: Role::Assistant, content: reply.content.clone() });
            if !reply.has_tool_calls() {
                break reply;
            }
            for block in reply.content {
                if let Block::ToolCall(call) = block {
                    asked.push(call.call_id.to_string());
                    let (call_id, name) = (call.call_id, call.name);
                    let content = "23:05".to_owned();
                    let result = ToolResult { call_id, name, content, is_error: false, details: None };
                    context
                        .messages
                        .push(Message { role: Role::Tool, content: vec![Block::ToolResult(result)] });
                }
            }
        };
        assert_eq!(asked, ["call_one", "call_two"]);
        assert_eq!(text_of(&last.content), "It is late.");
        assert!(last.usage.output_tokens > 0);
    }
}
