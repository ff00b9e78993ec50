//! Streams a session live: its journal as server-sent events, with the text of the model call in progress.
//!
//! Journal frames carry their number as `id`, so a client that reconnects with `Last-Event-ID` misses none.
//! Chunk frames have no id. They show text while it is generated, to its end, and `gen_complete` replaces them. A client
//! that connects again, or that watched when a worker died, gets `gen_reset` and then all chunks of the
//! current call. The same happens when the database crashed and lost chunks that were already shown: chunks
//! are committed before they are shown, but asynchronously.
//!
//! Workers write chunks only of sessions that somebody reads. So a reader that finds a model call in progress says
//! so, and then gets the text so far.

mod callers;
mod follow;

pub(crate) use follow::Followers;

use crate::access::Caller;
use crate::body::Id;
use crate::openapi::Operation;
use crate::problem::Problem;
use axum::Extension;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::HeaderMap;
use axum::http::StatusCode;
use axum::response::Sse;
use axum::response::sse::{Event, KeepAlive};
use follow::{Follower, NoPlace};
use futures::Stream;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::debug;
use wakeful_engine::ctx::Ctx;
use wakeful_store::generation::LiveGeneration;
use wakeful_store::queue::READS_EVERY;

/// How many journal entries are read at once, and about how many bytes: if a client reads none of them, they stay in memory.
const BATCH: i64 = 200;
const BATCH_BYTES: i64 = 1 << 20;
/// The last chunk's number when there is no chunk yet; the first chunk has number 0.
const NONE: i64 = -1;
/// How often the database is read while a model call is in progress, or after it could not be read.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct StreamQuery {
    /// For clients that cannot set `Last-Event-ID`.
    after: Option<i64>,
}

