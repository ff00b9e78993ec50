//! Links by which a person acts once, without a login.
//!
//! A token is 256 random bits. Only its SHA-256 is stored, and the token itself stands in the one message that was sent. The row says
//! what the act is, on which session, and a hash of what it was about when the link was made: the failure, the question, or the
//! arguments of the call. The act's own transaction uses the link up, after it has locked the session and compared that hash. So
//! if many people press at once, one of them acts, and each agrees only to arguments that they have read.

use crate::audit::act;
use crate::encryption::Vault;
use crate::resend::{self, Resend};
use crate::resolve::{self, Decision, Effect};
use crate::run::{self, Locked};
use crate::steer;
use crate::wake::{self, By, NewMessage};
use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::json;
use sha2::{Digest, Sha256};
use sqlx::PgConnection;
use std::time::Duration;
use wakeful_workflow::notify::LinkState as State;
use wakeful_workflow::resolve::Resolution;
use wakeful_workflow::session::CallStatus;

/// What every token begins with.
const PREFIX: &str = "wkl_";

/// What a link does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "act", rename_all = "snake_case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Act {
    /// Goes on with a failed run.
    Retry,
    /// Answers the agent's question.
    Answer { call_id: String },
    /// Says how an uncertain effect ended.
    Resolve { effect_id: String },
    /// Approves or declines a call that waits for it.
    Approve { call_id: String },
    /// Sends a failed delivery again.
    Resend { delivery_id: String },
}

impl Act {
    /// The word in rows and answers.
    pub fn as_str(&self) -> &'static str {
        match self {
            Act::Retry => "retry",
            Act::Answer { .. } => "answer",
            Act::Resolve { .. } => "resolve",
            Act::Approve { .. } => "approve",
            Act::Resend { .. } => "resend",
        }
    }

    /// The call or the delivery that it is about.
    pub fn effect(&self) -> Option<&str> {
        match self {
            Act::Retry => None,
            Act::Answer { call_id: id }
            | Act::Approve { call_id: id }
            | Act::Resolve { effect_id: id }
            | Act::Resend { delivery_id: id } => Some(id),
        }
    }

    fn of(word: &str, effect: Option<String>) -> Result<Act> {
        match (word, effect) {
            ("retry", None) => Ok(Act::Retry),
            ("answer", Some(call_id)) => Ok(Act::Answer { call_id }),
            ("resolve", Some(effect_id)) => Ok(Act::Resolve { effect_id }),
            ("approve", Some(call_id)) => Ok(Act::Approve { call_id }),
            ("resend", Some(delivery_id)) => Ok(Act::Resend { delivery_id }),
            (word, _) => Err(Error::corrupt("act of a link", word)),
        }
    }
}

/// By which door an act comes. A token works by its own only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The page of a link.
    Link,
    /// A button of Slack, whose request Slack signs.
    Slack,
}

impl Way {
    fn as_str(self) -> &'static str {
        match self {
            Way::Link => "link",
            Way::Slack => "slack",
        }
    }
}

/// A link that was just made. The token is kept nowhere.
#[derive(Clone, Debug)]
pub struct Minted {
    pub act: Act,
    pub session_id: String,
    pub token: String,
}

/// What a link would do now.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Link {
    pub notification_id: String,
    #[serde(flatten)]
    pub act: Act,
    pub session_id: String,
    pub space_id: String,
    pub agent: String,
    /// Without its space.
    pub conversation_id: String,
    pub status: String,
    /// What it is about: the error, the question, or the call with its arguments.
    pub about: Option<String>,
    pub expires_at: DateTime<Utc>,
    pub used_at: Option<DateTime<Utc>>,
    pub used_by: Option<String>,
    pub state: State,
}

/// What the person chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Of a retry, and of a delivery that is sent again.
    Go,
    /// Of a question.
    Answer(String),
    /// Of an uncertain effect, and of a call that waits for approval.
    Resolution(Resolution),
}

struct Row {
    notification_id: String,
    session_id: String,
    act: Act,
    bound_sha256: String,
    expires_at: DateTime<Utc>,
    is_over: bool,
    used_at: Option<DateTime<Utc>>,
    used_by: Option<String>,
}

