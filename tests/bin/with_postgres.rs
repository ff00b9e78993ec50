//! Runs a command with a Postgres server that lasts as long as the command does:
//! `cargo run --bin with_postgres -- cargo test --workspace`.
//!
//! All tests share this one server. A test runner may run every test in its own process, and one server per
//! process would be slow.
use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    let command: Vec<_> = std::env::args_os().skip(1).collect();
    match wakeful::internal::dev::exec(&command).await {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(error) => {
            eprintln!("with_postgres: {error:#}");
            ExitCode::FAILURE
        }
    }
}
