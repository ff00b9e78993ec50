//! The act that a task carries out, so that its transactions can name who acts.
//!
//! The edge (a request, a command) says who acts and what, and runs the rest inside [`acting`]. Every transaction that
//! commits in there writes its row of the audit first, in the same commit. So no function between the two passes the actor on,
//! and none can forget it. Tasks that are spawned are not part of the act.

use crate::encryption::reason_of_act;
use serde::Serialize;
use sqlx::PgConnection;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Who acts, what, on which row, why and from where.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Act {
    pub actor_kind: &'static str,
    /// A name for people.
    pub actor: String,
    pub token_id: Option<String>,
    pub user_id: Option<String>,
    /// Such as `session.retry`.
    pub verb: String,
    pub target: Option<String>,
    pub space_id: Option<String>,
    pub reason: Option<String>,
    pub address: Option<String>,
}

struct Acting {
    act: Mutex<Act>,
    is_written: AtomicBool,
}

tokio::task_local! {
    static ACTING: Arc<Acting>;
}

/// Runs `work` as this act. Returns its result, the act with what was said of it meanwhile, and whether a commit has
/// written it, or it only looked.
pub async fn acting<W: Future>(act: Act, work: W) -> (W::Output, Act, bool) {
    let acting = Arc::new(Acting { act: Mutex::new(act), is_written: AtomicBool::new(false) });
    let done = ACTING.scope(Arc::clone(&acting), work).await;
    let act = acting.act.lock().unwrap_or_else(PoisonError::into_inner).clone();
    (done, act, acting.is_written.load(Ordering::Acquire))
}

fn with<T>(with: impl FnOnce(&mut Act) -> T) -> Option<T> {
    ACTING.try_with(|acting| with(&mut acting.act.lock().unwrap_or_else(PoisonError::into_inner))).ok()
}

/// Says why the task acts.
pub fn because(reason: Option<&str>) {
    if let Some(reason) = reason {
        with(|act| act.reason = Some(reason.to_owned()));
    }
}

/// Says that the task only looks, though its route or command may change something: it gets no row.
pub fn only_looks() {
    is_written();
}

/// Says what the task does, if it turns out to be another thing than the edge thought.
pub(crate) fn does(verb: &str) {
    with(|act| act.verb = verb.to_owned());
}

/// The act, if the task is one.
pub(crate) fn current() -> Option<Act> {
    with(|act| act.clone())
}

/// Says which row the task acts on.
pub(crate) fn on(target: &str) {
    with(|act| act.target = Some(target.to_owned()));
}

/// The name of who acts, if the task is an act.
pub(crate) fn actor() -> Option<String> {
    with(|act| act.actor.clone())
}

/// The act as JSON, for a statement that writes its row itself.
pub(crate) fn row() -> Option<String> {
    with(|act| serde_json::to_string(act).ok()).flatten()
}

/// Says that the task repeats the answer of an act that was carried out before, so it has no row of its own.
pub fn repeats() {
    is_written();
}

/// Says that a statement has written the act's row.
pub(crate) fn is_written() {
    let _ = ACTING.try_with(|acting| acting.is_written.store(true, Ordering::Release));
}

/// Writes the act's row, if the task is an act. The caller commits.
pub(crate) async fn write(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    let Some(act) = with(|act| act.clone()) else { return Ok(()) };
    insert(connection, &act, "done", None, 1).await
}

/// Writes a row.
pub(crate) async fn insert(
    connection: &mut PgConnection,
    act: &Act,
    outcome: &str,
    status: Option<i32>,
    times: i64,
) -> Result<(), sqlx::Error> {
    let reason = reason_of_act(&mut *connection, act.target.as_deref(), act.reason.clone()).await?;
    sqlx::query!(
        "insert into audit_log
            (actor_kind, actor, token_id, user_id, verb, target, space_id, reason, address, outcome, status, times)
        values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
        act.actor_kind,
        act.actor,
        act.token_id,
        act.user_id,
        act.verb,
        act.target,
        act.space_id,
        reason,
        act.address,
        outcome,
        status,
        times
    )
    .execute(connection)
    .await?;
    Ok(())
}
