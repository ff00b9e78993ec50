//! A provider of models that notes when the first byte of each request arrives.

use anyhow::{Context, Result};
use std::time::Instant;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// An answer in OpenAI's protocol.
const ANSWER: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"That is all.\"},\"finish_reason\":\"stop\"}]}\n\n\
    data: {\"choices\":[],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":4}}\n\n\
    data: [DONE]\n\n";

/// A server on the loopback. Dropping it ends it.
pub struct Provider {
    pub url: String,
    /// When the first byte of each request came.
    pub first_bytes: mpsc::UnboundedReceiver<Instant>,
    _server: JoinSet<()>,
}

impl Provider {
    pub async fn start() -> Result<Provider> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/v1", listener.local_addr()?);
        let (came, first_bytes) = mpsc::unbounded_channel();
        let mut server = JoinSet::new();
        server.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((connection, _)) = listener.accept().await {
                // A connection that breaks shows as a wait that does not end, which the bench reports.
                connections.spawn(answer_all(connection, came.clone()));
            }
        });
        Ok(Provider { url, first_bytes, _server: server })
    }
}

/// Answers the requests of one connection, one after the other.
async fn answer_all(mut connection: TcpStream, came: mpsc::UnboundedSender<Instant>) -> Result<()> {
    connection.set_nodelay(true)?;
    let mut read = Vec::new();
    loop {
        let mut first = None;
        let whole = loop {
            if let Some(whole) = request_length(&read)? {
                break whole;
            }
            if connection.read_buf(&mut read).await? == 0 {
                return Ok(());
            }
            first.get_or_insert_with(Instant::now);
        };
        read.drain(..whole);
        let _ = came.send(first.unwrap_or_else(Instant::now));
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: ";
        let answer = format!("{head}{}\r\n\r\n{ANSWER}", ANSWER.len());
        connection.write_all(answer.as_bytes()).await?;
    }
}

/// The length of the first request, if all of it is there.
fn request_length(read: &[u8]) -> Result<Option<usize>> {
    let Some(end) = read.windows(4).position(|four| four == b"\r\n\r\n") else { return Ok(None) };
    let head = std::str::from_utf8(&read[..end])?.to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    let whole = end + 4 + length.context("a request without a length")?.trim().parse::<usize>()?;
    Ok((read.len() >= whole).then_some(whole))
}
