//! Deletes conversations that ended long ago, by the age that the configuration gives each kind of end.
//!
//! A conversation goes as a whole, because its messages are numbered through all its sessions. It is due when each of its
//! sessions has ended, and nothing has happened in any of them for longer than that session's rule says. It stays while a
//! hold covers it, while a job waits in it, and while a fork of it stays: the next run takes it after its fork.
//!
//! The walk goes from the oldest conversation, in pages. Each page is an erasure of its own: it has a receipt, and if the
//! process dies, the next erasure or retention finishes it.

use super::{Pending, blobs, explained, holds, keys};
use crate::audit::act;
use crate::export::taken;
use crate::fork::hold_off_forks;
use crate::pool::Transaction;
use crate::{Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::json;
use sha2::{Digest, Sha256};
use sqlx::PgConnection;
use std::collections::BTreeMap;
use uuid::Uuid;

/// After how many days without an event a session may be deleted, by its status. `None`: never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Rules {
    /// Completed, cancelled, archived, terminated.
    pub ended_days: Option<i32>,
    /// Failed, or in need of attention.
    pub failed_days: Option<i32>,
    /// Waiting for a person's answer, or never begun.
    pub waiting_days: Option<i32>,
    /// Mails that woke no session, by the day they came.
    pub dropped_mails_days: Option<i32>,
}

impl Rules {
    /// The shortest age at which a conversation can be due.
    fn shortest(&self) -> Option<i32> {
        [self.ended_days, self.failed_days, self.waiting_days].into_iter().flatten().min()
    }
}

/// A place in the walk: the conversation that was looked at last.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    created_at: DateTime<Utc>,
    conversation_id: String,
}

/// What one page of the walk found, or deleted.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Page {
    /// Conversations that are due.
    pub conversations: Vec<String>,
    /// Their sessions.
    pub sessions: Vec<String>,
    /// Conversations that are due and stay, because a hold covers them.
    pub held: Vec<String>,
    /// When the oldest conversation that is due began.
    pub oldest: Option<DateTime<Utc>>,
    /// Deleted rows by table. Empty for a plan.
    pub rows: BTreeMap<String, i64>,
    /// The receipt, if something was deleted.
    pub erasure_id: Option<String>,
    /// Where the next page begins. `None`: this was the last one.
    #[serde(skip)]
    pub next: Option<Place>,
}

impl Store {
    /// Returns what is due in one page of `limit` conversations of the space. Writes nothing.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn plan_retention(
        &self,
        space: &str,
        rules: &Rules,
        after: Option<&Place>,
        limit: i64,
    ) -> Result<Page> {
        let mut tx = self.pool.begin().await?;
        let page = look(&mut tx, space, rules, after, limit).await?;
        tx.rollback().await?;
        Ok(page)
    }

    /// Deletes what is due in one page of `limit` conversations of the space.
    ///
    /// # Errors
    /// [`crate::Error::NotErased`] when this user of the database may not take the role `wakeful_retention`.
    /// [`crate::Error::Database`].
    pub async fn retain(
        &self,
        space: &str,
        rules: &Rules,
        after: Option<&Place>,
        limit: i64,
    ) -> Result<Page> {
        self.retain_now(space, rules, after, limit).await.map_err(explained)
    }

    async fn retain_now(
        &self,
        space: &str,
        rules: &Rules,
        after: Option<&Place>,
        limit: i64,
    ) -> Result<Page> {
        let mut tx = self.retention().await?;
        let mut page = look(&mut tx, space, rules, after, limit).await?;
        if page.conversations.is_empty() {
            tx.rollback().await?;
            return Ok(page);
        }
        // A fork may be under way, a message may have come since, and a hold may have been placed. All wait for these locks from
        // here on.
        hold_off_forks(&mut tx, &page.conversations).await?;
        sqlx::query_scalar!(r#"select lock_for_erasure($1) as "count!""#, &page.conversations)
            .fetch_one(&mut *tx)
            .await?;
        let due = due(&mut tx, space, rules, &page.conversations).await?;
        (page.conversations, page.sessions, page.oldest) = (due.conversations, due.sessions, due.oldest);
        page.held.extend(due.held);
        if page.conversations.is_empty() {
            tx.rollback().await?;
            return Ok(page);
        }
        let (erasure_id, pending) = begin(&mut tx, space, &page).await?;
        self.can_erase(&mut tx, &pending.data_keys).await?;
        tx.commit_part().await?;
        crate::failpoint!("E2");
        page.rows = self.finish_erasure(&erasure_id, pending).await?;
        page.erasure_id = Some(erasure_id);
        Ok(page)
    }

    /// Deletes up to `limit` mails of the space that woke no session and came more than `days` ago. Returns how many.
    ///
    /// # Errors
    /// As for [`Store::retain`].
    pub async fn retain_dropped_mails(&self, space: &str, days: i32, limit: i64) -> Result<i64> {
        let mut tx = self.retention().await?;
        let deleted = sqlx::query!(
            "delete from mails
            where ctid in (
                select ctid from mails
                where space_id = $1 and dropped is not null
                    and received_at < clock_timestamp() - make_interval(days => $2)
                limit $3)",
            space,
            days,
            limit
        )
        .execute(&mut *tx)
        .await?
        .rows_affected();
        tx.commit_part().await?;
        Ok(deleted as i64)
    }

    /// Returns how many mails [`Store::retain_dropped_mails`] would delete.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn old_dropped_mails(&self, space: &str, days: i32) -> Result<i64> {
        Ok(sqlx::query_scalar!(
            r#"select count(*) as "count!" from mails
            where space_id = $1 and dropped is not null
                and received_at < clock_timestamp() - make_interval(days => $2)"#,
            space,
            days
        )
        .fetch_one(&self.pool)
        .await?)
    }

    /// Returns every space that has a conversation or a mail.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn spaces(&self) -> Result<Vec<String>> {
        // One step of the index for each space, and not one for each row.
        Ok(sqlx::query_scalar!(
            r#"
            with recursive conversations (space_id) as (
                select min(space_id) from conversation_counters
                union all
                select (select min(c.space_id) from conversation_counters c where c.space_id > conversations.space_id)
                from conversations
                where conversations.space_id is not null
            ), mail (space_id) as (
                select min(space_id) from mails
                union all
                select (select min(m.space_id) from mails m where m.space_id > mail.space_id)
                from mail
                where mail.space_id is not null
            )
            select space_id as "space_id!" from conversations where space_id is not null
            union
            select space_id from mail where space_id is not null
            order by 1
            "#
        )
        .fetch_all(&self.pool)
        .await?)
    }
}

