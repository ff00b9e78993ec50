//! Mail that came in: which is known, which conversation it names, and its way into a session.

use crate::create::find_or_create;
use crate::wake::{By, NewMessage, NewSession, Woken, accept, acceptance_of, conflict};
use crate::{Error, Result, Store, run};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use sqlx::PgConnection;
use wakeful_workflow::inbox::Acceptance;
use wakeful_workflow::mail::domain_of;
use wakeful_workflow::mail::policy::{self, Exchange};
use wakeful_workflow::mail::thread::Candidate;
use wakeful_workflow::policy::ReplyRoute;
use wakeful_workflow::record::Role;

/// A mail as it is remembered.
#[derive(Clone, Debug)]
pub struct NewMail {
    pub space_id: String,
    pub mailbox_id: String,
    /// What it is known by in its mailbox: its Message-ID, or a hash.
    pub message_id: String,
    /// As it is stored. Of a dropped mail it is not read.
    pub conversation_id: String,
    pub from_address: Option<String>,
    pub subject: String,
    pub subject_key: String,
    pub body_sha256: String,
    /// What its headers name, as [`NewMail::message_id`] would be.
    pub answers: Vec<String>,
    pub joined: bool,
    pub sent_at: Option<String>,
}

/// What a mail wakes.
#[derive(Clone, Copy, Debug)]
pub enum MailWakes<'a> {
    /// A session of its own.
    New(&'a NewSession),
    /// One that has asked a question. What it says next goes by `reply`, as [`policy::renewed`] makes it of the route by
    /// which it asked; `proved` is the DMARC result of the mail's sender.
    Answer { session_id: &'a str, reply: Option<&'a ReplyRoute>, proved: bool },
}

/// What became of a mail that came before.
#[derive(Clone, Debug)]
pub enum KnownMail {
    /// The first answer, marked as a duplicate's.
    Woke(Woken),
    Dropped {
        reason: String,
    },
}

/// A message of a thread of mails, in or out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// `user` or `assistant`.
    pub role: Role,
    pub text: String,
}

