//! Legal holds, and which conversations are a person's.

use super::Subject;
use crate::audit::act;
use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::PgConnection;

/// A legal hold.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hold {
    pub hold_id: String,
    pub conversation_id: Option<String>,
    pub person: Option<String>,
    pub reason: String,
    pub placed_at: DateTime<Utc>,
    pub released_at: Option<DateTime<Utc>>,
}

/// A conversation in which a person wrote, or that began with a mail to the person.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub conversation_id: String,
    /// Others wrote there too.
    pub others: bool,
}

impl Store {
    /// Places a hold and returns its id. What it covers need not exist yet.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn place_hold(&self, space: &str, subject: &Subject, reason: &str) -> Result<String> {
        let (conversation_id, person) = match subject {
            Subject::Conversation(id) => (Some(id), None),
            Subject::Person { name, .. } => (None, Some(name)),
        };
        let mut tx = self.pool.begin().await?;
        let hold_id = sqlx::query_scalar!(
            // Folded by the database, as are the addresses that it is compared with. Which letters beyond ASCII have a lower case
            // depends on the database's locale.
            "insert into legal_holds (space_id, conversation_id, person, reason) values ($1, $2, lower($3), $4)
            returning hold_id",
            space,
            conversation_id,
            person,
            reason
        )
        .fetch_one(&mut *tx)
        .await?;
        act::on(&hold_id);
        tx.commit().await?;
        Ok(hold_id)
    }

    /// Releases a hold.
    ///
    /// # Errors
    /// [`Error::NotFound`] if no such hold stands, [`Error::Database`].
    pub async fn release_hold(&self, space: &str, hold_id: &str) -> Result<()> {
        let mut tx = self.pool.begin().await?;
        let released = sqlx::query!(
            "update legal_holds set released_at = clock_timestamp()
            where space_id = $1 and hold_id = $2 and released_at is null",
            space,
            hold_id
        )
        .execute(&mut *tx)
        .await?;
        if released.rows_affected() == 0 {
            return Err(Error::NotFound { what: "hold", id: hold_id.to_owned() });
        }
        act::on(hold_id);
        tx.commit().await?;
        Ok(())
    }

    /// Returns the holds, those that stand first.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn legal_holds(&self, space: &str) -> Result<Vec<Hold>> {
        Ok(sqlx::query_as!(
            Hold,
            "select hold_id, conversation_id, person, reason, placed_at, released_at from legal_holds
            where space_id = $1
            order by released_at is not null, placed_at desc, hold_id
            limit 1000",
            space
        )
        .fetch_all(&self.pool)
        .await?)
    }
}

/// A hold that forbids an erasure.
#[derive(Clone, Debug)]
pub(super) struct Standing {
    hold_id: String,
    reason: String,
}

impl std::fmt::Display for Standing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "the hold {0} stands: {1}. To release it: wakeful conversation release {0}",
            self.hold_id, self.reason
        )
    }
}

/// Refuses if [`standing`] finds a hold. The caller has locked the conversations and the holds.
pub(super) async fn check(
    tx: &mut PgConnection,
    space: &str,
    conversations: &[String],
    subject: &Subject,
) -> Result<()> {
    match standing(tx, space, conversations, subject).await?.first() {
        Some(hold) => Err(Error::NotErased { reason: hold.to_string() }),
        None => Ok(()),
    }
}

