//! `wakeful absurd`: brings tasks of Absurd over, proves it, and takes it back.

mod back;
mod import;
mod progress;
mod scan;
mod show;
mod take;
mod verify;

use super::output::{Output, count, printable};
use super::{Exit, Usage, database_url};
use crate::App;
use anyhow::Context as _;
use std::collections::BTreeMap;
use wakeful_config::Config;
use wakeful_config::absurd::TaskSettings;
use wakeful_engine::new_session;
use wakeful_store::absurd::{May, Source};
use wakeful_store::wake::{Continues, NewSession};
use wakeful_store::{Error, Store};
use wakeful_workflow::absurd::TRIGGER_PREFIX;
use wakeful_workflow::absurd::shape::Shape;
use wakeful_workflow::id::{DEFAULT_SPACE, stored_conversation_id};
use wakeful_workflow::policy::SessionPolicy;

const EXITS: &str = "\
Exit status:
  0  all is well
  1  some tasks could not come (import), or are held (back, take): the report names them
  3  there is no such task, or no schema `absurd` in that database
  8  a session differs from its task (verify)

docs/leaving-absurd.md has the plan of a weekend.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXITS)]
pub(super) struct Args {
    #[command(flatten)]
    output: super::output::OutputArgs,
    /// Absurd's database.
    #[arg(long, value_name = "URL", env = "ABSURD_DATABASE_URL", hide_env_values = true, global = true)]
    from: Option<String>,
    /// Only this queue. Default: all of them.
    #[arg(long, value_name = "QUEUE", global = true)]
    queue: Option<String>,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Look at Absurd's queues and tasks: what can come, what cannot, and why. Writes nothing.
    Scan(scan::Args),
    /// Show one task: its transcript as Wakeful would have it, beside its raw checkpoints. Writes nothing.
    Show(show::Args),
    /// Import tasks that are over: each becomes a session. Sends and runs nothing. Run it again, and it goes on where it
    /// stopped.
    Import(import::Args),
    /// Take over the tasks of one name that still have something to do: park them in Absurd, and go on with them here.
    Take(take::Args),
    /// Give back to Absurd what was taken and has not run here.
    Back(back::Args),
    /// Compare imported sessions with the checkpoints of their tasks.
    Verify(verify::Args),
}

/// What every verb needs.
struct Desk<'a> {
    app: &'a App,
    config: &'a Config,
    output: Output,
    url: String,
    queue: Option<String>,
}

pub(super) async fn run(app: &App, config: Config, args: Args) -> anyhow::Result<Exit> {
    let output = Output::new(&args.output);
    let url =
        args.from.ok_or_else(|| Usage("which database? --from URL, or ABSURD_DATABASE_URL".to_owned()))?;
    let desk = Desk { app, config: &config, output, url, queue: args.queue };
    match args.verb {
        Verb::Scan(args) => scan::scan(&desk, &args).await,
        Verb::Show(args) => show::show(&desk, &args).await,
        Verb::Import(args) => import::import(&desk, &args).await,
        Verb::Take(args) => take::take(&desk, &args).await,
        Verb::Back(args) => back::back(&desk, &args).await,
        Verb::Verify(args) => verify::verify(&desk, &args).await,
    }
}

