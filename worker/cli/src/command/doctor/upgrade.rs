//! Checks of a rolling deploy: whether the schema serves the binaries that run, and whether somebody has every agent.

use super::super::output::{age, count};
use super::Report;
use wakeful_store::queue::WorkerView;
use wakeful_store::schema::{self, Fit};
use wakeful_store::{Error, Store};

/// Reports whether the schema serves this binary. `false`: it does not, and its tables may be others.
pub(super) async fn schema(store: &Store, report: &mut Report) -> Result<bool, Error> {
    match store.check_schema().await {
        Ok(fit @ Fit::Same { .. }) => report.ok("schema", fit.said()),
        Ok(fit @ Fit::Newer { .. }) => report.warning(
            "schema",
            fit.said(),
            "fine during a rolling deploy and after a rollback; else use the newer binary here too",
        ),
        Err(Error::Schema(text)) => {
            let (text, remedy) = text.split_once(". ").unwrap_or((&text, "Run `wakeful migrate status`."));
            report.problem("schema", text, remedy);
            return Ok(false);
        }
        Err(error) => return Err(error),
    }
    Ok(true)
}

/// Reports workers of another binary, and agents that sessions wait for.
pub(super) async fn workers(store: &Store, alive: &[&WorkerView], report: &mut Report) -> Result<(), Error> {
    let number = schema::number();
    let older = alive.iter().filter(|worker| worker.schema_number.unwrap_or(0) < number).count();
    if older > 0 {
        report.ok(
            "workers",
            format!("{} of an older binary go on beside this one's", count(older as i64, "worker")),
        );
    }
    let draining = alive.iter().filter(|worker| worker.drain_asked_at.is_some()).count();
    if draining > 0 {
        report.ok(
            "workers",
            format!("{} draining: they finish what they hold", count(draining as i64, "worker")),
        );
    }
    for lacked in store.lacked_agents().await? {
        let having = alive.iter().filter(|worker| worker.has_agent(&lacked.agent, &lacked.space_id)).count();
        let since = lacked.since.map(|at| format!(" for up to {}", age(at))).unwrap_or_default();
        let what = format!("{} of space {}", count(lacked.sessions, "session"), lacked.space_id);
        if having == 0 {
            report.warning(
                "agents",
                format!("no live worker has agent {}: {what} wait{since}", lacked.agent),
                format!(
                    "start a worker whose configuration has [agents.{}], or end the runs: wakeful session cancel --filter \
                     agent={} --reason …",
                    lacked.agent, lacked.agent
                ),
            );
        } else {
            report.ok(
                "agents",
                format!(
                    "{what} wait{since} for room at {} with agent {}",
                    count(having as i64, "worker"),
                    lacked.agent
                ),
            );
        }
    }
    Ok(())
}
