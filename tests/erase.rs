//! Erasure: what a person left is in no table, no dump, no export and no file afterwards. A hold refuses it.

mod meanwhile;

use crate::support::{Answer, Client, Database, ModelServer, Options, eventually};
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;

/// The planted text that an operator gave as a reason.
const REASON: usize = 15;

fn planted(number: usize) -> String {
    format!("planted{number:02}x7Qm3vTz")
}

/// Every row of every table as text, with the bytes of blobs as hex. Leaves out `workers`, which live processes update.
async fn everything(database: &Database) -> String {
    let tables =
        "select tablename::text from pg_tables where schemaname = 'public' and tablename <> 'workers'";
    let tables: Vec<String> = sqlx::query_scalar(tables).fetch_all(&database.pool).await.unwrap();
    let mut all = String::new();
    for table in tables {
        let rows = AssertSqlSafe(format!("select coalesce(string_agg(t::text, '\n'), '') from {table} t"));
        let rows: String = sqlx::query_scalar(rows).fetch_one(&database.pool).await.unwrap();
        all.push_str(&format!("\n## {table}\n{rows}"));
    }
    all
}

/// The planted texts that stand in `text`, as they are or in hex.
fn found(text: &str) -> Vec<usize> {
    (1..=20)
        .filter(|&number| text.contains(&planted(number)) || text.contains(&hex::encode(planted(number))))
        .collect()
}

struct World {
    database: Database,
    options: Options,
    client: Client,
    _model: ModelServer,
    process: crate::support::Process,
}

impl World {
    async fn new() -> World {
        let database = Database::new().await;
        let model = ModelServer::start(|body, _| match crate::support::model::turns_since_user(body) {
            0 => Answer::call(
                "write_file",
                json!({"path": format!("{}.txt", planted(4)), "content": planted(5).repeat(4000)}),
            ),
            1 => Answer::call("read_file", json!({"path": format!("{}.txt", planted(4))})),
            2 => Answer::call("reserve", json!({"persons": planted(6)})),
            _ => Answer::text(&format!("I say {}.", planted(7))),
        })
        .await;
        let options = Options::new()
            .model("openai/test")
            .env("OPENAI_BASE_URL", &model.url)
            .env("WAKEFUL_SERVER__INTERNAL_TOKENS", "an internal token of the test");
        let process = options.serve(&database).await;
        let client = process.client();
        World { database, options, client, _model: model, process }
    }

    async fn chat(&self, conversation: &str, body: Value) -> String {
        let (_, woken) = self.client.post(&format!("/v1/chat/{conversation}/messages"), &body).await;
        let id = woken["session_id"].as_str().unwrap_or_else(|| panic!("{woken}")).to_owned();
        self.client.wait_for(&id, "completed").await;
        id
    }

    /// Runs the command and returns its exit status, what it wrote, and what it said.
    async fn run(&self, args: &[&str]) -> (Option<i32>, String, String) {
        self.run_with(args, &[]).await
    }

    async fn run_with(&self, args: &[&str], env: &[(&str, &str)]) -> (Option<i32>, String, String) {
        let mut options =
            Options { args: args.iter().map(|&arg| arg.to_owned()).collect(), ..self.options.clone() };
        for (name, value) in env {
            options = options.env(name, *value);
        }
        let (status, process) = options.spawn(&self.database.url).ended().await;
        (status.code(), process.output(), process.log())
    }
}

