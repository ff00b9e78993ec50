//! Rebuilds a session's caches from its logs.

use super::facts::Facts;
use super::{check, checks};
use crate::audit::act;
use crate::encryption::Seal;
use crate::run::{self, Wakes};
use crate::{Error, Result, Store};
use serde::Serialize;
use serde_json::{Value, json};
use sqlx::PgConnection;
use wakeful_workflow::blob::Blob;
use wakeful_workflow::event::Event;

/// One column that the rebuild changed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    pub name: &'static str,
    pub was: Value,
    pub is: Value,
}

/// Result of a rebuild.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Rebuilt {
    pub session_id: String,
    pub changes: Vec<Change>,
    /// The fold of the journal differed from the fold of the messages, so the rebuild appended a correct checkpoint.
    pub checkpoint_written: bool,
    /// Differences that remain: the log itself is damaged, or the run is open.
    pub left: Vec<&'static str>,
}

impl Store {
    /// Rewrites state, totals and pointers from the logs, and the status too while the session is at rest. If
    /// the journal gives another state than the messages, the messages are right, so this appends a
    /// checkpoint with their state.
    ///
    /// Increments `wake_seq`, so a worker that holds the session reads it again. Writes nothing if everything
    /// agrees.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Corrupt`] for a log that cannot be read, [`Error::Database`].
    pub async fn rebuild(&self, session_id: &str) -> Result<Rebuilt> {
        act::on(session_id);
        let seal = self.own_seal_of(session_id).await?;
        let mut tx = self.pool.in_line(session_id).begin().await?;
        run::lock(&mut tx, session_id).await?;
        let facts = Facts::read(&mut tx, &seal, session_id).await?;
        let changes = changes(&facts);
        let mut rebuilt = Rebuilt { session_id: session_id.to_owned(), changes, ..Rebuilt::default() };
        if !rebuilt.changes.is_empty() {
            write(&mut tx, &seal, session_id, &facts).await?;
        }
        // Write the checkpoint after the pointers: the entry takes the next number after `last_event_seq`.
        if !journal_gives_the_state(&facts) {
            checkpoint(&mut tx, &seal, session_id, &facts).await?;
            rebuilt.checkpoint_written = true;
        }
        rebuilt.left = checks(&Facts::read(&mut tx, &seal, session_id).await?)
            .into_iter()
            .filter(|check| !check.agrees)
            .map(|check| check.name)
            .collect();
        tx.commit().await?;
        Ok(rebuilt)
    }
}

fn changes(facts: &Facts) -> Vec<Change> {
    let row = &facts.row;
    let mut columns = vec![
        ("state", row.state.clone(), facts.state.clone()),
        ("status", json!(row.status), json!(status(facts))),
        ("to_message_number", json!(row.to_message_number), json!(facts.to_message_number)),
        ("last_step_number", json!(row.last_step_number), json!(facts.last_step_number)),
        ("last_event_seq", json!(row.last_event_seq), json!(facts.last_event_seq)),
        ("last_message_number", json!(row.last_message_number), json!(facts.last_message_number)),
        ("rebase", row.rebase.clone(), facts.rebase.clone()),
        ("compaction_failures", json!(row.compaction_failures), json!(facts.compaction_failures)),
        ("totals of runs", json!(facts.wrong_runs), json!([])),
    ];
    let totals = row.totals.columns().into_iter().zip(facts.totals.columns());
    columns.extend(totals.map(|((name, was), (_, is))| (name, json!(was), json!(is))));
    columns
        .into_iter()
        .filter(|(name, was, is)| !check(name, "", was.clone(), is.clone()).agrees)
        .map(|(name, was, is)| Change { name, was, is })
        .collect()
}

/// The status to write. While a run is open, its own commits set the status.
fn status(facts: &Facts) -> &str {
    match &facts.recovered {
        Ok(recovered) if !facts.row.live => &recovered.lifecycle_state,
        Ok(_) | Err(_) => &facts.row.status,
    }
}

fn journal_gives_the_state(facts: &Facts) -> bool {
    let Ok(recovered) = &facts.recovered else { return false };
    check("state", "journal", facts.state.clone(), recovered.state()).agrees
}

async fn write(tx: &mut PgConnection, seal: &Seal, session_id: &str, facts: &Facts) -> Result<()> {
    let state = match &facts.state {
        Value::Object(state) => Value::Object(seal.state(state.clone())),
        other => other.clone(),
    };
    sqlx::query!(
        "update conversation_sessions
        set state = $2,
            status = $3,
            to_message_number = $4,
            last_step_number = $5,
            last_event_seq = $6,
            last_message_number = $7,
            total_turns = $8::bigint::integer,
            total_input_tokens = $9,
            total_output_tokens = $10,
            total_cached_tokens = $11,
            total_cache_write_tokens = $12,
            total_cost_micros = $13,
            rebase = nullif($14, 'null'::jsonb),
            compaction_failures = $15,
            wake_seq = wake_seq + 1
        where session_id = $1",
        session_id,
        state,
        status(facts),
        facts.to_message_number,
        facts.last_step_number,
        facts.last_event_seq,
        facts.last_message_number,
        facts.totals.turns,
        facts.totals.input_tokens,
        facts.totals.output_tokens,
        facts.totals.cached_tokens,
        facts.totals.cache_write_tokens,
        facts.totals.cost_micros,
        facts.rebase,
        facts.compaction_failures
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!(
        "update session_runs
        set steps = sums.steps,
            input_tokens = sums.input_tokens,
            output_tokens = sums.output_tokens,
            tool_calls = sums.tool_calls
        from (
            select r.run_id, t.*
            from session_runs r
            cross join lateral run_totals(r.session_id, r.run_id, 0) t
            where r.run_id = any ($1)
        ) sums
        where session_runs.run_id = sums.run_id",
        &facts.wrong_runs
    )
    .execute(tx)
    .await?;
    Ok(())
}

async fn checkpoint(tx: &mut PgConnection, seal: &Seal, session_id: &str, facts: &Facts) -> Result<()> {
    let Value::Object(state) = &facts.state else {
        return Err(Error::corrupt("state", "not an object"));
    };
    let blob = Blob::of_state(state);
    let sealed = seal.key_id().map(|data_key| (data_key, seal.bytes(&blob.bytes)));
    if let Some((data_key, bytes)) = sealed {
        sqlx::query!(
            "insert into sealed_blobs (data_key, sha256, space_id, size, media_type, bytes)
            select $1, $2, s.space_id, $3, 'application/json', $4
            from conversation_sessions s
            where s.session_id = $5
            on conflict (data_key, sha256) do update set bytes = excluded.bytes, size = excluded.size",
            data_key,
            blob.sha256,
            blob.bytes.len() as i64,
            bytes,
            session_id
        )
        .execute(&mut *tx)
        .await?;
    } else {
        sqlx::query!(
            "insert into blobs (space_id, sha256, size, media_type, bytes)
        select s.space_id, $1, length($2::bytea), 'application/json', $2
        from conversation_sessions s
        where s.session_id = $3
        -- The existing blob of this hash may be the corrupt one, so overwrite it.
        on conflict (sha256, space_id) do update
            set bytes = excluded.bytes, size = excluded.size, touched_at = now()",
            blob.sha256,
            blob.bytes,
            session_id
        )
        .execute(&mut *tx)
        .await?;
    }
    let event = Event::Checkpoint {
        step_number: facts.last_step_number,
        to_message_number: facts.to_message_number,
        lifecycle_state: status(facts).to_owned(),
        state_sha256: blob.sha256,
    };
    run::append_events(tx, session_id, None, None, Wakes::Planner, &[event]).await
}
