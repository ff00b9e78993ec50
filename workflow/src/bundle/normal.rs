//! Brings bundles into a form in which equal sessions give equal text. It replaces ids that each database
//! assigns by their positions, and applies the changes that an import makes to a session.
//!
//! So these are not compared: the trigger, the parents, the session's own model and tools, the ids of
//! messages that have an origin, and whether something was still open. Everything else is compared: every
//! message, entry, step, sum, call and delivery, and blobs byte by byte.

use super::import::Adoption;
use super::{Checker, Header, Limits, Line, Refused, check::Checked, line};
use std::collections::HashMap;

/// The bundle as lines, with ids replaced by positions. Two bundles hold equal sessions if these lines are
/// equal.
///
/// # Errors
/// [`Refused`] if `bundle` is not a bundle.
pub fn normal(bundle: &[u8]) -> Result<String, Refused> {
    let mut checker = Checker::new(Limits { bytes: u64::MAX, ..Limits::default() });
    let (mut header, mut rows): (Option<Header>, Vec<Line>) = (None, Vec::new());
    for text in bundle.split_inclusive(|byte| *byte == b'\n') {
        let text = text.strip_suffix(b"\n").unwrap_or(text);
        match checker.line(text)? {
            Checked::Header => header = serde_json::from_slice(text).ok(),
            Checked::Row(row) => rows.push(*row),
            Checked::End => {}
        }
    }
    let summary = checker.finish()?;
    let inbox: HashMap<i64, i64> = summary.inbox.iter().copied().zip(1..).collect();
    let mut adoption = Adoption::by_place(inbox);
    let endings = Adoption::endings(&summary.session);
    let mut text = Vec::new();
    if let Some(mut header) = header {
        header.session_id = "sess_0".to_owned();
        header.counts.events += endings;
        header.cut.event_seq += endings;
        text.extend(line(&header));
    }
    let last_seq = summary.session.last_event_seq;
    let mut ended = endings == 0;
    for row in rows {
        if !ended && row.section() > super::Section::Event {
            ended = true;
            text.extend(
                adoption.ending(last_seq).into_iter().flat_map(|entry| Line::Event(entry).to_bytes()),
            );
        }
        text.extend(adoption.adopt(row).to_bytes());
    }
    if !ended {
        text.extend(adoption.ending(last_seq).into_iter().flat_map(|entry| Line::Event(entry).to_bytes()));
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}
