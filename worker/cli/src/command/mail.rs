//! `wakeful mail`: lists the mails that came in, and what became of each. Works on the database and needs no server.

use super::Exit;
use super::output::{Cell, Column, Output, Table, Tone, age, until_reader_goes};
use wakeful_config::Config;
use wakeful_store::mail::MailView;

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// List the mails that came in, the newest first: what each one woke, or why it woke nothing.
    List {
        /// Only mails that woke no session.
        #[arg(long)]
        dropped: bool,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=10_000))]
        limit: i64,
    },
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let store = super::open_store(&config, "wakeful mail").await?;
    let output = Output::new(&args.output);
    let Verb::List { dropped, limit } = args.verb;
    let mails = store.mails(args.space.of_names(), dropped, None, limit).await;
    store.close().await;
    let mails = mails?;
    until_reader_goes(output.items(&mails, || table(&mails)).map(|()| Exit::Ok))
}

fn table(mails: &[MailView]) -> Table {
    let mut table = Table::new(&[
        Column::number("AGE"),
        Column::fixed("MAILBOX").extra(),
        Column::flexible("FROM"),
        Column::flexible("SUBJECT"),
        Column::fixed("WOKE"),
        Column::flexible("WHY NOT"),
    ]);
    for mail in mails {
        let woke = match &mail.session_id {
            Some(session) => Cell::new(session, Tone::Good),
            None => Cell::new("-", Tone::Faint),
        };
        table.row([
            age(mail.received_at).into(),
            mail.mailbox_id.as_str().into(),
            mail.from_address.as_deref().unwrap_or("-").into(),
            mail.subject.as_str().into(),
            woke,
            mail.dropped.as_deref().unwrap_or_default().into(),
        ]);
    }
    table
}
