#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod app;
mod client;
mod command;
#[allow(missing_docs, reason = "only the tests see it")]
mod dev;
mod journal;
mod process;
#[allow(missing_docs, reason = "only the tests see it")]
mod replay;
mod serve;

pub use app::App;
pub use channel::Channel;
pub use model::Model;
pub use process::Process;
pub use session::SessionHandle;
pub use tool::Tool;

/// Tools: the trait [`Tool`] and the types of its methods.
pub mod tool {
    pub use wakeful_engine::tool::{
        FileUse, Outputs, Tool, ToolCallContext, ToolError, ToolErrorKind, ToolOutput, Workspace,
    };
    pub use wakeful_engine::web::{Fetched, Web, WebError, WebRequest};
    pub use wakeful_store::outputs::OutputSlice;
    pub use wakeful_workflow::agent::ToolDefinition;
    pub use wakeful_workflow::effect::Effect;
    pub use wakeful_workflow::files::WrittenFile;
    pub use wakeful_workflow::id::{CallId, SessionId};
    pub use wakeful_workflow::policy::{SessionPolicy, ToolMode};
    pub use wakeful_workflow::record::Attachment;
}

/// Models: the trait [`Model`] and the types of its methods.
pub mod model {
    pub use crate::tool::{CallId, Effect, ToolDefinition};
    pub use wakeful_engine::model::{Deltas, Model};
    pub use wakeful_workflow::context::{Context, Message};
    pub use wakeful_workflow::fault::Fault;
    pub use wakeful_workflow::record::{
        Block, Content, FinishReason, OutputPointer, Reply, Role, ToolCall, ToolResult, Usage,
    };
    pub use wakeful_workflow::wire::{End, Frame, Protocol, Repairs, Request, Transcript};
}

/// Channels: the trait [`Channel`] and the types of its methods.
pub mod channel {
    pub use wakeful_engine::channel::{Channel, Found, Outbound, SendError};
}

/// Sessions that the program itself starts: [`SessionHandle`] and its types.
pub mod session {
    pub use wakeful_engine::handle::{Pause, SessionHandle, SessionHandleError as SessionError};
    pub use wakeful_engine::new_session::CannotBegin;
    pub use wakeful_store::Error as StoreError;
    pub use wakeful_store::event::JournalEntry;
}

/// Triggers: the message that a program's own route accepts, and the answer to it.
pub mod trigger {
    pub use crate::process::Incoming;
    pub use crate::session::{CannotBegin, StoreError};
    pub use wakeful_engine::ingest::{RETRY_AFTER_S, Refused};
    pub use wakeful_store::wake::Woken;
    pub use wakeful_workflow::id::InvalidConversationId;
    pub use wakeful_workflow::inbox::Acceptance;
}

/// Parts that this project's own tests and benchmark use. They change without notice.
#[doc(hidden)]
pub mod internal {
    #![allow(missing_docs, reason = "only the tests see it")]
    pub mod dev {
        pub use crate::dev::*;
    }
    pub mod replay {
        pub use crate::replay::*;
    }
}
