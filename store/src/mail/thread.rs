//! The conversations that a mail may belong to: by its headers, by an open question, by recent mails.

use super::NewMail;
use crate::{Result, Store};
use serde_json::Value;
use wakeful_workflow::mail::policy::Exchange;
use wakeful_workflow::mail::thread::Candidate;
use wakeful_workflow::record::Role;

/// A message of a mail thread, incoming or outgoing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// `user` or `assistant`.
    pub role: Role,
    pub text: String,
}

impl Store {
    /// The conversations of the mailbox that contain a message with one of these ids, in the order of `ids`.
    /// Finds incoming mails, and outgoing mails by the delivery's id in their Message-ID. Also finds a conversation without a
    /// mailbox, if one of the ids is that of its open question.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
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
                -- "offset 0" has Postgres look for each id by the key, however many it expects. Without it a delivery's id is cut beside
                -- the policy, for every delivery that there is.
                from unnest($3::text[]) with ordinality n (id, ordinal)
                cross join lateral (
                    select conversation_id from mails
                    where space_id = $1 and mailbox_id = $2 and message_id = n.id and conversation_id is not null
                    offset 0
                ) m
                union all
                select d.conversation_id, n.ordinal
                from (
                    select split_part(id, '@', 1) as id, ordinal
                    from unnest($3::text[]) with ordinality given (id, ordinal) offset 0
                ) n
                cross join lateral (
                    select conversation_id, session_id, source_key from deliveries
                    where delivery_id = n.id and channel = 'email'
                    offset 0
                ) d
                cross join lateral (
                    select from conversation_counters
                    where conversation_id = d.conversation_id and space_id = $1
                        -- A notice or a schedule belongs to no mailbox. The answer to its open question comes into any.
                        and (mailbox_id = $2 or mailbox_id = 'default' and exists (
                            select from tool_calls t
                            where t.session_id = d.session_id and t.status = 'waiting'
                                and starts_with(d.source_key, 'question/' || t.call_id || '/')
                        ))
                    offset 0
                ) c
            )
            select
                named.conversation_id as "conversation_id!",
                array(
                    select distinct p.address #>> '{}'
                    from conversation_sessions s
                    cross join lateral jsonb_path_query(s.policy, '$.participants[*]') p (address)
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

    /// Returns whether the mailbox has this conversation.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
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

    /// The conversation's latest session that asked a question by mail and waits for the answer. A session
    /// that asked in another way gets its answer that way. `ids` are the Message-IDs that the mail names; the first is the one
    /// that it answers: a reply to a question answers that question, and none if it is closed. `proved` is the sender, if
    /// proved: the question of a notice or of a schedule is answered only by one of those to whom it is mailed.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn asking_session(
        &self,
        conversation_id: &str,
        ids: &[String],
        proved: Option<&str>,
    ) -> Result<Option<String>> {
        Ok(sqlx::query_scalar!(
            r#"select s.session_id from conversation_sessions s
            where s.conversation_id = $1 and s.status = 'waiting_input'
                and s.policy -> 'reply' ->> 'channel' = 'email'
                -- Notices to several people may share a conversation. A reply to one of them must not answer the
                -- question of another, and somebody who was sent another one must not answer this one, though the
                -- question's Message-ID was passed on. Of addresses only ASCII is folded.
                and (s.trigger_type = 'email' or exists (
                    select from unnest($3::text[]) n (id)
                    join deliveries d on d.delivery_id = split_part(n.id, '@', 1)
                    where d.session_id = s.session_id
                ) and exists (
                    select from jsonb_path_query(s.policy, '$.participants[*]') p (address)
                    where lower((p.address #>> '{}') collate "C") = lower($4::text collate "C")
                ))
                and not exists (
                    select from deliveries d
                    join tool_calls t on t.session_id = d.session_id
                        and starts_with(d.source_key, 'question/' || t.call_id || '/')
                    where d.conversation_id = s.conversation_id and d.delivery_id = split_part($2, '@', 1)
                        and (d.session_id <> s.session_id or t.status <> 'waiting')
                )
            order by s.ordinal desc
            limit 1"#,
            conversation_id,
            ids.first().map(String::as_str),
            ids,
            proved
        )
        .fetch_optional(&self.intake)
        .await?)
    }

    /// Counts the mails of the last hour in this mailbox that belong to the same exchange as `mail`. If
    /// `mail` joins a conversation, these are all mails into that conversation, from any sender, because a
    /// machine may change its name with every mail. Otherwise these are the mails of the same sender about
    /// the same subject that joined no conversation either. Mails in conversations do not count then: anybody
    /// can forge a sender, and forged mails must not silence people in their own conversation. For equal
    /// texts only the sender's own mails count, because several people may write the same. Also counts the
    /// sender's mails that joined no conversation, whatever they are about, and those, of any sender, whose answers went to
    /// the same address.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn exchange(&self, mail: &NewMail) -> Result<Exchange> {
        let row = sqlx::query!(
            r#"select count(*) filter (where is_of_it) as "mails!",
                count(*) filter (where is_of_it and body_sha256 = any ($6) and from_address = $3) as "same_body!",
                count(*) filter (where not joined and from_address = $3) as "of_sender!",
                count(*) filter (where not joined and answered_key = any ($8)) as "answered!"
            from mails,
                lateral (select ($7 and conversation_id = $4)
                    or (not $7 and not joined and from_address = $3 and subject_key = any ($5))) exchange (is_of_it)
            where space_id = $1 and mailbox_id = $2
                and received_at > (select clock_timestamp() - interval '1 hour')
                and dropped is null
                and (is_of_it or (not joined and (from_address = $3 or answered_key = any ($8))))"#,
            mail.space_id,
            mail.mailbox_id,
            mail.from_address,
            mail.conversation_id,
            &self.vault.macs(&mail.subject_key),
            &self.vault.macs(&mail.body_sha256),
            mail.joined,
            &mail.answered_key.as_deref().map_or_else(Vec::new, |key| self.vault.macs(key))
        )
        .fetch_one(&self.intake)
        .await?;
        Ok(Exchange {
            mails: row.mails,
            same_body: row.same_body,
            of_sender: row.of_sender,
            answered: row.answered,
        })
    }

    /// The newest messages of the conversation, oldest first: incoming messages and outgoing mails.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
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
        let seal = self.seal_of_conversation(conversation_id).await?;
        let said = rows.into_iter().rev().filter_map(|row| match (row.text, row.content) {
            (Some(text), _) => Some(seal.open(text).map(|text| Said { role: Role::User, text })),
            (None, Some(content)) => {
                let content = match seal.open_value(content) {
                    Ok(content) => content,
                    Err(error) => return Some(Err(error)),
                };
                let text = sent(&content)?;
                let text = if row.unsent { format!("[This could not be sent.]\n\n{text}") } else { text };
                Some(Ok(Said { role: Role::Assistant, text }))
            }
            (None, None) => None,
        });
        said.collect()
    }
}

/// The text of a delivery.
fn sent(content: &Value) -> Option<String> {
    if let Some(text) = content["text"].as_str() {
        return Some(text.to_owned());
    }
    let body = content["body"].as_str()?;
    let to: Vec<&str> = content["to"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let subject = content["subject"].as_str().unwrap_or_default();
    Some(format!("[Mail to {}: {subject}]\n\n{body}", to.join(", ")))
}
