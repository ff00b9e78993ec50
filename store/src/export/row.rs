//! Converts stored rows to lines of a bundle.
//!
//! The snapshot reads rows that may still change, and the pages read the same kinds of rows once they have
//! settled. sqlx gives each query its own row type, so macros convert the rows.

use crate::{Error, Result};
use chrono::{DateTime, Utc};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use wakeful_workflow::record::Attachment;

macro_rules! call {
    ($row:ident) => {
        wakeful_workflow::bundle::Line::Call(wakeful_workflow::bundle::CallRow {
            call_id: $row.call_id,
            run_id: $row.run_id,
            step_number: $row.step_number,
            message_number: $row.message_number,
            result_message_number: $row.result_message_number,
            name: $row.name,
            args_sha256: $row.args_sha256,
            effect: $crate::export::row::word("effect", $row.effect)?,
            status: $crate::export::row::word("call status", $row.status)?,
            attempts: $row.attempts,
            outcome: $crate::export::row::json("outcome", $row.outcome)?,
            receipt: $crate::export::row::json("receipt", $row.receipt)?,
            resolution: $row.resolution,
            started_at: $row.started_at.map($crate::export::row::time),
            settled_at: $row.settled_at.map($crate::export::row::time),
        })
    };
}

macro_rules! delivery {
    ($row:ident) => {
        wakeful_workflow::bundle::Line::Delivery(wakeful_workflow::bundle::DeliveryRow {
            place: $row.ordinal,
            delivery_id: $row.delivery_id,
            channel: $row.channel,
            source_key: $row.source_key,
            content: $crate::json::from_text("delivery", &$row.content)?,
            status: $crate::export::row::word("delivery status", $row.status)?,
            attempt: $row.attempt,
            not_after: $row.not_after.map($crate::export::row::time),
            receipt: $crate::export::row::json("receipt", $row.receipt)?,
            last_error: $row.last_error,
            undelivered: $crate::export::row::listed($row.undelivered)?,
            resolution: $row.resolution,
            created_at: $crate::export::row::time($row.created_at),
            settled_at: $row.settled_at.map($crate::export::row::time),
        })
    };
}

macro_rules! inbox {
    ($row:ident, $status:expr) => {
        wakeful_workflow::bundle::Line::Inbox(wakeful_workflow::bundle::InboxRow {
            inbox_id: $row.inbox_id,
            client_key: $row.client_key,
            content: $row.content,
            content_sha256: $row.content_sha256,
            sender: $row.sender,
            attachments: $crate::export::row::attachments($row.attachments)?,
            status: $status,
            run_id: $row.run_id,
            outcome: $crate::export::row::word("inbox outcome", $row.outcome)?,
            created_at: $crate::export::row::time($row.created_at),
        })
    };
}

pub(super) use {call, delivery, inbox};

/// A time as a bundle writes it: with microseconds, the precision of Postgres.
pub(super) fn time(time: DateTime<Utc>) -> String {
    time.format("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()
}

/// Parses a stored word.
pub(super) fn word<T: DeserializeOwned>(what: &'static str, word: String) -> Result<T> {
    serde_json::from_value(Value::String(word)).map_err(|error| Error::corrupt(what, error))
}

/// Parses a `json` column, which is read as its stored text.
pub(super) fn json<T: DeserializeOwned>(what: &'static str, text: Option<String>) -> Result<Option<T>> {
    text.map(|text| crate::json::from_text(what, &text)).transpose()
}

pub(super) fn listed(value: Value) -> Result<Vec<Value>> {
    match value {
        Value::Array(items) => Ok(items),
        other => Err(Error::corrupt("undelivered", format!("not a list: {other}"))),
    }
}

pub(super) fn object(what: &'static str, value: Value) -> Result<Map<String, Value>> {
    match value {
        Value::Object(object) => Ok(object),
        other => Err(Error::corrupt(what, format!("not an object: {other}"))),
    }
}

/// The files of an inbox row, as they are stored.
pub(super) fn attachments(column: Option<Value>) -> Result<Vec<Attachment>> {
    let attachments = column.map(serde_json::from_value).transpose();
    Ok(attachments.map_err(|error| Error::corrupt("attachments", error))?.unwrap_or_default())
}