/// A person's chat, mail with a file, a fork, and an import of an export. Returns the sessions.
async fn lived(world: &World) -> Vec<String> {
    let client = &world.client;
    let who = "ann@example.com";
    let first = world.chat("c1", json!({"text": planted(1), "user_id": who, "client_key": planted(2)})).await;
    let fork = json!({"at": 2, "text": planted(3), "start": true});
    let (status, forked) = client.post(&format!("/v1/sessions/{first}/fork"), &fork).await;
    assert!(status.is_success(), "{forked}");
    let forked = forked["session_id"].as_str().unwrap().to_owned();
    client.wait_for(&forked, "completed").await;
    let mail = format!(
        "From: {} <{who}>\r\nTo: agent@example.org\r\nSubject: {}\r\nMessage-ID: <{}@example.com>\r\n\
         MIME-Version: 1.0\r\nContent-Type: multipart/mixed; boundary=x\r\n\r\n--x\r\nContent-Type: text/plain\r\n\r\n{}\r\n\
         --x\r\nContent-Type: text/csv\r\nContent-Disposition: attachment; filename=\"{}.csv\"\r\n\r\n{},{}\r\n\
         --x\r\nContent-Type: text/plain\r\nContent-Disposition: attachment; filename=\"{}.txt\"\r\n\r\n{}\r\n--x--\r\n",
        planted(8),
        planted(9),
        planted(10),
        planted(11),
        planted(18),
        planted(19),
        planted(20),
        planted(12),
        planted(13)
    );
    let request =
        client.post_request("/v1/triggers/email/raw").header("content-type", "message/rfc822").body(mail);
    let woken: Value = request.send().await.unwrap().json().await.unwrap();
    let mailed = woken["session_id"].as_str().unwrap_or_else(|| panic!("{woken}")).to_owned();
    client.wait_for(&mailed, "completed").await;
    world.chat("c1", json!({"text": planted(14), "user_id": who})).await;
    let archived = json!({"reason": planted(REASON)});
    assert!(client.post(&format!("/v1/sessions/{forked}/archive"), &archived).await.0.is_success());
    let notice = json!({"notice": {"title": planted(16), "body": planted(17)}, "conversation_id": "n1", "user_id": who});
    let (_, woken) = client.post("/v1/triggers/herald", &notice).await;
    client.wait_for(woken["session_id"].as_str().unwrap_or_else(|| panic!("{woken}")), "completed").await;
    let export = client.get_request(&format!("/v1/sessions/{first}/export"));
    let export = export.header("X-Internal-Token", "an internal token of the test").send().await.unwrap();
    let bundle = export.text().await.unwrap();
    let imported = client.post_request("/v1/sessions/import").body(bundle).send().await.unwrap();
    let imported: Value = imported.json().await.unwrap();
    let imported = imported["session_id"].as_str().unwrap_or_else(|| panic!("{imported}")).to_owned();
    nothing_is_owed(&world.database).await;
    vec![first, forked, mailed, imported]
}

/// Waits until no work is left: a run is complete before its reply is sent.
async fn nothing_is_owed(database: &Database) {
    eventually("every job to end", || async {
        let jobs: i64 = database.value("select count(*) from jobs where $1 <> ''", "all").await;
        (jobs == 0).then_some(())
    })
    .await;
}

/// What summaries of failures, batches and Absurd's list keep of Ann's session and of Bob's.
async fn traces(database: &Database, ann: &str, bob: &str) {
    let told = |n: usize| planted(n);
    let sql = format!(
        "insert into error_groups (space_id, fingerprint, kind, source, text, example, count, first_at, last_at, first_version,
            last_version, sample)
        values ('default', '0000000000000001', 'k', '', 'a text', '{}', 2, now(), now(), '1', '1', array['{ann}', '{bob}']),
            ('default', '0000000000000002', 'k', '', '{}', '{}', 1, now(), now(), '1', '1', array['{ann}']);
        insert into run_failures (session_id, run_id, space_id, fingerprint, kind, source, text, error, version, is_counted)
        values ('{bob}', 'r', 'default', '0000000000000001', 'k', '', 'a text', 'Bob''s error', '1', true),
            ('{ann}', 'r', 'default', '0000000000000001', 'k', '', 'a text', '{}', '1', true);
        insert into batches (batch_id, space_id, verb, filter, status, status_reason, rate, proof, actor_kind, actor,
            request_sha256, members, reason, decision)
        values ('batch_1', 'default', 'resolve', '{{\"text\": \"{}\"}}', 'paused', '{}', 1,
                '{{\"asked\": 1, \"text\": \"{}\", \"errors\": [{{\"text\": \"{}\"}}]}}', 'cli', 'x', '', 2, '{}',
                '{{\"outcome\": \"happened\", \"result\": \"{}\"}}'),
            ('batch_2', 'default', 'retry', '{{\"from\": \"Ann@example.com\"}}', 'paused', 'Bob''s', 1, null, 'cli', 'x', '', 1,
                'Bob''s', null);
        insert into batch_members (batch_id, ordinal, space_id, session_id, stage, outcome, detail)
        values ('batch_1', 1, 'default', '{ann}', 0, 'acted', '{}'), ('batch_1', 2, 'default', '{bob}', 0, 'acted', 'Bob''s'),
            ('batch_2', 1, 'default', '{bob}', 0, 'acted', null);
        insert into batch_proofs (batch_id, ordinal, space_id, session_id, result, error)
        values ('batch_1', 1, 'default', '{ann}', 'failed', '{}');
        insert into absurd_imports (space_id, source, task_id, time, session_id, task_name, task_state, shape, idempotency_key, taken)
        values ('default', 'absurd:q', 't1', 1, '{ann}', 'agent', 'completed', 'agent_loop', '{}', false);
        insert into notification_groups (group_id, space_id, rule, kind, cause, label, count, first_at, last_at)
        values ('grp_1', '*', 'ops', 'failed', 'x', '{}', 1, now(), now()), ('grp_2', '*', 'ops', 'failed', 'y', 'Bob''s', 1, now(), now());
        insert into notification_members (rule, transition_id, group_id, space_id, subject, session_id, at)
        values ('ops', 1, 'grp_1', 'default', '{ann}', '{ann}', now()), ('ops', 2, 'grp_2', 'default', '{bob}', '{bob}', now());
        insert into idempotency_keys (space_id, principal, key, request, body_sha256, claim, claimed_until, status, answer, expires_at)
        values ('default', 'x', '{}', 'POST /v1/sessions/{ann}/retry', '', 'c', now(), 202, '{}', now() + interval '1 day'),
            ('default', 'x', '{}', 'POST /v1/deliveries/dlv_1/resend', '', 'c', now(), 202, '{{\"session_id\": \"{ann}\"}}',
                now() + interval '1 day'),
            ('default', 'user Ann@example.com', '{}', 'POST /v1/x', '', 'c', now(), 202, '', now() + interval '1 day'),
            ('default', 'x', 'of bob', 'POST /v1/sessions/{bob}/retry', '', 'c', now(), 202, '', now() + interval '1 day')",
        told(1), told(2), told(3), told(8), told(9), told(10), told(11), told(2), told(3), told(12), told(13), told(14), told(16), told(1),
        told(2), told(3), told(8), told(9)
    );
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&database.pool).await.expect("the rows are made");
}

