//! The files that pages load, embedded into the program. Their names have their hash, so a browser keeps them for good.

use axum::extract::Path;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use std::sync::LazyLock;

struct Asset {
    /// With its hash.
    name: String,
    media_type: &'static str,
    bytes: &'static [u8],
}

static STYLE: LazyLock<Asset> = LazyLock::new(|| {
    let text = concat!(include_str!("../assets/base.css"), include_str!("../assets/pages.css"));
    Asset::new("console", "css", "text/css; charset=utf-8", text.as_bytes())
});
static SCRIPT: LazyLock<Asset> = LazyLock::new(|| {
    Asset::new("console", "js", "text/javascript; charset=utf-8", include_bytes!("../assets/console.js"))
});
static ICON: LazyLock<Asset> =
    LazyLock::new(|| Asset::new("icon", "svg", "image/svg+xml", include_bytes!("../assets/icon.svg")));

impl Asset {
    fn new(stem: &str, ending: &str, media_type: &'static str, bytes: &'static [u8]) -> Asset {
        let hash = hex::encode(&Sha256::digest(bytes)[..6]);
        Asset { name: format!("{stem}.{hash}.{ending}"), media_type, bytes }
    }
}

pub(crate) fn style() -> &'static str {
    &STYLE.name
}

pub(crate) fn script() -> &'static str {
    &SCRIPT.name
}

pub(crate) fn icon() -> &'static str {
    &ICON.name
}

/// One of the files.
pub(crate) async fn serve(Path(name): Path<String>) -> Response {
    let Some(asset) = [&STYLE, &SCRIPT, &ICON].into_iter().map(|one| &**one).find(|one| one.name == name)
    else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let mut response = asset.bytes.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(asset.media_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("public, max-age=31536000, immutable"));
    response
}
