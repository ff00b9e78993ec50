//! Effects whose end is unknown, of many sessions: they are listed, and one request resolves all of them, each once.

use crate::console::browser::{Browser, Page};
use crate::support::client::texts;
use crate::support::folder::Changes;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, checker, eventually, within};
use futures::future::join_all;
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use wakeful_store::token::NewToken;
use wakeful_workflow::access::Scope;

/// How many charges a session makes at once.
const CHARGES: usize = 5;
const RESULT: &str = "Charged, as the bank says.";

/// Sessions whose workers died in the middle of their charges, or whose mails may not have been sent.
struct Shop {
    database: Database,
    options: Options,
    _model: ModelServer,
}

impl Shop {
    async fn new() -> Shop {
        Shop::with(|options| options).await
    }

    async fn with(more: impl FnOnce(Options) -> Options) -> Shop {
        let model = ModelServer::start(|body, _| {
            if crate::support::model::turns_since_user(body) > 0 {
                return Answer::text("I see.");
            }
            let messages = body["messages"].as_array().unwrap();
            match messages.last().unwrap()["content"].as_str() {
                Some("Charge me.") => Answer::Calls(
                    (0..CHARGES)
                        .map(|n| ("charge".to_owned(), json!({"cents": 100 + n}).to_string()))
                        .collect(),
                ),
                Some("Write.") => Answer::call(
                    "compose_email",
                    json!({"to": ["bob@example.com"], "subject": "A note", "body": "The note."}),
                ),
                _ => Answer::text("Hello."),
            }
        })
        .await;
        let options = Options::new()
            .model("openai/test")
            .config("on_uncertain = \"needs_attention\"")
            .env("OPENAI_BASE_URL", &model.url)
            .env("FIXTURE_POST", "guarded");
        let sent = options.path("sent").display().to_string();
        let options = more(options.env("FIXTURE_SENT", sent));
        Shop { database: Database::new().await, options, _model: model }
    }

    /// Kills a worker in the middle of the charges of so many sessions, as often as is said. Returns the sessions when they wait for
    /// a person.
    async fn interrupted(&self, kills: usize, sessions: usize) -> Vec<String> {
        let mut ids = Vec::new();
        std::fs::write(self.options.path("hold"), "").unwrap();
        for kill in 0..kills {
            let process = self.options.serve(&self.database).await;
            let client = process.client();
            let names: Vec<String> = (0..sessions).map(|n| format!("shop-{kill}-{n}")).collect();
            let chats = names.iter().map(|name| client.chat(name, "Charge me."));
            ids.extend(
                join_all(chats).await.iter().map(|told| told["session_id"].as_str().unwrap().to_owned()),
            );
            let begun = (kill + 1) * sessions * CHARGES;
            self.options.has_effects(begun).await;
            process.kill();
        }
        std::fs::remove_file(self.options.path("hold")).unwrap();
        let process = self.options.serve(&self.database).await;
        for id in &ids {
            process.client().wait_for(id, "needs_attention").await;
        }
        assert!(process.terminate().success());
        ids
    }

    async fn run_sql(&self, sql: &'static str) {
        sqlx::query(sql).execute(&self.database.pool).await.expect(sql);
    }

    /// The time is over in which the dead workers could still carry out what they began.
    async fn much_later(&self) {
        self.run_sql("update tool_calls set settled_by = clock_timestamp() - interval '1 s'").await;
        self.run_sql("update deliveries set settled_by = clock_timestamp() - interval '1 s'").await;
    }

    async fn count(&self, sql: &'static str) -> i64 {
        self.database.value(sql, "all").await
    }

    async fn token(&self, name: &str) -> String {
        let new = NewToken {
            scope: Scope::Operate,
            space_id: Some("default".to_owned()),
            agent: None,
            name: Some(name.to_owned()),
            expires_in: None,
        };
        self.database.store().await.create_token(&new).await.unwrap().1
    }

    async fn api(&self) -> Process {
        self.options.clone().arg("--roles=api").serve(&self.database).await
    }

    fn worker(&self, failpoints: &str) -> Process {
        let options = self.options.clone().arg("--roles=worker");
        options.env("FAILPOINTS", failpoints).spawn(&self.database.url)
    }
}

