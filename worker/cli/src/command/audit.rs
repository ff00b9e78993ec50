//! `wakeful audit`: lists who did what, and deletes what is old. Also the act of each command that writes.

use super::output::{Cell, Column, Output, Table, Tone, age, until_reader_goes};
use super::{Exit, Usage};
use chrono::Utc;
use clap::ArgMatches;
use serde_json::json;
use wakeful_config::Config;
use wakeful_store::audit::act::{self, Act};
use wakeful_store::audit::{AuditFilter, Audited};

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// List who did what, newest first.
    List {
        /// Only of this actor: a name, a token's id, a user's id.
        #[arg(long, value_name = "WHO")]
        actor: Option<String>,
        /// Only this verb, such as session.retry, or all that begin with session.
        #[arg(long)]
        verb: Option<String>,
        /// Only what was done to this row: an id.
        #[arg(long, value_name = "ID")]
        target: Option<String>,
        /// Only refused requests.
        #[arg(long)]
        refused: bool,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=10_000))]
        limit: i64,
    },
    /// Delete old rows, in the database role wakeful_auditor. The deletion itself is a row of the audit.
    Delete {
        /// Delete what is older than this many days.
        #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(u32).range(30..=36_500))]
        older_than: u32,
        /// Delete without asking. Nothing brings the rows back.
        #[arg(long)]
        yes: bool,
    },
}

/// The commands that write, as the audit calls them. `replay` is not among them, because it runs an agent: no
/// person acts. `migrate` changes the schema, not the data.
const WRITES: &[&str] = &[
    "absurd.import",
    "absurd.take",
    "absurd.back",
    "pause.begin",
    "pause.end",
    "session.send",
    "session.new",
    "session.retry",
    "session.cancel",
    "session.resolve",
    "session.approve",
    "session.decline",
    "session.fork",
    "session.archive",
    "session.terminate",
    "session.import",
    "session.export",
    "session.wake",
    "session.rebuild",
    "delivery.resend",
    "notification.resend",
    "effect.resolve",
    "schedule.create",
    "schedule.edit",
    "schedule.delete",
    "schedule.pause",
    "schedule.resume",
    "schedule.trigger",
    "token.create",
    "token.revoke",
    "encryption.rotate",
    "encryption.prune",
    "conversation.erase",
    "conversation.hold",
    "conversation.release",
    "person.erase",
    "person.hold",
    "audit.delete",
    "retention.run",
    "blobs.gc",
    "blobs.move",
    "errors.mute",
    "errors.note",
    "batch.pause",
    "batch.resume",
    "batch.cancel",
    "worker.drain",
];

/// The act of a command, if it writes.
///
/// # Errors
/// A name that cannot be one.
pub(super) fn act_of(matches: &ArgMatches, name: Option<&str>) -> anyhow::Result<Option<Act>> {
    let Some((noun, of_noun)) = matches.subcommand() else { return Ok(None) };
    let Some((verb, args)) = of_noun.subcommand() else { return Ok(None) };
    let verb = match (noun, verb) {
        // The same act by a shorter name.
        ("queue", "pause") => "pause.begin".to_owned(),
        ("queue", "resume") => "pause.end".to_owned(),
        // Without it, `verify` only reads.
        ("session", "verify") if args.get_flag("rebuild") => "session.rebuild".to_owned(),
        (noun, verb) => format!("{noun}.{verb}"),
    };
    if !WRITES.contains(&verb.as_str()) {
        return Ok(None);
    }
    let actor = match name {
        Some(name) if name.is_empty() || name.len() > 256 || name.chars().any(char::is_control) => {
            return Err(Usage("--as has 1 to 256 bytes and no control characters".to_owned()).into());
        }
        Some(name) => name.to_owned(),
        None => system_user(),
    };
    let text = |id: &str| args.try_get_one::<String>(id).ok().flatten().cloned();
    // `token create` has a name too, and its row has an id that is not known yet.
    let names = if noun == "schedule" || noun == "absurd" {
        &["name"][..]
    } else {
        &["id", "ids", "session", "conversation"]
    };
    Ok(Some(Act {
        space_id: text("space"),
        actor_kind: "cli",
        actor,
        target: names.iter().find_map(|name| text(name)),
        reason: text("reason"),
        verb,
        ..Act::default()
    }))
}

