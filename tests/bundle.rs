//! Bundles through the program: the API and its token, the command line, a live run, and a crash.

use crate::support::{Answer, Client, Database, ModelServer, Options, Process, Program};
use reqwest::StatusCode;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use wakeful_workflow::bundle::normal::normal;

struct World {
    database: Database,
    model: ModelServer,
    options: Options,
    process: Process,
    client: Client,
}

impl World {
    async fn new() -> World {
        let model = ModelServer::turns(vec![
            Answer::call("reserve", json!({"persons": 2})),
            Answer::call("reserve", json!({"persons": 3})),
            Answer::text("Your tables are reserved."),
        ])
        .await;
        let options = Options::new()
            .model("openai/test")
            .env("OPENAI_BASE_URL", &model.url)
            .env("WAKEFUL_SERVER__INTERNAL_TOKENS", "old-token-for-exports,new-token-for-exports");
        let database = Database::new().await;
        let process = options.serve(&database).await;
        let client = process.client();
        World { database, model, options, process, client }
    }

    async fn begin(&self) -> String {
        let answer = self.client.chat("c1", "Two tables, please.").await;
        answer["session_id"].as_str().unwrap().to_owned()
    }

    async fn completed(&self) -> String {
        let id = self.begin().await;
        self.client.wait_for(&id, "completed").await;
        id
    }

    async fn export(&self, path: &str, token: Option<&str>) -> (StatusCode, Vec<u8>) {
        let mut request = self.client.get_request(path);
        if let Some(token) = token {
            request = request.header("X-Internal-Token", token);
        }
        let response = request.send().await.unwrap();
        let status = response.status();
        (status, response.bytes().await.unwrap().to_vec())
    }

    async fn bundle(&self, id: &str) -> Vec<u8> {
        let (status, bundle) =
            self.export(&format!("/sessions/{id}/export"), Some("new-token-for-exports")).await;
        assert_eq!(status, StatusCode::OK, "{}", String::from_utf8_lossy(&bundle));
        bundle
    }

    async fn import(&self, query: &str, bundle: Vec<u8>) -> (StatusCode, Value) {
        let request = self.client.post_request(&format!("/v1/sessions/import{query}")).body(bundle);
        let response = request.send().await.unwrap();
        let status = response.status();
        (status, response.json().await.unwrap())
    }

    fn cli(&self, args: &[&str]) -> Options {
        Options {
            config: self.options.config.clone(),
            args: args.iter().map(|&arg| arg.to_owned()).collect(),
            env: self.options.env.clone(),
            dir: Arc::clone(&self.options.dir),
        }
    }

    async fn run(&self, options: Options) -> (Option<i32>, Process) {
        let (status, process) = options.spawn(&self.database.url).ended().await;
        (status.code(), process)
    }
}

#[tokio::test]
async fn an_export_wants_one_of_the_internal_tokens_and_gives_the_whole_bundle() {
    let world = World::new().await;
    let id = world.completed().await;
    for path in [format!("/sessions/{id}/export"), format!("/v1/sessions/{id}/export")] {
        assert_eq!(world.export(&path, None).await.0, StatusCode::UNAUTHORIZED);
        assert_eq!(world.export(&path, Some("")).await.0, StatusCode::FORBIDDEN);
        assert_eq!(world.export(&path, Some("ne")).await.0, StatusCode::FORBIDDEN);
        let (old, new) = (
            world.export(&path, Some("old-token-for-exports")).await,
            world.export(&path, Some("new-token-for-exports")).await,
        );
        assert_eq!((old.0, new.0), (StatusCode::OK, StatusCode::OK));
        assert_eq!(old.1, new.1, "the same state gives the same bytes");
    }
    assert_eq!(world.export("/sessions/sess_none/export", None).await.0, StatusCode::UNAUTHORIZED);
    assert_eq!(
        world.export("/sessions/sess_none/export", Some("new-token-for-exports")).await.0,
        StatusCode::NOT_FOUND
    );
    let redacted =
        world.export(&format!("/sessions/{id}/export?redact=true"), Some("new-token-for-exports")).await;
    assert!(!String::from_utf8(redacted.1).unwrap().contains("tables"));
    let odd =
        world.export(&format!("/sessions/{id}/export?redact=maybe"), Some("new-token-for-exports")).await;
    assert_eq!(odd.0, StatusCode::BAD_REQUEST);
    let request = world
        .client
        .get_request(&format!("/sessions/{id}/export"))
        .header("X-Internal-Token", "new-token-for-exports");
    let response = request.send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "application/x-ndjson");
    assert_eq!(response.headers()["content-disposition"], format!("attachment; filename=\"{id}.jsonl\""));

    // Without a configured token every export is refused, whatever token it carries.
    let options = Options {
        env: [("OPENAI_BASE_URL".to_owned(), world.model.url.clone())].into(),
        ..world.options.clone()
    };
    let process = options.serve(&world.database).await;
    let request =
        process.client().get_request(&format!("/sessions/{id}/export")).header("X-Internal-Token", "");
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), StatusCode::FORBIDDEN);
    assert!(response.text().await.unwrap().contains("internal_tokens"));
}

