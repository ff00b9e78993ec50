//! Large outputs: the same commit writes the whole output as a blob, and the message keeps its beginning and its end. This
//! happens when the message is written, so a later request repeats the same bytes.

use super::Draft;
use crate::blob::Blob;
use crate::context::READ_OUTPUT;
use crate::record::{OutputPointer, ToolCall, without_nul};

/// A larger output of a tool is kept as a blob.
pub const INLINE_OUTPUT_BYTES: usize = 16 * 1024;
/// What the message keeps of it.
const HEAD_BYTES: usize = 6 * 1024;
const TAIL_BYTES: usize = 2 * 1024;

impl Draft<'_> {
    /// Returns the bytes of `content`, the part of it that the message holds, and a pointer to the whole if that has more
    /// than [`INLINE_OUTPUT_BYTES`].
    pub(super) fn inline(
        &mut self,
        call: &ToolCall,
        content: String,
    ) -> (usize, String, Option<OutputPointer>) {
        let content = without_nul(content);
        let bytes = content.len();
        if bytes <= INLINE_OUTPUT_BYTES {
            return (bytes, content, None);
        }
        let head = content.floor_char_boundary(HEAD_BYTES);
        let tail = content.ceil_char_boundary(bytes - TAIL_BYTES);
        let prefix = self.session.prefix.as_ref();
        let readable = prefix.is_some_and(|prefix| prefix.tool(READ_OUTPUT).is_some());
        let more = if readable {
            format!(" Read on with {READ_OUTPUT}: call_id {:?}, offset {head}.", call.call_id.as_str())
        } else {
            String::new()
        };
        let excerpt = format!(
            "{}\n\n[{} of {bytes} bytes are left out here.{more}]\n\n{}",
            &content[..head],
            tail - head,
            &content[tail..],
        );
        let blob = Blob::of_text(content);
        let output = OutputPointer { sha256: blob.sha256.clone(), bytes };
        self.transition.blobs.push(blob);
        (bytes, excerpt, Some(output))
    }
}
