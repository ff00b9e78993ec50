//! `wakeful trigger`: sends a running server an event as an outside sender would, through its public HTTP
//! interface.

use super::output::{Output, OutputArgs, printable};
use super::printable::printable_lines;
use super::space::Space;
use super::{Exit, Usage};
use crate::client::{Client, Failed, Rested, Taken, Trigger, Via, address};
use anyhow::Context as _;
use secrecy::{ExposeSecret, SecretString};
use serde_json::json;
use std::io::{IsTerminal, Read};
use std::path::PathBuf;
use wakeful_config::Config;

/// Largest input accepted.
const INPUT_BYTES: u64 = 64 << 20;

/// The exit statuses, for `--help`.
const EXITS: &str = "\
Exit status:
  0  accepted, now or before; with --wait, and the session rests or asks something
  1  the server failed; with --wait, or the session failed
  2  the input is wrong, here or according to the server (400, 413, 415)
  3  there is no such schedule, or that trigger is not set up (404)
  4  a conflict: the key belongs to another message, or the session accepts no messages (409, 422)
  5  the server does not accept the token or the signature (401, 403)
  6  the server is unreachable or too busy (429, 502 to 504): nothing was accepted, send it again";

#[derive(Debug, clap::Args)]
#[command(after_help = EXITS)]
pub(super) struct Args {
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    space: Space,
    /// The server. Default: the one that `wakeful dev` runs, or the one on [server] listen.
    #[arg(long, value_name = "URL", env = "WAKEFUL_URL", hide_env_values = true, global = true)]
    url: Option<String>,
    /// A file with the server's token. Default: WAKEFUL_TOKEN, or [server] token.
    #[arg(long, value_name = "FILE", global = true)]
    token_file: Option<PathBuf>,
    /// Wait until the session that was woken rests, and print its reply. Does not work with Slack and
    /// Telegram, because the server's answer to them names no session.
    #[arg(long, global = true)]
    wait: bool,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// A mail: a file as mail programs save it, or - for stdin.
    Email { file: PathBuf },
    /// A chat message.
    Chat {
        /// The message.
        text: String,
        /// The conversation.
        #[arg(long, value_name = "ID", default_value = "trigger")]
        conversation: String,
        /// The sender.
        #[arg(long, value_name = "ID")]
        user: Option<String>,
        /// The agent, if the conversation is new.
        #[arg(long, value_name = "NAME")]
        agent: Option<String>,
        /// An idempotency key: a message repeated with the same key is not accepted twice.
        #[arg(long, value_name = "KEY")]
        client_key: Option<String>,
    },
    /// Fire a schedule now.
    Cron {
        /// The schedule's name.
        schedule: String,
    },
    /// A messenger's message, signed as the messenger signs it: the messenger's own JSON, or a plain text, in
    /// a file or from - (stdin).
    Message {
        file: PathBuf,
        #[arg(long, value_enum, default_value = "webhook")]
        via: Via,
        /// A file with the secret to sign with. Default: WAKEFUL_TRIGGER_SECRET, then the secret in the
        /// configuration.
        #[arg(long, value_name = "FILE")]
        secret_file: Option<PathBuf>,
        /// For a plain text: the conversation. A number for Telegram.
        #[arg(long, value_name = "ID", default_value = "trigger")]
        conversation: String,
        /// For a plain text: the sender.
        #[arg(long, value_name = "ID", default_value = "you")]
        user: String,
        /// The sender's id of the message; a repeated id is a duplicate. Default: a new id.
        #[arg(long, value_name = "ID")]
        id: Option<String>,
    },
    /// A notice from another system: JSON with a `notice` of `title` and `body`, in a file or from - (stdin).
    Herald { file: PathBuf },
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let client = client(&config, &args)?;
    if let Verb::Message { via: via @ (Via::Slack | Via::Telegram), .. } = &args.verb
        && args.wait
    {
        let name = if *via == Via::Slack { "slack" } else { "telegram" };
        let text = format!(
            "--wait does not work with --via {name}: the server's answer names no session; `wakeful session list --trigger message` \
             shows what it woke"
        );
        return Err(Usage(text).into());
    }
    let now = chrono::Utc::now().timestamp();
    let trigger = trigger(&config, args.verb, now)?;
    let request = trigger.request(now).map_err(|bad| Usage(bad.to_string()))?;
    let proof = if request.signed { Proof::Signature } else { Proof::Token };
    let output = Output::new(&args.output);
    let taken = match client.send(request).await {
        Ok(taken) => taken,
        Err(failed) => return Ok(report_failure(&failed, proof)),
    };
    let sessions = taken.sessions();
    if !args.wait {
        output.one(&taken.body, || said(&taken, &sessions))?;
        return Ok(Exit::Ok);
    }
    if sessions.is_empty() {
        eprintln!(
            "wakeful: it was accepted ({}), but the server's answer names no session: `wakeful session list` shows what it woke",
            taken.status
        );
        return Ok(Exit::Failed);
    }
    let mut rested = Vec::new();
    for session_id in &sessions {
        match client.wait_until_rest(session_id).await {
            Ok(one) => rested.push(one),
            Err(failed) => return Ok(report_failure(&failed, Proof::Token)),
        }
    }
    for one in rested.iter().filter(|one| !one.silenced.is_empty()) {
        eprintln!(
            "wakeful: the replies of session {} are not sent: {}; `wakeful session why` says what to do",
            printable(&one.session_id),
            printable(&one.silenced.join("; "))
        );
    }
    let body = json!({"answer": taken.body, "sessions": rested});
    output.one(&body, || rested.iter().map(|one| format!("{}\n", printable_lines(&one.reply))).collect())?;
    Ok(rested.iter().map(exit_of).max_by_key(|exit| *exit as u8).unwrap_or(Exit::Ok))
}

