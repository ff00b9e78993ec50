//! `wakeful schedule`: lists, creates and controls schedules. Works on the database and needs no server.

use super::output::{Cell, Column, Output, Table, Tone, printable, span, until_reader_goes};
use super::{Exit, Usage};
use crate::App;
use chrono::{DateTime, Utc};
use std::fmt::Write as _;
use wakeful_channels::cron::definition::{MISSED_RULE, OVERLAP_RULE, ScheduleInput, read, session_of};
use wakeful_channels::cron::view::{NEXT_LIMIT, Next, View, next};
use wakeful_config::Config;
use wakeful_store::Store;
use wakeful_store::schedule::{Firing, Schedule};
use wakeful_workflow::schedule::{Missed, Overlap, written};

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// List schedules: those in the configuration file, and those that users created.
    List,
    /// Show a schedule, its next tick, and the results of its newest ticks.
    Show {
        /// The schedule's name.
        name: String,
    },
    /// Create a schedule.
    Create {
        /// The schedule's name.
        name: String,
        #[command(flatten)]
        asked: Box<Fields>,
    },
    /// Change the given settings of a schedule and keep the rest. A new pattern or time zone applies from now
    /// on.
    ///
    /// A schedule from the configuration file can be changed only in that file.
    Edit {
        /// The schedule's name.
        name: String,
        #[command(flatten)]
        asked: Box<Fields>,
    },
    /// Remove a schedule and the history of its ticks. Its sessions stay.
    ///
    /// A schedule from the configuration file can be removed only in that file.
    Delete {
        /// The schedule's name.
        name: String,
    },
    /// Stop firing a schedule until it is resumed.
    Pause {
        /// The schedule's name.
        name: String,
    },
    /// Fire a schedule again from now on. Ticks during the pause are lost.
    Resume {
        /// The schedule's name.
        name: String,
    },
    /// Fire a schedule now, even if it is paused.
    Trigger {
        /// The schedule's name.
        name: String,
        /// An idempotency key: a second request with the same key fires nothing.
        #[arg(long, value_name = "KEY")]
        client_key: Option<String>,
    },
    /// Print when a schedule is due next, in UTC and in its own time zone.
    Next {
        /// The schedule's name.
        name: String,
        /// Number of ticks.
        #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=NEXT_LIMIT as i64))]
        count: u16,
    },
}

/// The fields of a schedule on the command line.
#[derive(Debug, clap::Args)]
pub(super) struct Fields {
    /// A cron pattern: five fields, or six with seconds before them, or @daily and similar words.
    #[arg(long)]
    cron: Option<String>,
    /// The IANA name of the time zone that the pattern is read in.
    #[arg(long, value_name = "ZONE")]
    time_zone: Option<String>,
    /// The agent; `default` if not given.
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    /// The conversation of its sessions; `schedule-NAME` if not given.
    #[arg(long, value_name = "ID")]
    conversation_id: Option<String>,
    /// What the agent is told at each tick.
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// An address that its replies are mailed to; may be given several times. '' in an edit: none.
    #[arg(long, value_name = "ADDRESS")]
    mail_to: Option<Vec<String>>,
    /// What happens to ticks that were missed while no scheduler ran: skip, one (the default), all.
    #[arg(long, value_name = "POLICY", value_parser = missed)]
    missed: Option<Missed>,
    /// How many missed ticks fire at most, with `all`; 10 if not given.
    #[arg(long, value_name = "N")]
    missed_limit: Option<u32>,
    /// What happens to a tick while an earlier firing still runs: skip, queue (the default).
    #[arg(long, value_name = "POLICY", value_parser = overlap)]
    overlap: Option<Overlap>,
}

impl Fields {
    /// Returns the given fields as a definition without a name.
    fn asked(self) -> ScheduleInput {
        ScheduleInput {
            name: String::new(),
            cron: self.cron,
            time_zone: self.time_zone,
            agent: self.agent,
            conversation_id: self.conversation_id,
            prompt: self.prompt,
            mail_to: self.mail_to,
            missed: self.missed,
            missed_limit: self.missed_limit,
            overlap: self.overlap,
        }
    }
}

