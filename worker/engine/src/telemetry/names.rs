//! All span and attribute names, in one place, because the conventions still change.
//!
//! The `gen_ai.*` names are those of `model/gen-ai/` in `open-telemetry/semantic-conventions-genai` at commit
//! `e8fc5751506258db1459d1bde47994e01dee922e`, with one exception from later versions:
//! [`USAGE_CACHE_WRITE_INPUT_TOKENS`] was `gen_ai.usage.cache_creation.input_tokens` there. `messaging.*` and
//! `error.type` are those of `open-telemetry/semantic-conventions`.
//!
//! A span whose name has a variable part gets a constant name and the field `otel.name`:
//!
//! ```
//! use wakeful_engine::telemetry::names;
//! let model = "claude-sonnet-5";
//! let span = tracing::info_span!(
//!     "chat",
//!     "otel.name" = names::chat(model),
//!     "otel.kind" = names::KIND_CLIENT,
//!     { names::OPERATION_NAME } = "chat",
//!     { names::REQUEST_MODEL } = model,
//! );
//! # drop(span);
//! ```

/// A step is put into the queue.
pub const SEND_STEP: &str = "send step";
/// One attempt at a step, from its claim to its end.
pub const PROCESS_STEP: &str = "process step";
/// The step's commit.
pub const COMMIT_STEP: &str = "commit step";

/// A run of `agent`.
pub fn invoke_agent(agent: &str) -> String {
    format!("invoke_agent {agent}")
}

/// One call of `model`.
pub fn chat(model: &str) -> String {
    format!("chat {model}")
}

/// One call of `tool`.
pub fn execute_tool(tool: &str) -> String {
    format!("execute_tool {tool}")
}

/// One attempt to send a message through `channel`.
pub fn deliver(channel: &str) -> String {
    format!("deliver {channel}")
}

/// Values of the field `otel.kind`.
pub const KIND_PRODUCER: &str = "producer";
pub const KIND_CONSUMER: &str = "consumer";
pub const KIND_CLIENT: &str = "client";
pub const KIND_INTERNAL: &str = "internal";

pub const CONVERSATION_ID: &str = "gen_ai.conversation.id";
pub const SESSION_ID: &str = "session.id";
pub const RUN_ID: &str = "run.id";
pub const STEP_NUMBER: &str = "step.number";
pub const STEP_ATTEMPT: &str = "step.attempt";
pub const JOB_ID: &str = "job.id";
pub const DELIVERY_ID: &str = "delivery.id";
pub const COST_MICROS: &str = "wakeful.cost_micros";

pub const OPERATION_NAME: &str = "gen_ai.operation.name";
pub const OPERATION_CHAT: &str = "chat";
pub const OPERATION_EXECUTE_TOOL: &str = "execute_tool";
pub const OPERATION_INVOKE_AGENT: &str = "invoke_agent";
pub const AGENT_NAME: &str = "gen_ai.agent.name";
pub const PROVIDER_NAME: &str = "gen_ai.provider.name";
pub const REQUEST_MODEL: &str = "gen_ai.request.model";
pub const REQUEST_STREAM: &str = "gen_ai.request.stream";
pub const RESPONSE_FINISH_REASONS: &str = "gen_ai.response.finish_reasons";
/// Seconds, as a float.
pub const RESPONSE_TIME_TO_FIRST_CHUNK: &str = "gen_ai.response.time_to_first_chunk";
/// All input, cache reads and writes included.
pub const USAGE_INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
pub const USAGE_OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
pub const USAGE_CACHE_READ_INPUT_TOKENS: &str = "gen_ai.usage.cache_read.input_tokens";
pub const USAGE_CACHE_WRITE_INPUT_TOKENS: &str = "gen_ai.usage.cache_write.input_tokens";
pub const TOOL_NAME: &str = "gen_ai.tool.name";
pub const TOOL_CALL_ID: &str = "gen_ai.tool.call.id";
pub const TOOL_TYPE: &str = "gen_ai.tool.type";
pub const TOOL_TYPE_FUNCTION: &str = "function";

pub const ERROR_TYPE: &str = "error.type";
pub const MESSAGING_SYSTEM: &str = "messaging.system";
/// The queue is a table in Postgres.
pub const MESSAGING_SYSTEM_WAKEFUL: &str = "wakeful";
pub const MESSAGING_OPERATION_NAME: &str = "messaging.operation.name";
pub const MESSAGING_OPERATION_TYPE: &str = "messaging.operation.type";
pub const MESSAGING_SEND: &str = "send";
pub const MESSAGING_PROCESS: &str = "process";
pub const MESSAGING_DESTINATION_NAME: &str = "messaging.destination.name";
