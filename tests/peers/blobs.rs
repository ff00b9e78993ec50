//! Files of sessions in object stores: S3 by PyPI's moto, Azure by npm's azurite.

use crate::support::client::texts;
use crate::support::model::turns_since_user;
use crate::support::{Answer, Database, ModelServer, Options, eventually, timeout};
use base64::Engine as _;
use serde_json::json;
use std::process::Stdio;
use std::sync::Arc;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// The account that azurite has by itself, which is public.
const ACCOUNT: (&str, &str) = (
    "devstoreaccount1",
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
);

/// A server that ends with the test, and its URL.
struct Server {
    url: String,
    _child: Child,
}

impl Server {
    /// Starts a program of the peers, and reads its URL from what it says.
    async fn start(program: &str, arguments: &[&str], before_url: &str, on_stderr: bool) -> Server {
        let peers = std::env::var("WAKEFUL_PEERS").expect("WAKEFUL_PEERS is set by `make test-optional`");
        let mut child = Command::new(format!("{peers}/{program}"))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("it was installed");
        let (stdout, stderr) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
        let (told, silent): (
            Box<dyn tokio::io::AsyncRead + Send + Unpin>,
            Box<dyn tokio::io::AsyncRead + Send + Unpin>,
        ) = if on_stderr {
            (Box::new(stderr), Box::new(stdout))
        } else {
            (Box::new(stdout), Box::new(stderr))
        };
        let mut lines = BufReader::new(told).lines();
        let listens = async {
            loop {
                let line = lines.next_line().await.expect("it writes").expect("it goes on");
                if let Some((_, url)) = line.split_once(before_url) {
                    return url.trim().to_owned();
                }
            }
        };
        let url = tokio::time::timeout(timeout(), listens).await.expect("it listens");
        // Keep reading, so that it can keep writing.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        let mut silent = BufReader::new(silent).lines();
        tokio::spawn(async move { while let Ok(Some(_)) = silent.next_line().await {} });
        Server { url, _child: child }
    }
}

