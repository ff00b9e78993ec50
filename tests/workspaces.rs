//! The files of a session from outside: by the API, by the command line, in forks, in bundles, and what is collected.

mod seeds;

use crate::support::client::texts;
use crate::support::model::turns_since_user;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, eventually};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use wakeful_engine::workspace::{Files, Limits};
use wakeful_store::encryption::Settings;
use wakeful_store::wake::{NewAttachment, NewMessage};
use wakeful_store::workspace::PACK_TYPE;

struct Sample {
    database: Database,
    model: ModelServer,
    options: Options,
    process: Process,
    client: Client,
    id: String,
}

impl Sample {
    /// A session that wrote two files, changed one and removed nothing: messages 3 and 4, 5 and 6, 7 and 8.
    async fn new() -> Sample {
        Sample::of(|options| options).await
    }

    async fn of(set: impl FnOnce(Options) -> Options) -> Sample {
        let database = Database::new().await;
        let model = ModelServer::start(|body, _| match turns_since_user(body) {
            0 => Answer::call("write_file", json!({"path": "notes/a.md", "content": "one\ntwo\n"})),
            1 => Answer::call("write_file", json!({"path": "b.md", "content": "b"})),
            2 => Answer::call("edit_file", json!({"path": "notes/a.md", "old": "two", "new": "three"})),
            3 => Answer::call("list_files", json!({})),
            4 => Answer::call("search_files", json!({"pattern": "^thr"})),
            _ => Answer::text("Done."),
        })
        .await;
        let tools = "[agents.default]\nmodel = \"openai/test\"\ntools = [\"read_file\", \"write_file\", \"edit_file\", \
                     \"list_files\", \"search_files\"]";
        let options = set(Options::new().config(tools).env("OPENAI_BASE_URL", &model.url));
        let process = options.serve(&database).await;
        let client = process.client();
        let id = client.chat("c1", "Take notes.").await["session_id"].as_str().unwrap().to_owned();
        client.wait_for(&id, "completed").await;
        Sample { database, model, options, process, client, id }
    }

    async fn listed(&self, id: &str, query: &str) -> Vec<(String, i64)> {
        let (status, answer) = self.client.get(&format!("/v1/sessions/{id}/files{query}")).await;
        assert_eq!(status, 200, "{answer}");
        let items = answer["items"].as_array().unwrap().iter();
        let files = items.filter(|one| one["kind"] == "file");
        files.map(|one| (one["path"].as_str().unwrap().to_owned(), one["bytes"].as_i64().unwrap())).collect()
    }

    async fn cli(&self, args: &[&str]) -> (i32, String, String) {
        let options = Options {
            config: self.options.config.clone(),
            args: args.iter().map(|&arg| arg.to_owned()).collect(),
            env: self.options.env.clone(),
            dir: Arc::clone(&self.options.dir),
        };
        let (status, process) = options.spawn(&self.database.url).ended().await;
        (status.code().expect("it was not killed"), process.output(), process.log())
    }
}

fn file(path: &str, bytes: i64) -> (String, i64) {
    (path.to_owned(), bytes)
}

