//! A session as its row has it and as its logs give it, read in one transaction.

use crate::encryption::Seal;
use crate::journal::postgres::{entries_after, last_checkpoint};
use crate::json::from_text;
use crate::{Error, Result};
use serde_json::Value;
use sqlx::PgConnection;
use wakeful_workflow::derive;
use wakeful_workflow::record::Block;
use wakeful_workflow::recover::{Recovered, recover};
use wakeful_workflow::state::State;

/// How many broken entries are listed, at most.
const LISTED: i64 = 20;

/// The cached columns of a session's row.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub conversation_id: String,
    pub status: String,
    pub state: Value,
    pub totals: Sums,
    pub to_message_number: i64,
    pub last_step_number: i64,
    pub last_event_seq: i64,
    pub last_message_number: i64,
    pub rebase: Value,
    pub compaction_failures: i64,
    /// It has a step job or an open run, so its status may change at any time.
    pub live: bool,
}

/// Sums over steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sums {
    pub turns: i64,
    pub input_tokens: i64,
    pub output_tokens: i64,
    pub cached_tokens: i64,
    pub cache_write_tokens: i64,
    pub cost_micros: i64,
}

impl Sums {
    pub fn columns(&self) -> [(&'static str, i64); 6] {
        [
            ("total_turns", self.turns),
            ("total_input_tokens", self.input_tokens),
            ("total_output_tokens", self.output_tokens),
            ("total_cached_tokens", self.cached_tokens),
            ("total_cache_write_tokens", self.cache_write_tokens),
            ("total_cost_micros", self.cost_micros),
        ]
    }
}

/// The row, and what the logs say it should be.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub row: Row,
    /// The fold of the messages.
    pub state: Value,
    /// The fold of the journal, or why folding failed.
    pub recovered: std::result::Result<Folded, String>,
    pub totals: Sums,
    pub to_message_number: i64,
    pub last_step_number: i64,
    pub last_event_seq: i64,
    pub last_message_number: i64,
    /// The newest rebase of the journal.
    pub rebase: Value,
    pub compaction_failures: i64,
    /// Runs whose sums differ from their steps.
    pub wrong_runs: Vec<String>,
    /// Steps that do not begin where the previous step ended.
    pub broken_steps: Vec<i64>,
    pub missing_entries: i64,
    /// Entries that point at a missing message.
    pub dangling: Vec<i64>,
    /// Entries whose blob is missing, or whose bytes do not match its hash.
    pub lost_blobs: Vec<i64>,
}

/// The fold of the journal.
#[derive(Clone, Debug)]
pub(super) struct Folded {
    context_state: State,
    pub lifecycle_state: String,
}

impl Folded {
    pub fn state(&self) -> Value {
        Value::Object(self.context_state.clone())
    }
}

impl Facts {
    pub async fn read(tx: &mut PgConnection, seal: &Seal, session_id: &str) -> Result<Facts> {
        let session = sqlx::query!(
            r#"
            select s.conversation_id, s.status, s.state, s.initial_state, s.base_message_number, s.forked_at_message_number,
                s.base_step_number, s.to_message_number, s.last_step_number, s.last_event_seq, s.last_message_number, s.total_turns, s.total_input_tokens,
                s.total_output_tokens, s.total_cached_tokens, s.total_cache_write_tokens, s.total_cost_micros,
                s.rebase, s.compaction_failures,
                exists (select from jobs j where j.kind = 'step' and j.session_id = s.session_id)
                    or exists (select from session_runs r
                        where r.session_id = s.session_id and r.status in ('queued', 'running')) as "live!"
            from conversation_sessions s
            where s.session_id = $1
            "#,
            session_id
        )
        .fetch_optional(&mut *tx)
        .await?
        .ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })?;
        let Value::Object(initial_state) = seal.open_value(session.initial_state)? else {
            return Err(Error::corrupt("initial state", "not an object"));
        };
        let row = Row {
            conversation_id: session.conversation_id,
            status: session.status,
            state: seal.open_value(session.state)?,
            totals: Sums {
                turns: session.total_turns.into(),
                input_tokens: session.total_input_tokens,
                output_tokens: session.total_output_tokens,
                cached_tokens: session.total_cached_tokens,
                cache_write_tokens: session.total_cache_write_tokens,
                cost_micros: session.total_cost_micros,
            },
            to_message_number: session.to_message_number,
            last_step_number: session.last_step_number,
            last_event_seq: session.last_event_seq,
            last_message_number: session.last_message_number,
            rebase: session.rebase.unwrap_or(Value::Null),
            compaction_failures: session.compaction_failures,
            live: session.live,
        };
        let began = Began {
            // A fork's own steps begin after the copied messages.
            at_message_number: session.forked_at_message_number.unwrap_or(session.base_message_number),
            at_step_number: session.base_step_number,
        };
        let steps = steps(tx, session_id, began).await?;
        let journal = sqlx::query!(
            r#"select coalesce(max(seq), 0) as "last!", count(*) as "count!" from session_events where session_id = $1"#,
            session_id
        )
        .fetch_one(&mut *tx)
        .await?;
        Ok(Facts {
            state: Value::Object(fold(tx, seal, session_id, initial_state).await?),
            recovered: match fold_journal(tx, seal, session_id).await {
                Ok(recovered) => Ok(recovered),
                Err(Error::Corrupt { reason, .. }) => Err(reason),
                Err(error) => return Err(error),
            },
            totals: steps.totals,
            to_message_number: steps.to_message_number,
            last_step_number: steps.last_step_number,
            last_event_seq: journal.last,
            last_message_number: last_message_number(tx, session_id, &row, session.base_message_number)
                .await?,
            rebase: crate::outputs::newest_rebase(tx, session_id, i64::MAX).await?.unwrap_or(Value::Null),
            compaction_failures: compaction_failures(tx, session_id).await?,
            wrong_runs: wrong_runs(tx, session_id).await?,
            broken_steps: steps.broken,
            missing_entries: journal.last - journal.count,
            dangling: dangling(tx, session_id).await?,
            lost_blobs: lost_blobs(tx, session_id).await?,
            row,
        })
    }
}