impl Store {
    /// The acts that a session asks a person for now.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn wanted_acts(&self, session_id: &str) -> Result<Vec<Act>> {
        let rows = sqlx::query!(
            r#"select s.status, c.call_id as "call_id?", c.status as "call?"
            from conversation_sessions s
            left join tool_calls c on c.session_id = s.session_id and c.result_message_number is null and c.outcome is null
                and c.status in ('waiting', 'uncertain', 'unapproved')
            where s.session_id = $1 and s.status in ('failed', 'needs_attention', 'waiting_input')
            order by c.message_number, c.call_id
            limit 20"#,
            session_id
        )
        .fetch_all(&self.pool)
        .await?;
        let mut acts = Vec::new();
        for row in &rows {
            match (row.status.as_str(), row.call.as_deref(), &row.call_id) {
                ("waiting_input", Some("waiting"), Some(id)) => {
                    acts.push(Act::Answer { call_id: id.clone() })
                }
                ("needs_attention", Some("uncertain"), Some(id)) => {
                    acts.push(Act::Resolve { effect_id: id.clone() });
                }
                ("needs_attention", Some("unapproved"), Some(id)) => {
                    acts.push(Act::Approve { call_id: id.clone() });
                }
                _ => {}
            }
        }
        // An effect that is resolved lets the run go on by itself.
        let may_retry =
            rows.first().is_some_and(|row| matches!(row.status.as_str(), "failed" | "needs_attention"));
        if may_retry && acts.is_empty() {
            acts.push(Act::Retry);
        }
        Ok(acts)
    }

    /// The act that a delivery which was not sent asks for.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn wanted_of_delivery(&self, delivery_id: &str) -> Result<Option<Act>> {
        let status = sqlx::query_scalar!("select status from deliveries where delivery_id = $1", delivery_id)
            .fetch_optional(&self.pool)
            .await?;
        Ok(match status.as_deref() {
            Some("failed" | "expired") => Some(Act::Resend { delivery_id: delivery_id.to_owned() }),
            Some("uncertain") => Some(Act::Resolve { effect_id: delivery_id.to_owned() }),
            _ => None,
        })
    }

    /// Makes a link. `None`: the session is not in a state in which the act is possible.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn mint_link(
        &self,
        notification_id: &str,
        session_id: &str,
        act: Act,
        way: Way,
        lasts: Duration,
    ) -> Result<Option<Minted>> {
        let mut connection = self.pool.acquire().await?;
        let Some(bound) = bound(&mut connection, session_id, &act).await? else { return Ok(None) };
        let token = format!("{PREFIX}{}", hex::encode(crate::token::random::<32>()?));
        sqlx::query!(
            "insert into act_links (token_sha256, notification_id, act, session_id, effect_id, bound_sha256, way, expires_at)
            values ($1, $2, $3, $4, $5, $6, $7, clock_timestamp() + make_interval(secs => $8))",
            sha256(&token),
            notification_id,
            act.as_str(),
            session_id,
            act.effect(),
            bound,
            way.as_str(),
            lasts.as_secs_f64()
        )
        .execute(&mut *connection)
        .await?;
        Ok(Some(Minted { act, session_id: session_id.to_owned(), token }))
    }

    /// Deletes the unused links that earlier attempts at a message made. The attempts are those since a person asked for it last, and
    /// all of them were refused.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn delete_unsent_links(&self, notification_id: &str) -> Result<u64> {
        let deleted = sqlx::query!(
            "delete from act_links
            where notification_id = $1 and used_at is null
                and created_at >= (select tried_since from notifications where notification_id = $1)",
            notification_id
        );
        Ok(deleted.execute(&self.pool).await?.rows_affected())
    }

    /// What a link would do. Changes nothing.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is no such token, or its session is gone; [`Error::Database`].
    pub async fn link(&self, token: &str, way: Way) -> Result<Link> {
        // Anybody can present made-up ones.
        if !is_token(token) {
            return Err(unknown());
        }
        let looks = self.may_look_up().await?;
        let mut connection = self.pool.acquire().await?;
        let row = read(&mut connection, &sha256(token), way).await?;
        drop(looks);
        let now = bound(&mut connection, &row.session_id, &row.act).await?;
        drop(connection);
        let state = match () {
            () if row.used_at.is_some() => State::Used,
            () if row.is_over => State::Expired,
            () if now.as_deref() != Some(row.bound_sha256.as_str()) => State::Changed,
            () => State::Open,
        };
        let session = self.session(None, &row.session_id).await?;
        let about = match &row.act {
            Act::Retry => session.error,
            Act::Answer { .. } => session.question,
            Act::Resolve { effect_id: id }
            | Act::Approve { call_id: id }
            | Act::Resend { delivery_id: id } => self.effect_in_words(&row.session_id, id).await?,
        };
        Ok(Link {
            notification_id: row.notification_id,
            act: row.act,
            session_id: row.session_id,
            space_id: session.space_id,
            agent: session.agent,
            conversation_id: session.conversation_id,
            status: session.status,
            about: if state == State::Open { about } else { None },
            expires_at: row.expires_at,
            used_at: row.used_at,
            used_by: row.used_by,
            state,
        })
    }

    /// Acts by a link, once. `by`: the address, or the name that a messenger vouches for.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is no such token. [`Error::Link`] if it was used, has expired, or what it was about has
    /// changed. Otherwise those of the act itself: nothing was done then, and the link can be used again.
    pub async fn act_by_link(&self, token: &str, way: Way, choice: &Choice, by: &str) -> Result<Link> {
        let token_sha256 = sha256(token);
        let before = self.link(token, way).await?;
        let mut tx = self.pool.in_line(&before.session_id).begin().await?;
        // The order of locks: conversation and session, then the link's own row.
        let session = run::lock(&mut tx, &before.session_id).await?;
        let used = sqlx::query_scalar!(
            "update act_links set used_at = clock_timestamp(), used_by = $2
            where token_sha256 = $1 and used_at is null and expires_at > clock_timestamp()
            returning bound_sha256",
            token_sha256,
            by
        );
        let Some(bound_sha256) = used.fetch_optional(&mut *tx).await? else {
            let row = read(&mut tx, &token_sha256, way).await?;
            let state = if row.used_at.is_some() { State::Used } else { State::Expired };
            return Err(Error::Link { state, by: row.used_by });
        };
        if bound(&mut tx, &session.session_id, &before.act).await?.as_deref() != Some(bound_sha256.as_str()) {
            return Err(Error::Link { state: State::Changed, by: None });
        }
        act::does(&format!("link.{}", before.act.as_str()));
        act::on(&session.session_id);
        carry_out(&mut tx, &self.vault, session, &before.act, choice, token_sha256).await?;
        crate::failpoint!("K82_act");
        tx.commit().await?;
        self.link(token, way).await
    }
}

