//! Copies the rows that a fork takes over.

use super::ForkRequest;
use crate::encryption::{Seal, seal_in};
use crate::json::from_text;
use crate::{Error, Result, sealed_blob};
use serde_json::Value;
use sqlx::PgConnection;
use std::borrow::Cow;
use std::collections::HashMap;
use wakeful_workflow::blob::Blob;
use wakeful_workflow::derive;
use wakeful_workflow::fork::{self, Cut, CutPoint, Line};
use wakeful_workflow::policy::{SessionPolicy, ToolMode};
use wakeful_workflow::prefix::Prefix;
use wakeful_workflow::record::{Role, ToolResult};
use wakeful_workflow::seed::Seed;
use wakeful_workflow::state::State;
use wakeful_workflow::strategy::Rebase;

/// The parent as one statement read it.
pub(super) struct Parent {
    pub session_id: String,
    pub conversation_id: String,
    pub base_message_number: i64,
    pub last_event_seq: i64,
    pub lines: Vec<Line>,
    policy: SessionPolicy,
    trigger_type: String,
    initial_state: State,
    prefix_sha256: Option<String>,
    /// Whether the session, or one that it comes from, was imported from a redacted bundle.
    pub redacted: bool,
}

/// The ids of the new session.
pub(super) struct Child<'a> {
    pub session_id: &'a str,
    pub conversation_id: &'a str,
    pub trigger_id: &'a str,
}

