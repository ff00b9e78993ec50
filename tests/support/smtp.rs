//! An SMTP server that keeps what it accepts. At any point it can be told to refuse, to fall silent or to
//! hang up.

use super::received::Received;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::watch;

/// A mail that the server accepted.
#[derive(Clone, Debug)]
pub struct Mail {
    pub from: String,
    pub to: Vec<String>,
    /// The message with `\r\n`, dots unstuffed.
    pub data: String,
}

impl Mail {
    /// A header's value, unfolded. Panics if the header appears twice.
    pub fn header(&self, name: &str) -> Option<String> {
        let head =
            self.data.split("\r\n\r\n").next().expect("a head").replace("\r\n ", " ").replace("\r\n\t", " ");
        let start = format!("{}: ", name.to_ascii_lowercase());
        let mut found = head
            .split("\r\n")
            .filter(|line| line.to_ascii_lowercase().starts_with(&start))
            .map(|line| line[start.len()..].to_owned());
        let first = found.next();
        assert!(found.next().is_none(), "{name} twice: {}", self.data);
        first
    }

    pub fn body(&self) -> &str {
        self.data.split_once("\r\n\r\n").expect("a body").1
    }
}

/// A running server on loopback, without TLS.
pub struct SmtpServer {
    pub port: u16,
    shared: Arc<Shared>,
    server: tokio::task::JoinHandle<()>,
}

struct Shared {
    mails: Received<Mail>,
    /// The answer in place of `250`, by the beginning of the client's line. `drop` hangs up, `hold` says
    /// nothing.
    replies: Mutex<BTreeMap<String, String>>,
    /// Every line received, without those of messages.
    lines: Mutex<Vec<String>>,
    /// Lines that were answered with silence.
    held: watch::Sender<usize>,
}

impl SmtpServer {
    #[expect(clippy::unused_async, reason = "tests start every kind of server with `.await`")]
    pub async fn start() -> SmtpServer {
        let listener = super::servers::listen();
        let port = listener.local_addr().expect("an address").port();
        let shared = Arc::new(Shared {
            mails: Received::default(),
            replies: Mutex::default(),
            lines: Mutex::default(),
            held: watch::channel(0).0,
        });
        let of_server = Arc::clone(&shared);
        let server = super::servers::runtime().spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let shared = Arc::clone(&of_server);
                tokio::spawn(async move { drop(serve(stream, &shared).await) });
            }
        });
        SmtpServer { port, shared, server }
    }

    /// From now on, lines that begin with `line` get this answer: a reply, `drop` or `hold`. Examples of
    /// `line`: `RCPT TO:<bob@example.org>`, `.`, or `GREETING` for the server's first word.
    pub fn answers(&self, line: &str, reply: &str) {
        let mut replies = self.shared.replies.lock().expect("no connection panics");
        replies.insert(line.to_owned(), reply.to_owned());
    }

    /// From now on everything is accepted.
    pub fn is_well(&self) {
        self.shared.replies.lock().expect("no connection panics").clear();
    }

    pub fn mails(&self) -> Vec<Mail> {
        self.shared.mails.all()
    }

    /// Waits until `count` mails are there, and returns all.
    pub async fn has(&self, count: usize) -> Vec<Mail> {
        self.shared.mails.until(&format!("{count} mails"), |mails| mails.len() >= count).await
    }

    /// The number of lines received that begin with `line`.
    pub fn heard(&self, line: &str) -> usize {
        let lines = self.shared.lines.lock().expect("no connection panics");
        lines.iter().filter(|heard| heard.starts_with(line)).count()
    }

    /// Waits until a line was answered with silence.
    pub async fn wait_for_hold(&self) {
        let mut held = self.shared.held.subscribe();
        held.wait_for(|held| *held > 0).await.expect("the server runs");
        self.shared.held.send_replace(0);
    }

    /// The sections `[email]` and `[email.smtp]` for a process that sends through this server.
    pub fn config(&self) -> String {
        format!(
            "[email]\nfrom = \"Desk <desk@example.org>\"\n[email.smtp]\nhost = \"127.0.0.1\"\nport = {}\nsecurity = \"none\"\n\
             timeout_s = 10\n",
            self.port
        )
    }
}

impl Drop for SmtpServer {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Shared {
    fn manner(&self, line: &str) -> Option<String> {
        let replies = self.replies.lock().expect("no connection panics");
        replies.iter().find(|(begin, _)| line.starts_with(begin.as_str())).map(|(_, reply)| reply.clone())
    }
}

/// How the connection continues after a line.
enum Goes {
    On,
    Refused,
    Away,
}

async fn serve(stream: TcpStream, shared: &Shared) -> std::io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read).split(b'\n');
    if let Goes::Away = say(&mut write, shared, "GREETING", "220 test ESMTP").await? {
        return Ok(());
    }
    let mut mail = Mail { from: String::new(), to: Vec::new(), data: String::new() };
    while let Some(line) = lines.next_segment().await? {
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        shared.lines.lock().expect("no connection panics").push(line.clone());
        let word = line.split([' ', ':']).next().unwrap_or_default().to_ascii_uppercase();
        let usual = match word.as_str() {
            "EHLO" => "250-test\r\n250-8BITMIME\r\n250 ENHANCEDSTATUSCODES",
            "DATA" => "354 go on",
            "QUIT" => "221 bye",
            _ => "250 2.0.0 OK",
        };
        let goes = say(&mut write, shared, &line, usual).await?;
        match (word.as_str(), goes) {
            (_, Goes::Away) => return Ok(()),
            ("MAIL", Goes::On) => {
                mail = Mail { from: bare(&line), to: Vec::new(), data: String::new() };
            }
            ("RCPT", Goes::On) => mail.to.push(bare(&line)),
            ("DATA", Goes::On) => {
                while let Some(text) = lines.next_segment().await? {
                    let text = String::from_utf8_lossy(&text).trim_end_matches('\r').to_owned();
                    if text == "." {
                        break;
                    }
                    mail.data.push_str(text.strip_prefix('.').unwrap_or(&text));
                    mail.data.push_str("\r\n");
                }
                // A mail that is not refused counts as accepted, even if the answer never arrives.
                let refused = shared.manner(".").is_some_and(|reply| reply.starts_with(['4', '5']));
                if !refused {
                    shared.mails.push(mail.clone());
                }
                if let Goes::Away = say(&mut write, shared, ".", "250 2.0.0 taken").await? {
                    return Ok(());
                }
            }
            ("QUIT", _) => return Ok(()),
            _ => {}
        }
    }
    Ok(())
}

async fn say(write: &mut OwnedWriteHalf, shared: &Shared, line: &str, usual: &str) -> std::io::Result<Goes> {
    let reply = shared.manner(line).unwrap_or_else(|| usual.to_owned());
    if reply == "drop" {
        return Ok(Goes::Away);
    }
    if reply == "hold" {
        shared.held.send_modify(|held| *held += 1);
        // Until the client is gone.
        std::future::pending::<()>().await;
    }
    write.write_all(format!("{reply}\r\n").as_bytes()).await?;
    Ok(if reply.starts_with(['4', '5']) { Goes::Refused } else { Goes::On })
}

/// The address between `<` and `>`.
fn bare(line: &str) -> String {
    let from = line.find('<').map_or(0, |at| at + 1);
    line[from..].split('>').next().unwrap_or_default().to_owned()
}
