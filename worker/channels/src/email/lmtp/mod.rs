//! LMTP (RFC 2033): a mail server hands mail over, and is answered for each recipient.
//!
//! 250 is said when the mail is committed, and not before. 4xx leaves it with the server, which tries again: the database is
//! away, or this process ends. 5xx is said of what will never be taken.

mod session;
mod wire;

use anyhow::Context as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};
use wakeful_engine::ctx::Ctx;

/// Connections at a time: each may hold a whole mail.
const CONNECTIONS: usize = 20;

/// Speaks LMTP at `address` until the process drains; mails that are being handed over then are taken.
///
/// # Errors
/// When it cannot listen.
pub(super) async fn listen(ctx: Arc<Ctx>, address: SocketAddr) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address} (email.lmtp_listen)"))?;
    info!(listen = %listener.local_addr()?, "Listening for LMTP");
    let (connections, tracker) = (Arc::new(Semaphore::new(CONNECTIONS)), TaskTracker::new());
    loop {
        // Whoever is one too many waits to be accepted.
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { break };
        let accepted = tokio::select! {
            () = ctx.shutdown.draining.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
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
