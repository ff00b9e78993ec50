//! Errors that a caller handles differently. Every other result is an outcome of the call.
#![doc = include_str!("error.md")]
#![deny(missing_docs)]

use crate::lines::Held;
use wakeful_workflow::notify::LinkState;
use wakeful_workflow::session::SessionStatus;

/// Reason why the store failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The database returned an error, or could not be reached.
    #[error("database: {}", said(.0))]
    Database(#[from] sqlx::Error),
    /// A row that the caller named does not exist.
    #[error("{what} {id} does not exist")]
    NotFound {
        /// The kind of row, such as "session".
        what: &'static str,
        /// The id that the caller gave.
        id: String,
    },
    /// The session's status does not allow the request.
    #[error("session {session_id} is {}: {wanted} is not possible now", status.as_str())]
    Conflict {
        /// The session.
        session_id: String,
        /// Its status.
        status: SessionStatus,
        /// The request, such as "an answer".
        wanted: &'static str,
    },
    /// The state of the effect does not allow the request; the reason says which request would be accepted.
    #[error("session {session_id}: {reason}")]
    Refused {
        /// The session.
        session_id: String,
        /// Why, and which request would be accepted.
        reason: String,
    },
    /// The schedule does not allow the request; the reason says which request would be accepted.
    #[error("schedule {name}: {reason}")]
    Schedule {
        /// The schedule.
        name: String,
        /// Why, and which request would be accepted.
        reason: String,
    },
    /// The row has changed since the caller read it.
    #[error("{what} {id} has changed: read it again, and send the change for its present version")]
    Outdated {
        /// The kind of row, such as "schedule".
        what: &'static str,
        /// The id that the caller gave.
        id: String,
    },
    /// The batch does not allow the request, or cannot be made; the reason says why.
    #[error("batch {batch_id}: {reason}")]
    Batch {
        /// The batch, or the verb of one that was to be made.
        batch_id: String,
        /// Why, and which request would be accepted.
        reason: String,
    },
    /// A store of blobs outside of Postgres did not do what it was asked.
    #[error("the blob store {store} is away: {reason}")]
    BlobStore {
        /// Its address.
        store: String,
        /// What it said.
        reason: String,
    },
    /// A link that lets a person act once cannot be used.
    #[error("{}", state.said(by.as_deref()))]
    Link {
        /// Why not.
        state: LinkState,
        /// Who used it.
        by: Option<String>,
    },
    /// The erasure is not allowed now; the reason says why.
    #[error("nothing was erased: {reason}")]
    NotErased {
        /// Why.
        reason: String,
    },
    /// The same idempotency key came with another message.
    #[error("client_key {client_key:?} was used before with another message")]
    KeyReused {
        /// The key.
        client_key: String,
    },
    /// The message speaks for another user than the one that the conversation belongs to.
    #[error("conversation {conversation_id} belongs to another user")]
    OfAnotherUser {
        /// The conversation, without its space.
        conversation_id: String,
    },
    /// The conversation is a user's, and the message speaks for no user: a messenger, a schedule, a notice or a mail.
    #[error(
        "conversation {conversation_id} belongs to a user, and this message does not speak for that user"
    )]
    OfAUser {
        /// The conversation, without its space.
        conversation_id: String,
    },
    /// The conversation does not exist yet, a schedule will use it, and the sender reaches only one agent or user.
    #[error("conversation {conversation_id} is one that a schedule begins; this token may not")]
    OfASchedule {
        /// The conversation, without its space.
        conversation_id: String,
    },
    /// Too many messages wait in one session.
    #[error("{pending} messages wait in this session already")]
    InboxFull {
        /// How many wait.
        pending: i64,
    },
    /// The schema is not the one of this binary.
    #[error("{0}")]
    Schema(String),
    /// The bundle was refused. Nothing of it was written.
    #[error("the bundle is refused: {0}")]
    Bundle(wakeful_workflow::bundle::Refused),
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    File {
        /// The path of the file.
        path: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The data keys of encrypted texts cannot be had now.
    #[error("key store: {reason}")]
    Keys {
        /// Why.
        reason: String,
    },
    /// A stored row has an invalid value.
    #[error("corrupt {what}: {reason}")]
    Corrupt {
        /// The kind of row or value.
        what: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

// No `#[from]`: the message contains the cause, and a chain of causes would print it twice.
impl From<wakeful_workflow::bundle::Refused> for Error {
    fn from(refused: wakeful_workflow::bundle::Refused) -> Error {
        Error::Bundle(refused)
    }
}

/// The result of a store function.
pub type Result<T> = std::result::Result<T, Error>;

/// What cannot be done with a session that was imported from a redacted bundle: it would ask its model about hashes.
pub(crate) const CANNOT_CONTINUE: &str = "without its texts it cannot be continued";

impl Error {
    /// The refusal of a session that was imported from a redacted bundle. `what` cannot be done with it.
    pub(crate) fn without_texts(session_id: &str, what: &str) -> Error {
        let reason = format!("it was imported from a redacted bundle: {what}");
        Error::Refused { session_id: session_id.to_owned(), reason }
    }

    /// Returns whether a retry can help, because the cause is the connection, the server's load or a restart.
    pub fn is_transient(&self) -> bool {
        self.outage().is_some()
    }

    /// Returns the outage, if the cause is the database as a whole and not the statement.
    pub fn outage(&self) -> Option<Outage> {
        match self {
            Error::Database(error) => outage_of(error),
            Error::Keys { .. } => Some(Outage::KeysAway),
            Error::BlobStore { .. } => Some(Outage::Blobs),
            Error::NotFound { .. }
            | Error::Conflict { .. }
            | Error::Refused { .. }
            | Error::Schedule { .. }
            | Error::Batch { .. }
            | Error::Link { .. }
            | Error::Outdated { .. }
            | Error::NotErased { .. }
            | Error::KeyReused { .. }
            | Error::OfAnotherUser { .. }
            | Error::OfAUser { .. }
            | Error::OfASchedule { .. }
            | Error::InboxFull { .. }
            | Error::Schema(_)
            | Error::Bundle(_)
            | Error::File { .. }
            | Error::Corrupt { .. } => None,
        }
    }

    pub(crate) fn corrupt(what: &'static str, reason: impl std::fmt::Display) -> Error {
        Error::Corrupt { what, reason: reason.to_string() }
    }
}

/// Temporary state in which the database refuses work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outage {
    /// It is stopped or starting, or the connection broke.
    Away,
    /// All connections are in use, in Wakeful's pool or on the server.
    Crowded,
    /// It is a standby, or it was set to read-only.
    ReadOnly,
    /// Its disk is full.
    DiskFull,
    /// It ran out of memory or of another resource, or its files cannot be read or written.
    Ailing,
    /// A statement ran into a time limit or a deadlock.
    Contended,
    /// Another transaction holds a row for too long. The database is well, and so are other sessions.
    Locked,
    /// The store of the data keys cannot be reached, or lacks a master key.
    KeysAway,
    /// The database is well, but a store of blobs outside of it is away.
    Blobs,
}

impl Outage {
    /// The outage in words, for logs and readiness.
    pub fn as_str(self) -> &'static str {
        match self {
            Outage::Away => "the database cannot be reached",
            Outage::Crowded => "no connection to the database is free",
            Outage::ReadOnly => "the database takes no writes: it is read-only",
            Outage::DiskFull => "the database takes no writes: its disk is full",
            Outage::Ailing => "the database is out of a resource",
            Outage::Contended => "the database was too slow, or its transactions are in each other's way",
            Outage::Locked => "another transaction holds what this is to change",
            Outage::KeysAway => "the data keys of encrypted texts cannot be had",
            Outage::Blobs => "a blob store cannot be reached",
        }
    }

    /// Returns whether the server answers reads and refuses writes, so that a read does not show the outage.
    pub fn refuses_writes(self) -> bool {
        match self {
            Outage::ReadOnly | Outage::DiskFull | Outage::Ailing => true,
            Outage::Away
            | Outage::Crowded
            | Outage::Contended
            | Outage::Locked
            | Outage::KeysAway
            | Outage::Blobs => false,
        }
    }
}