fn missed(word: &str) -> Result<Missed, &'static str> {
    Missed::parse(word).ok_or(MISSED_RULE)
}

fn overlap(word: &str) -> Result<Overlap, &'static str> {
    Overlap::parse(word).ok_or(OVERLAP_RULE)
}

pub(super) async fn run(app: &App, mut config: Config, args: Args) -> anyhow::Result<Exit> {
    // On the database of `wakeful dev`, use dev's agent and model.
    super::dev::apply_if_dev_database(&mut config, app)?;
    let store = super::open_store(&config, "wakeful schedule").await?;
    let output = Output::new(&args.output);
    let ran = steer(app, &config, &store, &output, args.space.of_names(), args.verb).await;
    store.close().await;
    until_reader_goes(ran)
}

async fn steer(
    app: &App,
    config: &Config,
    store: &Store,
    output: &Output,
    space: &str,
    verb: Verb,
) -> anyhow::Result<Exit> {
    match verb {
        Verb::List => {
            let schedules = store.schedules(space).await?;
            let now = store.now().await?;
            let views: Vec<View> = schedules.into_iter().map(View::of).collect();
            output.items(&views, || table(&views, now))?;
        }
        Verb::Show { name } => {
            let schedule = store.schedule(space, &name).await?;
            let firings = store.firings(space, &name, None, 20).await?;
            let view = View::of(schedule);
            output.one(&serde_json::json!({"schedule": view, "firings": firings}), || {
                details(output, &view, &firings)
            })?;
        }
        Verb::Create { name, asked } => {
            let asked = ScheduleInput { name, ..asked.asked() };
            let definition = read(asked, space, config).map_err(Usage)?;
            let (schedule, created) = store.create_schedule(space, &definition, None).await?;
            say(output, schedule, if created { "is made" } else { "is there already" })?;
        }
        Verb::Edit { name, asked } => {
            let mut asked = asked.asked();
            if asked == ScheduleInput::default() {
                let text = "say what is to be another, such as --cron \"0 9 * * MON\"";
                return Err(Usage(text.to_owned()).into());
            }
            // A single empty address removes all addresses: a command line has no other way to pass an empty
            // list.
            asked.mail_to = asked.mail_to.map(|to| if to == [""] { Vec::new() } else { to });
            let before = store.schedule(space, &name).await?;
            let definition = read(asked.over(&before.definition), space, config).map_err(Usage)?;
            say(output, store.change_schedule(space, &definition, None, None).await?, "is changed")?;
        }
        Verb::Delete { name } => {
            store.delete_schedule(space, &name, None).await?;
            output.one(&serde_json::json!({"deleted": name}), || {
                format!("{} is deleted\n", printable(&name))
            })?;
        }
        Verb::Pause { name } => {
            say(output, store.pause_schedule(space, &name).await?, "is paused")?;
        }
        Verb::Resume { name } => {
            say(output, store.resume_schedule(space, &name, None).await?, "is active")?;
        }
        Verb::Trigger { name, client_key } => {
            if client_key
                .as_ref()
                .is_some_and(|key| key.is_empty() || key.len() > 256 || key.chars().any(char::is_control))
            {
                return Err(
                    Usage("--client-key has 1 to 256 bytes and no control characters".to_owned()).into()
                );
            }
            let tools = app.registry(config)?;
            let compose = |schedule: &Schedule| {
                session_of(config, &tools, schedule).map_err(|cannot| cannot.to_string())
            };
            let woken =
                store.trigger_schedule(space, &name, client_key.as_deref(), None, None, &compose).await?;
            store.announce(&woken.session_id).await?;
            output.one(&woken, || {
                let did = if woken.duplicate { "was fired before" } else { "is fired" };
                format!("{}: {} {did}\n", printable(&name), printable(&woken.session_id))
            })?;
        }
        Verb::Next { name, count } => {
            let schedule = store.schedule(space, &name).await?;
            let ticks = next(&schedule, store.now().await?, usize::from(count));
            if schedule.paused_at.is_some() {
                let name = printable(&schedule.definition.name);
                let until = match schedule.paused_by.as_deref() {
                    Some("config") => "the configuration has it again".to_owned(),
                    Some(_) | None => format!("`wakeful schedule resume {name}`"),
                };
                eprintln!("wakeful: {name} is paused: none of these ticks fires until {until}");
            }
            output.items(&ticks, || ticks_table(&ticks))?;
        }
    }
    Ok(Exit::Ok)
}

