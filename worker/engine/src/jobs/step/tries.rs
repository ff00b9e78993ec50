//! The limit on how often a step is tried.

use crate::ctx::Ctx;
use tracing::warn;
use wakeful_store::Error;
use wakeful_store::queue::Job;
use wakeful_workflow::agent::Limits;
use wakeful_workflow::fault::Fault;

/// Claims of this step since the last progress (`stuck`, this claim included), and how many of the earlier
/// ones lost their process (`died`). Both are 0 once this claim has made progress.
#[derive(Clone, Copy, Default)]
pub(super) struct RetryCounts {
    pub(super) stuck: i64,
    died: i64,
}

impl RetryCounts {
    pub(super) fn of(job: &Job) -> RetryCounts {
        RetryCounts { stuck: i64::from(job.stuck), died: i64::from(job.died) }
    }

    /// Returns whether each earlier claim of this step gave the job back.
    pub(super) fn no_worker_died(self) -> bool {
        self.died == 0
    }

    /// Returns how many claims gave the job back after a fault. Counts the present claim as one of them.
    pub(super) fn ended_by_faults(self) -> i64 {
        (self.stuck - self.died).max(1)
    }

    /// Returns the fault that ends the run if no attempt is left, where `limit` is the agent's number of
    /// attempts. Deaths use them up only at [`Limits::DEATHS`] or at `limit`, whichever is more, because
    /// another job in the same process may have caused them.
    pub(super) fn used_up(self, limit: i64, last_error: Option<&str>) -> Option<Fault> {
        let attempts = self.stuck - 1;
        if self.died < limit.max(Limits::DEATHS) && self.ended_by_faults() <= limit {
            return None;
        }
        Some(match last_error {
            Some(error) => Fault::Stuck { attempts, last_error: error.to_owned() },
            None => Fault::WorkerDied { attempts },
        })
    }
}

/// Claims without progress after which the run of an unreadable session fails.
const UNREADABLE_ATTEMPTS: i64 = 5;

/// The same for a session whose statements the database refuses: with the delays between them, about a quarter of an hour.
const REFUSED_ATTEMPTS: i64 = 20;

/// Returns after how many claims without progress the run fails, when `error` ends the last one.
pub(super) fn most(error: &Error) -> i64 {
    if matches!(error, Error::Corrupt { .. }) { UNREADABLE_ATTEMPTS } else { REFUSED_ATTEMPTS }
}

/// The reason with which such a run fails.
pub(super) fn hopeless(error: &Error) -> String {
    if matches!(error, Error::Corrupt { .. }) {
        return format!(
            "the session cannot be read: {error}. Remedy: repair the row that the error names, then retry the session"
        );
    }
    format!(
        "the database refuses the step: {error}. Remedy: mend what the error names (see the server's log, and `wakeful \
         doctor`), then retry the session; it goes on where it stood"
    )
}

/// Records on the job's row that the database interrupts its step again and again, so that people see it while the claim goes
/// on. This statement touches no other table, so it works when the step's own statement does not.
pub(super) async fn note(ctx: &Ctx, job: &Job, faults: i32, error: &Error) {
    if faults > 1
        && let Err(error) = ctx.store.note_fault(&job.lease, &format!("{error} ({faults} times)")).await
    {
        warn!(%error, "The fault could not be recorded on the job's row");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deaths_that_a_neighbour_may_have_caused_use_up_no_attempt() {
        for limit in 1..=8 {
            // A job that kills its worker ends the claims of its neighbours too: twice, and once more each
            // time it makes progress.
            for died in 0..5 {
                let tries = RetryCounts { stuck: died + 1, died };
                assert_eq!(tries.used_up(limit, None), None, "{limit} {died}");
                assert_eq!(tries.ended_by_faults(), 1, "a first fault counts as one");
            }
        }
        let dead = RetryCounts { stuck: 6, died: 5 };
        assert_eq!(dead.used_up(1, None), Some(Fault::WorkerDied { attempts: 5 }));
        assert_eq!(dead.used_up(6, None), None);
        assert!(RetryCounts { stuck: 7, died: 6 }.used_up(6, None).is_some());
    }

    #[test]
    fn faults_use_up_attempts_one_by_one() {
        assert_eq!(RetryCounts { stuck: 2, died: 0 }.used_up(2, Some("429")), None);
        let stuck = RetryCounts { stuck: 3, died: 0 }.used_up(2, Some("429"));
        assert_eq!(stuck, Some(Fault::Stuck { attempts: 2, last_error: "429".to_owned() }));
        assert_eq!(RetryCounts::default().ended_by_faults(), 1);
    }
}
