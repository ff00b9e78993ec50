//! The door before all handlers: a request's body has to keep a pace, and the bodies that the process holds
//! are bounded in sum.
//!
//! Every body gets [`GRACE`] at first, and each [`BYTES_PER_S`] that arrive extend that by a second. So a
//! sender who stops is cut off within seconds. The first [`FREE`] bytes of a body count against nothing: the
//! limit of connections bounds them, and most messages are no longer. What comes after that counts until the
//! handler has answered. Callers with the token and strangers have their own sums, so strangers cannot keep
//! out those with the token.

use crate::access::{Caller, has_configured_token};
use crate::problem::Problem;
use axum::Router;
use axum::body::{Body, BodyDataStream, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::header::{CONNECTION, HeaderValue};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};
use wakeful_engine::ctx::Ctx;

/// The time that every body gets at first.
const GRACE: Duration = Duration::from_secs(10);
/// A person at home may have a slow line. Handlers of what providers send ask for more.
const BYTES_PER_S: u32 = 32 << 10;
/// The bytes of each body that count against nothing.
const FREE: usize = 16 << 10;
/// How long a body waits for room.
const WAIT: Duration = Duration::from_secs(5);
/// The unit in which held bytes are counted.
const UNIT: usize = 1 << 10;

/// The room for bodies of this process.
#[derive(Clone)]
pub struct Door {
    ctx: Arc<Ctx>,
    known: Arc<Semaphore>,
    strangers: Arc<Semaphore>,
}

/// Why a body is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Refusal {
    #[error("the body came too slowly; send it again")]
    Slow,
    #[error("too many large bodies come in at once; nothing was taken, send it again later")]
    NoRoom,
}

impl Refusal {
    fn problem(self) -> Problem {
        match self {
            Refusal::Slow => Problem::new(StatusCode::REQUEST_TIMEOUT, self.to_string()),
            Refusal::NoRoom => Problem::too_many(self.to_string(), 5),
        }
    }
}

impl Door {
    pub fn new(ctx: Arc<Ctx>) -> Door {
        let room = (ctx.config.server.held_mb << 20) / UNIT;
        let semaphore = || Arc::new(Semaphore::new(room.min(Semaphore::MAX_PERMITS)));
        Door { ctx, known: semaphore(), strangers: semaphore() }
    }

    /// These routes, with the door before them.
    pub fn before(&self, routes: Router) -> Router {
        routes.layer(from_fn_with_state(self.clone(), held))
    }
}

/// Passes a request on. Its body keeps the pace, and counts against the room.
pub async fn held(State(door): State<Door>, request: Request, next: Next) -> Response {
    // Behind the guard, every caller is known.
    let is_known =
        request.extensions().get::<Caller>().is_some() || has_configured_token(&door.ctx, request.headers());
    let room = if is_known { &door.known } else { &door.strangers };
    pass(Some(Arc::clone(room)), request, next).await
}

/// Passes a request on. Its body keeps the pace. The handler puts it into a file, so it counts against nothing.
pub async fn spooled(request: Request, next: Next) -> Response {
    pass(None, request, next).await
}

async fn pass(room: Option<Arc<Semaphore>>, request: Request, next: Next) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let is_sns = is_of_sns(request.headers());
    let state = Arc::new(Mutex::new(Hold::default()));
    let request = request.map(|body| paced(body, room, Arc::clone(&state)));
    let response = next.run(request).await;
    let refused = state.lock().unwrap_or_else(PoisonError::into_inner).refused;
    match refused {
        None => response,
        Some(refusal) => {
            let problem = refusal.problem();
            // SNS repeats a request that is answered with 5xx, but not one that is answered with 4xx.
            let status = if is_sns { StatusCode::SERVICE_UNAVAILABLE } else { problem.status() };
            let mut response = problem.with_status(status).into_response();
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            response
        }
    }
}

/// Returns whether the request says that it is of Amazon's SNS.
pub(crate) fn is_of_sns(headers: &HeaderMap) -> bool {
    headers.contains_key("x-amz-sns-message-type")
}

/// What a body holds until its request is answered, and why it was refused.
#[derive(Debug, Default)]
struct Hold {
    permit: Option<OwnedSemaphorePermit>,
    refused: Option<Refusal>,
}

struct Paced {
    body: BodyDataStream,
    room: Option<Arc<Semaphore>>,
    hold: Arc<Mutex<Hold>>,
    until: Instant,
    /// Bytes that came, and units that were taken for them.
    came: usize,
    taken: usize,
}

