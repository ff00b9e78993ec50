//! The trait [`Channel`], which sends outgoing messages through one medium. [`crate::jobs::deliver`] hands
//! each delivery to the channel of its name.
#![deny(missing_docs)]

use async_trait::async_trait;
use serde_json::Value;
use std::time::Duration;

/// Time limit of one attempt. Without it, a channel that hangs would block every later message of its
/// conversation.
pub const SEND: Duration = Duration::from_secs(60);

/// Sends outgoing messages of one kind.
#[async_trait]
pub trait Channel: Send + Sync {
    /// The word in `deliveries.channel`.
    fn name(&self) -> &str;

    /// Returns whether sending the same delivery id again has no further effect. If not, a delivery that was
    /// interrupted while it was being sent is shown as uncertain and is never sent again automatically.
    fn is_idempotent(&self) -> bool;

    /// Sends one message and returns the receipt.
    ///
    /// # Errors
    /// [`SendError`], which says whether the message may have gone out.
    async fn send(&self, message: &Outbound<'_>) -> Result<Value, SendError>;

    /// Looks up whether a delivery was sent, after its sending was interrupted. The default, for a channel
    /// that cannot look it up, is [`Found::Unknown`]: the delivery is then sent again if the channel is
    /// idempotent, and otherwise shown as uncertain.
    ///
    /// # Errors
    /// When the channel cannot answer right now; the caller asks again.
    async fn find(&self, _delivery_id: &str) -> Result<Found, SendError> {
        Ok(Found::Unknown)
    }

    /// Like [`Channel::find`], for a channel that can look only in the place where the message was sent.
    ///
    /// # Errors
    /// Those of [`Channel::find`].
    async fn find_message(&self, message: &Outbound<'_>) -> Result<Found, SendError> {
        self.find(message.delivery_id).await
    }
}

/// What a channel knows about a delivery id.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Found {
    /// It was sent.
    Sent {
        /// What [`Channel::send`] would have returned.
        receipt: Value,
    },
    /// It was certainly not sent. The channel may not know yet about an attempt that is still under way.
    NotSent,
    /// The channel cannot tell.
    Unknown,
}

/// One delivery, ready to be sent.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Outbound<'a> {
    /// The idempotency key: the same in every attempt.
    pub delivery_id: &'a str,
    /// The message: an object whose keys depend on what queued the delivery.
    pub content: &'a Value,
}

impl<'a> Outbound<'a> {
    /// Creates a delivery. Programs need this in tests of their channels only.
    pub fn new(delivery_id: &'a str, content: &'a Value) -> Outbound<'a> {
        Outbound { delivery_id, content }
    }
}

/// How an attempt to send a message failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// It was not sent and never will be.
    #[error("{0}")]
    Refused(String),
    /// It was not sent; trying again may help.
    #[error("{0}")]
    Later(String),
    /// It was not sent, because the receiver accepts nothing more for the time `after`. It is tried again
    /// after that time. Waiting is not a failure, so this does not count as an attempt.
    #[error("{error}")]
    Throttled {
        /// What the receiver said.
        error: String,
        /// How long it accepts nothing.
        after: Duration,
    },
    /// It may have been sent.
    #[error("{0}")]
    Unknown(String),
}
