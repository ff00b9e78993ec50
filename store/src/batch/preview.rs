//! Says what a batch would do.

use super::create::{STANDING, all_of};
use super::{Chosen, NewBatch, Verb};
use crate::session::{SessionFilter, SessionSummary};
use crate::{Result, Store};
use serde::Serialize;
use std::collections::BTreeMap;

/// How many of the members a preview names.
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
        counted.sample = spread(counted.sample);
        Ok(counted)
    }

    /// Counts what was named one by one.
    async fn count_chosen(&self, new: &NewBatch) -> Result<Counted> {
        let found = self.choose(new).await?;
        let members = found.members.into_iter().map(|member| member.session_id).collect();
        Ok(Counted { by_status: found.by_status, skipped: found.skipped, sample: spread(members) })
    }
}

/// Ten of what is given at most, evenly spread.
fn spread(all: Vec<String>) -> Vec<String> {
    let step = all.len().div_ceil(SAMPLE).max(1);
    all.into_iter().step_by(step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_spread_over_all_and_has_ten_at_most() {
        let some = |count: usize| (0..count).map(|n| n.to_string()).collect::<Vec<_>>();
        assert_eq!(spread(some(0)), [""; 0]);
        assert_eq!(spread(some(10)), some(10));
        assert_eq!(spread(some(11)), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(spread(some(95)), ["0", "10", "20", "30", "40", "50", "60", "70", "80", "90"]);
    }
}