const RESOLVED: &str = "select count(*) from session_events where type = 'EFFECT_RESOLVED' and $1 <> ''";
const EFFECTS_RESOLVED: &str = "select count(distinct (session_id, payload ->> 'effect')) from session_events
    where type = 'EFFECT_RESOLVED' and $1 <> ''";
const AUDITED: &str =
    "select count(*) from audit_log where verb = 'session.resolve' and outcome = 'done' and $1 <> ''";

async fn ended(client: &Client, batch: &str) -> Value {
    eventually(&format!("{batch} is done"), || async {
        let batch = client.get(&format!("/v1/batches/{batch}")).await.1;
        (batch["status"] == "done").then_some(batch)
    })
    .await
}

/// Every item of a list, page by page.
async fn all(client: &Client, path: &str) -> Vec<Value> {
    let (mut items, mut next) = (Vec::new(), String::new());
    loop {
        let (status, page) = client.get(&format!("{path}{next}")).await;
        assert_eq!(status, StatusCode::OK, "{page}");
        items.extend(page["items"].as_array().unwrap().clone());
        match &page["next"] {
            Value::String(cursor) => next = format!("&cursor={}", cursor.replace('~', "%7E")),
            Value::Null => return items,
            // Of a batch's members: the last one's place.
            ordinal => next = format!("&cursor={ordinal}"),
        }
    }
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn a_hundred_uncertain_effects_are_resolved_by_one_request_each_once_though_workers_are_killed() {
    let shop = Shop::new().await;
    let sessions = shop.interrupted(4, 5).await;
    let api = shop.api().await;
    let client = api.client();
    let effects = all(&client, "/v1/effects?status=uncertain&limit=30").await;
    let names: BTreeSet<String> =
        effects.iter().map(|one| format!("{}/{}", one["session_id"], one["effect_id"])).collect();
    assert_eq!((effects.len(), names.len()), (100, 100));
    assert!(effects.iter().all(|one| one["name"] == "charge" && one["arguments"]["cents"].is_number()));

    // A preview writes nothing.
    let filter = json!({"tool": "charge"});
    let dry = json!({"verb": "resolve", "filter": filter, "outcome": "did_not_happen", "dry_run": true});
    let (status, preview) = client.post("/v1/batches", &dry).await;
    assert_eq!((status, &preview["members"]), (StatusCode::OK, &json!(100)), "{preview}");
    assert_eq!(preview["by_name"], json!({"charge": 100}));
    assert_eq!(preview["refused"], json!({"it may still be carried out": 100}));
    assert_eq!((preview["sample"].as_array().unwrap().len(), shop.count(RESOLVED).await), (10, 0));

    // Two operators say the same at once, of all of them. A batch stops when its maker's token is gone, so each is asked by its own.
    let (ann, ben) = (shop.token("ann").await, shop.token("ben").await);
    let body = json!({"verb": "resolve", "filter": filter, "outcome": "happened", "result": RESULT,
        "reason": "the bank has all of them", "rate": 200});
    let made = join_all([&ann, &ben].map(|token| {
        let request = client.post_request("/v1/batches").bearer_auth(token).body(body.to_string());
        async move {
            let answer = request.send().await.unwrap();
            assert_eq!(answer.status(), StatusCode::CREATED);
            let batch: Value = answer.json().await.unwrap();
            assert_eq!(batch["members"], 100, "{batch}");
            batch["batch_id"].as_str().unwrap().to_owned()
        }
    }))
    .await;
    // Workers die right before the commit of an act, and right after one.
    for point in ["B1", "B2"] {
        let (status, dead) = shop.worker(&format!("{point}=7*off->return")).ended().await;
        assert!(!status.success() && dead.log().contains("failpoint"), "{point}: {}", dead.log());
    }
    let worker = shop.worker("");
    let batches = [ended(&client, &made[0]).await, ended(&client, &made[1]).await];
    let sum = |what: &str| batches.iter().map(|batch| batch["counts"][what].as_i64().unwrap()).sum::<i64>();
    assert_eq!((sum("acted"), sum("refused")), (100, 100), "{batches:?}");
    // Each effect happened once, was resolved once, and its model was told once.
    for id in &sessions {
        let session = client.wait_for(id, "completed").await;
        assert_eq!(texts(&session, "tool"), [RESULT; CHARGES]);
    }
    assert_eq!(shop.options.effects().len(), 100);
    assert_eq!((shop.count(RESOLVED).await, shop.count(EFFECTS_RESOLVED).await), (100, 100));
    assert_eq!(shop.count(AUDITED).await, 100);
    for batch in &made {
        let outcomes = all(&client, &format!("/v1/batches/{batch}/members?limit=60")).await;
        assert_eq!(outcomes.len(), 100);
        for one in outcomes {
            assert!(one["effect_id"].is_string() && one["effect_kind"] == "call", "{one}");
            let said = one["detail"].as_str().unwrap_or_default();
            assert_eq!(
                said.contains("was resolved before, as happened"),
                one["outcome"] == "refused",
                "{one}"
            );
        }
    }
    assert_eq!(all(&client, "/v1/effects?all=true").await, [json!(null); 0]);
    for id in sessions.iter().take(3) {
        checker::check(&shop.database, id, &shop.options.effects()).await;
    }
    assert!(worker.terminate().success() && api.terminate().success());
}

#[tokio::test]
async fn a_batch_that_lost_its_result_to_an_erasure_resolves_no_call_with_nothing() {
    let shop = Shop::new().await;
    shop.interrupted(1, 1).await;
    let api = shop.api().await;
    let client = api.client();
    let body = json!({"verb": "resolve", "filter": {"tool": "charge"}, "outcome": "happened", "result": RESULT,
        "reason": "the bank has them"});
    let (status, made) = client.post("/v1/batches", &body).await;
    assert_eq!(status, StatusCode::CREATED, "{made}");
    // As the erasure of a conversation of one of its members leaves it.
    shop.run_sql("update batches set decision = decision - 'result', reason = null").await;
    let worker = shop.worker("");
    let id = made["batch_id"].as_str().unwrap();
    let batch = ended(&client, id).await;
    assert_eq!(batch["counts"]["refused"], made["members"], "{batch}");
    for member in all(&client, &format!("/v1/batches/{id}/members?limit=60")).await {
        assert!(member["detail"].as_str().unwrap().contains("was erased"), "{member}");
    }
    assert_eq!(shop.count(RESOLVED).await, 0);
    assert!(worker.terminate().success() && api.terminate().success());
}

#[tokio::test]
async fn messages_that_were_not_sent_are_sent_again_once_by_one_command() {
    const MAILS: usize = 12;
    let shop = Shop::new().await;
    let process = shop.options.serve(&shop.database).await;
    let client = process.client();
    for n in 0..MAILS {
        let told = client.chat(&format!("desk-{n}"), "Write.").await;
        client.wait_for(told["session_id"].as_str().unwrap(), "completed").await;
    }
    let sent = || std::fs::read_to_string(shop.options.path("sent")).unwrap_or_default();
    let all = Changes::of(shop.options.path("sent")).until(|| sent().lines().count() == MAILS);
    within("all mails to be sent", all).await;
    let is_done = || async {
        let open = "select count(*) from jobs where $1 <> ''";
        eventually("every job to end", || async { (shop.count(open).await == 0).then_some(()) }).await;
    };
    is_done().await;
    // As a kill between the send and its commit leaves them: the journal does not say that they were sent.
    shop.run_sql(
        "do $$ begin
            set local session_replication_role = replica;
            delete from session_events where type = 'GEN_SENT';
            update deliveries set status = 'uncertain', settled_by = clock_timestamp() + interval '1 hour';
        end $$",
    )
    .await;
    let run = |args: &'static [&'static str]| crate::cli::run(&shop.options, &shop.database.url, args);
    let listed = run(&["effect", "list", "--channel", "email", "-o", "json"]).await;
    assert_eq!(listed.json().as_array().unwrap().len(), MAILS, "{}", listed.err);
    const RESOLVE: [&str; 7] =
        ["effect", "resolve", "--channel", "email", "--did-not-happen", "--reason", "not in the log"];
    let early = run(&[RESOLVE[0], RESOLVE[1], "--channel", "email", "--did-not-happen", "--dry-run"]).await;
    assert!(
        early.out.starts_with("12 effects would be taken (12 email); refused at this moment: 12: it may"),
        "{}",
        early.out
    );
    let unsaid = run(&["effect", "resolve", "--did-not-happen", "--reason", "x", "--yes"]).await;
    assert!(unsaid.code == 2 && unsaid.err.contains("say which effects"), "{}", unsaid.err);
    let refused = run(&[
        "effect",
        "resolve",
        "--channel",
        "email",
        "--did-not-happen",
        "--reason",
        "x",
        "--yes",
        "-o",
        "json",
    ])
    .await;
    assert_eq!((refused.code, &refused.json()["counts"]["refused"]), (7, &json!(MAILS)), "{}", refused.err);
    assert_eq!(sent().lines().count(), MAILS, "nothing was sent");

    shop.much_later().await;
    let yes = run(&[
        RESOLVE[0], RESOLVE[1], RESOLVE[2], RESOLVE[3], RESOLVE[4], RESOLVE[5], RESOLVE[6], "--yes", "-o",
        "json",
    ]);
    let again = run(&[
        RESOLVE[0], RESOLVE[1], RESOLVE[2], RESOLVE[3], RESOLVE[4], RESOLVE[5], "me too", "--yes", "-o",
        "json",
    ]);
    let (yes, again) = tokio::join!(yes, again);
    let acted = [&yes, &again]
        .map(|ran| if ran.out.is_empty() { 0 } else { ran.json()["counts"]["acted"].as_i64().unwrap() });
    assert_eq!(acted[0] + acted[1], MAILS as i64, "{} {}", yes.err, again.err);
    is_done().await;
    let text = sent();
    let keys: Vec<&str> = text.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(keys.len(), 2 * MAILS, "each was sent again once");
    assert!(keys.iter().all(|key| keys.iter().filter(|other| *other == key).count() == 2), "{text}");
    assert_eq!(
        shop.count("select count(*) from deliveries where status = 'sent' and $1 <> ''").await,
        MAILS as i64
    );
    assert!(process.terminate().success());
}