impl Parent {
    /// Takes no lock. Loads only the parts of the messages that a cut needs.
    pub async fn read(tx: &mut PgConnection, session_id: &str, at: &CutPoint) -> Result<Parent> {
        let seal = seal_in(&mut *tx, session_id).await?;
        let row = sqlx::query!(
            r#"
            select s.conversation_id, s.base_message_number, s.last_event_seq, s.policy, s.initial_state, s.prefix_sha256,
                s.forked_at_message_number, s.trigger_type,
                coalesce(s.imported_from ->> 'redacted' = 'true', false) as "redacted!",
                (select json_agg(json_build_object('message_number', r.message_number, 'message_id', r.message_id,
                        'step_number', r.step_number, 'role', r.role,
                        'summary', coalesce((r.details ->> 'summary')::boolean, false),
                        'asks', (select coalesce(json_agg(b -> 'call_id'), '[]') from json_array_elements(
                            case r.role when 'assistant' then r.content else '[]' end) b where b ->> 'type' = 'tool_call'),
                        'answers', (select coalesce(json_agg(b -> 'call_id'), '[]') from json_array_elements(
                            case r.role when 'tool' then r.content else '[]' end) b where b ->> 'type' = 'tool_result'))
                        order by r.message_number)::text
                    from conversation_records r
                    where r.session_id = s.session_id and r.message_number <= s.last_message_number) as lines
            from conversation_sessions s
            where s.session_id = $1
            "#,
            session_id
        )
        .fetch_optional(&mut *tx)
        .await?
        .ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })?;
        let mut lines: Vec<Line> = match &row.lines {
            Some(lines) => from_text("messages", lines)?,
            None => Vec::new(),
        };
        if matches!(at, CutPoint::Event(_)) {
            let said = said_at(tx, session_id).await?;
            // Messages that the parent itself copied are older than its journal, summaries included.
            let copied = row.forked_at_message_number.unwrap_or(0);
            for line in lines.iter_mut().filter(|line| line.message_number > copied) {
                line.seq = said.get(&line.message_number).copied();
            }
        }
        let policy = match row.policy {
            Some(policy) => {
                let policy = seal.open_value(policy)?;
                serde_json::from_value(policy).map_err(|error| Error::corrupt("policy", error))?
            }
            None => SessionPolicy::default(),
        };
        let Value::Object(initial_state) = seal.open_value(row.initial_state)? else {
            return Err(Error::corrupt("initial state", "not an object"));
        };
        Ok(Parent {
            session_id: session_id.to_owned(),
            conversation_id: row.conversation_id,
            base_message_number: row.base_message_number,
            last_event_seq: row.last_event_seq,
            lines,
            policy,
            trigger_type: row.trigger_type,
            initial_state,
            prefix_sha256: row.prefix_sha256,
            redacted: row.redacted,
        })
    }

    /// The space, which is the beginning of the conversation's id.
    pub fn space_id(&self) -> &str {
        self.conversation_id.split_once('/').map_or("", |(space, _)| space)
    }

    /// How the fork's tool calls are handled.
    pub fn mode_of(&self, request: &ForkRequest) -> ToolMode {
        request.tool_mode.unwrap_or(self.policy.tool_mode)
    }

    /// The calls after the cut that took effect or may have, and that the fork's tools could make again. A session that the
    /// parent was forked from made those before the parent's own. Files do not count: the fork has its own.
    pub async fn effects_after(
        &self,
        tx: &mut PgConnection,
        cut: &Cut,
        request: &ForkRequest,
    ) -> Result<Vec<String>> {
        let tools: Option<Vec<String>> =
            request.tools.as_ref().map(|tools| tools.iter().map(|tool| tool.name.clone()).collect());
        Ok(sqlx::query_scalar!(
            r#"
            with recursive line as (
                select s.session_id, s.parent_session_id, s.policy, s.forked_at_message_number, null::bigint as upto
                from conversation_sessions s
                where s.session_id = $1
                union all
                select p.session_id, p.parent_session_id, p.policy, p.forked_at_message_number,
                    least(line.upto, line.forked_at_message_number)
                from line
                join conversation_sessions p on p.session_id = line.parent_session_id
            )
            select c.name || ' (' || c.call_id || ')' as "call!"
            from line
            join tool_calls c on c.session_id = line.session_id
            where coalesce(line.policy ->> 'tool_mode', 'live') = 'live'
                and c.message_number > $2
                and c.message_number <= coalesce(line.upto, c.message_number)
                and c.status in ('started', 'done', 'uncertain')
                -- A mail is composed by a pure call, and sent with its step.
                and (c.effect <> 'pure' or c.name = 'compose_email')
                and c.name not in ('write_file', 'edit_file')
                and ($3::text[] is null or c.name = any ($3))
            order by c.message_number, c.call_id
            "#,
            self.session_id,
            cut.at_message_number,
            tools.as_deref()
        )
        .fetch_all(tx)
        .await?)
    }

    /// The first message up to the cut that reports an effect that never really happened, because the tools
    /// of the session that wrote it were not live. That session is the parent, or one that the parent was
    /// forked from.
    pub async fn rehearsed(&self, tx: &mut PgConnection, cut: &Cut) -> Result<Option<i64>> {
        if self.policy.tool_mode.is_live() {
            return Ok(None);
        }
        Ok(sqlx::query_scalar!(
            r#"
            with recursive line as (
                select s.session_id, s.parent_session_id, s.policy, s.forked_at_message_number, $2::bigint as upto
                from conversation_sessions s
                where s.session_id = $1
                union all
                select p.session_id, p.parent_session_id, p.policy, p.forked_at_message_number,
                    least(line.upto, line.forked_at_message_number)
                from line
                join conversation_sessions p on p.session_id = line.parent_session_id
            )
            select min(r.message_number)
            from line
            join conversation_records r on r.session_id = line.session_id and r.role = 'tool'
            cross join lateral json_array_elements(r.content) b
            where coalesce(line.policy ->> 'tool_mode', 'live') <> 'live'
                and r.message_number <= line.upto
                -- The parent's policy applied when a copied message was written. So skip the copies if this
                -- query also reads the parent. If the parent was deleted, read the copies instead.
                and r.message_number > case
                    when exists (select from conversation_sessions p where p.session_id = line.parent_session_id)
                        then coalesce(line.forked_at_message_number, 0)
                    else 0
                end
                and b ->> 'type' = 'tool_result'
                and not coalesce((b ->> 'is_error')::boolean, false)
                and (coalesce(b -> 'details' ->> 'type' in ('sentEmail', 'fileWritten'), false)
                    or exists (select from tool_calls c
                        where c.session_id = line.session_id and c.call_id = b ->> 'call_id' and c.effect <> 'pure'))
            "#,
            self.session_id,
            cut.at_message_number
        )
        .fetch_one(tx)
        .await?)
    }
}

