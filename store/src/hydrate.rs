//! Hydration: reads a session from the database in one round trip.
//!
//! One statement is one snapshot. So `wake_seq` is never newer than the inbox and the ledger that are read
//! with it, and the transcript ends where the row says. Each message is a row of its own, whose stored text is
//! parsed once.
//!
//! A message that arrives after a run's cancel was requested waits for the next run. Its inbox row has the
//! outcome `new_run`, and hydration leaves it out while the cancelled run is open.

mod parts;
mod stored;
mod warm;

pub use warm::{Hydrated, Warm};

use crate::encryption::Seal;
use crate::json::from_text;
use crate::{Error, Result, Store};
use futures::{Stream, TryStreamExt};
use parts::{Changing, Fixed, Parts};
use serde::de::DeserializeOwned;
use stored::Stored;
use wakeful_workflow::record::{Content, Details, Outlined, Record, Role};
use wakeful_workflow::session::Session;

/// Queries `$before`, then one JSON object of everything that can change while a worker has the session `s`, then
/// `$after`.
macro_rules! query_changing {
    (($($before:tt)+), ($($after:tt)+), $($given:expr),+) => {
        sqlx::query!(
            $($before)+
                + r#"json_build_object(
                'wake_seq', s.wake_seq, 'last_event_seq', s.last_event_seq, 'cancel_requested', s.cancel_requested,
                'cancel_reason', case when s.cancel_requested then s.cancel_reason end,
                'state', s.state, 'rebase', s.rebase, 'compaction_failures', s.compaction_failures,
                'workspace', (select e.payload from session_events e
                    where e.session_id = s.session_id and e.type = 'WORKSPACE_SNAPSHOT'
                    order by e.seq desc limit 1),
                'inbox', (select json_agg(json_build_object('id', i.inbox_id, 'text', i.content,
                        'attachments', coalesce(i.attachments, '[]')) order by i.inbox_id)
                    from session_inbox i
                    where i.session_id = s.session_id and i.status = 'pending' and i.outcome <> 'new_run'),
                'calls', (select json_agg(json_build_object('id', c.call_id, 'effect', c.effect, 'status', c.status,
                        'outcome', c.outcome) order by c.message_number, c.call_id collate "C")
                    from tool_calls c
                    where c.session_id = s.session_id and c.result_message_number is null),
                'generations', (select json_agg(json_build_object('generation_id', g.generation_id,
                        'attempt', g.attempt, 'model', g.model, 'request_sha256', g.request_sha256,
                        'base_sha256', g.base_sha256, 'started_at', g.started_at, 'repairs', g.repairs,
                        'resumes', g.resumes, 'resumable', g.resumable, 'purpose', g.purpose,
                        'context_strategy', g.context_strategy,
                        'last_chunk', (select coalesce(max(k.chunk_no), -1) from generation_chunks k
                            where k.session_id = g.session_id and k.generation_id = g.generation_id))
                        order by g.attempt, g.started_at)
                    from generations g where g.session_id = s.session_id))"#
                + $($after)+,
            $($given),+
        )
    };
}

