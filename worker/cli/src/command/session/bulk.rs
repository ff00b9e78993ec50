//! `wakeful session retry|cancel|archive|wake` for many sessions: makes a batch, which workers carry out, and waits for it.

use super::super::batch::{GoesOn, finish, text_of};
use super::super::output::{Output, count, printable};
use super::super::space::Space;
use super::super::{Exit, Usage};
use super::list::{list_table, usage};
use super::{Steer, steer, wake};
use crate::App;
use std::io::{IsTerminal as _, Write as _};
use wakeful_config::Config;
use wakeful_http::batches::Input;
use wakeful_http::plain;
use wakeful_http::search::Search;
use wakeful_store::Store;
use wakeful_store::batch::{NewBatch, Preview, Verb};
use wakeful_store::fork::Model;
use wakeful_store::session::SessionFilter;

#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("which").args(["ids", "filter"]).required(true)))]
pub(in crate::command) struct Args {
    /// The sessions' ids.
    #[arg(value_name = "ID")]
    pub(super) ids: Vec<String>,
    /// All sessions that match: a parameter of `session list` and its value, such as status=failed, error=9f2c4b1a7d3e5f60,
    /// agent=NAME, since=2026-11-23T08:00:00Z. Several must all match.
    #[arg(long, value_name = "KEY=VALUE")]
    filter: Vec<String>,
    /// Only say what would be done: numbers by status, and ten of the sessions.
    #[arg(long)]
    dry_run: bool,
    /// The reason, for the journal and the audit. Needed for more than one session.
    #[arg(long)]
    reason: Option<String>,
    #[command(flatten)]
    how: How,
}

/// How a batch is made and followed.
#[derive(Debug, clap::Args)]
pub(in crate::command) struct How {
    /// Members a second.
    #[arg(long, value_name = "N")]
    pub(in crate::command) rate: Option<f64>,
    /// Do not ask before.
    #[arg(long)]
    pub(in crate::command) yes: bool,
    /// Do not wait for the end. Workers carry it out all the same.
    #[arg(long)]
    pub(in crate::command) no_wait: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  wakeful session retry sess_018f…
  wakeful session retry --filter status=failed --filter agent=bookings --dry-run
  wakeful session retry --filter error=9f2c4b1a7d3e5f60 --prove 50 --canary 1,10,100 --reason 'prompt mended'

--prove tries copies of failed sessions first, by the workers' present configuration: they ask the model for real
and change nothing. A retry never takes completed or cancelled sessions. Exit status 7: not all went well.")]
pub(in crate::command) struct RetryArgs {
    #[command(flatten)]
    pub(super) bulk: Args,
    /// Try this many of the sessions dry before anything is retried, and say how many would pass.
    #[arg(long, value_name = "N")]
    prove: Option<i32>,
    /// Let the dry tries ask this model, as provider/model.
    #[arg(long, value_name = "MODEL", requires = "prove")]
    model: Option<String>,
    /// The sizes of the first stages: 1,10,100. Each begins when the runs of the one before have ended, and the batch pauses by
    /// itself when the failure comes back.
    #[arg(long, value_name = "N,N,…", value_delimiter = ',')]
    canary: Option<Vec<i32>>,
    /// Pause when more than this share of a stage fails again. Default: 0.2 with --canary.
    #[arg(long, value_name = "SHARE")]
    stop_share: Option<f64>,
}

impl Args {
    /// The one session that is meant, if nothing asks for a batch.
    fn lone(&self) -> Option<&str> {
        match self.ids.as_slice() {
            [id] if !self.dry_run && self.how.rate.is_none() && !self.how.no_wait => Some(id),
            _ => None,
        }
    }

