//! Erases what a conversation or a person left: the one place where rows of the logs are deleted.
//!
//! The logs refuse a delete by anybody but the role `wakeful_retention`, so an erasure takes that role for the length of each
//! transaction. The first transaction decides and deletes the sessions and their jobs. After it no worker can write there, and the receipt names what is left. The log rows follow in transactions of at most
//! `BATCH` rows, then the blobs that nothing else points at. An erasure that dies is continued by the next one.

mod blobs;
pub mod collect;
mod holds;
mod keys;
mod plan;
pub mod retention;
mod tree;

pub use holds::Hold;

use crate::audit::act;
use crate::export::{Taken, taken};
use crate::fork::hold_off_forks;
use crate::pool::Transaction;
use crate::{Error, Result, Store};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};
use sqlx::{AssertSqlSafe, PgConnection};
use std::collections::BTreeMap;
use tree::tree;
use uuid::Uuid;

/// The most rows that one transaction deletes from a log.
const BATCH: i64 = 1000;

/// How often an erasure looks again because a fork was made meanwhile.
const FORKED_MEANWHILE: usize = 10;

/// The role that may delete.
const ROLE: &str = "wakeful_retention";

/// What is deleted in batches, after the conversation's own row: each table with the column that names its owner.
const BY_CONVERSATION: [&str; 4] = ["conversation_records", "deliveries", "session_runs", "mails"];
const BY_SESSION: [&str; 13] = [
    "session_events",
    "session_steps",
    "session_inbox",
    "generations",
    "generation_chunks",
    "tool_calls",
    "search_sessions",
    "search_documents",
    "search_due",
    "run_failures",
    "transitions",
    "notification_members",
    "act_links",
];

/// Whose data is erased.
#[derive(Clone, Debug)]
pub enum Subject {
    /// A conversation, as stored: `space/id`.
    Conversation(String),
    /// A person: a mail address or a user id.
    Person {
        /// The address or the id.
        name: String,
        /// Conversations in which others wrote too are erased as well.
        shared: bool,
    },
}

/// What an erasure takes, or took.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Erasure {
    /// The receipt. `None` for a dry run, or when there was nothing.
    pub erasure_id: Option<String>,
    /// Conversations, with their forks, the imports of their sessions, and all that came from those.
    pub conversations: Vec<String>,
    pub sessions: Vec<String>,
    /// Rows by table. A dry run says how many there are.
    pub rows: BTreeMap<String, i64>,
    /// Bundles of these sessions that the audit knows of. They are not erased.
    pub exports: Vec<Taken>,
    /// What stays, and why.
    pub stays: Vec<String>,
    /// Why the erasure would be refused now. Only a dry run says it.
    pub refused: Vec<String>,
}

/// What became of erasures that had died on their way.
#[derive(Debug, Default)]
pub struct Finished {
    /// The sessions of those that are finished now.
    pub sessions: Vec<String>,
    /// Those that are not, and why.
    pub failed: Vec<(String, Error)>,
}

/// What is left to do after the first transaction.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Pending {
    conversations: Vec<String>,
    sessions: Vec<String>,
    /// Blobs that these rows point at. Others may, too.
    blobs: Vec<String>,
    rows: BTreeMap<String, i64>,
    /// Bundles that were taken. The receipt names them.
    #[serde(default)]
    exports: Vec<Taken>,
    /// The data keys of its conversations. Those that no row has at the end are erased.
    #[serde(default)]
    data_keys: Vec<String>,
}

impl Store {
    /// Erases it. See [`Store::finish_erasures`] for those that died on their way.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is nothing. [`Error::NotErased`] when a hold forbids it, a session is at work, or this
    /// user of the database may not take the role `wakeful_retention`. [`Error::Database`].
    pub async fn erase(&self, space: &str, subject: &Subject) -> Result<Erasure> {
        self.erase_now(space, subject).await.map_err(explained)
    }