#[tokio::test]
async fn files_are_listed_read_and_checked_out_as_they_were_after_any_message() {
    let sample = Sample::new().await;
    let session = sample.client.session(&sample.id).await;
    let results = texts(&session, "tool");
    assert_eq!(results[3], "b.md (1 bytes)\nnotes/\nnotes/a.md (10 bytes)\n");
    assert_eq!(results[4], "notes/a.md:2: three\n");
    let numbers: Vec<i64> = crate::support::client::numbers(&session);
    let first = numbers[0];
    assert!(sample.listed(&sample.id, &format!("?at={first}")).await.is_empty());
    assert_eq!(sample.listed(&sample.id, &format!("?at={}", first + 2)).await, [file("notes/a.md", 8)]);
    assert_eq!(
        sample.listed(&sample.id, &format!("?at={}", first + 5)).await,
        [file("b.md", 1), file("notes/a.md", 8)]
    );
    assert_eq!(sample.listed(&sample.id, "").await, [file("b.md", 1), file("notes/a.md", 10)]);

    let read = async |query: &str| {
        let request = sample.client.get_request(&format!("/v1/sessions/{}/files?path={query}", sample.id));
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    assert_eq!(read("notes/a.md").await, (200, "one\nthree\n".to_owned()));
    assert_eq!(read(&format!("notes/a.md&at={}", first + 2)).await, (200, "one\ntwo\n".to_owned()));
    for nothing in ["notes", "c.md", "../b.md", "notes/a.md/x", "%00"] {
        assert_eq!(read(nothing).await.0, 404, "{nothing}");
    }

    let to = sample.options.path("out");
    let at = (first + 2).to_string();
    let (status, out, log) =
        sample.cli(&["session", "checkout", &sample.id, to.to_str().unwrap(), "--at", &at]).await;
    assert_eq!(status, 0, "{out}{log}");
    assert_eq!(std::fs::read_to_string(to.join("notes/a.md")).unwrap(), "one\ntwo\n");
    assert!(!to.join("b.md").exists());
    let (status, _, log) = sample.cli(&["session", "checkout", &sample.id, to.to_str().unwrap()]).await;
    assert!(status != 0 && log.contains("exists"), "a folder that is there is not touched: {log}");
    let (status, out, _) = sample.cli(&["session", "files", &sample.id]).await;
    assert!(status == 0 && out.contains("notes/a.md"), "{out}");
    let fork = json!({"at": first + 2, "start": false});
    let (_, forked) = sample.client.post(&format!("/v1/sessions/{}/fork", sample.id), &fork).await;
    let forked = forked["session_id"].as_str().unwrap_or_else(|| panic!("{forked}"));
    let (_, out, log) = sample.cli(&["session", "diff", &sample.id, forked, "-o", "json"]).await;
    let report: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{log}"));
    let changed = json!([{"path": "b.md", "how": "removed"}, {"path": "notes/a.md", "how": "changed"}]);
    assert_eq!(report["files"], changed, "{out}");
    let (_, _, log) = sample.cli(&["session", "diff", &sample.id, forked, "-o", "table"]).await;
    assert!(log.contains("Files: 2 differ"), "{log}");
    drop(sample.process);
}

#[tokio::test]
async fn each_pack_of_an_encrypted_session_is_opened_once_for_a_list_of_its_files() {
    let keys = Database::without_schema().await;
    let sample = Sample::of(|options| {
        let options = options.config("[encryption]\nagents = [\"default\"]");
        let options = options.env("WAKEFUL_ENCRYPTION__KEYS", &keys.url);
        options.env("WAKEFUL_ENCRYPTION__MASTER_KEY", crate::encryption::MASTER)
    })
    .await;
    assert_eq!(sample.listed(&sample.id, "").await, [file("b.md", 1), file("notes/a.md", 10)]);
    let store = sample.database.store().await;
    let master: [u8; 32] = std::array::from_fn(|at| at as u8);
    store.encrypt(Settings { keys: keys.url.clone(), agents: None, master, old_master: None }).unwrap();
    let snapshot = store.workspace_at(&sample.id, None).await.unwrap().unwrap();
    let limits = Limits { files: 100, bytes: 1 << 20, time: Duration::from_secs(60), leave_out: Vec::new() };
    let files = Files::open(&store, &sample.id, snapshot, &limits).await.unwrap();
    let gone = sqlx::query("delete from sealed_blobs where media_type = $1").bind(PACK_TYPE);
    assert!(gone.execute(&sample.database.pool).await.unwrap().rows_affected() > 0);
    let listed = files.list().await.unwrap();
    let paths: Vec<&str> = listed.iter().map(|one| one.path.as_str()).collect();
    assert_eq!(paths, ["b.md", "notes", "notes/a.md"]);
}

#[tokio::test]
async fn a_bundle_carries_the_files_and_a_redacted_one_does_not() {
    let sample = Sample::new().await;
    let bundle = sample.options.path("bundle.jsonl");
    let export = async |more: &[&str]| {
        let mut args = vec!["session", "export", &sample.id, "--force", "--file", bundle.to_str().unwrap()];
        args.extend(more);
        let (status, out, log) = sample.cli(&args).await;
        assert_eq!(status, 0, "{out}{log}");
        let (status, out, log) =
            sample.cli(&["session", "import", bundle.to_str().unwrap(), "-o", "json"]).await;
        assert_eq!(status, 0, "{out}{log}");
        let imported: Value = serde_json::from_str(&out).unwrap();
        imported["session_id"].as_str().unwrap().to_owned()
    };
    let copy = export(&[]).await;
    assert_eq!(sample.listed(&copy, "").await, [file("b.md", 1), file("notes/a.md", 10)]);
    let (_, answer) =
        sample.client.post(&format!("/v1/sessions/{copy}/messages"), &json!({"text": "Again."})).await;
    assert_eq!(answer["outcome"], "new_run", "{answer}");
    sample.client.wait_for(&copy, "completed").await;
    assert_eq!(sample.listed(&copy, "").await, [file("b.md", 1), file("notes/a.md", 10)]);
    let asked = sample.model.bodies().len();

    export(&["--redact"]).await;
    let text = std::fs::read_to_string(&bundle).unwrap();
    assert!(!text.contains("notes/a.md") && text.contains("WORKSPACE_SNAPSHOT"), "{text}");
    assert_eq!(sample.model.bodies().len(), asked);
}

#[tokio::test]
async fn a_pack_of_no_commit_is_collected_after_its_grace_and_no_other() {
    let sample = Sample::new().await;
    sample.database.with_roles().await;
    let store = sample.database.store().await;
    let orphan = [7; 1000];
    let sha256 = wakeful_store::workspace::name_of(&orphan);
    store.put_pack(&sample.id, &sha256, &orphan).await.unwrap();
    let stored = async || {
        let sql = "select count(*) from blobs where media_type like '%pack' and $1 <> ''";
        sample.database.value::<i64>(sql, "any").await
    };
    let before = stored().await;
    let gc = async |age: &'static str| {
        sqlx::query("update blobs set touched_at = now() - $1::interval")
            .bind(age)
            .execute(&sample.database.pool)
            .await
            .unwrap();
        store.collect_blobs(None, std::time::Duration::from_secs(3600), false).await.unwrap()
    };
    assert_eq!(gc("50 minutes").await.blobs, 0, "it may be of a commit to come");
    let collected = gc("2 hours").await;
    assert_eq!((collected.blobs, collected.bytes), (1, 1000));
    assert_eq!(stored().await, before - 1);
    // A file that came with a message is not an orphan, whatever its sender called it and an earlier version made of it.
    let sent = NewMessage {
        client_key: None,
        text: "a file".into(),
        sender: None,
        trace_context: None,
        attachments: vec![NewAttachment {
            file_name: "a".into(),
            media_type: wakeful_store::workspace::PACK_TYPE.into(),
            bytes: orphan.to_vec(),
        }],
    };
    store.send(&sample.id, &sent).await.unwrap();
    assert_eq!(stored().await, before - 1, "it is not a pack");
    sqlx::query("update blobs set media_type = $2 where sha256 = $1")
        .bind(&sha256)
        .bind(wakeful_store::workspace::PACK_TYPE)
        .execute(&sample.database.pool)
        .await
        .unwrap();
    assert_eq!(gc("2 hours").await.blobs, 0);
    assert_eq!(stored().await, before);
    // What is stored again counts as new.
    store.put_pack(&sample.id, &sha256, &orphan).await.unwrap();
    assert_eq!(
        store.collect_blobs(None, std::time::Duration::from_secs(3600), false).await.unwrap().blobs,
        0
    );

    let sound = store.check_blobs(None).await.unwrap();
    assert!(sound.wrong.is_empty() && sound.missing.is_empty(), "{sound:?}");
    let pack: String = sample
        .database
        .value("select payload #>> '{packs,0,sha256}' from session_events where type = 'WORKSPACE_SNAPSHOT' and $1 <> ''", "any")
        .await;
    sqlx::query("update blobs set bytes = 'lies' where sha256 = $1")
        .bind(&pack)
        .execute(&sample.database.pool)
        .await
        .unwrap();
    assert_eq!(store.check_blobs(None).await.unwrap().wrong, std::slice::from_ref(&pack));
    sqlx::query("delete from blobs where sha256 = $1")
        .bind(&pack)
        .execute(&sample.database.pool)
        .await
        .unwrap();
    assert_eq!(store.check_blobs(None).await.unwrap().missing, [pack]);
}

