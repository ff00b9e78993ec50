//! Encryption: what people and models wrote is in no table, WAL segment or file of the database; once the key is erased,
//! nothing opens what a backup holds. People and models read it as ever.

mod doors;
mod moved;
mod stores;

use crate::context::weighs_the_same_without_messages;
use crate::support::client::texts;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, Server, eventually};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

pub(crate) const MASTER: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const OTHER_MASTER: &str = "ICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj8=";

/// What sealed values begin with.
const MARK: &str = "wks1";

fn planted(number: usize) -> String {
    format!("sealed{number:02}{TAIL}")
}

/// The text of an agent without encryption.
const IN_CLEAR: [usize; 1] = [0];

/// What each planted text ends with.
const TAIL: &str = "x7Qm3vTz";

/// The planted texts that stand in these bytes, as they are or in hex.
fn found(bytes: &[u8]) -> Vec<usize> {
    let plain = memchr::memmem::find_iter(bytes, TAIL).filter_map(|at| {
        let digits = std::str::from_utf8(bytes.get(at.checked_sub(2)?..at)?).ok()?;
        digits.parse().ok()
    });
    let tail = hex::encode(TAIL);
    let in_hex = memchr::memmem::find_iter(bytes, &tail).filter_map(|at| {
        let digits = hex::decode(bytes.get(at.checked_sub(4)?..at)?).ok()?;
        std::str::from_utf8(&digits).ok()?.parse().ok()
    });
    let mut found: Vec<usize> = plain.chain(in_hex).collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// All bytes below a folder: tables, WAL, the server's log.
fn bytes_below(folder: &Path) -> Vec<u8> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(bytes_below(&path));
        } else if path.is_file() {
            // The server may delete a file at any moment.
            all.extend(std::fs::read(&path).unwrap_or_default());
            all.push(b'\n');
        }
    }
    all
}

fn options(model: &ModelServer, keys: &str, master: &str) -> Options {
    Options::new()
        .env("OPENAI_BASE_URL", &model.url)
        .env("WAKEFUL_SERVER__INTERNAL_TOKENS", "an internal token of the test")
        .config("[agents.default]\nsystem_prompt = \"You are a test.\"\nmodel = \"openai/test\"\n\
             tools = [\"reserve\", \"charge\", \"compose_email\", \"ask_user\", \"read_attachment\"]\nrecipients = [\"*\"]\n\
             [agents.open]\nmodel = \"openai/test\"\ntools = []\n\
             [encryption]\nagents = [\"default\"]")
        .env("WAKEFUL_ENCRYPTION__KEYS", keys)
        .env("WAKEFUL_ENCRYPTION__MASTER_KEY", master)
}

/// A folder for keys beside the files of the processes.
fn folder_of_keys(options: &Options) -> String {
    let keys = options.path("keys");
    std::fs::create_dir(&keys).unwrap();
    keys.to_str().unwrap().to_owned()
}

fn files_of_keys(keys: &str) -> usize {
    let folders = std::fs::read_dir(keys).unwrap().map(|folder| folder.unwrap().path());
    let folders = folders.filter(|folder| folder.is_dir());
    folders.map(|folder| std::fs::read_dir(folder).unwrap().count()).sum()
}

async fn run(options: &Options, database: &Database, args: &[&str]) -> (Option<i32>, String, String) {
    let options = Options { args: args.iter().map(|&arg| arg.to_owned()).collect(), ..options.clone() };
    let (status, process) = options.spawn(&database.url).ended().await;
    (status.code(), process.output(), process.log())
}

/// A model that uses every way in which a text is stored.
async fn model() -> ModelServer {
    ModelServer::start(|body, _| {
        let all = body.to_string();
        let last = body["messages"].as_array().unwrap().last().unwrap();
        let says = |number: usize| last.to_string().contains(&planted(number));
        let turn = crate::support::model::turns_since_user(body);
        match turn {
            _ if says(15) => Answer::text(&format!("So {}.", planted(16))),
            _ if says(0) => Answer::text("In clear."),
            _ if all.contains(&planted(8)) => Answer::text(&planted(9)),
            0 if all.contains(&planted(11)) => {
                Answer::call("read_attachment", json!({"file": format!("{}.txt", planted(12))}))
            }
            _ if all.contains(&planted(11)) => Answer::text(&planted(14)),
            0 => Answer::Calls(vec![
                ("reserve".to_owned(), json!({"persons": planted(2)}).to_string()),
                (
                    "compose_email".to_owned(),
                    json!({"to": ["ann@example.com"], "subject": planted(3), "body": planted(4)}).to_string(),
                ),
            ]),
            1 => Answer::call("ask_user", json!({"question": planted(5)})),
            _ => Answer::text(&planted(7)),
        }
    })
    .await
}

