//! Links: a page that shows what it will do and changes nothing, and a press that acts once, for everybody who presses.

use super::*;
use crate::console::browser::{Browser, Page};
use reqwest::StatusCode as Status;

const LINKS: &str = "links = true";

/// The path of the message's link that does this.
fn link(message: &Value, act: &str) -> String {
    let links = message["links"].as_array().unwrap();
    let found = links.iter().find(|link| link["act"] == act).unwrap_or_else(|| panic!("no {act}: {message}"));
    let path = found["url"].as_str().unwrap().strip_prefix("http://127.0.0.1:7").unwrap();
    assert!(path.starts_with("/console/act/wkl_"), "{path}");
    path.to_owned()
}

async fn press(process: &Process, page: &Page, fields: &[(&str, &str)]) -> Page {
    let browser = Browser::new(&process.url());
    let own = browser.get(&page.path).await;
    let answer = browser.post(&own.form(&page.path), fields).await;
    assert_eq!(answer.status, Status::SEE_OTHER, "{}", answer.html);
    browser.get(&answer.location()).await
}

#[tokio::test]
async fn sixteen_people_press_the_same_button_and_one_acts() {
    let stage = Stage::new(LINKS).await;
    let process = stage.serve().await;
    let session = stage.session(&process, "broken", 400, "failed").await;
    let message = stage.sink.has(1).await.remove(0);
    let path = link(&message, "retry");
    let token = path.rsplit('/').next().unwrap();
    let stored = "select count(*) from act_links l where l::text like '%' || $1 || '%'";
    assert_eq!(stage.database.value::<i64>(stored, token).await, 0, "only its hash is stored");
    // A scanner of mail opens the link: nothing happens.
    let browser = Browser::new(&process.url());
    for _ in 0..3 {
        let page = browser.get(&path).await;
        assert_eq!(page.status, Status::OK);
        assert!(
            page.html.contains("Go on with a run that failed") && page.html.contains("400"),
            "{}",
            page.html
        );
    }
    assert_eq!(stage.count("select count(*) from act_links where used_at is not null and $1 <> ''").await, 0);
    // The press goes on with the run, which waits for this model.
    stage.model_does.store(0, Ordering::SeqCst);
    let page = browser.get(&path).await;
    let presses = (0..16).map(|_| press(&process, &page, &[]));
    let after = futures::future::join_all(presses).await;
    let done = after.iter().filter(|page| page.html.contains("It is done.")).count();
    assert_eq!(done, 1, "{}", after[0].html);
    assert!(after.iter().all(|page| page.html.contains("This link was used")), "{}", after[0].html);
    process.client().wait_for(&session, "completed").await;
    let retries = "select count(*) from session_events where type = 'SESSION_STEERED' and payload ->> 'verb' = 'retry' and $1 <> ''";
    assert_eq!(stage.count(retries).await, 1);
    let audited = "select count(*) from audit_log where verb = 'link.retry' and outcome = 'done' and actor_kind = 'link'
        and address = '127.0.0.1' and target = $1";
    assert_eq!(stage.database.value::<i64>(audited, &session).await, 1);
}

#[tokio::test]
async fn a_question_is_answered_by_a_link_without_a_login() {
    let mut stage = Stage::new(LINKS).await;
    stage.options = stage.options.env("WAKEFUL_TOKEN", "a-token-of-the-tests");
    let process = stage.serve().await;
    stage.model_does.store(1, Ordering::SeqCst);
    let client = process.client();
    let request = client.post_request("/v1/chat/desk/messages").bearer_auth("a-token-of-the-tests");
    let woken: Value = request.json(&json!({"text": "Hello?"})).send().await.unwrap().json().await.unwrap();
    let session = woken["session_id"].as_str().unwrap().to_owned();
    let path = link(&stage.sink.has(1).await.remove(0), "answer");
    let page = Browser::new(&process.url()).get(&path).await;
    assert!(page.html.contains("May I order it?"), "{}", page.html);
    let without = press(&process, &page, &[("answer", " ")]).await;
    assert!(without.html.contains("Nothing was done"), "{}", without.html);
    let after = press(&process, &page, &[("answer", "Yes, please.")]).await;
    assert!(after.html.contains("It is done."), "{}", after.html);
    eventually("the run to complete", || async {
        let status: String = stage
            .database
            .value("select status from conversation_sessions where session_id = $1", &session)
            .await;
        (status == "completed").then_some(())
    })
    .await;
    let answered = "select count(*) from session_inbox where content = 'Yes, please.' and session_id = $1";
    assert_eq!(stage.database.value::<i64>(answered, &session).await, 1);
    // The link opened nothing else.
    let (status, _) = client.get(&format!("/v1/sessions/{session}")).await;
    assert_eq!(status, Status::UNAUTHORIZED);
}

