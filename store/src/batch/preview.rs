//! Says what a batch would do.

use super::create::{STANDING, all_of, spread};
use super::{Chosen, NewBatch, Verb};
use crate::session::{SessionFilter, SessionSummary};
use crate::{Result, Store};
use serde::Serialize;
use std::collections::BTreeMap;

/// How many of the members a preview names. The statement takes as many of each kind.
const SAMPLE: usize = 10;

/// What a batch would do.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Preview {
    pub verb: Verb,
    pub members: i64,
    pub by_status: BTreeMap<String, i64>,
    /// What was asked for and the verb does not take, by status.
    pub skipped: BTreeMap<String, i64>,
    /// Ten of the members.
    pub sample: Vec<SessionSummary>,
}

/// The sessions in which a verb sees no difference.
#[derive(sqlx::FromRow)]
struct Alike {
    status: String,
    idle: bool,
    cancelled: bool,
    count: i64,
    /// Some of them.
    sample: Vec<String>,
}

/// What a preview knows of the members.
#[derive(Default)]
struct Counted {
    by_status: BTreeMap<String, i64>,
    skipped: BTreeMap<String, i64>,
    sample: Vec<String>,
}

impl Store {
    /// Says what [`Store::create_batch`] would do with a batch of sessions. Writes nothing.
    ///
    /// # Errors
    /// [`Error::Batch`](crate::Error::Batch) if there are too many, [`Error::Database`](crate::Error::Database).
    pub async fn preview_batch(&self, new: &NewBatch) -> Result<Preview> {
        if new.verb == Verb::Resolve {
            return Err(new.refused("a preview of effects is another one"));
        }
        let counted = match &new.chosen {
            Chosen::Filter(filter) => self.count_found(new, filter).await?,
            _ => self.count_chosen(new).await?,
        };
        Ok(Preview {
            verb: new.verb,
            members: counted.by_status.values().sum(),
            by_status: counted.by_status,
            skipped: counted.skipped,
            sample: self.sessions_by_id(&counted.sample).await?,
        })
    }

    /// Counts what a filter finds. The server counts: a filter may find 100,000 sessions, and a page shows ten.
    async fn count_found(&self, new: &NewBatch, filter: &SessionFilter) -> Result<Counted> {
        // The order by a hash takes the sample from all of them, and always the same.
        const ALIKE: &str =
            "), alike as (select status, idle, cancelled, count(*) from found group by 1, 2, 3)
            select status, idle, cancelled, count, array(
                select f.session_id from found f
                where (f.status, f.idle, f.cancelled) = (alike.status, alike.idle, alike.cancelled)
                order by hashtext(f.session_id) limit 10
            ) as sample
            from alike order by 1, 2, 3";
        let within = ("with found as materialized (", STANDING, ALIKE);
        let found: Vec<Alike> = self.find_within(within, &all_of(filter)).await?;
        new.is_not_too_large(found.iter().map(|alike| alike.count).sum())?;
        let mut counted = Counted::default();
        for alike in found {
            let (taken, status) = new.verb.looks_at(alike.status, alike.idle, alike.cancelled);
            let counts = if taken { &mut counted.by_status } else { &mut counted.skipped };
            *counts.entry(status).or_default() += alike.count;
            if taken {
                counted.sample.extend(alike.sample);
            }
        }
        counted.sample = some(counted.sample);
        Ok(counted)
    }

    /// Counts what was named one by one.
    async fn count_chosen(&self, new: &NewBatch) -> Result<Counted> {
        let found = self.choose(new).await?;
        let members = found.members.into_iter().map(|member| member.session_id).collect();
        Ok(Counted { by_status: found.by_status, skipped: found.skipped, sample: some(members) })
    }
}

/// Ten of these at most, evenly spread.
fn some(all: Vec<String>) -> Vec<String> {
    let places = spread(all.len(), SAMPLE);
    places.into_iter().map(|ordinal| all[ordinal as usize - 1].clone()).collect()
}