/// Returns the holds that cover one of the conversations, a person who takes part in one, or the person who is to be erased,
/// the oldest first.
pub(super) async fn standing(
    tx: &mut PgConnection,
    space: &str,
    conversations: &[String],
    subject: &Subject,
) -> Result<Vec<Standing>> {
    let name = match subject {
        Subject::Conversation(_) => None,
        Subject::Person { name, .. } => Some(name),
    };
    Ok(sqlx::query_as!(
        Standing,
        // A fork belongs to no user, and has the words of those who take part in what it was forked from. A mail folds only ASCII of
        // its participants' addresses, and a hold folds more: who asks for one cannot know how an address was written.
        "with recursive line (id) as (
            select unnest($2::text[])
            union
            select c.parent_conversation_id from line
            join conversation_counters c on c.conversation_id = line.id
            where c.parent_conversation_id is not null
        )
        select hold_id, reason from legal_holds h
        where released_at is null
            and (space_id = $1 or space_id in (
                select space_id from conversation_counters where conversation_id = any($2)))
            and (conversation_id = any($2)
                or person = lower($3)
                or person in (
                    select lower(i.sender) from session_inbox i
                    join conversation_sessions s using (session_id)
                    where s.conversation_id in (select id from line))
                or person in (select lower(user_id) from conversation_counters
                    where conversation_id in (select id from line))
                or exists (select from conversation_sessions s
                    where s.conversation_id in (select id from line) and exists (
                        select from jsonb_path_query(s.policy, '$.participants[*]') p (address)
                        where lower(p.address #>> '{}') = h.person))
                or person in (select lower(from_address) from mails
                    where conversation_id in (select id from line)))
        order by placed_at",
        space,
        conversations,
        name
    )
    .fetch_all(tx)
    .await?)
}

/// Returns those of the conversations that a hold covers, as [`check`] would refuse them.
pub(super) async fn held_among(
    tx: &mut PgConnection,
    space: &str,
    conversations: &[String],
) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar!(
        r#"select c.conversation_id
        from conversation_counters c
        where c.conversation_id = any($2) and exists (
            with recursive line (id) as (
                select c.conversation_id
                union
                select p.parent_conversation_id from line
                join conversation_counters p on p.conversation_id = line.id
                where p.parent_conversation_id is not null
            )
            select from legal_holds h
            where released_at is null and h.space_id = $1
                and (h.conversation_id = c.conversation_id
                    or person in (
                        select lower(i.sender) from session_inbox i
                        join conversation_sessions s using (session_id)
                        where s.conversation_id in (select id from line))
                    or person in (select lower(p.user_id) from conversation_counters p
                        where p.conversation_id in (select id from line))
                    or exists (select from conversation_sessions s
                        where s.conversation_id in (select id from line) and exists (
                            select from jsonb_path_query(s.policy, '$.participants[*]') a (address)
                            where lower(a.address #>> '{}') = h.person))
                    or person in (select lower(from_address) from mails m
                        where m.conversation_id in (select id from line))))
        order by 1"#,
        space,
        conversations
    )
    .fetch_all(tx)
    .await?)
}

/// Finds the conversations in which the person wrote, or that began with a mail that named the person. An address that differs only
/// in case is the person's, also beyond ASCII. It rather finds too many: people see a wrong one in the preview, and would not
/// notice one that is missing.
pub(super) async fn conversations_of(tx: &mut PgConnection, space: &str, name: &str) -> Result<Vec<Found>> {
    Ok(sqlx::query_as!(
        Found,
        r#"with mine as (
            select s.conversation_id
            from session_inbox i
            join conversation_sessions s using (session_id)
            where s.space_id = $1 and lower(i.sender) = lower($2)
            union
            select conversation_id from mails
            where space_id = $1 and lower(from_address) = lower($2) and conversation_id is not null
            union
            select conversation_id from conversation_sessions
            where space_id = $1 and exists (
                select from jsonb_path_query(policy, '$.participants[*]') p (address)
                where lower(p.address #>> '{}') = lower($2))
            union
            select conversation_id from conversation_counters
            where space_id = $1 and lower(user_id) = lower($2)
        )
        select mine.conversation_id as "conversation_id!",
            exists (
                select from session_inbox i
                join conversation_sessions s using (session_id)
                where s.conversation_id = mine.conversation_id and i.sender is not null and lower(i.sender) <> lower($2)
            ) or exists (
                select from mails m
                where m.conversation_id = mine.conversation_id and lower(m.from_address) <> lower($2)
            ) as "others!"
        from mine
        order by 1"#,
        space,
        name
    )
    .fetch_all(tx)
    .await?)
}
