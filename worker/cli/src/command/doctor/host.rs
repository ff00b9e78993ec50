//! Checks of this host: agents with their models and tools, keys, prices, folders.

use super::super::output::printable;
use super::Report;
use crate::App;
use crate::serve::Role;
use std::path::{Path, PathBuf};
use wakeful_config::{CloneFrom, Config};
use wakeful_engine::workspace::Git;
use wakeful_mcp::pinned::Pinned;

/// `doctor` warns when the workspace's file system has less free space than this.
const LOW_DISK_BYTES: u64 = 1 << 30;

pub(super) fn check(app: &App, config: &Config, roles: &[Role], report: &mut Report) {
    let models = agents(app, config, report);
    prices(config, &models, report);
    if roles.contains(&Role::Api) {
        token(config, report);
        lmtp(config, report);
    }
    if roles.contains(&Role::Worker) {
        keys(config, &models, report);
        workspace(config, report);
        seeds(config, report);
        maildir(config, report);
    }
}

/// Checks each agent's model and tools, and returns the models in use.
fn agents(app: &App, config: &Config, report: &mut Report) -> Vec<String> {
    let tools = match app.registry(config) {
        Ok(tools) => tools,
        Err(error) => {
            // Of a server's file that is missing or broken, the check of the MCP servers says what to do.
            let lacks_a_file =
                config.mcp.values().any(|server| Pinned::read(&server.definitions, &server.name).is_err());
            if !lacks_a_file {
                report.problem(
                    "agents",
                    format!("the tools do not register: {error:#}"),
                    "correct the program's tools",
                );
            }
            return Vec::new();
        }
    };
    let providers = match app.models(config) {
        Ok(models) => models,
        Err(error) => {
            report.problem(
                "agents",
                format!("the model providers cannot be made: {error:#}"),
                "correct [providers]",
            );
            return Vec::new();
        }
    };
    let (mut models, mut sound) = (Vec::new(), Vec::new());
    for name in config.agent_names() {
        let agent = match config.agent(&name) {
            Ok(agent) => agent,
            Err(error) => {
                let remedy = format!("set [agents.{name}] model = \"provider/model\", or a provider's key");
                report.problem("agents", error.to_string(), remedy);
                continue;
            }
        };
        let mut whole = true;
        if let Err(error) = tools.definitions(&agent.tools) {
            whole = false;
            let remedy = format!("correct [agents.{name}] tools, or run the program that has this tool");
            report.problem("agents", format!("agent {name:?}: {error}"), remedy);
        }
        if let Err(fault) = providers.get(&agent.model) {
            whole = false;
            let remedy = match agent.model.starts_with("scripted/") {
                true => format!("correct that file, or [agents.{name}] model"),
                false => format!("correct [agents.{name}] model"),
            };
            report.problem("agents", format!("agent {name:?}, model {}: {fault}", agent.model), remedy);
        }
        if whole {
            sound.push(format!("{name} ({}, {} tools)", agent.model, agent.tools.len()));
        }
        models.push(agent.model);
    }
    if !sound.is_empty() {
        report.ok("agents", sound.join(", "));
    }
    models.sort();
    models.dedup();
    models
}

/// Checks the model keys. A missing key is only a warning: a host that runs the API alone needs none.
fn keys(config: &Config, models: &[String], report: &mut Report) {
    let providers = [
        ("anthropic", &config.providers.anthropic, "ANTHROPIC_API_KEY"),
        ("openai", &config.providers.openai, "OPENAI_API_KEY"),
    ];
    for (name, provider, variable) in providers {
        let users: Vec<&str> =
            models.iter().map(String::as_str).filter(|model| model.split('/').next() == Some(name)).collect();
        if users.is_empty() {
            continue;
        }
        match (&provider.api_key, &provider.base_url) {
            (Some(_), _) => report.ok("model key", format!("{variable} is set")),
            (None, Some(url)) => report.ok("model key", format!("none for {name}; its server is {url}")),
            (None, None) => report.warning(
                "model key",
                format!("{variable} is not set, and {} needs it", users.join(", ")),
                format!("set {variable} or {variable}_FILE where workers run; a host with the API alone needs none"),
            ),
        }
    }
}

fn prices(config: &Config, models: &[String], report: &mut Report) {
    let unpriced: Vec<&str> = models
        .iter()
        .map(String::as_str)
        .filter(|model| !model.starts_with("scripted/") && !config.has_price(model))
        .collect();
    if let Some(first) = unpriced.first() {
        report.warning(
            "prices",
            format!("no price for {}: what it costs counts as nothing", unpriced.join(", ")),
            format!("add [models.\"{first}\"] input_usd and output_usd, in dollars per million tokens"),
        );
    }
}

fn token(config: &Config, report: &mut Report) {
    if config.server.token.is_none() && !config.server.listen.ip().is_loopback() {
        report.problem(
            "token",
            format!(
                "[server] listen = {} is open to other machines and there is no token",
                config.server.listen
            ),
            "set WAKEFUL_TOKEN, or listen on 127.0.0.1",
        );
    }
}

