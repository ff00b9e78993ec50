//! Third-party mail and a third-party mail server: the malformed mails of CPython and of mail-parser, and
//! Postfix.

use crate::support::{Answer, Database, ModelServer, Options, Process, eventually, timeout};
use reqwest::StatusCode;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tempfile::TempDir;
use tokio::process::{Child, Command};

/// Collects every file below `dir` with one of these extensions.
fn files(dir: &Path, kinds: &[&str], found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            files(&path, kinds, found);
        } else if path.extension().and_then(|kind| kind.to_str()).is_some_and(|kind| kinds.contains(&kind)) {
            found.push(path);
        }
    }
}

/// A process that takes mail and runs no agent.
async fn door(database: &Database, model: &ModelServer) -> Process {
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    options.env("WAKEFUL_EMAIL__LMTP_LISTEN", "127.0.0.1:0").arg("--roles=api").serve(database).await
}

#[tokio::test]
#[ignore = "needs the mails of others: make test-peers"]
async fn every_mail_of_the_corpora_is_a_session_a_drop_or_a_refusal_in_words() {
    let peers =
        PathBuf::from(std::env::var("WAKEFUL_PEERS").expect("WAKEFUL_PEERS is set by `make test-peers`"));
    let mut mails = Vec::new();
    files(&peers.join("mail/vendor"), &["eml", "msg"], &mut mails);
    let of_crates = mails.len();
    for version in std::fs::read_dir("/usr/lib").expect("it is there").flatten() {
        if version.file_name().to_string_lossy().starts_with("python3") {
            files(&version.path().join("test/test_email/data"), &["txt", "eml", "msg"], &mut mails);
        }
    }
    assert!(of_crates >= 100 && mails.len() > of_crates + 30, "{of_crates} of {}", mails.len());
    // The crates contain some files twice. An identical copy is not a further mail.
    let mails: BTreeSet<Vec<u8>> = mails.iter().map(|path| std::fs::read(path).expect("a file")).collect();

    let (database, model) = (Database::new().await, ModelServer::turns(vec![Answer::text("Hello.")]).await);
    let mut process = door(&database, &model).await;
    let client = process.client();
    let (mut woken, mut again, mut dropped, mut refused) = (0, 0, 0, 0);
    for mail in &mails {
        let shown = String::from_utf8_lossy(&mail[..mail.len().min(2_000)]);
        let request = client.post_request("/v1/triggers/email/raw").header("content-type", "message/rfc822");
        let sent = request.body(mail.clone()).send();
        let response = tokio::time::timeout(Duration::from_secs(10), sent).await;
        let response = response.unwrap_or_else(|_| panic!("hangs: {shown}")).expect("an answer");
        let status = response.status();
        let answer: Value = response.json().await.expect("JSON");
        match status {
            StatusCode::ACCEPTED => woken += 1,
            StatusCode::OK if answer["items"][0]["dropped"].is_string() => dropped += 1,
            StatusCode::OK => again += 1,
            StatusCode::UNPROCESSABLE_ENTITY => refused += 1,
            _ => panic!("{status} {answer}: {shown}"),
        }
    }
    println!(
        "{} mails: {woken} sessions, {again} duplicates, {dropped} dropped, {refused} refused",
        mails.len()
    );
    assert!(woken > mails.len() / 3, "most mail is mail");
    assert!(!process.has_ended());
    assert!(!process.log().contains("could not be read"), "{}", process.log());
}

/// A running Postfix with a folder of its own. Dropping it ends it.
pub(super) struct Postfix {
    master: Child,
    dir: TempDir,
    pub port: u16,
}

