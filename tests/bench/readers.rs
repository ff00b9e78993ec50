//! Readers of live streams that have nothing to read: what they cost the process that serves them.

use crate::fixture::Database;
use crate::process::{self, Site};
use crate::server::Server;
use crate::worker;
use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use sqlx::Connection;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What idle readers cost, and the same process without them.
#[derive(Clone, Copy, Debug)]
pub struct Idle {
    pub readers: usize,
    pub mb_before: f64,
    pub mb: f64,
    pub cpu_percent: f64,
    pub statements_per_s: f64,
}

/// Opens `readers` streams, each of a session of its own, and measures the process while nothing happens.
pub async fn idle(server: &mut Server, readers: usize) -> Result<Idle> {
    // Each stream is a descriptor here and one in the process, which inherits the limit.
    let most = process::raise_descriptors()?;
    ensure!(readers as u64 + 500 < most, "{readers} readers need more than {most} descriptors");
    let database = Database::create(server.url(), "readers").await?;
    let site = Site::new()?;
    worker::rest(&database, &site, readers).await?;
    let api = site.serve(&database.url, "api").await?;
    let (pid, address) = (api.pid()?, api.url()?);
    let address = address.strip_prefix("http://").context("an address")?;
    let mut connection = database.connect().await?;
    let sessions: Vec<String> = sqlx::query_scalar("select session_id from conversation_sessions limit $1")
        .bind(readers as i64)
        .fetch_all(&mut connection)
        .await?;
    connection.close().await?;
    let mb_before = process::resident_mb(pid)?;
    let streams: Vec<TcpStream> = futures::stream::iter(&sessions)
        .map(|session_id| open(address, session_id))
        .buffer_unordered(64)
        .collect::<Vec<_>>()
        .await
        .into_iter()
        .collect::<Result<_>>()?;
    // The first look of each stream is over then, and the second one, after the query of all streams saw its session for the first
    // time: it takes a thousand sessions a second. They show nothing, so no stream tells of it.
    tokio::time::sleep(Duration::from_secs(3 + readers as u64 / 1000)).await;
    let seconds = 10.0;
    let meter = server.start(&database).await?;
    let before = process::cpu_seconds(pid);
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
    let cpu_percent = 100.0 * (process::cpu_seconds(pid) - before) / seconds;
    let spent = server.stop(&database, meter).await?;
    let mb = process::resident_mb(pid)?;
    let readers = streams.len();
    drop(streams);
    api.kill().await?;
    database.remove().await?;
    Ok(Idle {
        readers,
        mb_before,
        mb,
        cpu_percent,
        statements_per_s: spent.statements.unwrap_or(f64::NAN) / seconds,
    })
}

/// Opens a stream at the end of a session's journal, and reads the head of the answer.
async fn open(address: &str, session_id: &str) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!(
        "GET /v1/sessions/{session_id}/stream?after=1000000 HTTP/1.1\r\nhost: {address}\r\naccept: text/event-stream\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut head = Vec::new();
    while !head.windows(4).any(|four| four == b"\r\n\r\n") {
        ensure!(
            stream.read_buf(&mut head).await? > 0,
            "the stream ended: {}",
            String::from_utf8_lossy(&head)
        );
    }
    ensure!(head.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&head));
    Ok(stream)
}
