//! One process's connection to one server. The first call opens it, all calls share it, and a call that finds it dead opens
//! another.

use crate::failure::{CallFailure, MAX_SAID, why_not_opened};
use crate::http::Http;
use crate::pinned::Offered;
use crate::program::{Program, start};
use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ClientCapabilities, ClientConfig, ClientRequest,
    Implementation, JsonObject, PaginatedRequestParams, PingRequest, RequestMetaObject,
};
use rmcp::service::{Peer, RunningService, ServiceError};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;
use rmcp::{RoleClient, ServiceExt as _};
use secrecy::ExposeSecret as _;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use wakeful_config::mcp::{Mcp, Reach};
use wakeful_engine::web::{self, causes};

/// How long a call waits for a server that opens: shorter than most calls may take. The server goes on opening, for the next call.
const HANDSHAKE: Duration = Duration::from_secs(30);

/// How long a server may take until it has told its name: a package runner loads the program first.
const PATIENCE: Duration = Duration::from_secs(300);

/// How long a server may take to answer a ping, after a call that it did not answer in time.
const PING: Duration = Duration::from_secs(3);

/// How long a server may take to let a connection go.
const CLOSING: Duration = Duration::from_secs(1);

/// How long calls fail at once after a server could not be reached. So a turn of ten calls does not wait ten times.
const PAUSE: Duration = Duration::from_secs(2);

/// The key of `_meta` in which a call sends its idempotency key, for servers that look.
const KEY: &str = "wakeful/idempotencyKey";

/// How many calls may wait for one server's answers.
const CALLS: usize = 1024;

/// The most tools of one server, and pages of its list.
const MAX_TOOLS: usize = 1000;
const MAX_PAGES: usize = 100;

/// The connection to one server.
#[derive(Debug)]
pub(crate) struct Connection {
    server: Mcp,
    /// How long a caller waits for the server to open, and to list its tools.
    patience: Duration,
    state: tokio::sync::Mutex<State>,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Closed,
    Opening {
        since: Instant,
        opening: Opening,
    },
    Live(Arc<Live>),
    Away {
        since: Instant,
        why: String,
    },
}

/// A connection that is being opened. All callers that need it wait for the same one.
type Opening = Shared<BoxFuture<'static, Result<Arc<Live>, String>>>;

#[derive(Debug)]
struct Live {
    service: RunningService<RoleClient, ClientConfig>,
    /// Killed when the connection goes, unless it was closed and has ended by itself.
    program: Option<Program>,
    /// A call was given up before its answer came, so the server may hang.
    is_suspect: AtomicBool,
}

/// A call that waits for its answer. Dropping it before the answer makes the connection suspect.
struct Waiting<'a> {
    live: &'a Live,
    is_answered: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.is_answered {
            self.live.is_suspect.store(true, Ordering::Relaxed);
        }
    }
}

impl Connection {
    pub fn new(server: Mcp) -> Connection {
        Connection { server, patience: HANDSHAKE, state: tokio::sync::Mutex::default() }
    }

    /// For a person who waits.
    pub fn patient(server: Mcp) -> Connection {
        // A little more than the server has, so that its own words come first.
        Connection { patience: PATIENCE + PING, ..Connection::new(server) }
    }

    /// The server's name in the configuration.
    pub fn name(&self) -> &str {
        &self.server.name
    }

    /// Calls a tool. `key` identifies the call: it is the same in each attempt.
    pub async fn call(
        &self,
        tool: &str,
        arguments: JsonObject,
        key: &str,
    ) -> Result<CallToolResult, CallFailure> {
        let live = self.live().await.map_err(CallFailure::NotSent)?;
        let mut meta = RequestMetaObject::new();
        meta.insert(KEY.to_owned(), Value::from(key));
        let mut params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        params.meta = Some(meta);
        let mut waiting = Waiting { live: &live, is_answered: false };
        let answer = live.service.peer().call_tool_once(params).await;
        waiting.is_answered = true;
        drop(waiting);
        match answer {
            Ok(CallToolResponse::Complete(result)) => Ok(result),
            Ok(CallToolResponse::InputRequired(_)) => Err(CallFailure::Refused(
                "The tool asks its client for more before it answers, and Wakeful gives nothing but the arguments."
                    .to_owned(),
            )),
            // Such as a task, with which the server goes on.
            Ok(_) => {
                Err(CallFailure::Unknown("it goes on with the call, and does not say how it ends".to_owned()))
            }
            Err(error) => {
                let failure = CallFailure::of(error);
                if !matches!(failure, CallFailure::Refused(_)) {
                    self.forget(&live).await;
                }
                Err(failure)
            }
        }
    }

