//! What was said before the session began: seeds that are no system prompt. The model sees them, and they have no number.

use crate::{Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;

/// A message from before the session: of an imported chat, of a task of Absurd, or of the conversation's session before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EarlierMessage {
    /// Its place among the messages that the session begins with.
    pub ordinal: i32,
    /// `user` or `assistant`.
    pub role: String,
    pub text: String,
    /// When it was said, if that is known.
    pub said_at: Option<DateTime<Utc>>,
}

impl Store {
    /// The newest `limit` messages from before the session, oldest first, and no more than have about `bytes` bytes together.
    ///
    /// # Errors
    /// [`crate::Error::Database`], [`crate::Error::Corrupt`].
    pub async fn earlier_messages(
        &self,
        session_id: &str,
        limit: i64,
        bytes: i64,
    ) -> Result<Vec<EarlierMessage>> {
        let rows = sqlx::query!(
            r#"select ordinal as "ordinal!", role as "role!", content as "content!", "timestamp" as said_at
            from (
                select newest.*, row_number() over seeds as place, sum(octet_length(content)) over seeds as weighed
                from (
                    select ordinal, role, content, "timestamp"
                    from session_seed_messages
                    where session_id = $1 and role <> 'system'
                    order by ordinal desc
                    limit $2
                ) newest
                window seeds as (order by ordinal desc rows unbounded preceding)
            ) weighed
            where place = 1 or weighed <= $3
            order by ordinal desc"#,
            session_id,
            limit,
            bytes
        )
        .fetch_all(&self.pool)
        .await?;
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let seal = self.seal_of(session_id).await?;
        let messages = rows.into_iter().rev().map(|row| {
            Ok(EarlierMessage {
                ordinal: row.ordinal,
                role: row.role,
                text: seal.open(row.content)?,
                said_at: row.said_at.and_then(DateTime::from_timestamp_millis),
            })
        });
        messages.collect()
    }
}