fn paced(body: Body, room: Option<Arc<Semaphore>>, hold: Arc<Mutex<Hold>>) -> Body {
    let until = Instant::now() + GRACE;
    let paced = Paced { body: body.into_data_stream(), room, hold, until, came: 0, taken: 0 };
    Body::from_stream(futures::stream::unfold(Some(paced), |paced| async move {
        let mut paced = paced?;
        match paced.next().await {
            Ok(chunk) => chunk.map(|chunk| (Ok(chunk), Some(paced))),
            Err(error) => Some((Err(error), None)),
        }
    }))
}

impl Paced {
    async fn next(&mut self) -> Result<Option<Bytes>, axum::BoxError> {
        let chunk = match timeout_at(self.until, self.body.next()).await {
            Ok(None) => return Ok(None),
            Ok(Some(chunk)) => chunk?,
            Err(_) => return Err(self.refuse(Refusal::Slow)),
        };
        self.came += chunk.len();
        self.until += Duration::from_secs(chunk.len() as u64) / BYTES_PER_S;
        self.take_room().await?;
        Ok(Some(chunk))
    }

    /// Takes room for what came beyond the free bytes.
    async fn take_room(&mut self) -> Result<(), axum::BoxError> {
        let wanted = self.came.saturating_sub(FREE).div_ceil(UNIT);
        let Some(room) = self.room.clone().filter(|_| wanted > self.taken) else { return Ok(()) };
        let more = u32::try_from(wanted - self.taken).unwrap_or(u32::MAX);
        let began = Instant::now();
        let Ok(Ok(permit)) = timeout(WAIT, room.acquire_many_owned(more)).await else {
            return Err(self.refuse(Refusal::NoRoom));
        };
        // The sender could not send meanwhile.
        self.until += began.elapsed();
        self.taken = wanted;
        let mut hold = self.hold.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut hold.permit {
            Some(held) => held.merge(permit),
            None => hold.permit = Some(permit),
        }
        Ok(())
    }

    fn refuse(&self, refusal: Refusal) -> axum::BoxError {
        self.hold.lock().unwrap_or_else(PoisonError::into_inner).refused = Some(refusal);
        refusal.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::stream;
    use std::convert::Infallible;

    /// A body of `pieces` pieces of 16 KiB, one per `every`. After the last it ends, or stalls.
    fn body(pieces: usize, every: Duration, ends: bool) -> Body {
        let sent = stream::iter(0..pieces).then(move |_| async move {
            tokio::time::sleep(every).await;
            Ok::<_, Infallible>(vec![b'x'; 16 << 10])
        });
        let rest = stream::once(async move {
            if !ends {
                std::future::pending::<()>().await;
            }
            Ok(Vec::new())
        });
        Body::from_stream(sent.chain(rest))
    }

    async fn read(body: Body, room: &Arc<Semaphore>) -> (Option<Refusal>, usize, Arc<Mutex<Hold>>) {
        let hold = Arc::new(Mutex::new(Hold::default()));
        let mut came = 0;
        let mut body = paced(body, Some(Arc::clone(room)), Arc::clone(&hold)).into_data_stream();
        while let Some(Ok(chunk)) = body.next().await {
            came += chunk.len();
        }
        let refused = hold.lock().unwrap().refused;
        (refused, came, hold)
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stops_is_cut_off_and_one_that_keeps_the_pace_is_taken() {
        let room = Arc::new(Semaphore::new(1 << 20));
        let began = Instant::now();
        let (refused, ..) = read(body(4, Duration::ZERO, false), &room).await;
        assert_eq!((refused, began.elapsed().as_secs()), (Some(Refusal::Slow), 12));
        let (refused, came, _) = read(body(100, Duration::from_millis(500), true), &room).await;
        assert_eq!((refused, came), (None, 100 * (16 << 10)));
        let (refused, ..) = read(body(100, Duration::from_secs(2), true), &room).await;
        assert_eq!(refused, Some(Refusal::Slow));
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_are_bounded_in_sum_and_short_ones_always_pass() {
        // Room for 64 KiB.
        let room = Arc::new(Semaphore::new(64));
        let (refused, _, first) = read(body(4, Duration::ZERO, true), &room).await;
        assert_eq!((refused, room.available_permits()), (None, 16));
        let (refused, ..) = read(body(4, Duration::ZERO, true), &room).await;
        assert_eq!(refused, Some(Refusal::NoRoom));
        let (refused, ..) = read(body(1, Duration::ZERO, true), &room).await;
        assert_eq!(refused, None, "it is short");
        drop(first);
        assert_eq!(room.available_permits(), 64);
        let (refused, ..) = read(body(4, Duration::ZERO, true), &room).await;
        assert_eq!(refused, None);
    }
}
