//! What a caller does differently: everything else is an outcome of the call.

use wakeful_workflow::session::SessionStatus;

/// Why the store did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The database said no, or could not be asked.
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
    /// A row that the caller named does not exist.
    #[error("{what} {id} does not exist")]
    NotFound { what: &'static str, id: String },
    /// The request does not fit the session's status.
    #[error("session {session_id} is {}: {wanted} is not possible now", status.as_str())]
    Conflict { session_id: String, status: SessionStatus, wanted: &'static str },
    /// What is asked does not fit what is known of it; the reason says what would.
    #[error("session {session_id}: {reason}")]
    Refused { session_id: String, reason: String },
    /// The same idempotency key came with another body.
    #[error("client_key {client_key:?} was used before with another message")]
    KeyReused { client_key: String },
    /// Too many messages wait in one session.
    #[error("{pending} messages wait in this session already")]
    InboxFull { pending: i64 },
    /// The schema is not the one that this binary was built for.
    #[error("{0}")]
    Schema(String),
    /// A stored row does not read as what it must be.
    #[error("corrupt {what}: {reason}")]
    Corrupt { what: &'static str, reason: String },
}

/// Shorthand.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Whether asking again later can help: the connection, the server's load or its restart is at fault.
    pub fn is_transient(&self) -> bool {
        match self {
            Error::Database(error) => is_transient(error),
            Error::NotFound { .. }
            | Error::Conflict { .. }
            | Error::Refused { .. }
            | Error::KeyReused { .. }
            | Error::InboxFull { .. }
            | Error::Schema(_)
            | Error::Corrupt { .. } => false,
        }
    }

    pub(crate) fn corrupt(what: &'static str, reason: impl std::fmt::Display) -> Error {
        Error::Corrupt { what, reason: reason.to_string() }
    }
}

fn is_transient(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => true,
        sqlx::Error::Database(error) => {
            // Classes: 08 connection, 25006 read-only standby, 40 serialisation and deadlock, 53 resources
            // (disk full, too many connections), 55P03 lock not available, 57P0x shutdown and restart, 58 system;
            // 57014 and 25P03 are our own time limits, on a server that is too slow just now.
            error.code().is_some_and(|code| {
                ["08", "40", "53", "58"].iter().any(|class| code.starts_with(class))
                    || matches!(
                        code.as_ref(),
                        "25006" | "25P03" | "55P03" | "57014" | "57P01" | "57P02" | "57P03"
                    )
            })
        }
        _ => false,
    }
}

/// Whether the statement raised division by zero: a predicate of the fence missed.
pub(crate) fn missed_fence(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "22012")
}
