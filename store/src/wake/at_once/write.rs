//! The statements that write a message, each with its conditions.

use super::{Arrived, Seen};
use crate::audit::act;
use crate::create::NewSession;
use crate::encryption::Vault;
use crate::json::to_json;
use crate::queue::{Offer, Taken};
use crate::run;
use crate::wake::Woken;
use crate::{Error, Result, new_id};
use sqlx::PgConnection;
use std::borrow::Cow;
use wakeful_workflow::access::Speaker;
use wakeful_workflow::event::Event;
use wakeful_workflow::inbox::{self, Acceptance, Position};
use wakeful_workflow::prefix::Prefix;
use wakeful_workflow::record::Record;
use wakeful_workflow::session::{InboxMessage, Run, Session, SessionStatus, Totals};
use wakeful_workflow::state::State;

/// Writes a message that opens a run, after a CTE `s` that has the session. The parameters from $1 to $20 are the same for
/// each such statement.
macro_rules! opens_run {
    ($with:literal, $run:expr, $claim:expr, $($parameter:expr),+) => {
        sqlx::query!(
            "with " + $with + ", message as (
                insert into session_inbox
                    (space_id, session_id, inbox_id, client_key, content, content_sha256, sender, status, run_id,
                     outcome)
                overriding system value
                select s.space_id, s.session_id, $2, $3, $4, $5, $6, 'drained', $1, $7
                from s
            ), events as (
                insert into session_events (space_id, session_id, seq, type, run_id, dedupe_key, payload)
                select s.space_id, s.session_id, s.last_event_seq - cardinality($8::text[]) + e.ordinal, e.type, $1,
                    case when e.ordinal = 1 then 'message/' || $3::text end, e.payload::jsonb
                from s, unnest($8::text[], $9::text[]) with ordinality as e (type, payload, ordinal)
            ), record as (
                insert into conversation_records
                    (space_id, conversation_id, message_number, session_id, run_id, step_number, role, content,
                     details)
                select s.space_id, s.conversation_id, $10, s.session_id, $1, $14, $11, $12::text::json, $13::text::json
                from s
            ), run as (
                insert into session_runs
                    (space_id, run_id, session_id, conversation_id, status, trace_context, started_at,
                     prompt_message_number, from_step, created_at)
                select s.space_id, $1, s.session_id, s.conversation_id, 'running', $15, clock_timestamp(), $10, $14,
                    -- As in `run::open`.
                    greatest(clock_timestamp(), (
                        select max(created_at) + interval '1 microsecond' from session_runs r
                        where r.session_id = s.session_id))
                from s
            ), job as (
                insert into jobs
                    (kind, space_id, conversation_id, session_id, step_number, trace_context, lease, worker_id,
                     liveness_lock, run_at, stuck, attempt)
                select 'step', s.space_id, s.conversation_id, s.session_id, $14, $15, $17, $18, $19,
                    clock_timestamp() + make_interval(secs => $20), ($17::bigint is not null)::integer,
                    ($17::bigint is not null)::integer
                from s
                -- A worker may still hold the job of the run before, as `run::start` says.
                on conflict (session_id) where kind = 'step'
                    do update set runner = excluded.runner, step_number = excluded.step_number,
                        trace_context = excluded.trace_context, run_at = excluded.run_at, lease = excluded.lease,
                        worker_id = excluded.worker_id, liveness_lock = excluded.liveness_lock,
                        stuck = excluded.stuck, died = 0, attempt = excluded.attempt, last_error = null, outage_since = null,
                        outage_faults = 0, waits_for = null, waits_since = null, gate_pass = null,
                        fault_since = null, faults = 0, held_by = null, held_since = null, pause_passes = null
                returning job_id
            ), audit as (
                insert into audit_log
                    (actor_kind, actor, token_id, user_id, verb, target, space_id, reason, address, outcome)
                select a.actor_kind, a.actor, a.token_id, a.user_id, a.verb, s.session_id, a.space_id, a.reason,
                    a.address, 'done'
                from s, jsonb_to_record($16::text::jsonb) as a (actor_kind text, actor text, token_id text,
                    user_id text, verb text, space_id text, reason text, address text)
                where $16::text is not null
            )
            select 1 / count(*) as \"written!\", (select job_id from job) as \"job_id!\" from s",
            $run.run_id,
            $run.inbox_id,
            $run.client_key,
            &*$run.text,
            $run.sha256,
            $run.sender,
            Acceptance::NewRun.as_str(),
            &$run.types,
            &$run.payloads,
            $run.record.message_number,
            $run.record.role.as_str(),
            $run.content,
            $run.details,
            $run.record.step_number,
            $run.trace_context,
            act::row(),
            $claim.map(|claim| claim.token),
            $claim.map(|claim| &*claim.worker_id),
            $claim.and_then(|claim| claim.liveness_lock),
            $claim.map_or(0.0, |claim| claim.lease.as_secs_f64()),
            $($parameter),+
        )
    };
}

