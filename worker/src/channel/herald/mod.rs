//! Notices from other systems.

use crate::Ctx;
use axum::Router;
use std::sync::Arc;

/// `/v1/triggers/herald`.
pub(super) fn routes() -> Router<Arc<Ctx>> {
    Router::new()
}
