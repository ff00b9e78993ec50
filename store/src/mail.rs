//! Incoming mail: which mails are known, which conversations they name, and how they reach a session.

mod thread;

pub use thread::Said;

use crate::create::find_or_create;
use crate::encryption::{SEALED, Seal, seal_in};
use crate::wake::{By, NewMessage, NewSession, Woken, acceptance_of, conflict, put_in_inbox};
use crate::{Error, Result, Store, run};
use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::PgConnection;
use wakeful_workflow::inbox::Acceptance;
use wakeful_workflow::mail::domain_of;
use wakeful_workflow::mail::policy;
use wakeful_workflow::policy::ReplyRoute;

/// A mail as it is stored.
#[derive(Clone, Debug)]
pub struct NewMail {
    pub space_id: String,
    pub mailbox_id: String,
    /// Identifies the mail in its mailbox: its Message-ID, or a hash.
    pub message_id: String,
    /// As stored: `space/id`. Ignored for a dropped mail.
    pub conversation_id: String,
    pub from_address: Option<String>,
    pub subject: String,
    pub subject_key: String,
    pub body_sha256: String,
    /// Stands for the address that gets the answer. Mails with one key are counted together. `None`: it has no sender, or is dropped.
    pub answered_key: Option<String>,
    /// The mails that its headers name, in the form of [`NewMail::message_id`].
    pub answers: Vec<String>,
    pub joined: bool,
    pub sent_at: Option<String>,
}

/// The session that a mail wakes.
#[derive(Clone, Copy, Debug)]
pub enum MailWakes<'a> {
    /// A session for this mail alone.
    OwnSession(&'a NewSession),
    /// A session that has asked a question. Its later replies go by `reply`, which [`policy::route_after_answer`]
    /// combines with the route of the question. `proved` is the DMARC result of the mail's sender.
    Answer { session_id: &'a str, reply: Option<&'a ReplyRoute>, proved: bool },
}

/// What happened to a mail that was received before.
#[derive(Clone, Debug)]
pub enum KnownMail {
    /// The first answer, marked as a duplicate.
    Woke(Woken),
    Dropped {
        reason: String,
    },
}

/// A place in the list of mails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MailPlace {
    pub received_at: DateTime<Utc>,
    pub message_id: String,
    pub mailbox_id: String,
}

/// A mail as shown in a list.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MailView {
    pub mailbox_id: String,
    pub message_id: String,
    pub from_address: Option<String>,
    pub subject: String,
    pub session_id: Option<String>,
    pub joined: bool,
    pub dropped: Option<String>,
    pub received_at: DateTime<Utc>,
}

