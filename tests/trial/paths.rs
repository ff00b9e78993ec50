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
    const PARTS: [&str; 34] = [
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
    ] {
        symlink(to, workspace.join(from)).unwrap();
    }
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