/// Folds the messages. Only tool results can change the state.
async fn fold(tx: &mut PgConnection, seal: &Seal, session_id: &str, mut state: State) -> Result<State> {
    let contents = sqlx::query_scalar!(
        r#"select content::text as "content!" from conversation_records
        where session_id = $1 and role = 'tool'
        order by message_number"#,
        session_id
    )
    .fetch_all(tx)
    .await?;
    for content in contents {
        let blocks: Vec<Block> = from_text("message", &seal.open_json(content)?)?;
        for block in &blocks {
            match block {
                Block::ToolResult(result) => {
                    derive::updates(result).iter().for_each(|update| derive::apply(&mut state, update));
                }
                Block::Text { .. } | Block::ToolCall(_) | Block::Provider { .. } => {}
            }
        }
    }
    Ok(state)
}

async fn fold_journal(tx: &mut PgConnection, seal: &Seal, session_id: &str) -> Result<Folded> {
    let checkpoint = last_checkpoint(tx, seal, session_id).await?;
    let entries = entries_after(tx, seal, session_id, checkpoint.as_ref().map_or(0, |one| one.seq)).await?;
    let Recovered { context_state, lifecycle_state, .. } = recover(checkpoint, entries);
    Ok(Folded { context_state, lifecycle_state })
}

struct Steps {
    totals: Sums,
    to_message_number: i64,
    last_step_number: i64,
    broken: Vec<i64>,
}

/// Where a session's own steps begin.
#[derive(Clone, Copy)]
struct Began {
    at_message_number: i64,
    at_step_number: i64,
}

async fn steps(tx: &mut PgConnection, session_id: &str, began: Began) -> Result<Steps> {
    let sums = sqlx::query!(
        r#"
        select count(*) as "turns!", coalesce(sum(input_tokens), 0)::bigint as "input!",
            coalesce(sum(output_tokens), 0)::bigint as "output!", coalesce(sum(cached_tokens), 0)::bigint as "cached!",
            coalesce(sum(cache_write_tokens), 0)::bigint as "cache_write!",
            coalesce(sum(cost_micros), 0)::bigint as "cost!",
            coalesce(max(to_message_number), $2) as "to_message_number!",
            coalesce(max(step_number), $3) as "last!"
        from session_steps
        where session_id = $1
        "#,
        session_id,
        began.at_message_number,
        began.at_step_number
    )
    .fetch_one(&mut *tx)
    .await?;
    let broken = sqlx::query_scalar!(
        r#"
        select step_number from (
            select step_number, from_message_number, row_number() over steps as place,
                lag(to_message_number, 1, $2) over steps as ended
            from session_steps
            where session_id = $1
            window steps as (order by step_number)
        ) step
        where step_number <> $4 + place or from_message_number <> ended
        order by step_number
        limit $3
        "#,
        session_id,
        began.at_message_number,
        LISTED,
        began.at_step_number
    )
    .fetch_all(&mut *tx)
    .await?;
    Ok(Steps {
        totals: Sums {
            turns: sums.turns,
            input_tokens: sums.input,
            output_tokens: sums.output,
            cached_tokens: sums.cached,
            cache_write_tokens: sums.cache_write,
            cost_micros: sums.cost,
        },
        to_message_number: sums.to_message_number,
        last_step_number: sums.last,
        broken,
    })
}