    async fn erase_now(&self, space: &str, subject: &Subject) -> Result<Erasure> {
        let (mut tx, mut erasure) = self.found(space, subject).await?;
        let mut pending = Pending {
            conversations: erasure.conversations.clone(),
            sessions: erasure.sessions.clone(),
            blobs: blobs::candidates(&mut tx, &erasure.conversations, &erasure.sessions).await?,
            rows: BTreeMap::new(),
            exports: Vec::new(),
            data_keys: keys::all_of(&mut tx, &erasure.conversations).await?,
        };
        let data_keys = pending.data_keys.len();
        self.can_erase(&mut tx, &pending.data_keys).await?;
        detach(&mut tx, &mut pending, subject, space).await?;
        // An export that took a session before we did has its row by now, and the next one finds no session.
        erasure.takes(taken(&mut tx, &erasure.sessions).await?);
        pending.exports.clone_from(&erasure.exports);
        let erasure_id = format!("erase_{}", Uuid::now_v7().simple());
        sqlx::query!(
            "select begin_erasure($1, $2, $3, $4, $5::text::jsonb)",
            erasure_id,
            space,
            subject_sha256(subject),
            json!(pending),
            // The audit names the receipt. The name of a person is in neither.
            act::row()
        )
        .execute(&mut *tx)
        .await?;
        tx.commit_part().await?;
        act::is_written();
        crate::failpoint!("E1");
        erasure.rows = self.finish_erasure(&erasure_id, pending).await?;
        keys::note_kept(&mut erasure, data_keys);
        erasure.erasure_id = Some(erasure_id);
        Ok(erasure)
    }

    /// Finds what is to be erased, and holds off forks of it.
    async fn found(&self, space: &str, subject: &Subject) -> Result<(Transaction, Erasure)> {
        for _ in 0..FORKED_MEANWHILE {
            let mut tx = self.retention().await?;
            let erasure = find(&mut tx, space, subject).await?;
            hold_off_forks(&mut tx, &erasure.conversations).await?;
            // A fork that was being made is there now. It may be forked itself, so look again from the beginning.
            if tree(&mut tx, &erasure.conversations).await? == erasure.conversations {
                return Ok((tx, erasure));
            }
            tx.rollback().await?;
        }
        Err(Error::NotErased { reason: "it is forked all the time: erase it again".to_owned() })
    }

    /// Finishes the erasures that died on their way. One that still cannot be finished keeps no other from it, nor a new one from
    /// beginning.
    ///
    /// # Errors
    /// [`Error::Database`] if they cannot be read.
    pub async fn finish_erasures(&self) -> Result<Finished> {
        let unfinished = sqlx::query!(
            r#"select erasure_id, pending as "pending!" from erasures where pending is not null order by erasure_id"#
        )
        .fetch_all(&self.pool)
        .await?;
        let mut finished = Finished::default();
        for row in unfinished {
            let ended = match serde_json::from_value::<Pending>(row.pending) {
                Ok(pending) => {
                    let sessions = pending.sessions.clone();
                    self.finish_erasure(&row.erasure_id, pending).await.map(|_| sessions)
                }
                Err(error) => Err(Error::corrupt("erasure", error)),
            };
            match ended {
                Ok(sessions) => finished.sessions.extend(sessions),
                Err(error) => finished.failed.push((row.erasure_id, error)),
            }
        }
        Ok(finished)
    }

