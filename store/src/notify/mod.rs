//! Notifications: transitions are noted where they happen, told in groups, and sent like deliveries.
//!
//! A trigger of the database writes a row of `transitions` in the transaction that makes the transition (see
//! `migrations/*_notifications.sql`). One process at a time follows that table, under an advisory lock that ends with its
//! transaction: it puts each row into the groups of the rules that want it, makes the messages that are due, and deletes the row,
//! all in one commit. So a kill at any point tells each transition once. What is decided is in
//! [`wakeful_workflow::notify`].

mod about;
pub mod link;
pub mod outbox;

use crate::{Result, Store, new_id};
use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;
use wakeful_workflow::gate;
use wakeful_workflow::notify::{Group, Kind, Next, Phase, Rule, Seen, next};

/// The advisory lock of the process that follows the table.
const LOCK: i64 = 0x7761_6b65_6e6f_7469;

/// How many transitions one look reads.
const TRANSITIONS: i64 = 1000;

/// For how long a group of a rule that this process does not know is kept. In a rolling deploy another process knows it.
const UNKNOWN_RULE_MS: i64 = 3_600_000;

/// How long jobs are ready without a worker before that is told. A restart takes less.
const WITHOUT_WORKER_S: f64 = 30.0;

/// What one look did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Followed {
    /// How many messages it made.
    pub messages: usize,
    /// There is more to read now.
    pub more: bool,
}

/// A transition with what its rule and its group are found by.
struct Transition {
    transition_id: i64,
    space_id: String,
    kind: Kind,
    subject: String,
    session_id: Option<String>,
    agent: Option<String>,
    cause: String,
    label: String,
    ends: bool,
    at: DateTime<Utc>,
}

/// By what the open groups are told apart: rule, kind, cause and space.
type Key<'a> = (&'a str, Kind, &'a str, &'a str);

impl Store {
    /// Puts new transitions into groups, and makes the messages that are due. Does nothing while another process does it.
    /// `beat`: after how long without a sign of life a worker counts as gone.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn follow_transitions(&self, rules: &[Rule], beat: Duration) -> Result<Followed> {
        let mut tx = self.pool.begin().await?;
        let is_mine = sqlx::query_scalar!(r#"select pg_try_advisory_xact_lock($1) as "mine!""#, LOCK);
        if !is_mine.fetch_one(&mut *tx).await? {
            return Ok(Followed::default());
        }
        if rules.iter().any(|rule| rule.when.contains(&Kind::NoWorker)) {
            look_for_workers(&mut tx, beat).await?;
        }
        let read = read(&mut tx).await?;
        enter(&mut tx, rules, &read.transitions).await?;
        sqlx::query!("delete from transitions where transition_id = any($1)", &read.ids)
            .execute(&mut *tx)
            .await?;
        let messages = tell(&mut tx, rules).await?;
        crate::failpoint!("K78_follow");
        tx.commit().await?;
        crate::failpoint!("K79_followed");
        Ok(Followed { messages, more: read.ids.len() as i64 == TRANSITIONS })
    }

    /// Deletes what is old: transitions that no process follows, because no rule is configured; links a month after they expired;
    /// and notifications three months after their group was closed.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn forget_transitions(&self, older_than: Duration) -> Result<u64> {
        // `now()` and not `clock_timestamp()`: what changes within a statement cannot be looked up in an index.
        sqlx::query!("delete from act_links where expires_at < now() - interval '30 days'")
            .execute(&self.pool)
            .await?;
        sqlx::query!(
            "with old as (
                select group_id from notification_groups
                where closed_at < now() - interval '90 days'
                limit 1000
            ), members as (
                delete from notification_members m using old where m.group_id = old.group_id
            ), messages as (
                delete from notifications n using old where n.group_id = old.group_id
            )
            delete from notification_groups g using old where g.group_id = old.group_id"
        )
        .execute(&self.pool)
        .await?;
        let deleted = sqlx::query!(
            "delete from transitions where at < clock_timestamp() - make_interval(secs => $1)",
            older_than.as_secs_f64()
        );
        Ok(deleted.execute(&self.pool).await?.rows_affected())
    }
}

