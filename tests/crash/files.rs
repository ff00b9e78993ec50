//! Kills around the snapshot of a session's files, and around its restore on another host.

use crate::support::checker::{Traces, distinct};
use crate::support::client::texts;
use crate::support::model::turns_since_user;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, eventually};
use serde_json::{Value, json};
use std::path::PathBuf;

/// A session that writes two files over three steps, reads the first and changes it.
async fn model() -> ModelServer {
    ModelServer::start(|body, _| match turns_since_user(body) {
        0 => Answer::call("write_file", json!({"path": "notes.md", "content": "A table for Ann."})),
        1 => Answer::call("write_file", json!({"path": "deep/more.md", "content": "By the window."})),
        2 => Answer::call("read_file", json!({"path": "notes.md"})),
        3 => Answer::call("write_file", json!({"path": "notes.md", "content": "A table for Bob."})),
        4 => Answer::call("read_file", json!({"path": "deep/more.md"})),
        _ => Answer::text("Done."),
    })
    .await
}

/// What a session leaves that ran on several hosts.
struct Left {
    database: Database,
    model: ModelServer,
    options: Options,
    session: Value,
    traces: Traces,
}

impl Left {
    fn host(&self, number: usize) -> PathBuf {
        self.options.path(&format!("host{number}")).join(self.session["session_id"].as_str().unwrap())
    }

    /// Packs that are stored, and those of them that an entry names.
    async fn packs(&self) -> (i64, i64) {
        let stored = "select count(*) from blobs where media_type like '%pack' and $1 <> ''";
        let named = "select count(distinct b.sha256) from session_events e
            cross join lateral jsonb_array_elements(e.payload -> 'packs') pack
            join blobs b on b.sha256 = pack ->> 'sha256'
            where e.type = 'WORKSPACE_SNAPSHOT' and $1 <> ''";
        (self.database.value(stored, "any").await, self.database.value(named, "any").await)
    }
}

/// Waits until the session has completed and its job has ended. Without an `id`, the message begins a session.
pub(super) async fn completed(
    client: &Client,
    database: &Database,
    id: Option<String>,
    text: &str,
) -> (String, Value) {
    let id = match id {
        Some(id) => id,
        None => client.chat("c1", text).await["session_id"].as_str().unwrap().to_owned(),
    };
    let session = client.wait_for(&id, "completed").await;
    eventually("the job to end", || async {
        let jobs: i64 = database.value("select count(*) from jobs where $1 <> ''", "all").await;
        (jobs == 0).then_some(())
    })
    .await;
    (id, session)
}

/// Waits until the process is dead, or there is nothing left to die of.
async fn dies_or_completes(process: &mut Process, database: &Database) {
    let open = "select count(*) from conversation_sessions s where $1 <> ''
        and (status <> 'completed' or exists (select from jobs j where j.session_id = s.session_id))";
    let over = eventually("its death, or the end of its run", || async {
        (database.value::<i64>(open, "any").await == 0).then_some(())
    });
    let end = process.end();
    tokio::select! {
        () = end.reached() => {}
        () = over => {}
    }
}

async fn killed_at(kills: &[&str]) -> Left {
    run(Kept::Here, kills, true).await
}

/// Where packs are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    /// In Postgres.
    Here,
    /// In a directory.
    Outside,
}

