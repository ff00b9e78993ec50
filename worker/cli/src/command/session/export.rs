//! `wakeful session export`: writes a session into a bundle.

use super::progress::Progress;
use super::{Exit, Output, Space, Usage, printable};
use anyhow::Context as _;
use flate2::Compression;
use flate2::write::GzEncoder;
use futures::StreamExt as _;
use serde_json::json;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;
use wakeful_engine::web::{self, Reach};
use wakeful_store::Store;
use wakeful_store::audit::act;
use wakeful_workflow::bundle::Limits;

#[derive(Debug, clap::Args)]
pub(in crate::command) struct Args {
    /// The session's id.
    pub(super) id: String,
    /// File to write; `-` is stdout. Default: ID.jsonl in this folder, ID.redacted.jsonl with --redact, and .gz at
    /// the end with --gzip. A file that is there already is kept, unless --force is given.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Replace every text by its size and the start of its hash. Such a bundle can be imported, but not
    /// replayed.
    #[arg(long)]
    redact: bool,
    /// Overwrite the file if it is there already.
    #[arg(long)]
    force: bool,
    /// Compress the bundle.
    #[arg(long)]
    gzip: bool,
    /// Export from this server instead of the database. Needs a token: WAKEFUL_INTERNAL_TOKEN, or
    /// WAKEFUL_INTERNAL_TOKEN_FILE with the path of a file.
    #[arg(long, value_name = "URL")]
    server: Option<String>,
}

impl Args {
    /// Returns the server to export from, if one is given.
    pub fn from(&self) -> Option<&str> {
        self.server.as_deref().filter(|server| !server.is_empty())
    }
}

/// The destination of the bundle.
enum Target {
    Stdout,
    /// A temporary file, which gets its name when it is complete.
    File(NamedTempFile, PathBuf),
}

impl Target {
    /// Where the bundle goes, for the audit.
    fn shown(args: &Args) -> String {
        match &args.file {
            Some(file) if file == Path::new("-") => "stdout".to_owned(),
            Some(file) => std::path::absolute(file).unwrap_or_else(|_| file.clone()).display().to_string(),
            None => "a file in the folder of the command".to_owned(),
        }
    }

    fn of(args: &Args) -> anyhow::Result<Target> {
        let named = match &args.file {
            Some(file) if file == Path::new("-") => return Ok(Target::Stdout),
            Some(file) => file.clone(),
            None => {
                if args.id.is_empty()
                    || !args.id.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b))
                {
                    return Err(Usage("this id names no file: give one with --file".to_owned()).into());
                }
                let redacted = if args.redact { ".redacted" } else { "" };
                PathBuf::from(format!("{}{redacted}.jsonl{}", args.id, if args.gzip { ".gz" } else { "" }))
            }
        };
        if !args.force && named.symlink_metadata().is_ok() {
            return Err(there(&named));
        }
        let folder = match named.parent() {
            Some(folder) if folder != Path::new("") => folder,
            Some(_) | None => Path::new("."),
        };
        let file = tempfile::Builder::new().prefix(".wakeful-export-").tempfile_in(folder);
        Ok(Target::File(file.with_context(|| folder.display().to_string())?, named))
    }
}

/// The bundle as far as it is written.
struct Written {
    to: Sink,
    bytes: u64,
    progress: Progress,
}

enum Sink {
    Plain(Box<dyn Write + Send>),
    Packed(GzEncoder<Box<dyn Write + Send>>),
}

impl Written {
    fn new(args: &Args, target: &Target) -> anyhow::Result<Written> {
        let plain: Box<dyn Write + Send> = match target {
            Target::Stdout => Box::new(io::stdout()),
            Target::File(file, _) => Box::new(io::BufWriter::new(file.reopen()?)),
        };
        let to = if args.gzip {
            // The gzip header holds no time, so the same bundle always gives the same bytes.
            Sink::Packed(GzEncoder::new(plain, Compression::default()))
        } else {
            Sink::Plain(plain)
        };
        Ok(Written { to, bytes: 0, progress: Progress::of_bytes("exporting", None) })
    }

    fn push(&mut self, chunk: &[u8]) -> anyhow::Result<()> {
        match &mut self.to {
            Sink::Plain(to) => to.write_all(chunk)?,
            Sink::Packed(to) => to.write_all(chunk)?,
        }
        self.bytes += chunk.len() as u64;
        self.progress.at(self.bytes);
        Ok(())
    }

    /// Writes the buffered rest. Returns the number of uncompressed bytes.
    fn end(self) -> anyhow::Result<u64> {
        match self.to {
            Sink::Plain(mut to) => to.flush()?,
            Sink::Packed(to) => to.finish()?.flush()?,
        }
        self.progress.end();
        Ok(self.bytes)
    }
}

