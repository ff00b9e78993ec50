//! An export is an act: the audit says who took which session, when and where to. An erasure reads it.

use crate::audit::act;
use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use tracing::warn;

/// The verb of the audit.
pub const VERB: &str = "session.export";

/// A bundle that somebody took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Taken {
    pub session_id: String,
    pub at: DateTime<Utc>,
    /// Who took it.
    pub actor: String,
    /// What was said of it: the file that it was written to, and whether it was redacted.
    pub reason: Option<String>,
    /// Where it was asked from.
    pub address: Option<String>,
}

impl Store {
    /// Writes the export's row. It waits for an erasure of the session, and an erasure waits for it.
    pub(super) async fn record_export(&self, session_id: &str) -> Result<()> {
        let Some(act) = act::row() else { return Ok(()) };
        let written = sqlx::query!(
            "insert into audit_log (actor_kind, actor, token_id, user_id, verb, target, space_id, reason, address, outcome)
            select a.actor_kind, a.actor, a.token_id, a.user_id, $3, s.session_id, s.space_id, a.reason, a.address, 'done'
            from (select session_id, space_id from conversation_sessions where session_id = $2 for key share) s,
                jsonb_to_record($1::text::jsonb) as a (actor_kind text, actor text, token_id text, user_id text, reason text,
                    address text)",
            act,
            session_id,
            VERB
        )
        .execute(&self.pool)
        .await
        .map_err(Error::from);
        match written {
            Ok(written) if written.rows_affected() == 0 => {
                return Err(Error::NotFound { what: "session", id: session_id.to_owned() });
            }
            Ok(_) => {}
            // A role that only reads, or a server that does. It can read the tables themselves, too.
            Err(Error::Database(sqlx::Error::Database(error)))
                if matches!(error.code().as_deref(), Some("42501" | "25006")) =>
            {
                warn!(session.id = session_id, %error, "An erasure will not know of this export");
            }
            Err(error) => return Err(error),
        }
        act::is_written();
        Ok(())
    }
}

/// The exports of these sessions that the audit knows of.
pub(crate) async fn taken(tx: &mut PgConnection, sessions: &[String]) -> Result<Vec<Taken>> {
    Ok(sqlx::query_as!(
        Taken,
        r#"select target as "session_id!", at, actor, reason, address from audit_log
        where verb = $1 and target = any($2) and outcome = 'done'
        order by audit_id"#,
        VERB,
        sessions
    )
    .fetch_all(tx)
    .await?)
}

impl std::fmt::Display for Taken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Taken { session_id, at, actor, reason, address } = self;
        write!(f, "the bundle of {session_id} that {actor} took at {}", at.format("%Y-%m-%d %H:%M:%S UTC"))?;
        if let Some(address) = address {
            write!(f, " from {address}")?;
        }
        if let Some(reason) = reason {
            write!(f, " ({reason})")?;
        }
        Ok(())
    }
}