/// The number of the journal entry that records each message. A user's message counts from its arrival, even
/// if it entered the transcript later.
async fn said_at(tx: &mut PgConnection, session_id: &str) -> Result<HashMap<i64, i64>> {
    let rows = sqlx::query!(
        r#"
        select coalesce(e.payload ->> 'message_number', e.payload ->> 'summary_message_number')::bigint as "number?", e.seq
        from session_events e
        where e.session_id = $1 and e.type in ('GEN_COMPLETE', 'TOOL_RESULT', 'CONTEXT_REBASED')
        union all
        select r.message_number, e.seq
        from session_events e
        join conversation_records r
            on r.session_id = e.session_id and r.role = 'user' and r.details ->> 'inbox_id' = e.payload ->> 'inbox_id'
        where e.session_id = $1 and e.type = 'MESSAGE_RECEIVED'
        order by 2 desc
        "#,
        session_id
    )
    .fetch_all(tx)
    .await?;
    // If several entries name one message, the first of them counts.
    Ok(rows.into_iter().filter_map(|row| Some((row.number?, row.seq?))).collect())
}

/// The state at the cut, folded from the parent's initial state and the messages up to the cut. Messages
/// after the cut do not count, neither the parent's own nor those that it copied as a fork.
pub(super) async fn state(tx: &mut PgConnection, seal: &Seal, parent: &Parent, cut: &Cut) -> Result<State> {
    let results = sqlx::query_scalar!(
        r#"
        select json_build_object('call_id', b.block -> 'call_id', 'name', b.block -> 'name', 'content', '',
            'is_error', coalesce(b.block -> 'is_error', 'false'), 'details', b.block -> 'details')::text as "result!"
        from conversation_records r
        cross join lateral json_array_elements(r.content) with ordinality b (block, place)
        where r.session_id = $1
            and r.role = 'tool'
            and r.message_number <= $2
            and b.block ->> 'type' = 'tool_result'
            and b.block ->> 'details' is not null
        order by r.message_number, b.place
        "#,
        parent.session_id,
        cut.at_message_number
    )
    .fetch_all(tx)
    .await?;
    let mut state = parent.initial_state.clone();
    for result in results {
        let result: ToolResult = from_text("tool result", &seal.open_json(result)?)?;
        derive::updates(&result).iter().for_each(|update| derive::apply(&mut state, update));
    }
    Ok(state)
}

/// Creates the child's conversation. Returns `false` if it exists already, under the same key.
pub(super) async fn take_conversation(
    tx: &mut PgConnection,
    parent: &Parent,
    conversation_id: &str,
    cut: &Cut,
    for_user: bool,
) -> Result<bool> {
    let taken = sqlx::query!(
        "insert into conversation_counters
            (conversation_id, space_id, mailbox_id, last_message_number, parent_conversation_id, forked_at_message_number,
             user_id, data_key)
        select $2, p.space_id, p.mailbox_id, $3, p.conversation_id, $3, case when $4 then c.user_id end, p.data_key
        from conversation_sessions p
        left join conversation_counters c on c.conversation_id = p.conversation_id
        where p.session_id = $1
        on conflict (conversation_id) do nothing",
        parent.session_id,
        conversation_id,
        cut.at_message_number,
        for_user
    )
    .execute(tx)
    .await?;
    Ok(taken.rows_affected() == 1)
}

