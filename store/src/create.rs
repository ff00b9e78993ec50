//! Creates sessions: row, seeds and prefix in one commit.
//!
//! The conversation's row is locked first. So two first messages at the same time create one session. A message that arrives
//! during a restart goes to the old session or to the new one, and is never lost.
#![doc = include_str!("create.md")]

pub(crate) mod begins;
mod key;
pub(crate) mod notice;

use crate::encryption::{Seal, Vault, seal_in_conversation};
use crate::run::{self, Locked};
use crate::session::shown;
use crate::{Error, Result, Store, new_id};
use serde::Serialize;
use sqlx::PgConnection;
use wakeful_workflow::access::{Admission, Speaker, admission};
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::policy::SessionPolicy;
use wakeful_workflow::prefix::Prefix;
use wakeful_workflow::seed::Seed;
use wakeful_workflow::session::SessionStatus;
use wakeful_workflow::trigger::{NEW, separate_session_type};

/// Which existing session a trigger continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Continues {
    /// The session that the same trigger made before. An email or a firing of a schedule has a session to
    /// itself.
    Trigger,
    /// The conversation's latest session, whatever created it. So a chat continues after a fork or a restart.
    Conversation,
}

/// The session to create if the trigger has no session to continue.
#[derive(Clone, Debug)]
pub struct NewSession {
    pub space_id: String,
    pub mailbox_id: String,
    /// As it is stored: `space/id`.
    pub conversation_id: String,
    pub trigger_type: String,
    /// Unique together with space, mailbox and type, so the same trigger finds this session again.
    pub trigger_id: String,
    pub continues: Continues,
    pub agent: String,
    pub model_id: String,
    pub model_context_window: i32,
    /// The tool definitions for the model. They are pinned in the prefix, with the system prompt from
    /// `seeds`.
    pub tools: Vec<ToolDefinition>,
    pub policy: SessionPolicy,
    /// The repository that the session works on, if any.
    pub repository_id: Option<String>,
    /// The user in whose name the message comes. `None`: it does not enter a conversation that belongs to a user.
    pub speaker: Option<Speaker>,
    /// The message enters only a conversation whose latest session is of `agent`: its sender reaches no other.
    pub only_agent: bool,
    /// The rendered messages that the model sees before the session's first message.
    pub seeds: Vec<Seed>,
}

/// The session of a restarted conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Restarted {
    pub session_id: String,
    pub status: SessionStatus,
    /// The key was used before, and this is the session that it created then.
    #[serde(skip)]
    pub duplicate: bool,
}

impl Store {
    /// Restarts a conversation: creates a session without messages, which receives the conversation's next
    /// message. Nothing is deleted, an open run goes on, and message numbers continue. The same `client_key`
    /// returns the same session again.
    ///
    /// Ignores the trigger of `new`: the session is its own trigger, and its policy follows
    /// [`SessionPolicy::restarted`].
    ///
    /// # Errors
    /// [`Error::NotFound`] for a conversation that does not exist, [`Error::KeyReused`] if the key created a
    /// session of another agent, [`Error::Database`].
    pub async fn restart(&self, new: &NewSession, client_key: Option<&str>) -> Result<Restarted> {
        let begun = self.try_restart(new, client_key).await;
        self.note_refusal(begun)
    }

    /// The agent of the conversation's latest session.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn latest_agent(&self, conversation_id: &str) -> Result<Option<String>> {
        Ok(sqlx::query_scalar!(
            "select agent from conversation_sessions
            where conversation_id = $1
            order by ordinal desc
            limit 1",
            conversation_id
        )
        .fetch_optional(&self.intake)
        .await?)
    }

    /// The type of trigger and the agent of the conversation's latest session.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn latest_trigger(&self, conversation_id: &str) -> Result<Option<(String, String)>> {
        let latest = sqlx::query!(
            "select trigger_type, agent from conversation_sessions
            where conversation_id = $1
            order by ordinal desc
            limit 1",
            conversation_id
        )
        .fetch_optional(&self.intake)
        .await?;
        Ok(latest.map(|latest| (latest.trigger_type, latest.agent)))
    }

    async fn try_restart(&self, new: &NewSession, client_key: Option<&str>) -> Result<Restarted> {
        let mut tx = self.pool.in_line(&new.conversation_id).begin().await?;
        run::lock_conversation(&mut tx, &new.conversation_id).await.map_err(|error| match error {
            Error::NotFound { what, id } => Error::NotFound { what, id: shown(&id).to_owned() },
            other => other,
        })?;
        let seal = seal_in_conversation(&mut tx, &new.conversation_id).await?;
        let stored_key = client_key.map(|key| seal.text(key));
        let before = sqlx::query!(
            "select session_id, status, agent from conversation_sessions
            where conversation_id = $1 and client_key = $2",
            new.conversation_id,
            stored_key.as_deref()
        )
        .fetch_optional(&mut *tx)
        .await?;
        if let (Some(before), Some(client_key)) = (before, client_key) {
            if before.agent != new.agent {
                return Err(Error::KeyReused { client_key: client_key.to_owned() });
            }
            let status = SessionStatus::parse(&before.status)
                .ok_or_else(|| Error::corrupt("session status", &before.status))?;
            return Ok(Restarted { session_id: before.session_id, status, duplicate: true });
        }
        let session_id = new_id("sess");
        let new = NewSession {
            trigger_type: NEW.to_owned(),
            trigger_id: session_id.clone(),
            policy: answering_as_before(&mut tx, &seal, new).await?,
            ..new.clone()
        };
        insert(&mut tx, &self.vault, &session_id, &new, client_key).await?;
        tx.commit().await?;
        Ok(Restarted { session_id, status: SessionStatus::Created, duplicate: false })
    }
}

