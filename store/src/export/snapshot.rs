//! The cut: one short REPEATABLE READ transaction reads what may still change, and where the logs end.

use super::row::{self, object, time, word};
use crate::{Error, Result, Store};
use futures::{Stream, TryStreamExt as _};
use sqlx::PgConnection;
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write as _};
use std::pin::pin;
use tempfile::SpooledTempFile;
use wakeful_workflow::bundle::{Counts, Cut, Header, InboxStatus, Line, RunRow, SessionRow, VERSION};
use wakeful_workflow::session::SessionStatus;

/// Bytes of changing rows that stay in memory. The rest goes to an unnamed temporary file.
const IN_MEMORY: usize = 1 << 20;

/// The state at which a bundle is cut.
pub(super) struct Snapshot {
    pub header: Header,
    pub session: Box<SessionRow>,
    pub last_ordinal: i64,
    pub last_inbox: i64,
    pub runs: SnapshotRows,
    pub calls: SnapshotRows,
    pub deliveries: SnapshotRows,
    pub inbox: SnapshotRows,
}

/// Rows that the snapshot read, in order.
pub(super) struct SnapshotRows {
    rows: BufReader<SpooledTempFile>,
    next: Option<Line>,
    /// Size of the next row as text.
    bytes: usize,
}

/// Writes the rows that a [`SnapshotRows`] then reads.
struct SnapshotRowsWriter(SpooledTempFile);

impl SnapshotRowsWriter {
    fn new() -> SnapshotRowsWriter {
        SnapshotRowsWriter(SpooledTempFile::new(IN_MEMORY))
    }

    fn push(&mut self, line: &Line) -> Result<()> {
        self.0.write_all(&line.to_bytes()).map_err(|error| spool_failed(&error))
    }

    fn filled(mut self) -> Result<SnapshotRows> {
        self.0.seek(SeekFrom::Start(0)).map_err(|error| spool_failed(&error))?;
        let mut rows = SnapshotRows { rows: BufReader::new(self.0), next: None, bytes: 0 };
        rows.read()?;
        Ok(rows)
    }
}

/// Reads rows until their end.
async fn spooled<R>(
    rows: impl Stream<Item = sqlx::Result<R>>,
    line: impl Fn(R) -> Result<Line>,
) -> Result<SnapshotRows> {
    let (mut writer, mut rows) = (SnapshotRowsWriter::new(), pin!(rows));
    while let Some(row) = rows.try_next().await? {
        writer.push(&line(row)?)?;
    }
    writer.filled()
}

fn spool_failed(error: &std::io::Error) -> Error {
    Error::corrupt("temporary file", error)
}

impl SnapshotRows {
    /// The next row, without taking it.
    pub fn peek(&self) -> Option<&Line> {
        self.next.as_ref()
    }

    /// Takes the next rows: about `bytes` of them, and at least one. None are left if it is empty.
    pub fn take_page(&mut self, bytes: i64) -> Result<Vec<(Line, i64)>> {
        let (mut page, mut taken) = (Vec::new(), 0);
        while taken < bytes {
            let weight = self.bytes as i64;
            let Some(line) = self.take()? else { break };
            taken += weight;
            page.push((line, weight));
        }
        Ok(page)
    }

    /// Takes the next row.
    pub fn take(&mut self) -> Result<Option<Line>> {
        let taken = self.next.take();
        self.read()?;
        Ok(taken)
    }

    fn read(&mut self) -> Result<()> {
        let mut text = Vec::new();
        self.rows.read_until(b'\n', &mut text).map_err(|error| spool_failed(&error))?;
        self.bytes = text.len();
        self.next = if text.is_empty() { None } else { Some(crate::json::from_bytes("spooled row", &text)?) };
        Ok(())
    }
}