    async fn finish_erasure(&self, erasure_id: &str, mut pending: Pending) -> Result<BTreeMap<String, i64>> {
        let mut rows = std::mem::take(&mut pending.rows);
        // A conversation of the same name may go on meanwhile, with other sessions.
        let owned = BY_CONVERSATION.map(|table| (table, "conversation_id = any($1) and"));
        for (table, owner) in
            owned.into_iter().chain(BY_SESSION.map(|table| (table, "$1::text[] is not null and")))
        {
            let delete = format!(
                "delete from {table}
                where ctid in (select ctid from {table} where {owner} session_id = any($2) limit $3)"
            );
            loop {
                let mut tx = self.retention().await?;
                if table.starts_with("search_") {
                    // The one who fills these tables may have read the messages before they were gone.
                    sqlx::query!("select pg_advisory_xact_lock($1)", crate::search::LOCK)
                        .fetch_one(&mut *tx)
                        .await?;
                }
                let delete = sqlx::query(AssertSqlSafe(delete.clone()));
                let delete = delete.bind(&pending.conversations).bind(&pending.sessions).bind(BATCH);
                let deleted = delete.execute(&mut *tx).await?.rows_affected();
                tx.commit_part().await?;
                *rows.entry(table.to_owned()).or_default() += deleted as i64;
                if deleted < BATCH as u64 {
                    break;
                }
            }
        }
        rows.insert("blobs".to_owned(), self.delete_unused_blobs(&pending.blobs, &pending.sessions).await?);
        // If a store is away, this erasure is not finished: a later one goes on here.
        self.remove_outside().await?;
        let mut tx = self.retention().await?;
        // The worker that counts failures may be about to name these sessions. This lock comes first, so a message that waits for a
        // conversation below does not also wait for a look of the search.
        sqlx::query!("select pg_advisory_xact_lock($1)", crate::search::LOCK).fetch_one(&mut *tx).await?;
        // A conversation keeps the numbers of its messages until the messages are gone. One that went on stays.
        let counters = sqlx::query!(
            "delete from conversation_counters c
            where conversation_id = any($1) and open_run_id is null
                and not exists (select from conversation_sessions s where s.conversation_id = c.conversation_id)",
            &pending.conversations
        );
        let counters = counters.execute(&mut *tx).await?.rows_affected();
        rows.insert("conversation_counters".to_owned(), counters as i64);
        sqlx::query!("select forget_sessions($1)", &pending.sessions).execute(&mut *tx).await?;
        if !pending.data_keys.is_empty() {
            // Decided under the lock above: of two erasures that have the same key, the later one finds it unused.
            let keys = keys::unused(&mut tx, &pending.data_keys).await?;
            let sealed = keys::delete_blobs(&mut tx, &keys).await?;
            tx.commit_part().await?;
            let sealed = sealed + self.delete_unnamed_blobs(&pending, &keys).await?;
            rows.insert("sealed_blobs".to_owned(), sealed);
            // The keys go last: what is left of the texts, in WAL and in backups, goes with them. No new session can have them,
            // because the rows that named them are gone.
            if !keys.is_empty() {
                let mut connection = self.pool.acquire().await?;
                self.vault.is_ours(&mut connection).await?;
            }
            self.vault.delete(&keys).await?;
            crate::failpoint!("E3");
            rows.insert("data_keys".to_owned(), keys.len() as i64);
            tx = self.retention().await?;
        }
        sqlx::query!("select end_erasure($1, $2)", erasure_id, json!(rows)).execute(&mut *tx).await?;
        tx.commit_part().await?;
        Ok(rows)
    }

    /// Deletes what no row names any more under the data keys that other conversations have too, or that one goes on with: those
    /// that are not `unused`. In a transaction of its own: its lock may be long in coming.
    async fn delete_unnamed_blobs(&self, pending: &Pending, unused: &[String]) -> Result<i64> {
        let shared: Vec<String> =
            pending.data_keys.iter().filter(|key| !unused.contains(key)).cloned().collect();
        if shared.is_empty() {
            return Ok(0);
        }
        let mut tx = self.retention().await?;
        let deleted = keys::delete_unnamed_blobs(&mut tx, &shared, &pending.sessions).await?;
        tx.commit_part().await?;
        Ok(deleted)
    }

    /// Begins a transaction in the role that may delete. Its statements may read every log, and wait for the one who fills
    /// the search, so they have no limit of time.
    async fn retention(&self) -> Result<Transaction> {
        let mut tx = self.pool.begin().await?;
        let take =
            format!("set local statement_timeout = 0; set local lock_timeout = 0; set local role {ROLE}");
        let taken = sqlx::raw_sql(AssertSqlSafe(take)).execute(&mut *tx).await;
        taken.map_err(|error| explained(error.into()))?;
        Ok(tx)
    }
}