/// Locks and returns the session that a trigger continues, or a new one. A message that was sent before, with
/// the same `client_key`, goes to the session that received it first, even if the conversation was restarted
/// since.
///
/// # Errors
/// [`Error::KeyReused`] if the trigger has made its session in another conversation, [`Error::OfASchedule`], [`Error::Database`].
pub(crate) async fn find_or_create(
    tx: &mut PgConnection,
    vault: &Vault,
    new: &NewSession,
    client_key: Option<&str>,
) -> Result<Locked> {
    let data_key = key::of_new(&mut *tx, vault, new).await?;
    // Message numbers of a new conversation begin after the seeds of its first session: with one seed, the
    // first message gets number 2.
    let begun = sqlx::query_scalar!(
        "insert into conversation_counters
            (conversation_id, space_id, mailbox_id, last_message_number, user_id, data_key)
        values ($1, $2, $3, $4, $5, $6)
        on conflict (conversation_id) do nothing
        returning conversation_id",
        new.conversation_id,
        new.space_id,
        new.mailbox_id,
        new.seeds.len() as i64,
        new.speaker.as_ref().and_then(Speaker::claims),
        data_key
    )
    .fetch_optional(&mut *tx)
    .await?;
    if begun.is_some() {
        begins::may_begin(&mut *tx, new).await?;
        if data_key.is_none() {
            key::of_begun(&mut *tx, vault, new).await?;
        }
    }
    let conversation = run::lock_conversation(tx, &new.conversation_id).await?;
    if !admits(new, conversation.user_id.as_deref())? {
        // The first user gets the conversation.
        sqlx::query!(
            "update conversation_counters set user_id = $2 where conversation_id = $1",
            new.conversation_id,
            new.speaker.as_ref().and_then(Speaker::claims)
        )
        .execute(&mut *tx)
        .await?;
    }
    if new.only_agent {
        is_of_agent(new, latest_agent(tx, &new.conversation_id).await?.as_deref())?;
    }
    let existing = match new.continues {
        Continues::Trigger => made_by_trigger(tx, new).await?,
        Continues::Conversation => match sent_before(tx, &new.conversation_id, client_key).await? {
            Some(session_id) => Some(session_id),
            None => match latest(tx, &new.conversation_id).await? {
                Some(latest) => match separate_session_type(&latest.trigger_type, &new.trigger_type) {
                    Some(own) => return notice::open_separate(tx, vault, new, latest, own).await,
                    None => Some(latest.session_id),
                },
                None => None,
            },
        },
    };
    let session_id = match existing {
        Some(session_id) => session_id,
        None => {
            let session_id = new_id("sess");
            insert(tx, vault, &session_id, new, None).await?;
            session_id
        }
    };
    run::lock_session(tx, &session_id).await
}

/// Whether an existing conversation of `owner` admits a message as it is. `false`: the speaker gets the conversation first.
///
/// # Errors
/// [`Error::OfAnotherUser`], [`Error::OfAUser`], [`Error::NotFound`].
pub(crate) fn admits(new: &NewSession, owner: Option<&str>) -> Result<bool> {
    let id = || shown(&new.conversation_id).to_owned();
    match admission(new.speaker.as_ref(), owner) {
        Admission::Admitted => Ok(true),
        Admission::Claims => Ok(false),
        Admission::OfAnother => Err(Error::OfAnotherUser { conversation_id: id() }),
        Admission::OfAUser => Err(Error::OfAUser { conversation_id: id() }),
        Admission::Unknown => Err(Error::NotFound { what: "conversation", id: id() }),
    }
}