#[tokio::test]
async fn guesses_at_the_token_of_exports_are_in_the_audit_and_a_flood_of_them_is_counted() {
    let world = World::new().await;
    for path in ["/v1/sessions/sess_none/export", "/sessions/sess_none/export"] {
        for _ in 0..3 {
            assert_eq!(world.export(path, Some("a guess")).await.0, StatusCode::FORBIDDEN);
        }
    }
    let (_, listed) = world.client.get("/v1/audit?verb=session.export").await;
    let rows = listed["items"].as_array().unwrap();
    assert_eq!(rows.len(), 1, "the others are counted: {listed}");
    let row = &rows[0];
    assert_eq!((&row["outcome"], &row["status"]), (&json!("refused"), &json!(403)));
    assert_eq!((&row["actor_kind"], &row["target"]), (&json!("stranger"), &json!("sess_none")));
    assert_eq!(row["address"], "127.0.0.1");
}

#[tokio::test]
async fn an_export_that_fails_on_its_way_never_looks_whole() {
    let world = World::new().await;
    let id = world.completed().await;
    let bundle = world.bundle(&id).await;
    sqlx::query("delete from blobs").execute(&world.database.pool).await.unwrap();
    let request = world
        .client
        .get_request(&format!("/sessions/{id}/export"))
        .header("X-Internal-Token", "new-token-for-exports");
    // It had begun, so the head is on its way before the connection breaks.
    let response = request.send().await.expect("an answer that breaks off, and no server that hangs up");
    assert_eq!(response.status(), StatusCode::OK);
    assert!(response.bytes().await.is_err(), "the body breaks off");
    world.process.wait_for_log("An export broke off").await;
    let file = world.options.path("broken.jsonl");
    let server = world.process.url();
    let mut cli =
        world.cli(&["session", "export", &id, "--file", file.to_str().unwrap(), "--server", &server]);
    cli.env.insert("WAKEFUL_INTERNAL_TOKEN".into(), "new-token-for-exports".into());
    let (code, process) = world.run(cli).await;
    assert_eq!(code, Some(1), "{}", process.log());
    assert!(!file.exists(), "no file of that name");
    assert!(bundle.ends_with(b"\"}\n"));
}

#[tokio::test]
async fn k41_bundles_of_a_live_run_are_each_of_one_moment_and_can_be_taken_in() {
    let world = World::new().await;
    world.model.hold_from(1);
    let id = world.begin().await;
    world.model.asked(2).await;
    let mut bundles = vec![world.bundle(&id).await];
    assert!(String::from_utf8_lossy(&bundles[0]).contains("\"status\":\"running\""));
    world.model.release();
    while world.client.session(&id).await["status"] != "completed" {
        bundles.push(world.bundle(&id).await);
    }
    bundles.push(world.bundle(&id).await);
    let store = world.database.store().await;
    for bundle in bundles {
        let (status, imported) = world.import("", bundle.clone()).await;
        assert_eq!(status, StatusCode::CREATED, "{imported}");
        let copy = imported["session_id"].as_str().unwrap();
        assert!(store.verify(copy).await.unwrap().agrees, "totals are the sums of its steps, and so on");
        assert_eq!(normal(&bundle).unwrap(), normal(&world.bundle(copy).await).unwrap());
    }
}

