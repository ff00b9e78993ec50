//! A tool that does to its process what a broken tool does. Nothing to copy: the tests see by it that such a tool takes
//! nobody along for long.

use async_trait::async_trait;
use serde_json::{Value, json};
use std::hint::black_box;
use std::time::Duration;
use wakeful::tool::{Effect, Tool, ToolCallContext, ToolDefinition, ToolError, ToolOutput};

/// Ends or hangs the process in the way that `mode` names, unless the file `FIXTURE_HOLD` with `-mended` at its end is
/// there.
pub struct Misbehave;

#[async_trait]
impl Tool for Misbehave {
    fn definition(&self) -> ToolDefinition {
        ToolDefinition::new(
            "misbehave",
            "Misbehaves.",
            json!({
                "type": "object",
                "properties": {
                    "mode": {"enum": ["abort", "exit", "panic", "overflow", "allocate", "spin", "block", "yield"]},
                },
                "required": ["mode"],
                "additionalProperties": false,
            }),
            Effect::Idempotent,
        )
    }

    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        super::record("misbehave", call)?;
        let mended = std::env::var("FIXTURE_HOLD").map(|hold| format!("{hold}-mended")).unwrap_or_default();
        let is_mended = || std::fs::exists(&mended).unwrap_or(false);
        if is_mended() {
            return Ok(ToolOutput::text("Behaved."));
        }
        match arguments["mode"].as_str() {
            Some("abort") => std::process::abort(),
            Some("exit") => std::process::exit(0),
            Some("panic") => panic!("as told"),
            Some("overflow") => Ok(ToolOutput::text(overflow(0).to_string())),
            Some("allocate") => allocate(),
            Some("spin") => loop {
                std::hint::spin_loop();
            },
            Some("block") => {
                while !is_mended() {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Ok(ToolOutput::text("Behaved at last."))
            }
            Some("yield") => loop {
                tokio::time::sleep(Duration::from_millis(1)).await;
            },
            _ => Err(ToolError::new("no such mode")),
        }
    }
}

#[expect(unconditional_recursion, reason = "this is what it is for")]
fn overflow(depth: u64) -> u64 {
    let frame = black_box([depth; 128]);
    overflow(frame[0] + 1) + frame[127]
}

/// Takes all the memory of a process that may have only so much, as a container's may.
fn allocate() -> ! {
    let limit = libc::rlimit { rlim_cur: 4 << 30, rlim_max: 4 << 30 };
    // SAFETY: the pointer is to a valid rlimit, and setrlimit only reads it.
    unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) };
    let mut taken = Vec::new();
    loop {
        // Reserved and not touched: it is the address space that runs out.
        taken.push(Vec::<u8>::with_capacity(64 << 20));
        black_box(&taken);
    }
}
