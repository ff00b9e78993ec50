//! What is known of a call that failed.

use rmcp::model::{ErrorCode, ErrorData};
use rmcp::service::{ClientInitializeError, ServiceError};
use rmcp::transport::streamable_http_client::StreamableHttpError;
use std::error::Error as StdError;
use wakeful_engine::web::causes;

/// How much of a server's words is passed on, in letters. Of an answer that is not of the protocol, in bytes.
pub(crate) const MAX_SAID: usize = 500;

/// The status of a server that has too many requests.
const TOO_MANY: u16 = 429;

/// How a call failed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CallFailure {
    /// The server did not get it.
    NotSent(String),
    /// The server answered that it will not do it, or that it failed.
    Refused(String),
    /// It was sent, and no answer came.
    Unknown(String),
}

impl CallFailure {
    /// What is known of a call that failed. What a program wrote to its standard error is not told: it may be of another session.
    pub(crate) fn of(error: ServiceError) -> CallFailure {
        match error {
            ServiceError::McpError(error) if is_refusal(&error) => {
                CallFailure::Refused(error.message.into_owned())
            }
            ServiceError::McpError(error) => CallFailure::Unknown(quoted(&error.message)),
            ServiceError::TransportSend(error) => match was_taken(error.error.as_ref()) {
                Taken::No => CallFailure::NotSent(causes(error.error.as_ref())),
                Taken::Refused(why) => CallFailure::Refused(why),
                Taken::Perhaps => CallFailure::Unknown(causes(error.error.as_ref())),
            },
            ServiceError::TransportClosed => {
                CallFailure::Unknown("the connection ended before the answer".to_owned())
            }
            other => CallFailure::Unknown(causes(&other)),
        }
    }

    /// What is said of it.
    pub fn into_text(self) -> String {
        let (CallFailure::NotSent(text) | CallFailure::Refused(text) | CallFailure::Unknown(text)) = self;
        text
    }
}

/// Whether an error of the protocol says that the call was not carried out. After any other error that is unknown: after an internal
/// error, for example, or after one that rmcp makes of a stream that ended.
fn is_refusal(error: &ErrorData) -> bool {
    matches!(
        error.code,
        ErrorCode::PARSE_ERROR
            | ErrorCode::INVALID_REQUEST
            | ErrorCode::METHOD_NOT_FOUND
            | ErrorCode::INVALID_PARAMS
    )
}

enum Taken {
    No,
    Refused(String),
    Perhaps,
}

/// Whether a request that failed on its way can have reached the server.
fn was_taken(error: &(dyn StdError + 'static)) -> Taken {
    let mut next = Some(error);
    while let Some(error) = next {
        match error.downcast_ref::<StreamableHttpError<reqwest::Error>>() {
            Some(StreamableHttpError::HttpStatus(status)) if status.status == TOO_MANY => {
                return Taken::Refused(
                    "The tool's server has too many requests now. Try again later.".to_owned(),
                );
            }
            Some(StreamableHttpError::AuthRequired(_) | StreamableHttpError::InsufficientScope(_)) => {
                return Taken::Refused("The tool's server refuses this installation's token.".to_owned());
            }
            // The server did not take it. The call is made again on a new connection; calls in flight keep this one.
            Some(StreamableHttpError::SessionExpired) => return Taken::No,
            Some(StreamableHttpError::Client(error)) if error.is_connect() || error.is_builder() => {
                return Taken::No;
            }
            Some(_) => return Taken::Perhaps,
            None => {}
        }
        next = error.source();
    }
    Taken::Perhaps
}

/// Why a server by HTTP could not be opened: the innermost cause. What stands around it names types of rmcp.
pub(crate) fn why_not_opened(error: &ClientInitializeError) -> String {
    match error {
        ClientInitializeError::TransportError { error, .. } => innermost(error.error.as_ref()),
        other => causes(other),
    }
}

fn innermost(error: &(dyn StdError + 'static)) -> String {
    let mut last = error;
    loop {
        let next: Option<&(dyn StdError + 'static)> =
            match last.downcast_ref::<StreamableHttpError<reqwest::Error>>() {
                // This one does not name its cause as its source.
                Some(StreamableHttpError::Client(error)) => Some(error),
                Some(_) | None => last.source(),
            };
        match next {
            Some(next) => last = next,
            None => return last.to_string(),
        }
    }
}

/// What a server says, as its words and not ours, and not all of it.
fn quoted(text: &str) -> String {
    format!("it says {:?}", text.chars().take(MAX_SAID).collect::<String>())
}
