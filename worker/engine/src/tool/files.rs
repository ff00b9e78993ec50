//! `read_file` and `write_file`, and what the tools in `more` share with them: text files of the session, strictly below its
//! workspace.
//!
//! The workspace's own path is trusted; everything below it is not. Each path is first checked as text. Every
//! access then goes through a handle that cannot leave the workspace, so a link that appears between two
//! calls does no harm.

mod at_hand;
mod more;
mod restore;

pub use more::{EditFile, ListFiles, SearchFiles};

use super::{FileUse, Tool, ToolCallContext, ToolError, ToolOutput, Workspace, parse_arguments};
use crate::workspace::is_of_host;
use async_trait::async_trait;
use cap_std::ambient_authority;
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt as _};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Component, Path, PathBuf};
use tokio_util::sync::CancellationToken;
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::files::WrittenFile;
use wakeful_workflow::id::CallId;

/// The permissions of what the tools make: only this process's user may read it, whatever the umask.
const FOLDER_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// Maximum number of bytes that `read_file` returns.
const MAX_READ_BYTES: usize = 256 * 1024;

/// Maximum number of bytes that `write_file` accepts.
const MAX_WRITE_BYTES: usize = 1024 * 1024;

const MAX_PATH_BYTES: usize = 1024;

/// Maximum number of half-written files of one call. Each attempt that died leaves one.
const MAX_PARTS: usize = 100;

/// Reads a text file of the session.
pub struct ReadFile;

/// Writes a text file of the session, completely or not at all. Running the call again has the same result.
pub struct WriteFile;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReadArguments {
    path: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WriteArguments {
    path: String,
    content: String,
}

#[async_trait]
impl Tool for ReadFile {
    fn definition(&self) -> ToolDefinition {
        ToolDefinition::new(
            "read_file",
            "Read a UTF-8 text file of this session's workspace. At most 256 KiB are returned.",
            json!({
                "type": "object",
                "properties": {"path": path_schema()},
                "required": ["path"],
                "additionalProperties": false,
            }),
            Effect::Pure,
        )
    }

    fn file_use(&self) -> FileUse {
        FileUse::Reads
    }

    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let ReadArguments { path } = parse_arguments(arguments)?;
        if let Some(bytes) = at_hand::read(&call.workspace.path, &relative(&path)?) {
            return shown(&path, bytes, None).map(ToolOutput::without_nul).map_err(ToolError::without_nul);
        }
        let workspace = call.workspace.clone();
        blocking(move || read(&workspace, &path)).await
    }

    /// Reads only what the session's messages say was written, never the disk.
    async fn dry_run(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let ReadArguments { path } = parse_arguments(arguments)?;
        let files = call.workspace.rehearsed.clone().unwrap_or_default();
        read_rehearsed(&files, &path).map(ToolOutput::without_nul).map_err(ToolError::without_nul)
    }
}

#[async_trait]
impl Tool for WriteFile {
    fn definition(&self) -> ToolDefinition {
        ToolDefinition::new(
            "write_file",
            "Write a UTF-8 text file in this session's workspace, replacing what was there. Folders \
                          are created as needed. At most 1 MiB.",
            json!({
                "type": "object",
                "properties": {
                    "path": path_schema(),
                    "content": {"type": "string", "description": "The whole content of the file."},
                },
                "required": ["path", "content"],
                "additionalProperties": false,
            }),
            Effect::Idempotent,
        )
    }

    fn file_use(&self) -> FileUse {
        FileUse::Writes
    }

    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let WriteArguments { path, content } = parse_arguments(arguments)?;
        let (workspace, call_id) = (call.workspace.clone(), call.call_id.clone());
        // The thread keeps running when this future is dropped. The guard stops it before its rename, so that
        // an abandoned call does not overwrite a later call's file.
        let stop = call.cancelled.child_token();
        let _guard = stop.clone().drop_guard();
        blocking(move || write(&workspace, &call_id, &path, content.as_bytes(), &stop)).await
    }

    /// Returns what the call would have returned, and writes nothing. Later dry reads find the content in
    /// this call's message.
    async fn dry_run(&self, _: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let WriteArguments { path, content } = parse_arguments(arguments)?;
        check_size(content.as_bytes())?;
        named_file(&path)?;
        Ok(written(&path, content.as_bytes()).without_nul())
    }
}