#[tokio::test]
async fn an_effect_whose_key_is_lost_for_good_is_refused_and_the_others_are_resolved() {
    let shop = Shop::with(|options| {
        let keys = options.path("keys");
        std::fs::create_dir(&keys).unwrap();
        options
            .env("WAKEFUL_ENCRYPTION__KEYS", keys.to_str().unwrap())
            .env("WAKEFUL_ENCRYPTION__MASTER_KEY", crate::encryption::MASTER)
    })
    .await;
    let sessions = shop.interrupted(1, 2).await;
    let key = "select data_key from conversation_sessions where session_id = $1";
    let key: String = shop.database.value(key, &sessions[0]).await;
    std::fs::remove_file(shop.options.path("keys").join(&key[..2]).join(format!("{key}.key"))).unwrap();
    let process = shop.options.serve(&shop.database).await;
    let client = process.client();
    let body = json!({"verb": "resolve", "filter": {"tool": "charge"}, "outcome": "happened", "result": RESULT,
        "reason": "the bank has all of them", "rate": 200});
    let (status, made) = client.post("/v1/batches", &body).await;
    assert_eq!((status, &made["members"]), (StatusCode::CREATED, &json!(2 * CHARGES)), "{made}");
    let batch = made["batch_id"].as_str().unwrap();
    let done = ended(&client, batch).await;
    assert_eq!((&done["counts"]["acted"], &done["counts"]["refused"]), (&json!(CHARGES), &json!(CHARGES)));
    let refused = all(&client, &format!("/v1/batches/{batch}/members?outcome=refused")).await;
    for one in refused {
        assert_eq!(one["session_id"], json!(sessions[0]));
        assert!(one["detail"].as_str().unwrap().contains(&format!("it has no data key {key}")), "{one}");
    }
    assert_eq!(texts(&client.wait_for(&sessions[1], "completed").await, "tool"), [RESULT; CHARGES]);
    assert_eq!(shop.count(RESOLVED).await, CHARGES as i64);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn effects_are_ticked_on_one_page_and_resolved_by_one_press() {
    let shop = Shop::new().await;
    let sessions = shop.interrupted(1, 2).await;
    let process = shop.options.serve(&shop.database).await;
    let client = process.client();
    let browser = Browser::new(&process.url());
    let overview = browser.open("/").await;
    assert!(overview.html.contains("10 effects may have happened."), "{}", overview.html);
    let page = browser.get(&overview.link("/effects")).await;
    assert_eq!(page.html.matches("type=\"checkbox\" name=\"effect\"").count(), 10, "{}", page.html);
    let none =
        browser.press(&page, "/effects/resolve", &[("outcome", "did_not_happen"), ("reason", "x")]).await;
    assert!(
        none.html.contains("Nothing was done: ") && none.html.contains("say which effects"),
        "{}",
        none.html
    );
    let ticked = browser.get(&page.link("ticked=all")).await;
    assert_eq!(ticked.html.matches("\" checked></td>").count(), 10, "{}", ticked.html);
    // What a browser sends for the ticked boxes, of which one is taken away again.
    let boxes = ticked.html.split("name=\"effect\" value=\"").skip(1);
    let values: Vec<String> = boxes.map(|rest| rest.split('"').next().unwrap().to_owned()).collect();
    let mut fields: Vec<(&str, &str)> =
        values.iter().skip(1).map(|value| ("effect", value.as_str())).collect();
    fields.extend([("outcome", "happened"), ("result", RESULT), ("reason", "seen\nin the list")]);
    let form = ticked.form("/effects/resolve");
    let answers = join_all((0..8).map(|_| browser.post(&form, &fields))).await;
    let led: Vec<String> = answers.iter().map(Page::location).collect();
    assert!(led.iter().all(|to| *to == led[0] && to.starts_with("/console/batches/batch_")), "{led:?}");
    let batch = led[0].rsplit('/').next().unwrap();
    let done = ended(&client, batch).await;
    assert_eq!(
        (&done["counts"]["acted"], &done["reason"]),
        (&json!(9), &json!("seen in the list")),
        "{done}"
    );
    let shown = browser.get(&led[0]).await;
    assert!(shown.html.contains("Resolve 9 effects") && shown.html.contains(RESULT), "{}", shown.html);
    assert_eq!((shop.count(RESOLVED).await, shop.count(EFFECTS_RESOLVED).await), (9, 9));

    // The one that was left is the last of its session, which goes on when it is resolved by the filter.
    let rest = browser.open("/effects?tool=charge").await;
    let all = [("which", "all"), ("outcome", "happened"), ("result", RESULT), ("reason", "this one too")];
    let made = browser.press(&rest, "/effects/resolve", &all).await;
    assert!(made.html.contains("Resolve 1 effect<"), "{}", made.html);
    for id in &sessions {
        client.wait_for(id, "completed").await;
    }
    assert!(browser.open("/effects").await.html.contains("No effect is uncertain here."));
    assert_eq!(shop.options.effects().len(), 10);

    // What cannot be made is said.
    for (wrong, status) in [
        (json!({"verb": "resolve", "filter": {}, "outcome": "did_not_happen", "reason": "x"}), 400),
        (json!({"verb": "resolve", "filter": {"tool": "charge"}, "outcome": "did_not_happen"}), 400),
        (
            json!({"verb": "resolve", "filter": {"tool": "charge"}, "outcome": "did_not_happen", "reason": "x"}),
            409,
        ),
        (json!({"verb": "resolve", "filter": {"tool": "charge"}, "outcome": "lost", "reason": "x"}), 400),
        (
            json!({"verb": "resolve", "filter": {"tool": "charge"}, "outcome": "did_not_happen", "result": "x", "reason": "x"}),
            400,
        ),
        (json!({"verb": "resolve", "session_ids": [sessions[0]], "outcome": "happened", "reason": "x"}), 400),
        (json!({"verb": "resolve", "effects": [], "outcome": "happened", "reason": "x"}), 400),
        (
            json!({"verb": "resolve", "effects": [{"session_id": sessions[0], "effect_id": "none"}], "outcome": "let_model_decide"}),
            404,
        ),
    ] {
        let (answered, problem) = client.post("/v1/batches", &wrong).await;
        assert_eq!(answered.as_u16(), status, "{wrong}: {problem}");
    }
    assert!(process.terminate().success());
}
