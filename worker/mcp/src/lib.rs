//! Tools that servers of the [Model Context Protocol](https://modelcontextprotocol.io) offer, as tools of Wakeful's agents.
//!
//! A server's tools are **pinned**: `wakeful mcp pull` writes their names, descriptions, schemas and effects into a file, a
//! person reviews it, and every process of the fleet reads it. So a process starts while a server is away, all processes offer
//! the same tools, a session's requests keep their bytes, and a server that changes a description later says nothing to a model.
//!
//! | to see | read |
//! |---|---|
//! | the file | [`pinned`] |
//! | the connection that all calls share | `connection`, `program` |
//! | what is known of a call that failed | `failure` |
//! | what rmcp would wait for in vain | `http` |
//! | one call | `tool` |
//! | what the model reads of an answer | `content` |
//!
//! The protocol is that of rmcp, its own SDK. This crate is internal and not stable. Programs use the crate `wakeful`.
#![deny(missing_docs)]

mod connection;
mod content;
mod failure;
mod http;
pub mod pinned;
mod program;
mod tool;

use connection::Connection;
use pinned::{Pinned, PinnedError};
use std::sync::Arc;
use wakeful_config::mcp::Mcp;
use wakeful_engine::tool::Tool;
use wakeful_engine::tool::registry::Registry;

/// The pinned tools of one server. Connects to nothing: the first call of a tool does.
///
/// # Errors
/// When the file of the server's tools is missing or cannot be read.
pub fn tools(server: &Mcp) -> Result<Vec<Arc<dyn Tool>>, PinnedError> {
    let pinned = Pinned::read(&server.definitions, &server.name)?;
    Ok(of(server, pinned))
}

fn of(server: &Mcp, pinned: Pinned) -> Vec<Arc<dyn Tool>> {
    let connection = Arc::new(Connection::new(server.clone()));
    let tool =
        |pinned| Arc::new(tool::McpTool { pinned, connection: Arc::clone(&connection) }) as Arc<dyn Tool>;
    pinned.tools.into_iter().map(tool).collect()
}

/// What a server offers now.
#[derive(Clone, Debug)]
pub struct Pulled {
    /// What can be written into the file.
    pub pinned: Pinned,
    /// The tools that cannot be used, each with the reason.
    pub unusable: Vec<(String, String)>,
}

/// Asks a server for its tools. Of the tools in `earlier`, the names and effects stay.
///
/// # Errors
/// Why the server cannot be asked, for a person.
pub async fn pull(server: &Mcp, earlier: Option<&Pinned>) -> Result<Pulled, String> {
    let (called, offered) = Connection::patient(server.clone()).tools().await?;
    let pinned = Pinned::of(&server.name, called, offered, earlier);
    let (mut usable, mut unusable) = (Pinned { server: pinned.server, tools: Vec::new() }, Vec::new());
    for tool in pinned.tools {
        let alone = Pinned { server: String::new(), tools: vec![tool.clone()] };
        let fits = of(server, alone).into_iter().try_for_each(|tool| Registry::new().register(tool));
        match fits {
            Ok(()) => usable.tools.push(tool),
            Err(error) => unusable.push((tool.calls, error.to_string())),
        }
    }
    Ok(Pulled { pinned: usable, unusable })
}