impl Snapshot {
    pub async fn take(store: &Store, session_id: &str, redacted: bool) -> Result<Snapshot> {
        let mut tx = store.pool.begin().await?;
        sqlx::query!("set transaction isolation level repeatable read, read only").execute(&mut *tx).await?;
        let (mut session, was_redacted) = session(&mut tx, session_id).await?;
        let (last, gaps) = numbers(&mut tx, session_id, session.base_message_number).await?;
        // Numbers beyond the session's last message belong to other sessions of the conversation.
        session.last_message_number = last;
        let counted = counts(&mut tx, session_id).await?;
        let header = Header {
            wakeful_bundle: VERSION,
            session_id: session_id.to_owned(),
            redacted: redacted || was_redacted,
            cut: Cut {
                message_number: last,
                step_number: session.last_step_number,
                event_seq: session.last_event_seq,
            },
            counts: counted.counts,
            gaps,
        };
        let snapshot = Snapshot {
            header,
            session: Box::new(session),
            last_ordinal: counted.last_ordinal,
            last_inbox: counted.last_inbox,
            runs: runs(&mut tx, session_id).await?,
            calls: open_calls(&mut tx, session_id).await?,
            deliveries: open_deliveries(&mut tx, session_id).await?,
            inbox: pending(&mut tx, session_id).await?,
        };
        tx.commit_part().await?;
        Ok(snapshot)
    }
}

/// The session's row, and whether it was imported from a redacted bundle.
async fn session(tx: &mut PgConnection, session_id: &str) -> Result<(SessionRow, bool)> {
    let row = sqlx::query!(
        r#"
        select s.session_id, s.conversation_id, s.space_id, s.mailbox_id, s.trigger_type, s.trigger_id, s.agent, s.model_id,
            s.model_context_window, s.status, s.cancel_requested, s.cancel_reason, s.error, s.policy, s.tool_names,
            s.prefix_sha256, s.initial_state, s.state, s.seed_message_count, s.base_message_number,
            s.last_message_number, s.to_message_number, s.last_step_number, s.last_event_seq, s.total_turns,
            s.total_input_tokens, s.total_output_tokens, s.total_cached_tokens, s.total_cache_write_tokens,
            s.total_cost_micros, s.started_at, s.completed_at, s.repository_id, s.parent_session_id,
            s.forked_from_message_id, s.forked_at_message_number, s.base_step_number, s.rebase, s.compaction_failures,
            c.parent_conversation_id as "parent_conversation_id?",
            coalesce((s.imported_from ->> 'redacted')::boolean, false) as "was_redacted!"
        from conversation_sessions s
        left join conversation_counters c on c.conversation_id = s.conversation_id
        where s.session_id = $1
        "#,
        session_id
    )
    .fetch_optional(tx)
    .await?
    .ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })?;
    let session = SessionRow {
        session_id: row.session_id,
        conversation_id: row.conversation_id,
        space_id: row.space_id,
        mailbox_id: row.mailbox_id,
        trigger_type: row.trigger_type,
        trigger_id: row.trigger_id,
        agent: row.agent,
        model_id: row.model_id,
        model_context_window: row.model_context_window,
        status: SessionStatus::parse(&row.status).ok_or_else(|| Error::corrupt("status", &row.status))?,
        cancel_requested: row.cancel_requested,
        cancel_reason: row.cancel_reason,
        error: row.error,
        policy: row.policy.map(|policy| object("policy", policy)).transpose()?,
        tool_names: row.tool_names,
        prefix_sha256: row.prefix_sha256,
        initial_state: object("initial state", row.initial_state)?,
        state: object("state", row.state)?,
        seed_message_count: row.seed_message_count,
        base_message_number: row.base_message_number,
        last_message_number: row.last_message_number,
        to_message_number: row.to_message_number,
        last_step_number: row.last_step_number,
        last_event_seq: row.last_event_seq,
        total_turns: row.total_turns,
        total_input_tokens: row.total_input_tokens,
        total_output_tokens: row.total_output_tokens,
        total_cached_tokens: row.total_cached_tokens,
        total_cache_write_tokens: row.total_cache_write_tokens,
        total_cost_micros: row.total_cost_micros,
        started_at: time(row.started_at),
        completed_at: row.completed_at.map(time),
        repository_id: row.repository_id,
        parent_session_id: row.parent_session_id,
        forked_from_message_id: row.forked_from_message_id,
        parent_conversation_id: row.parent_conversation_id,
        forked_at_message_number: row.forked_at_message_number,
        base_step_number: row.base_step_number,
        rebase: row.rebase,
        compaction_failures: row.compaction_failures,
    };
    Ok((session, row.was_redacted))
}

