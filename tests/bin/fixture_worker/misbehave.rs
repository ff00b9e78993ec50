//! A tool that kills or hangs its process, as a broken tool does. Do not copy it. The tests use it to check
//! that such a tool does not stop other sessions for long.

use async_trait::async_trait;
use serde_json::{Value, json};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use wakeful::model::{Context, Deltas, Fault, Model, Reply, Request};
use wakeful::tool::{Effect, Tool, ToolCallContext, ToolDefinition, ToolError, ToolOutput};

/// A call in the mode `late` was not answered.
static SILENT: AtomicBool = AtomicBool::new(false);

/// A model whose code panics in each call.
pub struct Panics;

#[async_trait]
impl Model for Panics {
    fn request(&self, _: &Context) -> Request {
        Request::new(Vec::new())
    }

    async fn call(&self, _: &Request, _: &mut dyn Deltas) -> Result<Reply, Fault> {
        panic!("the index is out of bounds")
    }
}

/// Ends or hangs the process in the way that `mode` names. Does no harm if a file exists whose name is the
/// value of `FIXTURE_HOLD` plus `-mended`.
pub struct Misbehave {
    name: &'static str,
    effect: Effect,
}

impl Misbehave {
    /// The tool `misbehave`, which starts after its reply's commit.
    pub const IDEMPOTENT: Misbehave = Misbehave { name: "misbehave", effect: Effect::Idempotent };
    /// The tool `misbehave_purely`, which may run before its reply's commit.
    pub const PURE: Misbehave = Misbehave { name: "misbehave_purely", effect: Effect::Pure };
}

#[async_trait]
impl Tool for Misbehave {
    fn definition(&self) -> ToolDefinition {
        ToolDefinition::new(
            self.name,
            "Misbehaves.",
            json!({
                "type": "object",
                "properties": {
                    "mode": {"enum": ["abort", "exit", "panic", "overflow", "allocate", "spin", "block", "wait", "yield", "late", "host"]},
                },
                "required": ["mode"],
                "additionalProperties": false,
            }),
            self.effect,
        )
    }

    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        super::record(self.name, call)?;
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
            // Keeps its thread until the test mends it.
            Some("block") => {
                block_until(&super::folder::Changes::of(&mended), is_mended);
                Ok(ToolOutput::text("Behaved at last."))
            }
            // Waits for the same, but leaves its thread to others.
            Some("wait") => {
                let waits = move || {
                    let is_mended = || std::fs::exists(&mended).unwrap_or(false);
                    block_until(&super::folder::Changes::of(&mended), is_mended);
                };
                tokio::task::spawn_blocking(waits)
                    .await
                    .map_err(|error| ToolError::new(error.to_string()))?;
                Ok(ToolOutput::text("Behaved at last."))
            }
            // Takes effect once, and never says so. When it is called again, it answers.
            Some("late") if !SILENT.swap(true, Ordering::Relaxed) => std::future::pending().await,
            Some("late") => Ok(ToolOutput::text("It has happened already.")),
            Some("host") => Err(ToolError::of_host("the printer of this host is gone")),
            // Never ends, but leaves its thread to others.
            Some("yield") => std::future::pending().await,
            _ => Err(ToolError::new("no such mode")),
        }
    }
}

/// Returns when `is_so`, and keeps the thread.
pub fn block_until(changes: &super::folder::Changes, is_so: impl Fn() -> bool) {
    use rustix::event::{PollFd, PollFlags, poll};
    while !is_so() {
        // A signal interrupts it, such as the one that continues a stopped process.
        let _ = poll(&mut [PollFd::new(&changes.0, PollFlags::IN)], None);
        super::folder::drain(&changes.0);
    }
}

#[expect(unconditional_recursion, reason = "this is what it is for")]
fn overflow(depth: u64) -> u64 {
    let frame = black_box([depth; 128]);
    overflow(frame[0] + 1) + frame[127]
}

/// Limits the process's memory, as a container does, and then uses it up.
fn allocate() -> ! {
    let limit = libc::rlimit { rlim_cur: 4 << 30, rlim_max: 4 << 30 };
    // SAFETY: the pointer is to a valid rlimit, and setrlimit only reads it.
    unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) };
    let mut taken = Vec::new();
    loop {
        // The memory is reserved but never touched, so only the address space runs out.
        taken.push(Vec::<u8>::with_capacity(64 << 20));
        black_box(&taken);
    }
}
