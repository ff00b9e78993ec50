//! `wakeful session`: shows and controls sessions. Works on the database and needs no server.

mod approve;
pub(in crate::command) mod bulk;
mod context;
mod diff;
mod effects;
mod export;
mod files;
mod fork;
mod import;
mod job;
pub(in crate::command) mod list;
mod new;
mod prefix;
mod progress;
mod recover;
mod resolve;
pub(in crate::command) mod show;
mod tail;
mod tree;
mod unheard;
mod verify;
mod wake;
pub(in crate::command) mod why;

use super::output::{Output, count, dollars, printable};
use super::space::Space;
use super::{Exit, Usage};
use crate::App;
use serde_json::json;
use wakeful_config::Config;
use wakeful_http::problem::valid_verbs;
use wakeful_store::batch::Verb as Bulk;
use wakeful_store::session::SessionSummary;
use wakeful_store::wake::NewMessage;
use wakeful_store::{Error, Store};
use wakeful_workflow::resolve::Resolution;
use wakeful_workflow::session::SessionStatus;

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// List sessions, newest first.
    List(Box<list::Args>),
    /// Show a session: its messages, steps, tool calls and deliveries.
    Show {
        /// The session's id.
        id: String,
        /// Show long messages whole.
        #[arg(long)]
        full: bool,
    },
    /// Print a session's journal.
    Tail {
        /// The session's id.
        id: String,
        /// Keep printing new entries as they are written.
        #[arg(long, short)]
        follow: bool,
        /// Begin after this entry. Default: the last 50 entries.
        #[arg(long, value_name = "SEQ")]
        after: Option<i64>,
    },
    /// Send a session a message: it answers an open question, joins the open run, or starts a new run.
    Send {
        /// The session's id.
        id: String,
        /// The message.
        text: String,
        /// An idempotency key: a message repeated with the same key is not accepted twice.
        #[arg(long, value_name = "KEY")]
        client_key: Option<String>,
    },
    /// Start a new session in a conversation. The conversation's next message goes to the new session. The
    /// old session stays as it is.
    New(new::Args),
    /// Continue a failed run, or one that needs attention, from its last commit.
    Retry(bulk::RetryArgs),
    /// End the open run.
    Cancel(bulk::Args),
    /// Say what happened to an uncertain tool call or delivery.
    Resolve(resolve::Args),
    /// Let a tool call run that waits for approval.
    Approve(approve::Args),
    /// Close a tool call that waits for approval without running it. The model is told so and goes on.
    Decline(approve::Args),
    /// Make a new session from the messages of this one up to a cut, and let it continue from there.
    Fork(fork::Args),
    /// Show the tree of forks that a session belongs to.
    Tree {
        /// The session's id.
        id: String,
    },
    /// Archive a session that rests: it accepts no messages and never runs again.
    Archive(bulk::Args),
    /// End a session that rests, permanently.
    Terminate {
        /// The session's id.
        id: String,
        /// The reason, for the journal.
        #[arg(long)]
        reason: Option<String>,
    },
    /// Write a session to a file (a bundle), to read or replay it elsewhere.
    Export(export::Args),
    /// Import a bundle as a new session of a new conversation. Starts no run.
    Import(import::Args),
    /// List a session's files, as they are now or were after a message.
    Files(files::FilesArgs),
    /// Write a session's files into a new folder.
    Checkout(files::CheckoutArgs),
    /// Heal a session, so that it continues with its open work.
    Wake(bulk::Args),
    /// Explain why a session is in its current state, and what to do about it.
    Why {
        /// The session's id.
        id: String,
    },
    /// Compare two sessions: their tool calls, their states and their texts. Exit status 8 when they differ.
    Diff(diff::Args),
    /// Show what the model would see now, and what each context strategy would weigh.
    Context(context::Args),
    /// Recover a session's state from its journal alone: from the newest checkpoint and the entries after it.
    Recover(recover::Args),
    /// Compare a session's caches with its logs. Exit status 8 when they differ.
    Verify(verify::Args),
}

