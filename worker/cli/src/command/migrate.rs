//! `wakeful migrate`.

use super::Exit;
use wakeful_config::Config;
use wakeful_store::Store;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,
    /// Change nothing; exit with status 6 when the schema is not this binary's.
    #[arg(long)]
    check: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// List the migrations and say which are applied.
    Status,
    /// Apply the missing migrations.
    Up,
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let store = Store::connect(&super::database_url(&config)?, 2, "wakeful migrate").await?;
    if args.check {
        store.check_schema().await?;
        println!("the schema is this binary's");
        return Ok(Exit::Ok);
    }
    match args.verb {
        Some(Verb::Status) => {
            for migration in store.migrations().await? {
                let mark = if migration.applied { "applied" } else { "missing" };
                println!("{}  {mark}  {}", migration.version, migration.description);
            }
        }
        Some(Verb::Up) | None => {
            let applied = store
                .migrate(|migration| eprintln!("applied {} {}", migration.version, migration.description))
                .await?;
            println!("{applied} migrations applied");
        }
    }
    Ok(Exit::Ok)
}