    fn input(self, space: &Space, verb: Verb) -> anyhow::Result<Input> {
        let mut filter = if self.filter.is_empty() { None } else { Some(search(&self.filter)?) };
        if let (Some(filter), Some(space)) = (&mut filter, space.named()) {
            if filter.space.as_deref().is_some_and(|asked| asked != space) {
                return Err(Usage("--space and --filter space= name two spaces".to_owned()).into());
            }
            filter.space = Some(space.to_owned());
        }
        Ok(Input {
            verb,
            filter,
            session_ids: (!self.ids.is_empty()).then_some(self.ids),
            reason: self.reason,
            dry_run: self.dry_run,
            rate: self.how.rate,
            prove: None,
            model: None,
            canary: None,
            stop_share: None,
            client_key: None,
        })
    }
}

/// Reads `KEY=VALUE`s.
fn search(pairs: &[String]) -> anyhow::Result<Search> {
    let mut fields = serde_json::Map::new();
    for pair in pairs {
        let Some((key, value)) = pair.split_once('=') else {
            return Err(
                Usage(format!("--filter {pair}: a filter is KEY=VALUE, such as status=failed")).into()
            );
        };
        let value = match key {
            "cost_over" | "steps_over" | "all" | "failed_calls" => {
                value.parse().unwrap_or_else(|_| value.into())
            }
            "since" | "until" => {
                let time =
                    super::list::when(value).map_err(|said| Usage(format!("--filter {key}: {said}")))?;
                time.to_rfc3339().into()
            }
            _ => value.into(),
        };
        if fields.insert(key.to_owned(), value).is_some() {
            return Err(Usage(format!("--filter {key} is given twice")).into());
        }
    }
    // The numbers among them name no field when they are refused.
    let mut keys = fields.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    if fields.len() > 1 {
        keys = format!("one of {keys}");
    }
    serde_json::from_value(fields.into()).map_err(|error| {
        Usage(format!("--filter: {} ({keys})", plain::reason("", &error.to_string()))).into()
    })
}

pub(super) async fn retry(
    app: &App,
    config: &Config,
    store: &Store,
    output: &Output,
    space: &Space,
    args: RetryArgs,
) -> anyhow::Result<Exit> {
    let plain = args.prove.is_none() && args.canary.is_none() && args.stop_share.is_none();
    if let Some(id) = args.bulk.lone().filter(|_| plain) {
        return steer(store, output, id, Steer::Retry, args.bulk.reason.clone()).await;
    }
    let model = match &args.model {
        Some(id) => {
            app.models(config)?.get(id).map_err(|fault| Usage(format!("--model: {fault}")))?;
            let context_window = i32::try_from(config.context_window(id)).unwrap_or(i32::MAX);
            Some(Model { id: id.clone(), context_window })
        }
        None => None,
    };
    let (yes, no_wait) = (args.bulk.how.yes, args.bulk.how.no_wait);
    let input = Input {
        prove: args.prove,
        model: args.model,
        canary: args.canary,
        stop_share: args.stop_share,
        ..args.bulk.input(space, Verb::Retry)?
    };
    make(store, output, input, model, yes, no_wait).await
}

pub(super) async fn bulk(
    store: &Store,
    output: &Output,
    space: &Space,
    verb: Verb,
    args: Args,
) -> anyhow::Result<Exit> {
    if let Some(id) = args.lone() {
        let reason = args.reason.clone();
        return match verb {
            Verb::Retry => steer(store, output, id, Steer::Retry, reason).await,
            Verb::Cancel => steer(store, output, id, Steer::Cancel, reason).await,
            Verb::Archive => steer(store, output, id, Steer::Archive, reason).await,
            Verb::Wake => wake::wake(store, output, id).await,
            // Its members are effects: `wakeful effect resolve`.
            Verb::Resolve => Err(Usage("a session has no such batch".to_owned()).into()),
        };
    }
    let (yes, no_wait) = (args.how.yes, args.how.no_wait);
    make(store, output, args.input(space, verb)?, None, yes, no_wait).await
}

async fn make(
    store: &Store,
    output: &Output,
    input: Input,
    model: Option<Model>,
    yes: bool,
    no_wait: bool,
) -> anyhow::Result<Exit> {
    let filter = match &input.filter {
        Some(search) => search.filter(store).await.map_err(usage)?,
        None => SessionFilter::default(),
    };
    let new = input.batch(None, filter, model).map_err(usage)?;
    if input.dry_run {
        let preview = store.preview_batch(&new).await?;
        output.one(&preview, || {
            let table = output.aligned(&list_table(&preview.sample, None), 2);
            format!("{}{table}", said(&preview))
        })?;
        return Ok(Exit::Ok);
    }
    if !yes {
        let preview = store.preview_batch(&new).await?;
        eprint!("{}", said(&preview));
        if !asked(&format!("Go on and {} them?", new.verb.as_str()))? {
            return Ok(Exit::Failed);
        }
    }
    let goes_on = if yes { GoesOn::IfAllPass } else { GoesOn::IfToldTo };
    run(store, output, &new, goes_on, no_wait).await
}

/// Makes a batch, and follows it to its end.
pub(in crate::command) async fn run(
    store: &Store,
    output: &Output,
    new: &NewBatch,
    goes_on: GoesOn,
    no_wait: bool,
) -> anyhow::Result<Exit> {
    let (batch, _) = store.create_batch(new).await?;
    if no_wait {
        output.one(&batch, || text_of(&batch))?;
        return Ok(Exit::Ok);
    }
    eprintln!(
        "{}: workers carry it out. Ctrl-C leaves it to them; `wakeful batch show {}` shows it",
        printable(&batch.batch_id),
        printable(&batch.batch_id)
    );
    finish(store, output, &batch.batch_id, goes_on).await
}

/// Asks the person at the terminal.
pub(in crate::command) fn asked(question: &str) -> anyhow::Result<bool> {
    if !std::io::stdin().is_terminal() {
        return Err(Usage(
            "this is not a terminal, so it cannot ask: say --yes, or --dry-run to see what would be done"
                .to_owned(),
        )
        .into());
    }
    eprint!("{question} [y/N] ");
    std::io::stderr().flush()?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(matches!(line.trim(), "y" | "Y" | "yes"))
}

fn said(preview: &Preview) -> String {
    let list = |counts: &std::collections::BTreeMap<String, i64>| {
        counts.iter().map(|(status, count)| format!("{count} {status}")).collect::<Vec<_>>().join(", ")
    };
    let mut text = format!("{} would be taken", count(preview.members, "session"));
    if !preview.by_status.is_empty() {
        text.push_str(&format!(" ({})", list(&preview.by_status)));
    }
    if !preview.skipped.is_empty() {
        text.push_str(&format!("; left out: {}", list(&preview.skipped)));
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_made_of_keys_and_values() {
        let pairs = |pairs: &[&str]| search(&pairs.iter().map(|&pair| pair.to_owned()).collect::<Vec<_>>());
        let search = pairs(&["status=failed", "text=a=b", "steps_over=3", "since=2026-11-23"]).unwrap();
        assert_eq!((search.status.as_deref(), search.text.as_deref()), (Some("failed"), Some("a=b")));
        assert_eq!(
            (search.steps_over, search.since.map(|at| at.timestamp())),
            (Some(3), Some(1_795_392_000))
        );
        for wrong in [&["status"][..], &["colour=red"], &["status=a", "status=b"], &["steps_over=x"]] {
            assert!(pairs(wrong).is_err(), "{wrong:?}");
        }
    }
}