/// The rows of a session: the first one is the session's own, every other one a message. `$content` is the column of the
/// contents, and what each is read into.
///
/// - `whole`: all messages.
/// - `tail`: the messages that [`LeftOut`](wakeful_workflow::session::LeftOut) does not leave out, and the `LeftOut` itself. This
///   is the rule of [`Session::leave_out`] in SQL, with one case more: an imported fork is read whole. Its row names no parent,
///   but as in each fork its ledger lacks the calls that were copied, so only its messages tell their ids.
/// - `from $last`: what a [`Warm`] copy lacks, which is the messages from that number on. The prefix and the seeds are not read.
macro_rules! rows {
    ($store:expr, $content:tt, $session_id:expr, whole) => {
        rows!($store, $content, $session_id, with "", left_out "null", which "")
    };
    ($store:expr, $content:tt, $session_id:expr, tail) => {
        rows!(
            $store,
            $content,
            $session_id,
            with r#"with tail as materialized (
                select least((s.rebase ->> 'keep_from_message_number')::bigint, newest.message_number) as before,
                    (s.rebase ->> 'user_messages_from')::bigint as user_messages_from
                from conversation_sessions s
                cross join lateral (
                    select m.message_number from conversation_records m
                    where m.session_id = s.session_id and m.role = 'assistant' and not m.internal
                        and m.message_number <= s.last_message_number
                    order by m.message_number desc limit 1
                ) newest
                where s.session_id = $1 and s.rebase is not null
                    and s.parent_session_id is null and s.forked_at_message_number is null
                    and coalesce(s.policy ->> 'tool_mode', 'live') = 'live'
                    and least((s.rebase ->> 'keep_from_message_number')::bigint, newest.message_number)
                        > s.base_message_number + 1
            )
            "#,
            left_out "(select json_build_object('before', t.before, 'user_messages_from', t.user_messages_from,
                        'call_ids', coalesce((select json_agg(c.call_id) from tool_calls c where c.session_id = s.session_id),
                            '[]'))
                    from tail t)",
            which r#" and m.message_number >= coalesce((select before from tail), 0)
            union all
            select m.message_number, null, null, null, m.run_id, m.step_number, m.role, m.content, m.internal, m.details
            from tail
            join conversation_records m on m.session_id = $1 and m.role = 'user'
                and m.message_number >= tail.user_messages_from and m.message_number < tail.before"#
        )
    };
    ($store:expr, $content:tt, $session_id:expr, with $with:tt, left_out $left_out:tt, which $which:tt) => {
        rows!(
            $store,
            $content,
            $with,
            "p.bytes",
            "(select json_agg(json_build_object('role', m.role, 'content', m.content, 'is_new', m.is_new)
                        order by m.ordinal)
                    from session_seed_messages m where m.session_id = s.session_id)",
            $left_out,
            $which,
            $session_id
        )
    };
    ($store:expr, $content:tt, $session_id:expr, from $last:expr) => {
        rows!(
            $store,
            $content,
            "",
            "case when p.sha256 is not null then ''::bytea end",
            "null",
            "null",
            " and m.message_number >= $2",
            $session_id,
            $last
        )
    };
    ($store:expr, $content:tt, $with:tt, $prefix:tt, $seeds:tt, $left_out:tt, $which:tt, $($given:expr),+) => {
        query_changing!(
            ($with
                + r#"select 0 as "message_number!", json_build_object(
                'session_id', s.session_id, 'conversation_id', s.conversation_id,
                'parent_session_id', s.parent_session_id, 'space_id', s.space_id, 'mailbox_id', s.mailbox_id,
                'trigger_type', s.trigger_type, 'agent', s.agent, 'policy', s.policy,
                'prefix_sha256', s.prefix_sha256, 'status', s.status, 'data_key', s.data_key,
                'basis', concat_ws('/', s.tableoid, s.ordinal, extract(epoch from pg_postmaster_start_time()),
                    s.prefix_sha256, s.seed_message_count),
                'base_message_number', s.base_message_number, 'last_message_number', s.last_message_number,
                'to_message_number', s.to_message_number, 'last_step_number', s.last_step_number,
                'totals', json_build_object('turns', s.total_turns, 'usage', json_build_object(
                    'input_tokens', s.total_input_tokens, 'output_tokens', s.total_output_tokens,
                    'cached_tokens', s.total_cached_tokens, 'cache_write_tokens', s.total_cache_write_tokens,
                    'cost_micros', s.total_cost_micros)),
                'run', case when r.run_id is not null then json_build_object(
                    'run_id', r.run_id, 'steps', used.steps, 'tokens', used.tokens) end,
                'seeds', "#
                + $seeds
                + ", 'left_out', "
                + $left_out
                + r#"
            )::text as fixed, "#),
            (r#"::text as changing, "#
                + $prefix
                + r#" as "prefix?",
                null as "run_id?", null::bigint as "step_number?", null as "role?",
                "#
                + $content
                + r#", null::boolean as "internal?",
                null::json as "details?: Stored<Details>"
            from conversation_sessions s
            left join session_runs r on r.session_id = s.session_id and r.status = 'running'
            left join lateral run_since_answer(r.session_id, r.run_id, r.from_step) used on r.run_id is not null
            left join blobs p on p.sha256 = s.prefix_sha256 and p.space_id = s.space_id
            where s.session_id = $1
            union all
            select m.message_number, null, null, null, m.run_id, m.step_number, m.role, m.content, m.internal, m.details
            from conversation_records m
            where m.session_id = $1
                and m.message_number <= (select s.last_message_number from conversation_sessions s where s.session_id = $1)"#
                + $which),
            $($given),+
        )
        .fetch(&$store.pool)
        .map_ok(|row| Row {
            message_number: row.message_number,
            session: row.fixed.zip(row.changing),
            prefix: row.prefix,
            run_id: row.run_id,
            step_number: row.step_number,
            role: row.role,
            content: row.content,
            internal: row.internal,
            details: row.details,
        })
    };
}

