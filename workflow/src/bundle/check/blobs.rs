//! Checks the blobs of a bundle: exactly those that rows refer to, each once, and each with the right hash.

use super::super::{BLOB_BYTES, BlobPart, Line, PART_BYTES, scan};
use super::fits::CheckResult;
use crate::prefix::Prefix;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// Maximum number of blobs.
const MOST: usize = 100_000;
/// Maximum size of a blob that is parsed as JSON.
const JSON_BYTES: i64 = 8 << 20;

type Hash = [u8; 32];

/// How rows use a blob.
#[derive(Clone, Copy, Default)]
struct Uses {
    state: bool,
    value: bool,
    prefix: bool,
}

/// The part of the check that handles blobs.
#[derive(Default)]
pub(super) struct Blobs {
    wanted: BTreeMap<Hash, Uses>,
    last: Option<Hash>,
    current: Option<Current>,
    whole: i64,
}

struct Current {
    sha256: String,
    media_type: String,
    bytes: i64,
    at: i64,
    hash: Sha256,
    uses: Uses,
    /// Collected only if the blob must be JSON.
    json: Vec<u8>,
}

impl Blobs {
    /// Notes that `line` refers to a blob.
    pub(super) fn want(&mut self, sha256: &str, line: &Line) -> CheckResult {
        if !scan::is_sha256(sha256) {
            return Err("a blob's name is 64 hexadecimal digits in lower case".to_owned());
        }
        let uses = self.wanted.entry(hash_of(sha256)).or_default();
        match line {
            Line::Session(_) => uses.prefix = true,
            Line::Event(row) if row.kind == "checkpoint" => uses.state = true,
            // A tool's output can be any text, and a pack any bytes: who restores it checks each object.
            Line::Event(row) if row.kind == "TOOL_RESULT" || row.kind == "WORKSPACE_SNAPSHOT" => {}
            Line::Event(_) => uses.value = true,
            Line::Seed(_)
            | Line::Run(_)
            | Line::Record(_)
            | Line::Step(_)
            | Line::Call(_)
            | Line::Delivery(_)
            | Line::Inbox(_)
            | Line::Blob(_) => {}
        }
        if self.wanted.len() > MOST {
            return Err(format!("its rows point at more than {MOST} blobs"));
        }
        Ok(())
    }

    pub(super) fn part(&mut self, part: &BlobPart) -> CheckResult {
        let mut current = match self.current.take() {
            Some(current) => current,
            None => self.begin(part)?,
        };
        let same = current.sha256 == part.sha256
            && current.media_type == part.media_type
            && current.bytes == part.bytes
            && current.at == part.at;
        if !same {
            return Err(format!("the next part of blob {} is missing", current.sha256));
        }
        let bytes = STANDARD.decode(&part.base64).map_err(|error| format!("base64: {error}"))?;
        let rest = current.bytes - current.at;
        if bytes.len() as i64 != rest.min(PART_BYTES as i64) {
            return Err(format!("a part has {PART_BYTES} bytes, the last one the rest"));
        }
        current.hash.update(&bytes);
        current.at += bytes.len() as i64;
        if current.uses.state || current.uses.value || current.uses.prefix {
            current.json.extend_from_slice(&bytes);
        }
        if current.at < current.bytes {
            self.current = Some(current);
            return Ok(());
        }
        self.whole += 1;
        end(current)
    }

    fn begin(&mut self, part: &BlobPart) -> Result<Current, String> {
        if !scan::is_sha256(&part.sha256) || !scan::is_name(&part.media_type) {
            return Err("a blob has a hash for its name, and a media type".to_owned());
        }
        let hash = hash_of(&part.sha256);
        if self.last.is_some_and(|last| last >= hash) {
            return Err("blobs come in the order of their hashes, each once".to_owned());
        }
        self.last = Some(hash);
        let Some(uses) = self.wanted.remove(&hash) else {
            return Err(format!("no row points at blob {}", part.sha256));
        };
        let is_json = uses.state || uses.value || uses.prefix;
        let most = if is_json { JSON_BYTES } else { BLOB_BYTES };
        if !(0..=most).contains(&part.bytes) {
            return Err(format!("blob {} cannot have {} bytes", part.sha256, part.bytes));
        }
        Ok(Current {
            sha256: part.sha256.clone(),
            media_type: part.media_type.clone(),
            bytes: part.bytes,
            at: 0,
            hash: Sha256::new(),
            uses,
            json: Vec::new(),
        })
    }

    /// Returns the number of blobs.
    pub(super) fn close(&self) -> Result<i64, String> {
        if let Some(current) = &self.current {
            return Err(format!("blob {} is not whole", current.sha256));
        }
        match self.wanted.keys().next() {
            Some(hash) => Err(format!("a row points at blob {}, which is missing", hex::encode(hash))),
            None => Ok(self.whole),
        }
    }
}

fn end(current: Current) -> CheckResult {
    let sha256 = hex::encode(current.hash.finalize());
    if sha256 != current.sha256 {
        return Err(format!("blob {} has another hash: {sha256}", current.sha256));
    }
    let Uses { state, value, prefix } = current.uses;
    if !(state || value || prefix) {
        return Ok(());
    }
    scan::bytes(&current.json).map_err(|reason| format!("blob {sha256}: {reason}"))?;
    let no =
        |error: serde_json::Error| format!("blob {sha256} is not of the kind that its row expects: {error}");
    if state {
        serde_json::from_slice::<crate::state::State>(&current.json).map_err(no)?;
    }
    if value {
        serde_json::from_slice::<serde_json::Value>(&current.json).map_err(no)?;
    }
    if prefix {
        serde_json::from_slice::<Prefix>(&current.json).map_err(no)?;
    }
    Ok(())
}

fn hash_of(sha256: &str) -> Hash {
    let mut hash = [0; 32];
    hex::decode_to_slice(sha256, &mut hash).expect("it was looked at: 64 hexadecimal digits");
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blob_is_no_larger_than_an_import_holds() {
        for (bytes, reason) in
            [(BLOB_BYTES + 1, "cannot have"), (-1, "cannot have"), (BLOB_BYTES, "a part has")]
        {
            let sha256 = "0".repeat(64);
            let media_type = "text/plain".to_owned();
            let part = BlobPart { sha256: sha256.clone(), media_type, bytes, at: 0, base64: String::new() };
            let mut blobs = Blobs::default();
            blobs.want(&sha256, &Line::Blob(part.clone())).unwrap();
            let refused = blobs.part(&part).unwrap_err();
            assert!(refused.contains(reason), "{bytes}: {refused}");
        }
    }
}
