//! LMTP (RFC 2033): a mail server hands mail over and gets an answer for each recipient.
//!
//! 250 means that the mail is committed. 4xx leaves the mail with its server, which retries: the database is
//! down, or this process is stopping. 5xx refuses it for good.
//!
//! LMTP has no password, and a mail that comes by it may say that a trusted server proved its sender. So only
//! the servers of `email.lmtp_peers` may speak: without that key, those on this machine.

mod session;
mod wire;

use anyhow::Context as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};
use wakeful_engine::ctx::Ctx;
use wakeful_http::seldom::Seldom;

/// Maximum number of connections at a time. Each may hold a whole mail in memory.
const CONNECTIONS: usize = 20;

/// Lines about connections that were refused.
static REFUSED: Seldom = Seldom::new();

/// Serves LMTP at `address` until the process drains. Mails in transfer at that moment are still accepted.
///
/// # Errors
/// When the address cannot be opened.
pub(super) async fn listen(ctx: Arc<Ctx>, address: SocketAddr) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address} (email.lmtp_listen)"))?;
    info!(listen = %listener.local_addr()?, "Listening for LMTP");
    let (connections, tracker) = (Arc::new(Semaphore::new(CONNECTIONS)), TaskTracker::new());
    loop {
        // Beyond the limit, a new connection waits to be accepted.
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { break };
        let accepted = tokio::select! {
            () = ctx.shutdown.draining.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((mut stream, peer)) if !ctx.config.email.incoming.is_lmtp_peer(peer.ip()) => {
                if let Some(left_out) = REFUSED.turn("peer") {
                    warn!(%peer, left_out, "An LMTP connection was refused: email.lmtp_peers does not list its address");
                }
                // It fits into the socket's empty buffer, so nothing is waited for.
                let _ = stream.write_all(b"421 4.7.1 This server takes no mail from you\r\n").await;
            }
            Ok((stream, peer)) => {
                let ctx = Arc::clone(&ctx);
                tracker.spawn(async move {
                    if let Err(error) = session::serve(&ctx, stream).await {
                        info!(%peer, %error, "An LMTP connection ended early");
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                warn!(%error, "A connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    tracker.close();
    tracker.wait().await;
    Ok(())
}
