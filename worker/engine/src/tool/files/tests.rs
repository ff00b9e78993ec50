use super::*;
use crate::tool::{NoOutputs, ToolErrorKind};
use std::fs;
use std::os::unix::fs::symlink;
use std::sync::Arc;
use tempfile::TempDir;
use wakeful_workflow::id::SessionId;
use wakeful_workflow::policy::ToolMode;

/// Builds the context of a call in the workspace `path`.
pub(crate) fn context(path: &Path, expected: bool) -> ToolCallContext {
    ToolCallContext {
        session_id: SessionId::from("sess_1"),
        call_id: CallId::from("call_1_0"),
        workspace: Workspace {
            path: path.to_owned(),
            expected,
            inherited: None,
            rehearsed: None,
            _held: None,
        },
        mode: ToolMode::Live,
        policy: Arc::default(),
        recipients: vec!["*".to_owned()],
        web: crate::web::Web::default(),
        cancelled: CancellationToken::new(),
        outputs: Arc::new(NoOutputs),
    }
}

/// Creates a workspace `ws` and, next to it, `secret.txt`, which no call may reach.
fn place() -> (TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let workspace = root.path().join("ws");
    fs::create_dir(&workspace).unwrap();
    fs::write(root.path().join("secret.txt"), "secret").unwrap();
    (root, workspace)
}

async fn read_in(workspace: &Path, path: &str) -> Result<String, String> {
    let output = ReadFile.call(&context(workspace, true), json!({"path": path})).await;
    output.map(|output| output.content).map_err(|error| error.to_string())
}

async fn write_in(workspace: &Path, path: &str, content: &str) -> Result<ToolOutput, String> {
    let arguments = json!({"path": path, "content": content});
    WriteFile.call(&context(workspace, true), arguments).await.map_err(|error| error.to_string())
}

