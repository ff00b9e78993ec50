//! rmcp's HTTP client with changes: answers that no caller would ever hear of become errors.

use futures::stream::BoxStream;
use reqwest::header::{HeaderName, HeaderValue};
use rmcp::model::{ClientJsonRpcMessage, ErrorData, JsonRpcMessage, RequestId, ServerJsonRpcMessage};
use rmcp::transport::streamable_http_client::{
    StreamableHttpClient, StreamableHttpError, StreamableHttpPostResponse, StreamableHttpResponseLimits,
};
use sse_stream::{Error as SseError, Sse};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// How long an answer that broke off rests before it is taken up again.
const RESUMED: Duration = Duration::from_secs(1);

type Headers = HashMap<HeaderName, HeaderValue>;
type Failure = StreamableHttpError<reqwest::Error>;
type Events = BoxStream<'static, Result<Sse, SseError>>;

/// An HTTP client that fails a request whose answer names another request or none.
///
/// A server that began anew knows no old session. The protocol wants the status 404 then, and its own reference server answers 400
/// with an error without an id. rmcp would wait for an answer with the request's id, for good.
#[derive(Clone, Debug)]
pub(crate) struct Http(pub reqwest::Client);

impl StreamableHttpClient for Http {
    type Error = reqwest::Error;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        auth_header: Option<String>,
        custom_headers: Headers,
    ) -> Result<StreamableHttpPostResponse, Failure> {
        let limits = StreamableHttpResponseLimits::default();
        self.post_message_with_response_limits(uri, message, session_id, auth_header, custom_headers, limits)
            .await
    }

    async fn post_message_with_response_limits(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        auth_header: Option<String>,
        custom_headers: Headers,
        limits: StreamableHttpResponseLimits,
    ) -> Result<StreamableHttpPostResponse, Failure> {
        let asked = match &message {
            JsonRpcMessage::Request(request) => Some(request.id.clone()),
            JsonRpcMessage::Response(_) | JsonRpcMessage::Notification(_) | JsonRpcMessage::Error(_) => None,
        };
        let has_session = session_id.is_some();
        let answered = self
            .0
            .post_message_with_response_limits(uri, message, session_id, auth_header, custom_headers, limits)
            .await
            .map_err(without_url)?;
        match (&answered, asked) {
            (StreamableHttpPostResponse::Json(answer, _), Some(asked)) => {
                fits(answer, &asked, has_session)?;
                Ok(answered)
            }
            _ => Ok(answered),
        }
    }

    async fn delete_session(
        &self,
        uri: Arc<str>,
        session_id: Arc<str>,
        auth_header: Option<String>,
        custom_headers: Headers,
    ) -> Result<(), Failure> {
        self.0.delete_session(uri, session_id, auth_header, custom_headers).await.map_err(without_url)
    }

    async fn get_stream(
        &self,
        uri: Arc<str>,
        session_id: Option<Arc<str>>,
        last_event_id: Option<String>,
        auth_header: Option<String>,
        custom_headers: Headers,
    ) -> Result<Events, Failure> {
        let most = StreamableHttpResponseLimits::default().max_sse_event_size;
        self.get_stream_with_max_sse_event_size(
            uri,
            session_id,
            last_event_id,
            auth_header,
            custom_headers,
            most,
        )
        .await
    }

    /// Only an answer that broke off is taken up again. The stream of a server's own messages is not read: nothing here uses them,
    /// and a server that ends it at once would have us ask for it without end.
    async fn get_stream_with_max_sse_event_size(
        &self,
        uri: Arc<str>,
        session_id: Option<Arc<str>>,
        last_event_id: Option<String>,
        auth_header: Option<String>,
        custom_headers: Headers,
        max_sse_event_size: usize,
    ) -> Result<Events, Failure> {
        if last_event_id.is_none() {
            return Err(StreamableHttpError::ServerDoesNotSupportSse);
        }
        // The server says how soon, and may say at once.
        tokio::time::sleep(RESUMED).await;
        let events = self.0.get_stream_with_max_sse_event_size(
            uri,
            session_id,
            last_event_id,
            auth_header,
            custom_headers,
            max_sse_event_size,
        );
        events.await.map_err(without_url)
    }
}

/// An error without the URL of its request, which may hold a key.
fn without_url(error: Failure) -> Failure {
    match error {
        StreamableHttpError::Client(error) => StreamableHttpError::Client(error.without_url()),
        other => other,
    }
}

/// Whether an error says that the server does not know the session. Only then rmcp may begin another session and send the request
/// again: a server that failed within a call may answer without an id too.
fn is_of_session(error: &ErrorData) -> bool {
    matches!(error.code.0, -32000 | -32001) && error.message.to_ascii_lowercase().contains("session")
}

/// Whether an answer is one to the request `asked`.
///
/// # Errors
/// For an answer to another request or to none.
fn fits(answer: &ServerJsonRpcMessage, asked: &RequestId, has_session: bool) -> Result<(), Failure> {
    let named = match answer {
        JsonRpcMessage::Response(response) => Some(&response.id),
        JsonRpcMessage::Error(error) if error.id.is_none() && has_session && is_of_session(&error.error) => {
            return Err(StreamableHttpError::SessionExpired);
        }
        JsonRpcMessage::Error(error) if error.id.is_none() => {
            return Err(StreamableHttpError::UnexpectedServerResponse(error.error.message.clone()));
        }
        JsonRpcMessage::Error(error) => error.id.as_ref(),
        JsonRpcMessage::Request(_) | JsonRpcMessage::Notification(_) => None,
    };
    match named {
        Some(named) if named == asked => Ok(()),
        _ => Err(StreamableHttpError::UnexpectedServerResponse("the answer is to another request".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_stream_of_a_servers_own_messages_is_never_asked_for() {
        let client = wakeful_engine::web::client(wakeful_engine::web::Reach::Named(&[])).build().unwrap();
        // Nobody listens at port 1, so a request would fail in another way.
        let http = Http(client);
        let asked =
            http.get_stream("http://127.0.0.1:1/mcp".into(), Some("1".into()), None, None, Headers::new());
        assert!(matches!(asked.await.err(), Some(StreamableHttpError::ServerDoesNotSupportSse)));
    }
}
