//! A proxy in front of Postgres that records every statement a process sends.

use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use std::collections::HashMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// One request of a client: a statement, or a ping.
#[derive(Clone, Debug)]
pub struct Sent {
    /// The statement's text. For a ping, the text of the connection's last statement: the pool pings a connection
    /// when that statement gives it back.
    pub sql: String,
    pub is_ping: bool,
    /// 1 if the client waited for an answer to this request, 0 if it sent more first.
    pub round_trips: u32,
}

pub struct Recorder {
    /// The same database, through the proxy.
    pub url: String,
    sent: watch::Sender<Vec<Sent>>,
    accepting: JoinHandle<()>,
    _dir: TempDir,
}

impl Recorder {
    pub fn start(url: &str) -> Recorder {
        let postgres = PgConnectOptions::from_str(url).expect("a Postgres URL");
        let dir = TempDir::with_prefix("recorder-").expect("a temporary folder");
        // The proxy must read the statements, so they are not encrypted.
        let proxied = postgres.clone().socket(dir.path()).ssl_mode(PgSslMode::Disable);
        let _servers = super::servers::runtime().enter();
        let listener = UnixListener::bind(dir.path().join(socket_name(&postgres))).expect("a socket");
        let sent = watch::Sender::default();
        let accepting = tokio::spawn(accept(listener, postgres, sent.clone()));
        Recorder { url: proxied.to_url_lossy().to_string(), sent, accepting, _dir: dir }
    }

    /// Returns what clients have sent since the last call.
    pub fn take(&self) -> Vec<Sent> {
        let mut taken = Vec::new();
        self.sent.send_if_modified(|sent| {
            taken = std::mem::take(sent);
            false
        });
        taken
    }

    /// Waits until clients have sent nothing for so long.
    pub async fn quiet(&self, silence: Duration) {
        let mut sent = self.sent.subscribe();
        while tokio::time::timeout(silence, sent.changed()).await.is_ok() {}
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

type Reader = Box<dyn AsyncRead + Send + Unpin>;
type Writer = Box<dyn AsyncWrite + Send + Unpin>;

fn socket_name(options: &PgConnectOptions) -> String {
    format!(".s.PGSQL.{}", options.get_port())
}

async fn accept(listener: UnixListener, postgres: PgConnectOptions, sent: watch::Sender<Vec<Sent>>) {
    while let Ok((client, _)) = listener.accept().await {
        let (postgres, sent) = (postgres.clone(), sent.clone());
        tokio::spawn(async move {
            // A server that is away refuses, and the client sees its connection end.
            let Ok((mut from_postgres, to_postgres)) = connect(&postgres).await else { return };
            let (from_client, mut to_client) = client.into_split();
            let back = async { tokio::io::copy(&mut from_postgres, &mut to_client).await.map(drop) };
            let forth = forth(Box::new(from_client), to_postgres, &sent);
            let _ = tokio::select! { end = back => end, end = forth => end };
        });
    }
}

async fn connect(options: &PgConnectOptions) -> std::io::Result<(Reader, Writer)> {
    let socket = options.get_socket().cloned();
    let socket =
        socket.or_else(|| options.get_host().starts_with('/').then(|| PathBuf::from(options.get_host())));
    Ok(match socket {
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

/// Passes the client's messages on and records them. A round is what the client sends before it waits for an answer.
async fn forth(mut from: Reader, mut to: Writer, sent: &watch::Sender<Vec<Sent>>) -> std::io::Result<()> {
    // The first message has no type letter.
    to.write_all(&read_message(&mut from, None).await?.0).await?;
    let mut prepared: HashMap<Vec<u8>, String> = HashMap::new();
    let (mut bound, mut last) = (String::new(), String::new());
    let (mut round, mut prepares) = (Vec::new(), false);
    loop {
        let letter = from.read_u8().await?;
        let (message, start) = read_message(&mut from, Some(letter)).await?;
        let body = &message[start..];
        match letter {
            // Parse: statement name, text.
            b'P' => {
                let (name, rest) = c_string(body);
                prepared.insert(name.to_vec(), String::from_utf8_lossy(c_string(rest).0).into_owned());
                prepares = true;
            }
            // Describe and Close.
            b'D' | b'C' => prepares = true,
            // Bind: portal, statement name.
            b'B' => {
                let (_, rest) = c_string(body);
                bound = prepared.get(c_string(rest).0).cloned().unwrap_or_default();
            }
            b'E' => round.push(bound.clone()),
            b'Q' => round.push(String::from_utf8_lossy(c_string(body).0).into_owned()),
            _ => {}
        }
        // A simple query and a Sync make the client wait.
        if matches!(letter, b'Q' | b'S') {
            sent.send_modify(|sent| {
                // A round that only prepares a statement happens once for each connection, so it is not recorded.
                if round.is_empty() && !prepares {
                    sent.push(Sent { sql: last.clone(), is_ping: true, round_trips: 1 });
                }
                for (number, sql) in round.drain(..).enumerate() {
                    last.clone_from(&sql);
                    sent.push(Sent { sql, is_ping: false, round_trips: u32::from(number == 0) });
                }
            });
            prepares = false;
        }
        to.write_all(&message).await?;
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
