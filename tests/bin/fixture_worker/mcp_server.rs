//! An MCP server by standard input and output: `fixture_worker mcp-server FOLDER`. It writes the names of its variables into
//! `FOLDER/variables`. A call of the tool that `FOLDER/dies` names ends it, and one of the tool that `FOLDER/hangs` names hangs:
//! once, after the call was kept and before its answer. While `FOLDER/loads` exists, it reads nothing, as a program that a package
//! runner loads. Each start is a line of `FOLDER/starts`. When its input ends, it writes `FOLDER/closed`, and goes on if there is
//! `FOLDER/stays`.

#[path = "../../support/mcp.rs"]
mod answers;

use serde_json::Value;
use std::io::{BufRead as _, Write as _};
use std::path::Path;

/// Serves until its input ends.
pub fn run(folder: &Path) -> std::io::Result<()> {
    let variables: Vec<String> = std::env::vars().map(|(name, _)| name).collect();
    std::fs::write(folder.join("variables"), variables.join("\n"))?;
    let mut starts = std::fs::OpenOptions::new().create(true).append(true).open(folder.join("starts"))?;
    starts.write_all(b"start\n")?;
    let loads = folder.join("loads");
    super::misbehave::block_until(&super::folder::Changes::of(&loads), || !loads.exists());
    eprintln!("The desk is open.");
    let mut output = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let message: Value = serde_json::from_str(&line?)?;
        let answer = answers::answer(&message, folder);
        let is_to = |what: &str| {
            let is_named = std::fs::read_to_string(folder.join(what)).is_ok_and(|tool| {
                message["method"] == "tools/call" && message["params"]["name"] == tool.trim()
            });
            is_named && std::fs::remove_file(folder.join(what)).is_ok()
        };
        if is_to("dies") {
            eprintln!("The desk is on fire.");
            std::process::exit(1);
        }
        if is_to("hangs") {
            loop {
                std::thread::park();
            }
        }
        if let Some(answer) = answer {
            writeln!(output, "{answer}")?;
            output.flush()?;
        }
    }
    std::fs::write(folder.join("closed"), "")?;
    while folder.join("stays").exists() {
        std::thread::park();
    }
    Ok(())
}