impl Postfix {
    /// Takes mail on loopback, and hands all of it over by LMTP.
    pub async fn start(lmtp: &str) -> Postfix {
        let dir = TempDir::with_prefix("wakeful-postfix-").expect("a temporary folder");
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .and_then(|free| free.local_addr())
            .expect("a port")
            .port();
        let path = dir.path().display();
        // No lookup tables, so that no address is local. smtpd still queries some, so the services that
        // answer must exist.
        let main = format!(
            "compatibility_level = 3.6\nqueue_directory = {path}/queue\ndata_directory = {path}/data\n\
             command_directory = /usr/sbin\ndaemon_directory = /usr/lib/postfix/sbin\nmail_owner = postfix\n\
             setgid_group = postdrop\nmyhostname = mx.example.org\nmydestination =\nlocal_recipient_maps =\nmynetworks = 127.0.0.0/8\n\
             inet_interfaces = 127.0.0.1\ninet_protocols = ipv4\nalias_maps =\nalias_database =\n\
             default_transport = lmtp:inet:{lmtp}\nrelay_transport = lmtp:inet:{lmtp}\nsmtpd_peername_lookup = no\n\
             smtpd_recipient_restrictions = permit_mynetworks, reject\nsmtpd_relay_restrictions = permit_mynetworks, reject\n\
             minimal_backoff_time = 1s\nmaximal_backoff_time = 2s\nqueue_run_delay = 1s\n\
             lmtp_destination_concurrency_limit = 4\nmaillog_file =\nsyslog_name = wakeful-test\n"
        );
        let service = |name: &str, kind: &str, private: &str, wake: &str, max: &str, command: &str| {
            format!("{name} {kind} {private} - n {wake} {max} {command}\n")
        };
        let master = [
            service(&format!("127.0.0.1:{port}"), "inet", "n", "-", "-", "smtpd"),
            service("cleanup", "unix", "n", "-", "0", "cleanup"),
            service("qmgr", "unix", "n", "1", "1", "qmgr"),
            service("rewrite", "unix", "-", "-", "-", "trivial-rewrite"),
            service("proxymap", "unix", "-", "-", "-", "proxymap"),
            service("bounce", "unix", "-", "-", "0", "bounce"),
            service("defer", "unix", "-", "-", "0", "bounce"),
            service("trace", "unix", "-", "-", "0", "bounce"),
            service("lmtp", "unix", "-", "-", "-", "lmtp"),
            service("retry", "unix", "-", "-", "-", "error"),
            service("error", "unix", "-", "-", "-", "error"),
            service("anvil", "unix", "-", "-", "1", "anvil"),
            service("scache", "unix", "-", "-", "1", "scache"),
        ]
        .concat();
        let config = dir.path().join("etc");
        for folder in ["etc", "queue", "data"] {
            std::fs::create_dir(dir.path().join(folder)).expect("a folder");
        }
        std::fs::write(config.join("main.cf"), main).expect("main.cf");
        std::fs::write(config.join("master.cf"), master).expect("master.cf");
        // Postfix's own account must be able to enter the temporary folder, and must own `data`.
        let open = Command::new("sh")
            .arg("-c")
            .arg(format!("chmod 755 {path} && chown postfix {path}/data && postfix -c {path}/etc check"))
            .status()
            .await;
        assert!(open.expect("sh runs").success(), "postfix takes its configuration");
        let master = Command::new("/usr/lib/postfix/sbin/master")
            .args(["-c", &config.display().to_string(), "-d"])
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("postfix is installed");
        let postfix = Postfix { master, dir, port };
        eventually("Postfix to listen", || async {
            tokio::net::TcpStream::connect(("127.0.0.1", port)).await.ok()
        })
        .await;
        postfix
    }

    /// Hands Postfix a mail, with Python's smtplib.
    async fn take(&self, text: &str) {
        let script = "import smtplib, sys\nserver = smtplib.SMTP('127.0.0.1', int(sys.argv[1]))\n\
                      server.sendmail('ann@example.com', ['agent@example.org'], sys.argv[2].encode())\nserver.quit()";
        let sent = Command::new("python3").args(["-c", script, &self.port.to_string(), text]).status();
        let sent = tokio::time::timeout(timeout(), sent).await.expect("it ends").expect("python3 runs");
        assert!(sent.success(), "Postfix takes the mail");
    }
}

impl Drop for Postfix {
    fn drop(&mut self) {
        if let Some(pid) = self.master.id() {
            // SAFETY: kill takes no pointers; the pid is of a child that has not been waited for.
            unsafe { libc::kill(pid as i32, libc::SIGTERM) };
        }
    }
}

#[tokio::test]
#[ignore = "needs Postfix, and root: make test-peers"]
async fn postfix_hands_mail_over_and_keeps_what_was_not_taken() {
    // SAFETY: geteuid takes no arguments.
    if unsafe { libc::geteuid() } != 0 {
        println!("Postfix's master needs root: the test was skipped");
        return;
    }
    let (database, model) = (Database::new().await, ModelServer::turns(vec![Answer::text("Hello.")]).await);
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port");
    let options = options.env("WAKEFUL_EMAIL__LMTP_LISTEN", port.to_string()).arg("--roles=api");
    let postfix = Postfix::start(&port.to_string().replace("127.0.0.1", "[127.0.0.1]")).await;
    let mail = |n: usize| {
        format!(
            "From: ann@example.com\r\nTo: agent@example.org\r\nSubject: {n}\r\nMessage-ID: <m{n}@x>\r\n\r\nHello {n}\r\n.\r\n"
        )
    };
    // No one listens: Postfix keeps the mail, and delivers it when Wakeful is up.
    postfix.take(&mail(0)).await;
    let killed = options.clone().env("FAILPOINTS", "K2=1*return").serve(&database).await;
    let (_, killed) = killed.ended().await;
    assert!(killed.log().contains("failpoint"), "it died over the mail");
    let process = options.serve(&database).await;
    for n in 1..4 {
        postfix.take(&mail(n)).await;
    }
    let taken = || async {
        let sql = "select count(*) from conversation_sessions where trigger_type = 'email' and $1 = ''";
        let (sessions, queued): (i64, _) = (database.value(sql, "").await, queued(&postfix));
        (sessions == 4 && queued == 0).then_some(())
    };
    eventually("each mail to be one session, and Postfix to keep none", taken).await;
    assert!(process.terminate().success());
}

/// The number of mails that Postfix holds.
pub(super) fn queued(postfix: &Postfix) -> usize {
    let mut found = Vec::new();
    let queue = postfix.dir.path().join("queue");
    for folder in ["incoming", "active", "deferred", "maildrop"] {
        all(&queue.join(folder), &mut found);
    }
    found.len()
}

fn all(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.path().is_dir() { all(&entry.path(), found) } else { found.push(entry.path()) }
    }
}
