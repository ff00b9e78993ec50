//! Tells people that their run takes long. A search finds the runs by the database's clock and takes no lock; the notice is
//! written under the session's lock, with a mark on the run, so each run has at most one.

use crate::delivery::deliver_jobs;
use crate::encryption::{Seal, seal_in};
use crate::run::{self, Wakes, append_events};
use crate::{Error, Result, Store, new_id};
use sqlx::PgConnection;
use wakeful_workflow::derive::NewDelivery;
use wakeful_workflow::policy::SessionPolicy;
use wakeful_workflow::told::{self, Reason};

/// When the people who wait for an agent are told so, and what.
#[derive(Clone, Copy, Debug)]
pub struct Delay<'a> {
    pub agent: &'a str,
    pub after_s: f64,
    pub text: &'a str,
}

impl Store {
    /// Returns sessions of these agents whose open run has waited or worked for longer than its agent's `after_s` without its person
    /// being told, each with its place in `delays`: at most `limit`, with ids above `after`.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn untold(
        &self,
        delays: &[Delay<'_>],
        after: &str,
        limit: i64,
    ) -> Result<Vec<(String, usize)>> {
        let agents: Vec<&str> = delays.iter().map(|delay| delay.agent).collect();
        let times: Vec<f64> = delays.iter().map(|delay| delay.after_s).collect();
        // It begins at the runs, because their index leaves out those whose person was told: in an outage nearly all were, and every
        // process asks this twice a minute. "offset 0" makes Postgres look for each session by the key.
        let found = sqlx::query!(
            r#"select newest.session_id as "session_id!", array_position($1::text[], s.agent) as "place!"
            from session_runs newest
            cross join lateral (
                select agent, runner, imported_from, status from conversation_sessions
                where session_id = newest.session_id offset 0
            ) s
            cross join lateral (
                select run_id from session_runs where session_id = newest.session_id order by created_at desc limit 1
            ) last
            where newest.delay_told_at is null
                and newest.status in ('queued', 'running', 'needs_attention')
                and newest.created_at < (select clock_timestamp() - make_interval(secs => min(t)) from unnest($2::float8[]) t)
                and newest.created_at
                    < clock_timestamp() - make_interval(secs => ($2::float8[])[array_position($1::text[], s.agent)])
                and newest.session_id > $3
                and s.agent = any($1)
                and s.status in ('queued', 'running', 'needs_attention')
                and s.runner = ''
                and s.imported_from is null
                and newest.run_id = last.run_id
            order by newest.session_id
            limit $4"#,
            &agents as &[&str],
            &times,
            after,
            limit
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(found.into_iter().map(|row| (row.session_id, row.place as usize - 1)).collect())
    }

    /// Returns whether the journal says that the run's person was told for this reason. A run that an operator retries keeps its id.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn was_told(&self, session_id: &str, run_id: &str, reason: Reason) -> Result<bool> {
        Ok(sqlx::query_scalar!(
            r#"select exists (
                select from session_events
                where session_id = $1 and run_id = $2 and type = 'PERSON_TOLD' and payload ->> 'reason' = $3
            ) as "told!""#,
            session_id,
            run_id,
            reason.as_str()
        )
        .fetch_one(&self.pool)
        .await?)
    }

    /// Tells the person who waits for the session's open run. Returns `false` and does nothing if the run is over, waits for
    /// its user, has not taken that long since it was last started or resumed, or its person was told before.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`].
    pub async fn tell_of_delay(&self, session_id: &str, delay: Delay<'_>) -> Result<bool> {
        let mut tx = self.pool.in_line(session_id).begin().await?;
        run::lock(&mut tx, session_id).await?;
        let Some(run_id) = run::newest(&mut tx, session_id).await? else { return Ok(false) };
        // The person may have answered a question after days, or an operator may have retried the run.
        let told = sqlx::query_scalar!(
            r#"update session_runs r
            set delay_told_at = clock_timestamp()
            from conversation_sessions s
            where r.run_id = $1 and s.session_id = r.session_id
                and s.status in ('queued', 'running', 'needs_attention')
                and r.delay_told_at is null
                and not exists (select from deliveries d where d.session_id = s.session_id and d.source_key = $3)
                and coalesce((
                    select e.ts from session_events e
                    where e.session_id = s.session_id and e.type = 'state_transition'
                        and e.payload ->> 'to_state' = 'queued'
                    order by e.seq desc
                    limit 1
                ), r.created_at) < clock_timestamp() - make_interval(secs => $2)
            returning s.policy"#,
            run_id,
            delay.after_s,
            format!("{}/1", Reason::Failed.key(&run_id))
        )
        .fetch_optional(&mut *tx)
        .await?;
        let Some(policy) = told else { return Ok(false) };
        let seal = seal_in(&mut tx, session_id).await?;
        let policy: SessionPolicy = match policy {
            Some(policy) => {
                let policy = seal.open_value(policy)?;
                serde_json::from_value(policy).map_err(|error| Error::corrupt("policy", error))?
            }
            None => SessionPolicy::default(),
        };
        let trigger_type = sqlx::query_scalar!(
            "select trigger_type from conversation_sessions where session_id = $1",
            session_id
        )
        .fetch_one(&mut *tx)
        .await?;
        let notice = told::notice(&policy, &trigger_type, &run_id, Reason::Delayed, delay.text);
        if let Some(notice) = &notice {
            append_events(
                &mut tx,
                session_id,
                Some(&run_id),
                None,
                Wakes::Nothing,
                std::slice::from_ref(&notice.event),
            )
            .await?;
            send(&mut tx, &seal, session_id, &notice.deliveries).await?;
        }
        crate::failpoint!("K63_tell");
        // Without a notice the mark is kept all the same, so that no search finds this run again.
        tx.commit().await?;
        crate::failpoint!("K63_told");
        Ok(notice.is_some())
    }
}

/// Puts messages of a locked session into the outbox, with the job that sends them.
async fn send(
    tx: &mut PgConnection,
    seal: &Seal,
    session_id: &str,
    deliveries: &[NewDelivery],
) -> Result<()> {
    for delivery in deliveries {
        let mut content = delivery.content.clone();
        seal.value(&mut content);
        macro_rules! statement {
            ($deliver_jobs:tt) => {
                sqlx::query!(
                    "with to_deliver as (
                        insert into deliveries
                            (delivery_id, space_id, conversation_id, channel, ordinal, session_id, source_key, content)
                        select $2, s.space_id, s.conversation_id, $3, nextval('delivery_ordinals'), s.session_id, $4,
                            $5::text::json
                        from conversation_sessions s
                        where s.session_id = $1
                        on conflict (session_id, source_key, channel) do nothing
                        returning space_id, conversation_id, channel, null::text as trace_context
                    )"
                        + $deliver_jobs,
                    session_id,
                    new_id("dlv"),
                    delivery.channel,
                    delivery.source_key,
                    content.to_string()
                )
            };
        }
        deliver_jobs!(statement).execute(&mut *tx).await?;
    }
    Ok(())
}
