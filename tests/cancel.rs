//! A cancel in every state, including after the worker's death. The calls are closed with a text that the
//! model sees next time, nothing is done again, and what was done stays visible.

use crate::support::client::texts;
use crate::support::wire::Proxy;
use crate::support::world::wake;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, eventually};
use futures::StreamExt as _;
use futures::future::select_all;
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use wakeful_engine::cancels::Cancels;
use wakeful_store::Store;
use wakeful_store::queue::{EVERY_SESSION, News, heard};
use wakeful_store::wake::{Continues, NewMessage, NewSession};
use wakeful_workflow::policy::SessionPolicy;

/// A model that makes the tool call the user names, mails when told to, and otherwise repeats the last
/// message.
async fn model() -> ModelServer {
    ModelServer::start(|body, _| {
        let messages = body["messages"].as_array().unwrap();
        let last = messages.last().unwrap();
        let mail = || json!({"to": ["ann@example.org"], "subject": "Hi", "body": "Ann."});
        match (last["role"].as_str(), last["content"].as_str().unwrap_or_default()) {
            (Some("user"), "charge") => Answer::call("charge", json!({"cents": 500})),
            (Some("user"), "reserve") => Answer::call("reserve", json!({"persons": 2})),
            (Some("user"), "ask") => Answer::call("ask_user", json!({"question": "Which?"})),
            (Some("user"), "mail and charge") => Answer::call("compose_email", mail()),
            // The mail is on its way, so the charge comes next.
            (Some("tool"), text) if text.contains("queued") => Answer::call("charge", json!({"cents": 500})),
            (_, text) => Answer::text(&format!("I see: {text}")),
        }
    })
    .await
}

fn options(model: &ModelServer) -> Options {
    Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url)
}

fn id(answer: &Value) -> String {
    answer["session_id"].as_str().expect("a session").to_owned()
}

async fn cancel(client: &Client, id: &str) -> (StatusCode, Value) {
    client.post(&format!("/v1/sessions/{id}/cancel"), &json!({"reason": "the guest left"})).await
}

/// The reasons of the session's transitions to `cancelled`.
async fn reasons(client: &Client, id: &str) -> Vec<Value> {
    let (_, page) = client.get(&format!("/v1/sessions/{id}/events?limit=500")).await;
    let moved = page["items"].as_array().unwrap().iter().filter(|entry| entry["type"] == "state_transition");
    let moved = moved.filter(|entry| entry["payload"]["to_state"] == "cancelled");
    moved.map(|entry| entry["payload"]["reason"].clone()).collect()
}

/// The worker was stopped in the middle of the call that `text` asks for, the run was cancelled, and the
/// worker was killed. Another worker replaces it.
struct Died {
    _database: Database,
    model: ModelServer,
    options: Options,
    api: Process,
    worker: Process,
    id: String,
    asked: usize,
}

async fn cancelled_and_killed(text: &str, until: impl AsyncFn(&ModelServer, &Options, &Database)) -> Died {
    let (database, model) = (Database::new().await, model().await);
    let options = options(&model);
    let api = options.clone().arg("--roles=api").serve(&database).await;
    std::fs::write(options.path("hold-charge"), "").unwrap();
    std::fs::write(options.path("hold-reserve"), "").unwrap();
    if text == "talk" {
        model.hold();
    }
    let worker = options.clone().arg("--roles=worker").spawn(&database.url);
    let client = api.client();
    let id = id(&client.chat("c1", text).await);
    until(&model, &options, &database).await;
    // A stopped process does not notice the cancel, so it is like a dead one.
    worker.signal(libc::SIGSTOP);
    let (status, first) = cancel(&client, &id).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{first}");
    let (status, second) = cancel(&client, &id).await;
    assert_eq!((status, second), (StatusCode::ACCEPTED, first), "twice is once");
    worker.kill();
    for tool in ["charge", "reserve"] {
        std::fs::remove_file(options.path(&format!("hold-{tool}"))).unwrap();
    }
    model.release();
    let asked = model.bodies().len();
    let worker = options.clone().arg("--roles=worker").spawn(&database.url);
    let session = client.wait_for(&id, "cancelled").await;
    assert_eq!((&session["error"], &session["cancel_requested"]), (&json!("cancelled"), &json!(false)));
    assert_eq!(reasons(&client, &id).await, ["cancelled: the guest left"]);
    assert_eq!(cancel(&client, &id).await.0, StatusCode::CONFLICT);
    Died { _database: database, model, options, api, worker, id, asked }
}

