//! The data key of a conversation that begins, if its agent's conversations are encrypted.

use super::NewSession;
use crate::Result;
use crate::encryption::Vault;
use sqlx::PgConnection;

/// Makes the key of a conversation that is about to begin. It is made before the conversation's row: a key that no row has does no
/// harm.
pub(super) async fn of_new(tx: &mut PgConnection, vault: &Vault, new: &NewSession) -> Result<Option<String>> {
    if !vault.covers(&new.agent) {
        return Ok(None);
    }
    let is_there = sqlx::query_scalar!(
        r#"select exists (select from conversation_counters where conversation_id = $1) as "there!""#,
        new.conversation_id
    )
    .fetch_one(&mut *tx)
    .await?;
    if is_there { Ok(None) } else { vault.begin(tx, &new.agent, &new.conversation_id).await }
}

/// Makes the key of a conversation whose row was just written without one. [`of_new`] found another row, which an erasure has
/// deleted since.
pub(super) async fn of_begun(tx: &mut PgConnection, vault: &Vault, new: &NewSession) -> Result<()> {
    if !vault.covers(&new.agent) {
        return Ok(());
    }
    let data_key = vault.begin(tx, &new.agent, &new.conversation_id).await?;
    sqlx::query!(
        "update conversation_counters set data_key = $2 where conversation_id = $1",
        new.conversation_id,
        data_key
    )
    .execute(tx)
    .await?;
    Ok(())
}
