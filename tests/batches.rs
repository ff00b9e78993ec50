//! Batches: many failed sessions are proved, retried in stages, and each acted on once whatever dies meanwhile.

use crate::support::{Client, Database, Options, Process, eventually};
use futures::future::join_all;
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::time::Instant;
use wakeful_store::token::NewToken;
use wakeful_workflow::access::Scope;

/// Three causes of failure. Those that are mended charge a card and end well.
struct Stage {
    database: Database,
    options: Options,
}

const CAUSES: [&str; 3] = ["apple", "birch", "cedar"];

impl Stage {
    async fn new() -> Stage {
        Stage::with("").await
    }

    /// `agent`: more settings of the agent.
    async fn with(agent: &str) -> Stage {
        let options = Options::new().model("scripted/causes").config(agent);
        let dir = options.path("scenarios");
        std::fs::create_dir(&dir).unwrap();
        let options = options.config(&format!("[scripted]\ndir = \"{}\"", dir.display()));
        let stage = Stage { database: Database::new().await, options };
        stage.mend(&[]);
        stage
    }

    /// Writes the scenario. Processes read it when they start.
    fn mend(&self, mended: &[&str]) {
        let turn = |cause: &&str| {
            let replies = if mended.contains(cause) {
                "[[turn.reply]]\ntool_calls = [{ name = \"charge\", arguments = { cents = 5 } }]\n\
                 [[turn.reply]]\ntext = \"Done.\"\n"
                    .to_owned()
            } else {
                format!(
                    "[[turn.reply]]\nfault = {{ kind = \"refused\", status = 400, message = \"no field {cause}\" }}\n"
                )
            };
            format!("[[turn]]\nwhen = \"{cause}\"\n{replies}")
        };
        let all = "[[turn]]\n[[turn.reply]]\ntext = \"Hello.\"\n";
        let text: String = CAUSES.iter().map(turn).chain([all.to_owned()]).collect();
        std::fs::write(self.options.path("scenarios/causes.toml"), text).unwrap();
    }

    /// Lets `each` sessions of each cause fail. Returns their ids, cause by cause.
    async fn fail(&self, each: usize) -> Vec<Vec<String>> {
        let process = self.options.serve(&self.database).await;
        let client = process.client();
        let mut ids = Vec::new();
        for cause in CAUSES {
            let mut of_cause = Vec::new();
            for chunk in (0..each).collect::<Vec<_>>().chunks(20) {
                let chats = chunk
                    .iter()
                    .map(|n| client.chat_owned(format!("{cause}-{n}"), format!("{cause} number {n}")));
                of_cause.extend(
                    join_all(chats).await.iter().map(|told| told["session_id"].as_str().unwrap().to_owned()),
                );
            }
            ids.push(of_cause);
        }
        let failed = each as i64 * 3;
        eventually("all fail and are counted", || async {
            let counted = "select coalesce(sum(count), 0)::bigint from error_groups where $1 <> ''";
            (self.database.value::<i64>(counted, "all").await == failed).then_some(())
        })
        .await;
        assert!(process.terminate().success());
        ids
    }

    async fn groups(&self, client: &Client) -> Value {
        client.get("/v1/errors").await.1["items"].clone()
    }

    /// How often a person's retry stands in the journal of each session that has one.
    async fn retries(&self) -> Vec<i64> {
        sqlx::query_scalar(
            "select count(*) from session_events where type = 'SESSION_STEERED' and payload ->> 'verb' = 'retry'
            group by session_id",
        )
        .fetch_all(&self.database.pool)
        .await
        .unwrap()
    }

    async fn failed(&self) -> i64 {
        let sql = "select count(*) from conversation_sessions where status = 'failed' and trigger_type = $1";
        self.database.value(sql, "chat").await
    }
}

impl Client {
    async fn chat_owned(&self, conversation: String, text: String) -> Value {
        self.chat(&conversation, &text).await
    }

    async fn batch_that_is(&self, id: &str, status: &str) -> Value {
        eventually(&format!("{id} is {status}"), || async {
            let batch = self.get(&format!("/v1/batches/{id}")).await.1;
            (batch["status"] == status).then_some(batch)
        })
        .await
    }
}

fn id(batch: &Value) -> String {
    batch["batch_id"].as_str().unwrap_or_else(|| panic!("{batch}")).to_owned()
}

