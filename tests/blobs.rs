//! Stores of packs outside of Postgres: a directory that is used, goes away, comes back, is left, and keeps nothing of what was
//! erased.

#[cfg(feature = "object-stores")]
mod faults;

use crate::support::client::texts;
use crate::support::model::turns_since_user;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, eventually};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use wakeful_store::Store;
use wakeful_store::workspace::name_of;

const HERE: &str = "select count(*) from blobs where media_type like $1 and store is null and size > 0 and octet_length(bytes) = size";
const OUTSIDE: &str =
    "select count(*) from blobs where media_type like $1 and store like '/%' and bytes = ''";
const NOTES: &str = "select count(*) from blob_removals where $1 <> ''";

/// Counts the files below a folder.
fn files(folder: &Path) -> usize {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| if entry.path().is_dir() { files(&entry.path()) } else { 1 }).sum()
}

struct Sample {
    database: Database,
    _model: ModelServer,
    /// Of a process that keeps packs in `folder`.
    outside: Options,
    folder: PathBuf,
}

impl Sample {
    /// A model that does what the last message says: `write NAME` or `read NAME`, and `charge` beside it.
    async fn new() -> Sample {
        let model = ModelServer::start(|body, _| {
            let said = body["messages"].as_array().into_iter().flatten().rev();
            let said = said
                .filter(|message| message["role"] == "user")
                .map(|message| message["content"].to_string());
            let said = said.take(1).collect::<String>();
            let words: Vec<&str> = said.trim_matches('"').split(' ').collect();
            if turns_since_user(body) > 0 {
                return Answer::text("Done.");
            }
            let calls = words.chunks(2).map(|pair| match pair {
                ["write", name] => ("write_file", json!({"path": name, "content": format!("I am {name}.")})),
                ["read", name] => ("read_file", json!({"path": name})),
                _ => ("charge", json!({"cents": 5})),
            });
            Answer::Calls(calls.map(|(tool, arguments)| (tool.to_owned(), arguments.to_string())).collect())
        })
        .await;
        let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
        let folder = options.path("blobs");
        std::fs::create_dir(&folder).unwrap();
        let outside = options.env("WAKEFUL_BLOBS__STORE", folder.display().to_string());
        Sample { database: Database::new().await, _model: model, outside, folder }
    }

    /// A process on a host of its own.
    async fn host(&self, name: &str) -> Process {
        let folder = self.outside.path(name).display().to_string();
        self.outside.clone().env("WAKEFUL_WORKSPACE__DIR", folder).serve(&self.database).await
    }

    async fn count(&self, what: &'static str) -> i64 {
        self.database.value(what, "%pack").await
    }

    /// A store of this test that keeps packs in the folder.
    async fn store(&self) -> Store {
        let folder = self.folder.display().to_string();
        self.store_of(wakeful_config::Blobs { store: Some(folder), ..Default::default() }).await
    }

    async fn store_of(&self, blobs: wakeful_config::Blobs) -> Store {
        let stores = wakeful_engine::blobs::stores(&blobs).unwrap();
        self.database.store().await.with_blob_stores(stores)
    }

    /// Runs a command that succeeds, with other variables.
    async fn cli(&self, env: &[(&str, &str)], args: &[&str]) -> String {
        let (code, output) = self.ends(env, args).await;
        assert_eq!(code, 0, "{args:?}: {output}");
        output
    }

    async fn ends(&self, env: &[(&str, &str)], args: &[&str]) -> (i32, String) {
        let (code, output) = self.runs(env, args).await;
        (code.expect("it ended by itself"), output)
    }

    /// Runs a command that kills itself, unless it has too little to do.
    async fn killed(&self, env: &[(&str, &str)], args: &[&str]) {
        let (code, output) = self.runs(env, args).await;
        assert!(code == Some(0) || output.contains("failpoint"), "{args:?}: {output}");
    }

