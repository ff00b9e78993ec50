//! `wakeful mcp`: the tools of MCP servers. Works on files and on the servers, and needs no database.

use super::output::{Cell, Column, Output, OutputArgs, Table, Tone, count, printable, until_reader_goes};
use super::{Exit, Usage};
use anyhow::Context as _;
use serde_json::{Value, json};
use std::path::Path;
use wakeful_config::Config;
use wakeful_config::mcp::Mcp;
use wakeful_mcp::pinned::{Change, Pinned, PinnedError, PinnedTool};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    output: OutputArgs,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// List the tools that agents may have, with their effects: those in the files. Asks no server.
    List,
    /// Ask the servers for their tools, write the files, and say what changed. Read them before you deploy: models read the
    /// descriptions, and the effects decide what runs again after a crash.
    Pull {
        /// The servers; without one, all.
        #[arg(value_name = "SERVER")]
        servers: Vec<String>,
        /// Write nothing. Exit status 8 if a server differs from its file.
        #[arg(long)]
        check: bool,
    },
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let output = Output::new(&args.output);
    let ran = match args.verb {
        Verb::List => list(&config, &output),
        Verb::Pull { servers, check } => pull(&config, &servers, check, &output).await,
    };
    until_reader_goes(ran)
}

fn list(config: &Config, output: &Output) -> anyhow::Result<Exit> {
    let agents: Vec<(String, Vec<String>)> = config
        .agent_names()
        .into_iter()
        .filter_map(|name| Some((name.clone(), config.agent(&name).ok()?.tools)))
        .collect();
    let mut rows = Vec::new();
    for server in config.mcp.values() {
        match Pinned::read(&server.definitions, &server.name) {
            Ok(pinned) => rows.extend(pinned.tools.into_iter().map(|tool| (server, tool))),
            Err(error @ PinnedError::Missing { .. }) => eprintln!("wakeful: {error}"),
            Err(error) => return Err(error.into()),
        }
    }
    let of_agents = |tool: &PinnedTool| -> Vec<&str> {
        let has = |tools: &Vec<String>| tools.contains(&tool.name);
        agents.iter().filter(|(_, tools)| has(tools)).map(|(name, _)| name.as_str()).collect()
    };
    let items: Vec<Value> = rows
        .iter()
        .map(|(server, tool)| {
            json!({"server": server.name, "name": tool.name, "calls": tool.calls, "effect": tool.effect,
                "description": tool.description, "agents": of_agents(tool)})
        })
        .collect();
    output.items(&items, || {
        let mut table = Table::new(&[
            Column::fixed("TOOL"),
            Column::fixed("EFFECT"),
            Column::flexible("AGENTS"),
            Column::flexible("DESCRIPTION").extra(),
        ]);
        for (_, tool) in &rows {
            let described = tool.description.lines().next().unwrap_or_default();
            let agents = of_agents(tool).join(", ");
            table.row([
                tool.name.as_str().into(),
                tool.effect.as_str().into(),
                agents.into(),
                described.into(),
            ]);
        }
        table
    })?;
    Ok(Exit::Ok)
}

/// The servers of these names, or all.
fn named<'c>(config: &'c Config, names: &[String]) -> anyhow::Result<Vec<&'c Mcp>> {
    if config.mcp.is_empty() {
        return Err(Usage("no server: wakeful.toml has no section [mcp.NAME]".to_owned()).into());
    }
    if names.is_empty() {
        return Ok(config.mcp.values().collect());
    }
    let one = |name: &String| {
        config.mcp.get(name).ok_or_else(|| {
            let known = config.mcp.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            Usage(format!("there is no [mcp.{name}]; there are: {known}")).into()
        })
    };
    names.iter().map(one).collect()
}

/// A row of what `pull` says.
struct Said {
    server: String,
    tool: String,
    effect: &'static str,
    what: String,
    tone: Tone,
}

