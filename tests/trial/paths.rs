//! Paths that a model could name: none leads out of the workspace.

use super::{Dice, share};
use serde_json::json;
use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use wakeful::tool::{FileUse, Tool, ToolCallContext};
use wakeful_engine::tool::files::{EditFile, ListFiles, ReadFile, SearchFiles, WriteFile};

const SECRET: &str = "what only others may read";

/// What is below `folder`, by path, without following links.
fn below(folder: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let kind = std::fs::symlink_metadata(&path).unwrap().file_type();
        if kind.is_dir() {
            found.extend(below(&path));
        }
        found.insert(path.clone(), kind.is_file().then(|| std::fs::read(&path).unwrap()));
    }
    found
}

fn path(dice: &mut Dice, outside: &str) -> String {
    const PARTS: [&str; 45] = [
        "..",
        "..",
        ".",
        "",
        "a",
        "deep",
        "out",
        "file",
        "up",
        "loop",
        "chain",
        "root",
        "here",
        "secret.txt",
        "...",
        " ",
        "~",
        "%2e%2e",
        "\\..\\",
        "..\\",
        "..;",
        "\u{2025}",
        "\u{ff0e}\u{ff0e}",
        "\0",
        "a\0b",
        "\n",
        "proc",
        "self",
        "cwd",
        "fd",
        "etc",
        "passwd",
        "con",
        "-rf",
        ".git",
        ".GIT",
        "git~1",
        ".gi\u{200c}t",
        "hooks/post-checkout",
        "zero",
        "pipe",
        "a\u{308}",
        "\u{e4}",
        "A",
        "long-name-long-name-long-name-long-name-long-name-long-name-long-name-long-name-long-name-long-name-long-name-long-name-\
         long-name-long-name-long-name-long-name-long-name-long-name-long-name-long-name-long-name-long-name-long-name-long-name",
    ];
    let mut path = match dice.below(8) {
        0 => "/".to_owned(),
        1 => format!("{outside}/"),
        2 => "file://".to_owned(),
        _ => String::new(),
    };
    for _ in 0..=dice.below(7) {
        path.push_str(dice.of(&PARTS));
        path.push_str(dice.of(&["/", "/", "/", "//", "/./", "\\", ""]));
    }
    if dice.below(4) == 0 {
        path.push_str("secret.txt");
    }
    if dice.below(50) == 0 {
        path = path.repeat(200);
    }
    path
}

#[tokio::test]
async fn no_path_leads_out_of_the_workspace() {
    let root = tempfile::tempdir().unwrap();
    let (outside, workspace) = (root.path().join("outside"), root.path().join("workspaces/sess_1"));
    std::fs::create_dir_all(outside.join("deep")).unwrap();
    std::fs::create_dir_all(workspace.join("deep")).unwrap();
    for secret in
        [outside.join("secret.txt"), outside.join("deep/secret.txt"), root.path().join("secret.txt")]
    {
        std::fs::write(secret, SECRET).unwrap();
    }
    // A tool of the program's own may have made links.
    for (to, from) in [
        (outside.as_path(), "out"),
        (&outside.join("secret.txt"), "file"),
        (Path::new(".."), "up"),
        (Path::new("loop"), "loop"),
        (Path::new("up/../outside"), "chain"),
        (Path::new("/"), "root"),
        (Path::new("."), "here"),
        (Path::new("../../../outside"), "deep/out"),
        (Path::new("/dev/zero"), "zero"),
    ] {
        symlink(to, workspace.join(from)).unwrap();
    }
    // A pipe without a writer.
    let pipe = std::process::Command::new("mkfifo").arg(workspace.join("pipe")).status();
    assert!(pipe.unwrap().success());
    let before = below(&outside);
    let mut call = ToolCallContext::detached("call_1");
    (call.workspace.path, call.workspace.expected) = (workspace.clone(), true);
    let (all, mut read, mut wrote) = (share(100_000), 0, 0);
    let tools: [&dyn Tool; 8] =
        [&ReadFile, &WriteFile, &ReadFile, &EditFile, &ReadFile, &ListFiles, &ReadFile, &SearchFiles];
    for seed in 0..all {
        let mut dice = Dice::new(seed);
        let path = path(&mut dice, &outside.display().to_string());
        let tool = tools[seed % tools.len()];
        let arguments = match tool.definition().name.as_str() {
            "write_file" => json!({"path": path, "content": "mine"}),
            "edit_file" => json!({"path": path, "old": "mine", "new": "mine"}),
            "search_files" => json!({"path": path, "pattern": "."}),
            _ => json!({"path": path}),
        };
        let got = tool.call(&call, arguments).await;
        match tool.file_use() {
            FileUse::Writes => wrote += usize::from(got.is_ok()),
            _ => read += usize::from(got.is_ok()),
        }
        let text = got.map_or_else(|error| error.to_string(), |output| output.content);
        assert!(!text.contains(SECRET), "seed {seed}: {path:?}");
    }
    assert_eq!(below(&outside), before, "nothing outside was changed");
    let beside: Vec<PathBuf> =
        below(root.path()).into_keys().filter(|path| !path.starts_with(&outside)).collect();
    let stray: Vec<&PathBuf> = beside
        .iter()
        .filter(|path| {
            !path.starts_with(&workspace) && !workspace.starts_with(path) && !path.ends_with("secret.txt")
        })
        .collect();
    assert!(stray.is_empty(), "{stray:?}");
    // If none worked, the paths were too crude.
    assert!(wrote > 0, "{read} read, {wrote} written");
}