fn path_schema() -> Value {
    json!({
        "type": "string",
        "minLength": 1,
        "description": "Relative to the workspace, for example \"notes/today.md\". Neither absolute nor with \"..\".",
    })
}

async fn blocking<F>(work: F) -> Result<ToolOutput, ToolError>
where
    F: FnOnce() -> Result<ToolOutput, ToolError> + Send + 'static,
{
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map(ToolOutput::without_nul).map_err(ToolError::without_nul),
        Err(error) => Err(ToolError::new(format!("The file could not be handled: {error}."))),
    }
}

fn read(workspace: &Workspace, path: &str) -> Result<ToolOutput, ToolError> {
    let relative = relative(path)?;
    let Some(dir) = open_workspace(workspace)? else {
        return Err(nothing(path));
    };
    let fault = |error: io::Error| match error.kind() {
        ErrorKind::NotFound => nothing(path),
        _ => io_fault("read", path, &error),
    };
    // Check the file type before opening, so that the refusal can say why, and again afterwards, because the
    // file may have been swapped. Without O_NONBLOCK, opening a named pipe would wait for its other end.
    regular_file(path, dir.metadata(&relative).map_err(fault)?.file_type())?;
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK);
    let file = dir.open_with(&relative, &options).map_err(fault)?;
    let metadata = file.metadata().map_err(fault)?;
    regular_file(path, metadata.file_type())?;
    let mut bytes = Vec::new();
    file.take(MAX_READ_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(fault)?;
    let truncated = bytes.len() > MAX_READ_BYTES;
    bytes.truncate(MAX_READ_BYTES);
    shown(path, bytes, truncated.then_some(metadata.len()))
}

fn read_rehearsed(files: &[WrittenFile], path: &str) -> Result<ToolOutput, ToolError> {
    let asked = relative(path)?;
    // Two spellings of a path are the same file, and the latest write counts.
    let file = files.iter().rev().find(|file| relative(&file.path).is_ok_and(|relative| relative == asked));
    let Some(file) = file else {
        return Err(nothing(path));
    };
    let Some(content) = &file.content else {
        return Err(ToolError::new(format!(
            "{path:?} cannot be read in a dry run: the messages do not hold what was written to it."
        )));
    };
    let mut bytes = content.clone().into_bytes();
    let (size, truncated) = (bytes.len(), bytes.len() > MAX_READ_BYTES);
    bytes.truncate(MAX_READ_BYTES);
    shown(path, bytes, truncated.then_some(size as u64))
}

fn nothing(path: &str) -> ToolError {
    ToolError::new(format!("There is no file {path:?} in the workspace."))
}

/// Returns `bytes` as text. `truncated` is the size of the whole file if `bytes` is only its start.
fn shown(path: &str, bytes: Vec<u8>, truncated: Option<u64>) -> Result<ToolOutput, ToolError> {
    let mut text = text_of(path, bytes, truncated.is_some())?;
    if let Some(size) = truncated {
        let shown = text.len();
        text.push_str(&format!("\n[Truncated: these are the first {shown} of {size} bytes.]"));
    }
    Ok(ToolOutput::text(text))
}

/// Returns `bytes` as text. If a truncated file ends within a character, that character is left out.
fn text_of(path: &str, mut bytes: Vec<u8>, truncated: bool) -> Result<String, ToolError> {
    if let Err(error) = std::str::from_utf8(&bytes) {
        let valid = error.valid_up_to();
        if !truncated || error.error_len().is_some() {
            return Err(ToolError::new(format!(
                "{path:?} is not UTF-8 text: byte {valid} belongs to no character. Only text can be read."
            )));
        }
        bytes.truncate(valid);
    }
    String::from_utf8(bytes).map_err(|error| ToolError::new(format!("{path:?} is not UTF-8 text: {error}.")))
}