/// Checks that a conversation is of the only agent that the sender reaches. The caller holds what makes `latest` true: the
/// conversation's lock, or the fence of a write.
///
/// # Errors
/// [`Error::NotFound`]: a conversation of another agent does not exist for the sender.
pub(crate) fn is_of_agent(new: &NewSession, latest: Option<&str>) -> Result<()> {
    match latest {
        Some(latest) if new.only_agent && latest != new.agent => {
            Err(Error::NotFound { what: "conversation", id: shown(&new.conversation_id).to_owned() })
        }
        _ => Ok(()),
    }
}

async fn latest_agent(tx: &mut PgConnection, conversation_id: &str) -> Result<Option<String>> {
    Ok(sqlx::query_scalar!(
        "select agent from conversation_sessions
            where conversation_id = $1
            order by ordinal desc
            limit 1",
        conversation_id
    )
    .fetch_optional(tx)
    .await?)
}

/// Returns the session that this trigger created. Refuses a session of another conversation, because that
/// conversation's row is not locked.
async fn made_by_trigger(tx: &mut PgConnection, new: &NewSession) -> Result<Option<String>> {
    let made = sqlx::query!(
        "select session_id, conversation_id from conversation_sessions
        where space_id = $1 and mailbox_id = $2 and trigger_type = $3 and trigger_id = $4",
        new.space_id,
        new.mailbox_id,
        new.trigger_type,
        new.trigger_id
    )
    .fetch_optional(tx)
    .await?;
    match made {
        Some(made) if made.conversation_id != new.conversation_id => {
            Err(Error::KeyReused { client_key: new.trigger_id.clone() })
        }
        made => Ok(made.map(|made| made.session_id)),
    }
}

/// Returns the session that received a message with this key.
async fn sent_before(
    tx: &mut PgConnection,
    conversation_id: &str,
    client_key: Option<&str>,
) -> Result<Option<String>> {
    let Some(client_key) = client_key else { return Ok(None) };
    let seal = seal_in_conversation(&mut *tx, conversation_id).await?;
    Ok(sqlx::query_scalar!(
        "select s.session_id from conversation_sessions s
        join session_inbox i on i.session_id = s.session_id and i.client_key = $2
        where s.conversation_id = $1
        order by s.ordinal
        limit 1",
        conversation_id,
        &*seal.text(client_key)
    )
    .fetch_optional(tx)
    .await?)
}

/// A conversation's latest session.
struct Latest {
    session_id: String,
    trigger_type: String,
    policy: Option<serde_json::Value>,
}

/// The conversation's latest session.
async fn latest(tx: &mut PgConnection, conversation_id: &str) -> Result<Option<Latest>> {
    let seal = seal_in_conversation(&mut *tx, conversation_id).await?;
    let latest = sqlx::query_as!(
        Latest,
        "select session_id, trigger_type, policy from conversation_sessions
        where conversation_id = $1
        order by ordinal desc
        limit 1",
        conversation_id
    )
    .fetch_optional(tx)
    .await?;
    let Some(mut latest) = latest else { return Ok(None) };
    latest.policy = latest.policy.map(|policy| seal.open_value(policy)).transpose()?;
    Ok(Some(latest))
}

/// Returns the policy of a restarted conversation: see [`SessionPolicy::restarted`].
async fn answering_as_before(tx: &mut PgConnection, seal: &Seal, new: &NewSession) -> Result<SessionPolicy> {
    let own = new.policy.clone();
    let latest = sqlx::query!(
        r#"select coalesce(policy ->> 'replies_as', trigger_type) as "replies_as!", policy from conversation_sessions
        where conversation_id = $1
        order by ordinal desc
        limit 1"#,
        new.conversation_id
    )
    .fetch_optional(tx)
    .await?;
    let Some(latest) = latest else { return Ok(own) };
    let policy = latest.policy.map(|policy| seal.open_value(policy)).transpose()?;
    Ok(own.restarted(&latest.replies_as, policy_of(policy)?.as_ref()))
}

fn policy_of(stored: Option<serde_json::Value>) -> Result<Option<SessionPolicy>> {
    stored.map(serde_json::from_value).transpose().map_err(|error| Error::corrupt("policy", error))
}

/// Stores a session's prefix as a blob and returns its hash. Sessions of a space with the same prefix share the blob.
pub(crate) async fn pin(tx: &mut PgConnection, space_id: &str, prefix: &Prefix) -> Result<String> {
    let blob = prefix.blob();
    sqlx::query!(
        "insert into blobs (space_id, sha256, size, media_type, bytes)
        values ($3, $1, length($2::bytea), 'application/json', $2)
        on conflict (sha256, space_id) do nothing",
        blob.sha256,
        blob.bytes,
        space_id
    )
    .execute(tx)
    .await?;
    Ok(blob.sha256)
}

