//! The front line: accepts connections, and keeps strangers from holding all of them.
//!
//! A connection that sends no whole head within [`Limits::head`] is closed. There are at most
//! [`Limits::connections`]. When all are taken, a new one takes the place of one that waits: of those whose
//! address holds the most, the one that has waited longest. If every connection is being served, the new one
//! gets 503, unless it asks for the process's health: a few places are kept for that.
//!
//! A client that does not read its answer loses its connection after [`Limits::unread`]: the kernel sees that nothing leaves.
//!
//! The limit leaves descriptors for the database, for models and for deliveries, so a flood of connections
//! stops no work.
//!
//! A live stream leaves hyper when its head is sent, because most streams are silent and hyper's buffers are not small.

mod handover;
mod places;
mod tracked;

use crate::problem::Problem;
use axum::Router;
use axum::body::Body;
use axum::http::header::{CONNECTION, CONTENT_SECURITY_POLICY, EXPECT, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use axum::http::{Request, Response};
use axum::response::IntoResponse;
use handover::{Framing, Handover, Stream};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use places::{Given, Place, Places};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower_service::Service as _;
use tracing::{debug, warn};

/// A longer head is refused with 431. Also the most that one connection reads ahead.
const HEAD_BYTES: usize = 64 << 10;

/// Places beyond the limit, which serve only the health, and how long each waits for a head.
const RESERVE: usize = 32;
const RESERVE_HEAD: Duration = Duration::from_secs(2);

/// How many connections may be closing while new ones are accepted.
const CLOSING: usize = 8;

/// Descriptors that connections may have beyond [`Limits::connections`].
pub const BEYOND: usize = RESERVE + CLOSING;

/// The wait after a connection could not be accepted, mostly for lack of descriptors.
const NOT_ACCEPTED: Duration = Duration::from_millis(100);

/// The fewest connections, however few descriptors there are.
const FEWEST: usize = 16;

/// The longest time in which a client reads nothing of what is there for it.
pub const UNREAD: Duration = Duration::from_secs(30);

/// Nothing may be loaded, and no page may show it in a frame.
const NO_PAGE: &str = "default-src 'none'; frame-ancestors 'none'";

/// Where a request comes from. Behind a proxy, this is the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub IpAddr);

/// What the front line lets through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most connections at a time.
    pub connections: usize,
    /// The longest wait for a request's whole head. A kept connection may be silent for as long.
    pub head: Duration,
    /// The longest time in which a client takes nothing of an answer, whether it is silent or has vanished.
    pub unread: Duration,
}

impl Limits {
    /// As many of the `wanted` connections as there are descriptors for, after `kept` are set aside for other
    /// uses. Raises the process's own limit of descriptors as far as it may.
    pub fn of_this_process(wanted: usize, kept: usize, head: Duration) -> Limits {
        let limit = getrlimit(Resource::Nofile);
        if let (Some(current), Some(maximum)) = (limit.current, limit.maximum)
            && current < maximum
        {
            // If this fails, the present limit holds.
            let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(maximum), ..limit });
        }
        let descriptors = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |limit| limit as usize);
        let connections = wanted.min(descriptors.saturating_sub(kept)).max(FEWEST);
        if connections < wanted {
            warn!(
                descriptors,
                connections,
                "There are descriptors for fewer connections than server.connections: raise `ulimit -n`"
            );
        }
        Limits { connections, head, unread: UNREAD }
    }
}

/// Serves `router` until `stopped` ends. Then it accepts nothing new, and waits until the requests in hand
/// are answered.
///
/// # Errors
/// None at present: each failure concerns only one connection.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    stopped: impl Future<Output = ()>,
) -> io::Result<()> {
    let places = Arc::new(Places::new(limits.connections, RESERVE));
    let (connections, ending) = (TaskTracker::new(), CancellationToken::new());
    let open = Arc::new(Semaphore::new(limits.connections + BEYOND));
    let mut stopped = std::pin::pin!(stopped);
    loop {
        // One that was pushed out of its place keeps its descriptor until it is closed.
        let accepted = async {
            let open = Arc::clone(&open).acquire_owned().await;
            listener.accept().await.map(|accepted| (accepted, open))
        };
        let accepted = tokio::select! {
            () = &mut stopped => break,
            accepted = accepted => accepted,
        };
        let ((stream, peer), open) = match accepted {
            Ok((accepted, Ok(open))) => (accepted, open),
            // The semaphore is never closed.
            Ok((_, Err(_))) => break,
            // The peer has gone already.
            Err(error) if is_of_the_peer(&error) => continue,
            Err(error) => {
                warn!(%error, "A connection could not be accepted");
                places.make_room();
                tokio::time::sleep(NOT_ACCEPTED).await;
                continue;
            }
        };
        // Without it, a client that asks for a large file and reads nothing keeps the connection and a piece of the file for good.
        #[cfg(target_os = "linux")]
        if let Err(error) =
            rustix::net::sockopt::set_tcp_user_timeout(&stream, limits.unread.as_millis() as u32)
        {
            debug!(%error, "A client may leave its answer unread for as long as it likes");
        }
        match Places::take(&places, peer.ip()) {
            Given::Place(place) => {
                let served = connection(stream, router.clone(), place, limits.head, ending.clone());
                connections.spawn(async move { (served.await, open).0 });
            }
            Given::Reserve(place) => {
                let head = RESERVE_HEAD.min(limits.head);
                let served = connection(stream, router.clone(), place, head, ending.clone());
                connections.spawn(async move { (served.await, open).0 });
            }
            Given::Nothing => debug!(%peer, "A connection is closed: all places are taken"),
        }
    }
    drop(listener);
    ending.cancel();
    connections.close();
    connections.wait().await;
    Ok(())
}