/// Returns the newest message number that the session's row may have. Usually that is the session's last
/// message. A higher number in the row is right too if messages of other sessions fill the whole gap, because
/// this session's run was opened or retried after theirs.
async fn last_message_number(
    tx: &mut PgConnection,
    session_id: &str,
    row: &Row,
    base_message_number: i64,
) -> Result<i64> {
    let numbers = sqlx::query!(
        r#"
        with own as (
            select coalesce(max(message_number), $3) as last from conversation_records where session_id = $1
        )
        select own.last as "own!",
            (select count(*) from conversation_records r
                where r.conversation_id = $2 and r.message_number > own.last and r.message_number <= $4) as "others!"
        from own
        "#,
        session_id,
        row.conversation_id,
        base_message_number,
        row.last_message_number
    )
    .fetch_one(tx)
    .await?;
    let filled =
        row.last_message_number > numbers.own && row.last_message_number - numbers.own == numbers.others;
    Ok(if filled { row.last_message_number } else { numbers.own })
}

/// Failures since a summary succeeded or the run began.
async fn compaction_failures(tx: &mut PgConnection, session_id: &str) -> Result<i64> {
    Ok(sqlx::query_scalar!(
        r#"
        select count(*) as "failures!"
        from session_events
        where session_id = $1
            and type = 'COMPACTION_FAILED'
            and seq > (
                select coalesce(max(seq), 0)
                from session_events
                where session_id = $1
                    and (type = 'CONTEXT_REBASED' and payload ? 'summary_message_number'
                            and payload ->> 'summary_message_number' = payload ->> 'at_message_number'
                        or type = 'state_transition' and payload ->> 'to_state' = 'running'))
        "#,
        session_id
    )
    .fetch_one(tx)
    .await?)
}

async fn wrong_runs(tx: &mut PgConnection, session_id: &str) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar!(
        r#"
        select r.run_id
        from session_runs r
        left join lateral run_totals(r.session_id, r.run_id, 0) sums on true
        where r.session_id = $1
            -- The totals of an open run are written when it ends.
            and r.status <> 'running'
            and (r.steps, r.input_tokens, r.output_tokens, r.tool_calls)
                is distinct from (sums.steps, sums.input_tokens, sums.output_tokens, sums.tool_calls)
        order by r.created_at
        "#,
        session_id
    )
    .fetch_all(tx)
    .await?)
}

async fn dangling(tx: &mut PgConnection, session_id: &str) -> Result<Vec<i64>> {
    Ok(sqlx::query_scalar!(
        r#"
        select e.seq
        from session_events e
        where e.session_id = $1
            and e.type in ('GEN_COMPLETE', 'TOOL_RESULT')
            and not exists (
                select from conversation_records r
                where r.session_id = e.session_id
                    and r.message_number = (e.payload ->> 'message_number')::bigint
                    and r.role = case e.type when 'GEN_COMPLETE' then 'assistant' else 'tool' end)
        order by e.seq
        limit $2
        "#,
        session_id,
        LISTED
    )
    .fetch_all(tx)
    .await?)
}

async fn lost_blobs(tx: &mut PgConnection, session_id: &str) -> Result<Vec<i64>> {
    Ok(sqlx::query_scalar!(
        r#"
        select e.seq as "seq!"
        from session_events e
        left join blobs b
            on b.sha256 = coalesce(e.payload ->> 'state_sha256', e.payload ->> 'value_sha256', e.payload ->> 'output_sha256')
            and b.space_id = e.space_id
        where e.session_id = $1
            and (e.type = 'checkpoint'
                or e.type = 'context_update' and e.payload ? 'value_sha256'
                or e.type = 'TOOL_RESULT' and e.payload ? 'output_sha256')
            and (b.sha256 is null or encode(sha256(b.bytes), 'hex') <> b.sha256)
            -- A sealed blob is checked when it is opened.
            and not exists (
                select from conversation_sessions s
                join sealed_blobs k on k.data_key = s.data_key and k.sha256 =
                    coalesce(e.payload ->> 'state_sha256', e.payload ->> 'value_sha256', e.payload ->> 'output_sha256')
                where s.session_id = e.session_id)
        union all
        select e.seq
        from session_events e
        cross join lateral jsonb_array_elements(e.payload -> 'packs') pack
        left join blobs b on b.sha256 = pack ->> 'sha256' and b.space_id = e.space_id
        where e.session_id = $1
            and e.type = 'WORKSPACE_SNAPSHOT'
            -- `blobs verify` reads those that are in another store.
            and (b.sha256 is null or b.store is null and encode(sha256(b.bytes), 'hex') <> b.sha256)
            and not exists (
                select from conversation_sessions s
                join sealed_blobs k on k.data_key = s.data_key and k.sha256 = pack ->> 'sha256'
                where s.session_id = e.session_id)
        order by 1
        limit $2
        "#,
        session_id,
        LISTED
    )
    .fetch_all(tx)
    .await?)
}
