//! Which rows an answer may be made of: every request works in one space, or sees nothing.
//!
//! The database compares each row with that ([`wakeful_store::space`]). The outermost layer shows nothing; the guard opens the
//! space of the caller, and a route without the guard the space that it is about. So a handler that is added and forgets
//! the space finds no row, instead of everybody's.

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http_body::{Frame, SizeHint};
use std::pin::Pin;
use std::task::{Context, Poll};
use wakeful_store::space::{self, Scope};
use wakeful_workflow::id::DEFAULT_SPACE;

/// Answers in a scope. What the body reads while it is sent is in it, too.
pub(crate) async fn answered(scope: Scope, answer: impl Future<Output = Response>) -> Response {
    let response = space::within(scope.clone(), answer).await;
    response.map(|body| Body::new(Scoped { scope, body }))
}

/// The layer around all routes.
pub(crate) async fn nothing(request: Request, next: Next) -> Response {
    answered(Scope::Nothing, next.run(request)).await
}

/// The layer of webhooks: what providers send belongs to the default space, unless the configuration names another one.
pub(crate) async fn of_default(request: Request, next: Next) -> Response {
    answered(Scope::of(DEFAULT_SPACE), next.run(request)).await
}

/// A body that is read in a scope, after its handler has returned.
struct Scoped {
    scope: Scope,
    body: Body,
}

impl HttpBody for Scoped {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Scoped>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Scoped { scope, body } = &mut *self;
        space::polled(scope, || Pin::new(body).poll_frame(cx))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