async fn carry_out(
    tx: &mut PgConnection,
    vault: &Vault,
    session: Locked,
    act: &Act,
    choice: &Choice,
    token_sha256: String,
) -> Result<()> {
    let id = session.session_id.clone();
    let unfit = |reason: &str| Error::Refused { session_id: id.clone(), reason: reason.to_owned() };
    match (act, choice) {
        (Act::Retry, Choice::Go) => {
            steer::retry_in(tx, session, Some("by a link"), By::Anyone).await?;
        }
        (Act::Answer { .. }, Choice::Answer(text)) => {
            let message = NewMessage {
                client_key: Some(format!("link/{token_sha256}")),
                text: text.clone(),
                sender: None,
                trace_context: None,
                attachments: Vec::new(),
            };
            wake::answer_in(tx, vault, session, &message).await?;
        }
        (Act::Resolve { effect_id: id } | Act::Approve { call_id: id }, Choice::Resolution(resolution)) => {
            let approves = matches!(act, Act::Approve { .. });
            if approves != (resolution.decides() == CallStatus::Unapproved) {
                return Err(unfit("this link takes another decision"));
            }
            let effect = match !approves && is_delivery(tx, &session, id).await? {
                true => Effect::Delivery(id.clone()),
                false => Effect::Call(id.clone()),
            };
            let decision = Decision {
                effect,
                resolution: resolution.clone(),
                by: act::actor(),
                // The model reads why a call was declined, and a link gives no reason for it.
                reason: (!approves).then(|| "by a link".to_owned()),
                args_sha256: None,
                tell: false,
                trace_context: None,
            };
            resolve::resolve_in(tx, vault, &session, &decision).await?;
        }
        (Act::Resend { delivery_id }, Choice::Go) => {
            let asked =
                Resend { by: act::actor(), reason: Some("by a link".to_owned()), trace_context: None };
            resend::queue_again(tx, &session, delivery_id, &asked).await?;
        }
        (Act::Retry | Act::Resend { .. }, _) => return Err(unfit("this link takes no answer")),
        (Act::Answer { .. }, _) => return Err(unfit("this link answers a question: give an answer")),
        (Act::Resolve { .. }, _) => return Err(unfit("this link says how an effect ended: say how")),
        (Act::Approve { .. }, _) => return Err(unfit("this link approves a call or declines it: say which")),
    }
    Ok(())
}