#[tokio::test]
async fn a_call_is_approved_by_a_link_which_shows_it_and_works_once() {
    let stage = Stage::new(&format!("{LINKS}\nwhen = [\"approval\"]")).await;
    let process = stage.serve().await;
    let session = stage.session(&process, "till", 2, "needs_attention").await;
    let message = stage.sink.has(1).await.remove(0);
    assert_eq!((&message["kind"], &message["count"]), (&json!("approval"), &json!(1)), "{message}");
    let path = link(&message, "approve");
    let browser = Browser::new(&process.url());
    let page = browser.get(&path).await;
    assert!(
        page.html.contains("charge {&#34;cents&#34;: 500}"),
        "the page shows what would run: {}",
        page.html
    );
    assert!(stage.options.effects().is_empty(), "a look runs nothing");
    let (status, problem) = process
        .client()
        .post("/v1/links/use", &json!({"token": path.rsplit('/').next().unwrap(), "outcome": "happened"}))
        .await;
    assert_eq!(status, Status::BAD_REQUEST, "{problem}");
    let presses = ["approved", "declined", "approved", "declined"]
        .map(async |outcome| press(&process, &page, &[("outcome", outcome)]).await);
    let after = futures::future::join_all(presses).await;
    assert_eq!(after.iter().filter(|page| page.html.contains("It is done.")).count(), 1, "{}", after[0].html);
    process.client().wait_for(&session, "completed").await;
    let decided = "select payload ->> 'resolution' from session_events where type = 'EFFECT_RESOLVED' and session_id = $1";
    let decided: String = stage.database.value(decided, &session).await;
    assert_eq!(stage.options.effects().len(), usize::from(decided == "approved"));
    assert_eq!(stage.count("select count(*) from notifications where $1 <> ''").await, 1, "it is told once");
}

#[tokio::test]
async fn expired_used_foreign_and_altered_links_and_what_has_changed_do_nothing() {
    let stage = Stage::new(LINKS).await;
    let process = stage.serve().await;
    let client = process.client();
    let session = stage.session(&process, "broken", 400, "failed").await;
    let path = link(&stage.sink.has(1).await.remove(0), "retry");
    let browser = Browser::new(&process.url());
    let whole = browser.get(&path).await;
    let token = path.rsplit('/').next().unwrap();
    let last = if token.ends_with('0') { "1" } else { "0" };
    let altered = format!("{}{last}", &token[..token.len() - 1]);
    for wrong in [altered.as_str(), "wkl_", &format!("wkl_{}", "0".repeat(64)), "wkt_0000000000000000_00"] {
        assert_eq!(browser.get(&format!("/console/act/{wrong}")).await.status, Status::NOT_FOUND, "{wrong}");
        let (status, _) = client.post("/v1/links/use", &json!({"token": wrong})).await;
        assert_eq!(status, Status::NOT_FOUND, "{wrong}");
    }
    sqlx::query("update act_links set expires_at = expires_at - interval '2 days'")
        .execute(&stage.database.pool)
        .await
        .unwrap();
    assert!(browser.get(&path).await.html.contains("This link has expired"));
    let (status, problem) = client.post("/v1/links/use", &json!({"token": token})).await;
    assert_eq!(status, Status::CONFLICT);
    assert!(problem["detail"].as_str().unwrap().contains("expired"), "{problem}");
    sqlx::query("update act_links set expires_at = expires_at + interval '3 days'")
        .execute(&stage.database.pool)
        .await
        .unwrap();
    // The run is retried by somebody else, and fails again: that failure is another one than the message told.
    let (status, _) = client.post(&format!("/v1/sessions/{session}/retry"), &json!({})).await;
    assert_eq!(status, Status::ACCEPTED);
    client.wait_for(&session, "failed").await;
    let changed = browser.get(&path).await;
    assert!(
        changed.html.contains("has changed meanwhile") && !changed.html.contains("<button>Retry"),
        "{}",
        changed.html
    );
    let answer = browser.post(&whole.form(&path), &[]).await;
    let after = browser.get(&answer.location()).await;
    assert!(after.html.contains("Nothing was done"), "{}", after.html);
    assert_eq!(stage.count("select count(*) from act_links where used_at is not null and $1 <> ''").await, 0);
    // Its fresh link works once.
    let messages = stage.sink.has(2).await;
    let fresh = link(&messages[1], "retry");
    stage.model_does.store(0, Ordering::SeqCst);
    let page = browser.get(&fresh).await;
    assert!(press(&process, &page, &[]).await.html.contains("It is done."));
    client.wait_for(&session, "completed").await;
    let (status, problem) =
        client.post("/v1/links/use", &json!({"token": fresh.rsplit('/').next().unwrap()})).await;
    assert_eq!(status, Status::CONFLICT);
    assert!(problem["detail"].as_str().unwrap().contains("was used by 127.0.0.1"), "{problem}");
}