#[tokio::test]
async fn no_link_that_is_swapped_while_a_tool_runs_leads_out_of_the_workspace() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let root = tempfile::tempdir().unwrap();
    let (outside, workspace) = (root.path().join("outside"), root.path().join("workspaces/sess_1"));
    std::fs::create_dir_all(&outside).unwrap();
    std::fs::create_dir_all(workspace.join("deep")).unwrap();
    std::fs::write(outside.join("secret.txt"), SECRET).unwrap();
    std::fs::write(workspace.join("deep/secret.txt"), "mine").unwrap();
    std::fs::write(workspace.join("file"), "mine").unwrap();
    let before = below(&outside);
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    let (stopped, folder, away) = (std::sync::Arc::clone(&stop), workspace.clone(), outside.clone());
    let swapping = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            for (name, target) in [("deep", away.clone()), ("file", away.join("secret.txt"))] {
                let (path, aside) = (folder.join(name), folder.join("aside"));
                std::fs::rename(&path, &aside).unwrap();
                if symlink(&target, &path).is_ok() {
                    let _ = std::fs::remove_file(&path);
                }
                // A tool may make a new file or folder there meanwhile.
                while std::fs::rename(&aside, &path).is_err() {
                    let _ = std::fs::remove_dir_all(&path);
                    let _ = std::fs::remove_file(&path);
                }
            }
        }
    });
    let mut call = ToolCallContext::detached("call_1");
    (call.workspace.path, call.workspace.expected) = (workspace.clone(), true);
    let mut worked = 0;
    for number in 0..share(50_000) {
        let path = if number % 2 == 0 { "deep/secret.txt" } else { "file" };
        let got = match number % 5 {
            0 | 1 => ReadFile.call(&call, json!({"path": path})).await,
            2 => WriteFile.call(&call, json!({"path": path, "content": "mine"})).await,
            3 => EditFile.call(&call, json!({"path": path, "old": "mine", "new": "mine"})).await,
            _ => SearchFiles.call(&call, json!({"pattern": "."})).await,
        };
        worked += usize::from(got.is_ok());
        let text = got.map_or_else(|error| error.to_string(), |output| output.content);
        assert!(!text.contains(SECRET), "{number}: {text}");
    }
    stop.store(true, Ordering::Relaxed);
    swapping.join().unwrap();
    assert_eq!(below(&outside), before, "nothing outside was changed");
    assert!(worked > 0, "the swapping was too quick");
}
