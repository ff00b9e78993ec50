//! `list_files`, `edit_file` and `search_files`.

use super::{
    FILE_MODE, MAX_WRITE_BYTES, Workspace, blocking, io_fault, named_file, open_workspace, regular_file,
    relative, replace, sync_folders, written,
};
use crate::tool::{FileUse, Tool, ToolCallContext, ToolError, ToolOutput, parse_arguments};
use async_trait::async_trait;
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt as _, PermissionsExt as _};
use regex::bytes::{Regex, RegexBuilder};
use serde::Deserialize;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::{self, ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::id::CallId;

/// Maximum number of entries that `list_files` returns.
const MAX_LISTED: usize = 1000;
/// Maximum number of lines that `search_files` returns, and of bytes of each.
const MAX_FOUND: usize = 200;
const MAX_LINE_BYTES: usize = 300;
/// Larger files are not searched.
const MAX_SEARCHED_BYTES: u64 = 4 << 20;
/// A search ends after this time with what it has found.
const SEARCH_TIME: Duration = Duration::from_secs(20);
/// A compiled pattern is not larger than this. Matching takes linear time, whatever the pattern.
const PATTERN_BYTES: usize = 64 << 10;
const MAX_DEPTH: usize = 128;

/// Lists the files of the session.
pub struct ListFiles;

/// Replaces one part of a file by another text, exactly and once.
pub struct EditFile;

/// Finds lines in the session's files.
pub struct SearchFiles;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListArguments {
    #[serde(default)]
    path: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EditArguments {
    path: String,
    old: String,
    new: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SearchArguments {
    pattern: String,
    #[serde(default)]
    path: Option<String>,
}

#[async_trait]
impl Tool for ListFiles {
    fn definition(&self) -> ToolDefinition {
        ToolDefinition::new(
            "list_files",
            "List the files and folders of this session's workspace, with their sizes. At most 1000 entries.",
            json!({
                "type": "object",
                "properties": {"path": folder_schema()},
                "additionalProperties": false,
            }),
            Effect::Pure,
        )
    }

    fn file_use(&self) -> FileUse {
        FileUse::Reads
    }

    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let ListArguments { path } = parse_arguments(arguments)?;
        let workspace = call.workspace.clone();
        blocking(move || list(&workspace, path.as_deref())).await
    }

    async fn dry_run(&self, call: &ToolCallContext, _: Value) -> Result<ToolOutput, ToolError> {
        let mut text = String::new();
        for file in call.workspace.rehearsed.iter().flat_map(|files| files.iter()) {
            let _ = writeln!(text, "{}", file.path);
        }
        Ok(ToolOutput::text(if text.is_empty() { "There are no files.".to_owned() } else { text }))
    }
}

#[async_trait]
impl Tool for EditFile {
    fn definition(&self) -> ToolDefinition {
        ToolDefinition::new(
            "edit_file",
            "Replace one part of a text file in this session's workspace. `old` must be in the file exactly once, with \
             its spaces and line ends; give enough of it to make it so.",
            json!({
                "type": "object",
                "properties": {
                    "path": super::path_schema(),
                    "old": {"type": "string", "minLength": 1, "description": "The text to replace."},
                    "new": {"type": "string", "description": "The text to put in its place."},
                },
                "required": ["path", "old", "new"],
                "additionalProperties": false,
            }),
            // After a crash it runs again, on the file as it was before its turn.
            Effect::Idempotent,
        )
    }

    fn file_use(&self) -> FileUse {
        FileUse::Writes
    }

    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let arguments: EditArguments = parse_arguments(arguments)?;
        let (workspace, call_id) = (call.workspace.clone(), call.call_id.clone());
        let stop = call.cancelled.child_token();
        let _guard = stop.clone().drop_guard();
        blocking(move || edit(&workspace, &call_id, &arguments, &stop)).await
    }
}

#[async_trait]
impl Tool for SearchFiles {
    fn definition(&self) -> ToolDefinition {
        ToolDefinition::new(
            "search_files",
            "Find lines that match a regular expression (Rust syntax) in the text files of this session's workspace. At \
             most 200 lines are returned.",
            json!({
                "type": "object",
                "properties": {
                    "pattern": {"type": "string", "minLength": 1, "description": "For example \"fn main\" or \"(?i)todo\"."},
                    "path": folder_schema(),
                },
                "required": ["pattern"],
                "additionalProperties": false,
            }),
            Effect::Pure,
        )
    }

    fn file_use(&self) -> FileUse {
        FileUse::Reads
    }

    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let SearchArguments { pattern, path } = parse_arguments(arguments)?;
        let (workspace, stop) = (call.workspace.clone(), call.cancelled.clone());
        let pattern = RegexBuilder::new(&pattern)
            .size_limit(PATTERN_BYTES)
            .build()
            .map_err(|error| ToolError::new(format!("The pattern cannot be used: {error}")))?;
        blocking(move || search(&workspace, &pattern, path.as_deref(), &stop)).await
    }

    async fn dry_run(&self, call: &ToolCallContext, _: Value) -> Result<ToolOutput, ToolError> {
        let _ = call;
        Ok(super::super::not_carried_out("search_files"))
    }
}