#[tokio::test]
async fn what_a_person_left_is_nowhere_afterwards_and_others_keep_theirs() {
    let world = World::new().await;
    world.database.with_roles().await;
    let sessions = lived(&world).await;
    // Bob has the same prompt, the same tools and a file of the same bytes.
    let other = world.chat("c2", json!({"text": "Bob's own", "user_id": "bob"})).await;
    traces(&world.database, &sessions[0], &other).await;
    let before = everything(&world.database).await;
    let there = found(&before);
    assert!(there.len() >= 18, "the texts are there: {there:?}");

    let (status, plan, said) =
        world.run(&["person", "erase", "ANN@example.com", "--dry-run", "-o", "json"]).await;
    assert_eq!(status, Some(0), "{said}");
    let plan: Value = serde_json::from_str(&plan).unwrap();
    let planned: Vec<&str> =
        plan["sessions"].as_array().unwrap().iter().map(|id| id.as_str().unwrap()).collect();
    assert!(sessions.iter().all(|id| planned.contains(&id.as_str())) && planned.len() == 4, "{plan}");
    // The notice was for her, and she wrote nothing there.
    assert!(
        plan["stays"].to_string().contains("default/n1, in which ANN@example.com did not write"),
        "{plan}"
    );
    assert!(
        plan["rows"]["blobs"].as_i64() > Some(0) && plan["stays"].as_array().unwrap().len() >= 2,
        "{plan}"
    );
    // The index of the search follows by itself.
    let without_index = |all: &str| {
        let tables = all.split("\n## ").filter(|table| !table.starts_with("search_")).map(str::to_owned);
        tables.collect::<Vec<_>>()
    };
    let after = everything(&world.database).await;
    assert_eq!(without_index(&after), without_index(&before), "a dry run writes nothing");
    let (status, _, said) = world.run(&["person", "erase", "ann@example.com"]).await;
    assert_eq!((status, said.contains("--yes")), (Some(2), true), "{said}");

    let (status, told, said) = world.run(&["person", "erase", "ann@example.com", "--yes"]).await;
    assert_eq!(status, Some(0), "{said}");
    assert!(told.contains("The receipt is erase_") && told.contains("Stays"), "{told}");
    let (status, _, said) = world.run(&["conversation", "erase", "n1", "--yes"]).await;
    assert_eq!(status, Some(0), "{said}");
    let after = everything(&world.database).await;
    // Bob's model said and wrote the same words, so those of the model stay with him.
    // An operator's reason stays in the audit.
    let of_ann: Vec<usize> =
        found(&after).into_iter().filter(|number| !(4..=7).contains(number) && *number != REASON).collect();
    assert_eq!(of_ann, Vec::<usize>::new(), "{told}");
    for id in &sessions {
        assert!(!after.contains(&format!("({id},")), "a row of {id}");
        assert!(!world.options.path("workspaces").join(id).exists(), "files of {id}");
        let (status, _) = world.client.get(&format!("/v1/sessions/{id}")).await;
        assert_eq!(status, 404);
    }
    // Rows that are others' too stay, without what was hers.
    let mut left: Vec<String> = sqlx::query_scalar(
        "select concat_ws('|', fingerprint, example, sample::text) from error_groups
        union all select concat_ws('|', batch_id, filter::text, status_reason, proof ->> 'asked') from batches
        union all select concat_ws('|', batch_id, ordinal, detail) from batch_members
        union all select concat_ws('|', task_id, idempotency_key) from absurd_imports
        union all select label from notification_groups
        union all select key from idempotency_keys",
    )
    .fetch_all(&world.database.pool)
    .await
    .unwrap();
    left.sort();
    let group = format!("0000000000000001|Bob's error|{{{other}}}");
    assert_eq!(
        left,
        [
            &*group,
            "Bob's",
            "batch_1|1",
            "batch_1|2|Bob's",
            "batch_1|{}|1",
            "batch_2|1",
            "batch_2|{}|Bob's",
            "erased",
            "of bob",
            "t1"
        ]
    );
    // Bob's session is whole.
    let (status, shown, said) = world.run(&["session", "verify", &other]).await;
    assert_eq!(status, Some(0), "{shown} {said}");
    world.client.wait_for(&other, "completed").await;

    // With Bob erased too, nothing is left, and a dump says the same.
    let (status, _, said) = world.run(&["conversation", "erase", "c2", "--yes"]).await;
    assert_eq!(status, Some(0), "{said}");
    assert_eq!(found(&everything(&world.database).await), [REASON]);
    let dump = std::process::Command::new(pg_dump())
        .arg(world.database.url.split('?').next().unwrap())
        .output()
        .unwrap();
    assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
    let dump = String::from_utf8_lossy(&dump.stdout);
    assert!(dump.contains("COPY public.erasures"), "{}", &dump[..dump.len().min(500)]);
    assert_eq!(found(&dump), [REASON]);
    let receipts: i64 =
        world.database.value("select count(*) from erasures where pending is null and $1 <> ''", "x").await;
    assert_eq!(receipts, 3);
    let audited: i64 = world
        .database
        .value(
            "select count(*) from audit_log join erasures on erasure_id = target where verb like $1",
            "%.erase",
        )
        .await;
    assert_eq!(audited, 3, "who erased is in the audit");
    // The conversation's name can be used again.
    world.chat("c2", json!({"text": "Hello again"})).await;
    assert!(!world.process.log().contains("panicked"));
}