/// Notes that jobs wait without a worker, or that a worker is there again.
async fn look_for_workers(tx: &mut PgConnection, beat: Duration) -> Result<()> {
    sqlx::query!(
        "with alone as (
            select exists (
                -- Of each kind by the index. The time is read once: what changes within a statement cannot be looked up.
                select from unnest(array['step', 'deliver']) kinds (kind)
                cross join lateral (
                    select from jobs
                    where kind = kinds.kind and runner = '' and lease is null
                        and run_at < (select clock_timestamp() - make_interval(secs => $1))
                    limit 1
                ) waits
            ) and not exists (
                select from workers where beat_at > clock_timestamp() - make_interval(secs => $2) and drain_asked_at is null
            ) as alone
        ), began as (
            insert into notify_conditions (condition)
            select 'no_worker' from alone where alone.alone
            on conflict do nothing
            returning condition
        ), ended as (
            delete from notify_conditions using alone where condition = 'no_worker' and not alone.alone
            returning condition
        )
        insert into transitions (space_id, kind, subject, ends)
        select '*', condition, condition, false from began
        union all
        select '*', condition, condition, true from ended",
        WITHOUT_WORKER_S,
        beat.as_secs_f64()
    )
    .execute(tx)
    .await?;
    Ok(())
}

struct Read {
    transitions: Vec<Transition>,
    /// Of all rows that were read, those without a known kind too.
    ids: Vec<i64>,
}

/// The next transitions, oldest first, without those of muted error groups, and without waits that are over: a process that was away, or
/// a new rule, must not ask people to do what has been done already.
async fn read(tx: &mut PgConnection) -> Result<Read> {
    let rows = sqlx::query!(
        r#"select t.transition_id, t.space_id, t.kind, t.subject, t.session_id, t.ends, t.at, s.agent as "agent?",
            f.kind as "fault?", f.fingerprint as "fingerprint?", f.text as "text?", d.channel as "channel?",
            coalesce(g.muted_until > t.at, false) as "muted!",
            not t.ends and case
                when t.kind in ('waiting_input', 'needs_attention') then s.status is distinct from t.kind
                when t.kind = 'batch_stopped' then b.status is distinct from 'paused'
                else false
            end as "over!",
            t.kind = 'needs_attention' and exists (
                select from tool_calls c
                where c.session_id = t.session_id and c.status = 'unapproved' and c.result_message_number is null
            ) and not exists (
                select from tool_calls c
                where c.session_id = t.session_id and c.status = 'uncertain' and c.result_message_number is null
            ) as "approval!"
        from (select * from transitions order by transition_id limit $1) t
        left join conversation_sessions s on s.session_id = t.session_id
        left join lateral (
            select kind, fingerprint, text from run_failures
            where session_id = t.session_id
            -- The commit that makes the transition writes the failure, before it or after it.
            order by abs(extract(epoch from at - t.at)), failure_id desc
            limit 1
        ) f on t.kind = 'failed'
        left join batches b on t.kind = 'batch_stopped' and b.batch_id = t.subject
        left join deliveries d on t.kind = 'delivery_failed' and d.delivery_id = t.subject
        left join error_groups g on g.space_id = t.space_id and g.fingerprint = f.fingerprint
        order by t.transition_id"#,
        TRANSITIONS
    )
    .fetch_all(tx)
    .await?;
    let ids = rows.iter().map(|row| row.transition_id).collect();
    // Of a session that waited several times, the last wait is the one that may not be over.
    let mut waits = HashMap::new();
    for row in rows.iter().filter(|row| matches!(row.kind.as_str(), "waiting_input" | "needs_attention")) {
        waits.insert((row.kind.clone(), row.subject.clone()), row.transition_id);
    }
    let is_last = |kind: &str, subject: &str, id: i64| {
        waits.get(&(kind.to_owned(), subject.to_owned())).is_none_or(|last| *last == id)
    };
    let transitions = rows
        .into_iter()
        .filter(|row| !row.muted && !row.over && is_last(&row.kind, &row.subject, row.transition_id))
        .filter_map(|row| {
            let kind = match (Kind::parse(&row.kind)?, row.fault.as_deref()) {
                (Kind::Failed, Some("step_limit" | "token_limit")) => Kind::OverBudget,
                (Kind::NeedsAttention, _) if row.approval => Kind::Approval,
                (kind, _) => kind,
            };
            let agent = || row.agent.clone().unwrap_or_default();
            let (cause, label) = match kind {
                Kind::Failed | Kind::OverBudget => {
                    let label = row.text.unwrap_or_else(|| "an error that is not known any more".to_owned());
                    (row.fingerprint.unwrap_or_default(), label)
                }
                Kind::NeedsAttention | Kind::Approval | Kind::WaitingInput => {
                    (agent(), format!("agent {}", agent()))
                }
                Kind::DeliveryFailed => {
                    let channel = row.channel.unwrap_or_default();
                    (channel.clone(), format!("channel {channel}"))
                }
                Kind::GateShut => (row.subject.clone(), gate::whose(&row.subject)),
                Kind::NoWorker => (row.subject.clone(), "the whole installation".to_owned()),
                Kind::BatchStopped => (row.subject.clone(), format!("batch {}", row.subject)),
            };
            Some(Transition {
                transition_id: row.transition_id,
                space_id: row.space_id,
                kind,
                subject: row.subject,
                session_id: row.session_id,
                agent: row.agent,
                cause,
                label,
                ends: row.ends,
                at: row.at,
            })
        });
    Ok(Read { transitions: transitions.collect(), ids })
}