#[tokio::test]
async fn an_import_by_the_api_is_verified_refused_or_made_and_starts_nothing() {
    let world = World::new().await;
    let id = world.completed().await;
    let bundle = world.bundle(&id).await;
    let before = world.database.rows().await;
    let (status, report) = world.import("?verify_only", bundle.clone()).await;
    assert_eq!((status, &report["exported_session_id"]), (StatusCode::OK, &json!(id)), "{report}");
    assert_eq!((&report["session_id"], &report["counts"]["steps"]), (&Value::Null, &json!(3)));
    let (status, problem) = world.import("", bundle[..bundle.len() - 9].to_vec()).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(problem["detail"].as_str().unwrap().starts_with("the bundle is refused: line "), "{problem}");
    assert_eq!(world.database.rows().await, before, "nothing was written");

    let asked = world.model.bodies().len();
    let (status, imported) = world.import("", bundle).await;
    assert_eq!(status, StatusCode::CREATED, "{imported}");
    let copy = world.client.session(imported["session_id"].as_str().unwrap()).await;
    assert_eq!((&copy["status"], &copy["trigger_type"]), (&json!("completed"), &json!("import")));
    assert_eq!(copy["messages"].as_array().unwrap().len(), 6);
    assert_eq!(world.model.bodies().len(), asked);
    assert_eq!(world.database.rows().await["jobs"], 0);
    // A chat in the new conversation continues the copy.
    let conversation = imported["conversation_id"].as_str().unwrap();
    let answer = world.client.chat(conversation, "And one for tomorrow.").await;
    assert_eq!(answer["session_id"], imported["session_id"]);
    world.client.wait_for(imported["session_id"].as_str().unwrap(), "completed").await;
}

#[tokio::test]
async fn the_command_line_carries_a_session_from_a_server_or_a_database_into_a_file_and_back() {
    let world = World::new().await;
    let id = world.completed().await;
    let bundle = world.bundle(&id).await;
    let file = world.options.path("bundle.jsonl.gz");
    let name = file.to_str().unwrap();
    let (code, process) = world.run(world.cli(&["session", "export", &id, "--gzip", "--file", name])).await;
    assert_eq!((code, process.output().trim()), (Some(0), name), "{}", process.log());
    let (code, process) = world.run(world.cli(&["session", "export", &id, "--file", "-"])).await;
    assert_eq!((code, process.output().as_bytes() == bundle), (Some(0), true));

    let from_server = |token: &str, id: &str| {
        let mut cli = world.cli(&["session", "export", id, "--server", &world.process.url()]);
        cli.env.insert("WAKEFUL_INTERNAL_TOKEN".into(), token.into());
        cli
    };
    assert_eq!(world.run(from_server("new-token-for-exports", &id)).await.0, Some(0));
    assert_eq!(std::fs::read(world.options.path(&format!("{id}.jsonl"))).unwrap(), bundle);
    // A file that is there stays, and a redacted bundle has a name of its own.
    let plain = world.options.path(&format!("{id}.jsonl"));
    std::fs::write(&plain, "mine").unwrap();
    let (code, process) = world.run(world.cli(&["session", "export", &id])).await;
    assert_eq!((code, process.log().contains("--force")), (Some(2), true), "{}", process.log());
    let (code, process) = world.run(world.cli(&["session", "export", &id, "--redact"])).await;
    assert_eq!(code, Some(0), "{}", process.log());
    assert_eq!(process.output().trim(), format!("{id}.redacted.jsonl"));
    nothing_goes_on_without_texts(&world, &format!("{id}.redacted.jsonl")).await;
    assert_eq!(std::fs::read(&plain).unwrap(), b"mine");
    assert_eq!(world.run(world.cli(&["session", "export", &id, "--force"])).await.0, Some(0));
    assert_eq!(std::fs::read(&plain).unwrap(), bundle);
    assert_eq!(world.run(from_server("wrong", &id)).await.0, Some(5));
    assert_eq!(world.run(from_server("new-token-for-exports", "sess_none")).await.0, Some(3));
    assert_eq!(world.run(from_server("", &id)).await.0, Some(2));
    assert_eq!(world.run(world.cli(&["session", "export", "sess_none"])).await.0, Some(3));
    assert!(!world.options.path("sess_none.jsonl").exists());

    let (code, process) =
        world.run(world.cli(&["session", "import", name, "--verify-only", "-o", "json"])).await;
    assert_eq!(code, Some(0), "{}", process.log());
    let report: Value = serde_json::from_str(&process.output()).unwrap();
    assert_eq!((&report["session_id"], &report["counts"]["runs"]), (&Value::Null, &json!(1)));
    let (code, process) = world.run(world.cli(&["session", "import", name, "-o", "json"])).await;
    assert_eq!(code, Some(0), "{}", process.log());
    let imported: Value = serde_json::from_str(&process.output()).unwrap();
    let copy = world.bundle(imported["session_id"].as_str().unwrap()).await;
    assert_eq!(normal(&bundle).unwrap(), normal(&copy).unwrap());
    assert_eq!(world.run(world.cli(&["session", "import", "none.jsonl"])).await.0, Some(3));
    std::fs::write(world.options.path("no.jsonl"), "no bundle\n").unwrap();
    let (code, process) = world.run(world.cli(&["session", "import", "no.jsonl"])).await;
    assert_eq!(code, Some(1));
    assert!(process.log().contains("line 1: it is no bundle of Wakeful"), "{}", process.log());
}