pub(super) async fn from_database(store: &Store, output: &Output, args: &Args) -> anyhow::Result<Exit> {
    let redacted = if args.redact { ", redacted" } else { "" };
    act::because(Some(&format!("to {}{redacted}", Target::shown(args))));
    let mut export = store.export(&args.id, args.redact).await?;
    let target = Target::of(args)?;
    let mut written = Written::new(args, &target)?;
    while let Some(chunk) = export.next().await? {
        written.push(&chunk)?;
    }
    finish(output, args, target, written.end()?)
}

pub(super) async fn from_server(
    output: &Output,
    args: &Args,
    server: &str,
    space: &Space,
) -> anyhow::Result<Exit> {
    let token = token()?;
    let url = url(server, args)?;
    let client = web::client(Reach::Named(&[server])).connect_timeout(super::super::CONNECT).build()?;
    let request = client.get(url).header(wakeful_http::bundle::INTERNAL_TOKEN, token);
    let response = request.header(wakeful_http::access::SPACE, space.of_names()).send().await;
    let response = match response {
        Ok(response) => response,
        Err(error) => {
            let error = format!("{:#}", anyhow::Error::from(error.without_url()));
            eprintln!("wakeful: {}", printable(&error));
            return Ok(Exit::Unavailable);
        }
    };
    if !response.status().is_success() {
        return Ok(refused(&args.id, response).await);
    }
    let target = Target::of(args)?;
    let mut written = Written::new(args, &target)?;
    let mut body = response.bytes_stream();
    while let Some(chunk) = body.next().await {
        let chunk = chunk.map_err(reqwest::Error::without_url).context("the bundle broke off")?;
        written.push(&chunk)?;
    }
    let bytes = written.end()?;
    if let Target::File(file, _) = &target {
        // A bundle from the network may be damaged or cut: run all checks that an import runs, checksum
        // included.
        let limits = Limits { bytes: u64::MAX, ..Limits::default() };
        wakeful_store::import::check(file.path(), limits, |_| {}).await.context("the answer is no bundle")?;
    }
    finish(output, args, target, bytes)
}

fn finish(output: &Output, args: &Args, target: Target, bytes: u64) -> anyhow::Result<Exit> {
    let Target::File(file, named) = target else { return Ok(Exit::Ok) };
    file.as_file().sync_all()?;
    if args.force {
        file.persist(&named).with_context(|| named.display().to_string())?;
    } else if let Err(failed) = file.persist_noclobber(&named) {
        return match failed.error.kind() {
            io::ErrorKind::AlreadyExists => Err(there(&named)),
            _ => Err(failed).with_context(|| named.display().to_string()),
        };
    }
    let name = named.display().to_string();
    let summary = json!({"session_id": args.id, "file": name, "bytes": bytes, "redacted": args.redact});
    output.one(&summary, || format!("{}\n", printable(&name)))?;
    Ok(Exit::Ok)
}

/// The refusal to overwrite a file.
fn there(named: &Path) -> anyhow::Error {
    Usage(format!("{} is there already: --force overwrites it, --file names another", named.display())).into()
}

fn url(server: &str, args: &Args) -> anyhow::Result<reqwest::Url> {
    let wrong = || Usage(format!("--server {server:?} is not an address such as http://127.0.0.1:7070"));
    let mut url = reqwest::Url::parse(server).map_err(|_| wrong())?;
    url.path_segments_mut().map_err(|()| wrong())?.pop_if_empty().extend(["sessions", &args.id, "export"]);
    if args.redact {
        url.set_query(Some("redact=true"));
    }
    Ok(url)
}

/// Reads the token, never from an argument: every user of the machine can see arguments.
fn token() -> anyhow::Result<String> {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
    let token = match (set("WAKEFUL_INTERNAL_TOKEN"), set("WAKEFUL_INTERNAL_TOKEN_FILE")) {
        (Some(token), _) => token,
        (None, Some(file)) => std::fs::read_to_string(&file).with_context(|| file.clone())?,
        (None, None) => {
            let text = "an export from a server needs a token: set WAKEFUL_INTERNAL_TOKEN";
            return Err(Usage(text.to_owned()).into());
        }
    };
    Ok(token.trim().to_owned())
}

/// Prints the server's refusal, and returns the exit status for it.
async fn refused(id: &str, response: reqwest::Response) -> Exit {
    let status = response.status();
    let body: serde_json::Value = response.json().await.unwrap_or_default();
    let detail = body["detail"].as_str().unwrap_or("no reason was given");
    eprintln!("wakeful: session {}: the server says {status}: {}", printable(id), printable(detail));
    match status.as_u16() {
        401 | 403 => Exit::Auth,
        404 => Exit::NotFound,
        502..=504 => Exit::Unavailable,
        _ => Exit::Failed,
    }
}