/// Number of the session's last message, and the ranges of numbers between its messages that belong to other
/// sessions.
async fn numbers(tx: &mut PgConnection, session_id: &str, base: i64) -> Result<(i64, Vec<(i64, i64)>)> {
    let mut gaps = Vec::new();
    let mut rows = sqlx::query!(
        r#"
        select before + 1 as "first!", message_number - 1 as "last!"
        from (
            select message_number,
                coalesce(lag(message_number) over (order by message_number), least(message_number - 1, $2)) as before
            from conversation_records
            where session_id = $1
        ) numbers
        where message_number > before + 1
        order by message_number
        "#,
        session_id,
        base
    )
    .fetch(&mut *tx);
    while let Some(row) = rows.try_next().await? {
        gaps.push((row.first, row.last));
    }
    drop(rows);
    let last = sqlx::query_scalar!(
        r#"select greatest(coalesce(max(message_number), $2), $2) as "last!"
        from conversation_records where session_id = $1"#,
        session_id,
        base
    )
    .fetch_one(tx)
    .await?;
    Ok((last, gaps))
}

struct Counted {
    counts: Counts,
    last_ordinal: i64,
    last_inbox: i64,
}

async fn counts(tx: &mut PgConnection, session_id: &str) -> Result<Counted> {
    let row = sqlx::query!(
        r#"
        select (select count(*) from session_seed_messages where session_id = $1) as "seeds!",
            (select count(*) from session_runs where session_id = $1) as "runs!",
            (select count(*) from conversation_records where session_id = $1) as "records!",
            (select count(*) from session_steps where session_id = $1) as "steps!",
            (select count(*) from session_events where session_id = $1) as "events!",
            (select count(*) from tool_calls where session_id = $1) as "calls!",
            d.count as "deliveries!", d.last as "last_ordinal!", i.count as "inbox!", i.last as "last_inbox!"
        from (select count(*) as count, coalesce(max(ordinal), 0) as last from deliveries where session_id = $1) d,
            (select count(*) as count, coalesce(max(inbox_id), 0) as last from session_inbox where session_id = $1) i
        "#,
        session_id
    )
    .fetch_one(tx)
    .await?;
    let counts = Counts {
        seeds: row.seeds,
        runs: row.runs,
        records: row.records,
        steps: row.steps,
        events: row.events,
        calls: row.calls,
        deliveries: row.deliveries,
        inbox: row.inbox,
    };
    Ok(Counted { counts, last_ordinal: row.last_ordinal, last_inbox: row.last_inbox })
}

/// A failed run may be retried, so the snapshot reads all runs. They are small.
async fn runs(tx: &mut PgConnection, session_id: &str) -> Result<SnapshotRows> {
    let rows = sqlx::query!(
        r#"
        select r.run_id, r.status, r.prompt_message_number, used.steps as "steps!", used.input_tokens as "input_tokens!",
            used.output_tokens as "output_tokens!", used.tool_calls as "tool_calls!", r.error, r.created_at, r.started_at,
            r.completed_at
        from session_runs r
        cross join lateral used_by_run(r) used
        where r.session_id = $1
        order by r.created_at, r.run_id collate "C"
        "#,
        session_id
    )
    .fetch(tx);
    spooled(rows, |row| {
        Ok(Line::Run(RunRow {
            run_id: row.run_id,
            status: word("run status", row.status)?,
            prompt_message_number: row.prompt_message_number,
            steps: row.steps,
            input_tokens: row.input_tokens,
            output_tokens: row.output_tokens,
            tool_calls: row.tool_calls,
            error: row.error,
            created_at: time(row.created_at),
            started_at: row.started_at.map(time),
            completed_at: row.completed_at.map(time),
        }))
    })
    .await
}