async fn make(client: &Client, body: &Value) -> Value {
    let (status, batch) = client.post("/v1/batches", body).await;
    assert_eq!(status, StatusCode::CREATED, "{batch}");
    batch
}

#[tokio::test]
async fn failed_sessions_are_proved_dry_and_then_retried_each_once() {
    let stage = Stage::new().await;
    let ids = stage.fail(3).await;
    stage.mend(&["apple"]);
    let process = stage.options.serve(&stage.database).await;
    let client = process.client();
    let fine = client.chat("fine", "hello").await["session_id"].as_str().unwrap().to_owned();
    client.wait_for(&fine, "completed").await;
    let groups = stage.groups(&client).await;
    assert_eq!(groups.as_array().unwrap().len(), 3, "{groups}");

    // A preview writes nothing and tells what would be left out.
    let all = json!({"verb": "retry", "filter": {"agent": "default"}, "dry_run": true});
    let (status, preview) = client.post("/v1/batches", &all).await;
    assert_eq!(
        (status, &preview["by_status"], &preview["skipped"]),
        (StatusCode::OK, &json!({"failed": 9}), &json!({"completed": 1}))
    );
    assert_eq!(preview["sample"].as_array().unwrap().len(), 9);

    // The proof finds what is mended, without an effect and without touching the sessions.
    let body =
        json!({"verb": "retry", "filter": {"status": "failed"}, "reason": "apple is mended", "prove": 9});
    let batch = make(&client, &body).await;
    assert_eq!(batch["status"], "proving");
    let proved = client.batch_that_is(&id(&batch), "paused").await;
    assert_eq!((&proved["proof"]["passed"], &proved["proof"]["failed"]), (&json!(3), &json!(6)), "{proved}");
    let text = proved["proof"]["text"].as_str().unwrap();
    assert!(text.starts_with("3 of 9 would pass, 6 fail as before: 3 × "), "{text}");
    assert_eq!(proved["status_reason"], text);
    assert_eq!(stage.options.effects(), [""; 0]);
    assert_eq!((stage.failed().await, stage.retries().await), (9, vec![]));
    assert_eq!(stage.groups(&client).await, groups, "dry tries are not counted as failures");
    let (status, cancelled) = client.post(&format!("/v1/batches/{}/cancel", id(&batch)), &json!({})).await;
    assert_eq!((status, &cancelled["status"]), (StatusCode::ACCEPTED, &json!("cancelled")));
    let (status, _) = client.post(&format!("/v1/batches/{}/resume", id(&batch)), &json!({})).await;
    assert_eq!(status, StatusCode::CONFLICT);

    // The group that is mended is retried.
    let of_apple =
        groups.as_array().unwrap().iter().find(|group| group["text"].as_str().unwrap().contains("apple"));
    let fingerprint = of_apple.unwrap()["fingerprint"].as_str().unwrap();
    let body = json!({"verb": "retry", "filter": {"error": fingerprint}, "reason": "apple is mended", "canary": [1],
        "client_key": "once", "rate": 50});
    let batch = make(&client, &body).await;
    let done = client.batch_that_is(&id(&batch), "done").await;
    assert_eq!(
        done["counts"],
        json!({"pending": 0, "acted": 3, "refused": 0, "passed": 3, "failed_again": 0, "open": 0})
    );
    assert_eq!((done["stage"].clone(), done["by"].clone()), (json!(1), json!("this machine")));
    assert_eq!(stage.retries().await, [1, 1, 1]);
    assert_eq!((stage.options.effects().len(), stage.failed().await), (3, 6));
    for session in &ids[0] {
        assert_eq!(client.session(session).await["status"], "completed");
    }
    let (status, again) = client.post("/v1/batches", &body).await;
    assert_eq!((status, id(&again)), (StatusCode::OK, id(&batch)));
    let (status, _) = client
        .post("/v1/batches", &json!({"verb": "retry", "session_ids": [ids[1][0]], "client_key": "once"}))
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    let (_, members) = client.get(&format!("/v1/batches/{}/members?result=passed&limit=2", id(&batch))).await;
    assert_eq!((members["items"].as_array().unwrap().len(), &members["next"]), (2, &json!(2)), "{members}");
    let (_, audit) = client.get("/v1/audit?verb=session.retry").await;
    assert_eq!(audit["items"].as_array().unwrap().len(), 3, "{audit}");
    let why = audit["items"][0]["reason"].as_str().unwrap();
    assert!(why.starts_with("apple is mended (batch_"), "{why}");

    // What a batch refuses.
    for (wrong, status) in [
        (json!({"verb": "retry", "filter": {}, "reason": "x"}), 400),
        (json!({"verb": "retry", "filter": {"status": "failed"}}), 400),
        (json!({"verb": "retry", "session_ids": [fine], "reason": "x"}), 409),
        (json!({"verb": "retry", "session_ids": ["sess_none"], "reason": "x"}), 404),
        (json!({"verb": "cancel", "filter": {"status": "failed"}, "reason": "x", "prove": 3}), 400),
        (json!({"verb": "erase", "filter": {"status": "failed"}, "reason": "x"}), 400),
        (json!({"verb": "archive", "filter": {"status": "failed"}, "reason": "x", "rate": 5e-21}), 400),
        (json!({"verb": "archive", "filter": {"status": "failed"}, "reason": "x", "rate": 1e-13}), 400),
        (json!({"verb": "archive", "filter": {"status": "failed"}, "reason": "x", "rate": 1001}), 400),
    ] {
        let (answered, problem) = client.post("/v1/batches", &wrong).await;
        assert_eq!(answered.as_u16(), status, "{wrong}: {problem}");
    }
    let slow = sqlx::query("update batches set rate = 1e-13").execute(&stage.database.pool).await;
    assert!(slow.unwrap_err().to_string().contains("batches_rate_check"));
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_session_that_cannot_be_acted_on_holds_up_no_other_member() {
    let stage = Stage::new().await;
    let ids = stage.fail(1).await.concat();
    let process = stage.options.serve(&stage.database).await;
    let client = process.client();
    let mut holder = stage.database.pool.begin().await.unwrap();
    let held = "select from conversation_sessions where session_id = $1 for update";
    sqlx::query(held).bind(&ids[0]).execute(&mut *holder).await.unwrap();
    let batch = make(&client, &json!({"verb": "archive", "session_ids": ids, "reason": "over"})).await;
    let id = batch["batch_id"].as_str().unwrap();
    eventually("the others are archived", || async {
        let acted = "select count(*) from batch_members where batch_id = $1 and outcome = 'acted'";
        (stage.database.value::<i64>(acted, id).await == 2).then_some(())
    })
    .await;
    eventually("it says why the first one waits", || async {
        let why =
            "select coalesce(max(detail), '') from batch_members where batch_id = $1 and outcome = 'pending'";
        stage.database.value::<String>(why, id).await.contains("lock timeout").then_some(())
    })
    .await;
    holder.rollback().await.unwrap();
    client.batch_that_is(id, "done").await;
}

#[tokio::test]
async fn a_batch_waits_when_its_token_is_revoked_until_somebody_takes_it_over() {
    let stage = Stage::new().await;
    stage.fail(1).await;
    stage.mend(&CAUSES);
    let api = stage.options.clone().arg("--roles=api").serve(&stage.database).await;
    let client = api.client();
    let store = stage.database.store().await;
    let new = NewToken {
        scope: Scope::Operate,
        space_id: Some("default".to_owned()),
        agent: None,
        name: Some("eve".to_owned()),
        expires_in: None,
    };
    let (token, secret) = store.create_token(&new).await.unwrap();
    let mut made = Vec::new();
    for prove in [0, 1] {
        let body =
            json!({"verb": "retry", "filter": {"status": "failed"}, "reason": "mended", "prove": prove});
        let request = client.post_request("/v1/batches").bearer_auth(&secret).body(body.to_string());
        let batch: Value = request.send().await.unwrap().json().await.unwrap();
        made.push(id(&batch));
    }
    store.revoke_token(None, &token.token_id).await.unwrap();
    let worker = stage.options.clone().arg("--roles=worker").spawn(&stage.database.url);
    for batch in &made {
        let paused = client.batch_that_is(batch, "paused").await;
        assert_eq!(
            (&paused["status_reason"], &paused["counts"]["acted"]),
            (&json!("the token that made it is no longer in force"), &json!(0)),
            "{paused}"
        );
    }
    assert_eq!((stage.failed().await, stage.retries().await), (3, vec![]));
    let copies: i64 = stage
        .database
        .value("select count(*) from conversation_sessions where trigger_type = $1", "replay")
        .await;
    assert_eq!(copies, 0, "nothing was tried either");

    // The one who resumes it answers for it from then on.
    let (status, resumed) = client.post(&format!("/v1/batches/{}/resume", made[0]), &json!({})).await;
    assert_eq!((status, &resumed["by"]), (StatusCode::ACCEPTED, &json!("this machine")), "{resumed}");
    let done = client.batch_that_is(&made[0], "done").await;
    assert_eq!(done["counts"]["passed"], 3, "{done}");
    let audited: i64 = stage
        .database
        .value(
            "select count(*) from audit_log where verb = $1 and actor = 'this machine' and token_id is null",
            "session.retry",
        )
        .await;
    assert_eq!(audited, 3);
    assert!(worker.terminate().success() && api.terminate().success());
}

#[tokio::test]
async fn a_retried_run_that_waits_for_approval_has_got_past_its_failure() {
    let stage = Stage::with("approve = [\"charge\"]").await;
    stage.fail(1).await;
    stage.mend(&CAUSES);
    let process = stage.options.serve(&stage.database).await;
    let client = process.client();
    let body = json!({"verb": "retry", "filter": {"status": "failed"}, "reason": "mended", "canary": [1]});
    let done = client.batch_that_is(&id(&make(&client, &body).await), "done").await;
    let counts = &done["counts"];
    assert_eq!((&counts["passed"], &counts["failed_again"]), (&json!(3), &json!(0)), "{done}");
    let (_, page) = client.get("/v1/sessions?status=needs_attention").await;
    assert_eq!(page["items"].as_array().unwrap().len(), 3, "{page}");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_fix_that_does_not_work_stops_after_its_first_members_and_a_person_may_go_on() {
    let stage = Stage::new().await;
    stage.fail(4).await;
    let process = stage.options.serve(&stage.database).await;
    let client = process.client();
    let body =
        json!({"verb": "retry", "filter": {"status": "failed"}, "reason": "a bad fix", "canary": [1, 3]});
    let batch = id(&make(&client, &body).await);
    let paused = client.batch_that_is(&batch, "paused").await;
    assert_eq!(
        (&paused["counts"]["acted"], &paused["counts"]["failed_again"]),
        (&json!(1), &json!(1)),
        "{paused}"
    );
    let why = paused["status_reason"].as_str().unwrap();
    assert!(
        why.starts_with("1 of 1 retried sessions failed again in stage 1 of 3, most often with: "),
        "{why}"
    );

    // A person says to go on: the next stage is judged by itself.
    client.post(&format!("/v1/batches/{batch}/resume"), &json!({"reason": "one more try"})).await;
    let paused = eventually("it stops again", || async {
        let batch = client.get(&format!("/v1/batches/{batch}")).await.1;
        (batch["status"] == "paused").then_some(batch)
    })
    .await;
    let acted = paused["counts"]["acted"].as_i64().unwrap();
    assert!((2..=4).contains(&acted), "{paused}");
    assert_eq!(stage.failed().await, 12);

    // The command line: a preview, an archive that waits for its end, the list.
    let run = |args: &'static [&'static str]| crate::cli::run(&stage.options, &stage.database.url, args);
    let preview = run(&["session", "archive", "--filter", "status=failed", "--dry-run"]).await;
    assert!(
        preview.code == 0 && preview.out.starts_with("12 sessions would be taken (12 failed)"),
        "{}",
        preview.out
    );
    let refused = run(&["session", "archive", "--filter", "status=failed", "--yes"]).await;
    assert!(refused.code == 2 && refused.err.contains("a reason is needed"), "{}", refused.err);
    let unasked = run(&["session", "archive", "--filter", "status=failed", "--reason", "old"]).await;
    assert!(unasked.code == 2 && unasked.err.contains("--yes"), "{}", unasked.err);
    let archived = run(&[
        "session",
        "archive",
        "--filter",
        "status=failed",
        "--reason",
        "old",
        "--yes",
        "--rate",
        "100",
        "-o",
        "json",
    ])
    .await;
    assert_eq!((archived.code, &archived.json()["counts"]["acted"]), (0, &json!(12)), "{}", archived.err);
    assert_eq!(stage.failed().await, 0);
    let listed = run(&["batch", "list"]).await;
    assert!(listed.out.contains("12/12") && listed.out.contains("paused"), "{}", listed.out);
    let shown = run(&["batch", "members", "none"]).await;
    assert_eq!(shown.code, 3, "{}", shown.err);
    assert!(process.terminate().success());
}

/// Kills workers again and again while they carry out a batch.
async fn retried_across_kills(each: usize, kills: usize, rate: u32) {
    let stage = Stage::new().await;
    stage.fail(each).await;
    stage.mend(&CAUSES);
    let all = each * 3;
    let api = stage.options.clone().arg("--roles=api").serve(&stage.database).await;
    let client = api.client();
    let body = json!({"verb": "retry", "filter": {"status": "failed"}, "reason": "mended", "rate": rate});
    let batch = id(&make(&client, &body).await);
    let worker = || -> Process { stage.options.clone().arg("--roles=worker").spawn(&stage.database.url) };
    let acted =
        || async { client.get(&format!("/v1/batches/{batch}")).await.1["counts"]["acted"].as_i64().unwrap() };
    let mut points = Vec::new();
    for kill in 0..kills {
        // Some die in their third act by themselves: right before its commit, or right after it. The others are killed after
        // an act of theirs.
        let point = ["B1", "B2", "", ""][kill % 4];
        let mut killed = match point {
            "" => worker(),
            point => {
                let options = stage.options.clone().arg("--roles=worker");
                options.env("FAILPOINTS", format!("{point}=2*off->return")).spawn(&stage.database.url)
            }
        };
        let before = acted().await;
        let end = killed.end();
        let enough = eventually("other acts", || async {
            let acted = acted().await;
            (acted == all as i64 || point.is_empty() && acted != before).then_some(())
        });
        tokio::select! {
            () = end.reached() => {
                let (status, dead) = killed.ended().await;
                assert!(!status.success() && dead.log().contains("failpoint"), "{point}: {}", dead.log());
                points.push(point);
            }
            () = enough => killed.kill(),
        }
    }
    assert!(points.starts_with(&["B1", "B2"]), "{points:?}");
    let last = worker();
    let done = client.batch_that_is(&batch, "done").await;
    assert_eq!((&done["counts"]["acted"], &done["counts"]["passed"]), (&json!(all), &json!(all)), "{done}");
    let retries = stage.retries().await;
    assert!(retries.len() == all && retries.iter().all(|times| *times == 1), "{retries:?}");
    let audited: i64 =
        stage.database.value("select count(*) from audit_log where verb = $1", "session.retry").await;
    assert_eq!(audited, all as i64, "each act is in the audit once");
    assert_eq!(stage.failed().await, 0);
    assert!(last.terminate().success() && api.terminate().success());
}

#[tokio::test]
async fn each_member_is_acted_on_once_though_workers_are_killed() {
    retried_across_kills(5, 3, 6).await;
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn each_member_is_acted_on_once_across_twenty_kills() {
    retried_across_kills(100, 20, 10).await;
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn of_a_thousand_failed_runs_fifty_are_proved_and_a_bad_fix_stops_within_ten() {
    let stage = Stage::new().await;
    stage.fail(334).await;
    stage.mend(&["birch"]);
    let process = stage.options.serve(&stage.database).await;
    let client = process.client();
    let began = Instant::now();
    let body = json!({"verb": "retry", "filter": {"status": "failed"}, "reason": "birch is mended", "prove": 50,
        "canary": [1, 10, 100]});
    let batch = id(&make(&client, &body).await);
    let proved = client.batch_that_is(&batch, "paused").await;
    let lasted = began.elapsed();
    println!("proved in {lasted:?}: {}", proved["proof"]["text"]);
    let passed = proved["proof"]["passed"].as_i64().unwrap();
    assert!((16..=17).contains(&passed), "{proved}");
    assert_eq!(stage.options.effects(), [""; 0]);
    assert_eq!((stage.failed().await, stage.retries().await.len()), (1002, 0));
    // The person goes on all the same: two of three causes are not mended.
    client.post(&format!("/v1/batches/{batch}/resume"), &json!({})).await;
    let stopped = eventually("it stops by itself", || async {
        let batch = client.get(&format!("/v1/batches/{batch}")).await.1;
        (batch["status"] == "paused").then_some(batch)
    })
    .await;
    let acted = stopped["counts"]["acted"].as_i64().unwrap();
    println!("stopped after {acted}: {}", stopped["status_reason"]);
    assert!(acted <= 10, "{stopped}");
    assert!(process.terminate().success());
}
