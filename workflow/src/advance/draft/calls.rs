//! The calls that a reply asks for: ids that are unique in the session, and new ledger rows.

use super::Draft;
use crate::advance::OpenedCall;
use crate::effect::Effect;
use crate::id::CallId;
use crate::record::{Block, Record, ToolCall, without_nul};
use sha2::Digest;
use std::collections::{BTreeMap, HashSet};

/// A longer call id is replaced. It is part of the ledger's primary key, and an index entry holds at most
/// 2,704 bytes.
const CALL_ID_BYTES: usize = 256;

impl<'a> Draft<'a> {
    /// Makes each call id unique within the session, as the ledger requires. Providers promise ids that are
    /// unique in one reply only, and some servers count from zero each time. A repeated id gets the message
    /// number and the call's index as a suffix, which are the same in every attempt.
    pub(super) fn with_unique_call_ids(&self, content: Vec<Block>) -> Vec<Block> {
        if !content.iter().any(|block| matches!(block, Block::ToolCall(_))) {
            return content;
        }
        let ids = |record: &'a Record| record.tool_calls().map(|call| call.call_id.as_str());
        let mut before = HashSet::with_capacity(self.session.records.len());
        before.extend(self.session.records.iter().flat_map(ids));
        let left_out = self.session.left_out.iter();
        before.extend(left_out.flat_map(|left_out| &left_out.call_ids).map(CallId::as_str));
        let mut here: HashSet<CallId> = HashSet::new();
        let message_number = self.last_message_number() + 1;
        let mut index = 0;
        content
            .into_iter()
            .map(|block| match block {
                Block::ToolCall(mut call) => {
                    let given = without_nul(call.call_id.into_string());
                    let usable = !given.is_empty() && given.len() <= CALL_ID_BYTES;
                    let mut id = if usable { given } else { format!("call_{message_number}_{index}") };
                    call.call_id = loop {
                        if before.contains(id.as_str()) {
                            id = format!("{id}_{message_number}_{index}");
                            continue;
                        }
                        let free = CallId::from(id);
                        if !here.contains(&free) {
                            break free;
                        }
                        id = format!("{free}_{message_number}_{index}");
                    };
                    here.insert(call.call_id.clone());
                    index += 1;
                    Block::ToolCall(call)
                }
                other @ (Block::Text { .. } | Block::ToolResult(_) | Block::Provider { .. }) => other,
            })
            .collect()
    }
}

impl OpenedCall {
    pub(super) fn new(call: &ToolCall, effects: &BTreeMap<String, Effect>) -> Self {
        let arguments = call.malformed.clone().unwrap_or_else(|| call.arguments.to_string());
        OpenedCall {
            call_id: call.call_id.clone(),
            name: call.name.clone(),
            // This worker refuses a call of an unknown tool. A worker of a newer deployment may know the
            // tool, and must not run it twice.
            effect: effects.get(&call.name).copied().unwrap_or(Effect::Guarded),
            args_sha256: hex::encode(sha2::Sha256::digest(arguments.as_bytes())),
            unapproved: false,
            start: None,
        }
    }
}
