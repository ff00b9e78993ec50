//! The limit on how often a step is tried.

use crate::ctx::Ctx;
use tracing::warn;
use wakeful_store::Error;
use wakeful_store::queue::{Faults, Job};
use wakeful_workflow::agent::Limits;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::session::Session;

/// Claims of this step since the last progress (`stuck`, this claim included), and how many of the earlier
/// ones lost their process (`died`). Both are 0 once this claim has made progress.
#[derive(Clone, Copy, Default)]
pub(super) struct RetryCounts {
    pub(super) stuck: i64,
    died: i64,
    /// One more than `died` if an earlier claim of the step made progress: its worker may have died too, and `died` does not
    /// count that.
    deaths: i64,
}

impl RetryCounts {
    pub(super) fn of(job: &Job) -> RetryCounts {
        let progressed = job.attempt > job.stuck && job.died > 0;
        let died = i64::from(job.died);
        RetryCounts { stuck: i64::from(job.stuck), died, deaths: died + i64::from(progressed) }
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
    /// attempts. Deaths are not counted among them, because another job in the same process may have caused them:
    /// [`Limits::DEATHS`] of them end the run. `during` is what the step does now.
    pub(super) fn used_up(
        self,
        limit: i64,
        last_error: Option<&str>,
        during: impl FnOnce() -> Option<String>,
    ) -> Option<Fault> {
        if self.deaths >= Limits::DEATHS {
            return Some(Fault::WorkerDied { attempts: self.deaths, during: during() });
        }
        let attempts = self.stuck - 1;
        (self.ended_by_faults() > limit).then(|| match last_error {
            Some(error) => Fault::Stuck { attempts, last_error: error.to_owned() },
            None => Fault::WorkerDied { attempts, during: during() },
        })
    }

    /// Warns that workers died at this step, and says what it does: a tool that kills its process is found before it has taken
    /// several.
    pub(super) fn warn_of_deaths(self, session: &Session) {
        if self.died > 0 {
            let deaths = self.deaths.max(2);
            let doing = doing(session).unwrap_or_else(|| "called its model".to_owned());
            warn!(
                session.id = %session.session_id,
                deaths,
                "Workers died at this step, most likely while it {doing}. At {} its run fails",
                Limits::DEATHS
            );
        }
    }
}

/// What a worker does at this step beside calling the model: the calls of the open turn that have no result. `None`: none.
pub(super) fn doing(session: &Session) -> Option<String> {
    let turn = session.open_turn()?;
    let calls: Vec<String> =
        turn.without_result.iter().map(|call| format!("{} ({})", call.name, call.call_id)).collect();
    (!calls.is_empty()).then(|| format!("ran {}", calls.join(", ")))
}

/// Claims without progress after which the run of an unreadable session fails.
pub(super) const UNREADABLE_ATTEMPTS: i64 = 5;

/// Fewer faults of the database than this never end a run, however long ago the first one was.
pub(super) const FEWEST_FAULTS: i32 = 3;

/// The reason with which the run of an unreadable session fails.
pub(super) fn unreadable(error: &Error) -> String {
    format!(
        "the session cannot be read: {error}. Remedy: repair the row that the error names, then retry the session"
    )
}

/// The reason why the run of a session whose statements fail again and again waits for an operator.
pub(super) fn refused(error: &Error, faults: Faults) -> String {
    format!(
        "the database failed the step {} times within {:.0} s: {error}. Remedy: mend what the error names (see the server's \
         log, and `wakeful doctor`), then retry the session; it goes on where it stood",
        faults.times, faults.lasted_s
    )
}

/// Records on the job's row that the database failed its step, so that people see it while the claim goes on. Returns `Some` when
/// that has gone on for too long and the run is to be given up. While the database as a whole is away this statement fails too,
/// and nothing is counted.
pub(super) async fn note(ctx: &Ctx, job: &Job, error: &Error) -> Option<Faults> {
    match ctx.store.note_fault(&job.lease, &error.to_string()).await {
        Ok(faults) => {
            let limit = ctx.config.queue.database_faults.as_secs_f64();
            faults.filter(|faults| faults.times >= FEWEST_FAULTS && faults.lasted_s >= limit)
        }
        Err(error) => {
            warn!(%error, "The fault could not be recorded on the job's row");
            None
        }
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
                let tries = RetryCounts { stuck: died + 1, died, deaths: died };
                assert_eq!(tries.used_up(limit, None, || None), None, "{limit} {died}");
                assert_eq!(tries.ended_by_faults(), 1, "a first fault counts as one");
            }
        }
        // However many attempts the agent has, five deaths are enough.
        let during = || Some("ran charge (call_1)".to_owned());
        for limit in 1..=20 {
            let dead = RetryCounts { stuck: 6, died: 5, deaths: 5 };
            let fault = dead.used_up(limit, None, during).expect("it is over");
            assert!(fault.to_string().ends_with("died each time, while it ran charge (call_1)"), "{fault}");
            assert!(RetryCounts { stuck: 5, died: 4, deaths: 5 }.used_up(limit, None, || None).is_some());
        }
    }

    #[test]
    fn faults_use_up_attempts_one_by_one() {
        assert_eq!(RetryCounts { stuck: 2, died: 0, deaths: 0 }.used_up(2, Some("429"), || None), None);
        let stuck = RetryCounts { stuck: 3, died: 0, deaths: 0 }.used_up(2, Some("429"), || None);
        assert_eq!(stuck, Some(Fault::Stuck { attempts: 2, last_error: "429".to_owned() }));
        assert_eq!(RetryCounts::default().ended_by_faults(), 1);
    }
}