impl Store {
    /// What happened to the mail, if it was received before.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn known_mail(
        &self,
        space_id: &str,
        mailbox_id: &str,
        message_id: &str,
    ) -> Result<Option<KnownMail>> {
        let row = sqlx::query!(
            r#"select m.session_id, m.dropped, i.run_id as "run_id?", i.outcome as "outcome?"
            from mails m
            left join session_inbox i on i.session_id = m.session_id and i.client_key = $4
            where m.space_id = $1 and m.mailbox_id = $2 and m.message_id = $3"#,
            space_id,
            mailbox_id,
            message_id,
            self.stored_key_of_mail(space_id, mailbox_id, message_id).await?
        )
        .fetch_optional(&self.intake)
        .await?;
        let Some(row) = row else { return Ok(None) };
        if let Some(reason) = row.dropped {
            return Ok(Some(KnownMail::Dropped { reason }));
        }
        let (Some(session_id), Some(run_id), Some(outcome)) = (row.session_id, row.run_id, row.outcome)
        else {
            return Err(Error::corrupt("mail", format!("{message_id:?} has no message in its session")));
        };
        let outcome = acceptance_of(&outcome)?;
        Ok(Some(KnownMail::Woke(Woken { session_id, run_id, outcome, duplicate: true })))
    }

    /// The key under which the mail's message is in its session's inbox.
    async fn stored_key_of_mail(&self, space_id: &str, mailbox_id: &str, message_id: &str) -> Result<String> {
        if !self.vault.is_open() {
            return Ok(message_id.to_owned());
        }
        let session_id = sqlx::query_scalar!(
            "select session_id from mails where space_id = $1 and mailbox_id = $2 and message_id = $3",
            space_id,
            mailbox_id,
            message_id
        )
        .fetch_optional(&self.intake)
        .await?
        .flatten();
        let Some(session_id) = session_id else { return Ok(message_id.to_owned()) };
        Ok(self.seal_of(&session_id).await?.text(message_id).into_owned())
    }

    /// Returns whether the mailbox knows a different mail with this id: from another sender, or with another
    /// text.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn mail_is_other(
        &self,
        space_id: &str,
        mailbox_id: &str,
        message_id: &str,
        from_address: Option<&str>,
        body_sha256: &str,
    ) -> Result<bool> {
        Ok(sqlx::query_scalar!(
            r#"select exists (
                select from mails
                where space_id = $1 and mailbox_id = $2 and message_id = $3
                    and (from_address is distinct from $4 or body_sha256 <> all ($5))
            ) as "exists!""#,
            space_id,
            mailbox_id,
            message_id,
            from_address,
            &self.vault.macs(body_sha256)
        )
        .fetch_one(&self.intake)
        .await?)
    }

    /// Stores the mail and wakes its session, in one transaction. When this returns, both are durable.
    ///
    /// # Errors
    /// Those of [`Store::wake`]; for an answer also [`Error::Conflict`] if no question is open.
    pub async fn accept_mail(
        &self,
        mail: &NewMail,
        wakes: MailWakes<'_>,
        message: &NewMessage,
    ) -> Result<Woken> {
        let woken = self.try_take_mail(mail, wakes, message).await;
        self.note_refusal(woken)
    }

    async fn try_take_mail(
        &self,
        mail: &NewMail,
        wakes: MailWakes<'_>,
        message: &NewMessage,
    ) -> Result<Woken> {
        match wakes {
            MailWakes::OwnSession(new) => self.ready_key(new).await?,
            MailWakes::Answer { session_id, .. } => self.seal_of(session_id).await?,
        };
        let mut tx = self.intake.begin().await?;
        let woken = match wakes {
            MailWakes::OwnSession(new) => {
                match find_or_create(&mut tx, &self.vault, new, message.client_key.as_deref()).await {
                    Ok(session) => put_in_inbox(&mut tx, &self.vault, session, message).await?,
                    // The same mail came in by another way before, into another conversation, and has its
                    // session there.
                    Err(refused) if made_elsewhere(&refused) => {
                        tx.rollback().await?;
                        return self.woken_before(mail, refused).await;
                    }
                    Err(error) => return Err(error),
                }
            }
            MailWakes::Answer { session_id, reply, proved } => {
                let session = run::lock(&mut tx, session_id).await?;
                By::Anyone.may_wake(&session)?;
                let refused = conflict(session.clone(), "an answer");
                let woken = put_in_inbox(&mut tx, &self.vault, session, message).await?;
                if !woken.duplicate && woken.outcome != Acceptance::Delivered {
                    return Err(refused);
                }
                if let Some(reply) = reply.filter(|_| !woken.duplicate) {
                    update_route(&mut tx, session_id, reply, proved).await?;
                }
                woken
            }
        };
        // The same mail can come in by two ways at once. The second one to get here would wake another session, so
        // undo its work and return the answer of the first.
        if !self.remember(&mut tx, mail, Some(&woken.session_id), None).await? && !woken.duplicate {
            tx.rollback().await?;
            let dropped = Error::corrupt("mail", format!("{:?} was dropped a moment ago", mail.message_id));
            return self.woken_before(mail, dropped).await;
        }
        crate::failpoint!("K1");
        tx.commit().await?;
        Ok(woken)
    }

    /// Returns the first answer to a mail that another entry point has received in the meantime. Returns
    /// `refused` if that mail woke no session.
    async fn woken_before(&self, mail: &NewMail, refused: Error) -> Result<Woken> {
        let known = self.known_mail(&mail.space_id, &mail.mailbox_id, &mail.message_id).await?;
        match known {
            Some(KnownMail::Woke(first)) => Ok(first),
            Some(KnownMail::Dropped { .. }) | None => Err(refused),
        }
    }

    /// Stores a mail that wakes no session, and the reason.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn drop_mail(&self, mail: &NewMail, reason: &str) -> Result<()> {
        let mut connection = self.intake.acquire().await?;
        let dropped = self.remember(&mut connection, mail, None, Some(reason)).await.map(|_| ());
        self.note_refusal(dropped)
    }

    /// The reasons why the session sends no replies: its trigger looks like the answer of a machine. Empty if
    /// there is no such sign.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a policy that cannot be read, [`Error::Database`].
    pub async fn loop_suspicion(&self, session_id: &str) -> Result<Vec<String>> {
        let reasons = sqlx::query_scalar!(
            "select policy -> 'loop_suspicion' from conversation_sessions where session_id = $1",
            session_id
        )
        .fetch_optional(&self.intake)
        .await?
        .flatten();
        let reasons = reasons.map(serde_json::from_value).transpose();
        Ok(reasons.map_err(|error| Error::corrupt("policy", error))?.unwrap_or_default())
    }

    /// The newest mails of all mailboxes, or only the dropped ones.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn mails(
        &self,
        space_id: &str,
        only_dropped: bool,
        before: Option<&MailPlace>,
        limit: i64,
    ) -> Result<Vec<MailView>> {
        let mut tx = self.pool.planned().await?;
        let mut mails = sqlx::query_as!(
            MailView,
            "select mailbox_id, message_id, from_address, subject, session_id, joined, dropped, received_at
            from mails
            where space_id = $1 and (dropped is not null or not $2)
                and ($3::timestamptz is null
                    or received_at <= $3 and (received_at, message_id, mailbox_id) < ($3, $4, $5))
            order by received_at desc, message_id desc, mailbox_id desc
            limit $6",
            space_id,
            only_dropped,
            before.map(|place| place.received_at),
            before.map(|place| place.message_id.as_str()),
            before.map(|place| place.mailbox_id.as_str()),
            limit
        )
        .fetch_all(&mut *tx)
        .await?;
        tx.rollback().await?;
        for mail in &mut mails {
            let subject = std::mem::take(&mut mail.subject);
            mail.subject = self.reveal(mail.session_id.as_deref(), subject).await;
        }
        Ok(mails)
    }

    /// Stores the mail. Returns `false` if it was known before. A mail that was dropped before and wakes a session now takes over its
    /// old row.
    /// With `[encryption]`, what is compared with later mails is a hash that only the master key makes, and a mail that reached no
    /// encrypted conversation leaves no subject.
    async fn remember(
        &self,
        tx: &mut PgConnection,
        mail: &NewMail,
        session_id: Option<&str>,
        dropped: Option<&str>,
    ) -> Result<bool> {
        let seal = match session_id {
            Some(session_id) => seal_in(&mut *tx, session_id).await?,
            None => Seal::default(),
        };
        let subject = match session_id {
            None if self.vault.is_open() => SEALED.into(),
            _ => seal.text(&mail.subject),
        };
        let inserted = sqlx::query!(
            "insert into mails
                (space_id, mailbox_id, message_id, conversation_id, session_id, from_address, subject, subject_key,
                 body_sha256, answers, joined, dropped, sent_at, answered_key)
            values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)
            -- A copy that was dropped gives way to one that wakes a session.
            on conflict (space_id, mailbox_id, message_id) do update
                set conversation_id = excluded.conversation_id, session_id = excluded.session_id,
                    subject = excluded.subject, joined = excluded.joined, answered_key = excluded.answered_key,
                    dropped = null
                where mails.dropped is not null and excluded.dropped is null",
            mail.space_id,
            mail.mailbox_id,
            mail.message_id,
            session_id.map(|_| mail.conversation_id.as_str()),
            session_id,
            mail.from_address,
            &*subject,
            self.vault.mac(&mail.subject_key),
            self.vault.mac(&mail.body_sha256),
            &mail.answers,
            mail.joined,
            dropped,
            mail.sent_at,
            mail.answered_key.as_deref().map(|key| self.vault.mac(key))
        )
        .execute(tx)
        .await?;
        Ok(inserted.rows_affected() > 0)
    }
}

