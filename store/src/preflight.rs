//! The facts of `wakeful preflight`: what the open sessions need. See [`wakeful_workflow::preflight`].

use crate::{Error, Result, Store};
use std::collections::HashMap;
use wakeful_workflow::prefix::Prefix;
use wakeful_workflow::preflight::{Need, ScheduleNeed};

/// Sessions of one page.
const PAGE: i64 = 500;

/// What the open sessions need.
#[derive(Clone, Debug, Default)]
pub struct Needs {
    pub sessions: Vec<Need>,
    /// There are more than were asked for.
    pub more: bool,
}

impl Store {
    /// Returns what up to `limit` open sessions need, the oldest first: those that are queued, run, wait for an answer, or need
    /// attention. Each page is one statement over the indexes of open sessions, and one for pinned tools that are not known yet.
    ///
    /// # Errors
    /// [`Error::Database`], [`Error::Corrupt`].
    pub async fn needs(&self, space_id: Option<&str>, limit: usize) -> Result<Needs> {
        let mut needs = Needs::default();
        let mut prefixes = HashMap::new();
        let mut after = String::new();
        loop {
            let rows = sqlx::query!(
                r#"
                with open as materialized (
                    (select session_id from conversation_sessions
                    where status in ('queued', 'running') and session_id > $1 and ($2::text is null or space_id = $2)
                    order by session_id limit $3)
                    union all
                    (select session_id from conversation_sessions
                    where status = 'waiting_input' and session_id > $1 and ($2::text is null or space_id = $2)
                    order by session_id limit $3)
                    union all
                    (select session_id from conversation_sessions
                    where status = 'needs_attention' and session_id > $1 and ($2::text is null or space_id = $2)
                    order by session_id limit $3)
                    order by session_id
                    limit $3
                )
                select s.session_id, s.space_id, s.prefix_sha256, s.data_key, json_build_object(
                    'session_id', s.session_id, 'space_id', s.space_id, 'status', s.status, 'agent', s.agent,
                    'trigger_type', s.trigger_type, 'mailbox_id', s.mailbox_id, 'policy', coalesce(s.policy, '{}'),
                    'run_steps', coalesce(r.steps, 0), 'run_tokens', coalesce(r.tokens, 0),
                    'attempts', coalesce(j.stuck, 0),
                    'outage_s', coalesce(extract(epoch from clock_timestamp() - j.outage_since)::float8, 0),
                    'context_tokens', coalesce((
                        select t.input_tokens from session_steps t where t.session_id = s.session_id
                        order by t.step_number desc limit 1), 0),
                    'has_cost', s.total_cost_micros > 0,
                    'asked_s', case when s.status = 'waiting_input' then coalesce((
                        select extract(epoch from clock_timestamp() - e.ts)::float8 from session_events e
                        where e.session_id = s.session_id and e.type = 'state_transition'
                        order by e.seq desc limit 1), 0) else 0 end,
                    'senders', coalesce((
                        select json_agg(distinct i.sender) from session_inbox i
                        where i.session_id = s.session_id and i.sender is not null), '[]'),
                    'calls', coalesce((
                        select json_agg(json_build_object('call_id', c.call_id, 'name', c.name, 'status', c.status,
                            'effect', c.effect, 'arguments', (
                                select block -> 'arguments'
                                from conversation_records m, jsonb_array_elements(m.content::jsonb) block
                                where m.conversation_id = s.conversation_id and m.message_number = c.message_number
                                    and block ->> 'call_id' = c.call_id
                                limit 1)))
                        from tool_calls c
                        where c.session_id = s.session_id
                            and (c.result_message_number is null or c.status = 'uncertain')
                            and c.status in ('invoked', 'unapproved', 'started', 'waiting', 'uncertain')), '[]'),
                    'unsent', coalesce((
                        select json_agg(distinct d.channel) from deliveries d
                        where d.session_id = s.session_id and d.status in ('queued', 'sending')), '[]'),
                    'files', coalesce((w.payload ->> 'files')::bigint, 0),
                    'bytes', coalesce((w.payload ->> 'bytes')::bigint, 0)
                )::text as "need!"
                from open
                join conversation_sessions s on s.session_id = open.session_id
                left join jobs j on j.kind = 'step' and j.session_id = s.session_id
                left join lateral (
                    select used.steps, used.tokens
                    from session_runs r
                    cross join lateral run_since_answer(r.session_id, r.run_id, r.from_step) used
                    where r.session_id = s.session_id order by r.created_at desc limit 1
                ) r on true
                left join lateral (
                    select e.payload from session_events e
                    where e.session_id = s.session_id and e.type = 'WORKSPACE_SNAPSHOT' order by e.seq desc limit 1
                ) w on true
                order by s.session_id
                "#,
                after,
                space_id,
                PAGE
            )
            .fetch_all(&self.pool)
            .await?;
            let full = rows.len() as i64 == PAGE;
            let unknown: Vec<(String, String)> = rows
                .iter()
                .filter_map(|row| Some((row.prefix_sha256.clone()?, row.space_id.clone())))
                .filter(|key| !prefixes.contains_key(key))
                .collect();
            self.read_prefixes(unknown, &mut prefixes).await?;
            for row in rows {
                if needs.sessions.len() == limit {
                    needs.more = true;
                    return Ok(needs);
                }
                after.clone_from(&row.session_id);
                let seal = self.vault.seal(row.data_key.as_deref()).await?;
                let need = if seal.is_on() { seal.open_json(row.need)? } else { row.need };
                let mut need: Need =
                    serde_json::from_str(&need).map_err(|error| Error::corrupt("session", error))?;
                if let Some(sha256) = row.prefix_sha256
                    && let Some(prefix) = prefixes.get(&(sha256, row.space_id))
                {
                    need.pinned_tools = prefix.tools.to_vec();
                }
                needs.sessions.push(need);
            }
            if !full {
                return Ok(needs);
            }
        }
    }

