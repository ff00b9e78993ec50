//! Files from the transcript: the arguments of calls hold what a session wrote, and the results confirm it. A
//! fork gets its initial files from its own messages.
#![deny(missing_docs)]

use crate::id::CallId;
use crate::record::{Record, ToolCall};
use crate::session::Session;
use sha2::Digest;
use std::collections::HashMap;

/// A file that a session wrote, with its latest content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenFile {
    /// As passed to the tool: relative to the workspace.
    pub path: String,
    /// `None` if the transcript does not contain it: another tool wrote the file, or the arguments differ
    /// from what was written.
    pub content: Option<String>,
}

/// The files that `records` wrote, in the order of their last write. Two spellings of one path give two
/// files. Writing them in this order leaves the latest content.
pub fn files_of<'a>(records: impl IntoIterator<Item = &'a Record>) -> Vec<WrittenFile> {
    let mut asked: HashMap<&CallId, &ToolCall> = HashMap::new();
    let mut files: Vec<WrittenFile> = Vec::new();
    for record in records {
        asked.extend(record.tool_calls().map(|call| (&call.call_id, call)));
        for result in record.tool_results().filter(|result| !result.is_error) {
            let Some(details) = result.details.as_ref().filter(|details| details["type"] == "fileWritten")
            else {
                continue;
            };
            let Some(path) = details["path"].as_str() else { continue };
            let content = asked.get(&result.call_id).and_then(|call| {
                let content = call.arguments["content"].as_str()?;
                let is_it = call.arguments["path"] == path && details["sha256"] == sha256(content);
                is_it.then(|| content.to_owned())
            });
            files.retain(|file| file.path != path);
            files.push(WrittenFile { path: path.to_owned(), content });
        }
    }
    files
}

/// The files that a fork starts with. `None` if its folder must not be rebuilt from them: the session is no
/// fork, or it has written files itself, so a missing folder means that the files are elsewhere. (A dry run
/// writes no files.)
pub fn inherited(session: &Session) -> Option<Vec<WrittenFile>> {
    session.parent_session_id.as_ref()?;
    let (copied, own): (Vec<&Record>, Vec<&Record>) =
        session.records.iter().partition(|record| record.details.origin_message_id.is_some());
    if session.policy.tool_mode.is_live() && written(own) {
        return None;
    }
    Some(files_of(copied))
}

/// Returns whether a result in `records` reports a written file.
fn written<'a>(records: impl IntoIterator<Item = &'a Record>) -> bool {
    let mut results = records.into_iter().flat_map(Record::tool_results);
    results.any(|result| {
        !result.is_error && result.details.as_ref().is_some_and(|details| details["type"] == "fileWritten")
    })
}

fn sha256(text: &str) -> String {
    hex::encode(sha2::Sha256::digest(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example;
    use crate::record::{Block, ToolResult};
    use serde_json::{Value, json};

    /// A call and its result, as two messages.
    fn wrote(number: i64, arguments: Value, details: Value) -> [Record; 2] {
        let call_id = CallId::from(format!("call_{number}"));
        let call =
            ToolCall { call_id: call_id.clone(), name: "write_file".into(), arguments, malformed: None };
        let mut result = example::result(number + 1, call_id.as_str());
        result.content = vec![Block::ToolResult(ToolResult {
            call_id,
            name: "write_file".into(),
            content: "Wrote.".into(),
            is_error: false,
            details: Some(details),
            output: None,
        })]
        .into();
        [example::assistant(number, example::RUN, vec![Block::ToolCall(call)]), result]
    }

    fn write(number: i64, path: &str, content: &str) -> [Record; 2] {
        let details =
            json!({"type": "fileWritten", "path": path, "bytes": content.len(), "sha256": sha256(content)});
        wrote(number, json!({"path": path, "content": content}), details)
    }

    fn file(path: &str, content: Option<&str>) -> WrittenFile {
        WrittenFile { path: path.into(), content: content.map(str::to_owned) }
    }

    #[test]
    fn the_last_content_of_each_path_stays_in_the_order_of_writing() {
        let records = [write(1, "a", "one"), write(3, "b", "two"), write(5, "a", "three")].concat();
        assert_eq!(files_of(&records), [file("b", Some("two")), file("a", Some("three"))]);
        assert_eq!(files_of(&records[..4]), [file("a", Some("one")), file("b", Some("two"))]);
        assert_eq!(
            files_of(&records[..3]),
            [file("a", Some("one"))],
            "a call without its result wrote nothing"
        );
    }

    #[test]
    fn a_content_that_is_not_what_was_written_is_not_known() {
        let details = json!({"type": "fileWritten", "path": "a", "bytes": 3, "sha256": sha256("one")});
        for arguments in [
            json!({"path": "a", "content": "two"}),
            json!({"path": "b", "content": "one"}),
            json!({"path": "a"}),
            json!({}),
        ] {
            assert_eq!(
                files_of(&wrote(1, arguments.clone(), details.clone())),
                [file("a", None)],
                "{arguments}"
            );
        }
    }

    #[test]
    fn a_failed_write_wrote_nothing() {
        let mut records = write(1, "a", "one");
        let Block::ToolResult(result) = &mut records[1].content.to_mut()[0] else { panic!("a result") };
        result.is_error = true;
        assert!(files_of(&records).is_empty());
    }

    #[test]
    fn only_a_fork_without_files_of_its_own_has_inherited_them_all() {
        let mut copied = write(3, "a", "one");
        for record in &mut copied {
            record.details.origin_message_id = Some("msg_1".into());
        }
        let mut session = example::session();
        session.records = copied.to_vec();
        assert_eq!(inherited(&session), None, "no fork");
        session.parent_session_id = Some("sess_0".into());
        assert_eq!(inherited(&session), Some(vec![file("a", Some("one"))]));
        session.records.extend(write(5, "b", "two"));
        assert_eq!(inherited(&session), None, "it has written since");
        session.policy.tool_mode = crate::policy::ToolMode::Dry;
        assert_eq!(inherited(&session), Some(vec![file("a", Some("one"))]), "nothing was written for true");
    }
}
