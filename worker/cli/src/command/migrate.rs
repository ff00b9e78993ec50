//! `wakeful migrate`: brings the database's schema up to this binary's.

use super::Exit;
use wakeful_config::Config;
use wakeful_store::{Store, schema};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,
    /// Change nothing; say which binaries the schema serves, and exit with status 6 when this one is not among them.
    #[arg(long)]
    check: bool,
    /// Migrate although live workers are older than the new schema's oldest binary. They fail then.
    #[arg(long)]
    leave_behind: bool,
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
        println!("{}", store.check_schema().await?.said());
        let number = schema::number();
        let workers = store.workers().await?;
        let alive = workers.iter().filter(|worker| worker.is_fresh(config.queue.silent_after_s()));
        let older = alive.filter(|worker| worker.schema_number.unwrap_or(0) < number).count();
        if older > 0 {
            println!("{older} live workers are older than this binary, and go on beside it");
        }
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
                .migrate_and(args.leave_behind, |migration| {
                    eprintln!("applied {} {}", migration.version, migration.description)
                })
                .await?;
            println!("{applied} migrations applied");
        }
    }
    Ok(Exit::Ok)
}