/// The name of the system's user: the one who called `sudo`, if it was called.
fn system_user() -> String {
    let named = |name: &str| std::env::var(name).ok().filter(|name| !name.is_empty() && name.len() <= 256);
    let user = named("SUDO_USER").or_else(|| named("USER")).or_else(|| named("LOGNAME"));
    let user = user.filter(|user| !user.chars().any(char::is_control));
    user.unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()))
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let output = Output::new(&args.output);
    let (actor, verb, target, refused, limit) = match args.verb {
        Verb::List { actor, verb, target, refused, limit } => (actor, verb, target, refused, limit),
        Verb::Delete { older_than, yes } => return delete(&config, &output, older_than, yes).await,
    };
    let store = super::open_store(&config, "wakeful audit").await?;
    let outcome = refused.then(|| "refused".to_owned());
    let space = args.space.named().map(str::to_owned);
    let filter = AuditFilter { actor, verb, target, space, outcome, limit, ..AuditFilter::default() };
    let rows = store.audited(&filter).await;
    store.close().await;
    let rows = rows?;
    until_reader_goes(output.items(&rows, || table(&rows)).map(|()| Exit::Ok))
}

async fn delete(config: &Config, output: &Output, days: u32, yes: bool) -> anyhow::Result<Exit> {
    if !yes {
        let text = "nothing brings back what is deleted: say --yes";
        return Err(Usage(text.to_owned()).into());
    }
    act::because(Some(&format!("older than {days} days")));
    delete_older(config, output, "wakeful audit", days.into()).await?;
    Ok(Exit::Ok)
}

/// Deletes what is older in the audit. The deletion is a row of the audit itself.
pub(super) async fn delete_older(
    config: &Config,
    output: &Output,
    command: &str,
    days: i64,
) -> anyhow::Result<()> {
    let store = super::open_store(config, command).await?;
    let deleted = store.delete_audit(Utc::now() - chrono::Duration::days(days)).await;
    store.close().await;
    let deleted = deleted?;
    output.one(&json!({"deleted": deleted}), || format!("{deleted} rows of the audit are deleted.\n"))
}

fn table(rows: &[Audited]) -> Table {
    let mut table = Table::new(&[
        Column::number("AGE"),
        Column::flexible("WHO"),
        Column::fixed("VERB"),
        Column::fixed("OUTCOME"),
        Column::id("TARGET"),
        Column::fixed("FROM").below(),
        Column::flexible("WHY").below(),
    ]);
    for row in rows {
        let outcome = match (row.status, row.times) {
            (None, _) => row.outcome.clone(),
            (Some(status), 1) => format!("{} {status}", row.outcome),
            (Some(status), times) => format!("{} {status} ×{times}", row.outcome),
        };
        let tone = if row.outcome == "done" { Tone::Plain } else { Tone::Bad };
        let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
        table.row([
            (if Utc::now() < row.at { "0s".to_owned() } else { age(row.at) }).into(),
            row.actor.as_str().into(),
            row.verb.as_str().into(),
            Cell::new(outcome, tone),
            or_none(&row.target).as_str().into(),
            or_none(&row.address).as_str().into(),
            row.reason.as_deref().unwrap_or_default().into(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    /// `wakeful` and these arguments, as the audit calls them.
    fn verb_of(args: &[&str]) -> Option<String> {
        let matches = super::super::Cli::command().try_get_matches_from(args).unwrap();
        act_of(&matches, None).unwrap().map(|act| act.verb)
    }

    #[test]
    fn a_command_that_does_what_an_audited_request_does_is_audited_too() {
        let cli = super::super::Cli::command();
        let mut both = 0;
        for noun in cli.get_subcommands() {
            for verb in noun.get_subcommands() {
                let name = format!("{}.{}", noun.get_name(), verb.get_name());
                if wakeful_http::access::RULES.iter().any(|rule| rule.verb == Some(&name)) {
                    assert!(WRITES.contains(&&*name), "`wakeful {} {}`", noun.get_name(), verb.get_name());
                    both += 1;
                }
            }
        }
        assert!(both > 20, "{both}");
    }

    #[test]
    fn verify_writes_only_if_it_rebuilds() {
        assert_eq!(verb_of(&["wakeful", "session", "verify", "sess_1"]), None);
        let rebuild = verb_of(&["wakeful", "session", "verify", "sess_1", "--rebuild"]);
        assert_eq!(rebuild.as_deref(), Some("session.rebuild"));
    }
}
