//! How a worker repeats a model call that was interrupted: from the start (`replace`), or from the text so far (`resume`).
//!
//! Resuming is cheaper and keeps the text that readers have seen. It is correct only if the next request equals the old one
//! plus that text at its end. In every other case the call is replaced, which is always correct.

use crate::generation::InterruptedCall;
use crate::wire::without_blank_end;

/// The facts about the next model call that decide whether it may resume.
#[derive(Clone, Copy, Debug)]
pub struct NextCall<'a> {
    /// `provider/model`.
    pub model: &'a str,
    /// Hash of the next request without a prefill.
    pub base_sha256: &'a str,
    /// Whether the model accepts a request that ends with the beginning of its reply, and continues that
    /// text.
    pub takes_prefill: bool,
}

/// Returns the attempt that `next` may resume. `interrupted` are the attempts that were interrupted, in order.
/// `None`: replace.
pub fn candidate<'a>(interrupted: &'a [InterruptedCall], next: &NextCall<'_>) -> Option<&'a InterruptedCall> {
    // Only the newest attempt counts. Each attempt replaced the one before it, and readers dropped the
    // replaced text.
    interrupted.last().filter(|last| {
        next.takes_prefill
            && last.resumable
            && last.last_chunk >= 0
            && last.model == next.model
            && last.base_sha256.as_deref() == Some(next.base_sha256)
    })
}

/// Returns the prefill of the next request, from the text of the [`candidate`]. `None`: the text is blank, so
/// replace.
pub fn prefill(text: &str) -> Option<String> {
    let text = without_blank_end(text);
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example;

    #[test]
    fn a_call_goes_on_from_a_text_only_where_the_same_request_can_end_with_it() {
        let next = NextCall { model: "scripted/m", base_sha256: "00", takes_prefill: true };
        let cut = || example::interrupted("gen_1", 1, 2);
        let resumed = InterruptedCall {
            request_sha256: "11".into(),
            resumes: Some("gen_1".into()),
            ..example::interrupted("gen_2", 2, 0)
        };
        let table = [
            ("text was said", vec![cut()], next, Some("gen_1")),
            ("once more", vec![cut(), resumed], next, Some("gen_2")),
            ("nothing was interrupted", vec![], next, None),
            ("the model takes none", vec![cut()], NextCall { takes_prefill: false, ..next }, None),
            ("another model", vec![cut()], NextCall { model: "scripted/n", ..next }, None),
            ("another request", vec![cut()], NextCall { base_sha256: "22", ..next }, None),
            ("of a worker of old", vec![InterruptedCall { base_sha256: None, ..cut() }], next, None),
            ("no chunk", vec![InterruptedCall { last_chunk: -1, ..cut() }], next, None),
            ("not only text, or refused", vec![InterruptedCall { resumable: false, ..cut() }], next, None),
            ("the newest said nothing", vec![cut(), example::interrupted("gen_2", 2, -1)], next, None),
        ];
        for (what, interrupted, next, expected) in table {
            let chosen = candidate(&interrupted, &next).map(|attempt| attempt.generation_id.as_str());
            assert_eq!(chosen, expected, "{what}");
        }
    }

    #[test]
    fn a_prefill_has_no_white_space_at_its_end_and_is_never_blank() {
        let table = [
            ("Once upon a", Some("Once upon a")),
            (" Once upon a \n\t", Some(" Once upon a")),
            (" \n\u{a0}\u{feff}", None),
            ("", None),
        ];
        for (text, expected) in table {
            assert_eq!(prefill(text).as_deref(), expected, "{text:?}");
        }
    }
}