/// Runs the session. A process on a host of its own dies at each of `kills` in turn, and one more ends the run.
async fn run(kept: Kept, kills: &[&str], must_die: bool) -> Left {
    let database = Database::new().await;
    let model = model().await;
    let mut options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    if kept == Kept::Outside {
        let folder = options.path("blobs");
        std::fs::create_dir(&folder).unwrap();
        options = options.env("WAKEFUL_BLOBS__STORE", folder.display().to_string());
    }
    let on_host = |number: usize| {
        let folder = options.path(&format!("host{number}")).display().to_string();
        options.clone().env("WAKEFUL_WORKSPACE__DIR", folder)
    };
    let mut id = None;
    for (number, kill) in kills.iter().enumerate() {
        let options = on_host(number).env("FAILPOINTS", *kill);
        let process = if id.is_none() {
            let process = options.serve(&database).await;
            let first = process.client().chat("c1", "A table, please.").await;
            id = Some(first["session_id"].as_str().unwrap().to_owned());
            process
        } else {
            options.spawn(&database.url)
        };
        if !must_die {
            let mut process = process;
            dies_or_completes(&mut process, &database).await;
            continue;
        }
        let (status, process) = process.ended().await;
        assert!(!status.success() && process.log().contains("failpoint"), "{kill}: {}", process.log());
    }
    let process = on_host(kills.len()).serve(&database).await;
    let client = process.client();
    let (id, session) = completed(&client, &database, id, "A table, please.").await;
    assert!(process.terminate().success());
    let traces = Traces::of(&database, &id).await;
    Left { database, model, options, session, traces }
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn k30_k31_a_kill_around_a_snapshot_or_a_restore_loses_no_file() {
    let undisturbed = killed_at(&[]).await;
    let bodies = undisturbed.model.bodies();
    let of = |left: &Left| {
        let entries = left.traces.journal("WORKSPACE_SNAPSHOT").into_iter();
        entries
            .map(|entry| (entry["tree_sha256"].clone(), entry["message_number"].clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(of(&undisturbed).len(), 3, "one for each step that changed them");
    let rows = [
        // Before the commit of the first snapshot, and after it.
        &["K30_put=1*return"][..],
        &["K21=1*return"],
        &["K22=2*off->1*return"],
        // Of the second one.
        &["K30_put=1*off->1*return"],
        &["K21=1*off->1*return"],
        // Another host restores the files, and dies over that, twice; the next one then dies over its own snapshot.
        &["K22=2*off->1*return", "K31=1*return", "K31_rename=1*return", "K30_put=1*return", "K19=1*return"],
    ];
    let rows = rows.map(|kills| (Kept::Here, kills)).into_iter().chain([
        (Kept::Outside, &["K30_outside=1*return"][..]),
        (Kept::Outside, &["K30_put=1*off->1*return", "K31=1*return", "K30_outside=1*return"]),
    ]);
    for (kept, kills) in rows {
        let left = run(kept, kills, true).await;
        assert_eq!(distinct(&left.model.bodies()), bodies.iter().collect::<Vec<_>>(), "{kills:?}");
        assert_eq!(of(&left), of(&undisturbed), "the same files at the same messages: {kills:?}");
        let results = texts(&left.session, "tool");
        assert!(results[2].contains("A table for Ann."), "{kills:?}: {results:?}");
        assert!(results[4].contains("By the window."), "{kills:?}: {results:?}");
        let (stored, named) = left.packs().await;
        assert_eq!(stored, named, "a pack that was stored twice is one blob: {kills:?}");
        let last = left.host(kills.len());
        assert_eq!(std::fs::read_to_string(last.join("notes.md")).unwrap(), "A table for Bob.", "{kills:?}");
        assert_eq!(
            std::fs::read_to_string(last.join("deep/more.md")).unwrap(),
            "By the window.",
            "{kills:?}"
        );
        let steps = &left.traces.steps;
        let trees: Vec<&Value> = steps.iter().map(|step| &step["workspace_sha256"]).collect();
        assert!(trees.iter().all(|tree| tree.is_string()), "each step says which files it left: {trees:?}");
        assert_eq!(trees[1], trees[2], "a step that only reads leaves the files of the step before");
    }
}

#[tokio::test]
async fn k31_a_folder_that_is_half_restored_is_never_seen() {
    for kill in ["K31=1*return", "K31_rename=1*return"] {
        let left = killed_at(&["K22=3*off->1*return", kill]).await;
        assert!(!left.host(1).exists(), "{kill}");
        assert!(left.host(2).join("notes.md").exists(), "{kill}");
    }
}

/// `make test-slow` runs it: two hundred kills, one to three of them in one session, each on a host of its own.
#[tokio::test]
#[ignore = "slow: make soak"]
async fn k30_k31_two_hundred_kills_around_snapshots_and_restores_lose_nothing() {
    const PLACES: [&str; 10] =
        ["K17", "K18", "K19", "K21", "K22", "K30_put", "K30_put", "K30_outside", "K31", "K31_rename"];
    let undisturbed = run(Kept::Here, &[], true).await;
    let bodies = undisturbed.model.bodies();
    let (mut kills, mut seed) = (0, 0);
    while kills < 200 {
        let mut dice = crate::trial::Dice::new(seed);
        let places: Vec<String> = (0..=dice.below(3))
            .map(|_| format!("{}={}*off->1*return", dice.of(&PLACES), dice.below(4)).replace("=0*off->", "="))
            .collect();
        let kept = if seed % 2 == 0 { Kept::Here } else { Kept::Outside };
        let left = run(kept, &places.iter().map(String::as_str).collect::<Vec<_>>(), false).await;
        assert_eq!(
            distinct(&left.model.bodies()),
            bodies.iter().collect::<Vec<_>>(),
            "seed {seed}: {places:?}"
        );
        let results = texts(&left.session, "tool");
        assert!(
            results[2].contains("A table for Ann.") && results[4].contains("By the window."),
            "seed {seed}: {places:?}"
        );
        let mut blobs = wakeful_config::Blobs::default();
        if kept == Kept::Outside {
            blobs.store = Some(left.options.path("blobs").display().to_string());
        }
        let stores = wakeful_engine::blobs::stores(&blobs).unwrap();
        let store = left.database.store().await.with_blob_stores(stores);
        let checked = store.check_blobs(None).await.unwrap();
        assert!(
            checked.wrong.is_empty() && checked.missing.is_empty(),
            "seed {seed}: {places:?}: {checked:?}"
        );
        (kills, seed) = (kills + places.len(), seed + 1);
    }
}

#[tokio::test]
async fn k30_a_kill_while_files_are_stored_keeps_the_outcome_of_a_call_that_ended_last() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| match turns_since_user(body) {
        0 => Answer::Calls(vec![
            ("write_file".to_owned(), json!({"path": "notes.md", "content": "A table for Ann."}).to_string()),
            ("charge".to_owned(), json!({"cents": 500}).to_string()),
        ]),
        _ => Answer::text("Done."),
    })
    .await;
    // The charge takes its time, so it ends last, and its outcome is left to the commit of the turn.
    let options =
        Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url).env("FIXTURE_TAKE_MS", "500");
    let dying = options.clone().env("FAILPOINTS", "K30_put=1*return").serve(&database).await;
    let first = dying.client().chat("c1", "Charge me.").await;
    let (status, dead) = dying.ended().await;
    assert!(!status.success() && dead.log().contains("failpoint"), "{}", dead.log());
    let process = options.serve(&database).await;
    let id = first["session_id"].as_str().map(str::to_owned);
    let (id, session) = completed(&process.client(), &database, id, "").await;
    assert_eq!(texts(&session, "assistant").last().map(String::as_str), Some("Done."));
    let traces = Traces::of(&database, &id).await;
    assert_eq!(traces.journal("TOOL_FAILED_UNCERTAIN").len(), 0);
    assert_eq!(options.effects().len(), 1, "it was charged once");
    assert!(process.terminate().success());
}