#[tokio::test]
async fn make_exports_from_the_server_that_it_is_given_and_otherwise_from_the_database() {
    let world = World::new().await;
    let id = world.completed().await;
    // Cargo would build the program first. What follows "--" are the program's arguments.
    let cargo = world.options.path("cargo");
    let wakeful = Program::wakeful();
    let script = "while [ \"$1\" != -- ]; do shift; done; shift; exec";
    std::fs::write(&cargo, format!("{script} {} \"$@\"\n", wakeful.display())).unwrap();
    let make = async |more: &[&str], database: Option<&str>| {
        let file = world.options.path("made.jsonl");
        let _ = std::fs::remove_file(&file);
        let mut make = tokio::process::Command::new("make");
        make.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
            .args(["export-session", &format!("SESSION_ID={id}"), &format!("FILE={}", file.display())])
            .arg(format!("CARGO=sh {}", cargo.display()))
            .args(more)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .envs(database.map(|url| ("DATABASE_URL", url)));
        let ran = make.output().await.unwrap();
        (ran.status.code(), std::fs::read(&file).ok(), String::from_utf8_lossy(&ran.stderr).into_owned())
    };
    let bundle = Some(world.bundle(&id).await);
    let server = format!("SERVER_URL={}", world.process.url());
    let (code, made, said) = make(&[&server, "TOKEN=new-token-for-exports"], None).await;
    assert_eq!((code, made == bundle), (Some(0), true), "{said}");
    let (code, made, said) = make(&[&server, "TOKEN=wrong"], Some(&world.database.url)).await;
    assert_eq!((code, made), (Some(2), None), "{said}");
    assert!(said.contains("the server says 403"), "{said}");
    let (code, made, said) = make(&[], Some(&world.database.url)).await;
    assert_eq!((code, made == bundle), (Some(0), true), "{said}");
}

#[tokio::test]
async fn k42_an_import_that_dies_before_its_commit_leaves_nothing() {
    let world = World::new().await;
    let id = world.completed().await;
    std::fs::write(world.options.path("b.jsonl"), world.bundle(&id).await).unwrap();
    let before = world.database.rows().await;
    let mut cli = world.cli(&["session", "import", "b.jsonl"]);
    cli.env.insert("FAILPOINTS".into(), "K42=return".into());
    let (code, process) = world.run(cli).await;
    assert_eq!(code, None, "it was killed: {}", process.log());
    assert_eq!(world.database.rows().await, before);
    assert_eq!(world.run(world.cli(&["session", "import", "b.jsonl"])).await.0, Some(0));
}

#[tokio::test]
async fn what_is_no_file_is_refused_at_once_wherever_a_bundle_is_read() {
    let world = World::new().await;
    let pipe = world.options.path("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for args in [
        &["session", "import", "pipe"][..],
        &["session", "import", "--verify-only", "pipe"],
        &["replay", "pipe"],
    ] {
        let (code, process) = world.run(world.cli(args)).await;
        assert_eq!(code, Some(2), "{args:?}");
        assert!(process.log().contains("pipe is not a regular file"), "{}", process.log());
    }
}

#[tokio::test]
async fn a_replay_of_a_file_goes_by_the_limit_of_imports() {
    let world = World::new().await;
    // The message is in the inbox and in the transcript, so the bundle has it twice.
    let answer = world.client.chat("c1", &"x".repeat(700_000)).await;
    let id = answer["session_id"].as_str().unwrap();
    world.client.wait_for(id, "completed").await;
    std::fs::write(world.options.path("b.jsonl"), world.bundle(id).await).unwrap();
    let mut cli = world.cli(&["replay", "b.jsonl"]);
    cli.env.insert("WAKEFUL_SERVER__IMPORT_LIMIT_MB".into(), "1".into());
    let (code, process) = world.run(cli).await;
    assert_eq!(code, Some(1), "{}", process.log());
    assert!(process.log().contains("larger than 1048576 bytes"), "{}", process.log());
}

