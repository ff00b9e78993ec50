//! Mail to a third-party SMTP server, PyPI's aiosmtpd. A third-party library, dkimpy, verifies its signature.

use crate::support::{Answer, Database, ModelServer, Options, Program, eventually, timeout};
use serde_json::{Value, json};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// A running aiosmtpd. Dropping it ends it.
pub(super) struct Aiosmtpd {
    port: u64,
    dir: TempDir,
    /// One line of `mail_server.py` per mail.
    pub mails: Arc<Mutex<Vec<Value>>>,
    _child: Child,
}

impl Aiosmtpd {
    pub async fn start(security: &str) -> Aiosmtpd {
        let peers = std::env::var("WAKEFUL_PEERS").expect("WAKEFUL_PEERS is set by `make test-peers`");
        let dir = TempDir::with_prefix("wakeful-aiosmtpd-").expect("a temporary folder");
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/peers/mail_server.py");
        let mut child = Command::new(format!("{peers}/smtp/bin/python"))
            .args([script.as_ref(), dir.path().as_os_str(), security.as_ref()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("aiosmtpd is installed");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let first = tokio::time::timeout(timeout(), lines.next_line()).await.expect("it listens in time");
        let first: Value = serde_json::from_str(&first.expect("text").expect("it listens")).expect("JSON");
        let mails = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&mails);
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                into.lock().unwrap().push(serde_json::from_str(&line).expect("JSON"));
            }
        });
        Aiosmtpd { port: first["port"].as_u64().expect("a port"), dir, mails, _child: child }
    }

    pub fn config(&self, security: &str, password: &str, key: &str) -> String {
        let dir = self.dir.path().display();
        format!(
            "[email]\nfrom = \"Desk <desk@example.org>\"\n[email.smtp]\nhost = \"localhost\"\nport = {}\nsecurity = \"{security}\"\n\
             user = \"desk\"\npassword = \"{password}\"\nca_file = \"{dir}/ca.pem\"\n\
             [email.dkim]\ndomain = \"example.org\"\nselector = \"{key}\"\nkey_file = \"{dir}/{key}.pem\"\n",
            self.port
        )
    }
}

/// Sends one mail with `config`, and returns how the delivery ended with its receipt.
async fn send(config: &str) -> Value {
    let mail = json!({"to": ["ann@example.com", "nobody@example.com"], "subject": "Your table, Grüße",
        "body": "The table is yours.  \n\nÜber \t Tische.\n\n\n"});
    let model = ModelServer::turns(vec![Answer::call("compose_email", mail), Answer::text("Done.")]).await;
    let database = Database::new().await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url).config(config);
    let process = options.serve(&database).await;
    let answer = process.client().chat("c1", "Write to Ann.").await;
    let id = answer["session_id"].as_str().unwrap();
    let delivery = eventually("the delivery's first attempt to end", || async {
        let session = process.client().session(id).await;
        let delivery = session["deliveries"].get(0)?.clone();
        (delivery["status"] != "sending"
            && (delivery["status"] != "queued" || delivery["last_error"].is_string()))
        .then_some(delivery)
    })
    .await;
    process.kill();
    delivery
}

#[tokio::test]
#[ignore = "needs aiosmtpd: make test-peers"]
async fn mail_goes_over_starttls_and_tls_with_a_login_and_its_signature_holds() {
    for (security, key) in [("starttls", "rsa"), ("tls", "ed25519")] {
        let server = Aiosmtpd::start(security).await;
        let delivery = send(&server.config(security, "sesame", key)).await;
        assert_eq!(delivery["status"], "sent", "{security}: {delivery}");
        assert_eq!(delivery["receipt"]["refused"][0]["address"], "nobody@example.com", "{delivery}");
        let mails = server.mails.lock().unwrap().clone();
        let [mail] = mails.as_slice() else { panic!("{mails:?}") };
        assert_eq!((&mail["tls"], &mail["user"]), (&json!(true), &json!("desk")), "{mail}");
        assert_eq!(
            (&mail["mail_from"], &mail["to"]),
            (&json!("desk@example.org"), &json!(["ann@example.com"]))
        );
        assert_eq!(
            (&mail["signed"], &mail["verified"]),
            (&json!(true), &json!(true)),
            "{security} {key}: {mail}"
        );
        assert_eq!(mail["forged"], false, "another text has no signature that holds");
    }
}

#[tokio::test]
#[ignore = "needs aiosmtpd: make test-peers"]
async fn nothing_is_said_to_a_server_that_does_not_prove_who_it_is_or_does_not_know_us() {
    let server = Aiosmtpd::start("starttls").await;
    let dir = server.dir.path().display();
    let good = server.config("starttls", "sesame", "rsa");
    for (config, words) in [
        (good.replace(&format!("ca_file = \"{dir}/ca.pem\"\n"), ""), "certificate"),
        (good.replace("sesame", "wrong"), "535"),
        (good.replace("\"starttls\"", "\"tls\""), "mail server"),
    ] {
        let delivery = send(&config).await;
        assert_eq!(delivery["status"], "queued", "{words}: {delivery}");
        assert!(delivery["last_error"].as_str().unwrap().contains(words), "{words}: {delivery}");
    }
    assert!(server.mails.lock().unwrap().is_empty());
    // doctor reports the same.
    std::fs::write(server.dir.path().join("wakeful.toml"), good.replace("sesame", "wrong")).unwrap();
    let output = Program::command(server.dir.path()).arg("doctor").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("535") && text.contains("check [email.smtp]"), "{text}");
}
