//! The audit: who did what, on which row, why, from where, when, and how it ended.
//!
//! A write's row commits with the write: see [`act`]. A request that changed nothing (a duplicate) and a refused one get their
//! rows at their end, each in a commit of its own. Refusals are bounded, because strangers cause them: the first of an actor
//! (address, kind, token, user) and verb is written at once, the next ones are counted, and one row a [`WINDOW`] says how
//! many. More than [`VERBS`] verbs of an actor are counted together, and so are actors beyond [`ACTORS`]. Strangers have
//! places of their own, so they do not hide what others are refused.

pub mod act;
mod list;

use crate::erase::needs_role;
use crate::{Error, Result, Store};
use act::Act;
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long refusals are counted before a row says how many they were.
pub const WINDOW: Duration = Duration::from_secs(600);
/// How many strangers, and how many actors with a token, have rows of their own in one window.
pub const ACTORS: usize = 32;
/// How many verbs of one actor have rows of their own in one window.
pub const VERBS: usize = 8;

/// How many old rows one transaction deletes.
const BATCH: i64 = 10_000;

/// One row of the audit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, sqlx::FromRow)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Audited {
    pub audit_id: i64,
    pub at: DateTime<Utc>,
    pub actor_kind: String,
    pub actor: String,
    pub token_id: Option<String>,
    pub user_id: Option<String>,
    pub verb: String,
    pub target: Option<String>,
    pub space_id: Option<String>,
    pub reason: Option<String>,
    pub address: Option<String>,
    /// `done` or `refused`.
    pub outcome: String,
    /// Of a refused request: the status of HTTP.
    pub status: Option<i32>,
    pub times: i64,
}

/// Which rows to list.
#[derive(Clone, Debug, Default)]
pub struct AuditFilter {
    /// The actor's name, token or user.
    pub actor: Option<String>,
    /// The verb, or its beginning up to the point.
    pub verb: Option<String>,
    pub target: Option<String>,
    /// Only what was about this space.
    pub space: Option<String>,
    pub outcome: Option<String>,
    pub since: Option<DateTime<Utc>>,
    /// The last row of the page before.
    pub before: Option<i64>,
    pub limit: i64,
}

/// Refusals of this process that are in no row yet.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<Window>);

/// Who is refused.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Actor {
    address: Option<String>,
    kind: &'static str,
    token_id: Option<String>,
    user_id: Option<String>,
}

impl Actor {
    fn of(act: &Act) -> Actor {
        Actor {
            address: act.address.clone(),
            kind: act.actor_kind,
            token_id: act.token_id.clone(),
            user_id: act.user_id.clone(),
        }
    }

    /// Returns whether the actor gave no proof of who it is. Anyone can be such an actor.
    fn is_stranger(&self) -> bool {
        self.kind == "stranger"
    }
}

#[derive(Debug)]
struct Window {
    began: Instant,
    by_actor: HashMap<Actor, Verbs>,
    others: Option<Counted>,
}

/// What one actor was refused.
#[derive(Debug, Default)]
struct Verbs {
    by_verb: HashMap<String, Counted>,
    others: Option<Counted>,
}

impl Default for Window {
    fn default() -> Window {
        Window { began: Instant::now(), by_actor: HashMap::new(), others: None }
    }
}

/// What came after the first refusal.
#[derive(Debug)]
struct Counted {
    last: Act,
    status: i32,
    times: i64,
}

impl Refusals {
    /// Counts a refusal. `true`: it is the first of its actor and verb, and gets a row of its own.
    fn count(&self, act: &Act, status: i32) -> bool {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let actor = Actor::of(act);
        let is_stranger = actor.is_stranger();
        let room = window.by_actor.contains_key(&actor)
            || window.by_actor.keys().filter(|one| one.is_stranger() == is_stranger).count() < ACTORS;
        if !room {
            let last = Act { address: None, actor: "several".to_owned(), ..act.clone() };
            count_one(&mut window.others, last, status);
            return false;
        }
        let verbs = window.by_actor.entry(actor).or_default();
        if let Some(counted) = verbs.by_verb.get_mut(&act.verb) {
            *counted = Counted { last: act.clone(), status, times: counted.times + 1 };
            return false;
        }
        if verbs.by_verb.len() < VERBS {
            verbs.by_verb.insert(act.verb.clone(), Counted { last: act.clone(), status, times: 0 });
            return true;
        }
        count_one(&mut verbs.others, act.clone(), status);
        false
    }

    /// Ends the window, if it is over or `now`, and returns what it counted.
    fn end(&self, now: bool) -> Vec<Counted> {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !now && window.began.elapsed() < WINDOW {
            return Vec::new();
        }
        let ended = std::mem::take(&mut *window);
        let verbs = ended.by_actor.into_values();
        let counted = verbs.flat_map(|verbs| verbs.by_verb.into_values().chain(verbs.others));
        counted.chain(ended.others).filter(|counted| counted.times > 0).collect()
    }
}

