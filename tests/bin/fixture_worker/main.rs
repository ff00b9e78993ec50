//! The worker that the tests start and kill: `wakeful` with more tools, safe to repeat and not, and a mail channel.
//!
//! Environment variables tell it how to behave:
//!
//! | variable | effect |
//! |---|---|
//! | `FIXTURE_EFFECTS` | writes each effect of a tool to this file |
//! | `FIXTURE_TAKE_MS` | each call takes this many milliseconds |
//! | `FIXTURE_HOLD` | each call waits while this file exists; with `-charge` or `-reserve` appended, one tool waits |
//! | `FIXTURE_NEXT` | `reserve` has one more required argument, as in a later version |
//! | `FIXTURE_ALLOCATIONS` | counts its allocations in this file, see `allocations.rs` |
//! | `FIXTURE_POST`, `FIXTURE_SENT`, `FIXTURE_POST_SAYS` | sends mail by its own channel, see `post.rs` |
//!
//! `fixture_worker mcp-server FOLDER` is a server whose tools a worker can have: see `mcp_server.rs`.

mod allocations;
mod confirm;
mod fetch;
#[path = "../../support/folder.rs"]
mod folder;
mod mcp_server;
mod misbehave;
mod post;
mod repository;

use async_trait::async_trait;
use confirm::Confirm;
use fetch::Fetch;
use misbehave::Misbehave;
use post::Post;
use repository::RunGit;
use serde_json::{Value, json};
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use wakeful::App;
use wakeful::tool::{Effect, Tool, ToolCallContext, ToolDefinition, ToolError, ToolOutput};

/// Charges a card. The payment service of this example has no idempotency keys. If Wakeful did not see a
/// charge end, it must not repeat the charge, so the tool is guarded.
struct Charge;

#[async_trait]
impl Tool for Charge {
    fn definition(&self) -> ToolDefinition {
        ToolDefinition::new(
            "charge",
            "Charges the customer's card.",
            json!({
                "type": "object",
                "properties": {"cents": {"type": "integer", "minimum": 1}},
                "required": ["cents"],
                "additionalProperties": false,
            }),
            Effect::Guarded,
        )
    }

    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        record("charge", call)?;
        hold("charge").await;
        Ok(ToolOutput::text(format!("Charged {} cents.", arguments["cents"])))
    }
}

/// Reserves a table. The service takes the call's id as its idempotency key, so repeating it is harmless.
struct Reserve;

#[async_trait]
impl Tool for Reserve {
    fn definition(&self) -> ToolDefinition {
        let mut properties = json!({"persons": {"type": "integer", "minimum": 1}});
        let mut required = vec!["persons"];
        if std::env::var_os("FIXTURE_NEXT").is_some() {
            properties["name"] = json!({"type": "string"});
            required.push("name");
        }
        ToolDefinition::new(
            "reserve",
            "Reserves a table.",
            json!({
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": false,
            }),
            Effect::Idempotent,
        )
    }

    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        record("reserve", call)?;
        hold("reserve").await;
        Ok(ToolOutput::text(format!("Reserved for {}.", arguments["persons"])))
    }
}

/// The effect: a line in a file.
fn record(tool: &str, call: &ToolCallContext) -> Result<(), ToolError> {
    let Ok(path) = std::env::var("FIXTURE_EFFECTS") else {
        return Ok(());
    };
    let written = std::fs::OpenOptions::new().create(true).append(true).open(path).and_then(|mut file| {
        // Write the line in one call. Otherwise the lines of several processes could mix.
        file.write_all(format!("{tool} {} {}\n", call.session_id, call.call_id).as_bytes())?;
        file.sync_all()
    });
    written.map_err(|error| ToolError::new(error.to_string()))
}

async fn hold(tool: &str) {
    if let Some(ms) = std::env::var("FIXTURE_TAKE_MS").ok().and_then(|ms| ms.parse().ok()) {
        // A slow tool, where a test asks for one.
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }
    if let Ok(path) = std::env::var("FIXTURE_HOLD") {
        let held = |path: &str| std::fs::exists(path).unwrap_or(false);
        let is_free = || !held(&path) && !held(&format!("{path}-{tool}"));
        // A user may have few inotify instances, so a call that need not wait makes none.
        if !is_free() {
            folder::Changes::of(&path).until(is_free).await;
        }
    }
}

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    if let (Some("mcp-server"), Some(folder)) =
        (arguments.next().as_ref().and_then(|a| a.to_str()), arguments.next())
    {
        return match mcp_server::run(folder.as_ref()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("mcp-server: {error}");
                ExitCode::FAILURE
            }
        };
    }
    if let Err(error) = allocations::count_in_file() {
        eprintln!("fixture_worker: FIXTURE_ALLOCATIONS: {error}");
        return ExitCode::FAILURE;
    }
    let app = App::new().tool(Charge).tool(Reserve).tool(Fetch).tool(RunGit);
    let app = app.tool(Misbehave::IDEMPOTENT).tool(Misbehave::PURE).tool(Confirm);
    let app = app.provider("panics", |_| Ok(Arc::new(misbehave::Panics)));
    match Post::from_env() {
        Some(post) => app.channel(post).main(),
        None => app.main(),
    }
}
