//! Outputs of tools and attached files, read from messages and blobs. A context only points at them.
#![deny(missing_docs)]

use crate::json::from_text;
use crate::{Result, Store};
use serde_json::Value;
use sqlx::PgConnection;
use wakeful_workflow::id::{CallId, SessionId};
use wakeful_workflow::record::{Attachment, Block, OutputPointer, ToolResult};

/// A part of a tool's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputSlice {
    /// The part itself.
    pub text: String,
    /// Byte where it begins: the requested one, or the next start of a character.
    pub offset: usize,
    /// Size of the whole output.
    pub bytes: usize,
}

/// Returns the payload of the newest rebase at or before `message_number`. A session that ends with that message
/// continues from it.
pub(crate) async fn newest_rebase(
    tx: &mut PgConnection,
    session_id: &str,
    message_number: i64,
) -> Result<Option<Value>> {
    Ok(sqlx::query_scalar!(
        "select payload from session_events
        where session_id = $1
            and type = 'CONTEXT_REBASED'
            and (payload ->> 'at_message_number')::bigint <= $2
        order by seq desc
        limit 1",
        session_id,
        message_number
    )
    .fetch_optional(tx)
    .await?)
}

impl Store {
    /// Returns up to `bytes` of the output of `call_id`, from `offset` on, cut between characters. `None`: the session has
    /// no such result. Reads only the session's own messages, so a guessed id cannot reach another session's output.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`] for a message that cannot be read, or whose blob is not there;
    /// [`crate::Error::Database`].
    pub async fn tool_output(
        &self,
        session_id: &SessionId,
        call_id: &CallId,
        offset: usize,
        bytes: usize,
    ) -> Result<Option<OutputSlice>> {
        // Reads messages and not the ledger, because a fork copies no ledger.
        let contents = sqlx::query_scalar!(
            r#"select content::text as "content!" from conversation_records
            where session_id = $1 and role = 'tool' and content::text like '%' || $2 || '%'
            order by message_number"#,
            session_id.as_str(),
            like_of_json(call_id.as_str())
        )
        .fetch_all(&self.pool)
        .await?;
        let seal = self.seal_of(session_id.as_str()).await?;
        for content in contents {
            let blocks: Vec<Block> = from_text("message", &seal.open_json(content)?)?;
            for block in blocks {
                match block {
                    Block::ToolResult(result) if &result.call_id == call_id => {
                        return Ok(Some(self.slice(session_id, result, offset, bytes).await?));
                    }
                    Block::ToolResult(_)
                    | Block::Text { .. }
                    | Block::ToolCall(_)
                    | Block::Provider { .. } => {}
                }
            }
        }
        Ok(None)
    }

    /// Returns the files attached to the session's own messages, in message order.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`] for a pointer that cannot be read; [`crate::Error::Database`].
    pub async fn attachments(&self, session_id: &SessionId) -> Result<Vec<Attachment>> {
        let lists = sqlx::query_scalar!(
            r#"select (details -> 'attachments')::text as "attachments!" from conversation_records
            where session_id = $1 and json_typeof(details -> 'attachments') = 'array'
            order by message_number"#,
            session_id.as_str()
        )
        .fetch_all(&self.pool)
        .await?;
        let seal = self.seal_of(session_id.as_str()).await?;
        let mut files = Vec::new();
        for list in lists {
            files.extend(from_text::<Vec<Attachment>>("attachments", &seal.open_json(list)?)?);
        }
        Ok(files)
    }

