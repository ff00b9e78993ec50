//! Reads the bodies of requests that bring mail.
//!
//! A signature covers the whole body, so until the last byte arrives the sender has proved nothing, and we
//! hold what came so far. So a large body needs a permit, and each gate has its own permits: strangers at one
//! gate cannot block another. A body must also arrive at a minimum rate. A sender who stops is cut off within
//! seconds, and one who goes on has to spend bandwidth.

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout, timeout_at};
use wakeful_http::problem::Problem;

/// A body larger than this needs a permit.
const SMALL: usize = 1 << 20;

/// How many large bodies a gate holds at a time.
const PERMITS: usize = 2;

/// How long a large body waits for a permit.
const WAIT: Duration = Duration::from_secs(5);

/// The time that every body gets at first. Received bytes extend it by a second per `bytes_per_s`.
const GRACE: Duration = Duration::from_secs(10);
/// Providers have fast connections.
const STRANGERS_BYTES_PER_S: u32 = 512 << 10;
/// A caller with the token may have a slow connection at home.
const GUARDED_BYTES_PER_S: u32 = 32 << 10;

/// A group of entry points that share permits: those with one kind of proof.
#[derive(Debug)]
pub(super) struct BodyGate {
    permits: Semaphore,
    bytes_per_s: u32,
}

/// A body, with its permit for as long as it is held.
#[derive(Debug)]
pub(super) struct ReceivedBody<'d> {
    pub bytes: Bytes,
    _permit: Option<SemaphorePermit<'d>>,
}

impl BodyGate {
    pub const fn new() -> BodyGate {
        BodyGate { permits: Semaphore::const_new(PERMITS), bytes_per_s: STRANGERS_BYTES_PER_S }
    }

    /// A gate for callers who prove who they are before their body arrives.
    pub const fn guarded() -> BodyGate {
        BodyGate { permits: Semaphore::const_new(PERMITS), bytes_per_s: GUARDED_BYTES_PER_S }
    }

