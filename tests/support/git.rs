//! Git, as a person would use it in a folder: to make repositories, and to see what is in one.

use std::path::Path;
use std::process::{Command, Stdio};

/// Runs git with a name, a time and no configuration of this machine, and returns what it printed.
pub fn git(folder: &Path, arguments: &[&str]) -> String {
    said(&mut command(folder, arguments), arguments)
}

fn said(command: &mut Command, arguments: &[&str]) -> String {
    let output = command.output().expect("git is installed");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "git {arguments:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("git");
    command.current_dir(folder).args(arguments).stdin(Stdio::null());
    for (name, value) in [
        ("GIT_CONFIG_NOSYSTEM", "1"),
        ("GIT_CONFIG_GLOBAL", "/dev/null"),
        ("GIT_AUTHOR_NAME", "Ann"),
        ("GIT_AUTHOR_EMAIL", "ann@example.com"),
        ("GIT_AUTHOR_DATE", "2026-01-01T00:00:00Z"),
        ("GIT_COMMITTER_NAME", "Ann"),
        ("GIT_COMMITTER_EMAIL", "ann@example.com"),
        ("GIT_COMMITTER_DATE", "2026-01-01T00:00:00Z"),
    ] {
        command.env(name, value);
    }
    command
}

/// Files, index and branches of a repository, whichever host it is on.
pub fn standing(folder: &Path) -> String {
    let of = |arguments: &[&str]| git(folder, arguments);
    [
        of(&["status", "--porcelain=v1", "--branch"]),
        of(&["ls-files", "--stage"]),
        of(&["for-each-ref"]),
        of(&["diff"]),
        of(&["diff", "--cached"]),
    ]
    .join("--\n")
}