impl Desk<'_> {
    async fn source(&self, may: May) -> anyhow::Result<Source> {
        let address = wakeful_store::diagnosis::address(&self.url).unwrap_or_default();
        let address = printable(&address);
        let source = Source::open(&self.url, "wakeful absurd", may).await;
        let is_another = matches!(source, Err(Error::NotFound { what: "schema", .. }));
        source.with_context(|| {
            if is_another {
                format!("{address} is not Absurd's database: --from (or ABSURD_DATABASE_URL) names it")
            } else {
                format!("Absurd's database {address}")
            }
        })
    }

    /// The store, with room for `parallel` imports.
    async fn store(&self, parallel: usize) -> anyhow::Result<Store> {
        let url = database_url(self.config)?;
        wakeful_store::diagnosis::reach(&url, super::CONNECT)
            .await
            .with_context(|| wakeful_store::diagnosis::address(&url).unwrap_or_default())?;
        let connections = u32::try_from(parallel).unwrap_or(u32::MAX).saturating_add(2);
        let store = Store::connect(&url, connections, "wakeful absurd").await?;
        wakeful_engine::encryption::turn_on(self.config, &store)?;
        store.check_schema().await?;
        Ok(store)
    }

    /// Names of the queues to look at.
    async fn queues(&self, source: &mut Source) -> anyhow::Result<Vec<String>> {
        let all: Vec<String> = source.queues().await?.into_iter().map(|queue| queue.name).collect();
        match &self.queue {
            None => Ok(all),
            Some(name) if all.contains(name) => Ok(vec![name.clone()]),
            Some(name) => Err(Usage(format!("no queue {name:?}; there are: {}", all.join(", "))).into()),
        }
    }

    /// The one queue of a verb that works on one.
    async fn one_queue(&self, source: &mut Source) -> anyhow::Result<String> {
        let mut queues = self.queues(source).await?;
        match (queues.len(), queues.pop()) {
            (1, Some(queue)) => Ok(queue),
            (0, _) => Err(Usage("there is no queue".to_owned()).into()),
            (_, _) => Err(Usage("which queue? --queue NAME".to_owned()).into()),
        }
    }

    /// The session that a task becomes.
    fn new_session(
        &self,
        task: &Told,
        task_id: &str,
        conversation: Option<&str>,
        queue: &str,
    ) -> anyhow::Result<NewSession> {
        let own = format!("absurd-{task_id}");
        let conversation_id = conversation.and_then(|id| stored_conversation_id(id).ok());
        let conversation_id = match conversation_id {
            Some(id) => id,
            None => stored_conversation_id(&own).map_err(|problem| Usage(problem.to_string()))?,
        };
        let trigger = new_session::Trigger {
            mailbox_id: "default".to_owned(),
            trigger_type: "absurd",
            trigger_id: task_id.to_owned(),
            continues: Continues::Trigger,
            policy: SessionPolicy::default(),
            thread: Vec::new(),
        };
        let agent = task.settings.agent.as_deref();
        let new = new_session::of_trigger(
            self.config,
            &self.app.registry(self.config)?,
            conversation_id,
            agent,
            trigger,
        )
        .map_err(|cannot| Usage(cannot.to_string()))?;
        Ok(NewSession { trigger_type: format!("{TRIGGER_PREFIX}{queue}"), ..new })
    }

    fn space(&self) -> &'static str {
        DEFAULT_SPACE
    }
}

/// What is known of the tasks of one name.
struct Told {
    settings: TaskSettings,
    shape: Option<Shape>,
}

/// Shapes by task name, each told once.
struct Shapes<'a> {
    desk: &'a Desk<'a>,
    queue: String,
    told: BTreeMap<String, Told>,
}

impl<'a> Shapes<'a> {
    fn new(desk: &'a Desk<'a>, queue: &str) -> Shapes<'a> {
        Shapes { desk, queue: queue.to_owned(), told: BTreeMap::new() }
    }

    async fn tell(&mut self, source: &mut Source, name: &str) -> anyhow::Result<()> {
        if !self.told.contains_key(name) {
            let settings = self.desk.config.absurd.task(name);
            let shape = match &settings.shape {
                Some(shape) => Some(shape.clone()),
                None => source.tell(&self.queue, name).await?,
            };
            self.told.insert(name.to_owned(), Told { settings, shape });
        }
        Ok(())
    }

    fn of(&self, name: &str) -> Option<&Told> {
        self.told.get(name)
    }
}

/// Reasons, with how many tasks have each and the first of them.
#[derive(Debug, Default, serde::Serialize)]
struct Reasons(BTreeMap<String, Tasks>);

#[derive(Debug, Default, serde::Serialize)]
struct Tasks {
    tasks: i64,
    first: Vec<String>,
}

impl Reasons {
    fn add(&mut self, why: &str, task_id: &str) {
        let tasks = self.0.entry(why.to_owned()).or_default();
        tasks.tasks += 1;
        if tasks.first.len() < 3 {
            tasks.first.push(task_id.to_owned());
        }
    }

    fn tasks(&self) -> i64 {
        self.0.values().map(|tasks| tasks.tasks).sum()
    }

    fn text(&self, output: &Output) -> String {
        let line = |(why, tasks): (&String, &Tasks)| {
            let text = format!("{}: {why} ({})", count(tasks.tasks, "task"), tasks.first.join(", "));
            output.block(&text, 2)
        };
        self.0.iter().map(line).collect()
    }
}