/// Says what is missing if the database does not let us erase.
fn explained(error: Error) -> Error {
    needs_role(error, ROLE, "delete from the logs")
}

/// Says what is missing if the database does not let us: the role, membership in it, or its rights.
pub(crate) fn needs_role(error: Error, role: &str, what: &str) -> Error {
    match error {
        Error::Database(sqlx::Error::Database(error))
            if matches!(error.code().as_deref(), Some("22023" | "42704" | "42501")) =>
        {
            Error::NotErased {
                reason: format!(
                    "{}. Only the role {role} may {what}. A superuser makes it, in Wakeful's database: `psql \"$DATABASE_URL\" \
                     --file=deploy/roles.sql`. Then run the command as a user of the database who may take that role",
                    error.message()
                ),
            }
        }
        error => error,
    }
}

/// Finds the conversations, and what came from them.
async fn find(tx: &mut PgConnection, space: &str, subject: &Subject) -> Result<Erasure> {
    let mut stays = vec![
        "what has left: mails and messages that were sent, files of exported bundles, backups of the database and its WAL"
            .to_owned(),
        "the receipt, which has a hash of the name and counts".to_owned(),
        "the ids of its sessions, in batches and for tasks of Absurd, so that an import does not bring them back".to_owned(),
        "the audit, which has who did what on which row, and the reasons that were given".to_owned(),
    ];
    let (what, id, roots) = match subject {
        Subject::Conversation(id) => {
            let rows = sqlx::query!(
                "select conversation_id, parent_conversation_id from conversation_counters
                where conversation_id = $1 and space_id = $2",
                id,
                space
            )
            .fetch_all(&mut *tx)
            .await?;
            for parent in rows.iter().filter_map(|row| row.parent_conversation_id.as_deref()) {
                stays.push(format!(
                    "{parent}, which this conversation was forked from: erase it by its own name"
                ));
            }
            ("conversation", id, rows.into_iter().map(|row| row.conversation_id).collect())
        }
        Subject::Person { name, shared } => {
            let found = holds::conversations_of(tx, space, name).await?;
            let (others, own): (Vec<_>, Vec<_>) = found.into_iter().partition(|one| one.others && !shared);
            for one in others {
                stays.push(format!(
                    "{}, in which others wrote too: --shared erases it as well",
                    one.conversation_id
                ));
            }
            ("person", name, own.into_iter().map(|one| one.conversation_id).collect::<Vec<_>>())
        }
    };
    let conversations = tree(tx, &roots).await?;
    let dropped = match subject {
        Subject::Person { name, .. } => {
            let naming = sqlx::query_scalar!(
                r#"select c.conversation_id
                from conversation_counters c
                where space_id = $1 and conversation_id <> all($3)
                    and (exists (select from conversation_records r
                            where r.conversation_id = c.conversation_id
                                and position(lower($2) in lower(r.content::text)) > 0)
                        or exists (select from deliveries d
                            where d.conversation_id = c.conversation_id
                                and position(lower($2) in lower(d.content::text)) > 0))
                order by 1
                limit 100"#,
                space,
                name,
                &conversations
            )
            .fetch_all(&mut *tx)
            .await?;
            stays.extend(naming.into_iter().map(|id| {
                format!(
                    "{id}, in which {name} did not write, but which names {name}: erase it by its own name"
                )
            }));
            sqlx::query_scalar!(
                r#"select count(*) as "count!" from mails where space_id = $1 and lower(from_address) = lower($2) and dropped is not null"#,
                space,
                name
            )
            .fetch_one(&mut *tx)
            .await?
        }
        Subject::Conversation(_) => 0,
    };
    if conversations.is_empty() && dropped == 0 {
        return Err(Error::NotFound { what, id: id.clone() });
    }
    stays.extend(keys::notes(&mut *tx, space, subject, &conversations).await?);
    let sessions = sqlx::query_scalar!(
        "select session_id from conversation_sessions where conversation_id = any($1) order by session_id",
        &conversations
    )
    .fetch_all(&mut *tx)
    .await?;
    let mut rows = BTreeMap::new();
    if dropped > 0 {
        rows.insert("mails that no agent saw".to_owned(), dropped);
    }
    Ok(Erasure { conversations, sessions, rows, stays, ..Erasure::default() })
}

