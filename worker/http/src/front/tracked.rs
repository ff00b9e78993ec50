//! Follows a request through its connection, so that its place knows what it does.

use super::places::{Doing, Place};
use axum::BoxError;
use axum::body::{Body, Bytes};
use axum::http::{Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// A request in hand. Dropping it says that the connection waits for the next one.
pub(super) struct Served(Arc<Place>);

impl Drop for Served {
    fn drop(&mut self) {
        self.0.now(Doing::Waiting);
    }
}

/// The request with a body that tells its place when it is complete.
pub(super) fn request<B>(request: Request<B>, place: &Arc<Place>) -> (Request<Body>, Served)
where
    B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let is_complete = request.body().is_end_stream();
    place.now(if is_complete { Doing::Served } else { Doing::Receiving });
    let served = Served(Arc::clone(place));
    if is_complete {
        return (request.map(Body::new), served);
    }
    let place = Arc::clone(place);
    (request.map(|body| Body::new(Incoming { body, place: Some(place) })), served)
}

/// The response with a body that keeps the request in hand until it is sent.
pub(super) fn response(response: Response<Body>, served: Served) -> Response<Body> {
    response.map(|body| Body::new(Outgoing { body, _served: served }))
}

struct Incoming<B> {
    body: B,
    /// `None` once the body is complete.
    place: Option<Arc<Place>>,
}

impl<B: HttpBody + Unpin> HttpBody for Incoming<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if (frame.is_none() || self.body.is_end_stream())
            && let Some(place) = self.place.take()
        {
            place.now(Doing::Served);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
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
