//! Chats: a message comes in by HTTP. If its conversation has no session yet, its history may be in an old cache.
#![doc = include_str!("README.md")]

#[cfg_attr(not(feature = "legacy-redis"), allow(dead_code))]
pub mod legacy;
mod messages;
#[cfg_attr(not(feature = "legacy-redis"), allow(dead_code))]
mod reading;

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use legacy::Cache;
pub(crate) use messages::operations;
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;
use wakeful_http::guard::shed;

/// `/v1/chat`.
///
/// # Errors
/// Those of [`Cache::of`].
pub(super) fn routes(ctx: &Arc<Ctx>) -> anyhow::Result<Router<Arc<Ctx>>> {
    let cache = Arc::new(Cache::of(&ctx.config)?);
    let message = messages::Chats { ctx: Arc::clone(ctx), cache };
    Ok(Router::new()
        .route(
            "/chat/{conversation_id}/messages",
            post(messages::post_message).layer(from_fn_with_state(Arc::clone(ctx), shed)),
        )
        .route("/chat/legacy", get(messages::legacy_counts))
        .with_state(message))
}
