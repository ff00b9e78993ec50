//! The chat about a herald's notice: a session of its own, which begins with the notice's texts.

use super::{Latest, NewSession, insert, insert_seeds, policy_of};
use crate::encryption::Vault;
use crate::json::from_text;
use crate::run::{self, Locked};
use crate::{Error, Result, new_id};
use sqlx::PgConnection;
use wakeful_workflow::record::{Block, Role, text_of};
use wakeful_workflow::seed::Seed;

/// How many texts of a notice's session become seeds of the chat about it, at most.
const TEXTS: i64 = 100;

/// Creates a separate session for a chat about the notice whose session is `latest`. The new session has the
/// restrictions of `latest`, but not its reply route. It gets the texts of `latest` when its first run starts
/// ([`copy_notice_texts`]), because the run of `latest` may still be working.
pub(super) async fn open_separate(
    tx: &mut PgConnection,
    vault: &Vault,
    new: &NewSession,
    latest: Latest,
    trigger_type: &str,
) -> Result<Locked> {
    let policy = match policy_of(latest.policy)? {
        Some(before) => new.policy.clone().restricted_as(&before),
        None => new.policy.clone(),
    };
    let session_id = new_id("sess");
    let new = NewSession {
        trigger_type: trigger_type.to_owned(),
        trigger_id: latest.session_id,
        policy,
        ..new.clone()
    };
    insert(tx, vault, &session_id, &new, None).await?;
    run::lock_session(tx, &session_id).await
}

/// Copies the texts of a notice's session into the chat about it, as seeds, when the chat's first run starts.
/// That run holds the conversation, so the notice's run has ended or waits for a person.
pub(crate) async fn copy_notice_texts(tx: &mut PgConnection, session: &Locked) -> Result<()> {
    // An earlier version of Wakeful copied the texts when it created the session.
    let given = sqlx::query_scalar!(
        r#"select exists (
            select from session_seed_messages where session_id = $1 and role <> 'system'
        ) as "given!""#,
        session.session_id
    )
    .fetch_one(&mut *tx)
    .await?;
    if given {
        return Ok(());
    }
    let seeds = newest_texts(tx, &session.trigger_id).await?;
    let before = sqlx::query_scalar!(
        "update conversation_sessions
        set seed_message_count = seed_message_count + $2
        where session_id = $1
        returning seed_message_count - $2 as \"before!\"",
        session.session_id,
        seeds.len() as i32
    )
    .fetch_one(&mut *tx)
    .await?;
    insert_seeds(tx, &session.session_id, &session.conversation_id, before, &seeds).await
}

/// Returns the newest texts of a session as seeds for another one. Sealed texts stay sealed: both sessions are of one
/// conversation, so they have one key.
async fn newest_texts(tx: &mut PgConnection, session_id: &str) -> Result<Vec<Seed>> {
    let records = sqlx::query!(
        r#"select role, content::text as "content!" from conversation_records
        where session_id = $1 and role in ('user', 'assistant')
        order by message_number desc
        limit $2"#,
        session_id,
        TEXTS
    )
    .fetch_all(tx)
    .await?;
    let mut seeds = Vec::new();
    for record in records.into_iter().rev() {
        let role = Role::parse(&record.role).ok_or_else(|| Error::corrupt("role", &record.role))?;
        let content: Vec<Block> = from_text("message", &record.content)?;
        let text = text_of(&content);
        if !text.trim().is_empty() {
            seeds.push(Seed { role, content: text, is_new: true });
        }
    }
    Ok(seeds)
}
