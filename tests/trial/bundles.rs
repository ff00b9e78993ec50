//! Bundles that somebody changed. One that is taken in can be read everywhere.

use super::{Dice, is_whole, share};
use crate::support::{Answer, Database, ModelServer, Options};
use reqwest::StatusCode;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

const TOKEN: &str = "an internal token of the trial";

/// The places of all strings and numbers in a text of JSON.
fn tokens(text: &str) -> Vec<std::ops::Range<usize>> {
    let (bytes, mut found, mut at) = (text.as_bytes(), Vec::new(), 0);
    while at < bytes.len() {
        let from = at;
        match bytes[at] {
            b'"' => {
                at += 1;
                while at < bytes.len() && bytes[at] != b'"' {
                    at += 1 + usize::from(bytes[at] == b'\\');
                }
                at += 1;
                found.push(from..at.min(bytes.len()));
            }
            b'-' | b'0'..=b'9' => {
                while at < bytes.len() && matches!(bytes[at], b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9')
                {
                    at += 1;
                }
                found.push(from..at);
            }
            _ => at += 1,
        }
    }
    found
}

/// Changes one or two places, and then makes the last line's hash fit again.
fn mutant(dice: &mut Dice, bundle: &str) -> String {
    let mut lines: Vec<String> = bundle.lines().map(str::to_owned).collect();
    let end = lines.pop().unwrap();
    for _ in 0..=dice.below(2) {
        let at = dice.below(lines.len());
        match dice.below(10) {
            0 => drop(lines.remove(at)),
            1 => lines.insert(at, lines[at].clone()),
            2 => {
                let other = dice.below(lines.len());
                lines.swap(at, other);
            }
            _ => {
                let places = tokens(&lines[at]);
                let Some(place) = places.get(dice.below(places.len())).cloned() else { continue };
                let old = lines[at][place.clone()].to_owned();
                let new = if old.starts_with('"') {
                    // A text that stands elsewhere in the bundle gets past more checks than a wild one.
                    let other = &lines[dice.below(lines.len())];
                    let texts = tokens(other);
                    let texts: Vec<&str> = texts
                        .iter()
                        .map(|place| &other[place.clone()])
                        .filter(|text| text.starts_with('"'))
                        .collect();
                    let wild = [
                        "\"\"",
                        "\"x\"",
                        "\"stop\"",
                        "\"tool_calls\"",
                        "\"\u{202e}\"",
                        "\"<b>\"",
                        "\"completed\"",
                    ];
                    if texts.is_empty() || dice.below(2) == 0 {
                        dice.of(&wild).to_owned()
                    } else {
                        dice.of(&texts).to_owned()
                    }
                } else {
                    dice.of(&["0", "1", "2", "-1", "3", "9223372036854775807", "2147483648", "1.5"])
                        .to_owned()
                };
                lines[at].replace_range(place, &new);
            }
        }
        if lines.is_empty() {
            break;
        }
    }
    let mut text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let hash = hex::encode(Sha256::digest(text.as_bytes()));
    let old = end.split('"').find(|word| word.len() == 64).expect("the last line is a hash");
    text.push_str(&end.replace(old, &hash));
    text.push('\n');
    text
}

#[tokio::test]
async fn a_bundle_that_is_taken_in_can_be_read_everywhere() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![
        Answer::call("reserve", json!({"persons": 2})),
        Answer::call("write_file", json!({"path": "a.txt", "content": "a"})),
        Answer::text("Your table is reserved."),
    ])
    .await;
    let process = Options::new()
        .model("openai/test")
        .env("OPENAI_BASE_URL", &model.url)
        .env("WAKEFUL_SERVER__INTERNAL_TOKENS", TOKEN)
        .serve(&database)
        .await;
    let client = process.client();
    let woken = client.chat("c1", "A table, please.").await;
    let id = woken["session_id"].as_str().unwrap();
    client.wait_for(id, "completed").await;
    let export = async |id: &str| {
        let request =
            client.get_request(&format!("/v1/sessions/{id}/export")).header("X-Internal-Token", TOKEN);
        let answer = request.send().await.unwrap();
        (answer.status(), answer.text().await.unwrap())
    };
    let (status, bundle) = export(id).await;
    assert_eq!(status, StatusCode::OK, "{bundle}");
    let import = async |bundle: String| {
        let answer = client.post_request("/v1/sessions/import").body(bundle).send().await.unwrap();
        let status = answer.status();
        (status, serde_json::from_str::<Value>(&answer.text().await.unwrap()).unwrap_or_default())
    };
    assert_eq!(import(bundle.clone()).await.0, StatusCode::CREATED, "the true one is taken in");
    let (all, mut taken, mut wrong) = (share(2_000), 0, Vec::new());
    for seed in 0..all {
        let (status, made) = import(mutant(&mut Dice::new(seed), &bundle)).await;
        if status.is_server_error() {
            wrong.push(format!("seed {seed}: import: {status} {made}"));
        }
        let Some(imported) = made["session_id"].as_str().filter(|_| status.is_success()) else { continue };
        taken += 1;
        for path in ["", "/messages", "/steps", "/events", "/context", "/tree"] {
            let (status, told) = client.get(&format!("/v1/sessions/{imported}{path}")).await;
            if !status.is_success() {
                wrong.push(format!("seed {seed}: {path}: {status} {told}"));
            }
        }
        let (status, told) = client.get(&format!("/v1/sessions/{id}/diff/{imported}")).await;
        if status.is_server_error() {
            wrong.push(format!("seed {seed}: diff: {status} {told}"));
        }
        let (status, told) = export(imported).await;
        if status.is_server_error() || (status.is_success() && !told.ends_with("}\n")) {
            wrong.push(format!("seed {seed}: export: {status} {told}"));
        }
        let body = json!({"at": 2, "start": false});
        let (status, told) = client.post(&format!("/v1/sessions/{imported}/fork"), &body).await;
        if status.is_server_error() {
            wrong.push(format!("seed {seed}: fork: {status} {told}"));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} faults of {taken} that were taken in: {:#?}",
        wrong.len(),
        &wrong[..wrong.len().min(10)]
    );
    // If none were taken in, the mutations were too crude.
    assert!(taken > 0, "{taken} of {all} were taken in");
    println!("{taken} of {all} mutants were taken in");
    is_whole(&process);
}
