//! A program that drives a session: it starts one, shows its journal and answers its questions.
//!
//! With `make dev` in another terminal:
//!
//! ```sh
//! export DATABASE_URL="$(target/debug/wakeful dev url)"
//! export WAKEFUL_AGENTS__DEFAULT__MODEL=scripted/demo WAKEFUL_AGENTS__DEFAULT__TOOLS=ask_user
//! cargo run -p wakeful --example session -- "Help me choose a colour."
//! ```
//!
//! Any database works that has the schema (`wakeful migrate`), and any model whose key is set.

use std::io::{BufRead, Write};
use wakeful::App;
use wakeful::session::Pause;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let prompt = std::env::args().nth(1).unwrap_or_else(|| "Hello".to_owned());
    let process = App::new().connect(None, &std::env::var("DATABASE_URL")?).await?;

    // Run workers here too. Without them, a `wakeful serve` on the same database runs the session.
    let workers = tokio::spawn({
        let process = process.clone();
        async move { process.work().await }
    });

    let mut session = process.session();
    session.start(&prompt, None).await?;
    // If this program dies here, `process.attach(ID)` goes on with the session.
    println!("session {}", session.session_id().unwrap_or_default());
    loop {
        match session.consume_until_pause(|entry| println!("{:>4} {}", entry.seq, entry.kind)).await? {
            Pause::WaitingInput { question } => {
                print!("{question} ");
                std::io::stdout().flush()?;
                let mut answer = String::new();
                std::io::stdin().lock().read_line(&mut answer)?;
                session.continue_with(answer.trim()).await?;
            }
            Pause::Completed { result } => break println!("{result}"),
            Pause::Failed { error } => anyhow::bail!(error),
            Pause::Cancelled => break println!("somebody cancelled the run"),
            Pause::NeedsAttention { reason } => anyhow::bail!("an operator has to look: {reason}"),
            _ => anyhow::bail!("the session paused in a way that this program does not know"),
        }
    }
    process.drain();
    workers.await?
}