fn entries(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[tokio::test]
async fn what_was_written_is_read_back() {
    let (_root, ws) = place();
    let output = write_in(&ws, "notes/deep/today.md", "Grüße\n").await.unwrap();
    assert_eq!(output.content, "Wrote 8 bytes to \"notes/deep/today.md\".");
    assert_eq!(
        output.details,
        Some(json!({
            "type": "fileWritten", "path": "notes/deep/today.md", "bytes": 8,
            "sha256": hex::encode(Sha256::digest("Grüße\n")),
        }))
    );
    assert_eq!(read_in(&ws, "notes/deep/today.md").await.unwrap(), "Grüße\n");
    assert_eq!(read_in(&ws, "./notes//deep/./today.md").await.unwrap(), "Grüße\n");
}

#[tokio::test]
async fn writing_again_is_harmless_and_leaves_no_other_file() {
    let (_root, ws) = place();
    let first = write_in(&ws, "a.txt", "one").await.unwrap();
    assert_eq!(write_in(&ws, "a.txt", "one").await.unwrap(), first);
    write_in(&ws, "a.txt", "two").await.unwrap();
    assert_eq!(fs::read_to_string(ws.join("a.txt")).unwrap(), "two");
    assert_eq!(entries(&ws), ["a.txt"]);
}

#[tokio::test]
async fn the_leftover_of_an_attempt_that_died_is_removed_by_the_next() {
    let (_root, ws) = place();
    let key = hex::encode(&Sha256::digest("call_1_0")[..8]);
    fs::write(ws.join(format!(".{key}.0.part")), "hal").unwrap();
    fs::write(ws.join(format!(".{key}.1.part")), "").unwrap();
    write_in(&ws, "a.txt", "whole").await.unwrap();
    assert_eq!(entries(&ws), ["a.txt"]);
    assert_eq!(fs::read_to_string(ws.join("a.txt")).unwrap(), "whole");
}

#[tokio::test]
async fn a_cancelled_call_replaces_nothing() {
    let (_root, ws) = place();
    fs::write(ws.join("a.txt"), "old").unwrap();
    let call = context(&ws, true);
    call.cancelled.cancel();
    let result = WriteFile.call(&call, json!({"path": "a.txt", "content": "new"})).await;
    assert!(result.unwrap_err().to_string().contains("cancelled"));
    assert_eq!(fs::read_to_string(ws.join("a.txt")).unwrap(), "old");
    assert_eq!(entries(&ws), ["a.txt"]);
}

#[test]
fn a_call_that_was_dropped_replaces_nothing() {
    let (_root, ws) = place();
    fs::write(ws.join("a.txt"), "old").unwrap();
    // The only thread for blocking work is busy, so the call's own work starts after the call was dropped.
    let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
    runtime.block_on(async {
        let (release, released) = std::sync::mpsc::channel::<()>();
        let busy = tokio::task::spawn_blocking(move || released.recv());
        let call = context(&ws, true);
        let mut dropped = WriteFile.call(&call, json!({"path": "a.txt", "content": "new"}));
        assert!(futures::poll!(&mut dropped).is_pending());
        drop(dropped);
        release.send(()).unwrap();
        busy.await.unwrap().unwrap();
        tokio::task::spawn_blocking(|| ()).await.unwrap();
    });
    assert_eq!(fs::read_to_string(ws.join("a.txt")).unwrap(), "old");
    assert_eq!(entries(&ws), ["a.txt"]);
}

#[tokio::test]
async fn hostile_paths_are_refused_by_both_tools() {
    let (root, ws) = place();
    let absolute = root.path().join("secret.txt");
    let absolute = absolute.to_str().unwrap();
    let inside = ws.join("in.txt");
    for (path, why) in [
        ("../secret.txt", "\"..\""),
        ("a/../../secret.txt", "\"..\""),
        ("a/../b.txt", "\"..\""),
        ("..", "\"..\""),
        (absolute, "absolute"),
        (inside.to_str().unwrap(), "absolute"),
        ("/", "folder"),
        ("", "empty"),
        ("  ", "empty"),
        (".", "names no file"),
        ("./.", "names no file"),
        ("a/", "folder"),
        ("a\0b", "NUL"),
        ("a\nb", "control"),
    ] {
        let error = read_in(&ws, path).await.unwrap_err();
        assert!(error.contains(why), "read {path:?}: {error}");
        let error = write_in(&ws, path, "x").await.unwrap_err();
        assert!(error.contains(why), "write {path:?}: {error}");
    }
    let long = "a/".repeat(5000) + "b";
    let error = write_in(&ws, &long, "x").await.unwrap_err();
    assert!(error.contains("too long") && error.len() < 400, "{error}");
    assert!(write_in(&ws, &"n".repeat(300), "x").await.unwrap_err().contains("could not be written"));
    assert_eq!(fs::read_to_string(absolute).unwrap(), "secret");
    assert!(entries(&ws).is_empty());
}

#[tokio::test]
async fn a_link_that_leads_out_is_refused() {
    let (root, ws) = place();
    symlink(root.path().join("secret.txt"), ws.join("absolute.txt")).unwrap();
    symlink("../secret.txt", ws.join("relative.txt")).unwrap();
    symlink("..", ws.join("up")).unwrap();
    symlink(root.path(), ws.join("out")).unwrap();
    symlink("loop", ws.join("loop")).unwrap();
    for path in ["absolute.txt", "relative.txt", "up/secret.txt", "out/secret.txt"] {
        let error = read_in(&ws, path).await.unwrap_err();
        assert!(error.contains("leads out of the workspace"), "read {path}: {error}");
    }
    for path in ["up/secret.txt", "up/new.txt", "out/secret.txt", "out/new.txt", "up/new/new.txt"] {
        let error = write_in(&ws, path, "x").await.unwrap_err();
        assert!(error.contains("leads out of the workspace"), "write {path}: {error}");
    }
    for path in ["absolute.txt", "relative.txt", "loop"] {
        let error = write_in(&ws, path, "x").await.unwrap_err();
        assert!(error.contains("symbolic link"), "write {path}: {error}");
    }
    assert!(read_in(&ws, "loop").await.is_err());
    assert_eq!(fs::read_to_string(root.path().join("secret.txt")).unwrap(), "secret");
    assert_eq!(entries(root.path()), ["secret.txt", "ws"]);
}

#[tokio::test]
async fn a_link_that_stays_inside_can_be_read() {
    let (_root, ws) = place();
    fs::write(ws.join("real.txt"), "real").unwrap();
    symlink("real.txt", ws.join("link.txt")).unwrap();
    assert_eq!(read_in(&ws, "link.txt").await.unwrap(), "real");
}

#[tokio::test]
async fn a_parent_swapped_for_a_link_leads_nowhere() {
    let (root, ws) = place();
    let outside = root.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("a.txt"), "outside").unwrap();
    write_in(&ws, "sub/a.txt", "inside").await.unwrap();
    fs::rename(ws.join("sub"), ws.join("moved")).unwrap();
    symlink(&outside, ws.join("sub")).unwrap();
    assert!(read_in(&ws, "sub/a.txt").await.unwrap_err().contains("leads out"));
    assert!(write_in(&ws, "sub/a.txt", "x").await.unwrap_err().contains("leads out"));
    assert_eq!(fs::read_to_string(outside.join("a.txt")).unwrap(), "outside");
    assert_eq!(entries(&outside), ["a.txt"]);
}