async fn pull(config: &Config, names: &[String], check: bool, output: &Output) -> anyhow::Result<Exit> {
    let (mut rows, mut differ, mut failed) = (Vec::new(), false, false);
    for server in named(config, names)? {
        let earlier = match Pinned::read(&server.definitions, &server.name) {
            Ok(pinned) => Some(pinned),
            Err(PinnedError::Missing { .. }) => None,
            Err(error @ PinnedError::Unreadable { .. }) => return Err(error.into()),
        };
        let pulled = match wakeful_mcp::pull(server, earlier.as_ref()).await {
            Ok(pulled) => pulled,
            Err(why) => {
                eprintln!("wakeful: mcp.{}: {}", server.name, printable(&why));
                failed = true;
                continue;
            }
        };
        let changes = earlier.clone().unwrap_or_default().changes(&pulled.pinned);
        differ |= !changes.is_empty();
        rows.extend(changes.iter().map(|change| said(server, change)));
        rows.extend(pulled.unusable.iter().map(|(tool, why)| Said {
            server: server.name.clone(),
            tool: tool.clone(),
            effect: "",
            what: format!("left out: {why}"),
            tone: Tone::Bad,
        }));
        let path = server.definitions.display();
        let tools = count(pulled.pinned.tools.len() as i64, "tool");
        let is_another = earlier.as_ref().is_some_and(|earlier| *earlier != pulled.pinned);
        if !check && changes.is_empty() && is_another {
            // Nothing that a person should read, such as a hint that the file lacks. The next pull compares with it.
            write(&server.definitions, &pulled.pinned.text())
                .with_context(|| format!("cannot write {path}"))?;
        }
        let happened = match (check, changes.is_empty() && earlier.is_some()) {
            (_, true) => "as its file has them".to_owned(),
            (true, false) => format!("not as {path} has them"),
            (false, false) => {
                write(&server.definitions, &pulled.pinned.text())
                    .with_context(|| format!("cannot write {path}"))?;
                format!("written to {path}")
            }
        };
        eprintln!("{} ({}): {tools}, {happened}", server.name, printable(&pulled.pinned.server));
    }
    let items: Vec<Value> = rows
        .iter()
        .map(|row| json!({"server": row.server, "tool": row.tool, "effect": row.effect, "what": row.what}))
        .collect();
    if !rows.is_empty() || !output.for_people() {
        output.items(&items, || {
            let columns = [Column::fixed("TOOL"), Column::fixed("EFFECT"), Column::flexible("WHAT")];
            let mut table = Table::new(&columns).wrapped();
            for row in &rows {
                table.row([
                    row.tool.as_str().into(),
                    row.effect.into(),
                    Cell::new(row.what.as_str(), row.tone),
                ]);
            }
            table
        })?;
    }
    Ok(match (failed, check && differ) {
        (true, _) => Exit::Partial,
        (false, true) => Exit::Divergence,
        (false, false) => Exit::Ok,
    })
}

fn said(server: &Mcp, change: &Change) -> Said {
    let (tool, what, tone) = match change {
        Change::Added(tool) => (tool, "new".to_owned(), Tone::Good),
        Change::Removed(tool) => (tool, "gone".to_owned(), Tone::Bad),
        Change::Changed { before, after } => {
            let parts = [
                (before.description != after.description, "description"),
                (before.parameters != after.parameters, "parameters"),
            ];
            let parts: Vec<&str> =
                parts.iter().filter(|(differs, _)| *differs).map(|(_, part)| *part).collect();
            let other = (!parts.is_empty()).then(|| format!("other {}", parts.join(" and ")));
            let lost = after.has_lost_its_hint(before).then(|| {
                format!("the server no longer says that it is {}; correct the effect", after.effect.as_str())
            });
            let what: Vec<String> = [other, lost].into_iter().flatten().collect();
            (after, what.join("; "), Tone::Busy)
        }
    };
    Said { server: server.name.clone(), tool: tool.name.clone(), effect: tool.effect.as_str(), what, tone }
}

/// Replaces the file as a whole, so that a process that starts meanwhile reads the old one or the new one.
fn write(path: &Path, text: &str) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    std::io::Write::write_all(&mut file, text.as_bytes())?;
    // Others read the file too: a temporary file is only for its owner.
    use std::os::unix::fs::PermissionsExt as _;
    file.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
    file.persist(path).map(drop).map_err(|error| error.error)
}