    /// What the server calls itself, and its tools.
    ///
    /// # Errors
    /// Why it cannot be asked, for a person.
    pub async fn tools(&self) -> Result<(String, Vec<Offered>), String> {
        let live = self.live().await?;
        let peer = live.service.peer();
        let listed = tokio::time::timeout(self.patience, self.list(peer)).await;
        let tools = match listed {
            Ok(tools) => tools?,
            Err(_) => return Err(format!("it did not list its tools within {} s", self.patience.as_secs())),
        };
        let called = peer.peer_info().and_then(|info| info.server_info.clone());
        let called = called.map_or_else(String::new, |info| name_of(&info));
        let offered = tools.into_iter().map(|tool| {
            let hints = tool.annotations.unwrap_or_default();
            Offered {
                name: tool.name.into_owned(),
                description: tool.description.map_or_else(String::new, std::borrow::Cow::into_owned),
                parameters: Value::Object(tool.input_schema.as_ref().clone()),
                is_read_only: hints.read_only_hint == Some(true),
                is_idempotent: hints.idempotent_hint == Some(true),
            }
        });
        Ok((called, offered.collect()))
    }

    /// All pages of the list. A server may offer pages without end.
    async fn list(&self, peer: &Peer<RoleClient>) -> Result<Vec<rmcp::model::Tool>, String> {
        let (mut tools, mut cursor) = (Vec::new(), None);
        for _ in 0..MAX_PAGES {
            let params = PaginatedRequestParams::default().with_cursor(cursor);
            let page =
                peer.list_tools(Some(params)).await.map_err(|error| CallFailure::of(error).into_text())?;
            tools.extend(page.tools);
            match page.next_cursor {
                Some(next) if tools.len() <= MAX_TOOLS => cursor = Some(next),
                None if tools.len() <= MAX_TOOLS => return Ok(tools),
                Some(_) | None => break,
            }
        }
        Err(format!("it offers more than {MAX_TOOLS} tools, or more than {MAX_PAGES} pages of them"))
    }

    /// The open connection, or a new one. A caller that comes while one is being opened waits for it. If all callers go away,
    /// it opens all the same: a server that starts slowly is there for the next call.
    async fn live(&self) -> Result<Arc<Live>, String> {
        let mut state = self.state.lock().await;
        // How an opening ended whose callers had gone away. That may be long ago.
        if let State::Opening { opening, .. } = &*state
            && let Some(opened) = opening.clone().now_or_never()
        {
            *state = opened.map_or(State::Closed, State::Live);
        }
        let (since, opening) = match &*state {
            State::Live(live) if is_usable(live).await => {
                return Ok(Arc::clone(live));
            }
            State::Away { since, why } if since.elapsed() < PAUSE => return Err(why.clone()),
            State::Opening { since, opening } => (*since, opening.clone()),
            State::Live(_) | State::Away { .. } | State::Closed => {
                let (since, opening) = (Instant::now(), opening(self.server.clone()));
                *state = State::Opening { since, opening: opening.clone() };
                (since, opening)
            }
        };
        drop(state);
        let Ok(opened) = tokio::time::timeout(self.patience, opening.clone()).await else {
            return Err(format!("it has been starting for {} s, and goes on", since.elapsed().as_secs()));
        };
        let mut state = self.state.lock().await;
        if matches!(&*state, State::Opening { opening: other, .. } if other.ptr_eq(&opening)) {
            *state = match &opened {
                Ok(live) => State::Live(Arc::clone(live)),
                Err(why) => State::Away { since: Instant::now(), why: why.clone() },
            };
        }
        opened
    }

    /// Closes the connection, and lets the program of the server end. A server that still opens is left: its program is killed.
    pub async fn close(&self) {
        let live = match std::mem::take(&mut *self.state.lock().await) {
            State::Live(live) => Some(live),
            State::Opening { opening, .. } => opening.now_or_never().and_then(Result::ok),
            State::Away { .. } | State::Closed => None,
        };
        // A call that is still under way keeps it.
        let Some(Live { service, program, .. }) = live.and_then(Arc::into_inner) else { return };
        // A program's standard input ends, and a URL's session is deleted.
        let _ = tokio::time::timeout(CLOSING, service.cancel()).await;
        if let Some(program) = program {
            program.end(&self.server.name).await;
        }
    }

    /// Drops a connection that failed, unless another caller has opened one since.
    async fn forget(&self, failed: &Arc<Live>) {
        let mut state = self.state.lock().await;
        if matches!(&*state, State::Live(live) if Arc::ptr_eq(live, failed)) {
            *state = State::Closed;
        }
    }
}

