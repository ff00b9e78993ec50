//! One process's connection to one server. The first call opens it, all calls share it, and a call that finds it dead opens
//! another.

use crate::http::Http;
use crate::pinned::Offered;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ClientCapabilities, ClientConfig, ClientRequest,
    ErrorCode, ErrorData, Implementation, JsonObject, PaginatedRequestParams, PingRequest, RequestMetaObject,
};
use rmcp::service::{Peer, RunningService, ServiceError};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::streamable_http_client::{StreamableHttpClientTransportConfig, StreamableHttpError};
use rmcp::{RoleClient, ServiceExt as _};
use secrecy::ExposeSecret as _;
use serde_json::Value;
use std::error::Error as StdError;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tracing::debug;
use wakeful_config::mcp::{Mcp, Reach};
use wakeful_engine::web;

/// How long a server may take until it has told its name, when a call needs it: shorter than most calls may take.
const HANDSHAKE: Duration = Duration::from_secs(30);

/// The same when a person asks for its tools: a package runner loads the program first.
const PATIENCE: Duration = Duration::from_secs(300);

/// How long a server may take to answer a ping, after a call that it did not answer in time.
const PING: Duration = Duration::from_secs(5);

/// How long calls fail at once after a server could not be reached. So a turn of ten calls does not wait ten times.
const PAUSE: Duration = Duration::from_secs(2);

/// The key of `_meta` in which a call sends its idempotency key, for servers that look.
const KEY: &str = "wakeful/idempotencyKey";

/// What a program of ours always gets.
const ALWAYS: [&str; 8] = ["PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE"];

/// How long a program that ended may take to close its standard error.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The status of a server that has too many requests.
const TOO_MANY: u16 = 429;

/// How many calls may wait for one server's answers.
const CALLS: usize = 1024;

/// The most tools of one server.
const MAX_TOOLS: usize = 1000;

/// The longest line of a program's errors that is kept.
const MAX_LINE: usize = 500;

/// How a call failed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CallFailure {
    /// The server did not get it.
    NotSent(String),
    /// The server answered that it will not do it, or that it failed.
    Refused(String),
    /// It was sent, and no answer came.
    Unknown(String),
}

/// The connection to one server.
#[derive(Debug)]
pub(crate) struct Connection {
    server: Mcp,
    /// How long the server may take to open, and to list its tools.
    patience: Duration,
    state: tokio::sync::Mutex<State>,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Closed,
    Live(Arc<Live>),
    Away {
        since: Instant,
        why: String,
    },
}

#[derive(Debug)]
struct Live {
    service: RunningService<RoleClient, ClientConfig>,
    /// Killed when the connection goes.
    _program: Option<Program>,
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

/// A program that this process started. Dropping it kills it and what it has started.
#[derive(Debug)]
struct Program {
    child: Child,
    /// The last line of its standard error. Its sender goes when the program has closed it.
    last_words: watch::Receiver<String>,
}

impl Drop for Program {
    fn drop(&mut self) {
        let group = self.child.id().and_then(|id| rustix::process::Pid::from_raw(i32::try_from(id).ok()?));
        if let Some(group) = group {
            // It may have ended by itself.
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
    }
}

impl Program {
    /// An error of a program that ended, with what it said last.
    async fn with_last_words(&self, text: String) -> String {
        let mut words = self.last_words.clone();
        // What it wrote may not have been read yet.
        let _ = tokio::time::timeout(LAST_WORDS, words.wait_for(|_| false)).await;
        let words = words.borrow();
        if words.is_empty() { text } else { format!("{text}; its last words: {}", *words) }
    }
}

impl Connection {
    pub fn new(server: Mcp) -> Connection {
        Connection { server, patience: HANDSHAKE, state: tokio::sync::Mutex::default() }
    }