/// A chat with calls, a mail, a question and an answer; a fork; a mail with a file. Returns the sessions.
async fn lived(client: &Client, model: &ModelServer, database: &Database) -> [String; 3] {
    let message = json!({"text": planted(1), "user_id": "ann@example.com"});
    let (_, woken) = client.post("/v1/chat/c1/messages", &message).await;
    let first = woken["session_id"].as_str().unwrap_or_else(|| panic!("{woken}")).to_owned();
    let asked = client.wait_for(&first, "waiting_input").await;
    assert_eq!(asked["question"], planted(5), "{asked}");
    let answer = json!({"text": planted(6), "user_id": "ann@example.com"});
    client.post("/v1/chat/c1/messages", &answer).await;
    client.wait_for(&first, "completed").await;
    // Somebody reads, so streamed text is written too.
    let stream = client.stream(&first, None).await;
    model.hold();
    let again = json!({"text": planted(15), "user_id": "ann@example.com"});
    client.post("/v1/chat/c1/messages", &again).await;
    eventually("streamed text to be written", || async {
        let chunks: i64 =
            database.value("select count(*) from generation_chunks where session_id = $1", &first).await;
        (chunks > 0).then_some(())
    })
    .await;
    model.release();
    client.wait_for(&first, "completed").await;
    drop(stream);
    let fork = json!({"at": 2, "text": planted(8), "start": true});
    let (status, forked) = client.post(&format!("/v1/sessions/{first}/fork"), &fork).await;
    assert!(status.is_success(), "{forked}");
    let forked = forked["session_id"].as_str().unwrap().to_owned();
    client.wait_for(&forked, "completed").await;
    let lines: String = (0..400).map(|line| format!("{line} {}\r\n", planted(13))).collect();
    let mail = format!(
        "From: Ann <ann@example.com>\r\nTo: agent@example.org\r\nSubject: a file\r\nMessage-ID: <m1@example.com>\r\n\
         MIME-Version: 1.0\r\nContent-Type: multipart/mixed; boundary=x\r\n\r\n--x\r\nContent-Type: text/plain\r\n\r\n{}\r\n\
         --x\r\nContent-Type: text/plain\r\nContent-Disposition: attachment; filename=\"{}.txt\"\r\n\r\n{lines}\r\n--x--\r\n",
        planted(11),
        planted(12)
    );
    let request =
        client.post_request("/v1/triggers/email/raw").header("content-type", "message/rfc822").body(mail);
    let woken: Value = request.send().await.unwrap().json().await.unwrap();
    let mailed = woken["session_id"].as_str().unwrap_or_else(|| panic!("{woken}")).to_owned();
    client.wait_for(&mailed, "completed").await;
    // A run is complete before its reply is sent.
    eventually("every job to end", || async {
        let jobs: i64 = database.value("select count(*) from jobs where $1 <> ''", "all").await;
        (jobs == 0).then_some(())
    })
    .await;
    [first, forked, mailed]
}

async fn export(client: &Client, session: &str) -> String {
    let export = client.get_request(&format!("/v1/sessions/{session}/export"));
    let export = export.header("X-Internal-Token", "an internal token of the test").send().await.unwrap();
    assert!(export.status().is_success());
    export.text().await.unwrap()
}

/// Everything that the API says of these sessions.
async fn shown(client: &Client, sessions: &[String]) -> String {
    let mut all = String::new();
    for id in sessions {
        let of =
            ["", "/messages", "/events", "/context", "/steps"].map(|part| format!("/v1/sessions/{id}{part}"));
        for path in of {
            all.push_str(&client.get(&path).await.1.to_string());
        }
        weighs_the_same_without_messages(client, id).await;
        all.push_str(&export(client, id).await);
    }
    for path in ["/v1/conversations/c1/history", "/v1/sessions", "/v1/deliveries"] {
        all.push_str(&client.get(path).await.1.to_string());
    }
    let (_, deliveries) = client.get("/v1/deliveries").await;
    let ids =
        deliveries["items"].as_array().or(deliveries["deliveries"].as_array()).cloned().unwrap_or_default();
    for delivery in ids {
        let path = format!("/v1/deliveries/{}", delivery["delivery_id"].as_str().unwrap());
        all.push_str(&client.get(&path).await.1.to_string());
    }
    all
}

/// A database whose server keeps its WAL, so that the test can search it.
async fn server_of_its_own() -> (Server, Database) {
    let server =
        Server::with(&[("wal_level", "replica"), ("max_wal_senders", "2"), ("wal_keep_size", "1GB")]).await;
    let database = Database::on(&server.url(), "pg_default").await;
    database.with_roles().await;
    (server, database)
}

