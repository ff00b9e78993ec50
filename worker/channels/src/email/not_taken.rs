//! Why a mail was not taken. HTTP and LMTP each say it in their own words.

use super::parse::Unreadable;
use axum::http::StatusCode;
use wakeful_engine::ingest::Refused;
use wakeful_engine::origin::CannotBegin;
use wakeful_http::problem::Problem;
use wakeful_workflow::mail::scan::Hostile;

/// Why a mail was not taken.
#[derive(Debug, thiserror::Error)]
pub enum NotTaken {
    /// It is not a mail, is too large, or no thread was free to read it.
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    /// Too many mails are being read at once.
    #[error("too many mails are being read; send it again later")]
    ReadersBusy,
    /// None of its recipients is a mailbox of the configuration.
    #[error(
        "the mail is for no mailbox of email.mailboxes; name its recipient by `rcpt`, or add the mailbox"
    )]
    NoMailbox,
    /// The reader panicked. The log has the mail's error.
    #[error("the mail could not be read; the server's log says why")]
    Defect,
    /// It was read, and the intake or the store refused it.
    #[error(transparent)]
    Refused(#[from] Refused),
}

impl From<wakeful_store::Error> for NotTaken {
    fn from(error: wakeful_store::Error) -> NotTaken {
        NotTaken::Refused(error.into())
    }
}

impl From<CannotBegin> for NotTaken {
    fn from(cannot: CannotBegin) -> NotTaken {
        NotTaken::Refused(cannot.into())
    }
}

impl From<NotTaken> for Problem {
    fn from(not_taken: NotTaken) -> Problem {
        let detail = not_taken.to_string();
        match not_taken {
            NotTaken::Unreadable(Unreadable::Hostile(Hostile::TooLarge)) => {
                Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
            }
            NotTaken::Unreadable(
                Unreadable::Hostile(Hostile::Headers | Hostile::Parts | Hostile::Depth | Hostile::Ambiguous)
                | Unreadable::NoMail,
            )
            | NotTaken::NoMailbox => Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail),
            NotTaken::Unreadable(Unreadable::NoThread) => Problem::unavailable(detail, 5),
            NotTaken::ReadersBusy => Problem::too_many(detail, 1),
            NotTaken::Defect => Problem::new(StatusCode::INTERNAL_SERVER_ERROR, detail),
            NotTaken::Refused(refused) => refused.into(),
        }
    }
}
