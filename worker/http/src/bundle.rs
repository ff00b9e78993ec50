//! Exports a session as a bundle, for holders of an internal token (`X-Internal-Token`), and imports bundles.

use crate::access::{Caller, named_space};
use crate::audit::{TARGET_BYTES, refused, shown};
use crate::body::Id;
use crate::front::Peer;
use crate::holder::Holder;
use crate::openapi::{Operation, Proof, of};
use crate::problem::Problem;
use crate::scope;
use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::TryStreamExt as _;
use schemars::JsonSchema;
use secrecy::ExposeSecret;
use serde::Deserialize;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use subtle::{Choice, ConstantTimeEq};
use tempfile::NamedTempFile;
use tokio::io::AsyncWriteExt as _;
use tokio::sync::Semaphore;
use tracing::{error, info};
use wakeful_engine::ctx::Ctx;
use wakeful_store::audit::act::{self, Act, acting};
use wakeful_store::export::{Export, VERB};
use wakeful_store::import::{self, Imported};
use wakeful_store::space::Scope;
use wakeful_workflow::bundle::Limits;
use wakeful_workflow::id::DEFAULT_SPACE;

/// The header with the token for exports.
pub const INTERNAL_TOKEN: &str = "x-internal-token";

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ExportQuery {
    redact: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ImportQuery {
    verify_only: Option<String>,
}

/// Streams the session's bundle line by line. An error aborts the body, so its last line is missing.
pub(super) async fn export(
    State(ctx): State<Arc<Ctx>>,
    peer: Option<Extension<Peer>>,
    headers: HeaderMap,
    id: Result<Id, Problem>,
    query: Result<Query<ExportQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let address = peer.map(|Extension(peer)| shown(peer.0));
    // First of all: without a token the caller must not even learn what exists.
    if let Err(problem) = admit(&ctx, &headers) {
        // A wrong token leaves a row in the audit. The id is in it as it was asked for.
        let target = id.ok().map(|Id(id)| id).filter(|id| id.len() <= TARGET_BYTES);
        let (actor_kind, actor, verb) = ("stranger", "unknown".to_owned(), VERB.to_owned());
        let act = Act { actor_kind, actor, verb, target, address, ..Act::default() };
        let response = problem.into_response();
        refused(&ctx, act, response.status()).await;
        return Ok(response);
    }
    let (Id(id), Query(query)) = (id?, query?);
    let redact = flag("redact", query.redact.as_deref())?;
    let space = named_space(&headers)?.unwrap_or(DEFAULT_SPACE);
    let act = Act {
        actor_kind: "configuration",
        actor: "an internal token".to_owned(),
        address,
        reason: redact.then(|| "redacted".to_owned()),
        ..Act::default()
    };
    let exported = async {
        match acting(act, exported(&ctx, space, &id, redact)).await.0 {
            Ok(response) => response,
            Err(problem) => problem.into_response(),
        }
    };
    Ok(scope::answered(Scope::of(space), exported).await)
}

async fn exported(ctx: &Ctx, space: &str, id: &str, redact: bool) -> Result<Response, Problem> {
    let session = ctx.store.session(Some(space), id).await?;
    let export = ctx.store.export(&session.session_id, redact).await?;
    info!(session.id = %id, redact, "A session is exported");
    let name = format!("attachment; filename=\"{}.jsonl\"", file_name(id));
    let body = futures::stream::try_unfold(export, |mut export: Export| async {
        match export.next().await {
            Ok(Some(chunk)) => Ok(Some((Bytes::from(chunk), export))),
            Ok(None) => Ok(None),
            Err(failed) => {
                let session_id = &export.header().session_id;
                error!(session.id = %session_id, error = %failed, "An export broke off");
                // The connection closes with the error. The pause lets it send what came before, so that the client
                // sees an answer that breaks off, and not a server that hangs up.
                tokio::task::yield_now().await;
                Err(std::io::Error::other("the export broke off; the server's log says why"))
            }
        }
    });
    let headers = [(CONTENT_TYPE, "application/x-ndjson".to_owned()), (CONTENT_DISPOSITION, name)];
    Ok((headers, Body::from_stream(body)).into_response())
}

/// How many bundles are checked and written at a time, and how many of the largest size may be on the disk.
const AT_A_TIME: u8 = 4;

/// A request that checks a bundle holds one of these. An upload holds none, so a slow one keeps nobody
/// waiting.
static CHECKS: Semaphore = Semaphore::const_new(AT_A_TIME as usize);

/// The bytes of all bundles in temporary files of this process.
static ON_DISK: LazyLock<Mutex<OnDisk>> = LazyLock::new(Mutex::default);

/// How many bytes of bundles there are, and how many each caller has sent.
#[derive(Default)]
struct OnDisk {
    all: u64,
    of_callers: HashMap<Holder, u64>,
}

fn on_disk() -> MutexGuard<'static, OnDisk> {
    ON_DISK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Imports a bundle, plain or gzip: 201 with the new session, or 200 with a summary if `verify_only`.
pub(super) async fn import(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    query: Result<Query<ImportQuery>, QueryRejection>,
    body: Body,
) -> Result<(StatusCode, Json<Imported>), Problem> {
    let Query(query) = query?;
    let verify_only = flag("verify_only", query.verify_only.as_deref())?;
    let limits = ctx.config.server.import_limits();
    let bundle = Spooled::read(body, limits, Holder::of(&caller)).await?;
    let file = bundle.file.path();
    let _check = CHECKS.acquire().await.expect("nobody closes it");
    if verify_only {
        let checked = import::check(file, limits, |_| {}).await?;
        act::only_looks();
        return Ok((StatusCode::OK, Json(checked)));
    }
    let imported = ctx.store.import(file, caller.space(), limits, |_| {}).await?;
    info!(session.id = imported.session_id.as_deref(), sha256 = %imported.sha256, "A session was imported");
    Ok((StatusCode::CREATED, Json(imported)))
}

/// A bundle in a temporary file, because it is read twice and may be too large for memory.
struct Spooled {
    file: NamedTempFile,
    /// Its share of [`ON_DISK`].
    bytes: u64,
    /// Who sends it, unless that is one who may take all.
    holder: Option<Holder>,
}

impl Spooled {
    /// Writes the body to a file.
    async fn read(body: Body, limits: Limits, holder: Option<Holder>) -> Result<Spooled, Problem> {
        let failed = |error: std::io::Error| {
            error!(%error, "A bundle could not be put into a temporary file");
            Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the request failed; the server's log says why")
        };
        let file = tempfile::Builder::new().prefix("wakeful-import-").tempfile().map_err(failed)?;
        let mut writer = tokio::fs::File::from_std(file.reopen().map_err(failed)?);
        let mut bundle = Spooled { file, bytes: 0, holder };
        let mut body = body.into_data_stream();
        loop {
            let chunk = body.try_next().await;
            let chunk =
                chunk.map_err(|error| Problem::bad_request(format!("the body broke off: {error}")))?;
            let Some(chunk) = chunk else { break };
            bundle.grow(chunk.len() as u64, limits.bytes)?;
            writer.write_all(&chunk).await.map_err(failed)?;
        }
        writer.flush().await.map_err(failed)?;
        Ok(bundle)
    }

    /// Takes room for `more` bytes. `limit` is that of one bundle, in bytes.
    fn grow(&mut self, more: u64, limit: u64) -> Result<(), Problem> {
        if self.bytes + more > limit {
            let detail = format!("the bundle is larger than {limit} bytes");
            return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
        }
        let room = limit * u64::from(AT_A_TIME);
        let mut on_disk = on_disk();
        let held = |holder: &Holder| on_disk.of_callers.get(holder).copied().unwrap_or(0);
        let of_caller = self.holder.as_ref().map(held);
        // One caller gets at most half, so it cannot keep out the others.
        if on_disk.all + more > room || of_caller.is_some_and(|held| held + more > room / 2) {
            let detail = "too many large imports are on their way; nothing was taken, try again later";
            return Err(Problem::unavailable(detail, 10));
        }
        on_disk.all += more;
        if let Some(holder) = &self.holder {
            *on_disk.of_callers.entry(holder.clone()).or_default() += more;
        }
        self.bytes += more;
        Ok(())
    }
}

impl Drop for Spooled {
    fn drop(&mut self) {
        let mut on_disk = on_disk();
        on_disk.all -= self.bytes;
        if let Some(holder) = &self.holder
            && let Some(held) = on_disk.of_callers.get_mut(holder)
        {
            *held -= self.bytes;
            if *held == 0 {
                on_disk.of_callers.remove(holder);
            }
        }
    }
}

/// Checks an export's token. Compares with every configured token, so that the time taken reveals nothing.
fn admit(ctx: &Ctx, headers: &HeaderMap) -> Result<(), Problem> {
    let tokens = &ctx.config.server.internal_tokens;
    if tokens.is_empty() {
        let detail = "no token is configured for exports: set server.internal_tokens";
        return Err(Problem::new(StatusCode::FORBIDDEN, detail));
    }
    let Some(given) = headers.get(INTERNAL_TOKEN) else {
        return Err(Problem::new(StatusCode::UNAUTHORIZED, "an export needs the header `X-Internal-Token`"));
    };
    let equals = |token: &secrecy::SecretString| given.as_bytes().ct_eq(token.expose_secret().as_bytes());
    let known = tokens.iter().map(equals).fold(Choice::from(0), |any, one| any | one);
    if bool::from(known) {
        Ok(())
    } else {
        Err(Problem::new(StatusCode::FORBIDDEN, "`X-Internal-Token` is not one of the configured tokens"))
    }
}

/// Reads a flag: `?name`, `?name=true` or `?name=false`.
fn flag(name: &str, given: Option<&str>) -> Result<bool, Problem> {
    match given {
        None | Some("false") => Ok(false),
        Some("" | "true") => Ok(true),
        Some(_) => Err(Problem::bad_request(format!("`{name}` is true or false"))),
    }
}

/// Makes an id safe as part of a file name.
fn file_name(id: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || "_-".contains(c) { c } else { '_' };
    id.chars().take(128).map(allowed).collect()
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        exporting("/v1/sessions/{id}/export"),
        exporting("/sessions/{id}/export"),
        Operation::post("/v1/sessions/import", "Takes a bundle; it becomes a session of a new conversation")
            .query::<ImportQuery>()
            .bytes(&["application/x-ndjson", "application/gzip"])
            .answers(StatusCode::CREATED, "imported", of::<Imported>())
            .answers(
                StatusCode::OK,
                "with `verify_only`: its contents, and nothing is written",
                of::<Imported>(),
            ),
    ]
}