fn write(
    workspace: &Workspace,
    call_id: &CallId,
    path: &str,
    content: &[u8],
    stop: &CancellationToken,
) -> Result<ToolOutput, ToolError> {
    check_size(content)?;
    let (name, folder) = named_file(path)?;
    let folder = folder.as_path();
    let fault = |error: io::Error| io_fault("written", path, &error);
    let dir = match open_workspace(workspace)? {
        Some(dir) => dir,
        None => create_workspace(workspace)?,
    };
    let parent = open_folder(&dir, folder).map_err(fault)?;
    match parent.symlink_metadata(&name) {
        Ok(metadata) => regular_file(path, metadata.file_type())?,
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(fault(error)),
    }
    replace(&parent, &name, (call_id, FILE_MODE), content, stop).map_err(fault)?;
    sync_folders(&dir, folder).map_err(fault)?;
    Ok(written(path, content))
}

fn check_size(content: &[u8]) -> Result<(), ToolError> {
    if content.len() <= MAX_WRITE_BYTES {
        return Ok(());
    }
    Err(ToolError::new(format!(
        "The content has {} bytes; at most {MAX_WRITE_BYTES} can be written at once. Split it into several files.",
        content.len()
    )))
}

/// Splits a path into the file's name and its folder, both relative to the workspace.
fn named_file(path: &str) -> Result<(PathBuf, PathBuf), ToolError> {
    let relative = relative(path)?;
    match (relative.file_name(), relative.parent()) {
        (Some(name), Some(folder)) => Ok((name.into(), folder.into())),
        (_, _) => Err(ToolError::new(format!("{path:?} names no file."))),
    }
}

/// Builds the output for a file that was written.
fn written(path: &str, content: &[u8]) -> ToolOutput {
    let sha256 = hex::encode(Sha256::digest(content));
    let bytes = content.len();
    ToolOutput {
        content: format!("Wrote {bytes} bytes to {path:?}."),
        details: Some(json!({"type": "fileWritten", "path": path, "bytes": bytes, "sha256": sha256})),
        question: None,
    }
}

/// Writes a temporary file in the same folder, then renames it. A reader, or a crash at any point, sees the
/// old content or the new.
fn replace(
    parent: &Dir,
    name: &Path,
    (call_id, mode): (&CallId, u32),
    content: &[u8],
    stop: &CancellationToken,
) -> io::Result<()> {
    // The name comes from the call id, so that an attempt after a crash finds and removes the files of the
    // attempt that died.
    let key = hex::encode(&Sha256::digest(call_id.as_str())[..8]);
    let part = |n: usize| format!(".{key}.{n}.part");
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(mode);
    let mut n = 0;
    let mut file = loop {
        match parent.open_with(part(n), &options) {
            Ok(file) => break file,
            Err(error) if error.kind() == ErrorKind::AlreadyExists && n < MAX_PARTS => n += 1,
            Err(error) => return Err(error),
        }
    };
    let written = file.write_all(content).and_then(|()| file.sync_all()).and_then(|()| {
        if stop.is_cancelled() {
            return Err(io::Error::new(ErrorKind::Interrupted, "the call was cancelled"));
        }
        parent.rename(part(n), parent, name)
    });
    if written.is_err() {
        // Best effort: the error to report is the first one.
        let _ = parent.remove_file(part(n));
        return written;
    }
    for earlier in 0..n {
        // Leftovers cost nothing but space; another attempt may have removed them.
        let _ = parent.remove_file(part(earlier));
    }
    Ok(())
}

fn open_folder(dir: &Dir, folder: &Path) -> io::Result<Dir> {
    if folder.as_os_str().is_empty() {
        return dir.try_clone();
    }
    match dir.open_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            dir.create_dir_all(folder)?;
            dir.open_dir(folder)
        }
        opened => opened,
    }
}