pub(super) async fn stream(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Extension(followers): Extension<Arc<Followers>>,
    Id(id): Id,
    query: Result<Query<StreamQuery>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Problem> {
    let Query(query) = query?;
    // Before the first look, so that whatever comes after that look is heard.
    let follower = followers.follow(&id, &caller).map_err(|no_place| match no_place {
        NoPlace::Full => Problem::unavailable("all streams of events are taken (server.streams)", 5),
        NoPlace::OfCaller(most) => Problem::too_many(
            format!("{most} streams of this caller are open, and it gets no more (server.user_streams of a user, half of server.streams of a token and of all users whose tokens it asked for)"),
            5,
        ),
    })?;
    ctx.store.session_within(&caller.reach, &id).await?;
    let (given_as, given) = match headers.get("last-event-id") {
        Some(value) => {
            ("Last-Event-ID", value.to_str().ok().and_then(|text| text.trim().parse::<i64>().ok()))
        }
        None => ("after", Some(query.after.unwrap_or(0))),
    };
    let mut after = given
        .filter(|number| *number >= 0)
        .ok_or_else(|| Problem::bad_request(format!("`{given_as}` is the number of a journal entry")))?;
    if after > 0 {
        // A number beyond the end is from before a backup was restored. It would hide the entries that come until then.
        after = after.min(ctx.store.last_event_seq(&id).await?);
    }
    let heartbeat = Duration::from_secs(ctx.config.server.sse_heartbeat_s);
    let reader = Reader {
        ctx,
        caller,
        follower,
        after,
        limit: BATCH,
        generation: None,
        chunk: NONE,
        shown: String::new(),
        said: None,
        frames: VecDeque::new(),
    };
    let frames = futures::stream::unfold(reader, |mut reader| async move {
        let frame = reader.next().await?;
        Some((Ok(frame), reader))
    });
    Ok(Sse::new(frames).keep_alive(KeepAlive::new().interval(heartbeat).text("alive")))
}

struct Reader {
    ctx: Arc<Ctx>,
    caller: Caller,
    follower: Follower,
    /// The number of the last journal entry that was sent.
    after: i64,
    /// How many entries the next look reads: fewer after large ones, because Postgres weighs all that it finds.
    limit: i64,
    /// The model call whose chunks are being sent, and the number of the last chunk sent.
    generation: Option<String>,
    chunk: i64,
    /// What its chunks have shown.
    shown: String,
    /// The model call for which this reader last told the workers that it reads, and when.
    said: Option<(String, Instant)>,
    frames: VecDeque<Event>,
}

impl Reader {
    /// The next frame; `None` when the process ends, or when the caller's token is no longer in force.
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(frame) = self.frames.pop_front() {
                if self.frames.is_empty() {
                    self.frames = VecDeque::new();
                }
                return Some(frame);
            }
            // Boxed here and below: what a statement needs is gone while the stream waits.
            let looked = Box::pin(self.look()).await;
            if let Err(error) = &looked {
                debug!(%error, "A stream could not read the database; it tries again");
            }
            // Each look that found something looks the token up too, so a revoked one shows nothing more.
            if !self.frames.is_empty() && !Box::pin(self.may_go_on()).await {
                return None;
            }
            let again = self.generation.is_some() || looked.is_err();
            if self.frames.is_empty() {
                let ended = self.follower.ended();
                tokio::select! {
                    () = self.ctx.shutdown.abort.cancelled() => return None,
                    () = ended => return None,
                    () = self.follower.changed() => {}
                    () = tokio::time::sleep(POLL_INTERVAL), if again => {}
                }
            }
        }
    }

    async fn may_go_on(&self) -> bool {
        self.caller.is_in_force(&self.ctx).await.unwrap_or_else(|error| {
            debug!(%error, "A stream could not look its caller's token up; it ends");
            false
        })
    }

    async fn look(&mut self) -> wakeful_store::Result<()> {
        // Read the call in progress before the journal. If the call ends in between, its entry follows its
        // chunks.
        let known = self.generation.as_deref();
        let live = self.ctx.store.live_generation(self.follower.session_id(), known, self.chunk).await?;
        let store = &self.ctx.store;
        let page =
            store.journal_page(self.follower.session_id(), self.after, self.limit, BATCH_BYTES).await?;
        let entries = page.items;
        let is_cut = page.more && (entries.len() as i64) < self.limit;
        self.limit = if is_cut { entries.len() as i64 } else { (2 * self.limit).min(BATCH) };
        for entry in &entries {
            self.after = entry.seq;
            if entry.kind == "GEN_COMPLETE" {
                self.show_rest(&entry.payload);
            }
            if let Ok(data) = serde_json::to_string(entry) {
                let frame =
                    Event::default().id(entry.seq.to_string()).event(entry.kind.to_lowercase()).data(data);
                self.frames.push_back(frame);
            }
        }
        let speaks_of = |id: &str| entries.iter().any(|entry| entry.payload["generation_id"] == id);
        if self.generation.as_deref().is_some_and(speaks_of) {
            // The entries contain the end of the call, so its chunks no longer count.
            self.generation = None;
            self.shown = String::new();
        }
        // With more to come we are still far behind; the call in progress comes later.
        if page.more {
            return Ok(());
        }
        match live {
            Some(live) if speaks_of(&live.generation_id) => {}
            Some(live) => {
                self.ask_for_chunks(&live.generation_id);
                self.show(live).await?;
            }
            // The call's row is gone, but no entry says how it ended: a crash of the database lost the row.
            None if self.generation.is_some() => {
                self.reset(json!({"generation_id": null}));
                self.generation = None;
            }
            None => {}
        }
        Ok(())
    }

    /// Tells the workers that somebody reads: only then do they write chunks. Repeated, because a notification can be
    /// lost, and because a reader leaves without a word.
    fn ask_for_chunks(&mut self, generation_id: &str) {
        let heard =
            self.said.as_ref().is_some_and(|(id, at)| id == generation_id && at.elapsed() < READS_EVERY);
        if !heard {
            self.ctx.bus.notifier.reads(self.follower.session_id());
            self.said = Some((generation_id.to_owned(), Instant::now()));
        }
    }

    /// Sends the chunks of the current call that were not sent yet.
    async fn show(&mut self, mut live: LiveGeneration) -> wakeful_store::Result<()> {
        let known = self.generation.as_deref() == Some(live.generation_id.as_str());
        if known && live.last_chunk < self.chunk {
            // The database lost chunks that were shown, and other text may take their place.
            match self.ctx.store.live_generation(self.follower.session_id(), None, NONE).await? {
                Some(again) if again.generation_id == live.generation_id => live = again,
                // The call has ended; the next read finds its entry.
                _ => return Ok(()),
            }
            self.generation = None;
        }
        if self.generation.as_deref() != Some(live.generation_id.as_str()) {
            self.reset(json!({
                "generation_id": live.generation_id, "step_number": live.step_number, "attempt": live.attempt,
            }));
            self.generation = Some(live.generation_id.clone());
            self.chunk = NONE;
            self.shown.clear();
        }
        for (chunk_no, text) in live.chunks {
            if chunk_no != self.chunk + 1 {
                break;
            }
            self.chunk_frame(&live.generation_id, chunk_no, &text);
        }
        Ok(())
    }

    fn chunk_frame(&mut self, generation_id: &str, chunk_no: i64, text: &str) {
        self.chunk = chunk_no;
        self.shown.push_str(text);
        let data = json!({"generation_id": generation_id, "chunk_no": chunk_no, "delta": text});
        self.frames.push_back(Event::default().event("gen_chunk").data(data.to_string()));
    }

    /// Sends the rest of the text as a chunk, before the entry that completes the call. The worker has not written that chunk,
    /// because the commit of the reply has the text. So a client that only adds chunks shows all of it.
    fn show_rest(&mut self, complete: &serde_json::Value) {
        let (Some(id), Some(text)) = (complete["generation_id"].as_str(), complete["text"].as_str()) else {
            return;
        };
        if self.generation.as_deref() != Some(id) {
            return;
        }
        if let Some(rest) = text.strip_prefix(&self.shown).filter(|rest| !rest.is_empty()) {
            let rest = rest.to_owned();
            self.chunk_frame(id, self.chunk + 1, &rest);
        }
    }

    /// Tells the client to forget the chunks that it was shown.
    fn reset(&mut self, data: serde_json::Value) {
        self.frames.push_back(Event::default().event("gen_reset").data(data.to_string()));
    }
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get(
            "/v1/sessions/{id}/stream",
            "Server-sent events: journal entries, and text as it is generated",
        )
        .query::<StreamQuery>()
        .text("Last-Event-ID", "header", "Continues after this entry.")
        .answers_bytes(StatusCode::OK, "the events, until the client closes the stream", "text/event-stream")
        .refuses(&[StatusCode::TOO_MANY_REQUESTS]),
    ]
}