/// `pg_dump` of the server that the tests run on.
fn pg_dump() -> std::path::PathBuf {
    let newest = |folder: &str| {
        let mut found: Vec<_> =
            std::fs::read_dir(folder).into_iter().flatten().flatten().map(|one| one.path()).collect();
        found.sort();
        found.pop().map(|one| one.join("bin/pg_dump")).filter(|path| path.exists())
    };
    newest("/usr/lib/postgresql").unwrap_or_else(|| "pg_dump".into())
}

#[tokio::test]
async fn a_hold_a_run_at_work_and_a_missing_role_refuse_it() {
    let world = World::new().await;
    let nothing = world.run(&["conversation", "erase", "none", "--yes"]).await;
    world.chat("c0", json!({"text": "Hello?"})).await;
    let (_, without_role, _) = world.run(&["conversation", "erase", "c0", "--dry-run"]).await;
    world.database.with_roles().await;
    // Another test may have made the role, and only its rights are missing.
    assert_eq!(nothing.0, Some(4), "{nothing:?}");
    for said in [&nothing.2, &without_role] {
        assert!(said.contains("wakeful_retention") && said.contains("--file=deploy/roles.sql"), "{said}");
        assert!(!said.contains("at line") && !said.contains('…'), "{said}");
    }
    assert_eq!(world.run(&["conversation", "erase", "c0", "--yes"]).await.0, Some(0));
    assert_eq!(world.run(&["person", "erase", "nobody", "--yes"]).await.0, Some(3));
    world.chat("c1", json!({"text": "Hello?", "user_id": "ann"})).await;
    let before = found(&everything(&world.database).await);
    let (status, id, said) = world.run(&["person", "hold", "Ann", "--reason", "case 12", "-o", "json"]).await;
    assert_eq!(status, Some(0), "{said}");
    let id: Value = serde_json::from_str(&id).unwrap();
    for erase in [["person", "erase", "ann", "--yes"], ["conversation", "erase", "c1", "--yes"]] {
        let (status, _, said) = world.run(&erase).await;
        assert_eq!(status, Some(4), "{said}");
        assert!(said.contains("case 12"), "{said}");
    }
    let (status, plan, _) = world.run(&["person", "erase", "ann", "--dry-run"]).await;
    assert_eq!(status, Some(0), "{plan}");
    let refused = format!(
        "Would be refused\n  the hold {0} stands: case 12. To release it: wakeful conversation release {0}\n",
        id["hold_id"].as_str().unwrap()
    );
    assert!(plan.contains(&refused) && !plan.contains("is at work"), "{plan}");
    let work = "update conversation_sessions set status = $1 where conversation_id = 'default/c1'";
    sqlx::query(work).bind("running").execute(&world.database.pool).await.unwrap();
    let (_, plan, _) = world.run(&["conversation", "erase", "c1", "--dry-run"]).await;
    assert!(plan.contains("case 12") && plan.contains(" is at work\n"), "{plan}");
    sqlx::query(work).bind("completed").execute(&world.database.pool).await.unwrap();
    assert_eq!(found(&everything(&world.database).await), before);
    let (status, listed, _) = world.run(&["conversation", "holds"]).await;
    assert!(status == Some(0) && listed.contains("case 12"), "{listed}");
    assert_eq!(world.run(&["conversation", "release", id["hold_id"].as_str().unwrap()]).await.0, Some(0));
    assert_eq!(world.run(&["conversation", "release", id["hold_id"].as_str().unwrap()]).await.0, Some(3));

    // A hold covers each person who takes part, also one who has written nothing.
    sqlx::query("update conversation_sessions set policy = '{\"participants\": [\"bob@example.com\"]}'")
        .execute(&world.database.pool)
        .await
        .unwrap();
    let hold = ["person", "hold", "Bob@example.com", "--reason", "case 13", "-o", "json"];
    let id: Value = serde_json::from_str(&world.run(&hold).await.1).unwrap();
    let (status, _, said) = world.run(&["conversation", "erase", "c1", "--yes"]).await;
    assert!(status == Some(4) && said.contains("case 13"), "{said}");
    assert_eq!(world.run(&["conversation", "release", id["hold_id"].as_str().unwrap()]).await.0, Some(0));
    sqlx::query("update conversation_sessions set policy = null")
        .execute(&world.database.pool)
        .await
        .unwrap();

    // A hold that is placed while an erasure is being decided waits for the decision.
    let mut deciding = world.database.pool.begin().await.unwrap();
    sqlx::query("select lock_for_erasure(array['default/c1'])").execute(&mut *deciding).await.unwrap();
    let decided = async {
        eventually("a hold that waits", || async {
            let sql = "select count(*) from pg_locks
                where not granted and relation = 'legal_holds'::regclass and $1 <> ''";
            (world.database.value::<i64>(sql, "x").await == 1).then_some(())
        })
        .await;
        deciding.rollback().await.unwrap();
    };
    let hold = ["conversation", "hold", "c1", "--reason", "case 14", "-o", "json"];
    let ((status, id, said), ()) = tokio::join!(world.run(&hold), decided);
    assert_eq!(status, Some(0), "{said}");
    let id: Value = serde_json::from_str(&id).unwrap();
    assert_eq!(world.run(&["conversation", "release", id["hold_id"].as_str().unwrap()]).await.0, Some(0));

    // While its model is being asked, a session is at work.
    world._model.hold();
    let (_, woken) =
        world.client.post("/v1/chat/c1/messages", &json!({"text": "And?", "user_id": "ann"})).await;
    world.client.wait_for(woken["session_id"].as_str().unwrap(), "running").await;
    let (status, _, said) = world.run(&["conversation", "erase", "c1", "--yes"]).await;
    assert_eq!(status, Some(4), "{said}");
    assert!(said.contains("at work"), "{said}");
    world._model.release();
    world.client.wait_for(woken["session_id"].as_str().unwrap(), "completed").await;

    // An erasure that dies after its first transaction is finished by the next.
    let died =
        world.run_with(&["conversation", "erase", "c1", "--yes"], &[("FAILPOINTS", "E1=1*return")]).await;
    assert_eq!(died.0, None, "{died:?}");
    assert!(!found(&everything(&world.database).await).is_empty(), "the log rows are still there");
    assert_eq!(world.run(&["conversation", "erase", "c1", "--yes"]).await.0, Some(3), "it is gone");
    assert_eq!(found(&everything(&world.database).await), Vec::<usize>::new());
}
