//! `wakeful token`: makes, lists and revokes tokens of the HTTP interface. Works on the database and needs no server.

use super::output::{Cell, Column, Output, Table, Tone, age, printable, span, until_reader_goes};
use super::{Exit, Usage};
use std::time::Duration;
use wakeful_config::Config;
use wakeful_http::tokens::{check, shown_once};
use wakeful_store::Store;
use wakeful_store::token::{NewToken, Token};
use wakeful_workflow::access::Scope;

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// Make a token. It is printed once and kept nowhere.
    Create {
        /// What it allows: read (look), operate (look, send messages, steer sessions), admin (also tokens and the audit).
        #[arg(long, value_parser = scope)]
        scope: Scope,
        /// Only the sessions, schedules and deliveries of this space.
        #[arg(long, value_name = "NAME")]
        space: Option<String>,
        /// Only sessions of this agent.
        #[arg(long, value_name = "NAME")]
        agent: Option<String>,
        /// When it expires, from now: 30m, 12h, 90d. Without this it never does.
        #[arg(long, value_name = "SPAN", value_parser = after)]
        expires: Option<Duration>,
        /// A name for the list and the audit.
        #[arg(long)]
        name: Option<String>,
    },
    /// List the tokens, newest first.
    List {
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=10_000))]
        limit: i64,
    },
    /// Revoke a token. Every server refuses it from now on.
    Revoke {
        /// The token's id, as `token list` shows it.
        id: String,
    },
}

fn scope(word: &str) -> Result<Scope, &'static str> {
    Scope::parse(word).ok_or("a scope is read, operate or admin")
}

/// Reads a span of time: a number and s, m, h or d.
pub(super) fn after(text: &str) -> Result<Duration, &'static str> {
    let rule = "a span is a number and s, m, h or d, such as 90d";
    let unit = match text.chars().next_back() {
        Some('s') => 1,
        Some('m') => 60,
        Some('h') => 3600,
        Some('d') => 86_400,
        _ => return Err(rule),
    };
    let number: u64 = text[..text.len() - 1].parse().map_err(|_| rule)?;
    number.checked_mul(unit).map(Duration::from_secs).ok_or(rule)
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let store = super::open_store(&config, "wakeful token").await?;
    let output = Output::new(&args.output);
    let ran = tokens(&config, &store, &output, args.verb).await;
    store.close().await;
    until_reader_goes(ran.map(|()| Exit::Ok))
}

async fn tokens(config: &Config, store: &Store, output: &Output, verb: Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Create { scope, space, agent, expires, name } => {
            let new = NewToken { scope, space_id: space, agent, name, expires_in: expires };
            check(&new).map_err(Usage)?;
            if let Some(agent) = &new.agent
                && !config.agent_names().contains(agent)
            {
                eprintln!("wakeful: warning: this configuration has no agent {}", printable(agent));
            }
            if config.server.token.is_none() {
                eprintln!(
                    "wakeful: warning: by this configuration the server has no token of its own: it listens on this machine only, \
                     and everybody on this machine is its admin, without this token too; set WAKEFUL_TOKEN"
                );
            }
            let (token, secret) = store.create_token(&new).await?;
            output.one(&shown_once(&token, &secret), || {
                if output.for_people() {
                    format!("{secret}\n\nThis is {}. Keep it now: it is shown only once.\n", token.token_id)
                } else {
                    format!("{secret}\n")
                }
            })
        }
        Verb::List { limit } => {
            let tokens = store.tokens(None, limit).await?;
            output.items(&tokens, || table(&tokens))
        }
        Verb::Revoke { id } => {
            let (token, was_in_force) = store.revoke_token(&id).await?;
            output.one(&token, || {
                let did = if was_in_force { "is revoked" } else { "was revoked before" };
                format!("{} {did}\n", printable(&token.token_id))
            })
        }
    }
}

fn table(tokens: &[Token]) -> Table {
    let mut table = Table::new(&[
        Column::fixed("TOKEN"),
        Column::fixed("SCOPE"),
        Column::fixed("STATE"),
        Column::fixed("SPACE").extra(),
        Column::fixed("AGENT").extra(),
        Column::number("AGE"),
        Column::number("USED"),
        Column::flexible("NAME"),
    ]);
    for token in tokens {
        let or_any = |text: &Option<String>| text.clone().unwrap_or_else(|| "any".to_owned());
        table.row([
            token.token_id.as_str().into(),
            token.scope.as_str().into(),
            state(token),
            or_any(&token.space_id).as_str().into(),
            or_any(&token.agent).as_str().into(),
            age(token.created_at).into(),
            token.last_used_at.map_or_else(|| "-".to_owned(), age).into(),
            token.name.as_deref().unwrap_or_default().into(),
        ]);
    }
    table
}

fn state(token: &Token) -> Cell {
    if token.revoked_at.is_some() {
        return Cell::new("revoked", Tone::Faint);
    }
    match token.expires_at.map(|at| (at - chrono::Utc::now()).num_milliseconds() as f64 / 1000.0) {
        Some(seconds) if seconds <= 0.0 => Cell::new("expired", Tone::Faint),
        Some(seconds) => Cell::new(format!("{} left", span(seconds)), Tone::Good),
        None => Cell::new("in force", Tone::Good),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_a_number_and_a_unit() {
        assert_eq!(after("90d"), Ok(Duration::from_secs(90 * 86_400)));
        assert_eq!(after("30m"), Ok(Duration::from_secs(1800)));
        for wrong in ["", "d", "90", "-1d", "1w", "99999999999999999999d", "300000000000000d", "1ä"] {
            assert!(after(wrong).is_err(), "{wrong}");
        }
    }
}