fn count_one(others: &mut Option<Counted>, last: Act, status: i32) {
    let times = others.as_ref().map_or(0, |others| others.times) + 1;
    *others = Some(Counted { last, status, times });
}

impl Store {
    /// Writes the row of an act that changed nothing.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn audit(&self, act: &Act) -> Result<()> {
        Ok(act::insert(&mut *self.pool.of_installation().acquire().await?, act, "done", None, 1).await?)
    }

    /// Writes or counts a refused request.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn audit_refusal(&self, act: &Act, status: u16) -> Result<()> {
        self.audit_refusals(false).await?;
        if self.refusals.count(act, status.into()) {
            let mut connection = self.pool.of_installation().acquire().await?;
            act::insert(&mut connection, act, "refused", Some(status.into()), 1).await?;
        }
        Ok(())
    }

    /// Writes what was counted, if the window is over, or `now`.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn audit_refusals(&self, now: bool) -> Result<()> {
        for counted in self.refusals.end(now) {
            let mut connection = self.pool.of_installation().acquire().await?;
            act::insert(&mut connection, &counted.last, "refused", Some(counted.status), counted.times)
                .await?;
        }
        Ok(())
    }

    /// Deletes the rows of the audit that are older than `before`, in the role `wakeful_auditor`, and says how many there
    /// were. The act itself is a row of the audit, and commits with the first of them. The database keeps what is younger
    /// than 30 days.
    ///
    /// # Errors
    /// [`Error::NotErased`] if this user of the database may not take the role. [`Error::Database`].
    pub async fn delete_audit(&self, before: DateTime<Utc>) -> Result<u64> {
        let (mut deleted, mut first) = (0, true);
        loop {
            let mut tx = self.pool.begin().await?;
            let taken = sqlx::query!("set local role wakeful_auditor").execute(&mut *tx).await;
            taken.map_err(|error| no_auditor(error.into()))?;
            let batch = sqlx::query!(
                "delete from audit_log
                where audit_id in (
                    select audit_id from audit_log
                    -- This host's clock may be ahead of the server's.
                    where at < least($1, clock_timestamp() - interval '30 days')
                    order by audit_id limit $2)",
                before,
                BATCH
            );
            let batch =
                batch.execute(&mut *tx).await.map_err(|error| no_auditor(error.into()))?.rows_affected();
            if first {
                tx.commit().await?
            } else {
                tx.commit_part().await?
            }
            first = false;
            deleted += batch;
            if batch < BATCH as u64 {
                return Ok(deleted);
            }
        }
    }

    /// Counts the rows of the audit that are older than so many days: at most 1,000,000 are counted.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn old_audit(&self, days: i32) -> Result<i64> {
        Ok(sqlx::query_scalar!(
            r#"select count(*) as "rows!" from (
                select from audit_log where at < clock_timestamp() - make_interval(days => $1) limit 1000000
            ) old"#,
            days
        )
        .fetch_one(&self.pool)
        .await?)
    }
}

/// Says what is missing if the database does not let us delete from the audit.
fn no_auditor(error: Error) -> Error {
    needs_role(error, "wakeful_auditor", "delete from the audit")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_refusals_makes_a_bounded_number_of_rows() {
        let refusals = Refusals::default();
        let of = |address: usize, verb: usize| Act {
            address: Some(address.to_string()),
            verb: verb.to_string(),
            ..Act::default()
        };
        let mut rows = 0;
        for round in 0..100 {
            for address in 0..100 {
                for verb in 0..10 {
                    rows += usize::from(refusals.count(&of(address, verb), 401));
                }
            }
            assert_eq!(rows, ACTORS * VERBS, "round {round}");
        }
        assert!(refusals.end(false).is_empty(), "the window goes on");
        let counted = refusals.end(true);
        assert_eq!(counted.len(), ACTORS * (VERBS + 1) + 1);
        assert_eq!(counted.iter().map(|counted| counted.times).sum::<i64>(), 100_000 - rows as i64);
        assert!(refusals.end(true).is_empty());
    }

    #[test]
    fn what_one_is_refused_hides_nothing_of_another() {
        let refusals = Refusals::default();
        for address in 0..1000 {
            let address = Some(address.to_string());
            refusals.count(&Act { actor_kind: "stranger", address, ..Act::default() }, 401);
        }
        let of = |token: &str, user: Option<&str>, verb: &str| Act {
            address: Some("1".to_owned()),
            token_id: Some(token.to_owned()),
            user_id: user.map(str::to_owned),
            verb: verb.to_owned(),
            ..Act::default()
        };
        for act in [of("a", None, "x"), of("a", None, "y"), of("b", None, "x"), of("a", Some("ann"), "x")] {
            assert!(refusals.count(&act, 403), "{act:?}");
            assert!(!refusals.count(&act, 403), "{act:?}");
        }
    }
}