/// The message waits in the inbox of the session, whose run is open.
pub(super) async fn join_run(
    connection: &mut PgConnection,
    seen: &Seen,
    arrived: &Arrived<'_>,
) -> Result<Option<Woken>> {
    let (Some(session_id), Some(run_id)) = (&seen.session_id, &seen.newest_run_id) else { return Ok(None) };
    let (kind, payload) = Event::MessageReceived { inbox_id: arrived.inbox_id }.to_row();
    let outcome = Acceptance::Queued;
    let text = arrived.seal.text(&arrived.message.text);
    crate::failpoint!("K1");
    let written = sqlx::query!(
        "with s as (
            update conversation_sessions
            set last_event_seq = last_event_seq + 1, wake_seq = wake_seq + 1
            -- If the conversation began anew meanwhile, the same message may have been sent to its new session.
            where session_id = $1 and status = $2 and wake_seq = $3 and superseded = $14
            returning space_id, session_id, last_event_seq
        ), message as (
            insert into session_inbox
                (space_id, session_id, inbox_id, client_key, content, content_sha256, sender, run_id, outcome)
            overriding system value
            select s.space_id, s.session_id, $4, $5, $6, $7, $8, $9, $10
            from s
        ), audit as (
            insert into audit_log
                (actor_kind, actor, token_id, user_id, verb, target, space_id, reason, address, outcome)
            select a.actor_kind, a.actor, a.token_id, a.user_id, a.verb, s.session_id, a.space_id, a.reason,
                a.address, 'done'
            from s, jsonb_to_record($13::text::jsonb) as a (actor_kind text, actor text, token_id text,
                user_id text, verb text, space_id text, reason text, address text)
            where $13::text is not null
        )
        insert into session_events (space_id, session_id, seq, type, run_id, dedupe_key, payload)
        select s.space_id, s.session_id, s.last_event_seq, $11, $9, 'message/' || $5::text, $12::text::jsonb
        from s",
        session_id,
        seen.status,
        seen.wake_seq,
        arrived.inbox_id,
        arrived.client_key,
        &*text,
        arrived.sha256,
        arrived.message.sender,
        run_id,
        outcome.as_str(),
        kind,
        payload.to_string(),
        act::row(),
        seen.superseded
    )
    .execute(connection)
    .await?;
    Ok((written.rows_affected() == 1).then(|| Woken {
        session_id: session_id.clone(),
        run_id: run_id.clone(),
        outcome,
        duplicate: false,
    }))
}

/// What a message writes that opens a run.
struct NewRun<'m> {
    run_id: String,
    inbox_id: i64,
    client_key: &'m str,
    text: Cow<'m, str>,
    sha256: &'m str,
    sender: Option<&'m str>,
    trace_context: Option<&'m str>,
    /// Types and payloads of the journal's entries.
    types: Vec<String>,
    payloads: Vec<String>,
    record: Record,
    content: String,
    details: String,
}