#[tokio::test]
async fn k82_a_press_whose_process_dies_before_the_commit_leaves_the_link_as_it_was() {
    let stage = Stage::new(LINKS).await;
    let process = stage.options.clone().env("FAILPOINTS", "K82_act=1*return").serve(&stage.database).await;
    let session = stage.session(&process, "broken", 400, "failed").await;
    let path = link(&stage.sink.has(1).await.remove(0), "retry");
    let token = path.rsplit('/').next().unwrap().to_owned();
    let request = process.client().post_request("/v1/links/use").json(&json!({"token": token}));
    assert!(request.send().await.is_err());
    let (status, _) = process.ended().await;
    assert!(!status.success());
    stage.model_does.store(0, Ordering::SeqCst);
    let process = stage.serve().await;
    let (status, used) = process.client().post("/v1/links/use", &json!({"token": token})).await;
    assert_eq!(status, Status::OK, "{used}");
    process.client().wait_for(&session, "completed").await;
}

#[tokio::test]
async fn a_message_that_was_not_taken_leaves_no_link_behind() {
    let stage = Stage::new(LINKS).await;
    let process = stage.serve().await;
    stage.sink.says(&[503, 503, 503]);
    stage.session(&process, "broken", 400, "failed").await;
    let message = stage.sink.has(1).await.remove(0);
    assert_eq!(stage.sink.asked(), 4);
    let links = message["links"].as_array().unwrap().len() as i64;
    let stored = "select count(*) from act_links where $1 = ''";
    assert_eq!((links, stage.database.value::<i64>(stored, "").await), (1, 1), "{message}");
    let browser = Browser::new(&process.url());
    assert_eq!(browser.get(&link(&message, "retry")).await.status, Status::OK);
}

/// What is asked for each message, and deleted each hour or minute, as the product asks it.
#[tokio::test]
async fn no_look_of_the_notifications_reads_a_whole_table() {
    let database = Database::new().await;
    let sources = concat!(
        include_str!("../../store/src/notify/mod.rs"),
        include_str!("../../store/src/notify/link.rs"),
        include_str!("../../store/src/idempotency.rs")
    );
    let sources = sources.split_whitespace().collect::<Vec<_>>().join(" ");
    for (sql, condition) in [
        (
            "select coalesce(max(through_member), 0) as member from notifications where group_id = $2",
            "group_id",
        ),
        ("from notifications where rule = $1 and created_at > now() - interval '1 hour'", "created_at"),
        ("delete from notifications n using old where n.group_id = old.group_id", "group_id"),
        (
            "select group_id from notification_groups where closed_at < now() - interval '90 days' limit 1000",
            "closed_at",
        ),
        ("delete from act_links where expires_at < now() - interval '30 days'", "expires_at"),
        ("delete from act_links where notification_id = $1 and used_at is null", "notification_id"),
        ("from idempotency_keys where expires_at < now() limit $1", "expires_at"),
    ] {
        assert!(sources.contains(sql), "the product does not ask this any more: {sql}");
        let sql = sql
            .replace("$1", "'1'")
            .replace("$2", "'1'")
            .replace("using old", "using (values ('1')) old (group_id)");
        let sql = if sql.starts_with("from") { format!("select count(*) {sql}") } else { sql };
        // As the connections of the product are set up.
        let mut tx = database.pool.begin().await.unwrap();
        let settings = "set local enable_seqscan = off; set local enable_bitmapscan = off";
        sqlx::raw_sql(settings).execute(&mut *tx).await.unwrap();
        let plan: Vec<String> = sqlx::query_scalar(sqlx::AssertSqlSafe(format!("explain {sql}")))
            .fetch_all(&mut *tx)
            .await
            .unwrap();
        let by_index = |line: &String| line.contains("Index Cond: ") && line.contains(condition);
        assert!(plan.iter().any(by_index), "{sql}\n{}", plan.join("\n"));
    }
}
