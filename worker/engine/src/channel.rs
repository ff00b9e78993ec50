//! The trait that a medium implements: how an outgoing message is sent. [`crate::jobs::deliver`] hands each delivery to the
//! [`Channel`] of its name.

use async_trait::async_trait;
use serde_json::Value;
use std::time::Duration;

/// How long one attempt may take: a channel that hangs would hold up every later message of its conversation.
pub const SEND: Duration = Duration::from_secs(60);

/// Sends outgoing messages of one kind.
#[async_trait]
pub trait Channel: Send + Sync {
    /// The word in `deliveries.channel`.
    fn name(&self) -> &str;

    /// Whether sending the same delivery id again does nothing more. Otherwise a delivery that was found half-way
    /// is shown as uncertain and never sent again by itself.
    fn is_idempotent(&self) -> bool;

    /// Sends one message and gives the receipt.
    ///
    /// # Errors
    /// [`SendError`], which says whether it may have gone out.
    async fn send(&self, message: &Outbound<'_>) -> Result<Value, SendError>;

    /// What became of a delivery whose sending nobody saw end. A channel that cannot be asked says so, which is the
    /// default: then it is sent again if that is harmless, and else shown as uncertain.
    ///
    /// # Errors
    /// When the answer could not be had just now; it is asked for again.
    async fn find(&self, _delivery_id: &str) -> Result<Found, SendError> {
        Ok(Found::Unknown)
    }

    /// The same where a channel can look only in the place that the message was for.
    ///
    /// # Errors
    /// Those of [`Channel::find`].
    async fn find_message(&self, message: &Outbound<'_>) -> Result<Found, SendError> {
        self.find(message.delivery_id).await
    }
}

/// What a channel knows of a delivery's key.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    Sent {
        receipt: Value,
    },
    /// It was certainly not sent. An attempt that is still under way does not have to be known here.
    NotSent,
    Unknown,
}

/// One delivery, ready to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Outbound<'a> {
    /// The key under which it is sent: the same in every attempt.
    pub delivery_id: &'a str,
    pub content: &'a Value,
}

/// Why a message was not sent for certain.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// It was not sent and never will be.
    #[error("{0}")]
    Refused(String),
    /// It was not sent; trying again may help.
    #[error("{0}")]
    Later(String),
    /// It was not sent, because the receiver takes no more for `after`. It is tried again then, which is no attempt that
    /// counts: waiting for one's turn is no fault.
    #[error("{error}")]
    Throttled { error: String, after: Duration },
    /// It may have been sent.
    #[error("{0}")]
    Unknown(String),
}