async fn is_delivery(tx: &mut PgConnection, session: &Locked, id: &str) -> Result<bool> {
    Ok(sqlx::query_scalar!(
        r#"select exists (select from deliveries where session_id = $1 and delivery_id = $2) as "is!""#,
        session.session_id,
        id
    )
    .fetch_one(tx)
    .await?)
}

/// The token must stand in no log, so the error has none.
fn unknown() -> Error {
    Error::NotFound { what: "link", id: "of this token".to_owned() }
}

fn is_token(text: &str) -> bool {
    let digits = text.strip_prefix(PREFIX).unwrap_or_default();
    digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

async fn read(connection: &mut PgConnection, token_sha256: &str, way: Way) -> Result<Row> {
    let row = sqlx::query!(
        r#"select notification_id, act, session_id, effect_id, bound_sha256, expires_at, used_at, used_by,
            expires_at <= clock_timestamp() as "is_over!"
        from act_links where token_sha256 = $1 and way = $2"#,
        token_sha256,
        way.as_str()
    )
    .fetch_optional(connection)
    .await?
    .ok_or_else(unknown)?;
    Ok(Row {
        notification_id: row.notification_id,
        session_id: row.session_id,
        act: Act::of(&row.act, row.effect_id)?,
        bound_sha256: row.bound_sha256,
        expires_at: row.expires_at,
        is_over: row.is_over,
        used_at: row.used_at,
        used_by: row.used_by,
    })
}

/// The hash of what an act is about now. `None`: the act is not possible now.
async fn bound(connection: &mut PgConnection, session_id: &str, act: &Act) -> Result<Option<String>> {
    let about = match act {
        Act::Retry => sqlx::query_scalar!(
            r#"select concat_ws(' ', s.last_step_number, s.status, s.error, (
                select r.run_id from session_runs r where r.session_id = s.session_id order by r.created_at desc limit 1
            ), (
                select max(e.seq) from session_events e where e.session_id = s.session_id and e.type = 'state_transition'
            )) as "about!"
            from conversation_sessions s
            where s.session_id = $1 and s.status in ('failed', 'needs_attention')"#,
            session_id
        )
        .fetch_optional(connection)
        .await?,
        Act::Answer { call_id } => sqlx::query_scalar!(
            r#"select c.args_sha256 as "about!"
            from tool_calls c
            join conversation_sessions s using (session_id)
            where c.session_id = $1 and c.call_id = $2 and c.status = 'waiting' and c.result_message_number is null
                and c.outcome is null and s.status = 'waiting_input' and not s.cancel_requested"#,
            session_id,
            call_id
        )
        .fetch_optional(connection)
        .await?,
        Act::Resolve { effect_id } => sqlx::query_scalar!(
            r#"select concat_ws(' ', c.name, c.args_sha256) as "about!"
            from tool_calls c where c.session_id = $1 and c.call_id = $2 and c.status = 'uncertain'
            union all
            select concat_ws(' ', d.channel, d.attempt, d.resent, encode(sha256(convert_to(d.content::text, 'UTF8')), 'hex'))
            from deliveries d where d.session_id = $1 and d.delivery_id = $2 and d.status = 'uncertain'"#,
            session_id,
            effect_id
        )
        .fetch_optional(connection)
        .await?,
        Act::Approve { call_id } => sqlx::query_scalar!(
            r#"select concat_ws(' ', c.name, c.args_sha256) as "about!"
            from tool_calls c
            join conversation_sessions s using (session_id)
            where c.session_id = $1 and c.call_id = $2 and c.status = 'unapproved' and c.result_message_number is null
                and not s.cancel_requested"#,
            session_id,
            call_id
        )
        .fetch_optional(connection)
        .await?,
        Act::Resend { delivery_id } => sqlx::query_scalar!(
            r#"select concat_ws(' ', d.channel, d.attempt, d.resent, encode(sha256(convert_to(d.content::text, 'UTF8')), 'hex'))
                as "about!"
            from deliveries d
            where d.session_id = $1 and d.delivery_id = $2 and d.status in ('failed', 'expired') and not d.imported"#,
            session_id,
            delivery_id
        )
        .fetch_optional(connection)
        .await?,
    };
    Ok(about.map(|about| sha256(&json!([act, session_id, about]).to_string())))
}

fn sha256(text: &str) -> String {
    hex::encode(Sha256::digest(text.as_bytes()))
}