async fn served(options: &Options, database: &Database) -> (Process, Client) {
    let process = options.serve(database).await;
    let client = process.client();
    (process, client)
}

#[tokio::test]
async fn what_is_sealed_is_in_no_table_no_wal_and_no_base_backup_and_its_key_goes_with_its_person() {
    let (server, database) = server_of_its_own().await;
    let model = model().await;
    let mut options = options(&model, "", MASTER);
    let keys = folder_of_keys(&options);
    options = options.env("WAKEFUL_ENCRYPTION__KEYS", &keys);
    let (process, client) = served(&options, &database).await;
    // An agent without encryption: what it hears is found, so the search below would find the others.
    let open = json!({"text": planted(0), "agent": "open"});
    let (_, woken) = client.post("/v1/chat/open/messages", &open).await;
    client.wait_for(woken["session_id"].as_str().unwrap_or_else(|| panic!("{woken}")), "completed").await;
    let sessions = lived(&client, &model, &database).await;
    // People and models read what was written.
    let told = shown(&client, &sessions).await;
    let read = found(told.as_bytes());
    for number in [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 14, 15, 16] {
        assert!(read.contains(&number), "{number} of {read:?}");
    }
    assert!(!told.contains(MARK), "nothing sealed is shown: {}", around(&told));
    // The journal tells how long an answer is, not how long it is when sealed.
    let (_, entries) = client.get(&format!("/v1/sessions/{}/events?limit=500", sessions[0])).await;
    let entries = entries["items"].as_array().unwrap();
    let answered = entries.iter().filter(|entry| entry["payload"]["text"] == planted(6));
    let bytes: Vec<&Value> = answered
        .filter(|entry| entry["type"] == "TOOL_RESULT")
        .map(|entry| &entry["payload"]["bytes"])
        .collect();
    assert_eq!(bytes, [&json!(planted(6).len())]);
    let asked = model.bodies().concat();
    assert!(!asked.contains(MARK) && asked.contains(&planted(13)), "{}", around(&asked));
    let (status, verified, said) = run(&options, &database, &["session", "verify", &sessions[0]]).await;
    assert_eq!(status, Some(0), "{verified}{said}");
    let session = client.session(&sessions[0]).await;
    assert!(texts(&session, "user").contains(&planted(1)), "{session}");
    let (_, listed) = client.get("/v1/sessions").await;
    let listed =
        listed["items"].as_array().unwrap().iter().find(|one| one["session_id"] == sessions[0].as_str());
    assert!(listed.unwrap()["first_message"].as_str().unwrap().contains(&planted(1)), "{listed:?}");
    let (_, listed, _) =
        run(&options, &database, &["session", "list", "--text", &planted(1), "-o", "json"]).await;
    assert_eq!(listed.trim(), "[]", "encrypted texts are not searched");

    // The server's files: tables and WAL. A base backup is a copy of them, and is taken all the same.
    let data = bytes_below(server.dir());
    assert_eq!(found(&data), IN_CLEAR, "of a database with {} MiB", data.len() >> 20);
    let backup = tempfile::tempdir().unwrap();
    let pg_basebackup = wakeful::internal::dev::Binaries::find().unwrap().dir.join("pg_basebackup");
    let taken = Command::new(pg_basebackup)
        .args(["-d", &server.url(), "-X", "stream", "-c", "fast", "-D"])
        .arg(backup.path().join("data"))
        .output()
        .unwrap();
    assert!(taken.status.success(), "{}", String::from_utf8_lossy(&taken.stderr));
    assert_eq!(found(&bytes_below(backup.path())), IN_CLEAR);
    assert_eq!(found(process.log().as_bytes()), [] as [usize; 0]);

    // A hold keeps texts and keys.
    let hold = ["person", "hold", "ann@example.com", "--reason", "a case"];
    let (status, _, said) = run(&options, &database, &hold).await;
    assert_eq!(status, Some(0), "{said}");
    let before = files_of_keys(&keys);
    assert_eq!(before, 2, "the fork has its parent's key");
    let erase = ["person", "erase", "ann@example.com", "--yes", "-o", "json"];
    let (status, _, _) = run(&options, &database, &erase).await;
    assert_ne!(status, Some(0));
    assert_eq!(files_of_keys(&keys), before);
    sqlx::query("update legal_holds set released_at = now()").execute(&database.pool).await.unwrap();

    // The fork alone: its key stays, because its parent has it too. A file goes with it, unless the parent names it.
    let (only, named) = ("a".repeat(64), "b".repeat(64));
    sqlx::query(
        "insert into sealed_blobs (data_key, sha256, space_id, size, media_type, bytes)
        select data_key, sha256, space_id, 1, 'text/plain', 'x' from conversation_sessions, unnest($2::text[]) sha256
        where session_id = $1",
    )
    .bind(&sessions[1])
    .bind(vec![only.clone(), named.clone()])
    .execute(&database.pool)
    .await
    .unwrap();
    sqlx::query(
        "update conversation_sessions set state = jsonb_build_object('file', $2::text) where session_id = $1",
    )
    .bind(&sessions[0])
    .bind(&named)
    .execute(&database.pool)
    .await
    .unwrap();
    let of_files = "select count(*) from sealed_blobs where sha256 = $1";
    let forked = client.session(&sessions[1]).await["conversation_id"].as_str().unwrap().to_owned();
    let (status, told, said) =
        run(&options, &database, &["conversation", "erase", &forked, "--yes", "-o", "json"]).await;
    assert_eq!(status, Some(0), "{told}{said}");
    assert!(told.contains("backups and WAL can be read until that is erased"), "{told}");
    assert_eq!(files_of_keys(&keys), before);
    assert_eq!(database.value::<i64>(of_files, &only).await, 0);
    assert_eq!(database.value::<i64>(of_files, &named).await, 1);

    // Without [encryption] an erasure would leave the keys, so it refuses.
    let mut bare = options.clone();
    bare.config = bare.config.replace("[encryption]\nagents = [\"default\"]", "");
    bare.env.retain(|name, _| !name.starts_with("WAKEFUL_ENCRYPTION"));
    let (status, _, said) = run(&bare, &database, &erase).await;
    assert!(status != Some(0) && said.contains("[encryption]"), "{said}");

    // It dies when the keys are gone, and the next one finishes it.
    let dies = options.clone().env("FAILPOINTS", "E3=1*return");
    let (status, _, said) = run(&dies, &database, &erase).await;
    assert_eq!(status, None, "{said}");
    assert_eq!(files_of_keys(&keys), 0, "the wrapped keys are gone too");
    let (status, _, said) = run(&options, &database, &erase).await;
    assert_eq!(status, Some(3), "nothing is left of her: {said}");
    let of_her =
        "select counts from erasures where pending is null and $1 <> '' order by begun_at desc limit 1";
    let receipt: Value = database.value(of_her, "x").await;
    assert_eq!(receipt["data_keys"], 2, "{receipt}");
    assert_eq!(found(&bytes_below(server.dir())), IN_CLEAR);
    let left: i64 = database.value("select count(*) from sealed_blobs where $1 <> ''", "x").await;
    assert_eq!(left, 0);
}