impl<'m> NewRun<'m> {
    /// A run of a session in `status`, whose first step and first message follow these numbers.
    fn new(
        arrived: &'m Arrived<'_>,
        (trigger_type, trigger_id): (&str, &str),
        status: SessionStatus,
        last_step_number: i64,
        last_message_number: i64,
    ) -> Result<Option<NewRun<'m>>> {
        let run_id = run::new_run_id();
        let Arrived { message, client_key, sha256, inbox_id, seal } = arrived;
        let position = Position {
            run_id: run_id.as_str().into(),
            step_number: last_step_number + 1,
            last_message_number,
        };
        let waiting =
            InboxMessage { inbox_id: *inbox_id, text: message.text.clone(), attachments: Vec::new() };
        let taken = inbox::take(&position, None, &[waiting]);
        let received = Event::MessageReceived { inbox_id: *inbox_id };
        let opened = run::opening_events(trigger_type, trigger_id, status, None);
        let (types, payloads) = std::iter::once(received)
            .chain(opened)
            .chain(taken.events)
            .map(|event| seal.entry(&event))
            .unzip();
        let Some(record) = taken.records.into_iter().next() else { return Ok(None) };
        Ok(Some(NewRun {
            run_id,
            inbox_id: *inbox_id,
            client_key,
            text: seal.text(&message.text),
            sha256,
            sender: message.sender.as_deref(),
            trace_context: message.trace_context.as_deref(),
            types,
            payloads,
            content: seal.json(to_json(&record.content)?)?,
            details: seal.json(to_json(&record.details)?)?,
            record,
        }))
    }

    /// Tells the offer what became of the statement, whose job has this id.
    fn answered(
        &self,
        job_id: sqlx::Result<i64>,
        offer: Option<&mut Offer>,
        (conversation_id, session_id): (&str, &str),
        session: Option<Box<Session>>,
    ) -> sqlx::Result<()> {
        let Some(offer) = offer else { return job_id.map(drop) };
        match job_id {
            Ok(job_id) => offer.taken(Taken {
                job_id,
                conversation_id: conversation_id.to_owned(),
                session_id: session_id.to_owned(),
                step_number: self.record.step_number,
                trace_context: self.trace_context.map(str::to_owned),
                session,
            }),
            Err(error) => {
                // After other errors the statement may have been committed.
                if error.as_database_error().is_some() {
                    offer.declined();
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// The session that the first message makes, as hydration would read it. A test compares the two.
    fn new_session(&self, new: &NewSession, session_id: &str, prefix: Prefix) -> Session {
        let before = new.seeds.len() as i64;
        Session {
            session_id: session_id.into(),
            conversation_id: new.conversation_id.as_str().into(),
            parent_session_id: None,
            space_id: new.space_id.clone(),
            mailbox_id: new.mailbox_id.clone(),
            trigger_type: new.trigger_type.clone(),
            agent: new.agent.clone(),
            policy: new.policy.clone(),
            prefix: Some(prefix),
            status: SessionStatus::Queued,
            cancel_requested: false,
            cancel_reason: None,
            wake_seq: 1,
            base_message_number: before,
            last_message_number: self.record.message_number,
            to_message_number: before,
            last_event_seq: self.types.len() as i64,
            last_step_number: 0,
            totals: Totals::default(),
            state: State::new(),
            rebase: None,
            compaction_failures: 0,
            workspace: None,
            run: Some(Run { run_id: self.run_id.as_str().into(), steps: 0, tokens: 0 }),
            seeds: new.seeds.clone(),
            records: vec![self.record.clone()],
            left_out: None,
            calls: Vec::new(),
            inbox: Vec::new(),
            interrupted: Vec::new(),
        }
    }

    fn woken(self, session_id: String) -> Woken {
        Woken { session_id, run_id: self.run_id, outcome: Acceptance::NewRun, duplicate: false }
    }
}

/// The message opens a run of a session at rest, in a conversation that no run holds.
pub(super) async fn open_run(
    connection: &mut PgConnection,
    seen: &Seen,
    arrived: &Arrived<'_>,
    mut offer: Option<&mut Offer>,
) -> Result<Option<Woken>> {
    let (Some(conversation_id), Some(session_id), Some(last_message_number), Some(status)) =
        (&seen.conversation_id, &seen.session_id, seen.last_message_number, &seen.status)
    else {
        return Ok(None);
    };
    let trigger = (seen.trigger_type.as_deref(), seen.trigger_id.as_deref());
    let ((Some(trigger_type), Some(trigger_id)), Some(last_step_number), Some(was)) =
        (trigger, seen.last_step_number, SessionStatus::parse(status))
    else {
        return Ok(None);
    };
    let trigger = (trigger_type, trigger_id);
    let Some(run) = NewRun::new(arrived, trigger, was, last_step_number, last_message_number)? else {
        return Ok(None);
    };
    crate::failpoint!("K1");
    let claim = offer.as_deref_mut().map(|offer| offer.ask(session_id));
    let written = opens_run!(
        "c as (
            update conversation_counters
            set open_run_id = $1
            where conversation_id = $21 and open_run_id is null and last_message_number = $22
            returning conversation_id, last_message_number
        ), s as (
            update conversation_sessions s
            set status = 'queued', error = null, completed_at = null, cancel_requested = false,
                cancel_reason = null,
                -- As in `run::start`: only the first run sets where the session's numbers begin.
                base_message_number = case when $23 then s.base_message_number else c.last_message_number end,
                to_message_number = case when $23 then s.to_message_number else c.last_message_number end,
                last_message_number = $10,
                last_event_seq = s.last_event_seq + cardinality($8::text[]),
                wake_seq = s.wake_seq + 1
            from c
            where s.session_id = $24 and s.conversation_id = c.conversation_id and s.status = $25
                and s.wake_seq = $26 and s.superseded = $27
            returning s.session_id, s.conversation_id, s.space_id, s.last_event_seq
        )",
        run,
        claim,
        conversation_id,
        last_message_number,
        seen.had_run,
        session_id,
        status,
        seen.wake_seq,
        seen.superseded
    )
    .fetch_one(connection)
    .await;
    let job_id = written.map(|row| row.job_id);
    run.answered(job_id, offer, (conversation_id, session_id), None)?;
    Ok(Some(run.woken(session_id.clone())))
}

/// The message makes a conversation, its session and its run.
pub(super) async fn first_message(
    connection: &mut PgConnection,
    vault: &Vault,
    new: &NewSession,
    arrived: &Arrived<'_>,
    mut offer: Option<&mut Offer>,
) -> Result<Option<Woken>> {
    let trigger = (new.trigger_type.as_str(), new.trigger_id.as_str());
    // Message numbers begin after the seeds: with one seed, the first message gets number 2.
    let last_message_number = new.seeds.len() as i64;
    let Some(run) = NewRun::new(arrived, trigger, SessionStatus::Created, 0, last_message_number)? else {
        return Ok(None);
    };
    let session_id = new_id("sess");
    let prefix = Prefix::new(&new.seeds, new.tools.clone());
    let blob = prefix.blob();
    let tool_names: Vec<&str> = prefix.tools.iter().map(|tool| tool.name.as_str()).collect();
    let mut policy = serde_json::to_value(&new.policy).map_err(|error| Error::corrupt("policy", error))?;
    arrived.seal.value(&mut policy);
    let (mut roles, mut contents, mut are_new) = (vec![], vec![], vec![]);
    for seed in &new.seeds {
        roles.push(seed.role.as_str());
        contents.push(arrived.seal.text(&seed.content));
        are_new.push(seed.is_new);
    }
    crate::failpoint!("K4");
    crate::failpoint!("K1");
    let claim = offer.as_deref_mut().map(|offer| offer.ask(&session_id));
    let written = opens_run!(
        "c as (
            insert into conversation_counters
                (conversation_id, space_id, mailbox_id, last_message_number, open_run_id, user_id, data_key)
            values ($21, $22, $23, $24, $1, $39, $40)
            on conflict (conversation_id) do nothing
            returning conversation_id, space_id, mailbox_id, last_message_number, data_key
        ), prefix as (
            insert into blobs (space_id, sha256, size, media_type, bytes)
            select c.space_id, $25, length($26::bytea), 'application/json', $26
            from c
            on conflict (sha256, space_id) do nothing
        ), s as (
            insert into conversation_sessions
                (session_id, conversation_id, space_id, mailbox_id, trigger_type, trigger_id, agent, model_id,
                 model_context_window, status, policy, tool_names, seed_message_count, prefix_sha256,
                 repository_id, base_message_number, to_message_number, last_message_number, last_event_seq,
                 wake_seq, data_key)
            select $27, c.conversation_id, c.space_id, c.mailbox_id, $28, $29, $30, $31, $32, 'queued', $33, $34,
                $24::bigint::integer, $25, $35, c.last_message_number, c.last_message_number, $10,
                cardinality($8::text[]), 1, c.data_key
            from c
            returning session_id, conversation_id, space_id, last_event_seq
        ), seeds as (
            insert into session_seed_messages (space_id, session_id, ordinal, role, content, is_new)
            select s.space_id, s.session_id, seed.ordinal - 1, seed.role, seed.content, seed.is_new
            from s, unnest($36::text[], $37::text[], $38::boolean[])
                with ordinality as seed (role, content, is_new, ordinal)
        )",
        run,
        claim,
        new.conversation_id,
        new.space_id,
        new.mailbox_id,
        last_message_number,
        blob.sha256,
        blob.bytes,
        session_id,
        new.trigger_type,
        new.trigger_id,
        new.agent,
        new.model_id,
        new.model_context_window,
        policy,
        &tool_names as &[&str],
        new.repository_id,
        &roles as &[&str],
        &contents as &[Cow<'_, str>],
        &are_new,
        new.speaker.as_ref().and_then(Speaker::claims),
        arrived.seal.key_id()
    )
    .fetch_one(connection)
    .await;
    let job_id = written.map(|row| row.job_id);
    if offer.is_some() {
        vault.learn(&session_id, arrived.seal.key_id());
    }
    let session = offer.is_some().then(|| Box::new(run.new_session(new, &session_id, prefix)));
    run.answered(job_id, offer, (&new.conversation_id, &session_id), session)?;
    Ok(Some(run.woken(session_id)))
}
