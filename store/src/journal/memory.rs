//! A journal in memory.

use super::Journal;
use crate::{Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use wakeful_workflow::recover::{Checkpoint, Entry};

/// Journals by their ids. Each append gives the next number, from 1.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    journals: BTreeMap<String, Vec<(String, Value)>>,
}

impl Memory {
    /// Appends an entry to the journal of `id`, and returns its number. States and values are in the payload.
    pub fn append(&mut self, id: &str, kind: &str, payload: Value) -> i64 {
        let journal = self.journals.entry(id.to_owned()).or_default();
        journal.push((kind.to_owned(), payload));
        journal.len() as i64
    }

    fn numbered(&self, id: &str) -> impl DoubleEndedIterator<Item = (i64, &(String, Value))> {
        let entries = self.journals.get(id).map(Vec::as_slice).unwrap_or_default();
        entries.iter().enumerate().map(|(index, entry)| (index as i64 + 1, entry))
    }
}

impl Journal for Memory {
    async fn last_checkpoint(&self, id: &str) -> Result<Option<Checkpoint>> {
        let newest = self.numbered(id).rev().find(|(_, (kind, _))| kind == "checkpoint");
        newest
            .map(|(seq, (_, payload))| Checkpoint::read(seq, payload))
            .transpose()
            .map_err(|error| Error::corrupt("journal entry", error))
    }

    async fn entries_after(&self, id: &str, after: i64) -> Result<Vec<Entry>> {
        let newer = self.numbered(id).filter(|(seq, _)| *seq > after);
        newer
            .map(|(_, (kind, payload))| Entry::read(kind, payload))
            .collect::<std::result::Result<_, _>>()
            .map_err(|error| Error::corrupt("journal entry", error))
    }
}