    /// For a person who waits.
    pub fn patient(server: Mcp) -> Connection {
        Connection { patience: PATIENCE, ..Connection::new(server) }
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
                let failure = self.failure(error);
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
        let called = called.map_or_else(String::new, |info| format!("{} {}", info.name, info.version));
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
        loop {
            let params = PaginatedRequestParams::default().with_cursor(cursor);
            let page = peer.list_tools(Some(params)).await.map_err(|error| said(self.failure(error)))?;
            tools.extend(page.tools);
            match page.next_cursor {
                _ if tools.len() > MAX_TOOLS => return Err(format!("it offers more than {MAX_TOOLS} tools")),
                Some(next) => cursor = Some(next),
                None => return Ok(tools),
            }
        }
    }

    /// The open connection, or a new one. Who comes while one is being opened waits for it.
    async fn live(&self) -> Result<Arc<Live>, String> {
        let mut state = self.state.lock().await;
        match &*state {
            State::Live(live) if is_usable(live).await => {
                return Ok(Arc::clone(live));
            }
            State::Away { since, why } if since.elapsed() < PAUSE => return Err(why.clone()),
            State::Live(_) | State::Away { .. } | State::Closed => {}
        }
        // A caller that goes away while it opens the connection leaves none.
        *state = State::Closed;
        // In a task of its own: rmcp keeps the span in which it begins for as long as the connection lives.
        let opened = tokio::spawn(open(self.server.clone(), self.patience)).await;
        match opened.unwrap_or_else(|_| Err("it could not be opened".to_owned())) {
            Ok(live) => {
                let live = Arc::new(live);
                *state = State::Live(Arc::clone(&live));
                Ok(live)
            }
            Err(why) => {
                *state = State::Away { since: Instant::now(), why: why.clone() };
                Err(why)
            }
        }
    }

    /// Lets a connection go that failed, unless another caller has opened one since.
    async fn forget(&self, failed: &Arc<Live>) {
        let mut state = self.state.lock().await;
        if matches!(&*state, State::Live(live) if Arc::ptr_eq(live, failed)) {
            *state = State::Closed;
        }
    }

    /// What is known of a call that failed. What a program wrote to its standard error is not told: it may be of another session.
    fn failure(&self, error: ServiceError) -> CallFailure {
        match error {
            ServiceError::McpError(error) if is_refusal(&error) => {
                CallFailure::Refused(error.message.into_owned())
            }
            ServiceError::McpError(error) => CallFailure::Unknown(quoted(&error.message)),
            ServiceError::TransportSend(error) => match was_taken(error.error.as_ref()) {
                Taken::No => CallFailure::NotSent(chain(error.error.as_ref())),
                Taken::Refused(why) => CallFailure::Refused(why),
                Taken::Perhaps => CallFailure::Unknown(chain(error.error.as_ref())),
            },
            ServiceError::TransportClosed => {
                CallFailure::Unknown("the connection ended before the answer".to_owned())
            }
            other => CallFailure::Unknown(chain(&other)),
        }
    }
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
            let http = http.pool_max_idle_per_host(0).build().map_err(|error| chain(&error))?;
            let mut settings = StreamableHttpClientTransportConfig::with_uri(url.as_str())
                // All sessions of this process share the connection.
                .max_concurrent_requests(CALLS)
                // rmcp would give the other calls of the old session up.
                .reinit_on_expired_session(false);
            settings.max_error_response_size = MAX_LINE;
            if let Some(token) = token {
                settings = settings.auth_header(token.expose_secret());
            }
            let opening = client.serve(StreamableHttpClientTransport::with_client(Http(http), settings));
            match tokio::time::timeout(patience, opening).await {
                Ok(Ok(service)) => Ok(Live { service, _program: None, is_suspect: AtomicBool::new(false) }),
                Ok(Err(error)) => Err(format!("it does not answer as an MCP server: {}", chain(&error))),
                Err(_) => Err(too_late()),
            }
        }
        Reach::Program { command, env } => {
            let (program, input, output) = start(&server.name, command, env)?;
            match tokio::time::timeout(patience, client.serve((output, input))).await {
                Ok(Ok(service)) => {
                    Ok(Live { service, _program: Some(program), is_suspect: AtomicBool::new(false) })
                }
                Ok(Err(error)) => {
                    let why = format!("{:?} does not answer as an MCP server: {}", command[0], chain(&error));
                    Err(program.with_last_words(why).await)
                }
                Err(_) => Err(program.with_last_words(too_late()).await),
            }
        }
    }
}