#[tokio::test]
async fn the_erasure_of_a_session_takes_its_pack_of_no_commit_and_no_other() {
    let sample = Sample::new().await;
    sample.database.with_roles().await;
    let other = sample.client.chat("c2", "Take notes.").await["session_id"].as_str().unwrap().to_owned();
    sample.client.wait_for(&other, "completed").await;
    let store = sample.database.store().await;
    for id in [&sample.id, &other] {
        let orphan = format!("an orphan of {id}").into_bytes();
        store.put_pack(id, &wakeful_store::workspace::name_of(&orphan), &orphan).await.unwrap();
    }
    let packs = async |id: &str| {
        let sql = "select count(*) from blobs where media_type like '%pack' and stored_for = $1";
        sample.database.value::<i64>(sql, id).await
    };
    assert_eq!((packs(&sample.id).await, packs(&other).await), (4, 4));
    let (status, out, log) = sample.cli(&["conversation", "erase", "c1", "--yes"]).await;
    assert_eq!(status, 0, "{out}{log}");
    assert_eq!((packs(&sample.id).await, packs(&other).await), (0, 4));
}

#[tokio::test]
async fn a_host_that_cannot_keep_files_is_told_to_operators_and_not_to_the_model() {
    let sample = Sample::new().await;
    let folder = sample.options.path("workspaces");
    std::fs::remove_dir_all(&folder).unwrap();
    std::fs::write(&folder, "in the way").unwrap();
    let path = format!("/v1/sessions/{}/messages", sample.id);
    sample.client.post(&path, &json!({"text": "Again."})).await;
    eventually("the step to wait for a host", || async {
        let (_, said, _) = sample.cli(&["session", "why", &sample.id]).await;
        said.contains("cannot keep the session's files").then_some(())
    })
    .await;
    let (_, status) = sample.client.get(&format!("/v1/sessions/{}", sample.id)).await;
    assert_eq!(status["status"], "running", "{status}");
    std::fs::remove_file(&folder).unwrap();
    let session = sample.client.wait_for(&sample.id, "completed").await;
    let told = texts(&session, "tool");
    assert_eq!(told.len(), 10, "{told:?}");
    assert!(told.iter().all(|text| !text.contains("workspace")), "{told:?}");
}

#[tokio::test]
async fn a_store_that_lies_or_forgets_is_told_to_the_model_and_no_file_is_shown() {
    let sample = Sample::new().await;
    let folder = sample.options.path("workspaces").join(&sample.id);
    for (damage, why) in [
        (
            "update blobs set bytes = overlay(bytes placing '\\x00'::bytea from octet_length(bytes)) where media_type like '%pack'",
            "missing or has other bytes",
        ),
        ("update blobs set bytes = 'lies' where media_type like '%pack'", "other bytes than it should"),
        ("delete from blobs where media_type like '%pack'", "there is no blob"),
    ] {
        sqlx::query(damage).execute(&sample.database.pool).await.unwrap();
        std::fs::remove_dir_all(&folder).unwrap_or_default();
        let path = format!("/v1/sessions/{}/messages", sample.id);
        sample.client.post(&path, &json!({"text": "Again."})).await;
        let session = sample.client.wait_for(&sample.id, "completed").await;
        let told = texts(&session, "tool");
        let told =
            told.iter().rev().take(5).find(|text| text.contains("cannot be restored")).expect("a word");
        assert!(told.contains(why), "{told}");
        assert!(!folder.exists());
    }
}
