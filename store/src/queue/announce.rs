//! Sends wake-ups to other processes: NOTIFY after commits.
//!
//! One task per process sends notifications, the first at once and the next ones a [`PAUSE`] apart or more. Transactions
//! do not send NOTIFY themselves, because Postgres makes commits with NOTIFY wait for each other. Only rare ones do: a cancel,
//! a pause, a gate, a schedule, a drain and the jobs that it gives back, the job of a message whose caller went away, a step that is
//! left to others.
//!
//! A job is announced to one worker, by its name. If all were told, each would send a claim, and only one would find the job.
//! The named one may be full, stopped or dead. A full one tells all others at once. A job that no worker has claimed [`PAUSE`] later
//! is announced to all, by one more statement, which reads what waits.

use super::Kind;
use super::notify::{EVERY_JOB, Here, JOBS, READ, SESSIONS, payload};
use crate::Store;
use std::collections::BTreeSet;
use std::sync::Weak;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tracing::debug;

/// The least time from one statement that notifies to the next.
const PAUSE: Duration = Duration::from_millis(50);
/// Postgres takes payloads of less than 8000 bytes.
const PAYLOAD_BYTES: usize = 7900;
/// Before the name of the worker that a job is announced to: "@WORKER KIND:". No kind begins so. Earlier builds ignore such a
/// payload, and hear of the job when all do.
const NAMED: char = '@';

/// What other processes are to hear.
#[derive(Debug)]
pub(super) enum Note {
    /// A job of the deployed workers. One of them is told.
    Job(Kind),
    /// More jobs than one worker takes, or jobs of a runner: the payload of a notification. All are told.
    Jobs(String),
    Session(String),
}

/// Returns the worker that a notification names, and the payload that it has without the name.
pub(super) fn named(payload: &str) -> Option<(&str, &str)> {
    payload.strip_prefix(NAMED)?.split_once(' ')
}

/// Sends what comes in, until nobody can send any more.
pub(super) async fn send_notes(store: Store, here: Weak<Here>, mut inbox: mpsc::UnboundedReceiver<Note>) {
    while let Some(first) = inbox.recv().await {
        let mut kinds = Vec::new();
        let (mut jobs, mut sessions) = (BTreeSet::new(), BTreeSet::new());
        let mut next = Some(first);
        while let Some(note) = next {
            match note {
                Note::Job(kind) if !kinds.contains(&kind) => kinds.push(kind),
                Note::Job(_) => {}
                Note::Jobs(payload) => {
                    jobs.insert(payload);
                }
                Note::Session(session_id) => {
                    sessions.insert(session_id);
                }
            }
            next = inbox.try_recv().ok();
        }
        // Where all workers are told of a kind, none is told by name.
        kinds.retain(|kind| !jobs.contains(EVERY_JOB) && !jobs.contains(&payload(kind.as_str(), "")));
        let told = Told { kinds, jobs: jobs.into_iter().collect(), sessions: session_payloads(sessions) };
        let own = here.upgrade().map(|here| here.worker_ids()).unwrap_or_default();
        let began = Instant::now();
        let is_one_told = tell(&store, &told, &own).await.unwrap_or_else(|error| {
            debug!(%error, "A notification was not sent");
            // Nobody was told, so all are, if the database lets us.
            !told.kinds.is_empty()
        });
        tokio::time::sleep(PAUSE).await;
        if is_one_told && let Err(error) = tell_what_waits(&store, &told.kinds, began.elapsed()).await {
            debug!(%error, "Nobody was told of jobs that may still wait; the others poll");
        }
    }
}

/// Joins session ids into as few payloads as Postgres takes.
fn session_payloads(sessions: BTreeSet<String>) -> Vec<String> {
    let mut payloads: Vec<String> = Vec::new();
    for session_id in sessions {
        match payloads.last_mut() {
            Some(last) if last.len() + 1 + session_id.len() <= PAYLOAD_BYTES => {
                last.push(',');
                last.push_str(&session_id);
            }
            _ => payloads.push(session_id),
        }
    }
    payloads
}

/// What one statement tells.
struct Told {
    /// Of these, one worker is told.
    kinds: Vec<Kind>,
    /// Payloads for all.
    jobs: Vec<String>,
    sessions: Vec<String>,
}

impl Told {
    fn all(jobs: Vec<String>, sessions: Vec<String>) -> Told {
        Told { kinds: Vec::new(), jobs, sessions }
    }
}