    /// Returns the ways by which messages are still to be sent, each with a session whose message waits; at most `limit`. A session may have
    /// ended before its messages left.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn unsent_by_channel(
        &self,
        space_id: Option<&str>,
        limit: usize,
    ) -> Result<Vec<(String, String)>> {
        let rows = sqlx::query!(
            "select distinct channel, session_id from deliveries
            where status in ('queued', 'sending') and ($1::text is null or space_id = $1)
            order by channel, session_id
            limit $2",
            space_id,
            i64::try_from(limit).unwrap_or(i64::MAX)
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows.into_iter().map(|row| (row.channel, row.session_id)).collect())
    }

    /// Returns the agents of sessions, each with its space. The index gives one after the other, however many sessions each has.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn agents_of_sessions(&self, space_id: Option<&str>) -> Result<Vec<(String, String)>> {
        let rows = sqlx::query!(
            r#"
            with recursive pairs (space_id, agent) as (
                (select space_id, agent from conversation_sessions where $1::text is null or space_id = $1
                order by space_id, agent limit 1)
                union all
                select next.space_id, next.agent
                from pairs
                cross join lateral (
                    select s.space_id, s.agent from conversation_sessions s
                    where (s.space_id, s.agent) > (pairs.space_id, pairs.agent) and ($1::text is null or s.space_id = $1)
                    order by s.space_id, s.agent
                    limit 1
                ) next
            )
            select agent as "agent!", space_id as "space_id!" from pairs limit 10000
            "#,
            space_id
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows.into_iter().map(|row| (row.agent, row.space_id)).collect())
    }

    /// Returns the sessions of an agent that rest and get their conversation's next message, the newest first, at most `limit`.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn resting_sessions(&self, agent: &str, space_id: &str, limit: usize) -> Result<Vec<String>> {
        Ok(sqlx::query_scalar!(
            "select s.session_id from conversation_sessions s
            where s.space_id = $1 and s.agent = $2 and s.status in ('created', 'completed', 'failed', 'cancelled')
                and s.trigger_type not in ('replay', 'import')
                and not exists (
                    select from conversation_sessions later
                    where later.conversation_id = s.conversation_id and later.ordinal > s.ordinal)
            order by s.session_id desc
            limit $3",
            space_id,
            agent,
            i64::try_from(limit).unwrap_or(i64::MAX)
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// How many conversations are encrypted, ended ones too.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn sealed_conversations(&self) -> Result<i64> {
        Ok(sqlx::query_scalar!(
            r#"select count(*) as "count!" from conversation_counters where data_key is not null"#
        )
        .fetch_one(&self.pool)
        .await?)
    }

    /// Returns the rules whose notifications are still to be sent.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn untold_rules(&self) -> Result<Vec<String>> {
        Ok(sqlx::query_scalar!(
            "select distinct rule from notifications where status in ('queued', 'sending') order by rule"
        )
        .fetch_all(&self.pool)
        .await?)
    }

    async fn read_prefixes(
        &self,
        unknown: Vec<(String, String)>,
        prefixes: &mut HashMap<(String, String), Prefix>,
    ) -> Result<()> {
        if unknown.is_empty() {
            return Ok(());
        }
        let (names, spaces): (Vec<String>, Vec<String>) = unknown.into_iter().unzip();
        let blobs = sqlx::query!(
            r#"select distinct b.sha256, b.space_id, b.bytes as "bytes!"
            from unnest($1::text[], $2::text[]) as asked (sha256, space_id)
            join blobs b on b.sha256 = asked.sha256 and b.space_id = asked.space_id"#,
            &names,
            &spaces
        )
        .fetch_all(&self.pool)
        .await?;
        for blob in blobs {
            let prefix = Prefix::read(&blob.sha256, &blob.bytes)
                .map_err(|error| Error::corrupt("pinned prefix", error))?;
            prefixes.insert((blob.sha256, blob.space_id), prefix);
        }
        Ok(())
    }

    /// Returns the schedules that fire.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn schedule_needs(&self, space_id: Option<&str>) -> Result<Vec<ScheduleNeed>> {
        let rows = sqlx::query!(
            r#"select name, space_id, agent, source = 'config' as "of_config!", cardinality(mail_to) > 0 as "mails!"
            from schedules
            where paused_at is null and next_at is not null and ($1::text is null or space_id = $1)
            order by space_id, name
            limit 10000"#,
            space_id
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows
            .into_iter()
            .map(|row| ScheduleNeed {
                name: row.name,
                space_id: row.space_id,
                of_config: row.of_config,
                agent: row.agent,
                mails: row.mails,
            })
            .collect())
    }

    /// Returns the oldest binary that the schema serves: the newest migration that such a binary knows. `None`: it does not say.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn oldest_served(&self) -> Result<Option<i64>> {
        Ok(sqlx::query_scalar!("select oldest from schema_serves").fetch_optional(&self.pool).await?)
    }
}