/// Returns whether a trigger's session could not be created because it exists already, in another
/// conversation. A transaction that ended a moment ago may have created it.
fn made_elsewhere(refused: &Error) -> bool {
    match refused {
        Error::Database(sqlx::Error::Database(error)) => error.is_unique_violation(),
        other => matches!(other, Error::KeyReused { .. }),
    }
}

/// Makes the locked session reply to the mail that answered its question.
async fn update_route(
    tx: &mut PgConnection,
    session_id: &str,
    answer: &ReplyRoute,
    proved: bool,
) -> Result<()> {
    let row = sqlx::query!(
        r#"select s.policy -> 'reply' as asked, d.delivery_id as "delivery_id?"
        from conversation_sessions s
        left join lateral (
            select delivery_id from deliveries
            where session_id = s.session_id and channel = 'email'
            order by ordinal desc
            limit 1
        ) d on true
        where s.session_id = $1"#,
        session_id
    )
    .fetch_one(&mut *tx)
    .await?;
    let Some(asked) = row.asked else { return Ok(()) };
    let seal = seal_in(&mut *tx, session_id).await?;
    let asked = seal.open_value(asked)?;
    let asked: ReplyRoute = serde_json::from_value(asked).map_err(|error| Error::corrupt("policy", error))?;
    // The Message-ID of every mail that Wakeful sends consists of the delivery's id and the sender's domain.
    let from = asked.to["from"].as_str().unwrap_or_default().trim_end_matches('>');
    let question = row.delivery_id.map(|id| format!("{id}@{}", domain_of(from)));
    let route = policy::route_after_answer(&asked, question.as_deref(), answer, proved);
    let mut route = serde_json::to_value(route).map_err(|error| Error::corrupt("policy", error))?;
    seal.value(&mut route);
    sqlx::query!(
        "update conversation_sessions
        set policy = jsonb_set(policy, '{reply}', $2)
        where session_id = $1",
        session_id,
        route
    )
    .execute(tx)
    .await?;
    Ok(())
}