/// Puts transitions into the groups of the rules that want them.
async fn enter(tx: &mut PgConnection, rules: &[Rule], transitions: &[Transition]) -> Result<()> {
    let mut groups: BTreeMap<Key<'_>, Vec<&Transition>> = BTreeMap::new();
    for one in transitions {
        let seen = Seen { kind: one.kind, space_id: &one.space_id, agent: one.agent.as_deref() };
        for rule in rules.iter().filter(|rule| rule.wants(seen)) {
            groups.entry((&rule.name, one.kind, &one.cause, rule.space())).or_default().push(one);
        }
    }
    for (key, members) in groups {
        // An end belongs to the group that is open, if there is one. In between, the same trouble may have begun again.
        for run in members.chunk_by(|a, b| a.ends == b.ends) {
            match run.first().is_some_and(|first| first.ends) {
                true => end(tx, key).await?,
                false => gather(tx, key, run).await?,
            }
        }
    }
    Ok(())
}

/// Adds to the open group of a cause, or opens it.
async fn gather(tx: &mut PgConnection, key: Key<'_>, members: &[&Transition]) -> Result<()> {
    let (rule, kind, cause, space) = key;
    let (Some(first), Some(last)) = (members.first(), members.last()) else { return Ok(()) };
    let group_id = sqlx::query_scalar!(
        "insert into notification_groups (group_id, space_id, rule, kind, cause, label, count, first_at, last_at)
        values ($1, $2, $3, $4, $5, $6, 0, $7, $8)
        on conflict (rule, kind, cause, space_id) where closed_at is null
            do update set last_at = greatest(notification_groups.last_at, excluded.last_at), ended_at = null
        returning group_id",
        new_id("grp"),
        space,
        rule,
        kind.as_str(),
        cause,
        first.label,
        first.at,
        last.at
    )
    .fetch_one(&mut *tx)
    .await?;
    let ids: Vec<i64> = members.iter().map(|one| one.transition_id).collect();
    let spaces: Vec<String> = members.iter().map(|one| one.space_id.clone()).collect();
    let subjects: Vec<String> = members.iter().map(|one| one.subject.clone()).collect();
    let sessions: Vec<Option<String>> = members.iter().map(|one| one.session_id.clone()).collect();
    let times: Vec<DateTime<Utc>> = members.iter().map(|one| one.at).collect();
    sqlx::query!(
        "with added as (
            insert into notification_members (rule, group_id, transition_id, space_id, subject, session_id, at)
            select $1, $2, m.* from unnest($3::bigint[], $4::text[], $5::text[], $6::text[], $7::timestamptz[]) as m
            on conflict (rule, transition_id) do nothing
            returning transition_id
        )
        update notification_groups set count = count + (select count(*) from added) where group_id = $2",
        rule,
        group_id,
        &ids,
        &spaces,
        &subjects,
        &sessions as &[Option<String>],
        &times
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// Notes that a cause is over.
async fn end(tx: &mut PgConnection, key: Key<'_>) -> Result<()> {
    let (rule, kind, cause, space) = key;
    sqlx::query!(
        "update notification_groups set ended_at = clock_timestamp()
        where rule = $1 and kind = $2 and cause = $3 and space_id = $4 and closed_at is null",
        rule,
        kind.as_str(),
        cause,
        space
    )
    .execute(tx)
    .await?;
    Ok(())
}

struct Open {
    group_id: String,
    kind: Kind,
    group: Group,
}

/// Makes the messages that are due, and closes groups that are over. Returns how many messages.
async fn tell(tx: &mut PgConnection, rules: &[Rule]) -> Result<usize> {
    let rows = sqlx::query!(
        r#"select group_id, rule, kind, count, told, messages, ended_at is not null as "ended!",
            (extract(epoch from first_at) * 1000)::bigint as "first_ms!",
            (extract(epoch from last_at) * 1000)::bigint as "last_ms!",
            (extract(epoch from told_at) * 1000)::bigint as told_ms,
            (extract(epoch from clock_timestamp()) * 1000)::bigint as "now_ms!"
        from notification_groups
        where closed_at is null
        order by first_at
        limit 10000"#
    )
    .fetch_all(&mut *tx)
    .await?;
    let mut room: BTreeMap<usize, i64> = BTreeMap::new();
    let mut messages = 0;
    for row in rows {
        // A group of a rule that is gone is closed without a word.
        let rule = rules.iter().position(|rule| rule.name == row.rule);
        let (Some(rule), Some(kind)) = (rule, Kind::parse(&row.kind)) else {
            if row.now_ms >= row.last_ms.saturating_add(UNKNOWN_RULE_MS) {
                close(tx, &row.group_id).await?;
            }
            continue;
        };
        let group = Group {
            count: row.count,
            told: row.told,
            messages: u32::try_from(row.messages).unwrap_or(u32::MAX),
            first_ms: row.first_ms,
            last_ms: row.last_ms,
            told_ms: row.told_ms,
            ended: row.ended,
        };
        let open = Open { group_id: row.group_id, kind, group };
        match next(kind, &rules[rule], &group, row.now_ms) {
            Next::Wait => {}
            Next::Close => close(tx, &open.group_id).await?,
            Next::Tell { phase, closes } => {
                let left = match room.get(&rule) {
                    Some(left) => *left,
                    None => room_of(tx, &rules[rule]).await?,
                };
                room.insert(rule, left - 1);
                // Beyond the bound of the hour it waits, and gathers what comes.
                if left > 0 {
                    make(tx, &rules[rule], &open, phase, closes).await?;
                    messages += 1;
                }
            }
        }
    }
    Ok(messages)
}

/// How many more messages the rule may send now.
async fn room_of(tx: &mut PgConnection, rule: &Rule) -> Result<i64> {
    let sent = sqlx::query_scalar!(
        r#"select count(*) as "count!" from notifications
        where rule = $1 and created_at > now() - interval '1 hour'"#,
        rule.name
    );
    Ok(i64::from(rule.per_hour) - sent.fetch_one(tx).await?)
}

/// Makes one message of what a group has not told yet.
async fn make(tx: &mut PgConnection, rule: &Rule, open: &Open, phase: Phase, closes: bool) -> Result<()> {
    sqlx::query!(
        "with last as (
            select coalesce(max(through_member), 0) as member from notifications where group_id = $2
        ), newest as (
            select coalesce(max(member_id), (select member from last)) as member from notification_members where group_id = $2
        )
        insert into notifications
            (notification_id, space_id, group_id, rule, kind, phase, count, total, after_member, through_member)
        select $1, g.space_id, g.group_id, g.rule, g.kind, $3, g.count - g.told, g.count, last.member, newest.member
        from notification_groups g, last, newest
        where g.group_id = $2",
        new_id("ntf"),
        open.group_id,
        phase.as_str()
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!(
        "update notification_groups
        set told = count, messages = messages + 1, told_at = clock_timestamp(),
            closed_at = case when $2 then clock_timestamp() end
        where group_id = $1",
        open.group_id,
        closes
    )
    .execute(&mut *tx)
    .await?;
    tracing::info!(
        rule = rule.name,
        kind = open.kind.as_str(),
        count = open.group.count,
        "A notification is made"
    );
    Ok(())
}

async fn close(tx: &mut PgConnection, group_id: &str) -> Result<()> {
    sqlx::query!(
        "update notification_groups set closed_at = clock_timestamp() where group_id = $1",
        group_id
    )
    .execute(tx)
    .await?;
    Ok(())
}