impl Died {
    /// Sends the next message. The model that answers sees how the calls ended. Returns the transcript that
    /// it saw.
    async fn lives_on(self) -> Vec<Value> {
        assert_eq!(self.model.bodies().len(), self.asked, "the cancelled run asks the model nothing more");
        let client = self.api.client();
        client.chat("c1", "And now?").await;
        let session = client.wait_for(&self.id, "completed").await;
        assert_eq!(texts(&session, "assistant").last().unwrap(), "I see: And now?");
        assert_eq!(self.model.bodies().len(), self.asked + 1);
        assert!(self.worker.terminate().success());
        let body: Value = serde_json::from_str(self.model.bodies().last().unwrap()).unwrap();
        body["messages"].as_array().unwrap().clone()
    }

    async fn session(&self) -> Value {
        self.api.client().session(&self.id).await
    }
}

#[tokio::test]
async fn k43_a_cancel_that_its_worker_did_not_live_to_see_closes_the_call_and_repeats_nothing() {
    // K43. Even an effect that is safe to repeat is not repeated, because the run was cancelled.
    for tool in ["charge", "reserve"] {
        let died = cancelled_and_killed(tool, async |_, options, _| {
            options.has_effects(1).await;
        })
        .await;
        let session = died.session().await;
        assert_eq!(session["tool_calls"][0]["status"], "uncertain", "{tool}");
        assert!(texts(&session, "tool")[0].starts_with("OUTCOME UNKNOWN"), "{session}");
        let options = died.options.clone();
        let seen = died.lives_on().await;
        assert_eq!(options.effects().len(), 1, "{tool}");
        let marker = seen.iter().find(|message| message["role"] == "tool").expect("the call's result");
        assert!(marker["content"].as_str().unwrap().contains("OUTCOME UNKNOWN"), "{marker}");
    }
}

#[tokio::test]
async fn a_cancel_during_a_model_call_whose_worker_died_asks_nothing_again() {
    let died = cancelled_and_killed("talk", async |model, _, _| model.asked(1).await).await;
    assert_eq!(texts(&died.session().await, "assistant"), [""; 0]);
    died.lives_on().await;
}