/// Opens a connection in a task of its own: rmcp keeps the span in which it begins for as long as the connection lives.
fn opening(server: Mcp) -> Opening {
    // A program may have to be loaded first. A URL that takes the connection and says nothing is called anew.
    let patience = match &server.reach {
        Reach::Url { .. } => HANDSHAKE,
        Reach::Program { .. } => PATIENCE,
    };
    let task = tokio::spawn(open(server, patience));
    let opened = async {
        let opened = task.await.unwrap_or_else(|_| Err("it could not be opened".to_owned()));
        opened.map(Arc::new)
    };
    opened.boxed().shared()
}

/// Opens a connection.
async fn open(server: Mcp, patience: Duration) -> Result<Live, String> {
    let client = ClientConfig::new(
        ClientCapabilities::default(),
        Implementation::new("wakeful", env!("CARGO_PKG_VERSION")),
    );
    let too_late = || format!("it did not answer within {} s", patience.as_secs());
    match &server.reach {
        Reach::Url { url, token } => {
            let http = web::client(web::Reach::Named(&[url]));
            // With an idle connection some servers answer 40 ms later: rmcp's own client keeps none either.
            let http = http.pool_max_idle_per_host(0).build().map_err(|error| causes(&error))?;
            let mut settings = StreamableHttpClientTransportConfig::with_uri(url.as_str())
                // All sessions of this process share the connection.
                .max_concurrent_requests(CALLS)
                // Otherwise rmcp would give up the other calls of the old session.
                .reinit_on_expired_session(false);
            settings.max_error_response_size = MAX_SAID;
            if let Some(token) = token {
                settings = settings.auth_header(token.expose_secret());
            }
            let opening = client.serve(StreamableHttpClientTransport::with_client(Http(http), settings));
            match tokio::time::timeout(patience, opening).await {
                Ok(Ok(service)) => Ok(Live { service, program: None, is_suspect: AtomicBool::new(false) }),
                Ok(Err(error)) => Err(format!(
                    "{} does not answer as an MCP server: {}",
                    host_of(url),
                    why_not_opened(&error)
                )),
                Err(_) => Err(too_late()),
            }
        }
        Reach::Program { command, env } => {
            let (program, input, output) = start(&server.name, command, env)?;
            match tokio::time::timeout(patience, client.serve((output, input))).await {
                Ok(Ok(service)) => {
                    Ok(Live { service, program: Some(program), is_suspect: AtomicBool::new(false) })
                }
                Ok(Err(error)) => {
                    let why =
                        format!("{:?} does not answer as an MCP server: {}", command[0], causes(&error));
                    Err(program.with_last_words(why).await)
                }
                Err(_) => Err(program.with_last_words(too_late()).await),
            }
        }
    }
}

/// The server's name and its version. A server may leave either empty.
fn name_of(server: &Implementation) -> String {
    format!("{} {}", server.name, server.version).trim().to_owned()
}

/// The part of a URL that says where it leads. Models read it too, and the path or the query may hold a key.
fn host_of(url: &str) -> String {
    reqwest::Url::parse(url).map_or_else(|_| "it".to_owned(), |url| url.origin().ascii_serialization())
}

/// Whether a connection is open, and its server answers if there is a doubt.
async fn is_usable(live: &Live) -> bool {
    let peer = live.service.peer();
    if live.service.is_closed() || peer.is_transport_closed() {
        return false;
    }
    if !live.is_suspect.load(Ordering::Relaxed) {
        return true;
    }
    let ping = peer.send_request(ClientRequest::PingRequest(PingRequest::default()));
    // An error is an answer too: not every server knows the ping.
    let answers =
        matches!(tokio::time::timeout(PING, ping).await, Ok(Ok(_) | Err(ServiceError::McpError(_))));
    if answers {
        live.is_suspect.store(false, Ordering::Relaxed);
    }
    answers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_a_version_ends_with_no_space() {
        assert_eq!(name_of(&Implementation::new("shop", "")), "shop");
        assert_eq!(name_of(&Implementation::new("shop", "1.0")), "shop 1.0");
    }

    #[tokio::test]
    async fn a_server_that_is_away_is_named_with_the_cause_and_without_a_key() {
        let reach = Reach::Url { url: "http://127.0.0.1:1/s3cret?key=s3cret".to_owned(), token: None };
        let server = Mcp { name: "shop".to_owned(), reach, definitions: "shop.json".into() };
        let why = open(server, HANDSHAKE).await.unwrap_err();
        assert!(why.starts_with("http://127.0.0.1:1 does not answer as an MCP server: "), "{why}");
        assert!(why.contains("onnection refused"), "{why}");
        assert!(!why.contains("s3cret") && !why.contains("rmcp"), "{why}");
    }
}