/// Writes the session's row, its seeds and its prefix. The caller has locked the conversation.
async fn insert(
    tx: &mut PgConnection,
    vault: &Vault,
    session_id: &str,
    new: &NewSession,
    client_key: Option<&str>,
) -> Result<()> {
    let prefix = Prefix::new(&new.seeds, new.tools.clone());
    let prefix_sha256 = pin(&mut *tx, &new.space_id, &prefix).await?;
    let tool_names: Vec<&str> = prefix.tools.iter().map(|tool| tool.name.as_str()).collect();
    let mut policy = serde_json::to_value(&new.policy).map_err(|error| Error::corrupt("policy", error))?;
    // Where replies go has the subject of a mail in it.
    let seal = seal_in_conversation(&mut *tx, &new.conversation_id).await?;
    seal.value(&mut policy);
    let client_key = client_key.map(|key| seal.text(key));
    // A message that found the conversation's latest session, and waits for it or has not written yet, must see that it is
    // not the latest any more.
    sqlx::query!(
        "update conversation_sessions
        set superseded = true
        where session_id = (
            select session_id from conversation_sessions where conversation_id = $1 order by ordinal desc limit 1
        )",
        new.conversation_id
    )
    .execute(&mut *tx)
    .await?;
    let data_key = sqlx::query_scalar!(
        "insert into conversation_sessions
            (session_id, conversation_id, space_id, mailbox_id, trigger_type, trigger_id, agent, model_id,
             model_context_window, status, policy, tool_names, seed_message_count, prefix_sha256, repository_id,
             client_key, data_key)
        values ($1, $2, $3, $4, $5, $6, $7, $8, $9, 'created', $10, $11, $12, $13, $14, $15,
            (select data_key from conversation_counters where conversation_id = $2))
        returning data_key",
        session_id,
        new.conversation_id,
        new.space_id,
        new.mailbox_id,
        new.trigger_type,
        new.trigger_id,
        new.agent,
        new.model_id,
        new.model_context_window,
        policy,
        &tool_names as &[&str],
        new.seeds.len() as i32,
        prefix_sha256,
        new.repository_id,
        client_key.as_deref()
    )
    .fetch_one(&mut *tx)
    .await?;
    crate::failpoint!("K4");
    let seal = vault.seal(data_key.as_deref()).await?;
    if !seal.is_on() {
        return insert_seeds(tx, session_id, &new.conversation_id, 0, &new.seeds).await;
    }
    let sealed: Vec<Seed> = new
        .seeds
        .iter()
        .map(|seed| Seed { content: seal.text(&seed.content).into_owned(), ..seed.clone() })
        .collect();
    insert_seeds(tx, session_id, &new.conversation_id, 0, &sealed).await
}

/// Writes seeds. A seed has an ordinal (0, 1, 2 … within its session) and no message number. `first` is the ordinal
/// of the first seed here: 0 in a new session, later the number of seeds that it has already.
async fn insert_seeds(
    tx: &mut PgConnection,
    session_id: &str,
    conversation_id: &str,
    first: i32,
    seeds: &[Seed],
) -> Result<()> {
    let (mut roles, mut contents, mut are_new) = (vec![], vec![], vec![]);
    for seed in seeds {
        roles.push(seed.role.as_str());
        contents.push(seed.content.as_str());
        are_new.push(seed.is_new);
    }
    // A seed that the conversation's previous session has too is not new. `with ordinality` counts from 1.
    sqlx::query!(
        "with before as (
            select m.role, m.content from session_seed_messages m
            where m.session_id = (
                select s.session_id from conversation_sessions s
                where s.conversation_id = $5
                    and s.ordinal < (select ordinal from conversation_sessions where session_id = $1)
                order by s.ordinal desc
                limit 1
            )
        )
        insert into session_seed_messages (space_id, session_id, ordinal, role, content, is_new)
        select s.space_id, $1, $6::int + seed.ordinal - 1, seed.role, seed.content,
            seed.is_new and not exists (
                select from before where before.role = seed.role and before.content = seed.content
            )
        from conversation_sessions s,
            unnest($2::text[], $3::text[], $4::boolean[]) with ordinality as seed (role, content, is_new, ordinal)
        where s.session_id = $1",
        session_id,
        &roles as &[&str],
        &contents as &[&str],
        &are_new,
        conversation_id,
        first
    )
    .execute(&mut *tx)
    .await?;
    Ok(())
}
