//! The files of a session: a list of them, or one of them.

use crate::access::Caller;
use crate::body::Id;
use crate::openapi::Operation;
use crate::problem::Problem;
use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use futures::stream::try_unfold;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use tracing::error;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::workspace::{Files, Limits, Unreadable, list_at};

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FilesQuery {
    /// As they were after this message.
    at: Option<i64>,
    /// Return the bytes of this file.
    path: Option<String>,
}

impl From<Unreadable> for Problem {
    fn from(unreadable: Unreadable) -> Problem {
        match unreadable {
            Unreadable::Store(error) => error.into(),
            broken => {
                error!(error = %broken, "Files of a session cannot be read");
                Problem::new(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "the files cannot be read; the server's log says why",
                )
            }
        }
    }
}

/// Lists the files of a session, or returns one of them.
pub(super) async fn files(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    query: Result<Query<FilesQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(query) = query?;
    ctx.store.session_within(&caller.reach, &id).await?;
    if let Some(path) = query.path {
        return file(ctx, id, query.at, path).await;
    }
    let limits = Limits::of(&ctx.config.workspace);
    let (snapshot, items) = list_at(&ctx.store, &id, query.at, &limits).await?;
    let snapshot = snapshot.map(|one| {
        json!({"tree_sha256": one.tree_sha256, "message_number": one.message_number,
        "files": one.files, "bytes": one.bytes})
    });
    Ok(Json(json!({"snapshot": snapshot, "items": items, "next": null})).into_response())
}

/// Sends a file piece by piece. Each piece is checked before it is sent.
async fn file(ctx: Arc<Ctx>, id: String, at: Option<i64>, path: String) -> Result<Response, Problem> {
    let not_found = || Problem::new(StatusCode::NOT_FOUND, format!("the session has no file {path:?} there"));
    let snapshot = ctx.store.workspace_at(&id, at).await?.ok_or_else(not_found)?;
    let limits = Limits::of(&ctx.config.workspace);
    let files = Files::open(&ctx.store, &id, snapshot, &limits).await?;
    let found = files.find(&path).await?.ok_or_else(not_found)?;
    let bytes = found.bytes;
    let pieces = try_unfold((files, found, 0), |(files, found, number)| async move {
        match files.piece(&found, number).await {
            Ok(Some(piece)) => Ok(Some((Bytes::from(piece), (files, found, number + 1)))),
            Ok(None) => Ok(None),
            Err(failed) => {
                error!(error = %failed, "A file of a session broke off");
                Err(std::io::Error::other("the file broke off; the server's log says why"))
            }
        }
    });
    // The bytes are the session's: a browser neither guesses what they are nor runs them.
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, bytes.to_string()),
        (header::CONTENT_DISPOSITION, "attachment".to_owned()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
    ];
    Ok((headers, Body::from_stream(pieces)).into_response())
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get(
            "/v1/sessions/{id}/files",
            "The files of a session; with `path`, the bytes of one file",
        )
        .query::<FilesQuery>()
        .answers(
            StatusCode::OK,
            "the list, or the file's bytes",
            crate::object! {"snapshot": Option<Value>, "items": Vec<Value>, "next": Option<i64>},
        )
        .refuses(&[StatusCode::CONFLICT]),
    ]
}
