//! Journals in this database.

use super::Journal;
use crate::encryption::Seal;
use crate::json::from_bytes;
use crate::{Error, Result, Store};
use serde_json::Value;
use sqlx::PgConnection;
use wakeful_workflow::recover::{Checkpoint, Entry};

/// The journals in a database. An id is a session's.
#[derive(Clone, Copy, Debug)]
pub struct Postgres<'a>(pub &'a Store);

impl Journal for Postgres<'_> {
    async fn last_checkpoint(&self, id: &str) -> Result<Option<Checkpoint>> {
        let seal = self.0.own_seal_of(id).await?;
        last_checkpoint(&mut *self.0.pool.acquire().await?, &seal, id).await
    }

    async fn entries_after(&self, id: &str, seq: i64) -> Result<Vec<Entry>> {
        let seal = self.0.own_seal_of(id).await?;
        entries_after(&mut *self.0.pool.acquire().await?, &seal, id, seq).await
    }
}

pub(crate) async fn last_checkpoint(
    connection: &mut PgConnection,
    seal: &Seal,
    session_id: &str,
) -> Result<Option<Checkpoint>> {
    let Some(row) = sqlx::query!(
        r#"
        select e.seq as "seq!", e.payload as "payload!", b.bytes as "bytes?", k.bytes as "sealed?"
        from (
            select seq, payload, space_id, payload ->> 'state_sha256' as sha256
            from session_events
            where session_id = $1 and type = 'checkpoint'
            order by seq desc
            limit 1
        ) e
        left join sealed_blobs k on k.data_key = $2 and k.sha256 = e.sha256
        left join blobs b on b.sha256 = e.sha256 and b.space_id = e.space_id
        "#,
        session_id,
        seal.key_id()
    )
    .fetch_optional(connection)
    .await?
    else {
        return Ok(None);
    };
    let bytes = opened(seal, row.sealed)?.or(row.bytes);
    let payload = resolved(row.seq, seal.open_value(row.payload)?, bytes.as_deref(), "context_state")?;
    Checkpoint::read(row.seq, &payload).map(Some).map_err(|error| unreadable(row.seq, error))
}

pub(crate) async fn entries_after(
    connection: &mut PgConnection,
    seal: &Seal,
    session_id: &str,
    after: i64,
) -> Result<Vec<Entry>> {
    let rows = sqlx::query!(
        r#"
        -- A policy lets no `->>` into an index condition, so the hash is taken out before the join.
        with entries as materialized (
            select seq, type, payload, space_id,
                case when type = 'context_update' then payload ->> 'value_sha256' end as sha256
            from session_events
            where session_id = $1 and seq > $2
        )
        select e.seq as "seq!", e.type as "kind!", e.payload as "payload!", b.bytes as "bytes?", k.bytes as "sealed?"
        from entries e
        left join sealed_blobs k on k.data_key = $3 and k.sha256 = e.sha256
        left join blobs b on b.sha256 = e.sha256 and b.space_id = e.space_id
        order by e.seq
        "#,
        session_id,
        after,
        seal.key_id()
    )
    .fetch_all(connection)
    .await?;
    rows.into_iter()
        .map(|row| {
            let bytes = opened(seal, row.sealed)?.or(row.bytes);
            let payload = resolved(row.seq, seal.open_value(row.payload)?, bytes.as_deref(), "value")?;
            Entry::read(&row.kind, &payload).map_err(|error| unreadable(row.seq, error))
        })
        .collect()
}

/// A sealed blob's bytes.
fn opened(seal: &Seal, sealed: Option<Vec<u8>>) -> Result<Option<Vec<u8>>> {
    sealed.map(|sealed| seal.open_bytes(sealed)).transpose()
}

/// Returns the payload with the pointer's content as `field`.
fn resolved(seq: i64, mut payload: Value, bytes: Option<&[u8]>, field: &str) -> Result<Value> {
    if let (Some(bytes), Value::Object(fields)) = (bytes, &mut payload) {
        let value = from_bytes("blob", bytes).map_err(|error| unreadable(seq, error))?;
        fields.insert(field.to_owned(), value);
    }
    Ok(payload)
}

fn unreadable(seq: i64, error: impl std::fmt::Display) -> Error {
    Error::corrupt("journal entry", format!("entry {seq}: {error}"))
}
