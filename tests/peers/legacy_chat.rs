//! Old chats in a real Redis.

use crate::legacy_chat::{echo, old_chat, options, say};
use crate::support::client::texts;
use crate::support::{Database, eventually};
use reqwest::StatusCode;
use std::process::Stdio;
use tempfile::TempDir;
use tokio::process::{Child, Command};

/// A Redis for this test alone, on a port of its own, with a password.
struct Server {
    _process: Child,
    _dir: TempDir,
    port: u16,
}

const PASSWORD: &str = "open-sesame";

impl Server {
    async fn start() -> Server {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Server::start_on(port).await
    }

    async fn start_on(port: u16) -> Server {
        let dir = TempDir::with_prefix("wakeful-redis-").unwrap();
        let process = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--appendonly", "no"])
            .args(["--requirepass", PASSWORD, "--dir"])
            .arg(dir.path())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("redis-server: scripts/setup peers installs it");
        let server = Server { _process: process, _dir: dir, port };
        eventually("redis-server to answer", || async {
            (server.run(&["ping"]).await.trim() == "PONG").then_some(())
        })
        .await;
        server
    }

    fn url(&self) -> String {
        format!("redis://:{PASSWORD}@127.0.0.1:{}/0", self.port)
    }

    async fn run(&self, args: &[&str]) -> String {
        let out = Command::new("redis-cli")
            .args(["-p", &self.port.to_string(), "-a", PASSWORD, "--no-auth-warning"])
            .args(args)
            .output()
            .await
            .unwrap();
        String::from_utf8(out.stdout).unwrap()
    }
}

#[tokio::test]
#[ignore = "needs redis-server: make test-peers"]
async fn a_chat_of_a_real_redis_goes_on_and_its_entry_lives_as_long_as_it_would_have() {
    let redis = Server::start().await;
    redis.run(&["set", "chat:ann:c1", &old_chat().to_string(), "EX", "86400"]).await;
    redis.run(&["lpush", "chat:ann:list", "x"]).await;
    // Shorten the entry's life by an hour, as if an hour had passed.
    redis.run(&["expire", "chat:ann:c1", "82800"]).await;
    redis.run(&["config", "resetstat"]).await;
    let database = Database::new().await;
    let model = echo().await;
    let process = options(&model, &redis.url()).serve(&database).await;
    let client = process.client();
    let (status, answer) = say(&client, "c1", "And now?").await;
    assert_eq!(status, StatusCode::ACCEPTED, "{answer}");
    let session = client.wait_for(answer["session_id"].as_str().unwrap(), "completed").await;
    assert_eq!((&session["seed_message_count"], &session["state"]["name"]), (&3.into(), &"Ann".into()));
    assert_eq!(texts(&session, "user"), ["And now?"]);

    let (status, problem) = say(&client, "list", "Hi.").await;
    assert_eq!(status, StatusCode::BAD_GATEWAY);
    assert!(problem["detail"].as_str().unwrap().contains("no string"), "{problem}");
    // Wakeful wrote nothing and extended no expiry.
    let left: i64 = redis.run(&["ttl", "chat:ann:c1"]).await.trim().parse().unwrap();
    assert!((82_000..=82_800).contains(&left), "{left}");
    let stats = redis.run(&["info", "commandstats"]).await;
    assert!(stats.contains("cmdstat_getrange:calls=2"), "{stats}");
    for writes in ["cmdstat_set:", "cmdstat_expire:", "cmdstat_del:", "cmdstat_getex:"] {
        assert!(!stats.contains(writes), "{stats}");
    }
    assert!(!process.log().contains(PASSWORD), "the password is in no log");

    // While Redis is down, no chat begins without its history. Afterwards the client connects again.
    let port = redis.port;
    drop(redis);
    let (status, problem) = say(&client, "c2", "Hi.").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{problem}");
    assert!(!problem.to_string().contains(PASSWORD));
    let _redis = Server::start_on(port).await;
    assert_eq!(say(&client, "c2", "Hi.").await.0, StatusCode::ACCEPTED);
    assert!(process.terminate().success());
}
