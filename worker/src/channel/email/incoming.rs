//! Mail that came in, by whatever door: read, judged, and given to a session.

use crate::Ctx;
use crate::api::Problem;
use axum::http::StatusCode;
use bytes::Bytes;
use wakeful_store::wake::Woken;

/// A mail as it arrived, before anything of it was read.
#[derive(Clone, Debug)]
pub struct Arrived {
    /// The whole message, RFC 5322.
    pub raw: Bytes,
    /// The envelope's sender. `None`: nobody told; empty: the null return path.
    pub mail_from: Option<String>,
    /// The envelope's recipients. Empty: nobody told, and those of the header count.
    pub recipients: Vec<String>,
    /// What the party that handed it over, and proved who it is, says of its DMARC result. `None`: nothing.
    pub dmarc_passed: Option<bool>,
}

/// What became of it.
#[derive(Clone, Debug)]
pub enum Taken {
    /// It woke a session, or did before (`duplicate`).
    Woke(Woken),
    /// It is kept from the agents for good, and its sender's server need not try again: machine mail, a loop, a mailbox of
    /// nobody.
    Dropped { reason: String },
}

/// Takes a mail: one session for each mailbox of ours that it is for.
///
/// # Errors
/// What is no mail, or too large a one, and those of [`crate::ingest::take`].
#[expect(clippy::unused_async, reason = "what it will do waits for the database")]
pub async fn take(_: &Ctx, _: Arrived) -> Result<Vec<Taken>, Problem> {
    Err(Problem::new(StatusCode::NOT_IMPLEMENTED, "mail cannot come in yet"))
}
