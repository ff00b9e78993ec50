//! `wakeful effect`: lists effects whose end is unknown, of all sessions, and resolves many of them as a batch.

use super::batch::GoesOn;
use super::output::{Cell, Column, Output, Table, Tone, age, count, printable, until_reader_goes};
use super::session::bulk::{How, asked, run as run_batch};
use super::session::list::{usage, when};
use super::space::Space;
use super::{Exit, Usage};
use chrono::{DateTime, Utc};
use std::collections::BTreeMap;
use wakeful_config::Config;
use wakeful_http::batches::resolve::{Input, ResolveVerb};
use wakeful_http::effects::{EffectOutcome, EffectSearch};
use wakeful_store::Store;
use wakeful_store::batch::EffectsPreview;
use wakeful_store::effect::{EffectFilter, EffectKind, EffectName, UncertainEffect};

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Examples:
  wakeful effect list --tool charge --since 2h
  wakeful effect resolve --tool charge --since 2h --did-not-happen --reason 'the bank has none of them' --dry-run
  wakeful effect resolve sess_018f…/call_7 sess_018f…/call_9 --happened 'Charged.' --reason 'seen in the ledger'")]
pub(super) enum Verb {
    /// List effects whose end is unknown, those of the newest sessions first.
    List {
        #[command(flatten)]
        search: SearchArgs,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(i64).range(1..=10_000))]
        limit: i64,
    },
    /// Say of many effects how they ended, the same of each. Workers carry it out, each effect once.
    Resolve(Box<ResolveArgs>),
}

/// Which effects.
#[derive(Debug, clap::Args)]
pub(super) struct SearchArgs {
    /// Only calls of this tool.
    #[arg(long, value_name = "NAME", conflicts_with = "channel")]
    tool: Option<String>,
    /// Only messages of this channel: email, slack, telegram, webhook, …
    #[arg(long, value_name = "NAME")]
    channel: Option<String>,
    /// Only effects of this agent's sessions.
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    /// Only effects of this session.
    #[arg(long, value_name = "ID")]
    session: Option<String>,
    /// Only those that began then or later: a span before now (2h, 7d), a date, or RFC 3339.
    #[arg(long, value_name = "TIME", value_parser = when)]
    since: Option<DateTime<Utc>>,
    /// Only those that began before then.
    #[arg(long, value_name = "TIME", value_parser = when)]
    until: Option<DateTime<Utc>>,
    /// Also those that were left to the model, and those of replays and imports.
    #[arg(long)]
    all: bool,
}

impl SearchArgs {
    fn search(self, space: &Space) -> EffectSearch {
        EffectSearch {
            tool: self.tool,
            channel: self.channel,
            agent: self.agent,
            session_id: self.session,
            since: self.since,
            until: self.until,
            all: self.all,
            space: space.named().map(str::to_owned),
            ..EffectSearch::default()
        }
    }
}

#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("outcome").required(true)))]
pub(super) struct ResolveArgs {
    /// Effects named one by one, as SESSION/EFFECT. Without them: all that the options find.
    #[arg(value_name = "SESSION/EFFECT", value_parser = name, conflicts_with_all = ["tool", "channel", "agent", "session", "since", "until", "all"])]
    effects: Vec<EffectName>,
    #[command(flatten)]
    search: SearchArgs,
    /// They took effect; this is what each call would have returned. Empty for messages.
    #[arg(long, group = "outcome", value_name = "RESULT")]
    happened: Option<String>,
    /// They did not take effect. A call is reported as not done; a message is sent again.
    #[arg(long, group = "outcome")]
    did_not_happen: bool,
    /// The outcomes cannot be found out: tell the models so, and go on.
    #[arg(long, group = "outcome")]
    let_model_decide: bool,
    /// Send the outcome to models that were told that it is unknown.
    #[arg(long)]
    tell: bool,
    /// The reason, for the journal and the audit. Needed for more than one effect.
    #[arg(long)]
    reason: Option<String>,
    /// Only say what would be done: numbers by tool and channel, and ten of the effects.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    how: How,
}

fn name(text: &str) -> Result<EffectName, String> {
    let parts = text.split_once('/').filter(|(session, effect)| !session.is_empty() && !effect.is_empty());
    let (session_id, effect_id) =
        parts.ok_or("an effect is SESSION/EFFECT, as `wakeful effect list` has it")?;
    Ok(EffectName { session_id: session_id.to_owned(), effect_id: effect_id.to_owned() })
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let store = super::open_store(&config, "wakeful effect").await?;
    let (output, space) = (Output::new(&args.output), args.space);
    let ran = match args.verb {
        Verb::List { search, limit } => list(&store, &output, search.search(&space), limit).await,
        Verb::Resolve(args) => resolve(&store, &output, &space, *args).await,
    };
    store.close().await;
    until_reader_goes(ran)
}