impl Store {
    /// Rebuilds the session: row, seeds, transcript, state, totals, open calls, inbox, interrupted model
    /// calls. The result equals the copy in memory of the worker that committed last.
    ///
    /// The first row is the session's, with an object for each of its parts that stay small. Every other row
    /// is a message. All rows have come before the first is parsed, so that no parsing keeps a connection.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Corrupt`], [`Error::Keys`], [`Error::Database`].
    pub async fn hydrate(&self, session_id: &str) -> Result<Session> {
        Ok(self.hydrate_to_keep(session_id).await?.session)
    }

    /// Like [`Store::hydrate`], for a caller that may keep what it was given: see [`Hydrated::keep`].
    ///
    /// # Errors
    /// Like [`Store::hydrate`].
    pub async fn hydrate_to_keep(&self, session_id: &str) -> Result<Hydrated> {
        self.knows_key(session_id).await?;
        let rows = rows!(self, r#"null::json as "content?: Stored<Content>""#, session_id, whole);
        self.read(session_id, rows).await?.hydrated()
    }

    /// Like [`Store::hydrate_to_keep`], for a worker that takes the session's next steps: does not read the messages that the
    /// newest rebase leaves out. See [`LeftOut`](wakeful_workflow::session::LeftOut). So if a conversation is summarised now and
    /// then, what this reads does not grow with it, except for the ids of its calls.
    ///
    /// # Errors
    /// Like [`Store::hydrate`].
    pub async fn hydrate_tail(&self, session_id: &str) -> Result<Hydrated> {
        self.knows_key(session_id).await?;
        let rows = rows!(self, r#"null::json as "content?: Stored<Content>""#, session_id, tail);
        self.read(session_id, rows).await?.hydrated()
    }

    /// Rebuilds the session to weigh its context, and for nothing else: its messages have no blocks, but the
    /// [`Outline`](wakeful_workflow::record::Outline) of what they say. This takes half the time for a long session. With
    /// a `copy` of an earlier call, only what is new is read.
    ///
    /// # Errors
    /// Like [`Store::hydrate`].
    pub async fn hydrate_outlined(&self, session_id: &str, copy: Option<Warm>) -> Result<Hydrated> {
        if let Some(copy) = copy {
            let rows =
                rows!(self, r#"null::json as "content?: Stored<Outlined>""#, session_id, from copy.last());
            if let Some(hydrated) = copy.joined(self.read(session_id, rows).await?)? {
                return Ok(hydrated);
            }
        }
        self.knows_key(session_id).await?;
        let rows = rows!(self, r#"null::json as "content?: Stored<Outlined>""#, session_id, whole);
        self.read(session_id, rows).await?.hydrated()
    }

    /// Asks the key store before a connection is taken, not while one waits.
    async fn knows_key(&self, session_id: &str) -> Result<()> {
        if self.vault.is_open() {
            self.seal_of(session_id).await?;
        }
        Ok(())
    }

    /// Brings a copy up to date, in one statement that reads only what the copy lacks. `None`: the copy cannot be brought up to
    /// date, and the caller hydrates. [`Warm`] says when.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Keys`], [`Error::Database`].
    pub async fn catch_up(&self, copy: Warm) -> Result<Option<Hydrated>> {
        let session_id = copy.session_id().clone();
        let rows = rows!(self, r#"null::json as "content?: Stored<Content>""#, session_id.as_str(), from copy.last());
        match self.read(session_id.as_str(), rows).await {
            Ok(parts) => copy.joined(parts),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn read<C: DeserializeOwned + Into<Content>>(
        &self,
        session_id: &str,
        rows: impl Stream<Item = sqlx::Result<Row<C>>>,
    ) -> Result<Parts> {
        let mut rows = std::pin::pin!(rows);
        let (mut head, mut records, mut sealed) = (None, Vec::new(), Vec::new());
        while let Some(row) = rows.try_next().await.map_err(unreadable)? {
            if let Some((fixed, changing)) = row.session {
                head = Some((self.head(session_id, fixed, changing).await?, row.prefix));
                continue;
            }
            let (Some(run_id), Some(step_number), Some(role), Some(content), Some(internal), Some(details)) =
                (row.run_id, row.step_number, row.role, row.content, row.internal, row.details)
            else {
                return Err(Error::corrupt(
                    "messages",
                    format!("message {} is not whole", row.message_number),
                ));
            };
            let record = |content, details| {
                Ok::<_, Error>(Record {
                    message_number: row.message_number,
                    run_id: run_id.into(),
                    step_number,
                    role: Role::parse(&role).ok_or_else(|| Error::corrupt("messages", &role))?,
                    content,
                    internal,
                    details,
                })
            };
            match (content, details) {
                (Stored::Read(content), Stored::Read(details)) => {
                    records.push(record(content.into(), details)?);
                }
                (content, details) => {
                    sealed.push((record(Content::default(), Details::default())?, content, details));
                }
            }
        }
        let ((fixed, changing, seal), prefix) =
            head.ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })?;
        for (record, content, details) in sealed {
            records.push(Record {
                content: content.open("messages", &seal)?.into(),
                details: details.open("messages", &seal)?,
                ..record
            });
        }
        // They come in order out of the index, which the statement does not promise.
        records.sort_by_key(|record| record.message_number);
        Ok(Parts { fixed, changing, prefix, records })
    }

    /// Reads the parts that are not messages, opens them, and learns which key the session has.
    async fn head(
        &self,
        session_id: &str,
        fixed: String,
        changing: String,
    ) -> Result<(Fixed, Changing, Seal)> {
        let read: Fixed = from_text("session", &fixed)?;
        self.vault.learn(session_id, read.data_key.as_deref());
        let seal = self.vault.seal(read.data_key.as_deref()).await?;
        if !seal.is_on() {
            return Ok((read, from_text("session", &changing)?, seal));
        }
        let (fixed, changing) = (seal.open_json(fixed)?, seal.open_json(changing)?);
        Ok((from_text("session", &fixed)?, from_text("session", &changing)?, seal))
    }

    /// Updates a worker's copy after `wake_seq` changed or a model call was interrupted. Reads inbox, ledger,
    /// model calls in flight, the cancel flag, and the state, which an operator may have rebuilt.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Corrupt`], [`Error::Keys`], [`Error::Database`].
    pub async fn refresh(&self, session: &mut Session) -> Result<()> {
        let seal = self.seal_of(session.session_id.as_str()).await?;
        let row = query_changing!(
            ("select "),
            (r#"::text as "changing!" from conversation_sessions s where s.session_id = $1"#),
            session.session_id.as_str()
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or_else(|| Error::NotFound { what: "session", id: session.session_id.to_string() })?;
        let changing: Changing = from_text("session", &seal.open_json(row.changing)?)?;
        changing.update(session)
    }
}

/// A message whose JSON cannot be read makes the session corrupt. Every other error is the database's.
fn unreadable(error: sqlx::Error) -> Error {
    match error {
        sqlx::Error::ColumnDecode { source, .. } => Error::corrupt("messages", source),
        other => other.into(),
    }
}

/// The session's own row, or one of its messages.
struct Row<C> {
    message_number: i64,
    /// What is fixed, and what can change.
    session: Option<(String, String)>,
    prefix: Option<Vec<u8>>,
    run_id: Option<String>,
    step_number: Option<i64>,
    role: Option<String>,
    content: Option<Stored<C>>,
    internal: Option<bool>,
    details: Option<Stored<Details>>,
}
