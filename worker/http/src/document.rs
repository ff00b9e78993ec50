//! `GET /v1/openapi.json`. See [`crate::openapi`].

use crate::openapi::{Operation, document, of};
use axum::Extension;
use axum::body::Bytes;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use std::sync::{Arc, OnceLock};
use wakeful_engine::ctx::Ctx;

/// The document of this process. It is made when somebody asks for it first.
#[derive(Clone)]
pub(crate) struct Served {
    base_path: String,
    of_channels: fn() -> Vec<Operation>,
    bytes: Arc<OnceLock<Bytes>>,
}

impl Served {
    pub(crate) fn new(ctx: &Ctx, of_channels: fn() -> Vec<Operation>) -> Served {
        Served { base_path: ctx.config.server.base_path.clone(), of_channels, bytes: Arc::default() }
    }

    fn bytes(&self) -> Bytes {
        let made = || {
            let mut operations = crate::operations();
            operations.extend((self.of_channels)());
            Bytes::from(document(&operations, &self.base_path).to_string())
        };
        self.bytes.get_or_init(made).clone()
    }
}

/// The document.
pub(crate) async fn show(Extension(served): Extension<Served>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], served.bytes()).into_response()
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![Operation::get("/v1/openapi.json", "This document").answers(
        StatusCode::OK,
        "OpenAPI 3.1",
        of::<Value>(),
    )]
}
