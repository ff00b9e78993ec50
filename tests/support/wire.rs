//! A proxy in front of Postgres that counts statements and can go away.

use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// How the statement begins by which each connection of the store sets itself up.
const SETTINGS: &[u8] = b"select set_config('statement_timeout'";

pub struct Proxy {
    /// The same database, through the proxy.
    pub url: String,
    postgres: PgConnectOptions,
    executed: Arc<AtomicUsize>,
    open: CancellationToken,
    connections: TaskTracker,
    dir: TempDir,
}

impl Proxy {
    pub fn start(url: &str) -> Proxy {
        let postgres = PgConnectOptions::from_str(url).expect("a Postgres URL");
        let dir = TempDir::with_prefix("wire-").expect("a temporary folder");
        // The proxy must read the statements, so they are not encrypted.
        let proxied = postgres.clone().socket(dir.path()).ssl_mode(PgSslMode::Disable);
        let mut proxy = Proxy {
            url: proxied.to_url_lossy().to_string(),
            postgres,
            executed: Arc::default(),
            open: CancellationToken::new(),
            connections: TaskTracker::new(),
            dir,
        };
        proxy.come_back();
        proxy
    }

    /// Statements executed so far, without those by which a new connection sets itself up.
    pub fn statements(&self) -> usize {
        self.executed.load(Ordering::SeqCst)
    }

    /// Ends every connection and refuses new ones, like a server that is down. When this returns, no answer passes.
    pub async fn go_away(&self) {
        self.open.cancel();
        self.connections.close();
        self.connections.wait().await;
        std::fs::remove_file(self.socket()).expect("the socket");
        drop(std::os::unix::net::UnixListener::bind(self.socket()).expect("a socket that nobody listens at"));
    }

    pub fn come_back(&mut self) {
        let _ = std::fs::remove_file(self.socket());
        let _servers = super::servers::runtime().enter();
        let listener = UnixListener::bind(self.socket()).expect("a socket");
        self.open = CancellationToken::new();
        let (open, postgres) = (self.open.clone(), self.postgres.clone());
        self.connections = TaskTracker::new();
        let connections = self.connections.clone();
        let executed = Arc::clone(&self.executed);
        let accept = async move {
            while let Ok((client, _)) = listener.accept().await {
                let (from, to) = connect(&postgres).await;
                let passing = pass(client, from, to, Arc::clone(&executed));
                connections.spawn(open.clone().run_until_cancelled_owned(passing));
            }
        };
        tokio::spawn(self.open.clone().run_until_cancelled_owned(accept));
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join(socket_name(&self.postgres))
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.open.cancel();
    }
}

type Reader = Box<dyn AsyncRead + Send + Unpin>;
type Writer = Box<dyn AsyncWrite + Send + Unpin>;

fn socket_name(options: &PgConnectOptions) -> String {
    format!(".s.PGSQL.{}", options.get_port())
}

async fn connect(options: &PgConnectOptions) -> (Reader, Writer) {
    match options.get_socket() {
        Some(dir) => {
            let stream = UnixStream::connect(dir.join(socket_name(options))).await.expect("Postgres listens");
            let (from, to) = stream.into_split();
            (Box::new(from), Box::new(to))
        }
        None => {
            let address = (options.get_host().to_owned(), options.get_port());
            let (from, to) = TcpStream::connect(address).await.expect("Postgres listens").into_split();
            (Box::new(from), Box::new(to))
        }
    }
}

/// The first message has only a length. After that, each client message is a letter and a length.
async fn pass(
    client: UnixStream,
    mut from_postgres: Reader,
    mut to_postgres: Writer,
    executed: Arc<AtomicUsize>,
) {
    let (mut from_client, mut to_client) = client.into_split();
    let back = tokio::io::copy(&mut from_postgres, &mut to_client);
    let forth = async {
        let mut letter = None;
        loop {
            let length = from_client.read_u32().await?;
            let mut body = vec![0; length as usize - 4];
            from_client.read_exact(&mut body).await?;
            // E: Execute of a prepared statement; Q: a simple query. A connection that is opened meanwhile says its settings first.
            if matches!(letter, Some(b'E' | b'Q')) && !body.starts_with(SETTINGS) {
                executed.fetch_add(1, Ordering::SeqCst);
            }
            let mut message: Vec<u8> = letter.into_iter().collect();
            message.extend(length.to_be_bytes());
            message.extend(body);
            to_postgres.write_all(&message).await?;
            letter = Some(from_client.read_u8().await?);
        }
    };
    // The connection ends when either side ends.
    let forth: std::pin::Pin<Box<dyn Future<Output = std::io::Result<u64>> + Send>> = Box::pin(forth);
    let _ = tokio::select! { end = back => end, end = forth => end };
}
