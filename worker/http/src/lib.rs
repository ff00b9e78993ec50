//! The HTTP API. A trigger verifies, translates and wakes; it never runs an agent. A 2xx means that the row
//! is committed.
//!
//! This crate is internal and not stable. Programs use the crate `wakeful`.

pub mod access;
mod audit;
pub mod batches;
pub mod body;
pub mod bundle;
mod capabilities;
pub mod context;
mod conversations;
mod deliveries;
mod document;
mod door;
pub mod effects;
pub mod errors;
pub mod etag;
mod files;
mod fork;
pub mod front;
pub mod guard;
mod health;
mod holder;
mod idempotency;
mod links;
pub mod monitor;
mod notifications;
pub mod openapi;
mod overview;
mod paces;
mod parameters;
pub mod pauses;
pub mod plain;
pub mod problem;
mod scope;
pub mod search;
pub mod seldom;
pub mod sessions;
mod steer;
mod stream;
mod times;
pub mod tokens;
mod workers;

pub use door::Door;

use access::Issuer;
use axum::extract::DefaultBodyLimit;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{delete, get, post};
use axum::{Extension, Router};
use body::BODY_LIMIT_BYTES;
use guard::{guard, shed};
use openapi::Operation;
use paces::Paces;
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;

/// What the OpenAPI document says of the routes of this crate.
pub fn operations() -> Vec<Operation> {
    [
        sessions::operations(),
        context::operations(),
        files::operations(),
        steer::operations(),
        fork::operations(),
        stream::operations(),
        deliveries::operations(),
        effects::operations(),
        conversations::operations(),
        tokens::operations(),
        pauses::operations(),
        audit::operations(),
        batches::operations(),
        errors::operations(),
        notifications::operations(),
        links::operations(),
        overview::operations(),
        workers::operations(),
        capabilities::operations(),
        bundle::operations(),
        health::operations(),
        document::operations(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// All routes of Wakeful.
///
/// The channels bring their own routes. `guarded` goes below `/v1`, behind the bearer token. `webhooks` goes
/// below `/v1/triggers`; each of these routes checks its caller itself. `own` are a program's own routes: the program
/// is trusted, so they see all spaces. The bodies of all of them come through `door`. `operations` are what the OpenAPI document says of
/// the channels' routes.
pub fn router(
    ctx: Arc<Ctx>,
    guarded: Router<Arc<Ctx>>,
    webhooks: Router<Arc<Ctx>>,
    own: Router,
    door: &Door,
    operations: fn() -> Vec<Operation>,
) -> Router {
    let own = door.before(own);
    let door = from_fn_with_state(door.clone(), door::held);
    let door_of_links = door.clone();
    let known = from_fn_with_state(parameters::Parameters::new(operations), parameters::known);
    audit::count_refusals(&ctx);
    overview::sample_queue(&ctx);
    let followers = stream::Followers::start(&ctx);
    let once = from_fn_with_state(Arc::clone(&ctx), idempotency::once);
    let imports = Router::new()
        .route("/sessions/import", post(bundle::import).layer(once.clone()).layer(from_fn(door::spooled)));
    let v1 = Router::new()
        .route("/sessions", get(sessions::list))
        .route("/sessions/{id}", get(sessions::show))
        .route("/sessions/{id}/messages", get(sessions::messages).post(sessions::send))
        .route("/sessions/{id}/runs", get(sessions::runs))
        .route("/sessions/{id}/steps", get(sessions::steps))
        .route("/sessions/{id}/events", get(sessions::events))
        .route("/sessions/{id}/diff/{other}", get(sessions::diff))
        .route("/sessions/{id}/context", get(context::show))
        .route("/sessions/{id}/files", get(files::files))
        .route("/sessions/{id}/retry", post(steer::retry))
        .route("/sessions/{id}/cancel", post(steer::cancel))
        .route("/sessions/{id}/wake", post(steer::wake))
        .route("/sessions/{id}/resolve", post(steer::resolve))
        .route("/sessions/{id}/approve", post(steer::approve))
        .route("/sessions/{id}/decline", post(steer::decline))
        .route("/sessions/{id}/archive", post(steer::archive))
        .route("/sessions/{id}/terminate", post(steer::terminate))
        .route("/sessions/{id}/fork", post(fork::fork))
        .route("/sessions/{id}/tree", get(fork::tree))
        .route("/sessions/{id}/stream", get(stream::stream).layer(Extension(followers)))
        .route("/deliveries", get(deliveries::list))
        .route("/deliveries/{id}", get(deliveries::show))
        .route("/deliveries/{id}/resend", post(deliveries::resend))
        .route("/effects", get(effects::list))
        .route("/conversations/{id}/sessions", get(conversations::sessions))
        .route("/conversations/{id}/history", get(conversations::history))
        .route("/conversations/{id}/new", post(conversations::restart))
        .route("/tokens", get(tokens::list).post(tokens::create))
        .route("/tokens/{id}", delete(tokens::revoke))
        .route("/pauses", get(pauses::list).post(pauses::begin))
        .route("/pauses/end", post(pauses::end))
        .route("/audit", get(audit::list))
        .route("/search", get(sessions::behind))
        .route("/replays", get(sessions::replays))
        .route("/batches", get(batches::list).post(batches::create))
        .route("/batches/{id}", get(batches::show))
        .route("/batches/{id}/members", get(batches::members))
        .route("/batches/{id}/pause", post(batches::pause))
        .route("/batches/{id}/resume", post(batches::resume))
        .route("/batches/{id}/cancel", post(batches::cancel))
        .route("/notifications", get(notifications::list))
        .route("/notifications/{id}", get(notifications::show))
        .route("/notifications/{id}/resend", post(notifications::resend))
        .route("/errors", get(errors::list))
        .route("/errors/{id}", get(errors::show))
        .route("/errors/{id}/mute", post(errors::mute))
        .route("/errors/{id}/note", post(errors::note))
        .route("/user-tokens", post(tokens::of_user))
        .route("/me", get(overview::me))
        .route("/overview", get(overview::show))
        .route("/queue", get(overview::queue))
        .route("/openapi.json", get(document::show).layer(Extension(document::Served::new(&ctx, operations))))
        .route("/capabilities", get(capabilities::show))
        .route("/workers", get(workers::list))
        .route("/workers/{id}/drain", post(workers::drain))
        .merge(guarded)
        // Inside the door, because it reads the bodies of requests with a key.
        .layer(once)
        .layer(from_fn(etag::tagged))
        .layer(door.clone())
        .merge(imports)
        .route_layer(known.clone())
        .route_layer(from_fn_with_state(Arc::clone(&ctx), guard))
        .layer(Extension(Arc::new(Paces::new(ctx.config.server.user_messages))))
        .layer(Extension(ctx.config.users.jwt.clone().map(Issuer::new).map(Arc::new)))
        // Outside the guard: an export needs its own token instead of the bearer token.
        .route("/sessions/{id}/export", get(bundle::export))
        // A link's own token permits the act.
        .merge(
            Router::new()
                .route("/links/look", post(links::look))
                .route("/links/use", post(links::act))
                .layer(door_of_links)
                .layer(known),
        )
        .nest(
            "/triggers",
            webhooks
                .layer(from_fn(scope::of_default))
                .layer(door)
                .layer(from_fn_with_state(Arc::clone(&ctx), shed)),
        );
    Router::new()
        .nest("/v1", v1)
        .route("/sessions/{id}/export", get(bundle::export))
        .layer(from_fn(scope::nothing))
        .route("/healthz", get(health::live))
        .route("/readyz", get(health::ready).layer(Extension(health::Looks::default())))
        .fallback(problem::no_route)
        .method_not_allowed_fallback(problem::no_method)
        .layer(DefaultBodyLimit::max(BODY_LIMIT_BYTES))
        .with_state(ctx)
        .merge(own)
}
