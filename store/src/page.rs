//! Limits pages of lists in bytes too: a page of large texts can take the memory of a process that serves many.
#![deny(missing_docs)]

/// How many bytes of texts a page of a session has at most, as the API gives it.
pub const PAGE_BYTES: i64 = 4 << 20;

/// Part of a list.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Page<T> {
    /// At most as many as were asked for, and no more than fit into the bytes; at least one, if there is any.
    pub items: Vec<T>,
    /// There may be more.
    pub more: bool,
}

impl<T> Page<T> {
    /// `found`: how many rows the statement found within `limit`. It returned the `items` of them that fit.
    pub(crate) fn of(items: Vec<T>, found: i64, limit: i64) -> Page<T> {
        let more = items.len() as i64 == limit || (items.len() as i64) < found;
        Page { items, more }
    }
}