async fn list(store: &Store, output: &Output, search: EffectSearch, limit: i64) -> anyhow::Result<Exit> {
    let filter = EffectFilter { limit, ..search.filter().map_err(usage)? };
    let effects = store.uncertain_effects(&filter).await?;
    output.page(&effects, limit, "No effect is uncertain.\n", || table(&effects))?;
    Ok(Exit::Ok)
}

fn table(effects: &[UncertainEffect]) -> Table {
    let mut table = Table::new(&[
        Column::fixed("KIND"),
        Column::flexible("NAME"),
        Column::fixed("SESSION IS"),
        Column::number("AGE"),
        Column::flexible("EFFECT").below(),
        Column::flexible("ABOUT").below(),
    ]);
    for effect in effects {
        table.row([
            effect.kind.as_str().into(),
            effect.name.as_str().into(),
            Cell::status(&effect.session_status),
            effect.began_at.map(age).unwrap_or_default().into(),
            format!("{}/{}", effect.session_id, effect.effect_id).into(),
            Cell::new(about(effect), Tone::Faint),
        ]);
    }
    table
}

/// What a person has to know of an effect, to say how it ended.
fn about(effect: &UncertainEffect) -> String {
    let mut said = Vec::new();
    if let Some(arguments) = &effect.arguments {
        said.push(format!("with {arguments}"));
    }
    said.extend(effect.last_error.clone());
    if effect.kind == EffectKind::Call {
        said.push(if effect.told { "the model was told so" } else { "the model waits" }.to_owned());
    }
    if let Some(until) = effect.may_happen_until {
        said.push(format!("it may still be carried out until {}", until.format("%H:%M:%SZ")));
    }
    said.join("; ")
}

async fn resolve(store: &Store, output: &Output, space: &Space, args: ResolveArgs) -> anyhow::Result<Exit> {
    let outcome = match (&args.happened, args.did_not_happen) {
        (Some(_), _) => EffectOutcome::Happened,
        (None, true) => EffectOutcome::DidNotHappen,
        (None, false) => EffectOutcome::LetModelDecide,
    };
    let search = args.search.search(space);
    let is_named = !args.effects.is_empty();
    // The option `--space` alone says nothing of the effects.
    if !is_named && (EffectSearch { space: None, ..search.clone() }).is_empty() {
        let said =
            "say which effects: --tool, --channel, --agent, --session, --since, --until, or SESSION/EFFECT";
        return Err(Usage(said.to_owned()).into());
    }
    let filter = search.filter().map_err(usage)?;
    let input = Input {
        verb: ResolveVerb::Resolve,
        filter: (!is_named).then_some(search),
        effects: is_named.then_some(args.effects),
        outcome,
        result: args.happened.filter(|result| !result.is_empty()),
        tell: args.tell,
        reason: args.reason,
        dry_run: args.dry_run,
        rate: args.how.rate,
        client_key: None,
    };
    let new = input.batch(None, filter).map_err(usage)?;
    if input.dry_run {
        let preview = store.preview_effects(&new).await?;
        output
            .one(&preview, || format!("{}{}", said(&preview), output.aligned(&table(&preview.sample), 2)))?;
        return Ok(Exit::Ok);
    }
    if !args.how.yes {
        eprint!("{}", said(&store.preview_effects(&new).await?));
        if !asked(&format!("Go on and say of each: {}?", outcome.as_str().replace('_', " ")))? {
            return Ok(Exit::Failed);
        }
    }
    run_batch(store, output, &new, GoesOn::No, args.how.no_wait).await
}

fn said(preview: &EffectsPreview) -> String {
    let list = |counts: &BTreeMap<String, i64>| {
        let named = counts.iter().map(|(name, count)| format!("{count} {}", printable(name)));
        named.collect::<Vec<_>>().join(", ")
    };
    let mut text = format!("{} would be taken", count(preview.members, "effect"));
    if !preview.by_name.is_empty() {
        text.push_str(&format!(" ({})", list(&preview.by_name)));
    }
    if !preview.refused.is_empty() {
        let refused = preview.refused.iter().map(|(why, count)| format!("{count}: {why}"));
        text.push_str(&format!("; refused at this moment: {}", refused.collect::<Vec<_>>().join(", ")));
    }
    if !preview.skipped.is_empty() {
        text.push_str(&format!("; left out: {}", list(&preview.skipped)));
    }
    text.push('\n');
    text
}
