//! The header `Idempotency-Key`: what was answered before is answered again, by any process.

use crate::access::stage::TOKEN;
use crate::support::{Database, Options, Process, eventually};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use sqlx::Row;
use wakeful_store::idempotency::{KeyUse, Keyed};
use wakeful_store::space::{Scope, within};

struct Scene {
    database: Database,
    one: Process,
    other: Process,
}

struct Told {
    status: StatusCode,
    body: Value,
    is_repeated: bool,
    retry_after: bool,
}

impl Scene {
    async fn new() -> Scene {
        let database = Database::new().await;
        let options = Options::new()
            .model("openai/test")
            .env("OPENAI_BASE_URL", "http://127.0.0.1:1")
            .env("WAKEFUL_TOKEN", TOKEN)
            .arg("--roles=api");
        let (one, other) = (options.serve(&database).await, options.serve(&database).await);
        Scene { database, one, other }
    }

    async fn ask(&self, process: &Process, token: &str, key: &str, path: &str, body: &Value) -> Told {
        ask(process.url(), token, key, path, body).await
    }

    async fn keys(&self) -> i64 {
        let row = sqlx::query("select count(*) from idempotency_keys").fetch_one(&self.database.pool).await;
        row.unwrap().get(0)
    }

    async fn execute(&self, sql: &'static str) {
        sqlx::query(sql).execute(&self.database.pool).await.expect(sql);
    }
}

async fn ask(url: String, token: &str, key: &str, path: &str, body: &Value) -> Told {
    let request = crate::support::http().request(Method::POST, format!("{url}{path}")).bearer_auth(token);
    let request = if key.is_empty() { request } else { request.header("idempotency-key", key) };
    let answer = request.body(body.to_string()).send().await.expect("the server answers");
    Told {
        status: answer.status(),
        is_repeated: answer.headers().contains_key("idempotency-replayed"),
        retry_after: answer.headers().contains_key("retry-after"),
        body: answer.json().await.unwrap_or_default(),
    }
}

fn daily(name: &str) -> Value {
    json!({"name": name, "cron": "0 9 * * *", "prompt": "What is new?"})
}

#[tokio::test]
async fn a_repeated_post_gets_the_first_answer_from_any_process_and_another_request_is_refused() {
    let scene = Scene::new().await;
    let (one, other) = (&scene.one, &scene.other);
    let first = scene.ask(one, TOKEN, "k1", "/v1/schedules", &daily("a")).await;
    assert_eq!((first.status, first.is_repeated), (StatusCode::CREATED, false), "{}", first.body);
    for process in [other, one] {
        let again = scene.ask(process, TOKEN, "k1", "/v1/schedules", &daily("a")).await;
        assert_eq!((again.status, again.is_repeated), (StatusCode::CREATED, true), "{}", again.body);
        assert_eq!(again.body, first.body);
    }
    let acts =
        sqlx::query("select count(*) from audit_log where verb = 'schedule.create' and outcome = 'done'");
    let acts = acts.fetch_one(&scene.database.pool).await.unwrap().get::<i64, _>(0);
    assert_eq!(acts, 1, "a repeated answer is not a second act");
    // The schedule has changed since, and the answer has not.
    scene.ask(one, TOKEN, "", "/v1/schedules/a/pause", &json!({})).await;
    let again = scene.ask(other, TOKEN, "k1", "/v1/schedules", &daily("a")).await;
    assert_eq!(again.body["state"], "active");
    for (path, body) in [("/v1/schedules", daily("b")), ("/v1/schedules/a/pause", daily("a"))] {
        let refused = scene.ask(other, TOKEN, "k1", path, &body).await;
        assert_eq!(refused.status, StatusCode::UNPROCESSABLE_ENTITY, "{path}: {}", refused.body);
    }
    // A key is its token's.
    let made = scene.ask(one, TOKEN, "k2", "/v1/tokens", &json!({"scope": "operate"})).await;
    let token = made.body["token"].as_str().expect("it is shown once");
    let own = scene.ask(one, token, "k1", "/v1/schedules", &daily("b")).await;
    assert_eq!((own.status, own.is_repeated), (StatusCode::CREATED, false), "{}", own.body);
    // What is shown once is not kept.
    let again = scene.ask(other, TOKEN, "k2", "/v1/tokens", &json!({"scope": "operate"})).await;
    assert_eq!((again.status, &again.body["token"]), (StatusCode::CREATED, &Value::Null));
    assert_eq!(again.body["token_id"], made.body["token_id"]);
    let kept = sqlx::query("select string_agg(answer, ' ') from idempotency_keys")
        .fetch_one(&scene.database.pool)
        .await
        .unwrap();
    assert!(!kept.get::<String, _>(0).contains(token), "the secret is not in the database");
    assert_eq!(scene.keys().await, 3);
}

