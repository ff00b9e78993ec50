//! The pages. Each asks the API for what it shows; each act is a form that leads to the page that shows its outcome.

mod act;
mod audit;
mod batches;
mod chat;
mod compare;
mod deliveries;
mod door;
mod effects;
mod errors;
mod links;
mod notifications;
mod overview;
mod pauses;
mod queue;
mod schedules;
mod session;
mod sessions;
mod tokens;

use crate::{Console, ROOT, assets};
use axum::Router;
use axum::routing::{get, post};
use std::sync::Arc;

/// All pages, below [`ROOT`].
pub(crate) fn router() -> Router<Arc<Console>> {
    let pages = Router::new()
        .route("/", get(overview::show))
        .route("/assets/{name}", get(assets::serve))
        .route("/login", get(door::login_page).post(door::login))
        .route("/logout", post(door::logout))
        .route("/theme", post(door::theme))
        .route("/space", post(door::space))
        .route("/sessions", get(sessions::list))
        .route("/sessions/{id}", get(session::show))
        .route("/sessions/{id}/stream", get(session::stream))
        .route("/sessions/{id}/raw", get(session::raw))
        .route("/sessions/{id}/fork", get(session::fork_page).post(act::fork))
        .route("/sessions/{id}/messages", post(act::message))
        .route("/sessions/{id}/resolve", post(act::resolve))
        .route("/sessions/{id}/approval", post(act::approval))
        .route("/sessions/{id}/{verb}", post(act::steer))
        .route("/chat", get(chat::list).post(chat::begin))
        .route("/chat/{conversation}", get(chat::show).post(chat::say))
        .route("/chat/{conversation}/new", post(chat::anew))
        .route("/effects", get(effects::list))
        .route("/effects/resolve", post(effects::resolve))
        .route("/errors", get(errors::list))
        .route("/errors/{id}", get(errors::show))
        .route("/errors/{id}/mute", post(errors::mute))
        .route("/errors/{id}/note", post(errors::note))
        .route("/batches", get(batches::list).post(batches::create))
        .route("/batches/new", get(batches::plan))
        .route("/batches/{id}", get(batches::show))
        .route("/batches/{id}/{verb}", post(batches::steer))
        .route("/deliveries", get(deliveries::list))
        .route("/deliveries/{id}", get(deliveries::show))
        .route("/deliveries/{id}/resend", post(deliveries::resend))
        .route("/notifications", get(notifications::list))
        .route("/notifications/{id}", get(notifications::show))
        .route("/notifications/{id}/resend", post(notifications::resend))
        .route("/act/{token}", get(links::show).post(links::act))
        .route("/schedules", get(schedules::list))
        .route("/schedules/{id}", get(schedules::show))
        .route("/schedules/{id}/{verb}", post(schedules::steer))
        .route("/mails", get(deliveries::mails))
        .route("/queue", get(queue::show))
        .route("/pauses", get(pauses::show).post(pauses::begin))
        .route("/pauses/end", post(pauses::end))
        .route("/audit", get(audit::show))
        .route("/tokens", get(tokens::list).post(tokens::create))
        .route("/tokens/{id}/revoke", post(tokens::revoke))
        .route("/compare", get(compare::show))
        .fallback(door::no_page);
    Router::new().nest(&format!("{ROOT}/"), pages.clone()).route(ROOT, get(overview::show))
}