#[test]
fn a_parent_swapped_while_a_call_runs_leads_nowhere() {
    let (root, ws) = place();
    let outside = root.path().join("outside");
    fs::create_dir(&outside).unwrap();
    let workspace =
        Workspace { path: ws.clone(), expected: true, inherited: None, rehearsed: None, _held: None };
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // A step fails if the call has just created the folder; the next round continues from there.
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                let _ = fs::remove_dir_all(ws.join("sub"));
                let _ = symlink(&outside, ws.join("sub"));
                let _ = fs::remove_file(ws.join("sub"));
                let _ = fs::create_dir(ws.join("sub"));
            }
        });
        for n in 0..200 {
            let call_id = CallId::from(format!("call_{n}"));
            // Either answer is right; this test only checks where the file lands.
            let _ = write(&workspace, &call_id, "sub/a.txt", b"x", &CancellationToken::new());
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(entries(&outside).is_empty());
}

#[tokio::test]
async fn what_is_no_plain_file_is_refused() {
    let (_root, ws) = place();
    fs::create_dir(ws.join("folder")).unwrap();
    assert!(read_in(&ws, "folder").await.unwrap_err().contains("is a folder"));
    assert!(write_in(&ws, "folder", "x").await.unwrap_err().contains("is a folder"));
    fs::write(ws.join("file"), "x").unwrap();
    assert!(write_in(&ws, "file/below", "x").await.is_err());
    let socket = std::os::unix::net::UnixListener::bind(ws.join("socket")).unwrap();
    assert!(read_in(&ws, "socket").await.unwrap_err().contains("neither a file"));
    drop(socket);
}

#[tokio::test]
async fn a_missing_file_is_named() {
    let (_root, ws) = place();
    assert_eq!(read_in(&ws, "a/b.txt").await.unwrap_err(), "There is no file \"a/b.txt\" in the workspace.");
}

#[tokio::test]
async fn a_large_file_is_truncated_and_says_so() {
    let (_root, ws) = place();
    // The limit cuts a character in two.
    let text = "x".to_owned() + &"é".repeat(MAX_READ_BYTES);
    fs::write(ws.join("large.txt"), &text).unwrap();
    let read = read_in(&ws, "large.txt").await.unwrap();
    let shown = MAX_READ_BYTES - 1;
    assert!(read.starts_with(&text[..shown]));
    assert_eq!(
        &read[shown..],
        format!("\n[Truncated: these are the first {shown} of {} bytes.]", text.len()),
    );
    fs::write(ws.join("exact.txt"), "y".repeat(MAX_READ_BYTES)).unwrap();
    assert_eq!(read_in(&ws, "exact.txt").await.unwrap().len(), MAX_READ_BYTES);
}

#[tokio::test]
async fn what_is_no_text_is_refused() {
    let (_root, ws) = place();
    fs::write(ws.join("bytes"), b"ab\xff\xfecd").unwrap();
    let error = read_in(&ws, "bytes").await.unwrap_err();
    assert!(error.contains("not UTF-8 text: byte 2"), "{error}");
    fs::write(ws.join("cut"), &"é".as_bytes()[..1]).unwrap();
    assert!(read_in(&ws, "cut").await.unwrap_err().contains("not UTF-8"));
}

#[tokio::test]
async fn a_nul_in_a_file_is_replaced() {
    let (_root, ws) = place();
    fs::write(ws.join("nul"), "a\0b").unwrap();
    assert_eq!(read_in(&ws, "nul").await.unwrap(), "a\u{fffd}b");
}

#[tokio::test]
async fn oversize_content_is_refused_and_nothing_is_written() {
    let (_root, ws) = place();
    let error = write_in(&ws, "big", &"x".repeat(MAX_WRITE_BYTES + 1)).await.unwrap_err();
    assert!(error.contains("at most 1048576"), "{error}");
    assert!(entries(&ws).is_empty());
    assert!(write_in(&ws, "big", &"x".repeat(MAX_WRITE_BYTES)).await.is_ok());
}

#[tokio::test]
async fn an_expected_workspace_that_is_missing_is_an_error_and_is_not_created() {
    let (root, _) = place();
    let gone = root.path().join("gone");
    for error in [read_in(&gone, "a").await.unwrap_err(), write_in(&gone, "a", "x").await.unwrap_err()] {
        assert!(error.contains("not on this host"), "{error}");
        assert!(!error.contains(root.path().to_str().unwrap()), "{error}");
    }
    assert!(!gone.exists());
}

