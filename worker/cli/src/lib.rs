//! Wakeful's worker: it acts. A library to build a worker of one's own on, and the binary `wakeful`.
//!
//! ```no_run
//! use wakeful::App;
//! use wakeful::tool::{Tool, ToolCallContext, ToolError, ToolOutput};
//! use wakeful::workflow::{agent::ToolDefinition, effect::Effect};
//!
//! struct Weather;
//!
//! #[async_trait::async_trait]
//! impl Tool for Weather {
//!     fn definition(&self) -> ToolDefinition {
//!         ToolDefinition {
//!             name: "weather".into(),
//!             description: "The weather in a city.".into(),
//!             parameters: serde_json::json!({
//!                 "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]
//!             }),
//!             effect: Effect::Pure,
//!         }
//!     }
//!
//!     async fn call(&self, _: &ToolCallContext, args: serde_json::Value) -> Result<ToolOutput, ToolError> {
//!         Ok(ToolOutput::text(format!("Sunny in {}", args["city"])))
//!     }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     App::new().tool(Weather).main()
//! }
//! ```
//!
//! A program that drives a session itself:
//!
//! ```no_run
//! use std::sync::Arc;
//! use wakeful::config::Config;
//! use wakeful::jobs::pool;
//! use wakeful::handle::{Pause, SessionHandle};
//!
//! # async fn example() -> anyhow::Result<()> {
//! let config = Config::load(None, std::env::vars())?;
//! let ctx = wakeful::App::new().context(config, "postgres://localhost/wakeful").await?;
//! // Run workers in this process too. Without them, a `wakeful serve` on the database runs the session.
//! let pool = tokio::spawn(pool::run(Arc::clone(&ctx), ctx.bus.news.clone()));
//!
//! let mut session = SessionHandle::new(Arc::clone(&ctx));
//! session.start("A table for tonight, please.", Some("You book tables.")).await?;
//! loop {
//!     match session.consume_until_pause(|entry| println!("{} {}", entry.seq, entry.kind)).await? {
//!         Pause::WaitingInput { question } => {
//!             println!("{question}");
//!             session.continue_with("For four, at eight.").await?;
//!         }
//!         Pause::Completed { result } => break println!("{result}"),
//!         Pause::Failed { error } => anyhow::bail!(error),
//!         Pause::NeedsAttention { reason } => anyhow::bail!("an operator has to look: {reason}"),
//!     }
//! }
//! ctx.shutdown.draining.cancel();
//! pool.await??;
//! # Ok(())
//! # }
//! ```
//!
//! | to see | read |
//! |---|---|
//! | how a program adds tools, models, channels and routes | [`App`], [`tool`], [`model`], [`channel`] |
//! | how a program starts a session, and goes on with it | [`handle`] |
//! | one step, hop by hop | [`jobs::step`] |
//! | how a session is run again beside its log | [`replay`] |
//! | how a trigger is sent by hand | [`client`] |
//! | what is configured, and what of it is wrong | [`config`] |
//! | how the process runs and is operated | [`serve`], [`command`], [`dev`] |

pub mod app;
pub mod client;
pub mod command;
pub mod dev;
mod journal;
pub mod replay;
pub mod serve;

pub use app::App;
pub use wakeful_channels as channels;
pub use wakeful_config as config;
pub use wakeful_engine::ctx::Ctx;
pub use wakeful_engine::{channel, handle, jobs, model, telemetry, tool};
pub use wakeful_http as http;
pub use wakeful_store as store;
pub use wakeful_workflow as workflow;
