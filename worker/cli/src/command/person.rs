//! `wakeful person`: erases what a person left, or holds it. Works on the database and needs no server.

use super::output::Output;
use super::{Exit, erase};
use wakeful_config::Config;
use wakeful_store::erase::Subject;

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// Erase the conversations in which the person wrote, or which began with a mail that named the person. Refused
    /// while one of their sessions is at work, or while a hold stands.
    ///
    /// Needs a user of the database who may take the role wakeful_retention. `wakeful dev` has one. Elsewhere a superuser runs
    /// deploy/roles.sql, and makes a user: `create role wakeful_cleaner login password '…' in role wakeful_runtime, wakeful_retention`.
    Erase {
        /// A mail address, or the user id that chats give.
        who: String,
        /// Also erase conversations in which others wrote.
        #[arg(long)]
        shared: bool,
        #[command(flatten)]
        erase: erase::EraseArgs,
    },
    /// Place a legal hold: nothing that the person takes part in is erased while it stands. `wakeful conversation holds` lists the
    /// holds, and `wakeful conversation release` ends one.
    Hold {
        /// A mail address, or the user id that chats give.
        who: String,
        #[command(flatten)]
        hold: erase::HoldArgs,
    },
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let store = super::open_store(&config, "wakeful person").await?;
    let output = Output::new(&args.output);
    let space = args.space.of_names();
    let ran = match args.verb {
        Verb::Erase { who, shared, erase: args } => {
            erase::erase(&config, &store, &output, space, &Subject::Person { name: who, shared }, &args).await
        }
        Verb::Hold { who, hold } => {
            erase::hold(&store, &output, space, &Subject::Person { name: who, shared: false }, &hold).await
        }
    };
    store.close().await;
    super::output::until_reader_goes(ran)
}
