//! A session as one side of a comparison.

use crate::{Error, Result, Store};
use wakeful_workflow::diff::{Side, Step};
use wakeful_workflow::event::Event;
use wakeful_workflow::record::Usage;

impl Store {
    /// The session's data for [`wakeful_workflow::diff::diff`].
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Corrupt`], [`Error::Database`].
    pub async fn side(&self, session_id: &str) -> Result<Side> {
        let session = self.hydrate(session_id).await?;
        // The rows read below may be newer than the hydrated session. Newer ones belong to messages that were
        // not read, so they do not matter.
        let model = sqlx::query_scalar!(
            "select model_id from conversation_sessions where session_id = $1",
            session_id
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })?;
        let steps = sqlx::query!(
            r#"
            select from_message_number, to_message_number, input_tokens, output_tokens, cached_tokens,
                cache_write_tokens, cost_micros,
                (extract(epoch from committed_at - started_at) * 1000)::bigint as "time_ms!"
            from session_steps
            where session_id = $1
            "#,
            session_id
        )
        .fetch_all(&self.pool)
        .await?;
        let steps: Vec<Step> = steps
            .into_iter()
            .map(|row| Step {
                from_message_number: row.from_message_number,
                to_message_number: row.to_message_number,
                usage: Usage {
                    input_tokens: row.input_tokens.into(),
                    output_tokens: row.output_tokens.into(),
                    cached_tokens: row.cached_tokens.into(),
                    cache_write_tokens: row.cache_write_tokens.into(),
                    cost_micros: row.cost_micros,
                },
                time_ms: row.time_ms,
            })
            .collect();
        let calls = sqlx::query!(
            "select type as kind, payload from session_events
            where session_id = $1 and type in ('LLM_CALLED', 'GEN_COMPLETE')
            order by seq",
            session_id
        )
        .fetch_all(&self.pool)
        .await?;
        let events: Vec<Event> = calls
            .into_iter()
            .map(|row| {
                Event::from_row(&row.kind, row.payload).map_err(|error| Error::corrupt("event", error))
            })
            .collect::<Result<_>>()?;
        let answers = Side::answers(&session.records, &steps, &events);
        Ok(Side::of(session, model, answers))
    }
}
