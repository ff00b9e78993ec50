//! Why a mail was not accepted. HTTP and LMTP each say it in their own words.

use super::parse::Unreadable;
use axum::http::StatusCode;
use wakeful_engine::ingest::Refused;
use wakeful_engine::new_session::CannotBegin;
use wakeful_http::problem::Problem;
use wakeful_workflow::mail::scan::Hostile;

/// Why a mail was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum NotAccepted {
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

impl From<wakeful_store::Error> for NotAccepted {
    fn from(error: wakeful_store::Error) -> NotAccepted {
        NotAccepted::Refused(error.into())
    }
}

impl From<CannotBegin> for NotAccepted {
    fn from(cannot: CannotBegin) -> NotAccepted {
        NotAccepted::Refused(cannot.into())
    }
}

impl From<NotAccepted> for Problem {
    fn from(not_accepted: NotAccepted) -> Problem {
        let detail = not_accepted.to_string();
        match not_accepted {
            NotAccepted::Unreadable(Unreadable::Hostile(Hostile::TooLarge)) => {
                Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
            }
            NotAccepted::Unreadable(
                Unreadable::Hostile(Hostile::Headers | Hostile::Parts | Hostile::Depth | Hostile::Ambiguous)
                | Unreadable::NoMail,
            )
            | NotAccepted::NoMailbox => Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail),
            NotAccepted::Unreadable(Unreadable::NoThread) => Problem::unavailable(detail, 5),
            NotAccepted::ReadersBusy => Problem::too_many(detail, 1),
            NotAccepted::Defect => Problem::new(StatusCode::INTERNAL_SERVER_ERROR, detail),
            NotAccepted::Refused(refused) => refused.into(),
        }
    }
}