fn exporting(path: &'static str) -> Operation {
    Operation::get(path, "The session as a bundle, line by line")
        .query::<ExportQuery>()
        .text("X-Wakeful-Space", "header", "The space; without it `default`.")
        .proved_by(Proof::Own(&["internalToken"]))
        .answers_bytes(StatusCode::OK, "the bundle", "application/x-ndjson")
        .refuses(&[StatusCode::CONFLICT])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spooled(token_id: Option<&str>) -> Spooled {
        let holder = token_id.map(|token_id| Holder::Token(token_id.to_owned()));
        Spooled { file: NamedTempFile::new().unwrap(), bytes: 0, holder }
    }

    #[test]
    fn one_token_gets_half_of_the_disk_for_imports() {
        let refused = |bundle: &mut Spooled, more| bundle.grow(more, 10).is_err();
        let (mut first, mut second, mut third) = (spooled(Some("a")), spooled(Some("a")), spooled(Some("a")));
        assert!(!refused(&mut first, 10) && !refused(&mut second, 10));
        assert!(refused(&mut third, 1), "a third bundle of this token");
        let (mut other, mut of_admin) = (spooled(Some("b")), spooled(None));
        assert!(!refused(&mut other, 10) && !refused(&mut of_admin, 10));
        drop(other);
        drop(first);
        assert!(!refused(&mut third, 10));
        drop((second, third, of_admin));
        assert!(on_disk().all == 0 && on_disk().of_callers.is_empty());
    }
}