fn lmtp(config: &Config, report: &mut Report) {
    if let Some(listen) = config.email.incoming.lmtp_listen
        && !listen.ip().is_loopback()
        && config.email.incoming.lmtp_peers.is_empty()
    {
        report.warning(
            "lmtp",
            format!("[email] lmtp_listen = {listen} is open to other machines, and LMTP asks for no password: `serve` refuses to"),
            "listen on 127.0.0.1, or set email.lmtp_peers to the addresses of your mail servers",
        );
    }
}

fn workspace(config: &Config, report: &mut Report) {
    let configured = config.workspace.dir.is_some();
    let dir = config.workspace.dir.clone().unwrap_or_else(|| "workspaces".into());
    match writable(&dir) {
        Ok(at) => {
            report.ok("workspace", folder(&dir, &at));
            disk(&at, report);
        }
        // A warning only: workers alone need this folder, and this host may run none.
        Err(error) if !configured => report.warning(
            "workspace",
            format!("{}: {error}", shown(&dir)),
            "set [workspace] dir to a folder that can be written, where workers run",
        ),
        Err(error) => report.problem(
            "workspace",
            format!("{}: {error}", shown(&dir)),
            "make it and let this user write there, or correct [workspace] dir; a host without workers needs none: doctor --roles api",
        ),
    }
}

/// Checks what agents' sessions begin with.
fn seeds(config: &Config, report: &mut Report) {
    let git = Git::find();
    for (name, agent) in &config.agents {
        let Some(from) = &agent.clone_from else { continue };
        let place = match from {
            CloneFrom::Path(path) => shown(path),
            // A query may hold a secret.
            CloneFrom::Url(url) => printable(url.split('?').next().unwrap_or_default()).to_string(),
        };
        if let CloneFrom::Path(path) = from
            && let Err(error) = std::fs::metadata(path)
        {
            report.problem(
                "workspace",
                format!("agent {name} begins with {place}: {error}"),
                "bring it to every host where workers run, or correct clone in its [agents.NAME.workspace]",
            );
        } else if from.needs_git() && git.is_none() {
            report.warning(
                "workspace",
                format!("agent {name} begins with the git bundle {place}, and this host has no git"),
                "install git where workers run; a worker without it leaves new sessions of this agent to others",
            );
        } else if from.needs_git() {
            let git = git.as_ref().map(|git| shown(git.path())).unwrap_or_default();
            report
                .ok("workspace", format!("agent {name} begins with the git bundle {place}, opened by {git}"));
        } else {
            report.ok("workspace", format!("agent {name} begins with a copy of {place}"));
        }
    }
}

fn maildir(config: &Config, report: &mut Report) {
    let Some(dir) = &config.email.maildir else { return };
    match writable(dir) {
        Ok(at) => report.ok("maildir", folder(dir, &at)),
        Err(error) => report.problem(
            "maildir",
            format!("{}: {error}", shown(dir)),
            "make it and let this user write there, or correct [email] maildir",
        ),
    }
}

fn folder(dir: &Path, at: &Path) -> String {
    if std::path::absolute(dir).is_ok_and(|dir| dir == at) {
        shown(dir)
    } else {
        format!("{}, which will be made", shown(dir))
    }
}

fn shown(path: &Path) -> String {
    printable(&path.to_string_lossy()).into_owned()
}

/// Returns `dir`, or the nearest existing folder above it, after writing a temporary file there as proof.
fn writable(dir: &Path) -> std::io::Result<PathBuf> {
    let dir = std::path::absolute(dir)?;
    let mut at = dir.as_path();
    loop {
        match std::fs::metadata(at) {
            Ok(meta) if meta.is_dir() => break,
            Ok(_) => return Err(std::io::ErrorKind::NotADirectory.into()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => match at.parent() {
                Some(parent) => at = parent,
                None => return Err(error),
            },
            Err(error) => return Err(error),
        }
    }
    // The file is deleted at once; where the system allows, it never has a name.
    tempfile::tempfile_in(at)?;
    Ok(at.to_owned())
}

fn disk(at: &Path, report: &mut Report) {
    let Ok(stat) = rustix::fs::statvfs(at) else { return };
    let (free, size) = (stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize);
    let text = format!("{} of {} free", gigabytes(free), gigabytes(size));
    if free < LOW_DISK_BYTES {
        report.warning("disk", text, "make room: a tool that cannot write its file fails");
    } else {
        report.ok("disk", text);
    }
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_not_there_yet_is_tried_where_it_would_be_made() {
        let dir = tempfile::TempDir::new().unwrap();
        assert_eq!(writable(&dir.path().join("a/b")).unwrap(), dir.path());
        assert_eq!(writable(dir.path()).unwrap(), dir.path());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(writable(&file).is_err());
        assert!(writable(&file.join("below")).is_err());
    }
}
