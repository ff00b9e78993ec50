//! Git, as a person would use it in a folder: to make repositories, and to see what is in one.

use super::git_identity::ENVIRONMENT;
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
    command.current_dir(folder).args(arguments).stdin(Stdio::null()).envs(ENVIRONMENT);
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
