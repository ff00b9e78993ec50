//! A proxy in front of Postgres that breaks connections: all at once, new ones, or one at the moment of a
//! commit.

use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use std::collections::HashMap;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Where a connection is cut, relative to the chosen statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutAt {
    /// The server never receives the statement.
    BeforeServer,
    /// The server has executed it and answered, but the client never gets the answer: an ambiguous commit.
    BeforeAnswer,
    /// The client gets the answer, and then the connection ends.
    AfterAnswer,
    /// No cut: the client gets the answer after [`Proxy::release`].
    HeldAnswer,
}

/// One cut, at the next statement whose text contains `text`.
#[derive(Clone, Debug)]
struct Trap {
    text: String,
    at: CutAt,
}

pub struct Proxy {
    /// The same database, through the proxy.
    pub url: String,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
    _dir: TempDir,
}

struct Shared {
    postgres: PgConnectOptions,
    refusing: AtomicBool,
    traps: Mutex<Vec<Trap>>,
    cut_count: AtomicUsize,
    /// Held answers go on when it is cancelled.
    released: CancellationToken,
    /// Cancelling it ends every current connection. New connections use a new token.
    cut: Mutex<CancellationToken>,
}

impl Proxy {
    pub fn start(url: &str) -> Proxy {
        let postgres = PgConnectOptions::from_str(url).expect("a Postgres URL");
        let dir = TempDir::with_prefix("proxy-").expect("a temporary folder");
        // The proxy must read the statements, so they are not encrypted.
        let proxied = postgres.clone().socket(dir.path()).ssl_mode(PgSslMode::Disable);
        let _servers = super::servers::runtime().enter();
        let listener = UnixListener::bind(dir.path().join(socket_name(&postgres))).expect("a socket");
        let shared = Arc::new(Shared {
            postgres,
            refusing: AtomicBool::new(false),
            traps: Mutex::default(),
            cut_count: AtomicUsize::new(0),
            released: CancellationToken::new(),
            cut: Mutex::default(),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Proxy { url: proxied.to_url_lossy().to_string(), shared, accepting, _dir: dir }
    }

    /// Ends every connection.
    pub fn cut(&self) {
        let mut cut = self.shared.cut.lock().expect("nobody panics with it");
        std::mem::take(&mut *cut).cancel();
    }

    /// While `true`, new connections end at once.
    pub fn refuse(&self, refuse: bool) {
        self.shared.refusing.store(refuse, Ordering::SeqCst);
    }

    /// Cuts the connection of the next statement whose text contains `text` (case-sensitive), once.
    pub fn cut_when(&self, text: &str, at: CutAt) {
        let trap = Trap { text: text.to_owned(), at };
        self.shared.traps.lock().expect("nobody panics with it").push(trap);
    }

    /// Removes the traps that no statement has sprung yet.
    pub fn clear_cuts(&self) {
        self.shared.traps.lock().expect("nobody panics with it").clear();
    }

    /// Lets held answers go on, and later ones pass.
    pub fn release(&self) {
        self.shared.released.cancel();
    }

    /// The number of traps that statements have sprung so far.
    pub fn cut_count(&self) -> usize {
        self.shared.cut_count.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

impl Shared {
    /// Takes the trap that this statement springs.
    fn spring(&self, sql: &str) -> Option<CutAt> {
        let mut traps = self.traps.lock().expect("nobody panics with it");
        let at = traps.iter().position(|trap| sql.contains(&trap.text))?;
        self.cut_count.fetch_add(1, Ordering::SeqCst);
        Some(traps.remove(at).at)
    }
}

type Reader = Box<dyn AsyncRead + Send + Unpin>;
type Writer = Box<dyn AsyncWrite + Send + Unpin>;

fn socket_name(options: &PgConnectOptions) -> String {
    format!(".s.PGSQL.{}", options.get_port())
}

async fn accept(listener: UnixListener, shared: Arc<Shared>) {
    while let Ok((client, _)) = listener.accept().await {
        if shared.refusing.load(Ordering::SeqCst) {
            continue;
        }
        let cut = shared.cut.lock().expect("nobody panics with it").clone();
        let shared = Arc::clone(&shared);
        tokio::spawn(cut.run_until_cancelled_owned(async move {
            // A server that is away refuses, and the client sees its connection end.
            if let Ok((from, to)) = connect(&shared.postgres).await {
                pass(client, from, to, &shared).await;
            }
        }));
    }
}

async fn connect(options: &PgConnectOptions) -> std::io::Result<(Reader, Writer)> {
    Ok(match options.get_socket() {
        Some(dir) => {
            let (from, to) = UnixStream::connect(dir.join(socket_name(options))).await?.into_split();
            (Box::new(from), Box::new(to))
        }
        None => {
            let address = (options.get_host().to_owned(), options.get_port());
            let (from, to) = TcpStream::connect(address).await?.into_split();
            (Box::new(from), Box::new(to))
        }
    })
}

/// Each `Query` and each `Sync` of a client is answered by one `ReadyForQuery`. Counting both sides allows
/// the proxy to hold back the answer to one statement.
#[derive(Default)]
struct Rounds {
    asked: AtomicU64,
    /// The round whose answer is held back; 0 for none.
    kept: AtomicU64,
    /// The round whose answer waits for its release; 0 for none.
    held: AtomicU64,
    /// The round whose answer is the last one; 0 for none.
    last: AtomicU64,
}

/// Passes data until either side ends, which ends the connection.
async fn pass(client: UnixStream, from_postgres: Reader, to_postgres: Writer, shared: &Shared) {
    let (from_client, to_client) = client.into_split();
    let rounds = Rounds::default();
    let forth = forth(Box::new(from_client), to_postgres, shared, &rounds);
    let back = back(from_postgres, Box::new(to_client), &rounds, &shared.released);
    let _ = tokio::select! { end = forth => end, end = back => end };
}

async fn forth(mut from: Reader, mut to: Writer, shared: &Shared, rounds: &Rounds) -> std::io::Result<()> {
    // The first message has no type letter.
    let (mut message, _) = read_message(&mut from, None).await?;
    to.write_all(&message).await?;
    let mut prepared: HashMap<Vec<u8>, String> = HashMap::new();
    let mut bound = String::new();
    loop {
        let letter = from.read_u8().await?;
        let start;
        (message, start) = read_message(&mut from, Some(letter)).await?;
        let body = &message[start..];
        let executed = match letter {
            // Parse: statement name, text.
            b'P' => {
                let (name, rest) = c_string(body);
                let (text, _) = c_string(rest);
                prepared.insert(name.to_vec(), String::from_utf8_lossy(text).into_owned());
                None
            }
            // Bind: portal, statement name.
            b'B' => {
                let (_, rest) = c_string(body);
                bound = prepared.get(c_string(rest).0).cloned().unwrap_or_default();
                None
            }
            b'E' => Some(bound.clone()),
            b'Q' => Some(String::from_utf8_lossy(c_string(body).0).into_owned()),
            _ => None,
        };
        match executed.and_then(|sql| shared.spring(&sql)) {
            Some(CutAt::BeforeServer) => return Ok(()),
            Some(CutAt::BeforeAnswer) => {
                rounds.kept.store(rounds.asked.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
            }
            Some(CutAt::AfterAnswer) => {
                rounds.last.store(rounds.asked.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
            }
            Some(CutAt::HeldAnswer) => {
                rounds.held.store(rounds.asked.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
            }
            None => {}
        }
        if matches!(letter, b'Q' | b'S') {
            rounds.asked.fetch_add(1, Ordering::SeqCst);
        }
        to.write_all(&message).await?;
    }
}

async fn back(
    mut from: Reader,
    mut to: Writer,
    rounds: &Rounds,
    released: &CancellationToken,
) -> std::io::Result<()> {
    let mut answered = 0;
    let mut started = false;
    loop {
        let letter = from.read_u8().await?;
        let (message, _) = read_message(&mut from, Some(letter)).await?;
        let kept = started && rounds.kept.load(Ordering::SeqCst) == answered + 1;
        let is_of = |round: &AtomicU64| {
            started && round.compare_exchange(answered + 1, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        if is_of(&rounds.held) {
            released.cancelled().await;
        }
        if !kept {
            to.write_all(&message).await?;
        }
        if letter == b'Z' {
            if kept || is_of(&rounds.last) {
                return Ok(());
            }
            // The first `ReadyForQuery` ends the start-up and answers no request.
            if started {
                answered += 1;
            }
            started = true;
        }
    }
}

/// A whole message, and the position of its body.
async fn read_message(from: &mut Reader, letter: Option<u8>) -> std::io::Result<(Vec<u8>, usize)> {
    let length = from.read_u32().await?;
    let mut message: Vec<u8> = letter.into_iter().collect();
    message.extend(length.to_be_bytes());
    let start = message.len();
    message.resize(start + length as usize - 4, 0);
    from.read_exact(&mut message[start..]).await?;
    Ok((message, start))
}

/// The bytes up to the first zero, and what follows it.
fn c_string(bytes: &[u8]) -> (&[u8], &[u8]) {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    (&bytes[..end], bytes.get(end + 1..).unwrap_or_default())
}