fn folder_schema() -> Value {
    json!({
        "type": "string",
        "description": "A folder below the workspace, for example \"notes\". Left out: the whole workspace.",
    })
}

/// Opens a folder of the workspace. `None`: the session has no files.
fn folder(workspace: &Workspace, path: Option<&str>) -> Result<Option<(Dir, PathBuf)>, ToolError> {
    let Some(dir) = open_workspace(workspace)? else { return Ok(None) };
    let asked = path.unwrap_or_default();
    // "/" is the host's folder, and not this one.
    let asked = if asked.starts_with('/') { asked } else { asked.trim_end_matches('/') };
    if asked.is_empty() || asked == "." {
        return Ok(Some((dir, PathBuf::new())));
    }
    let below = relative(asked)?;
    match dir.open_dir(&below) {
        Ok(opened) => Ok(Some((opened, below))),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(ToolError::new(format!("There is no folder {asked:?} in the workspace.")))
        }
        Err(error) => Err(io_fault("read", asked, &error)),
    }
}

/// Calls `visit` for each entry below `dir`, in order, until it returns `false`.
fn walk(
    dir: &Dir,
    at: &Path,
    depth: usize,
    visit: &mut dyn FnMut(&Dir, &std::ffi::OsStr, &Path, &cap_std::fs::Metadata) -> io::Result<bool>,
) -> io::Result<bool> {
    let mut names = dir.entries()?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
    names.sort();
    for name in names {
        let metadata = match dir.symlink_metadata(&name) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            metadata => metadata?,
        };
        let path = at.join(&name);
        if !visit(dir, &name, &path, &metadata)? {
            return Ok(false);
        }
        // A link is not followed, so that no folder is seen twice.
        if metadata.is_dir() && depth < MAX_DEPTH && !walk(&dir.open_dir(&name)?, &path, depth + 1, visit)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn list(workspace: &Workspace, path: Option<&str>) -> Result<ToolOutput, ToolError> {
    let shown = path.unwrap_or(".");
    let (mut text, mut count) = (String::new(), 0);
    if let Some((dir, at)) = folder(workspace, path)? {
        let whole = walk(&dir, &at, 0, &mut |_, _, path, metadata| {
            count += 1;
            if count > MAX_LISTED {
                return Ok(false);
            }
            let path = path.display();
            let _ = match metadata.file_type() {
                kind if kind.is_dir() => writeln!(text, "{path}/"),
                kind if kind.is_symlink() => writeln!(text, "{path} (link)"),
                _ => writeln!(text, "{path} ({} bytes)", metadata.len()),
            };
            Ok(true)
        });
        if !whole.map_err(|error| io_fault("listed", shown, &error))? {
            let _ = writeln!(text, "[There are more than {MAX_LISTED} entries. List a folder of them.]");
        }
    }
    Ok(ToolOutput::text(if text.is_empty() { "There are no files.".to_owned() } else { text }))
}

/// How often a part is in a text.
enum Times {
    Never,
    Once,
    More,
}

/// How often `part` is within `text`. Places may overlap: "aa" is twice in "aaa". Each search goes through the text once; to count
/// all places would take hours of a text of one letter.
fn times(text: &str, part: &str) -> Times {
    let Some(first) = text.find(part) else { return Times::Never };
    let next = first + text[first..].chars().next().map_or(0, char::len_utf8);
    if text[next..].contains(part) { Times::More } else { Times::Once }
}

fn edit(
    workspace: &Workspace,
    call_id: &CallId,
    EditArguments { path, old, new }: &EditArguments,
    stop: &CancellationToken,
) -> Result<ToolOutput, ToolError> {
    let (name, below) = named_file(path)?;
    let fault = |error: io::Error| match error.kind() {
        ErrorKind::NotFound => super::nothing(path),
        _ => io_fault("edited", path, &error),
    };
    let dir = open_workspace(workspace)?.ok_or_else(|| super::nothing(path))?;
    let parent =
        if below.as_os_str().is_empty() { dir.try_clone() } else { dir.open_dir(&below) }.map_err(fault)?;
    let metadata = parent.symlink_metadata(&name).map_err(fault)?;
    regular_file(path, metadata.file_type())?;
    // A file that may be executed keeps that right.
    let mode = FILE_MODE | (metadata.permissions().mode() & 0o111);
    let text = read_text(&parent, &name, MAX_WRITE_BYTES as u64).map_err(fault)?;
    let text = text.ok_or_else(|| {
        ToolError::new(format!(
            "{path:?} is larger than {MAX_WRITE_BYTES} bytes, which is the most that can be edited."
        ))
    })?;
    let text = String::from_utf8(text).map_err(|_| ToolError::new(format!("{path:?} is not UTF-8 text.")))?;
    let edited = match times(&text, old) {
        Times::Never => {
            return Err(ToolError::new(format!(
                "{path:?} does not have this text. Read the file, and give it exactly."
            )));
        }
        Times::Once => text.replacen(old.as_str(), new, 1),
        Times::More => {
            return Err(ToolError::new(format!(
                "{path:?} has this text more than once. Give more of what is around it."
            )));
        }
    };
    super::check_size(edited.as_bytes())?;
    replace(&parent, &name, (call_id, mode), edited.as_bytes(), stop).map_err(fault)?;
    sync_folders(&dir, &below).map_err(fault)?;
    Ok(written(path, edited.as_bytes()))
}

/// `None`: the file is larger than `most`.
fn read_text(dir: &Dir, name: impl AsRef<Path>, most: u64) -> io::Result<Option<Vec<u8>>> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW);
    let file = dir.open_with(name, &options)?;
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= most).then_some(bytes))
}

