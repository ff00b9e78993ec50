//! `wakeful doctor`: checks that everything is there and fits together. Changes nothing and ends within ten
//! seconds.

mod alerts;
mod blobs;
mod database;
mod fleet;
mod host;
mod keys;
mod mcp;
mod system;
mod upgrade;

use super::Exit;
use super::output::{Cell, Column, Output, OutputArgs, Table, Tone, until_reader_goes};
use crate::App;
use crate::serve::Role;
use serde::Serialize;
use std::time::Duration;
use wakeful_config::{Config, ConfigError};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    output: OutputArgs,
    /// Count sessions that failed within this time, such as 30m, 24h or 7d.
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = super::token::after)]
    since: Duration,
    /// What makes the exit status 9: a problem, or a warning too.
    #[arg(long, value_enum, value_name = "LEVEL", default_value = "problem")]
    fail_on: FailOn,
    /// The roles of the processes of this host. One without workers needs no folders, no seeds of workspaces and no keys of models.
    #[arg(long, value_delimiter = ',', default_values = ["api", "worker", "scheduler"])]
    roles: Vec<Role>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum FailOn {
    Problem,
    Warning,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum Level {
    Ok,
    /// Works, but someone should look at it.
    Warning,
    /// Does not work.
    Problem,
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Check {
    name: &'static str,
    level: Level,
    text: String,
    remedy: Option<String>,
}

/// Every check, in the order in which the checks ran.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct Report {
    checks: Vec<Check>,
}

impl Report {
    fn ok(&mut self, name: &'static str, text: impl Into<String>) {
        self.checks.push(Check { name, level: Level::Ok, text: text.into(), remedy: None });
    }

    fn warning(&mut self, name: &'static str, text: impl Into<String>, remedy: impl Into<String>) {
        let remedy = Some(remedy.into());
        self.checks.push(Check { name, level: Level::Warning, text: text.into(), remedy });
    }

    fn problem(&mut self, name: &'static str, text: impl Into<String>, remedy: impl Into<String>) {
        let remedy = Some(remedy.into());
        self.checks.push(Check { name, level: Level::Problem, text: text.into(), remedy });
    }

    fn exit(&self, fail_on: FailOn) -> Exit {
        match self.checks.iter().map(|check| check.level).max() {
            Some(Level::Problem) => Exit::Doctor,
            Some(Level::Warning) if fail_on == FailOn::Warning => Exit::Doctor,
            Some(Level::Ok | Level::Warning) | None => Exit::Ok,
        }
    }
}

/// Runs every check of a configuration that loads.
pub(super) async fn run(app: App, mut config: Config, args: Args) -> anyhow::Result<Exit> {
    let mut report = Report::default();
    let dev = super::dev::apply_if_dev_database(&mut config, &app)?;
    match &config.file {
        Some(file) => report.ok("configuration", file.display().to_string()),
        None => report.ok("configuration", "no file; environment and defaults"),
    }
    if let Some(home) = dev {
        report.ok("configuration", format!("with what `wakeful dev` assumes in {}", home.dir().display()));
    }
    for warning in &config.warnings {
        report.warning("configuration", warning.clone(), "correct or remove it");
    }
    host::check(&app, &config, &args.roles, &mut report);
    if let Err(error) = wakeful_channels::senders(&config) {
        report.problem(
            "channels",
            format!("{error:#}"),
            "correct it: `wakeful serve` does not start with it",
        );
    }
    let (server, database, mail, users, mcp) = tokio::join!(
        system::server(&config),
        system::database(&config, args.since),
        system::mail(&config),
        system::users(&config),
        mcp::check(&config)
    );
    report.checks.extend(server.checks);
    report.checks.extend(users.checks);
    report.checks.extend(mail.checks);
    report.checks.extend(mcp.checks);
    report.checks.extend(database.checks);
    finish(&args, &report)
}

/// Reports a configuration that does not load. Nothing else can be checked then.
pub(super) fn without_configuration(args: &Args, error: &ConfigError) -> anyhow::Result<Exit> {
    let mut report = Report::default();
    for line in error.lines() {
        report.problem("configuration", line, "correct it; wakeful.example.toml shows every key");
    }
    finish(args, &report)
}

fn finish(args: &Args, report: &Report) -> anyhow::Result<Exit> {
    let output = Output::new(&args.output);
    let printed = output.items(&report.checks, || table(report)).map(|()| report.exit(args.fail_on));
    until_reader_goes(printed)
}

fn table(report: &Report) -> Table {
    let mut table = Table::new(&[Column::fixed(""), Column::fixed(""), Column::flexible("")]).wrapped();
    for check in &report.checks {
        let level = match check.level {
            Level::Ok => Cell::new("ok", Tone::Good),
            Level::Warning => Cell::new("warning", Tone::Busy),
            Level::Problem => Cell::new("PROBLEM", Tone::Bad),
        };
        table.row([level, check.name.into(), check.text.as_str().into()]);
        if let Some(remedy) = &check.remedy {
            table.row(["".into(), "".into(), format!("→ {remedy}").into()]);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_problem_is_a_failure() {
        let mut report = Report::default();
        assert_eq!(report.exit(FailOn::Problem), Exit::Ok);
        report.ok("a", "fine");
        report.warning("b", "odd", "look");
        assert_eq!(report.exit(FailOn::Problem), Exit::Ok);
        assert_eq!(report.exit(FailOn::Warning), Exit::Doctor);
        report.problem("c", "broken", "mend");
        report.ok("d", "fine");
        assert_eq!(report.exit(FailOn::Problem), Exit::Doctor);
    }
}