pub(super) async fn run(app: &App, config: Config, args: Args) -> anyhow::Result<Exit> {
    let space = args.space;
    if let Verb::Recover(recover::Args { journal: Some(file), .. }) = &args.verb {
        // A file needs no database.
        let ran = recover::from_file(&Output::new(&args.output), file).await;
        return super::output::until_reader_goes(ran);
    }
    let limits = config.server.import_limits();
    if let Verb::Import(import) = &args.verb
        && import.verify_only
    {
        let ran = import::verify(&Output::new(&args.output), import, limits).await;
        return super::output::until_reader_goes(ran);
    }
    if let Verb::Export(export) = &args.verb
        && let Some(server) = export.from()
    {
        let ran = export::from_server(&Output::new(&args.output), export, server, &space).await;
        return super::output::until_reader_goes(ran);
    }
    let store = super::open_store(&config, "wakeful session").await?;
    let output = Output::new(&args.output);
    let ran = perform(app, &config, &store, &output, &space, args.verb).await;
    store.close().await;
    super::output::until_reader_goes(ran)
}

async fn perform(
    app: &App,
    config: &Config,
    store: &Store,
    output: &Output,
    space: &Space,
    mut verb: Verb,
) -> anyhow::Result<Exit> {
    prefix::complete(store, space, &mut verb).await?;
    let ids: Vec<String> = verb.sessions().into_iter().map(|id| id.clone()).collect();
    space.has(store, &ids.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    match verb {
        Verb::List(args) => list::list(store, config, output, space, *args).await,
        Verb::Show { id, full } => show::show(store, output, &id, full).await,
        Verb::Tail { id, follow, after } => tail::tail(store, output, &id, follow, after).await,
        Verb::New(args) => new::new(app, config, store, output, space, args).await,
        Verb::Send { id, text, client_key } => send(store, output, &id, text, client_key).await,
        Verb::Retry(args) => bulk::retry(app, config, store, output, space, args).await,
        Verb::Cancel(args) => bulk::bulk(store, output, space, Bulk::Cancel, args).await,
        Verb::Archive(args) => bulk::bulk(store, output, space, Bulk::Archive, args).await,
        Verb::Terminate { id, reason } => steer(store, output, &id, Steer::Terminate, reason).await,
        Verb::Resolve(args) => resolve::resolve(store, output, args).await,
        Verb::Approve(args) => approve::decide(store, output, args, Resolution::Approved).await,
        Verb::Decline(args) => approve::decide(store, output, args, Resolution::Declined).await,
        Verb::Fork(args) => fork::fork(store, app, config, output, args).await,
        Verb::Tree { id } => tree::tree(store, output, &id).await,
        Verb::Export(args) => export::from_database(store, output, &args).await,
        Verb::Import(args) => {
            import::into_database(store, output, space.of_names(), &args, config.server.import_limits()).await
        }
        Verb::Files(args) => files::files(store, config, output, args).await,
        Verb::Checkout(args) => files::check_out(store, config, output, args).await,
        Verb::Wake(args) => bulk::bulk(store, output, space, Bulk::Wake, args).await,
        Verb::Why { id } => why::why(store, config, output, &id).await,
        Verb::Diff(args) => diff::diff(store, config, output, args).await,
        Verb::Context(args) => context::context(app, store, config, output, args).await,
        Verb::Recover(args) => recover::from_database(store, output, args).await,
        Verb::Verify(args) => verify::verify(store, output, space, args).await,
    }
}

async fn send(
    store: &Store,
    output: &Output,
    id: &str,
    text: String,
    client_key: Option<String>,
) -> anyhow::Result<Exit> {
    if text.trim().is_empty() {
        return Err(Usage("the message is empty".to_owned()).into());
    }
    if text.len() > wakeful_http::body::BODY_LIMIT_BYTES {
        return Err(Usage(format!(
            "the message is larger than {} bytes",
            wakeful_http::body::BODY_LIMIT_BYTES
        ))
        .into());
    }
    if client_key
        .as_ref()
        .is_some_and(|key| key.is_empty() || key.len() > 256 || key.chars().any(char::is_control))
    {
        return Err(Usage("--client-key has 1 to 256 bytes and no control characters".to_owned()).into());
    }
    let message = NewMessage {
        client_key,
        text,
        sender: None,
        trace_context: wakeful_engine::telemetry::trace_context(),
        attachments: Vec::new(),
    };
    let woken = match store.send(id, &message).await {
        Err(Error::Conflict { session_id, status, .. }) => {
            return not_now(store, &session_id, status, "send").await;
        }
        sent => sent?,
    };
    store.announce(id).await?;
    let did = match (woken.duplicate, woken.outcome) {
        (true, _) => "accepted before",
        (false, wakeful_workflow::inbox::Acceptance::Queued) => "queued for the next step boundary",
        (false, wakeful_workflow::inbox::Acceptance::Delivered) => "delivered as the answer",
        (false, wakeful_workflow::inbox::Acceptance::NewRun) => "a new run begins",
    };
    output.one(&woken, || {
        format!("{}: {did} ({})\n", printable(&woken.session_id), printable(&woken.run_id))
    })?;
    Ok(Exit::Ok)
}

#[derive(Clone, Copy)]
enum Steer {
    Retry,
    Cancel,
    Archive,
    Terminate,
}

async fn steer(
    store: &Store,
    output: &Output,
    id: &str,
    what: Steer,
    reason: Option<String>,
) -> anyhow::Result<Exit> {
    let reason = reason.as_deref();
    let (steered, did) = match what {
        Steer::Retry => (store.retry(id, reason).await.map(Some), "goes on from its last commit"),
        Steer::Cancel => (store.cancel(id, reason).await.map(Some), "is asked to end"),
        Steer::Archive => (store.archive(id, reason).await.map(|()| None), "is archived"),
        Steer::Terminate => (store.terminate(id, reason).await.map(|()| None), "is terminated"),
    };
    let run_id = match steered {
        Err(Error::Conflict { session_id, status, wanted }) => {
            return not_now(store, &session_id, status, wanted).await;
        }
        steered => steered?,
    };
    store.announce(id).await?;
    output.one(&json!({"session_id": id, "run_id": run_id}), || match &run_id {
        Some(run_id) => format!("{}: {} {did}\n", printable(id), printable(run_id)),
        None => format!("{} {did}\n", printable(id)),
    })?;
    Ok(Exit::Ok)
}

/// Reports a conflict, and which commands are possible instead. An archived or terminated session never runs again, so its
/// conversation goes on in a new one.
async fn not_now(
    store: &Store,
    session_id: &str,
    status: SessionStatus,
    wanted: &str,
) -> anyhow::Result<Exit> {
    let possible: Vec<&str> = valid_verbs(status)
        .iter()
        // The API's word for `session send`.
        .map(|verb| if *verb == "messages" { "send" } else { verb })
        .collect();
    let mut ways = Vec::new();
    if !possible.is_empty() {
        ways.push(format!("possible: {}", possible.join(", ")));
    }
    if matches!(status, SessionStatus::Archived | SessionStatus::Terminated) {
        let session = store.session(None, session_id).await?;
        let space = match session.space_id.as_str() {
            "default" => String::new(),
            space => format!(" --space {}", printable(space)),
        };
        ways.push(format!(
            "to go on in its conversation: wakeful session new {}{space}",
            effects::quoted(&printable(&session.conversation_id))
        ));
    }
    eprintln!(
        "wakeful: session {} is {}: {wanted} is not possible now; {}",
        printable(session_id),
        status.as_str(),
        ways.join("; ")
    );
    Ok(Exit::Conflict)
}

/// Formats token counts and cost for headers: `12 in (4 cached), 3 out, $0.0010`.
fn tokens(session: &SessionSummary) -> String {
    format!(
        "{} in ({} cached), {} out, {}",
        session.total_input_tokens,
        session.total_cached_tokens,
        session.total_output_tokens,
        dollars(session.total_cost_micros)
    )
}