/// Makes the rename and the folders durable: from the file's folder up to the workspace.
fn sync_folders(dir: &Dir, folder: &Path) -> io::Result<()> {
    for ancestor in folder.ancestors() {
        let here = if ancestor.as_os_str().is_empty() { Path::new(".") } else { ancestor };
        dir.open(here)?.sync_all()?;
    }
    Ok(())
}

/// Opens the workspace, or returns `None` if the session has not written any file yet.
fn open_workspace(workspace: &Workspace) -> Result<Option<Dir>, ToolError> {
    match Dir::open_ambient_dir(&workspace.path, ambient_authority()) {
        Ok(dir) => Ok(Some(dir)),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            if let Some(files) = &workspace.inherited {
                restore::restore(&workspace.path, files)?;
                let made = Dir::open_ambient_dir(&workspace.path, ambient_authority());
                return made.map(Some).map_err(|error| workspace_fault(&error));
            }
            if workspace.expected {
                return Err(ToolError::new(
                    "This session's files are not on this host: they were written on another one, or their folder \
                     was removed. Nothing was read or written. Tell the user that the files cannot be reached from \
                     here.",
                ));
            }
            Ok(None)
        }
        Err(error) => Err(workspace_fault(&error)),
    }
}

fn create_workspace(workspace: &Workspace) -> Result<Dir, ToolError> {
    make_private(&workspace.path)
        .and_then(|()| Dir::open_ambient_dir(&workspace.path, ambient_authority()))
        .map_err(|error| workspace_fault(&error))
}

/// Makes a folder and its parents, for this process's user only.
fn make_private(folder: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder)
}

/// Leaves out the workspace's path: the model has no use for a path of the host.
fn workspace_fault(error: &io::Error) -> ToolError {
    let text = format!("The workspace could not be opened: {error}.");
    if is_of_host(error) { ToolError::of_host(text) } else { ToolError::new(text) }
}

/// Checks `path` and returns it as a relative path of plain names.
fn relative(path: &str) -> Result<PathBuf, ToolError> {
    let refuse = |why: &str| {
        let shown: String = path.chars().take(120).collect();
        Err(ToolError::new(format!(
            "The path {shown:?} {why}. Give a path relative to the workspace, for example \"notes/today.md\"."
        )))
    };
    if path.trim().is_empty() {
        return refuse("is empty");
    }
    if path.len() > MAX_PATH_BYTES {
        return refuse("is too long");
    }
    if path.chars().any(char::is_control) {
        return refuse("has a NUL or another control character");
    }
    if path.ends_with('/') {
        return refuse("names a folder");
    }
    let mut relative = PathBuf::new();
    for component in Path::new(path).components() {
        match component {
            Component::Normal(name) => relative.push(name),
            Component::CurDir => {}
            Component::ParentDir => return refuse("has \"..\" in it"),
            Component::RootDir | Component::Prefix(_) => return refuse("is absolute"),
        }
    }
    if relative.as_os_str().is_empty() {
        return refuse("names no file");
    }
    Ok(relative)
}

fn regular_file(path: &str, kind: cap_std::fs::FileType) -> Result<(), ToolError> {
    if kind.is_file() {
        return Ok(());
    }
    let what = if kind.is_dir() {
        "a folder"
    } else if kind.is_symlink() {
        "a symbolic link"
    } else {
        "neither a file nor a folder"
    };
    Err(ToolError::new(format!("{path:?} is {what}; only plain files can be read and written.")))
}

fn io_fault(verb: &str, path: &str, error: &io::Error) -> ToolError {
    // cap-std reports an escape as `PermissionDenied` without an error code of the system.
    if error.kind() == ErrorKind::PermissionDenied && error.raw_os_error().is_none() {
        return ToolError::new(format!(
            "{path:?} leads out of the workspace. Only files inside it can be {verb}."
        ));
    }
    // The path is not named: operators read this text, and it may be private.
    if is_of_host(error) {
        return ToolError::of_host(format!("a file could not be {verb}: {error}. See its [workspace] dir"));
    }
    ToolError::new(format!("{path:?} could not be {verb}: {error}."))
}

#[cfg(test)]
pub(crate) mod tests;
