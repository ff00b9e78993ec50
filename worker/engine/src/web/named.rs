//! What the operator's configuration names, fetched whole.

use super::{Reach, client};
use std::time::Duration;

/// Fetches the body of a URL that the operator named. It is bounded in size and time, and no redirect is followed.
///
/// # Errors
/// A sentence that says why nothing came.
pub async fn fetch_named(url: &str, limit: usize, total: Duration) -> Result<Vec<u8>, String> {
    let shown = |error: reqwest::Error| format!("{:#}", anyhow::Error::from(error.without_url()));
    let client = client(Reach::Named(&[url])).timeout(total).build().map_err(shown)?;
    let mut response = client.get(url).send().await.map_err(shown)?;
    if !response.status().is_success() {
        return Err(format!("the answer is {}", response.status()));
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(shown)? {
        body.extend_from_slice(&chunk);
        if body.len() > limit {
            return Err(format!("the answer has more than {limit} bytes"));
        }
    }
    Ok(body)
}