#[tokio::test]
async fn the_first_write_creates_the_workspace_and_a_read_does_not() {
    let (root, _) = place();
    let new = root.path().join("spaces/new");
    let call = context(&new, false);
    let error = ReadFile.call(&call, json!({"path": "a"})).await.unwrap_err().to_string();
    assert!(error.contains("There is no file"), "{error}");
    assert!(!new.exists());
    WriteFile.call(&call, json!({"path": "a", "content": "x"})).await.unwrap();
    assert_eq!(fs::read_to_string(new.join("a")).unwrap(), "x");
}

#[tokio::test]
async fn arguments_of_another_shape_are_an_error_and_no_panic() {
    let (_root, ws) = place();
    for arguments in [json!(null), json!({}), json!({"path": 1}), json!({"path": "a", "mode": 7}), json!([])]
    {
        assert!(ReadFile.call(&context(&ws, true), arguments.clone()).await.is_err());
        assert!(WriteFile.call(&context(&ws, true), arguments).await.is_err());
    }
}

#[test]
fn what_is_wrong_with_the_host_is_told_to_operators_without_the_files_name() {
    let full = io::Error::from_raw_os_error(libc::ENOSPC);
    for told in [io_fault("written", "diagnosis.md", &full), workspace_fault(&full)] {
        assert_eq!(told.kind, ToolErrorKind::Host);
        assert!(told.text.contains("No space left") && !told.text.contains("diagnosis"), "{told}");
    }
    let too_long = io::Error::from_raw_os_error(libc::ENAMETOOLONG);
    assert_eq!(io_fault("written", "a.md", &too_long).kind, ToolErrorKind::Failed);
}

mod rehearsed {
    use super::*;
    use std::sync::Arc;

    fn file(path: &str, content: Option<&str>) -> WrittenFile {
        WrittenFile { path: path.to_owned(), content: content.map(str::to_owned) }
    }

    fn dry(workspace: &Path, files: Vec<WrittenFile>) -> ToolCallContext {
        let mut call = context(workspace, true);
        call.mode = ToolMode::Dry;
        call.workspace.rehearsed = Some(Arc::from(files));
        call
    }

    async fn read(files: Vec<WrittenFile>, path: &str) -> Result<String, String> {
        let (_root, ws) = place();
        fs::write(ws.join("on_disk.txt"), "live").unwrap();
        let read = ReadFile.dry_run(&dry(&ws, files), json!({"path": path})).await;
        read.map(|output| output.content).map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn a_write_says_what_it_would_have_said_and_writes_nothing() {
        let (_root, ws) = place();
        let arguments = json!({"path": "notes/today.md", "content": "Grüße\n"});
        let said = WriteFile.dry_run(&dry(&ws, Vec::new()), arguments).await.unwrap();
        assert_eq!(entries(&ws), Vec::<String>::new());
        assert_eq!(said, write_in(&ws, "notes/today.md", "Grüße\n").await.unwrap());
        let (_root, ws) = place();
        for arguments in [
            json!({"path": "../secret.txt", "content": "x"}),
            json!({"path": "big", "content": "x".repeat(MAX_WRITE_BYTES + 1)}),
        ] {
            let dry = WriteFile.dry_run(&dry(&ws, Vec::new()), arguments.clone()).await.unwrap_err();
            assert_eq!(dry, WriteFile.call(&context(&ws, true), arguments).await.unwrap_err());
        }
    }

    #[tokio::test]
    async fn a_read_sees_what_the_messages_hold_and_nothing_of_the_disk() {
        let files = || vec![file("a/b.md", Some("one")), file("./a//b.md", Some("two")), file("lost", None)];
        assert_eq!(read(files(), "a/b.md").await.unwrap(), "two", "two spellings of one path are one file");
        assert!(read(files(), "on_disk.txt").await.unwrap_err().contains("no file"));
        assert!(read(files(), "lost").await.unwrap_err().contains("the messages do not hold"));
        assert!(read(files(), "../secret.txt").await.unwrap_err().contains("\"..\""));
        let (_root, ws) = place();
        let long = "ü".repeat(MAX_READ_BYTES);
        write_in(&ws, "long", &long).await.unwrap();
        assert_eq!(read(vec![file("long", Some(&long))], "long").await, read_in(&ws, "long").await);
    }
}