/// Calls that may still change: without a result, or uncertain.
async fn open_calls(tx: &mut PgConnection, session_id: &str) -> Result<SnapshotRows> {
    let rows = sqlx::query!(
        r#"
        select call_id, run_id, step_number, message_number, result_message_number, name, args_sha256, effect, status,
            attempts, outcome::text as outcome, receipt::text as receipt, resolution, started_at, settled_at
        from tool_calls
        where session_id = $1 and (result_message_number is null or status not in ('done', 'failed', 'abandoned'))
        order by message_number, call_id collate "C"
        "#,
        session_id
    )
    .fetch(tx);
    spooled(rows, |row| Ok(row::call!(row))).await
}

/// Deliveries that may still change. An operator may send a failed one again. They get their places when they
/// are written.
async fn open_deliveries(tx: &mut PgConnection, session_id: &str) -> Result<SnapshotRows> {
    let rows = sqlx::query!(
        r#"
        select ordinal, delivery_id, channel, source_key, content::text as "content!", status, attempt, not_after,
            receipt::text as receipt, last_error, resolution, undelivered, created_at, settled_at
        from deliveries
        where session_id = $1 and status <> 'sent'
        order by ordinal
        "#,
        session_id
    )
    .fetch(tx);
    spooled(rows, |row| Ok(row::delivery!(row))).await
}

/// Pending messages.
async fn pending(tx: &mut PgConnection, session_id: &str) -> Result<SnapshotRows> {
    let rows = sqlx::query!(
        "select inbox_id, client_key, content, content_sha256, sender, attachments, run_id, outcome, created_at
        from session_inbox
        where session_id = $1 and status = 'pending'
        order by inbox_id",
        session_id
    )
    .fetch(tx);
    spooled(rows, |row| Ok(row::inbox!(row, InboxStatus::Pending))).await
}

/// Calls that change no more. No index has them in the order of the bundle, so one statement sorts them all: pages would
/// sort them once each.
pub(super) async fn settled_calls(
    store: &Store,
    session_id: &str,
    last_message: i64,
) -> Result<SnapshotRows> {
    let mut tx = store.pool.begin().await?;
    let rows = sqlx::query!(
        r#"
        select call_id, run_id, step_number, message_number, result_message_number, name, args_sha256, effect, status,
            attempts, outcome::text as outcome, receipt::text as receipt, resolution, started_at, settled_at
        from tool_calls
        where session_id = $1 and result_message_number <= $2 and status in ('done', 'failed', 'abandoned')
        order by message_number, call_id collate "C"
        "#,
        session_id,
        last_message
    )
    .fetch(&mut *tx);
    let rows = spooled(rows, |row| Ok(row::call!(row))).await?;
    tx.commit_part().await?;
    Ok(rows)
}

/// Deliveries that were sent, which is the end of them. They are read as [`settled_calls`] are.
pub(super) async fn sent_deliveries(
    store: &Store,
    session_id: &str,
    last_ordinal: i64,
) -> Result<SnapshotRows> {
    let mut tx = store.pool.begin().await?;
    let rows = sqlx::query!(
        r#"
        select ordinal, delivery_id, channel, source_key, content::text as "content!", status, attempt, not_after,
            receipt::text as receipt, last_error, resolution, undelivered, created_at, settled_at
        from deliveries
        where session_id = $1 and ordinal <= $2 and status = 'sent'
        order by ordinal
        "#,
        session_id,
        last_ordinal
    )
    .fetch(&mut *tx);
    let rows = spooled(rows, |row| Ok(row::delivery!(row))).await?;
    tx.commit_part().await?;
    Ok(rows)
}
