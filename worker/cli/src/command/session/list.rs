//! `wakeful session list`: finds sessions. The options are the parameters of `GET /v1/sessions`.

use super::super::output::{Cell, Column, Output, Table, Tone, age};
use super::super::space::Space;
use super::super::{Exit, Usage};
use super::job;
use chrono::{DateTime, NaiveDate, TimeDelta, Utc};
use wakeful_config::Config;
use wakeful_http::search::{Refused, Search};
use wakeful_store::Store;
use wakeful_store::session::SessionSummary;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  wakeful session list --status failed --since 2h
  wakeful session list --text '\"table for two\" -cancelled' --agent bookings
  wakeful session list --error 9f2c4b1a7d3e5f60      a fingerprint of `wakeful errors list`
  wakeful session list --from ann@example.com --cost-over 0.25

--text, --from, --tool, --error, --cost-over, --steps-over, --failed-calls and --sort activity look into an index that a worker fills, usually
two seconds behind.")]
pub(in crate::command) struct Args {
    /// In which these words were said, by people, the model or tools. Quotes, `or` and -word work as in a web search.
    #[arg(long, value_name = "WORDS")]
    text: Option<String>,
    /// In conversations of this user.
    #[arg(long, value_name = "ID")]
    user: Option<String>,
    /// That got a message of this sender: a mail address, a messenger's user.
    #[arg(long, value_name = "WHO")]
    from: Option<String>,
    /// Whose model asked for this tool.
    #[arg(long, value_name = "NAME")]
    tool: Option<String>,
    /// That failed with this error: a fingerprint, or a part of the text.
    #[arg(long, value_name = "FINGERPRINT|TEXT")]
    error: Option<String>,
    /// Of this agent.
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    /// Only sessions started by this type of trigger: chat, email, message, cron, herald, herald-chat,
    /// new, api, fork, replay, import, or a type of a route of your own.
    #[arg(long, value_name = "TYPE")]
    trigger: Option<String>,
    /// That began then or later: 2h, 7d (ago), 2026-11-23, or 2026-11-23T08:00:00Z.
    #[arg(long, value_name = "WHEN", value_parser = when)]
    since: Option<DateTime<Utc>>,
    /// That began before then.
    #[arg(long, value_name = "WHEN", value_parser = when)]
    until: Option<DateTime<Utc>>,
    /// Only sessions with this status: created, queued, running, waiting_input, needs_attention,
    /// completed, failed, cancelled, archived, terminated.
    #[arg(long, value_name = "STATUS")]
    status: Option<String>,
    /// That have cost more than this, in US dollars.
    #[arg(long, value_name = "DOLLARS", value_parser = dollars_over)]
    cost_over: Option<f64>,
    /// With more than this many steps.
    #[arg(long, value_name = "N")]
    steps_over: Option<i64>,
    /// With tool calls that failed: they returned an error, panicked or took too long.
    #[arg(long)]
    failed_calls: bool,
    /// The newest sessions first, or those that were active most recently.
    #[arg(long, value_name = "ORDER", default_value = "newest", value_parser = ["newest", "activity"])]
    sort: String,
    /// Only sessions of this conversation.
    #[arg(long, value_name = "ID")]
    conversation: Option<String>,
    /// Also list replays and imports. By default they are left out, unless --trigger or --conversation is
    /// given.
    #[arg(long)]
    all: bool,
    /// Show at most this many.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(i64).range(1..=10_000))]
    limit: i64,
}

/// Reads a number of dollars.
fn dollars_over(text: &str) -> Result<f64, &'static str> {
    text.parse().map_err(|_| "it is a number of dollars, such as 0.25")
}

/// Reads a time: a span before now, a date, or RFC 3339.
pub(in crate::command) fn when(text: &str) -> Result<DateTime<Utc>, String> {
    if let Ok(span) = crate::command::token::after(text) {
        let span = TimeDelta::from_std(span).map_err(|error| error.to_string())?;
        return Utc::now().checked_sub_signed(span).ok_or_else(|| "that is too long ago".to_owned());
    }
    if let Ok(date) = text.parse::<NaiveDate>() {
        return Ok(date.and_time(chrono::NaiveTime::MIN).and_utc());
    }
    let time = DateTime::parse_from_rfc3339(text).map(|time| time.to_utc());
    time.map_err(|_| {
        "a time is a span before now (2h, 7d), a date (2026-11-23), or 2026-11-23T08:00:00Z".to_owned()
    })
}

/// A refused search is a usage error.
pub(in crate::command) fn usage(refused: Refused) -> anyhow::Error {
    match refused {
        Refused::Wrong(said) => Usage(said).into(),
        Refused::Store(error) => error.into(),
    }
}

pub(super) async fn list(
    store: &Store,
    config: &Config,
    output: &Output,
    space: &Space,
    args: Args,
) -> anyhow::Result<Exit> {
    let limit = args.limit;
    let search = Search {
        status: args.status,
        conversation_id: args.conversation,
        trigger_type: args.trigger,
        agent: args.agent,
        space: space.named().map(str::to_owned),
        user: args.user,
        text: args.text,
        from: args.from,
        tool: args.tool,
        error: args.error,
        since: args.since,
        until: args.until,
        cost_over: args.cost_over,
        steps_over: args.steps_over,
        failed_calls: args.failed_calls,
        sort: Some(args.sort),
        all: args.all,
        cursor: None,
        limit: None,
    };
    let mut filter = search.filter(store).await.map_err(usage)?;
    filter.limit = limit;
    let sessions = store.sessions(&filter).await?;
    output.page(&sessions, limit, "No sessions match.\n", || list_table(&sessions, Some(config)))?;
    Ok(Exit::Ok)
}

/// `config` says how many attempts an agent has.
pub(in crate::command) fn list_table(sessions: &[SessionSummary], config: Option<&Config>) -> Table {
    let mut table = Table::new(&[
        Column::id("SESSION"),
        Column::fixed("STATUS"),
        Column::number("TURNS").extra(),
        Column::number("AGE"),
        Column::flexible("CONVERSATION").extra(),
        Column::flexible("NOTE"),
    ]);
    for session in sessions {
        let held = session.job.as_ref().and_then(|job| {
            let agent = config.and_then(|config| config.agent(&session.agent).ok());
            job::note(job, agent.map(|agent| agent.limits.attempts))
        });
        let note =
            session.error.as_deref().or(session.question.as_deref()).or(held.as_deref()).unwrap_or_default();
        table.row([
            session.session_id.as_str().into(),
            Cell::status(&session.status),
            session.total_turns.into(),
            age(session.started_at).into(),
            session.conversation_id.as_str().into(),
            Cell::new(note, Tone::Faint),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_span_a_date_or_a_moment() {
        let ago = Utc::now() - when("2h").unwrap();
        assert!((TimeDelta::minutes(119)..TimeDelta::minutes(121)).contains(&ago), "{ago}");
        assert_eq!(when("2026-11-23").unwrap(), when("2026-11-23T00:00:00Z").unwrap());
        assert_eq!(when("2026-11-23T02:00:00+02:00").unwrap(), when("2026-11-23").unwrap());
        assert!(when("yesterday").is_err() && when("").is_err());
    }
}