/// The peak memory of a process so far, in KiB. `None` after it has ended.
fn peak_kib(pid: i32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[tokio::test]
async fn a_bundle_of_the_largest_size_that_is_hostile_at_its_end_costs_less_than_64_mb() {
    const MB: usize = 16;
    let world = World::new().await;
    let id = world.completed().await;
    let bundle = String::from_utf8(world.bundle(&id).await).unwrap();
    let lines: Vec<&str> = bundle.lines().collect();
    let file = world.options.path("large.jsonl");
    let mut out = std::io::BufWriter::new(std::fs::File::create(&file).unwrap());
    let mut hash = Sha256::new();
    let mut write = |line: &str| {
        hash.update(line.as_bytes());
        hash.update(b"\n");
        writeln!(out, "{line}").unwrap();
    };
    let seed = |ordinal: usize, bytes: usize| {
        let row = json!({"content": "x".repeat(bytes)});
        format!(
            "{{\"seed\":{{\"ordinal\":{ordinal},\"role\":\"user\",\"content\":{},\"is_new\":true,\"timestamp\":null,\
             \"details\":null}}}}",
            row["content"]
        )
    };
    write(&lines[0].replacen("\"seeds\":1", &format!("\"seeds\":{}", MB + 1), 1));
    write(&lines[1].replacen("\"seed_message_count\":1", &format!("\"seed_message_count\":{}", MB + 1), 1));
    // Ordinary lines, one line of nearly the maximum length, and then a wrong end.
    for ordinal in 0..MB - 8 {
        write(&seed(ordinal, (1 << 20) - 4096));
    }
    write(&seed(MB - 8, (8 << 20) - 4096));
    write("{\"sha256\":\"0000\"}");
    drop(out);

    let small = world.options.path("small.jsonl");
    std::fs::write(&small, &bundle).unwrap();
    // What the program itself needs grows with its code, and is not what this is about.
    let (base, verified) = peak_of_verifying(&small, MB).await;
    assert_eq!(verified.0, 0, "{}", verified.1);
    let (peak, refused) = peak_of_verifying(&file, MB).await;
    assert_eq!(refused.0, 1, "{}", refused.1);
    assert!(refused.1.contains("the checksum does not fit"), "{}", refused.1);
    assert!(base > 1000 && peak < base + (24 << 10), "{peak} KiB, and {base} KiB for a small one");
    eprintln!("{peak} KiB at most, and {base} KiB for a small one");
}

/// The most memory that a process has while it verifies a bundle, in KiB, its exit status, and its errors.
async fn peak_of_verifying(file: &Path, limit_mb: usize) -> (u64, (i32, String)) {
    let mut command = Program::command(Path::new("/"));
    command.args(["session", "import", "--verify-only"]).arg(file);
    command.env("WAKEFUL_SERVER__IMPORT_LIMIT_MB", limit_mb.to_string());
    let mut program = Program::start(command);
    let mut peak = 0;
    // Poll as long as the process lives: its memory must not grow towards the end.
    while let Some(kib) = peak_kib(program.pid()) {
        peak = peak.max(kib);
        tokio::task::yield_now().await;
    }
    let status = program.end().await;
    (peak, (status, program.errors()))
}

/// A session without its texts is there to be read. It has no files, and nobody sends it a message.
async fn nothing_goes_on_without_texts(world: &World, file: &str) {
    let (code, process) = world.run(world.cli(&["session", "import", file, "-o", "json"])).await;
    assert_eq!(code, Some(0), "{}", process.log());
    let imported: Value = serde_json::from_str(&process.output()).unwrap();
    let id = imported["session_id"].as_str().unwrap();
    let client = world.process.client();
    let (status, refused) = client.get(&format!("/v1/sessions/{id}/files")).await;
    let said = refused["detail"].as_str().unwrap_or_default();
    assert!(
        status == 409 && said.contains("from a redacted bundle: such a bundle has no files"),
        "{refused}"
    );
    let (status, refused) =
        client.post(&format!("/v1/sessions/{id}/messages"), &json!({"text": "Go on."})).await;
    let said = refused["detail"].as_str().unwrap_or_default();
    assert!(status == 409 && said.contains("without its texts it cannot be continued"), "{refused}");
    let (code, process) = world.run(world.cli(&["session", "send", id, "Go on."])).await;
    let log = process.log();
    assert!(code != Some(0) && log.contains("without its texts it cannot be continued"), "{code:?} {log}");
}