/// Notifies both channels with one statement, once for each payload. `own` are the workers of this process, which have no room.
/// Returns whether one worker alone was told of a job.
async fn tell(store: &Store, told: &Told, own: &[String]) -> Result<bool, sqlx::Error> {
    let (mut channels, mut payloads, mut to_one) = (Vec::new(), Vec::new(), Vec::new());
    let mut push = |channel, payload, one| {
        channels.push(channel);
        payloads.push(payload);
        to_one.push(one);
    };
    told.kinds.iter().for_each(|kind| push(JOBS, payload(kind.as_str(), ""), true));
    told.jobs.iter().for_each(|payload| push(JOBS, payload.clone(), false));
    told.sessions.iter().for_each(|payload| push(SESSIONS, payload.clone(), false));
    let rows = sqlx::query!(
        r#"
        with named as materialized (
            select worker_id from workers
            -- Those that have sent no heartbeat for long are gone.
            where $5 and beat_at > clock_timestamp() - interval '30 seconds' and drain_asked_at is null
                and worker_id <> all ($4::text[])
            order by random() limit 1
        )
        -- Without such a worker, all are told.
        select pg_notify(n.channel, coalesce('@' || named.worker_id || ' ', '') || n.payload) as sent,
            named.worker_id is not null as "is_named!"
        from unnest($1::text[], $2::text[], $3::boolean[]) as n (channel, payload, to_one)
        left join named on n.to_one
        "#,
        &channels as &[&str],
        &payloads,
        &to_one,
        own,
        !told.kinds.is_empty()
    )
    // It reads no row of a space, so it takes the connection of the message that it tells of, and leaves another one, which sees
    // all spaces, to the claim.
    .fetch_all(&store.pool.of_installation())
    .await?;
    Ok(rows.iter().any(|row| row.is_named))
}

/// Tells all workers of the jobs of these kinds that one worker was told of `ago`, and that no worker has claimed since.
async fn tell_what_waits(store: &Store, kinds: &[Kind], ago: Duration) -> Result<(), sqlx::Error> {
    let payloads: Vec<String> = kinds.iter().map(|kind| payload(kind.as_str(), "")).collect();
    let kinds: Vec<&str> = kinds.iter().map(|kind| kind.as_str()).collect();
    sqlx::query!(
        r#"
        select pg_notify($1, told.payload) as sent
        from unnest($2::text[], $3::text[]) as told (payload, kind)
        where exists (
            select from jobs
            where jobs.kind = told.kind
                and jobs.runner = ''
                -- Of those that came later, one worker is told next.
                and jobs.run_at <= (select clock_timestamp() - make_interval(secs => $4))
                -- Its transaction may have taken some time. The index may still have many jobs that ended long ago.
                and jobs.run_at > (select clock_timestamp() - make_interval(secs => $4) - interval '10 seconds')
        )
        "#,
        JOBS,
        &payloads,
        &kinds as &[&str],
        ago.as_secs_f64()
    )
    .execute(&store.pool)
    .await?;
    Ok(())
}

impl Store {
    /// Notifies workers and readers of a session, and returns when the notification is sent. For a process
    /// that may end before a [`Notifier`](super::Notifier) sends.
    ///
    /// # Errors
    /// [`crate::Error::Database`]: other processes find the work by polling.
    pub async fn announce(&self, session_id: &str) -> crate::Result<()> {
        tell(self, &Told::all(vec![EVERY_JOB.to_owned()], vec![session_id.to_owned()]), &[]).await?;
        Ok(())
    }

    /// Tells the workers that somebody reads a session live, and returns when the notification is sent.
    ///
    /// # Errors
    /// [`crate::Error::Database`]: they do not know it.
    pub async fn reads(&self, session_id: &str) -> crate::Result<()> {
        tell(self, &Told::all(Vec::new(), vec![format!("{READ}{session_id}")]), &[]).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_sessions_make_several_payloads_and_each_is_named_once() {
        let sessions: BTreeSet<String> = (0..1000).map(|n| format!("sess_{n:032}")).collect();
        let payloads = session_payloads(sessions.clone());
        assert!(payloads.len() > 1 && payloads.iter().all(|payload| payload.len() <= PAYLOAD_BYTES));
        let named: Vec<&str> = payloads.iter().flat_map(|payload| payload.split(',')).collect();
        assert_eq!(named, sessions.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(session_payloads(BTreeSet::new()).is_empty());
    }

    #[test]
    fn a_payload_may_name_a_worker() {
        assert_eq!(named("@w_1 step:"), Some(("w_1", "step:")));
        assert_eq!(named("step:"), None);
        assert_eq!(named(EVERY_JOB), None);
    }
}