/// Serves one connection until it ends, is pushed out of its place, or the process ends.
async fn connection(
    stream: TcpStream,
    router: Router,
    place: Place,
    head: Duration,
    ending: CancellationToken,
) {
    let place = Arc::new(place);
    // Boxed, so that nothing of it is left while a stream is sent.
    let requests = Box::pin(requests(stream, router, Arc::clone(&place), head, ending));
    let Some((mut stream, mut connection)) = requests.await else { return };
    tokio::select! {
        sent = stream.send(&mut connection) => if let Err(error) = sent {
            debug!(%error, "A stream broke off");
        },
        () = place.pushed_out() => debug!("A connection that waited is closed: all places are taken"),
    }
}

/// Serves the requests of one connection. Returns it if a stream is left to send.
async fn requests(
    connection: TcpStream,
    router: Router,
    place: Arc<Place>,
    head: Duration,
    ending: CancellationToken,
) -> Option<(Stream, TcpStream)> {
    let handover = Handover::default();
    let service = service_fn(|request: Request<Incoming>| {
        answer(router.clone(), Arc::clone(&place), handover.clone(), request)
    });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head)
        .max_buf_size(HEAD_BYTES)
        .keep_alive(!place.is_reserve())
        .serve_connection(TokioIo::new(handover.watched(connection)), service);
    let mut ends = false;
    loop {
        let served = poll_fn(|context| match Pin::new(&mut connection).poll(context) {
            Poll::Ready(served) => Poll::Ready(Err(served)),
            Poll::Pending => handover.take().map_or(Poll::Pending, |stream| Poll::Ready(Ok(stream))),
        });
        tokio::select! {
            served = served => match served {
                Ok(stream) => {
                    let connection = connection.into_parts().io.into_inner();
                    return Some((stream, connection.into_inner()));
                }
                Err(served) => {
                    if let Err(error) = served {
                        debug!(%error, "A connection ended");
                    }
                    return None;
                }
            },
            () = place.pushed_out() => {
                debug!("A connection that waited is closed: all places are taken");
                return None;
            }
            () = ending.cancelled(), if !ends => {
                ends = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
        }
    }
}

/// The request's answer. It says that no browser may take it for a page, whatever the text in it.
async fn answer(
    router: Router,
    place: Arc<Place>,
    handover: Handover,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let framing = Framing::of(&request);
    let mut response = handled(router, place, request).await?;
    let headers = response.headers_mut();
    headers.entry(X_CONTENT_TYPE_OPTIONS).or_insert(HeaderValue::from_static("nosniff"));
    headers.entry(CONTENT_SECURITY_POLICY).or_insert(HeaderValue::from_static(NO_PAGE));
    Ok(match framing {
        Some(framing) => handover.answer(framing, response),
        None => response,
    })
}

async fn handled(
    mut router: Router,
    place: Arc<Place>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    if place.is_reserve() && !matches!(request.uri().path(), "/healthz" | "/readyz") {
        let full = "all connections are taken; nothing was taken, send it again later";
        let mut response = Problem::unavailable(full, 1).into_response();
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        return Ok(response);
    }
    let expects_continue = request.headers().contains_key(EXPECT);
    let (mut request, served, rest) = tracked::request(request, &place);
    request.extensions_mut().insert(Peer(place.address()));
    let mut response = router.call(request).await?;
    if !rest.read(expects_continue).await {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(tracked::response(response, served))
}

fn is_of_the_peer(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

#[cfg(test)]
mod tests;