    async fn runs(&self, env: &[(&str, &str)], args: &[&str]) -> (Option<i32>, String) {
        let mut options = Options {
            config: self.outside.config.clone(),
            args: args.iter().map(|&arg| arg.to_owned()).collect(),
            env: self.outside.env.clone(),
            dir: Arc::clone(&self.outside.dir),
        };
        options.env.extend(env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        let (status, process) = options.spawn(&self.database.url).ended().await;
        (status.code(), process.output() + &process.log())
    }
}

async fn says(client: &Client, conversation: &str, text: &str) -> String {
    client.chat(conversation, text).await["session_id"].as_str().unwrap().to_owned()
}

/// Waits until the session's job waits for a blob store, and returns its error.
async fn waits_for_a_store(client: &Client, id: &str) -> String {
    eventually("the outage to be shown", || async {
        let session = client.session(id).await;
        assert_ne!(session["status"], "failed", "an outage fails no run");
        let waits = session["job"]["waits_for"].as_str().is_some_and(|gate| gate.starts_with("blob store "));
        waits.then(|| session["job"]["last_error"].as_str().unwrap_or_default().to_owned())
    })
    .await
}

#[tokio::test]
async fn files_are_in_a_directory_that_may_go_away_and_may_be_left_at_any_time() {
    let sample = Sample::new().await;
    let process = sample.host("host1").await;
    let id = says(&process.client(), "c1", "write a.md").await;
    process.client().wait_for(&id, "completed").await;
    assert!(process.terminate().success());
    assert_eq!((sample.count(OUTSIDE).await, sample.count(HERE).await), (1, 0));
    assert_eq!((files(&sample.folder), sample.count(NOTES).await), (1, 0));

    // Another host, while the store is away: the session waits, and says for what.
    let away = sample.outside.path("away");
    std::fs::rename(&sample.folder, &away).unwrap();
    let process = sample.host("host2").await;
    let client = process.client();
    says(&client, "c1", "read a.md write b.md").await;
    let error = waits_for_a_store(&client, &id).await;
    let started = "select count(*) from tool_calls where status = 'started' and $1 <> ''";
    assert_eq!(sample.count(started).await, 0, "the row proves that the call did not run");
    let address = sample.folder.display().to_string();
    assert!(error.contains(&format!("blob store {address} is away")), "{error}");
    let (status, told) = client.get(&format!("/v1/sessions/{id}/files")).await;
    assert!(
        status == 503 && told["detail"].as_str().unwrap().starts_with("a blob store cannot be reached"),
        "{told}"
    );
    let why = sample.cli(&[], &["session", "why", &id]).await;
    assert!(why.contains(&format!("blob store {address}")) && why.contains("fails no run"), "{why}");
    let (code, doctor) = sample.ends(&[], &["doctor"]).await;
    assert!(code == 9 && doctor.contains(&format!("Blob store {address} has failed")), "{doctor}");
    std::fs::rename(&away, &sample.folder).unwrap();
    let session = client.wait_for(&id, "completed").await;
    assert!(texts(&session, "tool")[1].contains("I am a.md."), "{session}");
    assert!(process.terminate().success());

    // Moved into Postgres: nothing is left in the directory, and a process that does not know it reads the files.
    let also = address.clone();
    let here = [("WAKEFUL_BLOBS__STORE", "postgres"), ("WAKEFUL_BLOBS__ALSO", also.as_str())];
    assert!(sample.cli(&here, &["blobs", "verify"]).await.contains("Read "));
    assert!(sample.cli(&here, &["blobs", "move"]).await.contains("Moved 2 blobs"));
    assert_eq!((sample.count(OUTSIDE).await, sample.count(HERE).await), (0, 2));
    assert_eq!((files(&sample.folder), sample.count(NOTES).await), (0, 0));
    let alone = [("WAKEFUL_BLOBS__STORE", "postgres")];
    assert!(sample.cli(&alone, &["session", "files", &id]).await.contains("b.md"));
    assert!(sample.cli(&alone, &["blobs", "verify"]).await.contains("Read "));
    // And back.
    assert!(sample.cli(&[], &["blobs", "move"]).await.contains("Moved 2 blobs"));
    assert_eq!((sample.count(OUTSIDE).await, files(&sample.folder)), (2, 2));
    assert!(sample.cli(&[], &["blobs", "status"]).await.contains(&address));
    let (code, doctor) = sample.ends(&alone, &["doctor"]).await;
    assert!(code == 9 && doctor.contains("which [blobs] does not name"), "{doctor}");
    // A store that lies.
    let pack = std::fs::read_dir(std::fs::read_dir(&sample.folder).unwrap().next().unwrap().unwrap().path());
    std::fs::write(pack.unwrap().next().unwrap().unwrap().path(), "lies").unwrap();
    let (code, told) = sample.ends(&[], &["blobs", "verify"]).await;
    assert!(code == 8 && told.contains("wrong: "), "{told}");
}

#[tokio::test]
async fn a_store_that_is_away_when_files_are_stored_repeats_no_effect() {
    let sample = Sample::new().await;
    std::fs::remove_dir(&sample.folder).unwrap();
    let process = sample.host("host1").await;
    let client = process.client();
    let id = says(&client, "c1", "write a.md charge 5").await;
    waits_for_a_store(&client, &id).await;
    // The turn is not committed, so its files are not there yet.
    assert_eq!(sample.outside.effects().len(), 1);
    std::fs::create_dir(&sample.folder).unwrap();
    let session = client.wait_for(&id, "completed").await;
    assert!(texts(&session, "tool")[1].contains("Charged 5 cents."), "{session}");
    assert_eq!(sample.outside.effects().len(), 1, "the card was charged once");
    assert!(sample.cli(&[], &["session", "files", &id]).await.contains("a.md"));
    assert!(process.terminate().success());
}

#[tokio::test]
async fn packs_are_moved_to_and_fro_while_sessions_write_and_none_is_lost() {
    let sample = Sample::new().await;
    let process = sample.host("host1").await;
    let other = sample.host("host2").await;
    let client = process.client();
    let sessions = futures::future::join_all((0..3).map(|chat| {
        let client = &client;
        async move {
            let conversation = format!("c{chat}");
            let mut id = String::new();
            for number in 0..5 {
                id = says(client, &conversation, &format!("write {number}.md read {}.md", number.max(1) - 1))
                    .await;
                client.wait_for(&id, "completed").await;
            }
            id
        }
    }));
    let also = sample.folder.display().to_string();
    let here = [("WAKEFUL_BLOBS__STORE", "postgres"), ("WAKEFUL_BLOBS__ALSO", also.as_str())];
    let moves = async {
        for number in 0..3 {
            // One in three dies when a pack is in both places; the next one goes on.
            let dies = [("FAILPOINTS", "K30_move=1*off->1*return")];
            if number == 1 {
                sample.killed(&[&here[..], &dies].concat(), &["blobs", "move"]).await;
                sample.killed(&dies, &["blobs", "move"]).await;
            }
            sample.cli(&here, &["blobs", "move"]).await;
            sample.cli(&[], &["blobs", "move"]).await;
        }
    };
    let (ids, ()) = tokio::join!(sessions, moves);
    for id in ids {
        let session = client.session(&id).await;
        let told = texts(&session, "tool");
        assert!(told.iter().all(|text| !text.contains("cannot be")), "{told:?}");
        let listed = sample.cli(&[], &["session", "files", &id]).await;
        assert!((0..5).all(|number| listed.contains(&format!("{number}.md"))), "{listed}");
    }
    sample.cli(&[], &["blobs", "move"]).await;
    sample.cli(&[], &["blobs", "verify"]).await;
    assert_eq!((sample.count(HERE).await, sample.count(NOTES).await), (0, 0));
    assert_eq!(sample.count(OUTSIDE).await, files(&sample.folder) as i64);
    assert!(process.terminate().success() && other.terminate().success());
}

#[tokio::test]
async fn a_pack_whose_bytes_are_on_their_way_is_not_taken_for_one_that_is_lost() {
    let sample = Sample::new().await;
    let process = sample.host("host1").await;
    let mut locks = sample.database.pool.begin().await.unwrap();
    // Nobody can note that bytes are on their way.
    sqlx::query("lock table blob_removals in share row exclusive mode").execute(&mut *locks).await.unwrap();
    let id = says(&process.client(), "c1", "write a.md").await;
    eventually("the pack to be put", || async {
        let waits = "select count(*) from pg_locks where relation = 'blob_removals'::regclass and not granted and $1 <> ''";
        (sample.count(waits).await > 0).then_some(())
    })
    .await;
    let also = vec![sample.folder.display().to_string()];
    let here = sample.store_of(wakeful_config::Blobs { also, ..Default::default() }).await;
    let moved = here.move_blobs(None, |_| {}).await.unwrap();
    assert_eq!((moved.blobs, moved.unreadable), (0, 0));
    locks.rollback().await.unwrap();
    process.client().wait_for(&id, "completed").await;
    assert_eq!(here.move_blobs(None, |_| {}).await.unwrap().blobs, 1);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn whatever_dies_while_a_pack_is_put_or_moved_nothing_is_left_of_an_erased_session() {
    let sample = Sample::new().await;
    sample.database.with_roles().await;
    let process = sample.host("host1").await;
    let id = says(&process.client(), "c1", "write a.md").await;
    process.client().wait_for(&id, "completed").await;
    let other = says(&process.client(), "c2", "write a.md").await;
    process.client().wait_for(&other, "completed").await;
    assert!(process.terminate().success());
    // A worker dies after it has put a pack, before the commit that would name it.
    let dying =
        sample.outside.clone().env("FAILPOINTS", "K30_outside=1*return").serve(&sample.database).await;
    says(&dying.client(), "c1", "write b.md").await;
    assert!(!dying.ended().await.0.success());
    // The run is cancelled, so that nothing puts the pack again.
    let api = sample.outside.clone().arg("--roles=api").serve(&sample.database).await;
    let (status, told) = api.client().post(&format!("/v1/sessions/{id}/cancel"), &json!({})).await;
    assert!(status.is_success(), "{told}");
    assert!(api.terminate().success());
    let process = sample.host("host2").await;
    process.client().wait_for(&id, "cancelled").await;
    eventually("the job to end", || async {
        let jobs: i64 = sample.database.value("select count(*) from jobs where $1 <> ''", "all").await;
        (jobs == 0).then_some(())
    })
    .await;
    assert!(process.terminate().success());
    assert_eq!((files(&sample.folder), sample.count(NOTES).await), (3, 1));
    // A move dies after it has put a pack, before its row says so.
    let elsewhere = sample.outside.path("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let (to, from) = (elsewhere.display().to_string(), sample.folder.display().to_string());
    let moving = [
        ("WAKEFUL_BLOBS__STORE", to.as_str()),
        ("WAKEFUL_BLOBS__ALSO", from.as_str()),
        ("FAILPOINTS", "K30_move=2*off->1*return"),
    ];
    let mut dead = Options { args: vec!["blobs".to_owned(), "move".to_owned()], ..sample.outside.clone() };
    dead.env.extend(moving.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    assert!(!dead.spawn(&sample.database.url).ended().await.0.success());
    assert_eq!(files(&elsewhere), 3);

    let both = &moving[..2];
    let packs = sqlx::query_scalar("select sha256 from blobs where stored_for = $1").bind(&id);
    let packs: Vec<String> = packs.fetch_all(&sample.database.pool).await.unwrap();
    assert_eq!(packs.len(), 2, "one with a commit, and one without");
    sample.cli(both, &["conversation", "erase", "c1", "--yes"]).await;
    let left = async || {
        let sql = "select count(*) from blobs where stored_for = $1";
        (sample.database.value::<i64>(sql, &id).await, sample.database.value::<i64>(sql, &other).await)
    };
    assert_eq!(left().await, (0, 1));
    for sha256 in packs {
        let in_default = |folder: &Path| folder.join("in-default").join(&sha256).exists();
        assert!(!in_default(&sample.folder) && !in_default(&elsewhere), "it is erased everywhere");
    }
    // What was being put for the other session is due after an hour, unless it is put again.
    sqlx::query("update blob_removals set remove_after = now()")
        .execute(&sample.database.pool)
        .await
        .unwrap();
    sample.cli(both, &["blobs", "gc"]).await;
    sample.cli(both, &["blobs", "move"]).await;
    assert_eq!(sample.count(NOTES).await, 0);
    assert_eq!((files(&sample.folder), files(&elsewhere)), (0, 1));
    sample.cli(both, &["blobs", "verify"]).await;
    assert!(sample.cli(both, &["session", "files", &other]).await.contains("a.md"));
}

#[tokio::test]
async fn a_pack_that_is_put_while_its_row_goes_is_removed_and_one_that_is_put_again_stays() {
    let sample = Sample::new().await;
    sample.database.with_roles().await;
    let process = sample.host("host1").await;
    let id = says(&process.client(), "c1", "write a.md").await;
    process.client().wait_for(&id, "completed").await;
    let store = sample.store().await;
    let orphan = b"an orphan".repeat(100);
    let sha256 = name_of(&orphan);
    store.put_pack(&id, &sha256, &orphan).await.unwrap();
    assert_eq!(files(&sample.folder), 2);
    let old = "update blobs set touched_at = now() - interval '2 hours'";
    sqlx::query(old).execute(&sample.database.pool).await.unwrap();
    // The store is away when it is collected: its row goes, and the note stays.
    let away = sample.outside.path("away");
    std::fs::rename(&sample.folder, &away).unwrap();
    let hour = Duration::from_secs(3600);
    assert!(store.collect_blobs(None, hour, false).await.is_err());
    assert_eq!(sample.count(NOTES).await, 1);
    std::fs::rename(&away, &sample.folder).unwrap();
    // Put again before that is made up for: it stays.
    store.put_pack(&id, &sha256, &orphan).await.unwrap();
    store.remove_outside().await.unwrap();
    assert_eq!((files(&sample.folder), sample.count(NOTES).await), (2, 0));
    sqlx::query(old).execute(&sample.database.pool).await.unwrap();
    assert_eq!(store.collect_blobs(None, hour, false).await.unwrap().blobs, 1);
    assert_eq!((files(&sample.folder), sample.count(NOTES).await), (1, 0));
    assert!(process.terminate().success());
}

/// Sessions write files while what no snapshot names is collected again and again. Every blob is old as soon as a snapshot names
/// it, so only the snapshot keeps it.
async fn collected_beside(sessions: usize, goes_on: impl Fn(usize) -> bool) {
    let sample = Sample::new().await;
    sample.database.with_roles().await;
    let (process, other) = (sample.host("host1").await, sample.host("host2").await);
    let (client, store) = (process.client(), sample.store().await);
    let planted = says(&client, "planted", "write a.md").await;
    client.wait_for(&planted, "completed").await;
    let (goes_on, wrote) = (&goes_on, &tokio::sync::Notify::new());
    // A few at a time write in their share of the chats, round after round.
    let writers = sessions.min(16);
    let written = futures::future::join_all((0..writers).map(|writer| {
        let client = &client;
        async move {
            let chats = || (writer..sessions).step_by(writers);
            let (mut ids, mut number) = (vec![String::new(); chats().count()], 0);
            while goes_on(number) {
                let text = format!("write {number}.md read {}.md", number.max(1) - 1);
                for (chat, id) in chats().zip(&mut ids) {
                    *id = says(client, &format!("c{chat}"), &text).await;
                    client.wait_for(id, "completed").await;
                    wrote.notify_one();
                }
                number += 1;
            }
            ids
        }
    }));
    let mut written = std::pin::pin!(written);
    let (mut rounds, mut collected) = (0, 0);
    let ids = loop {
        let orphan = format!("orphan {rounds}").into_bytes();
        store.put_pack(&planted, &name_of(&orphan), &orphan).await.unwrap();
        // Every pack that a snapshot names is old enough to be collected, and so is the orphan.
        let old = "update blobs set touched_at = now() - interval '2 hours'
            where touched_at > now() - interval '1 hour' and (size < 100 or sha256 in (
                select pack ->> 'sha256' from session_events e, jsonb_array_elements(e.payload -> 'packs') pack
                where e.type = 'WORKSPACE_SNAPSHOT'))";
        sqlx::query(old).execute(&sample.database.pool).await.unwrap();
        collected += store.collect_blobs(None, Duration::from_secs(3600), false).await.unwrap().blobs;
        rounds += 1;
        tokio::select! {
            biased;
            ids = &mut written => break ids,
            () = wrote.notified() => {}
        }
    };
    assert_eq!(collected, rounds, "each orphan, and nothing else");
    let checked = store.check_blobs(None).await.unwrap();
    assert!(checked.wrong.is_empty() && checked.missing.is_empty(), "{checked:?}");
    assert_eq!(sample.count(OUTSIDE).await, files(&sample.folder) as i64);
    for id in ids.concat() {
        let session = client.session(&id).await;
        assert!(texts(&session, "tool").iter().all(|text| !text.contains("cannot be")), "{session}");
    }
    assert!(process.terminate().success() && other.terminate().success());
}

#[tokio::test]
async fn what_is_collected_beside_running_sessions_is_what_no_snapshot_names() {
    collected_beside(4, |messages| messages < 3).await;
}

/// `make test-slow` runs it for a minute; `WAKEFUL_GC_S=600` for ten.
#[tokio::test]
#[ignore = "slow: make soak"]
async fn what_is_collected_beside_a_thousand_sessions_is_what_no_snapshot_names() {
    let seconds = std::env::var("WAKEFUL_GC_S").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(60);
    let (began, long) = (std::time::Instant::now(), Duration::from_secs(seconds));
    collected_beside(1000, |messages| messages < 2 || began.elapsed() < long).await;
}