/// Reads one page of the walk, and what of it is due.
async fn look(
    tx: &mut PgConnection,
    space: &str,
    rules: &Rules,
    after: Option<&Place>,
    limit: i64,
) -> Result<Page> {
    let Some(shortest) = rules.shortest() else { return Ok(Page::default()) };
    let places = sqlx::query_as!(
        Place,
        "select created_at, conversation_id
        from conversation_counters
        where space_id = $1 and created_at < clock_timestamp() - make_interval(days => $2)
            and (created_at, conversation_id) > (coalesce($3, '-infinity'::timestamptz), coalesce($4, ''))
        order by created_at, conversation_id
        limit $5",
        space,
        shortest,
        after.map(|place| place.created_at),
        after.map(|place| place.conversation_id.as_str()),
        limit
    )
    .fetch_all(&mut *tx)
    .await?;
    let next = (places.len() as i64 == limit).then(|| places.last().cloned()).flatten();
    let ids: Vec<String> = places.into_iter().map(|place| place.conversation_id).collect();
    Ok(Page { next, ..due(tx, space, rules, &ids).await? })
}

/// Returns which of these conversations are due.
async fn due(tx: &mut PgConnection, space: &str, rules: &Rules, ids: &[String]) -> Result<Page> {
    let rows = sqlx::query!(
        r#"
        select c.conversation_id, c.created_at, of_it.ids as "sessions!"
        from conversation_counters c
        cross join lateral (
            select coalesce(array_agg(s.session_id order by s.session_id), '{}') as ids,
                coalesce(bool_and(coalesce(clock_timestamp() - s.last_at > make_interval(days => s.days), false)), true)
                    as are_due
            from (
                select session_id,
                    coalesce((select ts from session_events e where e.session_id = s.session_id order by seq desc limit 1),
                        started_at) as last_at,
                    case
                        when status in ('failed', 'needs_attention') then $3::integer
                        when status in ('waiting_input', 'created') then $4::integer
                        when status not in ('queued', 'running') then $2::integer
                    end as days
                from conversation_sessions s
                where s.conversation_id = c.conversation_id
            ) s
        ) of_it
        where c.conversation_id = any($1) and c.open_run_id is null and c.queued_runs = 0 and of_it.are_due
            and not exists (
                select from conversation_counters fork where fork.parent_conversation_id = c.conversation_id)
            and not exists (select from jobs where jobs.conversation_id = c.conversation_id)
        order by c.created_at, c.conversation_id
        "#,
        ids,
        rules.ended_days,
        rules.failed_days,
        rules.waiting_days
    )
    .fetch_all(&mut *tx)
    .await?;
    let ids: Vec<String> = rows.iter().map(|row| row.conversation_id.clone()).collect();
    let held = holds::held_among(tx, space, &ids).await?;
    let mut page = Page::default();
    for row in rows.into_iter().filter(|row| !held.contains(&row.conversation_id)) {
        page.oldest = page.oldest.or(Some(row.created_at));
        page.conversations.push(row.conversation_id);
        page.sessions.extend(row.sessions);
    }
    page.held = held;
    Ok(page)
}

/// Deletes the rows that workers and callers go by, and writes the receipt. The caller commits.
async fn begin(tx: &mut Transaction, space: &str, page: &Page) -> Result<(String, Pending)> {
    let blobs = blobs::candidates(&mut *tx, &page.conversations, &page.sessions).await?;
    let seeds = sqlx::query!("delete from session_seed_messages where session_id = any($1)", &page.sessions);
    let seeds = seeds.execute(&mut **tx).await?.rows_affected();
    let sessions =
        sqlx::query!("delete from conversation_sessions where session_id = any($1)", &page.sessions);
    let sessions = sessions.execute(&mut **tx).await?.rows_affected();
    let counts = [("session_seed_messages", seeds), ("conversation_sessions", sessions)];
    let pending = Pending {
        conversations: page.conversations.clone(),
        sessions: page.sessions.clone(),
        blobs,
        // An export that took a session before we did has its row by now, and the next one finds no session.
        exports: taken(&mut *tx, &page.sessions).await?,
        rows: counts.into_iter().map(|(table, count)| (table.to_owned(), count as i64)).collect(),
        data_keys: keys::all_of(&mut *tx, &page.conversations).await?,
    };
    let erasure_id = format!("erase_{}", Uuid::now_v7().simple());
    sqlx::query!(
        "select begin_erasure($1, $2, $3, $4, $5::text::jsonb)",
        erasure_id,
        space,
        hex::encode(Sha256::digest("retention")),
        json!(pending),
        act::row()
    )
    .execute(&mut **tx)
    .await?;
    act::is_written();
    Ok((erasure_id, pending))
}
