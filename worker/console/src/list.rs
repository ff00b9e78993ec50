//! What the pages of lists share: the link to the next page, and the links that choose a status.

use crate::text::{Badge, badge};
use serde::Deserialize;
use serde_json::Value;

/// A page of a list.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct List<T> {
    pub items: Vec<T>,
    #[serde(default)]
    next: Value,
}

impl<T> List<T> {
    /// The cursor of the next page, or an empty text.
    pub fn next(&self) -> String {
        match &self.next {
            Value::String(text) => text.clone(),
            Value::Number(number) => number.to_string(),
            _ => String::new(),
        }
    }

    /// The link to the next page, which `link` makes of its cursor, or an empty text.
    pub fn next_link(&self, link: impl Fn(&str) -> String) -> String {
        let next = self.next();
        if next.is_empty() { next } else { link(&next) }
    }
}

/// A link to the rows of one status, or of all.
pub(crate) struct Chip {
    /// `None`: of all.
    pub badge: Option<Badge>,
    pub link: String,
    pub is_on: bool,
}

/// A chip for all rows, then one for each status. `chosen` is the status that is shown, or empty.
pub(crate) fn chips(statuses: &[&'static str], chosen: &str, link: impl Fn(&str) -> String) -> Vec<Chip> {
    let all = Chip { badge: None, link: link(""), is_on: chosen.is_empty() };
    let one = |status: &&'static str| Chip {
        badge: Some(badge(status)),
        link: link(status),
        is_on: chosen == *status,
    };
    std::iter::once(all).chain(statuses.iter().map(one)).collect()
}
