//! Mail by SES, against PyPI's moto, which implements AWS' protocols.

use crate::support::{Answer, Database, ModelServer, Options, eventually, timeout};
use serde_json::{Value, json};
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

#[tokio::test]
#[ignore = "needs moto: make test-optional"]
async fn an_agents_mail_goes_out_by_ses_once_and_what_ses_rejects_is_seen() {
    let (moto, database) = (Moto::start().await, Database::new().await);
    let mail = |to: &str| json!({"to": [to], "subject": "Grüße", "body": "It is late."});
    let model = ModelServer::turns(vec![
        Answer::call("compose_email", mail("ann@example.com")),
        Answer::text("I wrote to Ann."),
    ])
    .await;
    let options = Options::new()
        .model("openai/test")
        .env("OPENAI_BASE_URL", &model.url)
        .env("WAKEFUL_EMAIL__SES__SEND", "true")
        .env("WAKEFUL_EMAIL__SES__REGION", "eu-central-1")
        .env("WAKEFUL_EMAIL__SES__ENDPOINT_URL", &moto.url)
        .env("AWS_ACCESS_KEY_ID", "key")
        .env("AWS_SECRET_ACCESS_KEY", "secret");
    // moto takes mail only from a verified sender, as SES does.
    let process =
        options.clone().env("WAKEFUL_EMAIL__FROM", "Agent <agent@example.org>").serve(&database).await;
    let sends = |conversation: &'static str| {
        let (client, database) = (process.client(), &database);
        async move {
            client.chat(conversation, "Write to Ann.").await;
            eventually("a delivery that ended", || async {
                let sql = "select coalesce(max(status), '') from deliveries where conversation_id = $1";
                let status: String = database.value(sql, &format!("default/{conversation}")).await;
                (!matches!(status.as_str(), "" | "queued" | "sending")).then_some(status)
            })
            .await
        }
    };
    assert_eq!(sends("unverified").await, "failed");
    assert!(moto.mails().await.is_empty());
    moto.verify("agent@example.org").await;
    assert_eq!(sends("verified").await, "sent");
    let mails = moto.mails().await;
    assert_eq!(mails.len(), 1, "{mails:?}");
    let sql = "select delivery_id from deliveries where conversation_id = $1";
    let delivery: String = database.value(sql, "default/verified").await;
    assert!(mails[0].contains(&format!("Message-ID: <{delivery}@example.org>")), "{}", mails[0]);
    assert!(mails[0].contains("To: ann@example.com"), "{}", mails[0]);
}

/// A running moto. Dropping it ends it.
struct Moto {
    url: String,
    http: reqwest::Client,
    _child: Child,
}

impl Moto {
    async fn start() -> Moto {
        let peers = std::env::var("WAKEFUL_PEERS").expect("WAKEFUL_PEERS is set by `make test-optional`");
        let mut child = Command::new(format!("{peers}/moto/bin/moto_server"))
            .args(["-H", "127.0.0.1", "-p", "0"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("moto was installed");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let listens = async {
            loop {
                let line = lines.next_line().await.expect("moto writes").expect("moto goes on");
                if let Some((_, url)) = line.split_once("Running on ") {
                    return url.trim().to_owned();
                }
            }
        };
        let url = tokio::time::timeout(timeout(), listens).await.expect("moto listens");
        // Keep reading moto's output, so that moto can keep writing.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Moto { url, http: reqwest::Client::new(), _child: child }
    }

    async fn verify(&self, address: &str) {
        let request = self.http.post(format!("{}/v2/email/identities", self.url));
        let signed = "AWS4-HMAC-SHA256 Credential=key/20261122/eu-central-1/ses/aws4_request, SignedHeaders=host, Signature=x";
        let request = request.header("Authorization", signed).json(&json!({"EmailIdentity": address}));
        let answer = request.send().await.expect("moto answers");
        assert!(answer.status().is_success(), "{}", answer.text().await.unwrap());
    }

    /// The raw messages that moto received.
    async fn mails(&self) -> Vec<String> {
        let answer =
            self.http.get(format!("{}/moto-api/data.json", self.url)).send().await.expect("moto answers");
        let data: Value = answer.json().await.expect("JSON");
        let messages = data["ses"]["RawMessage"].as_array().cloned().unwrap_or_default();
        messages.iter().map(|message| message["raw_data"].as_str().expect("raw").to_owned()).collect()
    }
}
