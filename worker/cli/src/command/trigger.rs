//! `wakeful trigger`: what comes in from elsewhere, sent by hand to a running server, through the doors that everybody uses.

use super::output::{Output, OutputArgs, printable};
use super::printable::printable_lines;
use super::{Exit, Usage};
use crate::client::{Client, Failed, Rested, Taken, Trigger, Via};
use anyhow::Context as _;
use secrecy::{ExposeSecret, SecretString};
use serde_json::json;
use std::io::{IsTerminal, Read};
use std::path::PathBuf;
use wakeful_config::Config;

/// More is no trigger.
const INPUT_BYTES: u64 = 64 << 20;

/// What `--help` says of how it ends.
const EXITS: &str = "\
Exit status:
  0  taken, or taken before; with --wait, and the session rests or asks something
  1  the server failed; with --wait, or the session did
  2  what is given here is wrong, or the server says so (400, 413, 415)
  3  there is no such schedule, or that door is not set up (404)
  4  it does not go with what is there: a key that another message has, a session that takes none (409, 422)
  5  the token or the signature is not the server's (401, 403)
  6  the server is not reached, or takes no more just now (429, 502 to 504): nothing was taken, send it again";

#[derive(Debug, clap::Args)]
#[command(after_help = EXITS)]
pub(super) struct Args {
    #[command(flatten)]
    output: OutputArgs,
    /// The server; without it the one on [server] listen.
    #[arg(long, value_name = "URL", env = "WAKEFUL_URL", hide_env_values = true, global = true)]
    url: Option<String>,
    /// A file with the server's token; without it WAKEFUL_TOKEN or [server] token.
    #[arg(long, value_name = "FILE", global = true)]
    token_file: Option<PathBuf>,
    /// Wait until the session that it woke rests, and print what it said. Not with Slack or Telegram, which are told of no
    /// session.
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
        text: String,
        #[arg(long, value_name = "ID", default_value = "trigger")]
        conversation: String,
        #[arg(long, value_name = "ID")]
        user: Option<String>,
        /// The agent, where the conversation is new.
        #[arg(long, value_name = "NAME")]
        agent: Option<String>,
        /// An idempotency key: the same message again under it is not taken twice.
        #[arg(long, value_name = "KEY")]
        client_key: Option<String>,
    },
    /// A schedule's firing, now.
    Cron { schedule: String },
    /// A messenger's message, signed as the messenger signs it: its own JSON, or a text, in a file or from - (stdin).
    Message {
        file: PathBuf,
        #[arg(long, value_enum, default_value = "webhook")]
        via: Via,
        /// A file with the secret that it is signed with; without it WAKEFUL_TRIGGER_SECRET, then the
        /// configuration's own.
        #[arg(long, value_name = "FILE")]
        secret_file: Option<PathBuf>,
        /// Of a text: where it is said. For Telegram a number.
        #[arg(long, value_name = "ID", default_value = "trigger")]
        conversation: String,
        /// Of a text: who says it.
        #[arg(long, value_name = "ID", default_value = "you")]
        user: String,
        /// The sender's id of the message: the same one again is a duplicate. Without it, a new one.
        #[arg(long, value_name = "ID")]
        id: Option<String>,
    },
    /// A notice of another system: JSON with a `notice` of `title` and `body`, in a file or from - (stdin).
    Herald { file: PathBuf },
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let client = client(&config, &args)?;
    if let Verb::Message { via: via @ (Via::Slack | Via::Telegram), .. } = &args.verb
        && args.wait
    {
        let name = if *via == Via::Slack { "slack" } else { "telegram" };
        let text = format!(
            "--wait does not go with --via {name}: the server names no session there; `wakeful session list --trigger message` \
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
        Err(failed) => return Ok(told(&failed, proof)),
    };
    let sessions = taken.sessions();
    if !args.wait {
        output.one(&taken.body, || said(&taken, &sessions))?;
        return Ok(Exit::Ok);
    }
    if sessions.is_empty() {
        eprintln!(
            "wakeful: it was taken ({}), and the server does not name a session: `wakeful session list` shows what it woke",
            taken.status
        );
        return Ok(Exit::Failed);
    }
    let mut rested = Vec::new();
    for session_id in &sessions {
        match client.rest(session_id).await {
            Ok(one) => rested.push(one),
            Err(failed) => return Ok(told(&failed, Proof::Token)),
        }
    }
    for one in rested.iter().filter(|one| !one.silenced.is_empty()) {
        eprintln!(
            "wakeful: what session {} says is not sent: {}; `wakeful session why` says what to do",
            printable(&one.session_id),
            printable(&one.silenced.join("; "))
        );
    }
    let body = json!({"answer": taken.body, "sessions": rested});
    output.one(&body, || rested.iter().map(|one| format!("{}\n", printable_lines(&one.reply))).collect())?;
    Ok(rested.iter().map(exit_of).max_by_key(|exit| *exit as u8).unwrap_or(Exit::Ok))
}

fn client(config: &Config, args: &Args) -> anyhow::Result<Client> {
    let url = args.url.clone().unwrap_or_else(|| format!("http://{}", config.server.listen));
    let token = match &args.token_file {
        Some(file) => Some(secret_in(file)?),
        None => config.server.token.clone(),
    };
    let client = Client::new(&url, token)?;
    Ok(client.ok_or_else(|| Usage(format!("--url {url:?} is no address such as http://127.0.0.1:7070")))?)
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
                    Usage(format!("{} is no JSON ({error}); {wants}", file.display()))
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

/// Never an argument: those are seen by everybody on the machine.
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

/// A file, or stdin for `-`.
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
    let before = if taken.is_duplicate() { " (it was taken before)" } else { "" };
    match sessions {
        [] => match taken.body["items"]
            .as_array()
            .into_iter()
            .flatten()
            .find_map(|item| item["dropped"].as_str())
        {
            Some(why) => format!("taken, and kept from the agents: {}\n", printable(why)),
            None => format!("taken: {}{before}\n", taken.status),
        },
        sessions => sessions.iter().map(|id| format!("{}{before}\n", printable(id))).collect(),
    }
}

/// By what a request proves that it may come in.
#[derive(Clone, Copy)]
enum Proof {
    Token,
    Signature,
}

/// Says why there is no answer, and what to do.
fn told(failed: &Failed, proof: Proof) -> Exit {
    let (exit, remedy) = match failed {
        Failed::Unreachable { .. } => (
            Exit::Unavailable,
            "is it running? --url or WAKEFUL_URL names another server; without them it is the one on [server] listen",
        ),
        Failed::Refused { status, .. } => match (status.as_u16(), proof) {
            (400 | 413 | 415, _) => (Exit::Usage, ""),
            (401 | 403, Proof::Token) => {
                (Exit::Auth, "give the server's token with WAKEFUL_TOKEN or --token-file")
            }
            (401 | 403, Proof::Signature) => (
                Exit::Auth,
                "sign with the secret that the server has, by --secret-file or WAKEFUL_TRIGGER_SECRET, on a machine whose clock \
                 is right",
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
