//! Traffic on the wire: a relay in front of the server counts statements and round trips.
//!
//! It counts there so that nothing is missed: the pool's pings are round trips too, and the server's
//! statistics do not include them.

use anyhow::{Context, Result};
use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::task::JoinHandle;

/// What clients have sent since the relay began.
#[derive(Clone, Copy, Debug, Default)]
pub struct Traffic {
    pub statements: u64,
    pub round_trips: u64,
    pub bytes: u64,
}

impl std::ops::Sub for Traffic {
    type Output = Traffic;

    fn sub(self, before: Traffic) -> Traffic {
        Traffic {
            statements: self.statements - before.statements,
            round_trips: self.round_trips - before.round_trips,
            bytes: self.bytes - before.bytes,
        }
    }
}

#[derive(Debug, Default)]
struct Counters {
    statements: AtomicU64,
    round_trips: AtomicU64,
    bytes: AtomicU64,
}

/// Listens on a socket of its own for as long as it lives.
pub struct Relay {
    counters: Arc<Counters>,
    listening: JoinHandle<()>,
    url: String,
    _dir: tempfile::TempDir,
}

impl Relay {
    /// Starts a relay to the server of `url`, which has to accept connections without TLS.
    pub fn start(url: &str) -> Result<Relay> {
        let server = PgConnectOptions::from_str(url)?;
        let dir = tempfile::Builder::new().prefix("wakeful-bench-").tempdir()?;
        let listener = UnixListener::bind(dir.path().join(".s.PGSQL.5432")).context("The relay's socket")?;
        let counters = Arc::new(Counters::default());
        let listening = tokio::spawn(accept(listener, server.clone(), Arc::clone(&counters)));
        let here = server.ssl_mode(PgSslMode::Disable).host("localhost").port(5432).socket(dir.path());
        let url = here.to_url_lossy().to_string();
        Ok(Relay { counters, listening, url, _dir: dir })
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn traffic(&self) -> Traffic {
        Traffic {
            statements: self.counters.statements.load(Ordering::Acquire),
            round_trips: self.counters.round_trips.load(Ordering::Acquire),
            bytes: self.counters.bytes.load(Ordering::Acquire),
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

async fn accept(listener: UnixListener, server: PgConnectOptions, counters: Arc<Counters>) {
    while let Ok((client, _)) = listener.accept().await {
        let (server, counters) = (server.clone(), Arc::clone(&counters));
        // A connection ends with its client, and the client reports any error.
        tokio::spawn(async move {
            let socket = match server.get_socket() {
                Some(dir) => Some(dir.clone()),
                None if server.get_host().starts_with('/') => Some(PathBuf::from(server.get_host())),
                None => None,
            };
            match socket {
                Some(dir) => {
                    let path = dir.join(format!(".s.PGSQL.{}", server.get_port()));
                    relay(client, UnixStream::connect(path).await?, &counters).await
                }
                None => {
                    let server = TcpStream::connect((server.get_host(), server.get_port())).await?;
                    server.set_nodelay(true)?;
                    relay(client, server, &counters).await
                }
            }
        });
    }
}

async fn relay(
    client: UnixStream,
    server: impl AsyncRead + AsyncWrite,
    counters: &Counters,
) -> std::io::Result<()> {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = tokio::io::split(server);
    let requests = async {
        let (mut frames, mut buffer) = (Frames::default(), vec![0; 64 << 10]);
        loop {
            let read = from_client.read(&mut buffer).await?;
            if read == 0 {
                return to_server.shutdown().await;
            }
            frames.read(&buffer[..read], counters);
            to_server.write_all(&buffer[..read]).await?;
        }
    };
    let answers = async {
        tokio::io::copy(&mut from_server, &mut to_client).await?;
        to_client.shutdown().await
    };
    tokio::try_join!(requests, answers)?;
    Ok(())
}

/// The position in the frontend's stream of messages: one byte of type, four of length, the body. The first
/// message has no type.
#[derive(Default)]
struct Frames {
    started: bool,
    head: Vec<u8>,
    body: usize,
}

impl Frames {
    fn read(&mut self, mut bytes: &[u8], counters: &Counters) {
        counters.bytes.fetch_add(bytes.len() as u64, Ordering::AcqRel);
        while !bytes.is_empty() {
            if self.body > 0 {
                let skipped = self.body.min(bytes.len());
                self.body -= skipped;
                bytes = &bytes[skipped..];
                continue;
            }
            self.head.push(bytes[0]);
            bytes = &bytes[1..];
            let typed = usize::from(self.started);
            if self.head.len() == typed + 4 {
                self.begin(typed, counters);
            }
        }
    }

    fn begin(&mut self, typed: usize, counters: &Counters) {
        let length = self.head[typed..].iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
        self.body = length.saturating_sub(4);
        if self.started {
            // Execute runs a statement, Sync waits for the answers, and a simple Query does both.
            let (statement, waits) = match self.head[0] {
                b'E' => (1, 0),
                b'S' => (0, 1),
                b'Q' => (1, 1),
                _ => (0, 0),
            };
            counters.statements.fetch_add(statement, Ordering::AcqRel);
            counters.round_trips.fetch_add(waits, Ordering::AcqRel);
        }
        self.started = true;
        self.head.clear();
    }
}
