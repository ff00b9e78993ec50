//! What a person first said to a session, for lists: the ids of conversations that nobody named do not tell sessions apart.

use crate::encryption::Seal;
use crate::{Result, Store};
use std::collections::HashMap;
use wakeful_workflow::mail::text::subject_and_body;
use wakeful_workflow::record::{Block, text_of};

/// So much of a message is shown, in characters.
const SHOWN: usize = 200;

/// A larger message, in bytes as it is stored, is left out: a page of them would be read for one line each.
const LARGEST: i32 = 32 << 10;

/// A user's message is among the first records of a session, or the session has none.
const LOOKED_AT: i64 = 4;

impl Store {
    /// The beginning of the first message of a user that each of these sessions has, on one line, by the session's id. One that
    /// is internal, very large, or whose key this process cannot have is left out.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn first_messages(&self, ids: &[String]) -> Result<HashMap<String, String>> {
        if ids.is_empty() {
            return Ok(HashMap::new());
        }
        let rows = sqlx::query!(
            r#"
            select s.session_id, s.trigger_type, s.data_key, r.content::text as "content!"
            from conversation_sessions s
            cross join lateral (
                select content from (
                    select role, internal, content from conversation_records
                    where session_id = s.session_id
                    order by message_number
                    limit $2
                ) first
                where role = 'user' and not internal and pg_column_size(content) <= $3
                limit 1
            ) r
            where s.session_id = any ($1)
            "#,
            ids,
            LOOKED_AT,
            LARGEST
        )
        .fetch_all(&self.pool)
        .await?;
        let mut found = HashMap::with_capacity(rows.len());
        for row in rows {
            let seal = match &row.data_key {
                Some(_) if !self.vault.is_open() => None,
                Some(_) => self.seal_of_row(&row.session_id).await?,
                None => Some(Seal::default()),
            };
            // A message that cannot be read keeps no list from being shown; its session's page says what is wrong.
            let line = seal.and_then(|seal| line(&row.trigger_type, &seal.open_json(row.content).ok()?));
            found.extend(line.map(|line| (row.session_id, line)));
        }
        Ok(found)
    }
}

/// Sessions whose first message may be a mail. The last three have messages of others.
const MAY_BE_MAIL: [&str; 4] = ["email", "fork", "replay", "import"];

/// A mail's line begins with its subject. Its other headers are in columns of their own, or of no interest in a list.
fn line(trigger_type: &str, content: &str) -> Option<String> {
    let blocks: Vec<Block> = crate::json::from_text("message", content).ok()?;
    let mut text = text_of(&blocks);
    if MAY_BE_MAIL.contains(&trigger_type)
        && let Some((subject, body)) = subject_and_body(&text)
    {
        let between = if subject.is_empty() || body.is_empty() { "" } else { ": " };
        text = format!("{subject}{between}{body}");
    }
    let words = text.split_whitespace().take(SHOWN).collect::<Vec<_>>().join(" ");
    let line: String = words.chars().take(SHOWN).collect();
    (!line.is_empty()).then_some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line_and_cut() {
        let said = |trigger_type: &str, text: &str| {
            line(trigger_type, &serde_json::json!([{"type": "text", "text": text}]).to_string())
        };
        assert_eq!(said("chat", "A table\n\n  for two").as_deref(), Some("A table for two"));
        assert_eq!(said("chat", &"é".repeat(300)).map(|line| line.chars().count()), Some(SHOWN));
        assert_eq!(said("chat", " \n"), None);
        assert_eq!(line("chat", "no message"), None);
        let mail = "From: Ann <ann@example.com>\nSubject: A table\n\nFor two,\n\nplease.";
        assert_eq!(said("email", mail).as_deref(), Some("A table: For two, please."));
        assert_eq!(said("fork", mail).as_deref(), Some("A table: For two, please."));
        assert_eq!(said("email", "Subject: A table\n\n").as_deref(), Some("A table"));
        assert_eq!(said("email", "From: ann@example.com\n\nFor two.").as_deref(), Some("For two."));
        assert_eq!(said("email", "For two.\n\nAnn").as_deref(), Some("For two. Ann"));
        assert_eq!(said("chat", mail).map(|line| line.starts_with("From: Ann")), Some(true));
    }
}