/// The text of a database error. sqlx has no error for a wait of our own and would give it the text of another one.
fn said(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::AnyDriverError(ours) if ours.is::<Held>() => ours.to_string(),
        error => error.to_string(),
    }
}

fn outage_of(error: &sqlx::Error) -> Option<Outage> {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => Some(Outage::Away),
        sqlx::Error::PoolTimedOut => Some(Outage::Crowded),
        sqlx::Error::AnyDriverError(error) if error.is::<Held>() => Some(Outage::Locked),
        sqlx::Error::Database(error) => of_code(error.code()?.as_ref()),
        _ => None,
    }
}

/// By SQLSTATE: https://www.postgresql.org/docs/current/errcodes-appendix.html
fn of_code(code: &str) -> Option<Outage> {
    Some(match code {
        "25006" => Outage::ReadOnly,
        "53100" => Outage::DiskFull,
        "53300" => Outage::Crowded,
        "55P03" => Outage::Locked,
        // Our own time limits; the server or this process is too slow at the moment.
        "25P03" | "57014" => Outage::Contended,
        "57P01" | "57P02" | "57P03" => Outage::Away,
        _ if code.starts_with("08") => Outage::Away,
        _ if code.starts_with("40") => Outage::Contended,
        _ if code.starts_with("53") || code.starts_with("58") => Outage::Ailing,
        _ => return None,
    })
}

/// Foreign text as a column takes it: of bounded length and without NUL, which Postgres refuses.
pub fn bounded(text: &str) -> String {
    const BYTES: usize = 2000;
    let clean = wakeful_workflow::record::without_nul(text.to_owned());
    if clean.len() <= BYTES {
        return clean;
    }
    let end = clean.floor_char_boundary(BYTES);
    format!("{}…", &clean[..end])
}

/// Returns whether the statement raised division by zero, which means that a predicate of its fence did not
/// match.
pub(crate) fn missed_fence(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "22012")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_known_by_its_code_and_a_wrong_statement_is_none() {
        for (code, outage) in [
            ("25006", Some(Outage::ReadOnly)),
            ("53100", Some(Outage::DiskFull)),
            ("53300", Some(Outage::Crowded)),
            ("53200", Some(Outage::Ailing)),
            ("58030", Some(Outage::Ailing)),
            ("40001", Some(Outage::Contended)),
            ("40P01", Some(Outage::Contended)),
            ("55P03", Some(Outage::Locked)),
            ("25P03", Some(Outage::Contended)),
            ("57P03", Some(Outage::Away)),
            ("08006", Some(Outage::Away)),
            ("22012", None),
            ("23505", None),
            ("42P01", None),
        ] {
            assert_eq!(of_code(code), outage, "{code}");
        }
    }

    #[test]
    fn a_wait_in_line_is_said_in_its_own_words() {
        let error = Error::from(crate::lines::NotReached::TooLate);
        assert_eq!(error.outage(), Some(Outage::Locked));
        assert_eq!(error.to_string(), "database: another task of this process waits for the same row");
    }

    #[test]
    fn a_foreign_text_is_cut_and_loses_its_nul() {
        assert_eq!(bounded("a\0b"), "a\u{fffd}b");
        let long = bounded(&"é".repeat(5000));
        assert!(long.len() <= 2004 && long.ends_with('…'), "{}", long.len());
    }
}