impl Erasure {
    /// Notes the bundles that were taken.
    fn takes(&mut self, exports: Vec<Taken>) {
        self.stays.extend(exports.iter().map(Taken::to_string));
        self.exports = exports;
    }
}

/// Locks the conversations, and deletes the rows that workers and callers go by: sessions and jobs, in the order of the locks.
async fn detach(tx: &mut PgConnection, pending: &mut Pending, subject: &Subject, space: &str) -> Result<()> {
    let at_work = |what: &str| Error::NotErased {
        reason: format!(
            "{what} is at work: wait for it, or end it with `wakeful session cancel`, and erase then"
        ),
    };
    let ids = &pending.conversations;
    // The rest waits for these locks.
    let idle =
        sqlx::query_scalar!(r#"select lock_for_erasure($1) as "count!""#, ids).fetch_one(&mut *tx).await?;
    if idle != ids.len() as i64 {
        return Err(at_work("one of the conversations"));
    }
    holds::check(&mut *tx, space, ids, subject).await?;
    let seeds =
        sqlx::query!("delete from session_seed_messages where session_id = any($1)", &pending.sessions);
    let seeds = seeds.execute(&mut *tx).await?.rows_affected();
    // A session that began since `find` looked has a conversation whose row was there, so it waits for us, or we see it here.
    let sessions = sqlx::query_scalar!(
        "delete from conversation_sessions
        where conversation_id = any($1) and session_id = any($2) and status not in ('queued', 'running')
        returning session_id",
        ids,
        &pending.sessions
    )
    .fetch_all(&mut *tx)
    .await?;
    let left = sqlx::query_scalar!(
        "select session_id from conversation_sessions where conversation_id = any($1) limit 1",
        ids
    );
    if let Some(left) = left.fetch_optional(&mut *tx).await? {
        return Err(at_work(&format!("session {left}")));
    }
    let jobs = sqlx::query!(
        "delete from jobs where conversation_id = any($1) and (lease is null or run_at < clock_timestamp())",
        ids
    )
    .execute(&mut *tx)
    .await?
    .rows_affected();
    let leased = sqlx::query_scalar!("select job_id from jobs where conversation_id = any($1) limit 1", ids);
    if leased.fetch_optional(&mut *tx).await?.is_some() {
        return Err(at_work("a message that is being sent"));
    }
    let mut rows = vec![
        ("session_seed_messages", seeds),
        ("conversation_sessions", sessions.len() as u64),
        ("jobs", jobs),
    ];
    if let Subject::Person { name, .. } = subject {
        let mails = sqlx::query!(
            "delete from mails where space_id = $1 and lower(from_address) = lower($2) and dropped is not null",
            space,
            name
        );
        rows.push(("mails", mails.execute(&mut *tx).await?.rows_affected()));
        // What is decided later knows no name any more.
        sqlx::query!("select forget_person($1, $2)", space, name).execute(&mut *tx).await?;
    }
    pending.rows = rows.into_iter().map(|(table, count)| (table.to_owned(), count as i64)).collect();
    Ok(())
}

fn subject_sha256(subject: &Subject) -> String {
    let text = match subject {
        Subject::Conversation(id) => format!("conversation:{id}"),
        Subject::Person { name, .. } => format!("person:{}", name.to_lowercase()),
    };
    hex::encode(Sha256::digest(text))
}