fn around(text: &str) -> &str {
    text.find(MARK).map_or("", |at| {
        let begin = text.floor_char_boundary(at.saturating_sub(120));
        &text[begin..text.floor_char_boundary((at + 60).min(text.len()))]
    })
}

#[tokio::test]
async fn a_worker_that_dies_leaves_what_the_next_one_opens_and_a_key_store_that_is_away_is_waited_for() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text(&planted(7))]).await;
    let mut options = options(&model, "", MASTER);
    let keys = folder_of_keys(&options);
    options = options.env("WAKEFUL_ENCRYPTION__KEYS", &keys);
    let (process, client) = served(&options, &database).await;
    model.hold();
    let woken = client.chat("c1", &planted(1)).await;
    let session = woken["session_id"].as_str().unwrap().to_owned();
    model.asked(1).await;
    process.kill();

    // The keys are away: the run waits, and names what it waits for.
    let elsewhere = options.path("elsewhere");
    std::fs::rename(&keys, &elsewhere).unwrap();
    let (process, client) = served(&options, &database).await;
    eventually("the job to say why it waits", || async {
        let said: Option<String> =
            database.value("select max(last_error) from jobs where session_id = $1", &session).await;
        said.filter(|said| said.contains("key store")).map(drop)
    })
    .await;
    // A key store without the key is not the right one: the run waits for that too.
    std::fs::create_dir(&keys).unwrap();
    eventually("the job to say that the key is not there", || async {
        let said: Option<String> =
            database.value("select max(last_error) from jobs where session_id = $1", &session).await;
        said.filter(|said| said.contains("it has no data key")).map(drop)
    })
    .await;
    let (_, listed) = client.get("/v1/conversations/c1/history").await;
    assert!(listed.to_string().contains("[encrypted]") && !listed.to_string().contains(MARK), "{listed}");
    std::fs::remove_dir(&keys).unwrap();
    let status: String =
        database.value("select status from conversation_sessions where session_id = $1", &session).await;
    assert!(matches!(status.as_str(), "queued" | "running"), "{status}");
    let faults: i32 = database.value("select max(faults) from jobs where session_id = $1", &session).await;
    assert_eq!(faults, 0, "waiting is not a fault of the database");
    let (refused, problem) =
        client.post(&format!("/v1/sessions/{session}/messages"), &json!({"text": planted(6)})).await;
    assert_eq!(refused.as_u16(), 503, "{problem}");
    let (status, _, doctor) = run(&options, &database, &["doctor"]).await;
    assert!(status != Some(0), "{doctor}");

    std::fs::rename(&elsewhere, &keys).unwrap();
    model.release();
    // Half a second after a failure the key store is asked again. Until then the session cannot be shown.
    eventually("the run to end", || async {
        let status: String =
            database.value("select status from conversation_sessions where session_id = $1", &session).await;
        (status == "completed").then_some(())
    })
    .await;
    let (accepted, said) =
        client.post(&format!("/v1/sessions/{session}/messages"), &json!({"text": planted(6)})).await;
    assert!(accepted.is_success(), "{said}");
    let shown = client.wait_for(&session, "completed").await;
    assert!(texts(&shown, "assistant").contains(&planted(7)), "{shown}");
    let bodies = model.bodies();
    assert_eq!(bodies[0], bodies[1], "the next worker asks byte for byte the same");
    let stored: String = database
        .value(
            "select string_agg(content::text, '') from conversation_records where session_id = $1",
            &session,
        )
        .await;
    assert!(found(stored.as_bytes()).is_empty() && stored.contains(MARK), "{stored}");
    drop(process);
}

