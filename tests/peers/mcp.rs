//! MCP servers that others wrote: the protocol's reference server (npm) by both transports, and PyPI's `mcp-server-time`.

use crate::cli::run;
use crate::support::{Answer, Database, ModelServer, Options, timeout};
use serde_json::{Value, json};
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

fn peer(path: &str) -> String {
    let peers = std::env::var("WAKEFUL_PEERS").expect("WAKEFUL_PEERS is set by `make test-peers`");
    format!("{peers}/mcp/{path}")
}

/// The reference server by HTTP, at this port. Dropping it ends it.
async fn everything(port: u16) -> Child {
    let mut child = Command::new(peer("node_modules/.bin/mcp-server-everything"))
        .arg("streamableHttp")
        .env("PORT", port.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("mcp-server-everything is installed");
    let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
    let listens = async {
        while let Some(line) = lines.next_line().await.expect("text") {
            if line.contains("listening on port") {
                return;
            }
        }
        panic!("the server ended");
    };
    tokio::time::timeout(timeout(), listens).await.expect("it listens in time");
    // It ends when it cannot write, so somebody reads on.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    child
}

#[tokio::test]
#[ignore = "needs servers of npm and PyPI: make test-peers"]
async fn servers_that_others_wrote_are_pulled_and_called_also_after_one_began_anew() {
    let database = Database::new().await;
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let calls = vec![
        (
            "clock_convert_time".to_owned(),
            json!({"source_timezone": "Europe/Berlin", "time": "12:00", "target_timezone": "Asia/Tokyo"})
                .to_string(),
        ),
        ("ours_echo".to_owned(), json!({"message": "by its output"}).to_string()),
        ("ours_get-tiny-image".to_owned(), json!({}).to_string()),
        ("web_get-sum".to_owned(), json!({"a": 19, "b": 23}).to_string()),
        ("web_get-resource-links".to_owned(), json!({"count": 2}).to_string()),
    ];
    let model = ModelServer::start(move |body, _| match crate::support::model::turns_since_user(body) {
        0 => Answer::Calls(calls.clone()),
        _ => Answer::text("Done."),
    })
    .await;
    let options = Options::new().env("OPENAI_BASE_URL", &model.url).config(&format!(
        "[agents.default]\nsystem_prompt = \"You are a test.\"\nmodel = \"openai/test\"\ntools = [\"clock_convert_time\", \
         \"ours_echo\", \"ours_get-tiny-image\", \"web_get-sum\", \"web_get-resource-links\"]\n\
         [mcp.clock]\ncommand = [{:?}]\n[mcp.ours]\ncommand = [{:?}, \"stdio\"]\n[mcp.web]\nurl = \"http://127.0.0.1:{port}/mcp\"\n",
        peer("python/bin/mcp-server-time"),
        peer("node_modules/.bin/mcp-server-everything"),
    ));
    let mut web = everything(port).await;
    let pulled = run(&options, &database.url, &["mcp", "pull"]).await;
    assert_eq!(pulled.code, 0, "{}", pulled.err);
    let checked = run(&options, &database.url, &["mcp", "pull", "--check"]).await;
    assert_eq!((checked.code, checked.out.as_str()), (0, ""), "{}", checked.err);

    let process = options.serve(&database).await;
    let client = process.client();
    for turn in 0..2 {
        if turn == 1 {
            // The new server knows nothing of the old one's session.
            web.kill().await.expect("it ends");
            web = everything(port).await;
        }
        let id = client.chat("c1", "Go.").await["session_id"].as_str().unwrap().to_owned();
        client.wait_for(&id, "completed").await;
        let body: Value = serde_json::from_str(model.bodies().last().unwrap()).unwrap();
        let messages = body["messages"].as_array().unwrap();
        let results: Vec<&str> = messages[messages.len() - 5..]
            .iter()
            .map(|message| message["content"].as_str().unwrap())
            .collect();
        let shown = [
            "Asia/Tokyo",
            "by its output",
            "[An image (image/png, about",
            "19 and 23 is 42",
            "demo://resource/",
        ];
        for (result, text) in results.iter().zip(shown) {
            assert!(result.contains(text) && !result.starts_with("Error"), "turn {turn}, {text}: {result}");
        }
    }
}
