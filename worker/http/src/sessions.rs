//! Lists and shows sessions, and sends messages to them.

use crate::access::Caller;
use crate::body::{Body, Id, accepted, check_cursor, check_text, key_of, message_text, parse};
use crate::openapi::Operation;
use crate::openapi::{both, of, page_of};
use crate::problem::Problem;
use crate::search::{Search, cursor};
use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use chrono::{DateTime, Utc};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use tracing::warn;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::ingest;
use wakeful_engine::workspace::{Limits, changes, list_at};
use wakeful_store::Error;
use wakeful_store::event::JournalEntry;
use wakeful_store::page::{PAGE_BYTES, Page};
use wakeful_store::search::Behind;
use wakeful_store::session::{
    CallView, DeliveryView, EarlierMessage, MessageView, RunView, SessionSummary, StepView,
};
use wakeful_store::space::{Scope, within};
use wakeful_store::wake::{NewMessage, Woken};
use wakeful_workflow::access::Reach;
use wakeful_workflow::diff::Report;
use wakeful_workflow::session::SessionStatus;
use wakeful_workflow::trigger;

/// How many items a page has by default.
const PAGE: i64 = 50;
/// … and at most.
const PAGE_LIMIT: i64 = 500;

/// The digits of a session's id, after `sess_`.
const ID_DIGITS: usize = 32;
/// How many sessions with one beginning are looked at.
const BEGIN_SO: i64 = 20;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct PageQuery {
    cursor: Option<i64>,
    limit: Option<i64>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct MessagesQuery {
    cursor: Option<i64>,
    limit: Option<i64>,
    /// `false` leaves out the agent's internal messages; `true` gives only them.
    internal: Option<bool>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct EventsQuery {
    cursor: Option<i64>,
    limit: Option<i64>,
    /// The newest entries instead of those after the cursor.
    #[serde(default)]
    newest: bool,
}

impl PageQuery {
    fn limit(&self) -> Result<i64, Problem> {
        limit(self.limit)
    }
}

/// The page size for what the caller asked.
///
/// # Errors
/// 400 for a size that no page has.
pub fn limit(asked: Option<i64>) -> Result<i64, Problem> {
    match asked.unwrap_or(PAGE) {
        size @ 1..=PAGE_LIMIT => Ok(size),
        _ => Err(Problem::bad_request(format!("`limit` is from 1 to {PAGE_LIMIT}"))),
    }
}

pub(super) type Answer = Result<Json<Value>, Problem>;

pub(super) async fn list(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    query: Result<Query<Search>, QueryRejection>,
) -> Answer {
    let Query(query) = query?;
    let filter = query.filter_for(&ctx.store, &caller).await?;
    let space = filter.space_id.as_deref().unwrap_or(caller.space());
    let found = async {
        let (sessions, next) = ctx.store.sessions_page(&filter).await?;
        let ids: Vec<String> = sessions.iter().map(|one| one.session_id.clone()).collect();
        Ok::<_, Error>((sessions, next, ctx.store.first_messages(&ids).await?))
    };
    let (sessions, next, mut said) = within(Scope::of(space), found).await?;
    let next = json!(next.map(cursor));
    let listed =
        |session: SessionSummary| Listed { first_message: said.remove(&session.session_id), session };
    page(&sessions.into_iter().map(listed).collect::<Vec<_>>(), next)
}

/// A session of a list.
#[derive(Serialize, JsonSchema)]
pub(super) struct Listed {
    #[serde(flatten)]
    session: SessionSummary,
    /// The beginning of what a user first said to it, on one line: 200 characters at most. Null: nobody said anything, it is very
    /// large, or its key cannot be had.
    first_message: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ReplaysQuery {
    #[schemars(extend("enum" = SessionStatus::WORDS))]
    status: Option<String>,
    agent: Option<String>,
    #[serde(default, deserialize_with = "crate::times::usual")]
    #[schemars(with = "Option<DateTime<Utc>>")]
    since: Option<DateTime<Utc>>,
    #[serde(default, deserialize_with = "crate::times::usual")]
    #[schemars(with = "Option<DateTime<Utc>>")]
    until: Option<DateTime<Utc>>,
    cursor: Option<String>,
    limit: Option<i64>,
}

/// Replays: sessions that ran another one again, to compare.
pub(super) async fn replays(
    state: State<Arc<Ctx>>,
    caller: Caller,
    query: Result<Query<ReplaysQuery>, QueryRejection>,
) -> Answer {
    let Query(ReplaysQuery { status, agent, since, until, cursor, limit }) = query?;
    let trigger_type = Some("replay".to_owned());
    let search = Search { status, agent, since, until, cursor, limit, trigger_type, ..Search::default() };
    list(state, caller, Ok(Query(search))).await
}

/// How far the search is behind.
pub(super) async fn behind(State(ctx): State<Arc<Ctx>>) -> Result<Json<Behind>, Problem> {
    Ok(Json(ctx.store.search_behind().await?))
}

/// The error for a trigger type that no session can have.
pub fn no_trigger(trigger_type: &str) -> String {
    format!("no session has the trigger type {trigger_type:?}; there are: {}", trigger::OWN.join(", "))
}

/// The session with its runs, latest messages, steps, calls and deliveries. The beginning of an id is enough here, if no other
/// session begins so: the answer has the whole id.
pub(super) async fn show(State(ctx): State<Arc<Ctx>>, caller: Caller, Id(id): Id) -> Answer {
    let id = if is_beginning(&id) { whole(&ctx, &caller, id).await? } else { id };
    Ok(Json(detail(&ctx.store, &caller.reach, &id).await?))
}

/// Whether a text may be the beginning of a session's id, and is not a whole one.
pub fn is_beginning(id: &str) -> bool {
    let digits = id.strip_prefix("sess_").unwrap_or_default();
    (1..ID_DIGITS).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The one session of the caller's space that begins so. Without one, `id` itself, which does not exist.
async fn whole(ctx: &Ctx, caller: &Caller, id: String) -> Result<String, Problem> {
    // Others' sessions would decide whether it is the only one, and that would tell of them.
    if caller.reach.agent.is_some() || caller.reach.user_id.is_some() {
        return Ok(id);
    }
    let found = ctx.store.sessions_that_begin(&id, BEGIN_SO).await?;
    let is_all = (found.len() as i64) < BEGIN_SO;
    let mut own = Vec::new();
    for one in found {
        match ctx.store.session_within(&caller.reach, &one).await {
            Ok(_) => own.push(one),
            Err(Error::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    match own.pop() {
        Some(whole) if own.is_empty() && is_all => Ok(whole),
        _ => Ok(id),
    }
}

/// The result of `GET /v1/sessions/{id}` and `wakeful session show`.
///
/// # Errors
/// [`Error::NotFound`], [`Error::Database`].
pub async fn detail(store: &wakeful_store::Store, reach: &Reach, id: &str) -> Result<Value, Error> {
    let session = store.session_within(reach, id).await?;
    let mut body = serde_json::to_value(&session)
        .map_err(|error| Error::Corrupt { what: "session", reason: error.to_string() })?;
    let runs = store.runs(id, None, PAGE, PAGE_BYTES).await?;
    let messages = store.messages_page(None, id, None, PAGE, PAGE_BYTES).await?;
    let steps = store.steps(id, None, PAGE).await?;
    let older_messages = older_messages(&messages);
    let older_steps = older_page(&steps, PAGE, |first| first.step_number);
    if let Value::Object(fields) = &mut body {
        fields.insert("runs_before".to_owned(), older_runs(&runs));
        fields.insert("runs".to_owned(), json!(runs.items));
        fields.insert("earlier".to_owned(), json!(store.earlier_messages(id, PAGE, PAGE_BYTES).await?));
        fields.insert("messages".to_owned(), json!(messages.items));
        fields.insert("messages_before".to_owned(), older_messages);
        fields.insert("steps".to_owned(), json!(steps));
        fields.insert("steps_before".to_owned(), older_steps);
        fields.insert("tool_calls".to_owned(), json!(store.calls(id).await?));
        fields.insert("deliveries".to_owned(), json!(store.deliveries(id).await?));
    }
    Ok(body)
}

/// Returns the query of a request about a session that exists.
///
/// # Errors
/// A problem for an invalid query, then for an unknown session.
async fn of_session<Q>(
    ctx: &Ctx,
    caller: &Caller,
    id: &str,
    query: Result<Query<Q>, QueryRejection>,
) -> Result<Q, Problem> {
    let Query(query) = query?;
    ctx.store.session_within(&caller.reach, id).await?;
    Ok(query)
}

/// Messages below the cursor, oldest first; `next` leads to older ones.
pub(super) async fn messages(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    query: Result<Query<MessagesQuery>, QueryRejection>,
) -> Answer {
    let query = of_session(&ctx, &caller, &id, query).await?;
    let limit = limit(query.limit)?;
    let page = ctx.store.messages_page(query.internal, &id, query.cursor, limit, PAGE_BYTES).await?;
    let next = older_messages(&page);
    // The oldest page is followed by what was said before the session.
    let earlier = if next.is_null() {
        ctx.store.earlier_messages(&id, PAGE_LIMIT, PAGE_BYTES).await?
    } else {
        Vec::new()
    };
    Ok(Json(json!({"items": page.items, "next": next, "earlier": earlier})))
}

/// The cursor of the page with older messages, or null.
fn older_messages(page: &Page<MessageView>) -> Value {
    page.items.first().filter(|_| page.more).map_or(Value::Null, |first| json!(first.message_number))
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RunsQuery {
    cursor: Option<String>,
    limit: Option<i64>,
}

/// Runs before the one that the cursor names, oldest first; `next` leads to older ones.
pub(super) async fn runs(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    query: Result<Query<RunsQuery>, QueryRejection>,
) -> Answer {
    let query = of_session(&ctx, &caller, &id, query).await?;
    check_cursor(query.cursor.as_deref(), "run")?;
    let limit = limit(query.limit)?;
    let runs = ctx.store.runs(&id, query.cursor.as_deref(), limit, PAGE_BYTES).await?;
    page(&runs.items, older_runs(&runs))
}

/// The cursor of the page with older runs, or null.
fn older_runs(page: &Page<RunView>) -> Value {
    page.items.first().filter(|_| page.more).map_or(Value::Null, |first| json!(first.run_id))
}

/// Steps below the cursor, oldest first; `next` leads to older ones.
pub(super) async fn steps(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    query: Result<Query<PageQuery>, QueryRejection>,
) -> Answer {
    let query = of_session(&ctx, &caller, &id, query).await?;
    let limit = query.limit()?;
    let items = ctx.store.steps(&id, query.cursor, limit).await?;
    page(&items, older_page(&items, limit, |first| first.step_number))
}

/// The journal entries after the cursor, or the newest.
pub(super) async fn events(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    query: Result<Query<EventsQuery>, QueryRejection>,
) -> Answer {
    let query = of_session(&ctx, &caller, &id, query).await?;
    let limit = limit(query.limit)?;
    if query.newest {
        if query.cursor.is_some() {
            return Err(Problem::bad_request("`newest` begins where it has to: leave `cursor` out"));
        }
        return page(&ctx.store.newest_entries(&id, limit, PAGE_BYTES).await?, Value::Null);
    }
    let found = ctx.store.journal_page(&id, query.cursor.unwrap_or(0), limit, PAGE_BYTES).await?;
    let next = found.items.last().filter(|_| found.more).map_or(Value::Null, |last| json!(last.seq));
    page(&found.items, next)
}

/// Compares two sessions turn by turn: [`wakeful_workflow::diff::Report`].
pub(super) async fn diff(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    path: Result<Path<(String, String)>, PathRejection>,
) -> Result<Json<Compared>, Problem> {
    let Path((left, right)) = path?;
    check_text("session id", Some(&left), 256)?;
    check_text("session id", Some(&right), 256)?;
    // Both sessions must be in the caller's space. A session of another space does not exist for the caller.
    ctx.store.session_within(&caller.reach, &left).await?;
    ctx.store.session_within(&caller.reach, &right).await?;
    let (left, right) = (ctx.store.side(&left).await?, ctx.store.side(&right).await?);
    // The work is bounded but may take a second, so keep it off the async threads.
    let compared = tokio::task::spawn_blocking(move || wakeful_workflow::diff::diff(&left, &right));
    let report =
        compared.await.map_err(|error| Error::Corrupt { what: "comparison", reason: error.to_string() })?;
    let files = changed_files(&ctx, &report).await;
    Ok(Json(Compared { report, files }))
}

/// A report, and the files that differ between the two sessions.
#[derive(Serialize, JsonSchema)]
pub(super) struct Compared {
    #[serde(flatten)]
    report: Report,
    /// Files never count for the verdict. Null: they could not be read.
    files: Option<Vec<ChangedFile>>,
}

/// How a file differs between two sessions.
#[derive(Serialize, JsonSchema)]
struct ChangedFile {
    /// From the workspace's folder.
    path: String,
    /// `added`, `removed`, `changed`, or `mode` if only the permissions differ.
    how: &'static str,
}

async fn changed_files(ctx: &Ctx, report: &Report) -> Option<Vec<ChangedFile>> {
    let limits = Limits::of(&ctx.config.workspace);
    let left = list_at(&ctx.store, &report.left.session_id, None, &limits).await;
    let right = list_at(&ctx.store, &report.right.session_id, None, &limits).await;
    match (left, right) {
        (Ok((_, left)), Ok((_, right))) => {
            let changed = changes(&left, &right).into_iter();
            Some(changed.map(|one| ChangedFile { path: one.path, how: one.how }).collect())
        }
        // A store that is away, or has lost them. The rest of the comparison is shown all the same.
        (Err(error), _) | (_, Err(error)) => {
            warn!(%error, "The files of two sessions were not compared");
            None
        }
    }
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SessionMessage {
    text: String,
    client_key: Option<String>,
}

pub(super) async fn send(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<Woken>), Problem> {
    let mut message: SessionMessage = parse(&body?)?;
    message.client_key = key_of("client_key", message.client_key, &headers)?;
    let text = message_text(message.text)?;
    let session = ctx.store.session_within(&caller.reach, &id).await?;
    let message = NewMessage {
        client_key: message.client_key,
        text,
        sender: None,
        trace_context: None,
        attachments: Vec::new(),
    };
    Ok(accepted(ingest::send(&ctx, &id, &session.conversation_id, message).await?))
}

/// The cursor of the next page: that of the last item, or null if this page is not full.
pub(super) fn next_page<T>(items: &[T], limit: i64, cursor: impl Fn(&T) -> Value) -> Value {
    items.last().filter(|_| items.len() as i64 == limit).map_or(Value::Null, cursor)
}

/// The cursor of the page with older items: the first item's number, or null if this page is not full. Pages
/// of the newest items are given oldest first.
fn older_page<T>(items: &[T], limit: i64, number: impl Fn(&T) -> i64) -> Value {
    items.first().filter(|_| items.len() as i64 == limit).map_or(Value::Null, |first| json!(number(first)))
}

pub(super) fn page<T: Serialize>(items: &[T], next: Value) -> Answer {
    Ok(Json(json!({"items": items, "next": next})))
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get("/v1/sessions", "Sessions that match all parameters, newest first")
            .query::<Search>()
            .lists::<Listed>(),
        Operation::get("/v1/replays", "Replays of sessions, newest first")
            .query::<ReplaysQuery>()
            .lists::<Listed>(),
        Operation::get("/v1/sessions/{id}", "A session with its runs, messages, steps, calls and deliveries")
            .answers(
                StatusCode::OK,
                "the session",
                both(
                    of::<SessionSummary>(),
                    crate::object! {
                        "runs": Vec<RunView>, "runs_before": Option<String>, "earlier": Vec<EarlierMessage>, "messages": Vec<MessageView>, "messages_before": Option<i64>,
                        "steps": Vec<StepView>, "steps_before": Option<i64>, "tool_calls": Vec<CallView>,
                        "deliveries": Vec<DeliveryView>,
                    },
                ),
            ),
        Operation::get(
            "/v1/sessions/{id}/messages",
            "Messages, the newest page first, each page oldest first",
        )
        .query::<MessagesQuery>()
        .answers(
            StatusCode::OK,
            "a page; the oldest one has what was said before the session too",
            both(page_of::<MessageView>(), crate::object! {"earlier": Vec<EarlierMessage>}),
        ),
        Operation::post("/v1/sessions/{id}/messages", "Sends a message to a session, whatever woke it")
            .body::<SessionMessage>()
            .answers(StatusCode::ACCEPTED, "accepted", of::<Woken>())
            .answers(StatusCode::OK, "the first answer to this key", of::<Woken>()),
        Operation::get("/v1/sessions/{id}/runs", "Runs, the newest page first, each page oldest first")
            .query::<RunsQuery>()
            .lists::<RunView>(),
        Operation::get("/v1/sessions/{id}/steps", "Steps, the newest page first, each page oldest first")
            .query::<PageQuery>()
            .lists::<StepView>(),
        Operation::get("/v1/sessions/{id}/events", "Journal entries, oldest first")
            .query::<EventsQuery>()
            .lists::<JournalEntry>(),
        Operation::get("/v1/sessions/{id}/diff/{other}", "The differences between two sessions")
            .shows::<Compared>(),
        Operation::get("/v1/search", "How far the index of the search is behind").shows::<Behind>(),
    ]
}
