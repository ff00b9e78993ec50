//! Large tool outputs: the commit writes the whole output as a blob, and the message keeps its beginning and
//! its end. The message is cut when it is written, so every later request repeats the same bytes.

use super::Draft;
use crate::blob::Blob;
use crate::record::READ_OUTPUT;
use crate::record::{OutputPointer, ToolCall, without_nul};

/// A tool output larger than this is stored as a blob.
pub const INLINE_OUTPUT_BYTES: usize = 16 * 1024;
/// The message keeps this much of the beginning, and [`TAIL_BYTES`] of the end.
const HEAD_BYTES: usize = 6 * 1024;
const TAIL_BYTES: usize = 2 * 1024;

impl Draft<'_> {
    /// Returns the length of `content` in bytes, the text for the message, and, if `content` is longer than
    /// [`INLINE_OUTPUT_BYTES`], a pointer to the blob with the whole output.
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