/// A mail in a list.
#[derive(Clone, Debug, Serialize)]
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
    /// What became of the mail, if it came before.
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
            left join session_inbox i on i.session_id = m.session_id and i.client_key = m.message_id
            where m.space_id = $1 and m.mailbox_id = $2 and m.message_id = $3"#,
            space_id,
            mailbox_id,
            message_id
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

    /// Whether the mailbox knows a mail of this id that is another one: of another sender, or with another text.
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
                    and (from_address is distinct from $4 or body_sha256 <> $5)
            ) as "exists!""#,
            space_id,
            mailbox_id,
            message_id,
            from_address,
            body_sha256
        )
        .fetch_one(&self.intake)
        .await?)
    }

    /// Remembers the mail and wakes what it is for, in one transaction. When this returns, both are durable.
    ///
    /// # Errors
    /// Those of [`Store::wake`]; for an answer also [`Error::Conflict`] where no question is open.
    pub async fn take_mail(
        &self,
        mail: &NewMail,
        wakes: MailWakes<'_>,
        message: &NewMessage,
    ) -> Result<Woken> {
        let woken = self.try_take_mail(mail, wakes, message).await;
        self.noted(woken)
    }

    async fn try_take_mail(
        &self,
        mail: &NewMail,
        wakes: MailWakes<'_>,
        message: &NewMessage,
    ) -> Result<Woken> {
        let mut tx = self.intake.begin().await?;
        let woken = match wakes {
            MailWakes::New(new) => {
                match find_or_create(&mut tx, new, message.client_key.as_deref()).await {
                    Ok(session) => accept(&mut tx, session, message).await?,
                    // By another door it belonged to another conversation, and it has its session there.
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
                let woken = accept(&mut tx, session, message).await?;
                if !woken.duplicate && woken.outcome != Acceptance::Delivered {
                    return Err(refused);
                }
                if let Some(reply) = reply.filter(|_| !woken.duplicate) {
                    renew_route(&mut tx, session_id, reply, proved).await?;
                }
                woken
            }
        };
        // Of the same mail by two doors at once, the second one to get here has woken something else than the first.
        if !remember(&mut tx, mail, Some(&woken.session_id), None).await? && !woken.duplicate {
            tx.rollback().await?;
            let dropped = Error::corrupt("mail", format!("{:?} was dropped a moment ago", mail.message_id));
            return self.woken_before(mail, dropped).await;
        }
        crate::failpoint!("K1");
        tx.commit().await?;
        Ok(woken)
    }

    /// The first answer to a mail that was taken by another door meanwhile; `refused` where it woke nobody.
    async fn woken_before(&self, mail: &NewMail, refused: Error) -> Result<Woken> {
        let known = self.known_mail(&mail.space_id, &mail.mailbox_id, &mail.message_id).await?;
        match known {
            Some(KnownMail::Woke(first)) => Ok(first),
            Some(KnownMail::Dropped { .. }) | None => Err(refused),
        }
    }

    /// Remembers a mail that wakes nobody, and why.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn drop_mail(&self, mail: &NewMail, reason: &str) -> Result<()> {
        let mut connection = self.intake.acquire().await?;
        let dropped = remember(&mut connection, mail, None, Some(reason)).await.map(|_| ());
        self.noted(dropped)
    }

    /// The conversations of the mailbox that hold a message of one of these ids, in the order of `ids`: mails that came in,
    /// and those that went out under the id of their delivery.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn conversations_named(
        &self,
        space_id: &str,
        mailbox_id: &str,
        ids: &[String],
    ) -> Result<Vec<Candidate>> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let rows = sqlx::query!(
            r#"with named as (
                select m.conversation_id, n.ordinal
                from unnest($3::text[]) with ordinality n (id, ordinal)
                join mails m on m.space_id = $1 and m.mailbox_id = $2 and m.message_id = n.id
                where m.conversation_id is not null
                union all
                select d.conversation_id, n.ordinal
                from unnest($3::text[]) with ordinality n (id, ordinal)
                join deliveries d on d.delivery_id = split_part(n.id, '@', 1) and d.channel = 'email'
                join conversation_counters c on c.conversation_id = d.conversation_id
                where c.space_id = $1 and c.mailbox_id = $2
            )
            select
                named.conversation_id as "conversation_id!",
                array(
                    select distinct p.address
                    from conversation_sessions s
                    cross join lateral jsonb_array_elements_text(
                        case jsonb_typeof(s.policy -> 'participants') when 'array' then s.policy -> 'participants'
                            else '[]' end
                    ) p (address)
                    where s.conversation_id = named.conversation_id
                ) as "participants!"
            from named
            group by named.conversation_id
            order by min(named.ordinal)
            limit 20"#,
            space_id,
            mailbox_id,
            ids
        )
        .fetch_all(&self.intake)
        .await?;
        let candidates = rows
            .into_iter()
            .map(|row| Candidate { conversation_id: row.conversation_id, participants: row.participants });
        Ok(candidates.collect())
    }

    /// Whether the mailbox has this conversation.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn has_conversation(&self, mailbox_id: &str, conversation_id: &str) -> Result<bool> {
        Ok(sqlx::query_scalar!(
            r#"select exists (
                select from conversation_counters where conversation_id = $1 and mailbox_id = $2
            ) as "exists!""#,
            conversation_id,
            mailbox_id
        )
        .fetch_one(&self.intake)
        .await?)
    }

    /// The conversation's latest session that has asked a question by mail and waits for the answer: who asks elsewhere is
    /// answered there.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn asking_session(&self, conversation_id: &str) -> Result<Option<String>> {
        Ok(sqlx::query_scalar!(
            "select session_id from conversation_sessions
            where conversation_id = $1 and status = 'waiting_input'
                and trigger_type = 'email' and policy -> 'reply' ->> 'channel' = 'email'
            order by ordinal desc
            limit 1",
            conversation_id
        )
        .fetch_optional(&self.intake)
        .await?)
    }

    /// What has come to the mail's mailbox within the last hour. Where the mail goes on with a conversation, that is what came
    /// in there, whoever it says it is from: a peer may give itself another name with every mail. Where it does not, it is
    /// what its sender wrote about its subject and what went on with nothing either: each of those began a conversation, and
    /// what anybody can forge must silence nobody in a conversation that is theirs. Of the mails that say the very same only
    /// the sender's own count: several people may well agree.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn exchange(&self, mail: &NewMail) -> Result<Exchange> {
        let row = sqlx::query!(
            r#"select count(*) as "mails!",
                count(*) filter (where body_sha256 = $6 and from_address = $3) as "same_body!"
            from mails
            where space_id = $1 and mailbox_id = $2
                and received_at > clock_timestamp() - interval '1 hour'
                and dropped is null
                and (($7 and conversation_id = $4)
                    or (not $7 and not joined and from_address = $3 and subject_key = $5))"#,
            mail.space_id,
            mail.mailbox_id,
            mail.from_address,
            mail.conversation_id,
            mail.subject_key,
            mail.body_sha256,
            mail.joined
        )
        .fetch_one(&self.intake)
        .await?;
        Ok(Exchange { mails: row.mails, same_body: row.same_body })
    }

    /// The newest messages of the conversation, oldest first: what came in, and what went out as mail.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn mail_thread(&self, conversation_id: &str, limit: i64) -> Result<Vec<Said>> {
        let rows = sqlx::query!(
            r#"select "text", content, unsent as "unsent!", at as "at!" from (
                (select i.content as "text", null::json as content, false as unsent, i.created_at as at
                from session_inbox i
                join conversation_sessions s on s.session_id = i.session_id
                where s.conversation_id = $1
                order by i.created_at desc
                limit $2)
                union all
                (select null, d.content, d.status in ('failed', 'expired'), d.created_at
                from deliveries d
                where d.conversation_id = $1 and d.channel = 'email'
                order by d.created_at desc
                limit $2)
            ) said
            order by at desc
            limit $2"#,
            conversation_id,
            limit
        )
        .fetch_all(&self.intake)
        .await?;
        let said = rows.into_iter().rev().filter_map(|row| match (row.text, row.content) {
            (Some(text), _) => Some(Said { role: Role::User, text }),
            (None, Some(content)) => {
                let text = sent(&content)?;
                let text = if row.unsent { format!("[This could not be sent.]\n\n{text}") } else { text };
                Some(Said { role: Role::Assistant, text })
            }
            (None, None) => None,
        });
        Ok(said.collect())
    }

    /// Why nothing that the session says is sent: its trigger looks like the answer of a machine.
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

    /// The newest mails, or those that were dropped, of every mailbox.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn mails(&self, space_id: &str, only_dropped: bool, limit: i64) -> Result<Vec<MailView>> {
        Ok(sqlx::query_as!(
            MailView,
            "select mailbox_id, message_id, from_address, subject, session_id, joined, dropped, received_at
            from mails
            where space_id = $1 and (dropped is not null or not $2)
            order by received_at desc
            limit $3",
            space_id,
            only_dropped,
            limit
        )
        .fetch_all(&self.pool)
        .await?)
    }
}

