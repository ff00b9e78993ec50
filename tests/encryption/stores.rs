//! The key store: whose it is, which keys go away, and what a new configuration could not read. What an erasure locks.

use super::{MASTER, OTHER_MASTER, files_of_keys, folder_of_keys, options, planted, run, served};
use crate::support::{Answer, Database, ModelServer, eventually};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// The files of keys below a folder.
fn key_files(keys: &str) -> Vec<std::path::PathBuf> {
    let folders = std::fs::read_dir(keys).unwrap().map(|folder| folder.unwrap().path());
    let folders = folders.filter(|folder| folder.is_dir());
    folders.flat_map(|folder| std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path())).collect()
}

fn make_old(file: &Path) {
    let days = SystemTime::now() - Duration::from_secs(2 * 24 * 3600);
    std::fs::File::options().write(true).open(file).unwrap().set_modified(days).unwrap();
}

#[tokio::test]
async fn the_key_store_of_another_database_takes_no_key_and_loses_none() {
    let database = Database::new().await;
    database.with_roles().await;
    let model = ModelServer::start(|_, _| Answer::text("Yes.")).await;
    let base = options(&model, "", MASTER);
    let keys = folder_of_keys(&base);
    let own = base.clone().env("WAKEFUL_ENCRYPTION__KEYS", &keys);
    let (process, client) = served(&own, &database).await;
    let woken = client.chat("c1", &planted(1)).await;
    client.wait_for(woken["session_id"].as_str().unwrap(), "completed").await;
    assert_eq!(files_of_keys(&keys), 1);
    assert!(process.terminate().success());

    // An empty directory, as of a disk that is not mounted.
    let empty = base.path("empty");
    std::fs::create_dir(&empty).unwrap();
    let empty = empty.to_str().unwrap().to_owned();
    let wrong = base.clone().env("WAKEFUL_ENCRYPTION__KEYS", &empty);
    let (process, client) = served(&wrong, &database).await;
    let (status, problem) = client.post("/v1/chat/c2/messages", &json!({"text": planted(2)})).await;
    assert_eq!(status.as_u16(), 503, "{problem}");
    assert!(problem.to_string().contains("nothing was taken"), "{problem}");
    assert_eq!(std::fs::read_dir(&empty).unwrap().count(), 0, "nothing was written there");
    let erase = ["conversation", "erase", "c1", "--yes"];
    let (status, _, said) = run(&wrong, &database, &erase).await;
    assert!(status != Some(0) && said.contains("wrong key store"), "{said}");
    assert_eq!(files_of_keys(&keys), 1);
    assert!(process.terminate().success());

    // The store of this database is refused by another one.
    let other = Database::new().await;
    // The databases of the tests are copies of one, so they have one name.
    sqlx::query("update installation set installation_id = 'another'").execute(&other.pool).await.unwrap();
    let (process, client) = served(&own, &other).await;
    let (status, problem) = client.post("/v1/chat/c1/messages", &json!({"text": planted(2)})).await;
    assert_eq!(status.as_u16(), 503, "{problem}");
    let (status, _, said) = run(&own, &other, &["encryption", "prune", "--yes"]).await;
    assert!(status != Some(0) && said.contains("wrong key store"), "{said}");
    assert!(process.terminate().success());

    // A key that no conversation has goes away when it is a day old. The conversation's stays.
    let used = key_files(&keys).pop().unwrap();
    make_old(&used);
    let unused = Path::new(&keys).join("ff");
    std::fs::create_dir_all(&unused).unwrap();
    let unused = unused.join("ffffffffffffffff.key");
    std::fs::copy(&used, &unused).unwrap();
    std::fs::File::options().write(true).open(&unused).unwrap().set_modified(SystemTime::now()).unwrap();
    let prune = async |args: &[&str]| -> Value {
        let args = [&["encryption", "prune", "-o", "json"], args].concat();
        let (status, said, log) = run(&own, &database, &args).await;
        assert_eq!(status, Some(0), "{log}");
        serde_json::from_str(&said).unwrap()
    };
    assert_eq!(prune(&["--yes"]).await, json!({"deleted": true, "keys": []}), "it is too young");
    make_old(&unused);
    assert_eq!(prune(&[]).await, json!({"deleted": false, "keys": ["ffffffffffffffff"]}));
    assert_eq!(files_of_keys(&keys), 2, "without --yes it only says so");
    // The conversation's own row may be lost: its sessions have the key too.
    sqlx::query("delete from conversation_counters").execute(&database.pool).await.unwrap();
    assert_eq!(prune(&["--yes"]).await, json!({"deleted": true, "keys": ["ffffffffffffffff"]}));
    assert_eq!(key_files(&keys), [used]);
}

