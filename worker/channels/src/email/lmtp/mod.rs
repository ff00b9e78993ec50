//! LMTP (RFC 2033): a mail server hands mail over and gets an answer for each recipient.
//!
//! 250 means that the mail is committed. 4xx leaves the mail with its server, which retries: the database is
//! down, or this process is stopping. 5xx refuses it for good.

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

/// Maximum number of connections at a time. Each may hold a whole mail in memory.
const CONNECTIONS: usize = 20;

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