#[tokio::test]
async fn keys_in_a_database_of_their_own_are_wrapped_anew_without_a_change_of_a_row() {
    let (database, keys) = (Database::new().await, Database::without_schema().await);
    let model = ModelServer::turns(vec![Answer::text(&planted(7))]).await;
    let old = options(&model, &keys.url, MASTER);
    let (process, client) = served(&old, &database).await;
    let woken = client.chat("c1", &planted(1)).await;
    let session = woken["session_id"].as_str().unwrap().to_owned();
    client.wait_for(&session, "completed").await;
    assert!(process.terminate().success());
    let rows = || async {
        let rows: String = database
            .value(
                "select string_agg(r::text, '') from conversation_records r where session_id = $1",
                &session,
            )
            .await;
        rows
    };
    let before = rows().await;

    let both = old
        .clone()
        .env("WAKEFUL_ENCRYPTION__MASTER_KEY", OTHER_MASTER)
        .env("WAKEFUL_ENCRYPTION__OLD_MASTER_KEY", MASTER);
    let (status, said, log) = run(&both, &database, &["encryption", "rotate", "-o", "json"]).await;
    assert_eq!(status, Some(0), "{log}");
    assert_eq!(serde_json::from_str::<Value>(&said).unwrap(), json!({"wrapped": 1}));
    let (_, said, _) = run(&both, &database, &["encryption", "rotate", "-o", "json"]).await;
    assert_eq!(serde_json::from_str::<Value>(&said).unwrap(), json!({"wrapped": 0}));
    assert_eq!(rows().await, before);

    let new = old.clone().env("WAKEFUL_ENCRYPTION__MASTER_KEY", OTHER_MASTER);
    let (status, said, log) = run(&new, &database, &["encryption", "status", "-o", "json"]).await;
    assert_eq!(status, Some(0), "{log}");
    let said: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(
        (&said["keys"], &said["missing"], &said["unused"]),
        (&json!(1), &json!([]), &json!([])),
        "{said}"
    );
    let (_process, client) = served(&new, &database).await;
    let shown = client.session(&session).await;
    assert_eq!(texts(&shown, "assistant"), [planted(7)]);

    // A conversation's row that is made again has the key of its session.
    let of_row = "select data_key from conversation_counters where conversation_id = $1";
    let key: String = database.value(of_row, "default/c1").await;
    sqlx::query("delete from conversation_counters").execute(&database.pool).await.unwrap();
    let healed = database.store().await.wake_session(&session).await.unwrap();
    assert!(!healed.is_empty());
    assert_eq!(database.value::<Option<String>>(of_row, "default/c1").await, Some(key));

    // Under the earlier master key alone it does not open.
    let (_old, client) = served(&old, &database).await;
    let (status, problem) = client.get(&format!("/v1/sessions/{session}/messages")).await;
    assert_eq!(status.as_u16(), 503, "{problem}");
}