#[tokio::test]
async fn an_erasure_of_a_fork_waits_for_its_parents_blobs_and_does_not_deadlock() {
    let database = Database::new().await;
    database.with_roles().await;
    let model = ModelServer::start(|_, _| Answer::text("Yes.")).await;
    let base = options(&model, "", MASTER);
    let keys = folder_of_keys(&base);
    let own = base.env("WAKEFUL_ENCRYPTION__KEYS", &keys);
    let (_process, client) = served(&own, &database).await;
    let woken = client.chat("c1", &planted(1)).await;
    let parent = woken["session_id"].as_str().unwrap().to_owned();
    client.wait_for(&parent, "completed").await;
    let (status, forked) = client.post(&format!("/v1/sessions/{parent}/fork"), &json!({"at": 2})).await;
    assert!(status.is_success(), "{forked}");
    let fork = forked["session_id"].as_str().unwrap().to_owned();
    let conversation = forked["conversation_id"].as_str().unwrap().to_owned();
    // A blob in clear that only the fork names, so the erasure locks those too.
    let (in_clear, stored) = ("c".repeat(64), "d".repeat(64));
    sqlx::query(
        "with b as (
            insert into blobs (space_id, sha256, size, media_type, bytes) values ('default', $2, 1, 'text/plain', 'x')
        )
        update conversation_sessions set state = jsonb_build_object('file', $2::text) where session_id = $1",
    )
    .bind(&fork)
    .bind(&in_clear)
    .execute(&database.pool)
    .await
    .unwrap();

    // A commit of the parent has stored a sealed blob and names it, and goes on to one in clear.
    let mut commit = database.pool.begin().await.unwrap();
    sqlx::query(
        "with k as (
            insert into sealed_blobs (data_key, sha256, space_id, size, media_type, bytes)
            select data_key, $2, space_id, 1, 'text/plain', 'x' from conversation_sessions where session_id = $1
        )
        update conversation_sessions set state = jsonb_build_object('file', $2::text) where session_id = $1",
    )
    .bind(&parent)
    .bind(&stored)
    .execute(&mut *commit)
    .await
    .unwrap();
    let erase = ["conversation", "erase", &conversation, "--yes"];
    let erasing = run(&own, &database, &erase);
    let commits = async {
        eventually("the erasure to wait for the sealed blobs", || async {
            let waits: i64 = database
                .value(
                    "select count(*) from pg_locks
                    where not granted and relation = 'sealed_blobs'::regclass and $1 <> ''",
                    "x",
                )
                .await;
            (waits > 0).then_some(())
        })
        .await;
        // A vacuum may keep these blobs from the erasure for long. Meanwhile the search goes on, whose lock this is.
        let free = "select pg_try_advisory_xact_lock(x'77616b6573656172'::bigint) and $1 <> ''";
        assert!(database.value::<bool>(free, "x").await, "the erasure holds what others wait for");
        sqlx::query(
            "insert into blobs (space_id, sha256, size, media_type, bytes) values ('default', repeat('e', 64), 1, 'x', 'x')",
        )
        .execute(&mut *commit)
        .await
        .expect("the commit goes on");
        commit.commit().await.unwrap();
    };
    let ((status, told, said), ()) = tokio::join!(erasing, commits);
    assert_eq!(status, Some(0), "{told}{said}");
    let left: Vec<String> = sqlx::query_scalar("select sha256 from sealed_blobs where sha256 = $1")
        .bind(&stored)
        .fetch_all(&database.pool)
        .await
        .unwrap();
    assert_eq!(left, [stored], "what the parent names stays");
    let of_fork: i64 = database.value("select count(*) from blobs where sha256 = $1", &in_clear).await;
    assert_eq!(of_fork, 0);
}

#[tokio::test]
async fn a_message_that_meets_the_end_of_an_erasure_begins_an_encrypted_conversation() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, _| Answer::text("Yes.")).await;
    let base = options(&model, "", MASTER);
    let keys = folder_of_keys(&base);
    let own = base.env("WAKEFUL_ENCRYPTION__KEYS", &keys);
    let (process, client) = served(&own, &database).await;
    let row = "insert into conversation_counters (conversation_id, space_id, mailbox_id, last_message_number)
        values ('default/c1', 'default', 'default', 0)";
    sqlx::query(row).execute(&database.pool).await.unwrap();
    // The last transaction of an erasure has deleted the row, and is not committed.
    let mut erasure = database.pool.begin().await.unwrap();
    let delete = "delete from conversation_counters where conversation_id = 'default/c1'";
    sqlx::query(delete).execute(&mut *erasure).await.unwrap();
    let text = planted(1);
    let posting = client.chat("c1", &text);
    let erases = async {
        eventually("the message to wait for the row", || async {
            let waits = "select count(*) from pg_stat_activity
                where datname = current_database() and wait_event_type = 'Lock' and $1 <> ''";
            (database.value::<i64>(waits, "x").await > 0).then_some(())
        })
        .await;
        erasure.commit().await.unwrap();
    };
    let (woken, ()) = tokio::join!(posting, erases);
    client.wait_for(woken["session_id"].as_str().unwrap(), "completed").await;
    let sealed = "select c.data_key is not null and s.data_key = c.data_key
        from conversation_counters c join conversation_sessions s using (conversation_id) where conversation_id = $1";
    assert!(database.value::<bool>(sealed, "default/c1").await, "it would be in clear for good");
    let said = "select content::text from conversation_records where conversation_id = $1 and role = 'user'";
    assert!(!database.value::<String>(said, "default/c1").await.contains(&planted(1)));
    assert!(process.terminate().success());
}