/// Waits for an erasure of the parent's conversation, and holds off the next one until this transaction ends. So an erasure
/// finds every fork that was made before it, and a fork that comes after it finds no parent. Forks do not wait for
/// each other.
pub(super) async fn hold_off_erasure(tx: &mut PgConnection, parent_session_id: &str) -> Result<()> {
    sqlx::query!(
        "select pg_advisory_xact_lock_shared(hashtextextended('fork of ' || conversation_id, 0))
        from conversation_sessions where session_id = $1",
        parent_session_id
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// Waits for the forks that are being made of these conversations, and lets none begin until this transaction ends.
pub(crate) async fn hold_off_forks(tx: &mut PgConnection, conversations: &[String]) -> Result<()> {
    // In one order, so that two erasures do not wait for each other.
    sqlx::query!(
        "select pg_advisory_xact_lock(hashtextextended('fork of ' || id, 0))
        from (select id from unnest($1::text[]) id order by id) ids",
        conversations
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// Writes the child's row, its seeds, and the blobs that it begins with.
pub(super) async fn session(
    tx: &mut PgConnection,
    seal: &Seal,
    request: &ForkRequest,
    parent: &Parent,
    cut: &Cut,
    child: &Child<'_>,
    (state, rebase): (&State, Option<&Rebase>),
) -> Result<()> {
    let snapshot = Blob::of_state(state);
    let seeds = match &request.system_prompt {
        Some(patch) => Some(fork::patched(seeds(&mut *tx, seal, &parent.session_id).await?, patch)),
        None => None,
    };
    // Without changes the child keeps the parent's bytes, so that the provider's cache still matches.
    let pinned = if seeds.is_some() || request.tools.is_some() {
        pinned_prefix(&mut *tx, parent).await?
    } else {
        None
    };
    let prefix = fork::prefix(pinned.as_ref(), seeds.as_deref(), request.tools.clone());
    let prefix = prefix.map(|prefix| prefix.blob());
    let prefix_sha256 =
        prefix.as_ref().map(|prefix| prefix.sha256.clone()).or_else(|| parent.prefix_sha256.clone());
    // The prefix is the agent's. Sorted, and the sealed ones first, so that two writers of the same blobs cannot deadlock.
    let clear = Seal::default();
    let mut blobs: Vec<(&Seal, Blob)> = prefix.into_iter().map(|prefix| (&clear, prefix)).collect();
    blobs.push((seal, snapshot));
    blobs.sort_by(|(a, one), (b, other)| (!a.is_on(), &one.sha256).cmp(&(!b.is_on(), &other.sha256)));
    for (seal, blob) in &blobs {
        sealed_blob::keep(&mut *tx, seal, parent.space_id(), blob).await?;
    }
    let tool_names: Option<Vec<&str>> =
        request.tools.as_ref().map(|tools| tools.iter().map(|tool| tool.name.as_str()).collect());
    let mut policy = serde_json::to_value(request.policy(parent.policy.clone(), &parent.trigger_type, cut))
        .map_err(|error| Error::corrupt("policy", error))?;
    seal.value(&mut policy);
    let rebase =
        rebase.map(serde_json::to_value).transpose().map_err(|error| Error::corrupt("rebase", error))?;
    let message_id = cut.kept.checked_sub(1).map(|last| parent.lines[last].message_id.as_str());
    sqlx::query!(
        "insert into conversation_sessions
            (session_id, conversation_id, space_id, mailbox_id, trigger_type, trigger_id, agent, model_id,
             model_context_window, status, policy, initial_state, state, tool_names, seed_message_count,
             base_message_number, last_message_number, to_message_number, last_step_number, base_step_number,
             forked_at_message_number, parent_session_id, forked_from_message_id, prefix_sha256, rebase, runner,
             repository_id, imported_from, data_key)
        select $2, $3, p.space_id, p.mailbox_id, $4, $5, p.agent, coalesce($6, p.model_id),
            coalesce($7, p.model_context_window), 'created', $8, p.initial_state, $9, coalesce($10, p.tool_names),
            coalesce($11, p.seed_message_count), p.base_message_number, $12, $12, $13, $13, $12, p.session_id, $14, $15, $16,
            $17, p.repository_id,
            case when p.imported_from ->> 'redacted' = 'true' then jsonb_build_object('redacted', true) end, p.data_key
        from conversation_sessions p
        where p.session_id = $1",
        parent.session_id,
        child.session_id,
        child.conversation_id,
        request.purpose.as_str(),
        child.trigger_id,
        request.model.as_ref().map(|model| model.id.as_str()),
        request.model.as_ref().map(|model| model.context_window),
        policy,
        Value::Object(seal.state(state.clone())),
        tool_names.as_deref() as Option<&[&str]>,
        seeds.as_ref().map(|seeds| seeds.len() as i32),
        cut.at_message_number,
        cut.last_step_number,
        message_id,
        prefix_sha256,
        rebase,
        request.runner
    )
    .execute(&mut *tx)
    .await?;
    match seeds {
        Some(seeds) => write_seeds(tx, seal, child.session_id, &seeds).await,
        None => copy_seeds(tx, &parent.session_id, child.session_id).await,
    }
}

async fn seeds(tx: &mut PgConnection, seal: &Seal, session_id: &str) -> Result<Vec<Seed>> {
    let rows = sqlx::query!(
        "select role, content, is_new from session_seed_messages where session_id = $1 order by ordinal",
        session_id
    )
    .fetch_all(tx)
    .await?;
    rows.into_iter()
        .map(|row| {
            let role = Role::parse(&row.role).ok_or_else(|| Error::corrupt("role", &row.role))?;
            Ok(Seed { role, content: seal.open(row.content)?, is_new: row.is_new })
        })
        .collect()
}

async fn copy_seeds(tx: &mut PgConnection, parent: &str, child: &str) -> Result<()> {
    sqlx::query!(
        r#"insert into session_seed_messages
            (space_id, session_id, ordinal, role, content, is_new, "timestamp", details)
        select space_id, $2, ordinal, role, content, is_new, "timestamp", details
        from session_seed_messages
        where session_id = $1"#,
        parent,
        child
    )
    .execute(tx)
    .await?;
    Ok(())
}

async fn write_seeds(tx: &mut PgConnection, seal: &Seal, child: &str, seeds: &[Seed]) -> Result<()> {
    let roles: Vec<&str> = seeds.iter().map(|seed| seed.role.as_str()).collect();
    let contents: Vec<Cow<'_, str>> = seeds.iter().map(|seed| seal.text(&seed.content)).collect();
    let news: Vec<bool> = seeds.iter().map(|seed| seed.is_new).collect();
    sqlx::query!(
        "insert into session_seed_messages (space_id, session_id, ordinal, role, content, is_new)
        select s.space_id, $1, seed.ordinal - 1, seed.role, seed.content, seed.is_new
        from conversation_sessions s,
            unnest($2::text[], $3::text[], $4::boolean[]) with ordinality as seed (role, content, is_new, ordinal)
        where s.session_id = $1",
        child,
        &roles as &[&str],
        &contents as &[Cow<'_, str>],
        &news
    )
    .execute(tx)
    .await?;
    Ok(())
}

async fn pinned_prefix(tx: &mut PgConnection, parent: &Parent) -> Result<Option<Prefix>> {
    let Some(sha256) = &parent.prefix_sha256 else { return Ok(None) };
    let bytes = sqlx::query_scalar!(
        "select bytes from blobs
        where sha256 = $1 and space_id = (select space_id from conversation_sessions where session_id = $2)",
        sha256,
        parent.session_id
    )
    .fetch_optional(tx)
    .await?
    .ok_or_else(|| Error::corrupt("pinned prefix", format!("there is no blob {sha256}")))?;
    Prefix::read(sha256, &bytes).map(Some).map_err(|error| Error::corrupt("pinned prefix", error))
}

/// Copies the messages up to the cut inside the database: the same numbers and bytes under new ids.
pub(super) async fn records(
    tx: &mut PgConnection,
    parent: &Parent,
    cut: &Cut,
    child: &Child<'_>,
) -> Result<()> {
    let copied = sqlx::query!(
        "insert into conversation_records
            (space_id, conversation_id, message_number, session_id, run_id, step_number, role, content, internal, details,
             created_at)
        select r.space_id, $2, r.message_number, $3, r.run_id, r.step_number, r.role, r.content, r.internal,
            (r.details::jsonb || jsonb_build_object('origin_message_id',
                coalesce(r.details ->> 'origin_message_id', r.message_id)))::json,
            r.created_at
        from conversation_records r
        where r.session_id = $1 and r.message_number <= $4
        order by r.message_number",
        parent.session_id,
        child.conversation_id,
        child.session_id,
        cut.at_message_number
    )
    .execute(tx)
    .await?;
    if copied.rows_affected() != cut.kept as u64 {
        let reason = format!("{} messages of {} were there to be copied", copied.rows_affected(), cut.kept);
        return Err(Error::corrupt("transcript", reason));
    }
    Ok(())
}
