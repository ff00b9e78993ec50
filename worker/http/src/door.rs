//! The door before all handlers: a request's body has to keep a pace, and the bodies that the process holds
//! are bounded in sum.
//!
//! Every body gets [`GRACE`] at first, and each [`BYTES_PER_S`] that arrive extend that by a second. So a
//! sender who stops is cut off within seconds. The first [`FREE`] bytes of a body count against nothing: the
//! limit of connections bounds them, and most messages are no longer. What comes after that counts until the
//! handler has answered. Callers with the token and strangers have their own sums, so strangers cannot keep
//! out those with the token. One user gets at most a quarter of the callers' sum and one token at most half, so
//! no caller can keep out the others.

use crate::access::{Caller, has_configured_token};
use crate::holder::Holder;
use crate::problem::Problem;
use axum::Router;
use axum::body::{Body, BodyDataStream, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::header::{CONNECTION, HeaderValue};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};
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
    shares: Arc<Mutex<Shares>>,
}

/// How much of the common room each caller may hold. Entries of callers that hold nothing are removed now and
/// then.
#[derive(Debug)]
struct Shares {
    /// The whole room, in units.
    room: usize,
    held: HashMap<Holder, Weak<Semaphore>>,
}

/// While there are no more entries than this, those of callers that hold nothing may stay.
const FEW: usize = 1000;

impl Shares {
    /// What the caller's bodies count against; nothing, if it may take all.
    fn of(&mut self, caller: &Caller) -> Vec<Arc<Semaphore>> {
        Holder::all(caller).into_iter().map(|holder| self.share(holder)).collect()
    }

    fn share(&mut self, holder: Holder) -> Arc<Semaphore> {
        let part = match holder {
            Holder::Token(_) => 2,
            Holder::User { .. } => 4,
        };
        if self.held.len() > FEW {
            self.held.retain(|_, share| share.strong_count() > 0);
        }
        if let Some(share) = self.held.get(&holder).and_then(Weak::upgrade) {
            return share;
        }
        let share = Arc::new(Semaphore::new(self.room / part));
        self.held.insert(holder, Arc::downgrade(&share));
        share
    }
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
        let room = room.min(Semaphore::MAX_PERMITS);
        let semaphore = || Arc::new(Semaphore::new(room));
        let shares = Arc::new(Mutex::new(Shares { room, held: HashMap::new() }));
        Door { ctx, known: semaphore(), strangers: semaphore(), shares }
    }

    /// These routes, with the door before them.
    pub fn before(&self, routes: Router) -> Router {
        routes.layer(from_fn_with_state(self.clone(), held))
    }
}

/// Passes a request on. Its body keeps the pace, and counts against the room.
pub async fn held(State(door): State<Door>, request: Request, next: Next) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    // Behind the guard, every caller is known.
    let caller = request.extensions().get::<Caller>();
    let is_known = caller.is_some() || has_configured_token(&door.ctx, request.headers());
    let room = if is_known { &door.known } else { &door.strangers };
    // The caller's own shares come first. So a body that waits for its caller's share holds nothing of the
    // common room.
    let mut rooms = caller.map_or_else(Vec::new, |caller| {
        door.shares.lock().unwrap_or_else(PoisonError::into_inner).of(caller)
    });
    rooms.push(Arc::clone(room));
    pass(rooms, request, next).await
}

/// Passes a request on. Its body keeps the pace. The handler puts it into a file, so it counts against nothing.
pub async fn spooled(request: Request, next: Next) -> Response {
    pass(Vec::new(), request, next).await
}

async fn pass(rooms: Vec<Arc<Semaphore>>, request: Request, next: Next) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let is_sns = is_of_sns(request.headers());
    let state = Arc::new(Mutex::new(Hold::default()));
    let request = request.map(|body| paced(body, rooms, Arc::clone(&state)));
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
    permits: Vec<OwnedSemaphorePermit>,
    refused: Option<Refusal>,
}

struct Paced {
    body: BodyDataStream,
    /// The body counts against each of them, in this order.
    rooms: Vec<Arc<Semaphore>>,
    hold: Arc<Mutex<Hold>>,
    until: Instant,
    /// Bytes that came, and units that were taken for them.
    came: usize,
    taken: usize,
}

fn paced(body: Body, rooms: Vec<Arc<Semaphore>>, hold: Arc<Mutex<Hold>>) -> Body {
    let until = Instant::now() + GRACE;
    let paced = Paced { body: body.into_data_stream(), rooms, hold, until, came: 0, taken: 0 };
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
        if wanted <= self.taken || self.rooms.is_empty() {
            return Ok(());
        }
        let more = u32::try_from(wanted - self.taken).unwrap_or(u32::MAX);
        let began = Instant::now();
        let deadline = began + WAIT;
        let mut permits = Vec::with_capacity(self.rooms.len());
        for room in &self.rooms {
            let Ok(Ok(permit)) = timeout_at(deadline, Arc::clone(room).acquire_many_owned(more)).await else {
                return Err(self.refuse(Refusal::NoRoom));
            };
            permits.push(permit);
        }
        // The sender could not send meanwhile.
        self.until += began.elapsed();
        self.taken = wanted;
        self.hold.lock().unwrap_or_else(PoisonError::into_inner).permits.extend(permits);
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
    use crate::access::Who;
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
        let mut body = paced(body, vec![Arc::clone(room)], Arc::clone(&hold)).into_data_stream();
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

    #[test]
    fn one_user_gets_a_quarter_of_the_room_one_token_half_and_the_configured_token_all() {
        let mut shares = Shares { room: 64, held: HashMap::new() };
        let user = |user_id: &str, issuer: Option<&str>| Who::User {
            user_id: user_id.to_owned(),
            issuer: issuer.map(str::to_owned),
        };
        let caller = |who: Who| Caller { who, ..Caller::of_installation(Who::Configuration) };
        let rooms = |shares: &[Arc<Semaphore>]| -> Vec<usize> {
            shares.iter().map(|share| share.available_permits()).collect()
        };
        let ann = shares.of(&caller(user("ann", Some("app"))));
        assert_eq!(rooms(&ann), [16, 32], "her own, and that of the token that asked for hers");
        let held: Vec<_> =
            ann.iter().map(|share| Arc::clone(share).try_acquire_many_owned(10).unwrap()).collect();
        assert_eq!(rooms(&shares.of(&caller(user("ann", None)))), [6], "all her tokens share it");
        assert_eq!(rooms(&shares.of(&caller(user("bob", Some("app"))))), [16, 22]);
        assert!(shares.of(&caller(Who::Configuration)).is_empty());
        drop((held, ann));
        for number in 0..3 * FEW {
            drop(shares.of(&caller(user(&number.to_string(), None))));
        }
        assert!(shares.held.len() <= FEW + 1, "who holds nothing has no entry for long");
    }
}