fn client(config: &Config, args: &Args) -> anyhow::Result<Client> {
    let server = address::server(args.url.as_deref(), config);
    let url = server.map_or_else(|| format!("http://{}", config.server.listen), |server| server.url);
    let token = match &args.token_file {
        Some(file) => Some(secret_in(file)?),
        None => config.server.token.clone(),
    };
    let client = Client::new(&url, token)?;
    let client = client
        .ok_or_else(|| Usage(format!("--url {url:?} is not an address such as http://127.0.0.1:7070")))?;
    Ok(client.in_space(args.space.named()))
}

fn trigger(config: &Config, verb: Verb, now: i64) -> anyhow::Result<Trigger> {
    Ok(match verb {
        Verb::Email { file } => Trigger::Email { raw: input(&file)? },
        Verb::Chat { text, conversation, user, agent, client_key } => {
            Trigger::Chat { conversation_id: conversation, text, user_id: user, agent, client_key }
        }
        Verb::Cron { schedule } => Trigger::Cron { schedule },
        Verb::Herald { file } => {
            let body = input(&file)?;
            serde_json::from_slice::<serde_json::Value>(&body)
                .map_err(|error| {
                    let wants = r#"a notice is {"notice": {"title": "…", "body": "…"}}, and may have a `conversation_id`"#;
                    Usage(format!("{} is not JSON ({error}); {wants}", file.display()))
                })?;
            Trigger::Herald { body }
        }
        Verb::Message { file, via, secret_file, conversation, user, id } => {
            let secret = secret(config, via, secret_file)?;
            let message_id = id.unwrap_or_else(|| wakeful_store::new_id("msg"));
            let body = input(&file)?;
            let body = if via.sends(&body) {
                body
            } else {
                let text = String::from_utf8(body)
                    .map_err(|_| Usage(format!("{}: neither JSON nor a text in UTF-8", file.display())))?;
                via.message(&conversation, &user, text.trim_end(), &message_id, now).to_string().into_bytes()
            };
            Trigger::Message { via, body, secret, message_id }
        }
    })
}

/// Reads the signing secret, never from an argument: every user of the machine can see arguments.
fn secret(config: &Config, via: Via, file: Option<PathBuf>) -> anyhow::Result<SecretString> {
    let set = std::env::var("WAKEFUL_TRIGGER_SECRET").ok().filter(|secret| !secret.trim().is_empty());
    match (file, set) {
        (Some(file), _) => secret_in(&file),
        (None, Some(secret)) => Ok(SecretString::from(secret.trim())),
        (None, None) => {
            let messenger = &config.messenger;
            let configured = match via {
                Via::Slack => messenger.slack.signing_secrets.first(),
                Via::Telegram => messenger.telegram.webhook_secrets.first(),
                Via::Webhook => messenger.webhook.secrets.first(),
            };
            let text = "a message is signed, and the configuration has no secret for it: give one with --secret-file or \
                        WAKEFUL_TRIGGER_SECRET";
            Ok(configured.cloned().ok_or_else(|| Usage(text.to_owned()))?)
        }
    }
}