/// Starts the program, with only the variables that it is to have: this process's others hold secrets.
fn start(
    name: &str,
    command: &[String],
    env: &[String],
) -> Result<(Program, tokio::process::ChildStdin, tokio::process::ChildStdout), String> {
    let given = ALWAYS.iter().copied().chain(env.iter().map(String::as_str));
    let given = given.filter_map(|name| Some((name.to_owned(), std::env::var_os(name)?)));
    let mut child = Command::new(&command[0])
        .args(&command[1..])
        .env_clear()
        .envs(given)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // Ctrl-C in a terminal is for this process, which drains.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("the program {:?} cannot be started: {error}", command[0]))?;
    let (Some(input), Some(output), Some(errors)) =
        (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        return Err("the program has no standard input or output".to_owned());
    };
    let (say, last_words) = watch::channel(String::new());
    let name = name.to_owned();
    tokio::spawn(async move {
        let mut errors = BufReader::new(errors);
        let mut line = Vec::new();
        // A program may write without end and without a line end, so only the beginning of a line is kept.
        while let Ok(bytes) = errors.fill_buf().await
            && !bytes.is_empty()
        {
            let end = bytes.iter().position(|byte| *byte == b'\n');
            let part = &bytes[..end.unwrap_or(bytes.len())];
            line.extend_from_slice(&part[..part.len().min(MAX_LINE - line.len())]);
            let read = end.map_or(bytes.len(), |end| end + 1);
            errors.consume(read);
            if end.is_some() {
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                debug!(server = name, line = text, "An MCP server's standard error");
                if !text.is_empty() {
                    say.send_replace(text);
                }
                line.clear();
            }
        }
    });
    Ok((Program { child, last_words }, input, output))
}

/// Whether an error of the protocol says that the call was not carried out. Of any other, such as an internal one, or one that
/// rmcp makes of a stream that ended, nobody knows.
fn is_refusal(error: &ErrorData) -> bool {
    matches!(
        error.code,
        ErrorCode::PARSE_ERROR
            | ErrorCode::INVALID_REQUEST
            | ErrorCode::METHOD_NOT_FOUND
            | ErrorCode::INVALID_PARAMS
    )
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

enum Taken {
    No,
    Refused(String),
    Perhaps,
}

/// Whether a request that failed on its way can have reached the server.
fn was_taken(error: &(dyn StdError + 'static)) -> Taken {
    let mut next = Some(error);
    while let Some(error) = next {
        match error.downcast_ref::<StreamableHttpError<reqwest::Error>>() {
            Some(StreamableHttpError::HttpStatus(status)) if status.status == TOO_MANY => {
                return Taken::Refused(
                    "The tool's server has too many requests now. Try again later.".to_owned(),
                );
            }
            Some(StreamableHttpError::AuthRequired(_) | StreamableHttpError::InsufficientScope(_)) => {
                return Taken::Refused("The tool's server refuses this installation's token.".to_owned());
            }
            // The server did not take it. The call is made again on a new connection; calls in flight keep this one.
            Some(StreamableHttpError::SessionExpired) => return Taken::No,
            Some(StreamableHttpError::Client(error)) if error.is_connect() || error.is_builder() => {
                return Taken::No;
            }
            Some(_) => return Taken::Perhaps,
            None => {}
        }
        next = error.source();
    }
    Taken::Perhaps
}

fn said(failure: CallFailure) -> String {
    let (CallFailure::NotSent(text) | CallFailure::Refused(text) | CallFailure::Unknown(text)) = failure;
    text
}

/// What a server says, as its words and not ours, and not all of it.
fn quoted(text: &str) -> String {
    format!("it says {:?}", text.chars().take(MAX_LINE).collect::<String>())
}

/// An error and its causes, each once.
fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}