#[tokio::test]
async fn a_refused_request_and_one_without_a_key_keep_nothing() {
    let scene = Scene::new().await;
    for key in ["k1", "k1", ""] {
        let refused = scene.ask(&scene.one, TOKEN, key, "/v1/sessions/none/retry", &json!({})).await;
        assert_eq!(refused.status, StatusCode::NOT_FOUND, "{}", refused.body);
    }
    scene.ask(&scene.one, TOKEN, "", "/v1/schedules", &daily("a")).await;
    assert_eq!(scene.keys().await, 0);
    let long = "x".repeat(257);
    let refused = scene.ask(&scene.one, TOKEN, &long, "/v1/schedules", &daily("b")).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{}", refused.body);
}

#[tokio::test]
async fn while_the_first_request_is_at_work_the_second_waits_and_if_its_process_dies_the_second_runs() {
    const PAUSE: &str = "/v1/schedules/a/pause";
    let Scene { database, one, other } = Scene::new().await;
    ask(one.url(), TOKEN, "", "/v1/schedules", &daily("a")).await;
    let pause = async |url: String| ask(url, TOKEN, "k1", PAUSE, &json!({})).await;
    let mut holds = database.pool.begin().await.unwrap();
    sqlx::query("select from schedules for update").execute(&mut *holds).await.unwrap();
    let url = format!("{}{PAUSE}", one.url());
    let request =
        crate::support::http().post(url).bearer_auth(TOKEN).header("idempotency-key", "k1").body("{}");
    let first = tokio::spawn(async move { request.send().await.map(|answer| answer.status()) });
    eventually("the first request to claim its key", || async {
        let keys = sqlx::query("select from idempotency_keys").fetch_all(&database.pool).await.unwrap();
        (keys.len() == 1).then_some(())
    })
    .await;
    let second = pause(other.url()).await;
    assert_eq!((second.status, second.retry_after), (StatusCode::CONFLICT, true), "{}", second.body);
    one.kill();
    assert!(first.await.unwrap().is_err(), "its process is dead");
    holds.rollback().await.unwrap();
    assert_eq!(pause(other.url()).await.status, StatusCode::CONFLICT, "it may still be at work");
    sqlx::query("update idempotency_keys set claimed_until = now() - interval '1 second'")
        .execute(&database.pool)
        .await
        .unwrap();
    for is_repeated in [false, true] {
        let told = pause(other.url()).await;
        assert_eq!((told.status, told.is_repeated), (StatusCode::OK, is_repeated), "{}", told.body);
    }
}

#[tokio::test]
async fn a_request_whose_client_goes_away_runs_to_its_end_and_its_answer_is_kept() {
    const PAUSE: &str = "/v1/schedules/a/pause";
    let scene = Scene::new().await;
    let database = &scene.database;
    scene.ask(&scene.one, TOKEN, "", "/v1/schedules", &daily("a")).await;
    let mut holds = database.pool.begin().await.unwrap();
    sqlx::query("select from schedules for update").execute(&mut *holds).await.unwrap();
    let request = crate::support::http().post(format!("{}{PAUSE}", scene.one.url()));
    let request = request.bearer_auth(TOKEN).header("idempotency-key", "k1").body("{}");
    let first = tokio::spawn(request.send());
    eventually("the first request to wait for the row", || async {
        let waiting = sqlx::query(
            "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'",
        );
        (!waiting.fetch_all(&database.pool).await.unwrap().is_empty()).then_some(())
    })
    .await;
    first.abort();
    assert!(first.await.is_err_and(|error| error.is_cancelled()), "its client is gone");
    // The server has seen that when it has answered others.
    for _ in 0..20 {
        assert_eq!(scene.ask(&scene.one, TOKEN, "k1", PAUSE, &json!({})).await.status, StatusCode::CONFLICT);
    }
    holds.rollback().await.unwrap();
    eventually("its answer", || async {
        let answered = sqlx::query("select from idempotency_keys where status = 200");
        (answered.fetch_all(&database.pool).await.unwrap().len() == 1).then_some(())
    })
    .await;
    let again = scene.ask(&scene.other, TOKEN, "k1", PAUSE, &json!({})).await;
    assert_eq!((again.status, again.is_repeated), (StatusCode::OK, true), "{}", again.body);
    let acts =
        sqlx::query("select count(*) from audit_log where verb = 'schedule.pause' and outcome = 'done'");
    assert_eq!(acts.fetch_one(&database.pool).await.unwrap().get::<i64, _>(0), 1, "one act");
}