fn secret_in(file: &PathBuf) -> anyhow::Result<SecretString> {
    let text = std::fs::read_to_string(file).map_err(|error| unreadable(file, &error))?;
    let secret = SecretString::from(text.trim());
    if secret.expose_secret().is_empty() {
        return Err(Usage(format!("{} is empty", file.display())).into());
    }
    Ok(secret)
}

fn unreadable(file: &std::path::Path, error: &std::io::Error) -> Usage {
    Usage(format!("{} cannot be read: {error}", file.display()))
}

/// Reads a file, or stdin for `-`.
fn input(file: &PathBuf) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if file.as_os_str() == "-" {
        if std::io::stdin().is_terminal() {
            eprintln!("wakeful: reading from the terminal; Ctrl-D ends it");
        }
        std::io::stdin().take(INPUT_BYTES + 1).read_to_end(&mut bytes).context("stdin")?;
    } else {
        let opened = std::fs::File::open(file).map_err(|error| unreadable(file, &error))?;
        opened.take(INPUT_BYTES + 1).read_to_end(&mut bytes).map_err(|error| unreadable(file, &error))?;
    }
    if bytes.len() as u64 > INPUT_BYTES {
        return Err(Usage(format!("{} has more than {} MiB", file.display(), INPUT_BYTES >> 20)).into());
    }
    if bytes.is_empty() {
        return Err(Usage(format!("{} is empty", file.display())).into());
    }
    Ok(bytes)
}

fn said(taken: &Taken, sessions: &[String]) -> String {
    let before = if taken.is_duplicate() { " (it was accepted before)" } else { "" };
    match sessions {
        [] => match taken.body["items"]
            .as_array()
            .into_iter()
            .flatten()
            .find_map(|item| item["dropped"].as_str())
        {
            Some(why) => format!("accepted, but kept from the agents: {}\n", printable(why)),
            None => format!("accepted: {}{before}\n", taken.status),
        },
        sessions => sessions.iter().map(|id| format!("{}{before}\n", printable(id))).collect(),
    }
}

/// The way in which a request authenticates itself.
#[derive(Clone, Copy)]
enum Proof {
    Token,
    Signature,
}

/// Prints why the request failed and what to do, and returns the exit status.
fn report_failure(failed: &Failed, proof: Proof) -> Exit {
    let (exit, remedy) = match failed {
        Failed::Unreachable { .. } => (
            Exit::Unavailable,
            "is it running? --url or WAKEFUL_URL names another server; without them it is the one that `wakeful dev` runs, or the one on [server] listen",
        ),
        Failed::Refused { status, .. } => match (status.as_u16(), proof) {
            (400 | 413 | 415, _) => (Exit::Usage, ""),
            (401 | 403, Proof::Token) => {
                (Exit::Auth, "give the server's token with WAKEFUL_TOKEN or --token-file")
            }
            (401 | 403, Proof::Signature) => (
                Exit::Auth,
                "sign with the server's secret (--secret-file or WAKEFUL_TRIGGER_SECRET), on a machine whose clock is right",
            ),
            (404, Proof::Token) => {
                (Exit::NotFound, "`wakeful schedule list` shows the schedules that there are")
            }
            (404, Proof::Signature) => (Exit::NotFound, ""),
            (409 | 422, _) => (Exit::Conflict, ""),
            (429 | 502..=504, _) => (Exit::Unavailable, "send it again in a few seconds"),
            _ => (Exit::Failed, "the server's log says why"),
        },
    };
    eprintln!("wakeful: {}", printable(&failed.to_string()));
    if !remedy.is_empty() {
        eprintln!("wakeful: {remedy}");
    }
    exit
}

fn exit_of(rested: &Rested) -> Exit {
    match rested.status.as_str() {
        "completed" | "waiting_input" => Exit::Ok,
        _ => {
            let why = rested.error.as_deref().unwrap_or("`wakeful session why` says more");
            eprintln!("wakeful: session {} is {}: {}", rested.session_id, rested.status, printable(why));
            Exit::Failed
        }
    }
}
