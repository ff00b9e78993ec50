//! Searches for sessions that no worker would continue, one page of live rows at a time.
//!
//! Every query walks along a partial index of open or waiting rows, from where the last one stopped, and reads at
//! most one page. So one search costs the same whatever the size of the tables, and takes no lock.

use crate::{Result, Store};

/// Where the next search begins. Each worker has its own; a new one begins at the start.
#[derive(Clone, Debug, Default)]
pub struct Cursor {
    open: String,
    running: String,
    inbox: (String, i64),
    conversation: String,
    delivery: (String, String, i64),
    generation: (String, String),
    chunk: (String, String, i64),
}

/// Result of one search.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// Sessions that may need a heal, each once.
    pub sessions: Vec<String>,
    /// This was the last page: the next search begins at the start.
    pub last: bool,
}

impl Store {
    /// Searches the next `limit` rows of each kind.
    ///
    /// # Errors
    /// [`crate::Error::Database`]; the cursor may have moved.
    pub async fn look_for_unattended(&self, cursor: &mut Cursor, limit: i64) -> Result<Page> {
        let mut page = Page { sessions: Vec::new(), last: true };
        self.without_job(cursor, limit, &mut page).await?;
        self.run_without_status(cursor, limit, &mut page).await?;
        self.unread(cursor, limit, &mut page).await?;
        self.miscounted(cursor, limit, &mut page).await?;
        self.unsent(cursor, limit, &mut page).await?;
        self.left_over(cursor, limit, &mut page).await?;
        page.sessions.sort();
        page.sessions.dedup();
        Ok(page)
    }

    /// Open sessions without a step job. Leaves out sessions that are queued behind another session's run.
    async fn without_job(&self, cursor: &mut Cursor, limit: i64, page: &mut Page) -> Result<()> {
        let row = sqlx::query!(
            r#"
            with page as materialized (
                select session_id, conversation_id from conversation_sessions
                where status in ('queued', 'running') and session_id > $1
                order by session_id
                limit $2
            )
            select (select count(*) from page) as "looked_at!", (select max(session_id) from page) as end_of_page,
                array(
                    select page.session_id from page
                    where not exists (
                        select from jobs where jobs.kind = 'step' and jobs.session_id = page.session_id
                    )
                    and not exists (
                        select from conversation_counters c
                        join session_runs holder on holder.run_id = c.open_run_id
                        join session_runs mine on mine.conversation_id = c.conversation_id
                        where c.conversation_id = page.conversation_id
                            and c.queued_runs > 0
                            and holder.status = 'running'
                            and holder.session_id <> page.session_id
                            and mine.session_id = page.session_id
                            and mine.status = 'queued'
                    )
                ) as "found!"
            "#,
            cursor.open,
            limit
        )
        .fetch_one(&self.pool)
        .await?;
        cursor.open = page.take(row.found, row.looked_at == limit, row.end_of_page);
        Ok(())
    }

    /// Running runs whose session has another status, or whose conversation does not point at them.
    async fn run_without_status(&self, cursor: &mut Cursor, limit: i64, page: &mut Page) -> Result<()> {
        let row = sqlx::query!(
            r#"
            with page as materialized (
                select conversation_id, session_id, run_id from session_runs
                where status = 'running' and conversation_id > $1
                order by conversation_id
                limit $2
            )
            select (select count(*) from page) as "looked_at!", (select max(conversation_id) from page) as end_of_page,
                array(
                    select page.session_id from page
                    join conversation_sessions s on s.session_id = page.session_id
                    left join conversation_counters c on c.conversation_id = page.conversation_id
                    where s.status not in ('queued', 'running') or c.open_run_id is distinct from page.run_id
                ) as "found!"
            "#,
            cursor.running,
            limit
        )
        .fetch_one(&self.pool)
        .await?;
        cursor.running = page.take(row.found, row.looked_at == limit, row.end_of_page);
        Ok(())
    }

    /// Pending messages of sessions at rest. Messages of a run that was cancelled before it began wait for the next
    /// message.
    async fn unread(&self, cursor: &mut Cursor, limit: i64, page: &mut Page) -> Result<()> {
        let row = sqlx::query!(
            r#"
            with page as materialized (
                select session_id, inbox_id, run_id from session_inbox
                where status = 'pending' and (session_id, inbox_id) > ($1, $2)
                order by session_id, inbox_id
                limit $3
            ), last as (
                select session_id, inbox_id from page order by session_id desc, inbox_id desc limit 1
            )
            select (select count(*) from page) as "looked_at!", (select session_id from last) as session_id,
                (select inbox_id from last) as inbox_id,
                array(
                    select distinct page.session_id from page
                    join conversation_sessions s on s.session_id = page.session_id
                    where s.status in ('created', 'completed', 'failed', 'cancelled', 'waiting_input')
                        and not exists (
                            select from session_runs r
                            where r.run_id = page.run_id and r.status = 'cancelled'
                        )
                ) as "found!"
            "#,
            cursor.inbox.0,
            cursor.inbox.1,
            limit
        )
        .fetch_one(&self.pool)
        .await?;
        let more = row.looked_at == limit;
        cursor.inbox.0 = page.take(row.found, more, row.session_id);
        cursor.inbox.1 = row.inbox_id.filter(|_| more).unwrap_or(0);
        Ok(())
    }