#[tokio::test]
async fn a_model_call_that_a_cancel_cuts_off_is_counted_and_marked_as_an_estimate() {
    let (database, model) = (Database::new().await, model().await);
    let prices = "[models.\"openai/test\"]\ninput_usd = 10.0\noutput_usd = 1000.0";
    let process = options(&model).config(prices).serve(&database).await;
    let client = process.client();
    model.hold();
    let id = id(&client.chat("c1", "Tell me a long story.").await);
    let mut seen = client.stream(&id, None).await;
    while seen.next().await.expect("the stream goes on").event != "gen_chunk" {}
    assert_eq!(cancel(&client, &id).await.0, StatusCode::ACCEPTED);
    let session = client.wait_for(&id, "cancelled").await;
    let tokens = |key: &str| session[key].as_i64().unwrap();
    let (input, output) = (tokens("total_input_tokens"), tokens("total_output_tokens"));
    assert!(input > 20, "prompt, tools and message: {input}");
    // Half of its text had come: "I see: Tell me".
    assert_eq!(output, 4);
    assert_eq!(tokens("total_cost_micros"), input * 10 + output * 1000);
    let steps = session["steps"].as_array().unwrap();
    assert_eq!((steps.len(), &steps[0]["finish_reason"]), (1, &json!("cancelled")));
    let (_, page) = client.get(&format!("/v1/sessions/{id}/events?limit=500")).await;
    let failed =
        page["items"].as_array().unwrap().iter().find(|entry| entry["type"] == "GEN_FAILED").unwrap();
    assert_eq!(failed["payload"]["estimated"]["input_tokens"], input);
    // The session goes on, and every sum is as the steps say.
    model.release();
    client.chat("c1", "And now?").await;
    client.wait_for(&id, "completed").await;
    let verified = database.store().await.verify(&id).await.unwrap();
    assert!(verified.agrees, "{:?}", verified.checks);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn what_a_cancelled_run_has_sent_stays_visible() {
    let died = cancelled_and_killed("mail and charge", async |_, options, database| {
        // Wait until the deliverer has committed: a process stopped in a transaction keeps its locks.
        eventually("the mail and the charge", || async {
            let sent = "select count(*) from deliveries where status = 'sent' and $1 <> ''";
            let sent: i64 = database.value(sent, "all").await;
            (sent == 1 && options.effects().len() == 1).then_some(())
        })
        .await;
    })
    .await;
    let session = died.session().await;
    assert_eq!(session["deliveries"][0]["status"], "sent");
    assert_eq!(session["deliveries"].as_array().unwrap().len(), 1);
    let statuses: Vec<&Value> =
        session["tool_calls"].as_array().unwrap().iter().map(|call| &call["status"]).collect();
    assert_eq!(statuses, ["done", "uncertain"]);
    let options = died.options.clone();
    died.lives_on().await;
    let mails = std::fs::read_dir(options.path("mail").join("new")).unwrap().count();
    assert_eq!((mails, options.effects().len()), (1, 1));
}

#[tokio::test]
async fn a_mail_that_waits_is_sent_although_its_run_was_cancelled() {
    let (database, model) = (Database::new().await, model().await);
    let options = options(&model);
    let api = options.clone().arg("--roles=api").serve(&database).await;
    let client = api.client();
    std::fs::write(options.path("hold-charge"), "").unwrap();
    // A file blocks the path of the Maildir, so nothing can be sent. The worker dies in the middle of the
    // charge.
    std::fs::write(options.path("mail"), "").unwrap();
    let worker = options.clone().arg("--roles=worker").spawn(&database.url);
    let id = id(&client.chat("c1", "mail and charge").await);
    options.has_effects(1).await;
    worker.kill();
    assert_eq!(cancel(&client, &id).await.0, StatusCode::ACCEPTED);
    let worker = options.clone().arg("--roles=worker").spawn(&database.url);
    let session = client.wait_for(&id, "cancelled").await;
    assert_ne!(session["deliveries"][0]["status"], "sent", "{session}");
    std::fs::remove_file(options.path("mail")).unwrap();
    eventually("the mail", || async {
        let session = client.session(&id).await;
        (session["deliveries"][0]["status"] == "sent").then_some(())
    })
    .await;
    assert_eq!(std::fs::read_dir(options.path("mail").join("new")).unwrap().count(), 1);
    assert!(worker.terminate().success());
}

#[tokio::test]
async fn a_run_in_need_of_a_person_is_cancelled_without_a_repeat() {
    let (database, model) = (Database::new().await, model().await);
    let options = options(&model).config("on_uncertain = \"needs_attention\"");
    std::fs::write(options.path("hold"), "").unwrap();
    let process = options.serve(&database).await;
    let id = id(&process.client().chat("c1", "charge").await);
    options.has_effects(1).await;
    process.kill();
    std::fs::remove_file(options.path("hold")).unwrap();
    let process = options.serve(&database).await;
    let client = process.client();
    client.wait_for(&id, "needs_attention").await;
    assert_eq!(cancel(&client, &id).await.0, StatusCode::ACCEPTED);
    let session = client.wait_for(&id, "cancelled").await;
    assert!(texts(&session, "tool")[0].starts_with("OUTCOME UNKNOWN"), "{session}");
    assert_eq!(session["tool_calls"][0]["status"], "uncertain", "it stays listed");
    assert_eq!((options.effects().len(), model.bodies().len()), (1, 1));
    assert_eq!(reasons(&client, &id).await, ["cancelled: the guest left"]);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn runs_behind_another_sessions_are_cancelled_where_they_stand() {
    let (database, model) = (Database::new().await, model().await);
    let store = database.store().await;
    let options = options(&model);
    let worker = options.clone().arg("--roles=worker").spawn(&database.url);
    // This session asked its user, and released the conversation while it waits.
    let asking = wake(&store, "c1", "openai/test", "ask").await;
    let status = "select status from conversation_sessions where session_id = $1";
    let becomes = async |id: &str, expected: &str| {
        eventually(&format!("{id} to be {expected}"), || async {
            (database.value::<String>(status, id).await == expected).then_some(())
        })
        .await;
    };
    becomes(&asking, "waiting_input").await;
    model.hold();
    let holder = beside(&store, "t1", "talk").await;
    model.asked(2).await;
    let behind = beside(&store, "t2", "never mind").await;

    store.cancel(&behind, Some("never mind")).await.unwrap();
    assert_eq!(database.value::<String>(status, &behind).await, "cancelled");
    // Closing its question writes a message, so the cancelled session waits for the conversation.
    store.cancel(&asking, None).await.unwrap();
    store.cancel(&asking, None).await.unwrap();
    assert_eq!(database.value::<String>(status, &asking).await, "queued");
    // The question is being closed, so this message does not answer it. It opens the next run.
    let message = NewMessage {
        client_key: None,
        text: "Another thing.".into(),
        sender: None,
        trace_context: None,
        attachments: Vec::new(),
    };
    store.send(&asking, &message).await.unwrap();
    model.release();
    becomes(&holder, "completed").await;
    becomes(&asking, "completed").await;
    let said = store.messages(&asking, None, 10).await.unwrap();
    let said: Vec<&str> = said.iter().map(|message| message.text.as_str()).collect();
    assert_eq!(said[said.len() - 2..], ["Another thing.", "I see: Another thing."], "{said:?}");
    let called: String = database.value("select status from tool_calls where session_id = $1", &asking).await;
    assert_eq!(called, "abandoned");
    assert_eq!(model.bodies().len(), 3);

    // The message of the run that never began is not lost: the next run reads it.
    assert_eq!(store.wake_session(&behind).await.unwrap(), []);
    let message = NewMessage {
        client_key: None,
        text: "After all.".into(),
        sender: None,
        trace_context: None,
        attachments: Vec::new(),
    };
    store.send(&behind, &message).await.unwrap();
    becomes(&behind, "completed").await;
    let said = store.messages(&behind, None, 10).await.unwrap();
    let said: Vec<&str> = said.iter().map(|message| message.text.as_str()).collect();
    assert_eq!(said, ["never mind", "After all.", "I see: After all."]);
    assert!(worker.terminate().success());
}

async fn beside(store: &wakeful_store::Store, trigger_id: &str, text: &str) -> String {
    let new = NewSession {
        space_id: "default".to_owned(),
        mailbox_id: "default".to_owned(),
        conversation_id: "default/c1".to_owned(),
        trigger_type: "test".to_owned(),
        trigger_id: trigger_id.to_owned(),
        continues: Continues::Trigger,
        agent: "default".to_owned(),
        model_id: "openai/test".to_owned(),
        model_context_window: 128_000,
        tools: crate::support::world::tools(),
        policy: SessionPolicy::default(),
        repository_id: None,
        speaker: None,
        only_agent: false,
        seeds: vec![],
    };
    let message = NewMessage {
        client_key: None,
        text: text.to_owned(),
        sender: None,
        trace_context: None,
        attachments: Vec::new(),
    };
    store.wake(&new, &message).await.expect("a message is taken").session_id
}

#[tokio::test]
async fn one_query_looks_for_the_cancels_of_every_session_in_flight() {
    let database = Database::new().await;
    let store = database.store().await;
    let mut ids = Vec::new();
    for n in 0..16 {
        ids.push(wake(&store, &format!("c{n}"), "openai/test", "talk").await);
    }
    sqlx::query("update conversation_sessions set status = 'running'").execute(&database.pool).await.unwrap();
    let proxy = Proxy::start(&database.url);
    let proxied = Store::connect(&proxy.url, 2, "wakeful test").await.unwrap();
    let stop = CancellationToken::new();
    let (news, cancels) = (News::listen(&store, stop.clone()), Cancels::default());
    let before = proxy.statements();
    let waits = select_all(ids.iter().map(|id| Box::pin(cancels.cancelled(&proxied, &news, id))));
    let cancel = async {
        eventually("two looks", || async { (proxy.statements() >= before + 2).then_some(()) }).await;
        store.cancel(&ids[3], None).await.unwrap();
    };
    let ((_, which, _), ()) = tokio::join!(waits, cancel);
    assert_eq!(which, 3);
    let statements = proxy.statements() - before;
    assert!(statements < 12, "{statements} statements for 16 sessions");
    stop.cancel();
}

/// Two sessions in flight. Without a notification the next look is an hour away.
struct Waits {
    store: Store,
    proxy: Proxy,
    proxied: Store,
    news: News,
    cancels: Cancels,
    ids: [String; 2],
    stop: CancellationToken,
    _database: Database,
}

impl Waits {
    async fn new() -> Waits {
        let database = Database::new().await;
        let store = database.store().await;
        let ids = [
            wake(&store, "c1", "openai/test", "talk").await,
            wake(&store, "c2", "openai/test", "talk").await,
        ];
        sqlx::query("update conversation_sessions set status = 'running'")
            .execute(&database.pool)
            .await
            .unwrap();
        let stop = CancellationToken::new();
        let news = News::listen(&store, stop.clone());
        // It names all sessions when it begins to listen.
        heard(&mut news.sessions(), EVERY_SESSION).await;
        let cancels = Cancels::looking_every(Duration::from_secs(3600));
        let proxy = Proxy::start(&database.url);
        let proxied = Store::connect(&proxy.url, 2, "wakeful test").await.unwrap();
        Waits { store, proxy, proxied, news, cancels, ids, stop, _database: database }
    }

    async fn waits(&self, which: usize) {
        self.cancels.cancelled(&self.proxied, &self.news, &self.ids[which]).await;
    }

    /// Cancels the second session while only `first` waits, and lets it hear that.
    async fn cancel_second(&self, mut first: std::pin::Pin<&mut impl Future<Output = ()>>) {
        let mut news = self.news.sessions();
        let heard = async {
            self.store.cancel(&self.ids[1], None).await.unwrap();
            heard(&mut news, &format!("!{}", self.ids[1])).await;
        };
        tokio::select! {
            biased;
            () = first.as_mut() => panic!("the first is not cancelled"),
            () = heard => {}
        }
        assert!(futures::poll!(first).is_pending());
    }

    /// Lets `first` look, so that it now waits for notifications.
    async fn looked(&self, first: std::pin::Pin<&mut impl Future<Output = ()>>) {
        let before = self.proxy.statements();
        tokio::select! {
            () = first => panic!("the first is not cancelled"),
            () = eventually("a look", || async { (self.proxy.statements() > before).then_some(()) }) => {}
        }
    }
}

#[tokio::test]
async fn a_cancel_is_noticed_although_the_wait_that_heard_it_ends() {
    let waits = Waits::new().await;
    let mut first = Box::pin(waits.waits(0));
    waits.looked(first.as_mut()).await;
    let mut second = Box::pin(waits.waits(1));
    assert!(futures::poll!(second.as_mut()).is_pending());
    waits.cancel_second(first.as_mut()).await;
    drop(first);
    timeout(crate::support::timeout(), second).await.expect("the cancel is noticed");
    waits.stop.cancel();
}

#[tokio::test]
async fn a_cancel_that_is_heard_before_its_session_waits_is_noticed() {
    let waits = Waits::new().await;
    let mut first = Box::pin(waits.waits(0));
    waits.looked(first.as_mut()).await;
    waits.cancel_second(first.as_mut()).await;
    let second = async {
        tokio::select! {
            () = first => panic!("the first is not cancelled"),
            () = waits.waits(1) => {}
        }
    };
    timeout(crate::support::timeout(), second).await.expect("the cancel is noticed");
    waits.stop.cancel();
}

#[tokio::test]
async fn a_cancel_before_an_idempotent_call_ran_leaves_the_proof_that_it_never_ran() {
    let (database, model) = (Database::new().await, model().await);
    let options = options(&model);
    let process = options.serve(&database).await;
    let client = process.client();
    model.hold();
    let id = id(&client.chat("c1", "reserve").await);
    model.asked(1).await;
    // The reply's commit, which starts the call, waits for the session. The cancel is committed first.
    let mut cancel = database.pool.begin().await.unwrap();
    let requested = "update conversation_sessions set cancel_requested = true, wake_seq = wake_seq + 1";
    sqlx::query(requested).execute(&mut *cancel).await.unwrap();
    model.release();
    eventually("the commit waits", || async {
        let waits = "select count(*) from pg_stat_activity where datname = $1 and wait_event_type = 'Lock'";
        (database.value::<i64>(waits, &database.name).await > 0).then_some(())
    })
    .await;
    cancel.commit().await.unwrap();
    client.wait_for(&id, "cancelled").await;
    let status: String = database.value("select status from tool_calls where session_id = $1", &id).await;
    assert_eq!(status, "abandoned");
    assert!(options.effects().is_empty());
    let uncertain =
        "select count(*) from session_events where session_id = $1 and type = 'TOOL_FAILED_UNCERTAIN'";
    assert_eq!(database.value::<i64>(uncertain, &id).await, 0);
    assert!(process.terminate().success());
}