#[tokio::test]
async fn preflight_names_encrypted_conversations_that_could_not_be_read() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, _| Answer::text("Yes.")).await;
    let mut own = options(&model, "", MASTER);
    let keys = folder_of_keys(&own);
    own.env.retain(|name, _| !name.starts_with("WAKEFUL_ENCRYPTION"));
    let section = format!("keys = \"{keys}\"\nmaster_key = \"{MASTER}\"");
    own.config = own.config.replace("agents = [\"default\"]", &section);
    let (process, client) = served(&own, &database).await;
    let file = own.path("new.toml");
    let present = std::fs::read_to_string(own.path("wakeful.toml")).unwrap();
    let stops = async |config: String| -> Vec<String> {
        std::fs::write(&file, config).unwrap();
        let args = ["preflight", "--against", file.to_str().unwrap(), "-o", "json"];
        let (status, said, log) = run(&own, &database, &args).await;
        assert!(matches!(status, Some(0 | 9)), "{log}");
        let report: Value = serde_json::from_str(&said).unwrap();
        let findings = report["findings"].as_array().unwrap().iter();
        findings.map(|one| one["kind"].as_str().unwrap().to_owned()).collect()
    };
    let without = present.replace(&section, "").replace("[encryption]", "");
    assert_eq!(stops(without.clone()).await, [""; 0], "nothing is encrypted yet");
    let woken = client.chat("c1", &planted(1)).await;
    client.wait_for(woken["session_id"].as_str().unwrap(), "completed").await;
    assert_eq!(stops(present.clone()).await, [""; 0]);
    assert_eq!(stops(without).await, ["keys_gone"]);
    assert_eq!(stops(present.replace(&keys, "/elsewhere")).await, ["keys_gone"]);
    assert_eq!(stops(present.replace(MASTER, OTHER_MASTER)).await, ["keys_gone"]);
    let rotates = format!("master_key = \"{OTHER_MASTER}\"\nold_master_key = \"{MASTER}\"");
    let rotated = present.replace(&format!("master_key = \"{MASTER}\""), &rotates);
    assert_eq!(stops(rotated).await, [""; 0], "the earlier key still opens");
    // A server says what it has without its keys.
    let (_, capabilities) = client.get("/v1/capabilities").await;
    let told = capabilities.to_string();
    assert_eq!(capabilities["key_stores"].as_array().map(Vec::len), Some(1), "{told}");
    assert!(!told.contains(MASTER) && !told.contains(&keys), "{told}");
    drop(process);
}

#[tokio::test]
async fn a_mail_that_comes_again_after_a_change_of_the_master_key_is_a_duplicate() {
    let (database, keys) = (Database::new().await, Database::without_schema().await);
    let model = ModelServer::turns(vec![Answer::text("Gladly.")]).await;
    let old = options(&model, &keys.url, MASTER);
    let both = old
        .clone()
        .env("WAKEFUL_ENCRYPTION__MASTER_KEY", OTHER_MASTER)
        .env("WAKEFUL_ENCRYPTION__OLD_MASTER_KEY", MASTER);
    const MAIL: &str = "From: Ann <ann@example.com>\r\nTo: agent@example.org\r\nSubject: Lunch\r\n\
        Message-ID: <m1@example.com>\r\n\r\nShall we?\r\n";
    let mut sessions = Vec::new();
    for options in [&old, &both] {
        let (process, client) = served(options, &database).await;
        let mail =
            client.post_request("/v1/triggers/email/raw").header("content-type", "message/rfc822").body(MAIL);
        let taken: Value = mail.send().await.unwrap().json().await.unwrap();
        sessions.push(taken["session_id"].clone());
        client.wait_for(taken["session_id"].as_str().unwrap(), "completed").await;
        assert!(process.terminate().success());
    }
    assert_eq!(sessions[0], sessions[1]);
}