fn search(
    workspace: &Workspace,
    pattern: &Regex,
    path: Option<&str>,
    stop: &CancellationToken,
) -> Result<ToolOutput, ToolError> {
    let shown = path.unwrap_or(".");
    let (mut text, mut found, mut skipped) = (String::new(), 0, 0);
    let began = Instant::now();
    let mut whole = true;
    if let Some((dir, at)) = folder(workspace, path)? {
        let walked = walk(&dir, &at, 0, &mut |dir, name, path, metadata| {
            if !metadata.is_file() {
                return Ok(true);
            }
            if stop.is_cancelled() || began.elapsed() > SEARCH_TIME {
                return Ok(false);
            }
            let Some(bytes) = read_text(dir, name, MAX_SEARCHED_BYTES)?.filter(|bytes| !bytes.contains(&0))
            else {
                skipped += 1;
                return Ok(true);
            };
            for (number, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
                if stop.is_cancelled() || began.elapsed() > SEARCH_TIME {
                    return Ok(false);
                }
                if pattern.is_match(line) {
                    found += 1;
                    if found > MAX_FOUND {
                        return Ok(false);
                    }
                    let line = String::from_utf8_lossy(&line[..line.len().min(MAX_LINE_BYTES)]);
                    let _ = writeln!(text, "{}:{}: {}", path.display(), number + 1, line.trim_end());
                }
            }
            Ok(true)
        });
        whole = walked.map_err(|error| io_fault("searched", shown, &error))?;
    }
    if text.is_empty() {
        text.push_str("No line matches.\n");
    }
    if !whole {
        text.push_str("[The search ended here. Search a folder, or for something rarer.]\n");
    }
    if skipped > 0 {
        let _ = writeln!(text, "[{skipped} files are too large or no text, and were not searched.]");
    }
    Ok(ToolOutput::text(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::files::tests::context;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    async fn run(tool: &dyn Tool, root: &Path, arguments: Value) -> Result<String, String> {
        let output = tool.call(&context(root, true), arguments).await;
        output.map(|output| output.content).map_err(|error| error.text)
    }

    #[tokio::test]
    async fn files_are_listed_in_order_and_links_are_not_followed() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("b/deep")).unwrap();
        fs::write(root.path().join("b/deep/x"), "12345").unwrap();
        fs::write(root.path().join("a"), "").unwrap();
        std::os::unix::fs::symlink("/", root.path().join("c")).unwrap();
        let all = run(&ListFiles, root.path(), json!({})).await.unwrap();
        assert_eq!(all, "a (0 bytes)\nb/\nb/deep/\nb/deep/x (5 bytes)\nc (link)\n");
        assert_eq!(
            run(&ListFiles, root.path(), json!({"path": "b/deep/"})).await.unwrap(),
            "b/deep/x (5 bytes)\n"
        );
        for out in ["..", "/", "/etc", "b/../..", "c"] {
            assert!(run(&ListFiles, root.path(), json!({"path": out})).await.is_err(), "{out}");
        }
    }

    #[tokio::test]
    async fn a_part_is_replaced_if_it_is_there_once() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("a"), "one two\ntwo three\n").unwrap();
        let edit = async |old: &str, new: &str| {
            run(&EditFile, root.path(), json!({"path": "a", "old": old, "new": new})).await
        };
        assert!(edit("two", "2").await.unwrap_err().contains("more than once"));
        assert!(edit("four", "4").await.unwrap_err().contains("does not have"));
        assert!(edit("one two\n", "1\n").await.unwrap().contains("Wrote 12 bytes"));
        let file = root.path().join("a");
        assert_eq!(fs::read_to_string(&file).unwrap(), "1\ntwo three\n");
        fs::write(&file, "ééé\n").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o750)).unwrap();
        assert!(edit("éé", "e").await.unwrap_err().contains("more than once"), "also where they overlap");
        assert!(edit("ééé", "e").await.is_ok());
        let mode = fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o100, 0o100, "a program stays one: {mode:o}");
    }

    #[tokio::test]
    async fn lines_are_found_with_their_numbers() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("src")).unwrap();
        fs::write(root.path().join("src/a.rs"), "fn a() {}\n\nfn main() {}\n").unwrap();
        fs::write(root.path().join("binary"), b"fn main\0").unwrap();
        fs::write(root.path().join("many"), "x\n".repeat(1000)).unwrap();
        let search = async |pattern: &str| run(&SearchFiles, root.path(), json!({"pattern": pattern})).await;
        let found = search("fn ma.n").await.unwrap();
        assert!(
            found.starts_with("src/a.rs:3: fn main() {}\n") && found.contains("1 files are too large"),
            "{found}"
        );
        assert!(search("^x$").await.unwrap().contains("The search ended here"));
        assert!(search("nothing like it").await.unwrap().contains("No line matches"));
        assert!(search("(").await.unwrap_err().contains("cannot be used"));
        assert!(search(&"(a{1000}){1000}".repeat(3)).await.is_err(), "a pattern has a size");
    }
}