fn say(output: &Output, schedule: Schedule, did: &str) -> anyhow::Result<()> {
    let view = View::of(schedule);
    output.one(&view, || format!("{} {did}\n", printable(&view.schedule.definition.name)))
}

fn table(views: &[View], now: DateTime<Utc>) -> Table {
    let mut table = Table::new(&[
        Column::fixed("NAME"),
        Column::fixed("STATE"),
        Column::number("NEXT IN"),
        Column::flexible("CRON"),
        Column::fixed("TIME ZONE"),
        Column::fixed("AGENT").extra(),
        Column::fixed("SOURCE").extra(),
    ]);
    for view in views {
        let (schedule, definition) = (&view.schedule, &view.schedule.definition);
        table.row([
            definition.name.as_str().into(),
            Cell::new(view.state, if view.state == "active" { Tone::Good } else { Tone::Busy }),
            schedule.next_at.map_or_else(|| "-".to_owned(), |at| due_in(at, now)).into(),
            definition.cron.as_str().into(),
            definition.time_zone.as_str().into(),
            definition.agent.as_str().into(),
            schedule.source.as_str().into(),
        ]);
    }
    table
}

fn due_in(at: DateTime<Utc>, now: DateTime<Utc>) -> String {
    let seconds = (at - now).num_milliseconds() as f64 / 1000.0;
    // A scheduler looks every few seconds. `doctor` calls a schedule late from the same time on.
    match seconds {
        s if s < -wakeful_store::schedule::LATE_S => format!("late {}", span(s)),
        s if s < 0.0 => "due".to_owned(),
        s => span(s),
    }
}

fn ticks_table(ticks: &[Next]) -> Table {
    let mut table = Table::new(&[Column::fixed("TICK"), Column::flexible("LOCAL")]);
    for next in ticks {
        table.row([written(next.tick).into(), next.local.as_str().into()]);
    }
    table
}

fn details(output: &Output, view: &View, firings: &[Firing]) -> String {
    let (schedule, definition) = (&view.schedule, &view.schedule.definition);
    let state = match schedule.paused_by.as_deref() {
        Some("config") => "paused: the configuration has it no more",
        Some(_) | None => view.state,
    };
    let next_at = schedule.next_at.map_or_else(|| "-".to_owned(), written);
    let mut text = String::new();
    for (name, value) in [
        ("name", definition.name.as_str()),
        ("id", schedule.schedule_id.as_str()),
        ("state", state),
        ("source", schedule.source.as_str()),
        ("deployment", schedule.deployment.as_deref().unwrap_or("-")),
        ("cron", definition.cron.as_str()),
        ("time zone", definition.time_zone.as_str()),
        ("next", next_at.as_str()),
        ("agent", definition.agent.as_str()),
        ("conversation", definition.conversation_id.as_str()),
        ("mail to", definition.mail_to.join(", ").as_str()),
        ("missed", &format!("{}, at most {}", definition.missed.as_str(), definition.missed_limit)),
        ("overlap", definition.overlap.as_str()),
        ("prompt", definition.prompt.as_str()),
    ] {
        let _ = writeln!(text, "{name:<13} {}", printable(value));
    }
    if !firings.is_empty() {
        let mut table = Table::new(&[
            Column::fixed("TICK"),
            Column::fixed("SESSION"),
            Column::fixed("STATUS"),
            Column::flexible("SKIPPED"),
        ]);
        for firing in firings {
            table.row([
                written(firing.tick).into(),
                firing.session_id.as_deref().unwrap_or("-").into(),
                Cell::status(firing.status.as_deref().unwrap_or("-")),
                firing.reason.as_deref().unwrap_or_default().into(),
            ]);
        }
        let _ = write!(text, "\n{}", output.aligned(&table, 0));
    }
    text
}