#[tokio::test]
async fn a_key_is_kept_for_a_day_and_then_forgotten() {
    let scene = Scene::new().await;
    scene.ask(&scene.one, TOKEN, "k1", "/v1/schedules", &daily("a")).await;
    scene.ask(&scene.one, TOKEN, "k2", "/v1/schedules/a/pause", &json!({})).await;
    let row = sqlx::query(
        "select bool_and(expires_at between now() + interval '23 hours' and now() + interval '24 hours') from idempotency_keys",
    );
    assert!(row.fetch_one(&scene.database.pool).await.unwrap().get::<bool, _>(0));
    scene
        .execute("update idempotency_keys set expires_at = now() - interval '1 second' where key = 'k1'")
        .await;
    let anew = scene.ask(&scene.one, TOKEN, "k1", "/v1/schedules", &daily("b")).await;
    assert_eq!((anew.status, anew.is_repeated), (StatusCode::CREATED, false), "{}", anew.body);
    scene
        .execute("update idempotency_keys set expires_at = now() - interval '1 second' where key = 'k1'")
        .await;
    let store = scene.database.store().await;
    assert_eq!(within(Scope::All, store.forget_keys()).await.unwrap(), 1);
    assert_eq!(scene.keys().await, 1, "the other one's time is not over");
    // A request that lost its key to another does not write over that one's answer.
    let keyed = Keyed {
        space_id: "default",
        principal: "configuration",
        key: "k3",
        request: "POST /x",
        body_sha256: b"b",
    };
    within(Scope::All, async {
        let KeyUse::Claimed { claim } = store.claim_key(&keyed).await.unwrap() else { panic!("it is free") };
        scene.execute("update idempotency_keys set claimed_until = now() - interval '1 second'").await;
        let KeyUse::Claimed { claim: later } = store.claim_key(&keyed).await.unwrap() else {
            panic!("it is free again")
        };
        store.answer_key(&keyed, &later, 201, "second").await.unwrap();
        store.answer_key(&keyed, &claim, 200, "first").await.unwrap();
        store.free_key(&keyed, &claim).await.unwrap();
        let answered = KeyUse::Answered { status: 201, answer: "second".to_owned() };
        assert_eq!(store.claim_key(&keyed).await.unwrap(), answered);
    })
    .await;
}

#[tokio::test]
async fn all_keys_whose_time_is_over_are_forgotten_however_many() {
    let database = Database::new().await;
    let keys = "insert into idempotency_keys (space_id, principal, key, request, body_sha256, claim, claimed_until, expires_at)
        select 'default', 'x', 'key ' || n, 'POST /v1/x', '', 'c', now(),
            now() + case when n <= 2500 then -1 else 1 end * interval '1 hour'
        from generate_series(1, 2501) n";
    sqlx::raw_sql(keys).execute(&database.pool).await.unwrap();
    let store = database.store().await;
    assert_eq!(within(Scope::All, store.forget_keys()).await.unwrap(), 2500);
    assert_eq!(
        database.value::<i64>("select count(*) from idempotency_keys where key = $1", "key 2501").await,
        1
    );
    assert_eq!(database.value::<i64>("select count(*) from idempotency_keys where key <> $1", "").await, 1);
}