    /// Conversations with a wrong count of queued runs. Reports one session of each.
    async fn miscounted(&self, cursor: &mut Cursor, limit: i64, page: &mut Page) -> Result<()> {
        let row = sqlx::query!(
            r#"
            with page as materialized (
                select conversation_id, queued_runs from conversation_counters
                where queued_runs > 0 and conversation_id > $1
                order by conversation_id
                limit $2
            )
            select (select count(*) from page) as "looked_at!", (select max(conversation_id) from page) as end_of_page,
                array(
                    select s.session_id from page
                    cross join lateral (
                        select session_id from conversation_sessions
                        where conversation_sessions.conversation_id = page.conversation_id
                        limit 1
                    ) s
                    where page.queued_runs <> (
                        select count(*) from session_runs r
                        where r.conversation_id = page.conversation_id and r.status = 'queued'
                    )
                ) as "found!"
            "#,
            cursor.conversation,
            limit
        )
        .fetch_one(&self.pool)
        .await?;
        cursor.conversation = page.take(row.found, row.looked_at == limit, row.end_of_page);
        Ok(())
    }

    /// Open deliveries whose conversation and channel have no job.
    async fn unsent(&self, cursor: &mut Cursor, limit: i64, page: &mut Page) -> Result<()> {
        let row = sqlx::query!(
            r#"
            with page as materialized (
                select conversation_id, channel, ordinal, session_id from deliveries
                where status in ('queued', 'sending') and (conversation_id, channel, ordinal) > ($1, $2, $3)
                order by conversation_id, channel, ordinal
                limit $4
            ), last as (
                select conversation_id, channel, ordinal from page
                order by conversation_id desc, channel desc, ordinal desc
                limit 1
            )
            select (select count(*) from page) as "looked_at!",
                (select conversation_id from last) as conversation_id,
                (select channel from last) as channel,
                (select ordinal from last) as ordinal,
                array(
                    select distinct page.session_id from page
                    where not exists (
                        select from jobs
                        where jobs.kind = 'deliver'
                            and jobs.conversation_id = page.conversation_id
                            and jobs.channel = page.channel
                    )
                ) as "found!"
            "#,
            cursor.delivery.0,
            cursor.delivery.1,
            cursor.delivery.2,
            limit
        )
        .fetch_one(&self.pool)
        .await?;
        let more = row.looked_at == limit;
        cursor.delivery = (
            page.take(row.found, more, row.conversation_id),
            row.channel.filter(|_| more).unwrap_or_default(),
            row.ordinal.filter(|_| more).unwrap_or(0),
        );
        Ok(())
    }

    /// Model calls in flight, and their chunks, of sessions at rest.
    async fn left_over(&self, cursor: &mut Cursor, limit: i64, page: &mut Page) -> Result<()> {
        let row = sqlx::query!(
            r#"
            with page as materialized (
                select session_id, generation_id from generations
                where (session_id, generation_id) > ($1, $2)
                order by session_id, generation_id
                limit $3
            ), last as (
                select session_id, generation_id from page order by session_id desc, generation_id desc limit 1
            )
            select (select count(*) from page) as "looked_at!", (select session_id from last) as session_id,
                (select generation_id from last) as generation_id,
                array(
                    select distinct page.session_id from page
                    join conversation_sessions s on s.session_id = page.session_id
                    where s.status not in ('queued', 'running')
                        and not exists (select from jobs where jobs.kind = 'step' and jobs.session_id = page.session_id)
                ) as "found!"
            "#,
            cursor.generation.0,
            cursor.generation.1,
            limit
        )
        .fetch_one(&self.pool)
        .await?;
        let more = row.looked_at == limit;
        let generation_id = row.generation_id.filter(|_| more).unwrap_or_default();
        cursor.generation = (page.take(row.found, more, row.session_id), generation_id);
        let row = sqlx::query!(
            r#"
            with page as materialized (
                select session_id, generation_id, chunk_no from generation_chunks
                where (session_id, generation_id, chunk_no) > ($1, $2, $3)
                order by session_id, generation_id, chunk_no
                limit $4
            ), last as (
                select session_id, generation_id, chunk_no from page
                order by session_id desc, generation_id desc, chunk_no desc
                limit 1
            )
            select (select count(*) from page) as "looked_at!", (select session_id from last) as session_id,
                (select generation_id from last) as generation_id, (select chunk_no from last) as chunk_no,
                array(
                    select distinct page.session_id from page
                    join conversation_sessions s on s.session_id = page.session_id
                    where s.status not in ('queued', 'running')
                        and not exists (select from jobs where jobs.kind = 'step' and jobs.session_id = page.session_id)
                ) as "found!"
            "#,
            cursor.chunk.0,
            cursor.chunk.1,
            cursor.chunk.2,
            limit
        )
        .fetch_one(&self.pool)
        .await?;
        let more = row.looked_at == limit;
        cursor.chunk = (
            page.take(row.found, more, row.session_id),
            row.generation_id.filter(|_| more).unwrap_or_default(),
            row.chunk_no.filter(|_| more).unwrap_or(0),
        );
        Ok(())
    }
}

impl Page {
    /// Adds the found sessions, and returns where the next search of this kind begins.
    fn take(&mut self, found: Vec<String>, more: bool, end_of_page: Option<String>) -> String {
        self.sessions.extend(found);
        self.last &= !more;
        end_of_page.filter(|_| more).unwrap_or_default()
    }
}
