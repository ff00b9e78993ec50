//! Follows a request through its connection, so that its place knows what it does.
//!
//! An answer may come before the end of the request's body. Then hyper closes the connection, and a client that was not told of
//! that sends its next request into the void. So the rest of the body is read if it is short and there; else the answer says
//! `Connection: close`.

use super::places::{Doing, Place};
use axum::BoxError;
use axum::body::{Body, Bytes, to_bytes};
use axum::http::{Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

/// How much of an unwanted body is read, and for how long.
const REST_BYTES: usize = 64 << 10;
const REST_FOR: Duration = Duration::from_millis(50);

/// A request in hand. Dropping it says that the connection waits for the next one.
pub(super) struct Served(Arc<Place>);

impl Drop for Served {
    fn drop(&mut self) {
        self.0.now(Doing::Waiting);
    }
}

/// What is left of the body of a request.
#[derive(Clone, Default)]
pub(super) struct Rest(Arc<Mutex<Left>>);

#[derive(Default)]
enum Left {
    /// It is being read, or there was none.
    #[default]
    Unknown,
    /// Its handler has let go of it.
    Unread(Body),
}

impl Rest {
    /// Reads the rest of a body that its handler has let go of. Returns false if the next request cannot follow.
    pub(super) async fn read(self, expects_continue: bool) -> bool {
        let left = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let Left::Unread(body) = left else { return true };
        // The client still waits to be asked for it.
        if expects_continue {
            return false;
        }
        let read = tokio::time::timeout(REST_FOR, to_bytes(body, REST_BYTES)).await;
        matches!(read, Ok(Ok(_)))
    }
}

/// The request with a body that tells its place when it is complete.
pub(super) fn request<B>(request: Request<B>, place: &Arc<Place>) -> (Request<Body>, Served, Rest)
where
    B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let is_complete = request.body().is_end_stream();
    place.now(if is_complete { Doing::Served } else { Doing::Receiving });
    let served = Served(Arc::clone(place));
    if is_complete {
        return (request.map(Body::new), served, Rest::default());
    }
    let (place, rest) = (Some(Arc::clone(place)), Rest::default());
    let incoming = |body| Incoming { body: Some(body), place, rest: rest.clone() };
    (request.map(|body| Body::new(incoming(body))), served, rest)
}

/// The response with a body that keeps the request in hand until it is sent.
pub(super) fn response(response: Response<Body>, served: Served) -> Response<Body> {
    response.map(|body| Body::new(Outgoing { body, _served: served }))
}

struct Incoming<B>
where
    B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    /// `None` only while it is dropped.
    body: Option<B>,
    /// `None` once the body is complete.
    place: Option<Arc<Place>>,
    rest: Rest,
}

impl<B> Drop for Incoming<B>
where
    B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    fn drop(&mut self) {
        if let (Some(body), Some(_)) = (self.body.take(), &self.place) {
            *self.rest.0.lock().unwrap_or_else(PoisonError::into_inner) = Left::Unread(Body::new(body));
        }
    }
}

impl<B> HttpBody for Incoming<B>
where
    B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(body).poll_frame(context));
        // After an error nothing more comes: hyper closes the connection.
        if (!matches!(frame, Some(Ok(_))) || self.is_end_stream())
            && let Some(place) = self.place.take()
        {
            place.now(Doing::Served);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(HttpBody::size_hint).unwrap_or_default()
    }
}

struct Outgoing {
    body: Body,
    _served: Served,
}

impl HttpBody for Outgoing {
    type Data = <Body as HttpBody>::Data;
    type Error = <Body as HttpBody>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