    /// Returns up to `bytes` of the file `sha256`, from `offset` on, cut between characters. `None`: no message of this
    /// session has that file, or the bytes are not UTF-8.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`] where its blob is not there; [`crate::Error::Database`].
    pub async fn attachment(
        &self,
        session_id: &SessionId,
        sha256: &str,
        offset: usize,
        bytes: usize,
    ) -> Result<Option<OutputSlice>> {
        let own = self.attachments(session_id).await?;
        let Some(file) = own.into_iter().find(|file| file.sha256 == sha256) else { return Ok(None) };
        let start = offset.min(file.bytes);
        let part = self.blob_part(session_id, "attachment", sha256, start, bytes).await?;
        let is_text = match std::str::from_utf8(&part) {
            Ok(_) => true,
            // The part may begin or end inside a character; only a wrong byte in between shows that it is no text.
            Err(error) => offset > 0 || error.error_len().is_none(),
        };
        Ok(is_text.then(|| OutputSlice { bytes: file.bytes, ..between_characters(&part, start) }))
    }

    async fn slice(
        &self,
        session_id: &SessionId,
        result: ToolResult,
        offset: usize,
        bytes: usize,
    ) -> Result<OutputSlice> {
        let Some(OutputPointer { sha256, bytes: whole }) = result.output else {
            let whole = result.content.len();
            let start = offset.min(whole);
            let end = start.saturating_add(bytes).min(whole);
            let part = &result.content.as_bytes()[start..end];
            return Ok(OutputSlice { bytes: whole, ..between_characters(part, start) });
        };
        let start = offset.min(whole);
        let part = self.blob_part(session_id, "tool output", &sha256, start, bytes).await?;
        Ok(OutputSlice { bytes: whole, ..between_characters(&part, start) })
    }

    /// Up to `bytes` of a blob of the session's space, from `start` on. `what` names its owner in the error.
    pub(crate) async fn blob_part(
        &self,
        session_id: &SessionId,
        what: &'static str,
        sha256: &str,
        start: usize,
        bytes: usize,
    ) -> Result<Vec<u8>> {
        let seal = self.seal_of(session_id.as_str()).await?;
        if let Some(part) = self.sealed_part(&seal, sha256, start, bytes).await? {
            return Ok(part);
        }
        sqlx::query_scalar!(
            r#"select substring(bytes from $2 for $3) as "part!" from blobs
            where sha256 = $1 and space_id = (select space_id from conversation_sessions where session_id = $4)"#,
            sha256,
            i32::try_from(start.saturating_add(1)).unwrap_or(i32::MAX),
            i32::try_from(bytes).unwrap_or(i32::MAX),
            session_id.as_str()
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or_else(|| crate::Error::corrupt(what, format!("there is no blob {sha256}")))
    }
}

/// Returns `part`, which begins at `offset`, without incomplete characters at its edges.
fn between_characters(part: &[u8], offset: usize) -> OutputSlice {
    let inside = |byte: &&u8| (**byte & 0b1100_0000) == 0b1000_0000;
    let skipped = part.iter().take_while(inside).count();
    let text = match std::str::from_utf8(&part[skipped..]) {
        Ok(text) => text,
        Err(error) => {
            let whole = &part[skipped..skipped + error.valid_up_to()];
            std::str::from_utf8(whole).expect("it is valid up to there")
        }
    };
    OutputSlice { text: text.to_owned(), offset: offset + skipped, bytes: 0 }
}

/// Returns `text` as JSON writes it inside a string, escaped for `like`.
fn like_of_json(text: &str) -> String {
    let json = Value::from(text).to_string();
    let inner = &json[1..json.len() - 1];
    inner.replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_is_cut_between_characters() {
        let text = "aé€b".as_bytes();
        let table = [(0, 7, 0, "aé€b"), (0, 2, 0, "a"), (2, 4, 3, "€"), (4, 3, 6, "b"), (1, 1, 1, "")];
        for (start, bytes, offset, expected) in table {
            let slice = between_characters(&text[start..start + bytes], start);
            assert_eq!((slice.offset, slice.text.as_str()), (offset, expected), "{start} {bytes}");
        }
    }

    #[test]
    fn an_id_is_looked_for_as_it_was_written() {
        assert_eq!(like_of_json("call_1"), "call\\_1");
        assert_eq!(like_of_json("a\"%\\"), "a\\\\\"\\%\\\\\\\\");
    }
}
