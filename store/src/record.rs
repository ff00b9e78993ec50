//! Messages by their numbers, as the steps wrote them.

use crate::hydrate::from_text;
use crate::{Error, Result, Store};
use wakeful_workflow::record::{Record, Role};

impl Store {
    /// The session's messages above `after` up to `to`, in order: what a step left, by the pointers of its cached result.
    /// Other sessions of the conversation may have numbers in between; theirs are not among them.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Database`].
    pub async fn messages_between(&self, session_id: &str, after: i64, to: i64) -> Result<Vec<Record>> {
        let rows = sqlx::query!(
            r#"
            select message_number, run_id, step_number, role, content::text as "content!", internal,
                details::text as "details!"
            from conversation_records
            where session_id = $1 and message_number > $2 and message_number <= $3
            order by message_number
            "#,
            session_id,
            after,
            to
        )
        .fetch_all(&self.pool)
        .await?;
        rows.into_iter()
            .map(|row| {
                Ok(Record {
                    message_number: row.message_number,
                    run_id: row.run_id.into(),
                    step_number: row.step_number,
                    role: Role::parse(&row.role).ok_or_else(|| Error::corrupt("role", &row.role))?,
                    content: from_text("message", &row.content)?,
                    internal: row.internal,
                    details: from_text("message details", &row.details)?,
                })
            })
            .collect()
    }
}