/// A session writes a file, and another host reads it; both ways between the store and Postgres; a wrong bucket.
async fn serves_sessions(options: Options, address: &str, forgotten: &str) {
    let database = Database::new().await;
    let model =
        ModelServer::start(|body, _| match (body.to_string().contains("Read it."), turns_since_user(body)) {
            (false, 0) => {
                Answer::call("write_file", json!({"path": "a.md", "content": "one ".repeat(50_000)}))
            }
            (true, 0) => Answer::call("read_file", json!({"path": "a.md"})),
            (true, 1) => Answer::call("write_file", json!({"path": "b.md", "content": "two"})),
            _ => Answer::text("Done."),
        })
        .await;
    let options =
        options.model("openai/test").env("OPENAI_BASE_URL", &model.url).env("WAKEFUL_BLOBS__STORE", address);
    let process = options.serve(&database).await;
    let id = process.client().chat("c1", "Write it.").await["session_id"].as_str().unwrap().to_owned();
    process.client().wait_for(&id, "completed").await;
    assert!(process.terminate().success());
    let outside = "select count(*) from blobs where store = $1 and bytes = ''";
    assert_eq!(database.value::<i64>(outside, address).await, 1);

    let elsewhere = options.path("elsewhere").display().to_string();
    let process = options.clone().env("WAKEFUL_WORKSPACE__DIR", elsewhere).serve(&database).await;
    process.client().chat("c1", "Read it.").await;
    let session = process.client().wait_for(&id, "completed").await;
    assert!(texts(&session, "tool")[1].starts_with("one one"), "{session}");
    let log = process.log();
    assert!(process.terminate().success());
    assert_eq!(database.value::<i64>(outside, address).await, 2);

    let cli = async |env: &[(&str, &str)], args: &[&str]| {
        let mut options = Options {
            config: options.config.clone(),
            args: args.iter().map(|&arg| arg.to_owned()).collect(),
            env: options.env.clone(),
            dir: Arc::clone(&options.dir),
        };
        options.env.extend(env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        let (status, process) = options.spawn(&database.url).ended().await;
        (status.code().unwrap(), process.output() + &process.log())
    };
    let also = address.to_owned();
    let here = [("WAKEFUL_BLOBS__STORE", "postgres"), ("WAKEFUL_BLOBS__ALSO", also.as_str())];
    let (code, told) = cli(&[], &["blobs", "verify"]).await;
    assert_eq!(code, 0, "{told}");
    for (env, moved) in [(&here[..], 0), (&[], 2)] {
        let (code, told) = cli(env, &["blobs", "move"]).await;
        assert!(code == 0 && told.contains("Moved 2 blobs"), "{told}");
        assert_eq!(database.value::<i64>(outside, address).await, moved);
    }
    let (code, told) = cli(&[], &["session", "files", &id]).await;
    assert!(code == 0 && told.contains("b.md"), "{told}");
    let notes: i64 = database.value("select count(*) from blob_removals where $1 <> ''", "any").await;
    assert_eq!(notes, 0);

    // A bucket that is not there is a store that is away, and no lost file.
    let (code, told) = cli(&[("WAKEFUL_BLOBS__STORE", forgotten)], &["doctor"]).await;
    assert!(code == 9 && told.contains(&format!("the blob store {forgotten} is away")), "{told}");
    let process = options.clone().env("WAKEFUL_BLOBS__STORE", forgotten).serve(&database).await;
    let client = process.client();
    let other = client.chat("c2", "Write it.").await["session_id"].as_str().unwrap().to_owned();
    eventually("the outage to be shown", || async {
        let session = client.session(&other).await;
        assert_ne!(session["status"], "failed");
        session["job"]["waits_for"].as_str().is_some_and(|gate| gate.contains(forgotten)).then_some(())
    })
    .await;
    let log = log + &process.log();
    for secret in ["the-secret-key", ACCOUNT.1] {
        assert!(!log.contains(secret), "a credential is in the log");
        let dump = crate::support::checker::dump(&database).await;
        assert!(!format!("{dump:?}").contains(secret), "a credential is in a row");
    }
    assert!(process.terminate().success());
}

/// A bucket of moto, and what a process finds it by.
async fn s3() -> (Server, Vec<(&'static str, String)>) {
    let moto =
        Server::start("moto/bin/moto_server", &["-H", "127.0.0.1", "-p", "0"], "Running on ", true).await;
    let made = reqwest::Client::new().put(format!("{}/files", moto.url)).send().await.unwrap();
    assert!(made.status().is_success(), "{made:?}");
    let env = vec![
        ("AWS_ENDPOINT_URL", moto.url.clone()),
        ("AWS_ALLOW_HTTP", "true".to_owned()),
        ("AWS_REGION", "us-east-1".to_owned()),
        ("AWS_ACCESS_KEY_ID", "key".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "the-secret-key".to_owned()),
    ];
    (moto, env)
}

/// A container of azurite, and what a process finds it by.
async fn azure() -> (Server, Vec<(&'static str, String)>) {
    let arguments =
        ["--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", "0", "--skipApiVersionCheck"];
    let said = "successfully listens on ";
    let azurite = Server::start("azurite/node_modules/.bin/azurite-blob", &arguments, said, false).await;
    make_container(&azurite.url, "files").await;
    let env = vec![
        ("AZURE_STORAGE_USE_EMULATOR", "true".to_owned()),
        ("AZURITE_BLOB_STORAGE_URL", azurite.url.clone()),
    ];
    (azurite, env)
}

fn with(env: &[(&'static str, String)]) -> Options {
    env.iter().fold(Options::new(), |options, (name, value)| options.env(name, value.as_str()))
}

#[tokio::test]
#[ignore = "needs moto: make test-optional"]
async fn files_of_sessions_are_in_s3() {
    let (_moto, env) = s3().await;
    serves_sessions(with(&env), "s3://files/wakeful", "s3://forgotten/wakeful").await;
}

#[tokio::test]
#[ignore = "needs azurite: make test-optional"]
async fn files_of_sessions_are_in_azure() {
    let (_azurite, env) = azure().await;
    serves_sessions(with(&env), "az://files/wakeful", "az://forgotten/wakeful").await;
}

#[tokio::test]
#[ignore = "needs moto: make test-optional"]
async fn a_repository_that_is_edited_on_three_hosts_that_are_killed_is_in_s3() {
    let (_moto, mut env) = s3().await;
    env.push(("WAKEFUL_BLOBS__STORE", "s3://files/wakeful".to_owned()));
    crate::crash::repository::survives_on(&env).await;
}

#[tokio::test]
#[ignore = "needs azurite: make test-optional"]
async fn a_repository_that_is_edited_on_three_hosts_that_are_killed_is_in_azure() {
    let (_azurite, mut env) = azure().await;
    env.push(("WAKEFUL_BLOBS__STORE", "az://files/wakeful".to_owned()));
    crate::crash::repository::survives_on(&env).await;
}

/// Azure's request to make a container, signed with the account's key.
async fn make_container(url: &str, name: &str) {
    use hmac::{Hmac, KeyInit as _, Mac as _};
    let (account, key) = ACCOUNT;
    let date = chrono::Utc::now().format("%a, %d %b %Y %H:%M:%S GMT").to_string();
    let version = "2021-08-06";
    let signed = format!(
        "PUT\n\n\n\n\n\n\n\n\n\n\n\nx-ms-date:{date}\nx-ms-version:{version}\n/{account}/{account}/{name}\nrestype:container"
    );
    let base64 = base64::engine::general_purpose::STANDARD;
    let mut mac = Hmac::<sha2::Sha256>::new_from_slice(&base64.decode(key).unwrap()).unwrap();
    mac.update(signed.as_bytes());
    let signature = base64.encode(mac.finalize().into_bytes());
    let request = reqwest::Client::new()
        .put(format!("{url}/{account}/{name}?restype=container"))
        .header("x-ms-date", date)
        .header("x-ms-version", version)
        .header("content-length", "0")
        .header("authorization", format!("SharedKey {account}:{signature}"));
    let answer = request.send().await.unwrap();
    assert!(answer.status().is_success(), "{}", answer.text().await.unwrap());
}