/// Whether a trigger's session is not made because it is there already, in another conversation: since before, or since a
/// transaction that ended a moment ago.
fn made_elsewhere(refused: &Error) -> bool {
    match refused {
        Error::Database(sqlx::Error::Database(error)) => error.is_unique_violation(),
        other => matches!(other, Error::KeyReused { .. }),
    }
}

/// What a delivery said.
fn sent(content: &Value) -> Option<String> {
    if let Some(text) = content["text"].as_str() {
        return Some(text.to_owned());
    }
    let body = content["body"].as_str()?;
    let to: Vec<&str> = content["to"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let subject = content["subject"].as_str().unwrap_or_default();
    Some(format!("[Mail to {}: {subject}]\n\n{body}", to.join(", ")))
}

/// Has the locked session answer the mail that answered it.
async fn renew_route(
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
    let asked: ReplyRoute = serde_json::from_value(asked).map_err(|error| Error::corrupt("policy", error))?;
    // The Message-ID of every mail of ours is made of its delivery's id and its sender's domain.
    let from = asked.to["from"].as_str().unwrap_or_default().trim_end_matches('>');
    let question = row.delivery_id.map(|id| format!("{id}@{}", domain_of(from)));
    let route = policy::renewed(&asked, question.as_deref(), answer, proved);
    let route = serde_json::to_value(route).map_err(|error| Error::corrupt("policy", error))?;
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

/// `false`: it was known before.
async fn remember(
    tx: &mut PgConnection,
    mail: &NewMail,
    session_id: Option<&str>,
    dropped: Option<&str>,
) -> Result<bool> {
    let inserted = sqlx::query!(
        "insert into mails
            (space_id, mailbox_id, message_id, conversation_id, session_id, from_address, subject, subject_key,
             body_sha256, answers, joined, dropped, sent_at)
        values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
        on conflict (space_id, mailbox_id, message_id) do nothing",
        mail.space_id,
        mail.mailbox_id,
        mail.message_id,
        session_id.map(|_| mail.conversation_id.as_str()),
        session_id,
        mail.from_address,
        mail.subject,
        mail.subject_key,
        mail.body_sha256,
        &mail.answers,
        mail.joined,
        dropped,
        mail.sent_at
    )
    .execute(tx)
    .await?;
    Ok(inserted.rows_affected() > 0)
}
