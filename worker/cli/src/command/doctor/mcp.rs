//! Whether the MCP servers answer, and offer what their files say.

use super::Report;
use std::time::Duration;
use wakeful_config::Config;
use wakeful_mcp::pinned::{Pinned, PinnedError};

/// How long one server may take. `doctor` ends within ten seconds.
const LIMIT: Duration = Duration::from_secs(7);

/// Asks all servers at once.
pub(super) async fn check(config: &Config) -> Report {
    let mut asked = tokio::task::JoinSet::new();
    for server in config.mcp.values().cloned() {
        asked.spawn(async move {
            let mut report = Report::default();
            let name = &server.name;
            match Pinned::read(&server.definitions, name) {
                Err(error @ PinnedError::Missing { .. }) => {
                    report.problem("mcp", format!("{name}: {error}"), format!("wakeful mcp pull {name}"));
                }
                Err(error @ PinnedError::Unreadable { .. }) => report.problem(
                    "mcp",
                    format!("{name}: {error}"),
                    format!("correct it, or remove it and run `wakeful mcp pull {name}`"),
                ),
                Ok(pinned) => match tokio::time::timeout(LIMIT, wakeful_mcp::pull(&server, Some(&pinned)))
                    .await
                {
                    Ok(Ok(pulled)) if pinned.changes(&pulled.pinned).is_empty() => {
                        report.ok("mcp", format!("{name} answers, with the tools of its file"));
                    }
                    Ok(Ok(_)) => report.warning(
                        "mcp",
                        format!("{name} offers other tools than its file has; models see those of the file"),
                        format!("`wakeful mcp pull {name} --check` shows the difference"),
                    ),
                    Ok(Err(why)) => report.warning(
                        "mcp",
                        format!("{name}: {why}"),
                        "calls of its tools fail until it answers",
                    ),
                    Err(_) => report.warning(
                        "mcp",
                        format!("{name} did not answer within {} s", LIMIT.as_secs()),
                        format!("`wakeful mcp pull {name} --check` waits longer"),
                    ),
                },
            }
            report
        });
    }
    let mut reports = asked.join_all().await;
    reports.sort_by_key(|report| report.checks.first().map(|check| check.text.clone()));
    Report { checks: reports.into_iter().flat_map(|report| report.checks).collect() }
}