    /// Reads the whole body, of at most `limit` bytes.
    ///
    /// # Errors
    /// 413 for a larger body, as soon as that is known; 408 for one that arrives too slowly; 429 when there
    /// are too many large ones; 400 for one that breaks off.
    pub async fn receive(
        &self,
        headers: &HeaderMap,
        body: Body,
        limit: usize,
    ) -> Result<ReceivedBody<'_>, Problem> {
        let too_large =
            || Problem::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is larger than {limit} bytes"));
        let slow = |_| Problem::new(StatusCode::REQUEST_TIMEOUT, "the body came too slowly; send it again");
        let announced =
            headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let announced: usize = announced.unwrap_or(0);
        if announced > limit {
            return Err(too_large());
        }
        let (mut bytes, mut permit, mut body) = (BytesMut::new(), None, body.into_data_stream());
        let mut until = Instant::now() + GRACE;
        while let Some(chunk) = timeout_at(until, body.next()).await.map_err(slow)? {
            let chunk =
                chunk.map_err(|error| Problem::bad_request(format!("the body broke off: {error}")))?;
            if bytes.len() + chunk.len() > limit {
                return Err(too_large());
            }
            if bytes.len() + chunk.len() > SMALL && permit.is_none() {
                let begun = Instant::now();
                permit = Some(self.permit().await?);
                // The sender could not send while we waited for the permit.
                until += begun.elapsed();
                // Reserve everything at once: doubling the buffer would hold the body twice.
                bytes.reserve(announced.saturating_sub(bytes.len()));
            }
            bytes.extend_from_slice(&chunk);
            until += Duration::from_secs(chunk.len() as u64) / self.bytes_per_s;
        }
        Ok(ReceivedBody { bytes: bytes.freeze(), _permit: permit })
    }

    async fn permit(&self) -> Result<SemaphorePermit<'_>, Problem> {
        // The semaphore is never closed.
        let permit = timeout(WAIT, self.permits.acquire()).await.ok().and_then(Result::ok);
        permit.ok_or_else(|| {
            Problem::too_many(
                "too many large mails come in at once; nothing was taken, send it again later",
                5,
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::stream;
    use std::convert::Infallible;

    const LIMIT: usize = 8 << 20;

    /// A body of `pieces` pieces of 512 KiB, one per `every`. After the last piece it ends, or stalls if
    /// `ends` is false.
    fn body(pieces: usize, every: Duration, ends: bool) -> Body {
        let sent = stream::iter(0..pieces).then(move |_| async move {
            tokio::time::sleep(every).await;
            Ok::<_, Infallible>(vec![b'x'; 512 << 10])
        });
        let rest = stream::once(async move {
            if !ends {
                std::future::pending::<()>().await;
            }
            Ok(Vec::new())
        });
        Body::from_stream(sent.chain(rest))
    }

    async fn receive(gate: &BodyGate, body: Body) -> Result<ReceivedBody<'_>, StatusCode> {
        gate.receive(&HeaderMap::new(), body, LIMIT).await.map_err(|problem| problem.status())
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stops_gives_its_place_back_and_one_that_keeps_its_pace_is_taken() {
        let gate = BodyGate::new();
        let begun = Instant::now();
        let stalled = receive(&gate, body(4, Duration::ZERO, false)).await;
        assert_eq!(stalled.unwrap_err(), StatusCode::REQUEST_TIMEOUT);
        assert_eq!(begun.elapsed().as_secs(), 14, "ten seconds, and one per half mebibyte");
        assert_eq!(gate.permits.available_permits(), PERMITS);
        let steady = receive(&gate, body(16, Duration::from_secs(1), true)).await.unwrap();
        assert_eq!(steady.bytes.len(), LIMIT);
        let slow = receive(&gate, body(16, Duration::from_secs(4), true)).await;
        assert_eq!(slow.unwrap_err(), StatusCode::REQUEST_TIMEOUT);
        let known = BodyGate::guarded();
        let slow = receive(&known, body(16, Duration::from_secs(4), true)).await;
        assert_eq!(slow.unwrap().bytes.len(), LIMIT, "a caller with the token may have a slow line");
        assert_eq!(
            receive(&known, body(2, Duration::ZERO, false)).await.unwrap_err(),
            StatusCode::REQUEST_TIMEOUT
        );
    }

    #[tokio::test(start_paused = true)]
    async fn large_bodies_are_as_many_as_there_are_places_and_small_ones_any_number() {
        let gate = BodyGate::new();
        let large = || body(4, Duration::ZERO, true);
        let mut held = Vec::new();
        for _ in 0..PERMITS {
            held.push(receive(&gate, large()).await.unwrap());
        }
        assert_eq!(receive(&gate, large()).await.unwrap_err(), StatusCode::TOO_MANY_REQUESTS);
        held.push(receive(&gate, body(2, Duration::ZERO, true)).await.unwrap());
        let waits = receive(&gate, large());
        let (one, ()) = tokio::join!(waits, async {
            tokio::time::sleep(WAIT / 2).await;
            held.remove(0);
        });
        assert_eq!(one.unwrap().bytes.len(), 2 << 20, "it got its permit while it waited");
    }

    #[tokio::test]
    async fn one_byte_too_many_is_known_before_the_end() {
        let gate = BodyGate::new();
        let more = receive(&gate, body(17, Duration::ZERO, false)).await;
        assert_eq!(more.unwrap_err(), StatusCode::PAYLOAD_TOO_LARGE);
        let headers = HeaderMap::from_iter([(header::CONTENT_LENGTH, (LIMIT + 1).into())]);
        let announced = gate.receive(&headers, body(0, Duration::ZERO, false), LIMIT).await;
        assert_eq!(announced.unwrap_err().status(), StatusCode::PAYLOAD_TOO_LARGE);
    }
}
