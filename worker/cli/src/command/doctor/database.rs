//! Checks of the database itself: whether it takes connections and writes, and what this process's role may do there.

use super::Report;
use wakeful_config::Config;
use wakeful_store::diagnosis::ServerFacts;
use wakeful_store::error::Outage;
use wakeful_store::{Error, Store};

/// The check of the rights.
const RIGHTS: &str = "rights";

/// What helps when the server gives no connection. The server says which of its limits it is.
const NO_CONNECTION: &str = "see who has them: select usename, application_name, count(*) from pg_stat_activity group by 1, 2. End what \
    should not be there, raise the limit that it names (max_connections of the server, `alter role … connection limit`, or that of the \
    database or the pooler), or run fewer processes or a lower [database] max_connections";

/// Reports that no connection could be opened.
pub(super) fn unreached(address: &str, error: &Error, report: &mut Report) {
    if error.outage() == Some(Outage::Crowded) {
        let said = format!("{address} has no connection left for this role: {error}");
        report.problem("connections", said, NO_CONNECTION);
        return;
    }
    report.problem(
        "database",
        format!("{address}: {error}"),
        "is Postgres up, and can this host reach it? Check host, port, user, password and name in DATABASE_URL",
    );
}

/// Reports why the checks of the database ended before the last of them.
pub(super) fn stopped(error: &Error, report: &mut Report) {
    if error.outage() == Some(Outage::Crowded) {
        let said = format!("the database has too few connections left for this role: {error}");
        report.problem("connections", said, NO_CONNECTION);
    } else if report.checks.iter().any(|check| check.name == RIGHTS && check.remedy.is_some()) {
        report.warning(
            "database",
            format!("the checks after this were not made: {error}"),
            "mend the rights first; then run `wakeful doctor` again",
        );
    } else {
        report.problem("database", error.to_string(), "look at the server's log");
    }
}

/// Reports a database that answers and takes no writes.
pub(super) fn writes(facts: &ServerFacts, report: &mut Report) {
    if facts.standby {
        report.problem(
            "writes",
            "it takes no writes: it is a standby, which follows another server",
            "name the primary in DATABASE_URL, or promote this server if the primary is lost",
        );
    } else if facts.read_only {
        report.problem(
            "writes",
            "it takes no writes: default_transaction_read_only is on for this role, this database or the server",
            "see who set it, and whether that was meant: `\\drds` in psql, and the server's configuration. Then: alter role … reset \
             default_transaction_read_only, or alter database … reset …, or alter system reset …",
        );
    }
}

/// Reports rights that work needs and that the role lacks: each would fail a step, a message or a timer when it is needed.
pub(super) async fn rights(store: &Store, report: &mut Report) -> Result<(), Error> {
    const NAMED: usize = 6;
    let lacked = store.lacked_rights().await?;
    if lacked.of.is_empty() {
        report.ok(RIGHTS, format!("{} may do all that work needs", lacked.role));
        return Ok(());
    }
    let mut named: Vec<String> =
        lacked.of.iter().take(NAMED).map(|one| format!("{} on {}", one.rights.join(", "), one.of)).collect();
    if lacked.of.len() > NAMED {
        named.push(format!("more on {} others", lacked.of.len() - NAMED));
    }
    report.problem(
        RIGHTS,
        format!("{} may not do all that work needs. It lacks {}", lacked.role, named.join("; ")),
        "run deploy/roles.sql in this database (again after each migration), as wakeful_owner or a superuser, and let `serve` log in \
         as wakeful_runtime: psql --set=ON_ERROR_STOP=1 --file=deploy/roles.sql",
    );
    Ok(())
}

/// Without the configured token, every program on this machine may do everything, whatever other tokens there are.
pub(super) async fn tokens(config: &Config, store: &Store, report: &mut Report) -> Result<(), Error> {
    if config.server.token.is_some() {
        return Ok(());
    }
    let ids: Vec<String> =
        store.tokens(None, None, 10_000).await?.into_iter().map(|token| token.token_id).collect();
    let in_force = store.tokens_in_force(&ids).await?.len();
    if in_force > 0 {
        report.warning(
            "tokens",
            format!(
                "{} in force, and yet everybody on this machine is the server's admin without one",
                if in_force == 1 { "1 token is".to_owned() } else { format!("{in_force} tokens are") }
            ),
            "set WAKEFUL_TOKEN: then every request needs a token",
        );
    }
    Ok(())
}

/// `serve` needs no more than the runtime role of `deploy/roles.sql`.
pub(super) async fn role(config: &Config, store: &Store, report: &mut Report) -> Result<(), Error> {
    let facts = store.role_facts().await?;
    if config.retention.any() && !facts.retention_role {
        report.warning(
            "retention",
            "`[retention]` is set, and the role wakeful_retention is not there: `wakeful retention run` can delete nothing",
            "as a superuser: psql \"$DATABASE_URL\" --file=deploy/roles.sql",
        );
    }
    let mut more = Vec::new();
    if facts.superuser {
        more.push("is a superuser, so it sees the rows of every space");
    }
    if facts.sees_all_spaces && !facts.superuser {
        more.push("sees the rows of every space, because row-level security does not bind it");
    }
    if facts.ddl {
        more.push("may change tables");
    }
    if facts.rewrites_logs {
        more.push("may change or empty the logs");
    }
    if more.is_empty() {
        report.ok("role", format!("{} has the rights that work needs, and no more", facts.role));
    } else {
        report.warning(
            "role",
            format!("{} {}", facts.role, more.join(", and ")),
            "in production, run deploy/roles.sql and let `serve` log in as wakeful_runtime; migrations need more",
        );
    }
    Ok(())
}
