//! What the model sees of a long session: windows, trimmed results, summaries, and outputs too large for a
//! message. A kill at any place leaves the previous context valid, and the same requests are made again.

mod outputs;

use crate::support::checker::{Traces, check, distinct};
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, client};
use futures::StreamExt;
use futures::future::join_all;
use serde_json::{Value, json};
use wakeful_store::Store;
use wakeful_store::fork::ForkRequest;
use wakeful_workflow::bundle::Limits;
use wakeful_workflow::fork::CutPoint;
use wakeful_workflow::id::{CallId, SessionId};

/// The model counts 100 tokens for every request, so the second message fills a window of 150.
const NARROW: &str =
    "[models.\"openai/test\"]\ncontext_window = 150\n[agents.default.context]\nstrategy = \"compaction\"";
const LATER: &str = "A third thing, which is said at just such a length as the second thing was.";
const LONG: &str = "And a second thing, which is said at such a length that nothing more goes in.";

struct Talk {
    database: Database,
    model: ModelServer,
    options: Options,
}

impl Talk {
    async fn new(context: &str, answer: impl Fn(&Value) -> Answer + Send + Sync + 'static) -> Talk {
        let model = ModelServer::start(move |body, _| answer(body)).await;
        let options = Options::new()
            .config(
                "[agents.default]\nsystem_prompt = \"You are a test.\"\nmodel = \"openai/test\"\ntools = [\"read_file\", \
                 \"write_file\", \"read_output\", \"reserve\"]",
            )
            .config(context)
            .env("OPENAI_BASE_URL", &model.url);
        Talk { database: Database::new().await, model, options }
    }

    /// Sends all of `messages`, each one after the reply to the previous one, and returns the session's id.
    async fn says(&self, client: &Client, messages: &[&str]) -> String {
        let mut id = String::new();
        for text in messages {
            let answer = client.chat("c1", text).await;
            id = answer["session_id"].as_str().unwrap().to_owned();
            client.wait_for(&id, "completed").await;
        }
        id
    }

    /// Sends all of `messages`. A failpoint kills the first process before the end, and a second process
    /// finishes.
    async fn survives(&self, failpoint: &str, messages: &[&str]) -> (String, Process) {
        let killed = self.options.clone().env("FAILPOINTS", failpoint).serve(&self.database).await;
        let client = killed.client();
        let id = self.says(&client, &messages[..messages.len() - 1]).await;
        client.chat("c1", messages[messages.len() - 1]).await;
        let (status, killed) = killed.ended().await;
        assert!(!status.success() && killed.log().contains("failpoint"), "{}", killed.log());
        (id, killed)
    }

    async fn check(&self, id: &str) -> Traces {
        check(&self.database, id, &self.options.effects()).await
    }

    /// Returns what a session left, after checking that its caches agree. Expects no particular tool calls.
    async fn traces(&self, id: &str) -> Traces {
        let verification = self.store().await.verify(id).await.unwrap();
        assert!(verification.agrees, "{:?}", verification.checks);
        Traces::of(&self.database, id).await
    }

    async fn store(&self) -> Store {
        self.database.store().await
    }
}

fn last_text(body: &Value) -> &str {
    body["messages"].as_array().unwrap().last().unwrap()["content"].as_str().unwrap_or_default()
}

fn asks_for_a_summary(body: &Value) -> bool {
    last_text(body).starts_with("Write a summary of the conversation so far")
}

fn parsed(body: &str) -> Value {
    serde_json::from_str(body).unwrap()
}

fn said(body: &Value) -> Vec<String> {
    let messages = body["messages"].as_array().unwrap();
    messages.iter().map(|message| message["content"].as_str().unwrap_or_default().to_owned()).collect()
}

/// Answers every request, including one for a summary.
fn obliging(body: &Value) -> Answer {
    if asks_for_a_summary(body) {
        Answer::text("They want two things.")
    } else {
        Answer::text("Very well, as you wish.")
    }
}

#[tokio::test]
async fn a_context_that_is_nearly_full_is_summarised_and_nothing_of_it_is_lost() {
    let talk = Talk::new(NARROW, obliging).await;
    let process = talk.options.serve(&talk.database).await;
    let client = process.client();
    let id = talk.says(&client, &["First.", LONG, LATER]).await;
    let traces = talk.check(&id).await;

    let bodies: Vec<Value> = talk.model.bodies().iter().map(|body| parsed(body)).collect();
    let summaries: Vec<bool> = bodies.iter().map(asks_for_a_summary).collect();
    assert_eq!(summaries, [false, true, false, true, false], "before the second reply and before the third");
    let [first, asked, second, ..] = &bodies[..] else { unreachable!() };
    // The summary's request begins with the previous request, so the provider reads that part from its cache.
    assert_eq!(asked["tools"], first["tools"]);
    assert!(said(asked).starts_with(&said(first)));
    let shown = said(second);
    assert!(
        shown[1].starts_with("[Summary of the conversation so far.")
            && shown[1].ends_with("They want two things.")
    );
    assert!(
        shown.iter().any(|text| text == LONG) && !shown.iter().any(|text| text.starts_with("Very well")),
        "{shown:?}"
    );

    let rebases = traces.journal("CONTEXT_REBASED");
    assert_eq!(rebases.len(), 2);
    assert_eq!(traces.session["rebase"], *rebases[1]);
    let record = &traces.records[3];
    assert_eq!(
        (&record["internal"], &record["details"]["summary"]),
        (&json!(true), &json!(true)),
        "{record}"
    );
    assert_eq!(rebases[0]["summary_message_number"], record["message_number"]);
    let kept: Vec<String> = client::texts(&client.session(&id).await, "user");
    assert_eq!(kept, ["First.", LONG, LATER], "the originals stay");
    assert_eq!(traces.session["total_input_tokens"], 500, "both summaries are counted");
    assert_eq!(traces.steps.len(), 3);
    let strategies: Vec<&Value> =
        traces.journal("LLM_CALLED").iter().map(|called| &called["context_strategy"]).collect();
    assert!(strategies.iter().all(|strategy| **strategy == "compaction"), "{strategies:?}");
}

#[tokio::test]
async fn a_summary_is_streamed_to_nobody() {
    let talk = Talk::new(NARROW, obliging).await;
    let process = talk.options.serve(&talk.database).await;
    let client = process.client();
    let id = talk.says(&client, &["First."]).await;
    // Hold the model in the middle of the summary. A reader at that moment sees no call in flight.
    talk.model.hold_from(1);
    client.chat("c1", LONG).await;
    talk.model.asked(2).await;
    let stream = client.stream(&id, Some(0)).await;
    talk.model.release();
    client.wait_for(&id, "completed").await;
    let last = talk.store().await.last_event_seq(&id).await.unwrap().to_string();
    let mut seen: Vec<(String, String)> = Vec::new();
    let mut stream = Box::pin(stream);
    while let Some(event) = stream.next().await {
        let ends = event.id == last;
        seen.push((event.event, event.data));
        if ends {
            break;
        }
    }
    let of = |kind: &str| seen.iter().filter(|(event, _)| event == kind).count();
    assert_eq!((of("llm_called"), of("gen_start"), of("gen_complete"), of("context_rebased")), (3, 2, 2, 1));
    assert!(seen.iter().all(|(_, data)| !data.contains("They want two things.")), "{seen:?}");
}

#[tokio::test]
async fn k28_killed_at_its_summary_a_session_goes_on_from_the_context_it_had() {
    let undisturbed = Talk::new(NARROW, obliging).await;
    let process = undisturbed.options.serve(&undisturbed.database).await;
    undisturbed.says(&process.client(), &["First.", LONG]).await;
    let undisturbed = undisturbed.model.bodies();
    join_all(["K28=1*return", "K28_commit=1*return"].map(async |kill| {
        let talk = Talk::new(NARROW, obliging).await;
        let (id, _killed) = talk.survives(kill, &["First.", LONG]).await;
        let before = Traces::of(&talk.database, &id).await;
        assert!(before.session["rebase"].is_null(), "{kill}: the old context is still the valid one");
        assert!(before.journal("CONTEXT_REBASED").is_empty());
        assert_eq!(before.records.len(), 3, "{kill}: two messages and a reply");
        let verification = talk.store().await.verify(&id).await.unwrap();
        assert!(verification.agrees, "{kill}: {:?}", verification.checks);

        let process = talk.options.serve(&talk.database).await;
        process.client().wait_for(&id, "completed").await;
        let traces = talk.check(&id).await;
        assert_eq!(traces.journal("CONTEXT_REBASED").len(), 1, "{kill}");
        let bodies = talk.model.bodies();
        assert_eq!(distinct(&bodies), undisturbed.iter().collect::<Vec<_>>(), "{kill}: the same requests");
        let cut = traces.journal("GEN_FAILED");
        assert_eq!(cut.len(), 1, "{kill}: the call that was cut off is journalled");
        assert_eq!(traces.journal("LLM_CALLED").len(), 4);
    }))
    .await;
}

#[tokio::test]
async fn after_three_summaries_that_failed_the_run_goes_on_without_one() {
    let talk =
        Talk::new(NARROW, |body| if asks_for_a_summary(body) { Answer::Error(400) } else { obliging(body) })
            .await;
    let process = talk.options.serve(&talk.database).await;
    let client = process.client();
    let id = talk.says(&client, &["First.", LONG]).await;
    let traces = talk.check(&id).await;
    let failures: Vec<&Value> =
        traces.journal("COMPACTION_FAILED").iter().map(|failed| &failed["failures"]).collect();
    assert_eq!(failures, [1, 2, 3]);
    assert_eq!(traces.session["compaction_failures"], 3, "a worker after a crash reads the count here");
    assert_eq!(talk.model.bodies().len(), 5);
    assert!(traces.journal("CONTEXT_REBASED").is_empty());
    // The next run tries again.
    talk.says(&client, &[LATER]).await;
    assert_eq!(talk.model.bodies().len(), 9);
    talk.check(&id).await;
}

#[tokio::test]
async fn a_summary_whose_stream_is_cut_counts_as_a_fault_of_the_provider() {
    let script = |body: &Value| match asks_for_a_summary(body) {
        true => Answer::Cut("They want".to_owned()),
        false => obliging(body),
    };
    let talk = Talk::new(NARROW, script).await;
    let process = talk.options.serve(&talk.database).await;
    talk.says(&process.client(), &["First.", LONG]).await;
    // Only a fault makes the row of a gate.
    let gates = "select count(*) from provider_gates where last_error like '%cut%' and $1 <> ''";
    assert_eq!(talk.database.value::<i64>(gates, "all").await, 1);
}

#[tokio::test]
async fn a_request_that_the_provider_calls_too_long_is_summarised_once() {
    let wide = NARROW.replace("150", "100000");
    // This model refuses every request that still has the first turn and the long message. A request for a
    // summary without the oldest turn passes.
    let talk = Talk::new(&wide, |body| {
        let said = said(body);
        let has = |text: &str| said.iter().any(|one| one.contains(text));
        match (has("Very well") && has("First."), asks_for_a_summary(body)) {
            (true, _) if has(LONG) => Answer::Error(413),
            (_, _) => obliging(body),
        }
    })
    .await;
    let process = talk.options.serve(&talk.database).await;
    let client = process.client();
    let id = talk.says(&client, &["First.", "Second."]).await;
    client.chat("c1", LONG).await;
    client.wait_for(&id, "failed").await;
    let traces = Traces::of(&talk.database, &id).await;
    // A window this wide keeps the newest turns, so the summary does not help, and no second one is written.
    assert_eq!(traces.journal("CONTEXT_REBASED").len(), 1);
    let asked = talk.model.bodies().iter().filter(|body| asks_for_a_summary(&parsed(body))).count();
    assert_eq!(asked, 2, "the second time without the oldest turn");
    let error = traces.session["error"].as_str().unwrap();
    assert!(error.contains("longer than the model's context window"), "{error}");
    let refused = traces.journal("GEN_FAILED");
    assert_eq!(refused.len(), 2, "{refused:?}");
    talk.traces(&id).await;
}

#[tokio::test]
async fn a_window_that_is_cut_by_a_killed_worker_is_cut_the_same_by_the_next() {
    const WINDOW: &str = "[agents.default.context]\nstrategy = \"sliding_window\"\nhigh = 4\nlow = 2";
    let messages = ["one", "two", "three", "four", "five"];
    let undisturbed = Talk::new(WINDOW, obliging).await;
    let process = undisturbed.options.serve(&undisturbed.database).await;
    let id = undisturbed.says(&process.client(), &messages).await;
    let rebases = Traces::of(&undisturbed.database, &id).await.journal("CONTEXT_REBASED").len();
    assert_eq!(rebases, 2, "five messages and four replies pass the mark twice");
    let undisturbed = undisturbed.model.bodies();
    assert!(said(&parsed(&undisturbed[4])).len() < said(&parsed(&undisturbed[3])).len());

    // The third call is the first with a cut window: five messages are more than four.
    let talk = Talk::new(WINDOW, obliging).await;
    let (id, _killed) = talk.survives("K10=2*off->1*return", &messages[..3]).await;
    assert!(Traces::of(&talk.database, &id).await.session["rebase"].is_null(), "it was not committed");
    let process = talk.options.serve(&talk.database).await;
    let client = process.client();
    client.wait_for(&id, "completed").await;
    talk.says(&client, &messages[3..]).await;
    let traces = talk.check(&id).await;
    let bodies = talk.model.bodies();
    assert_eq!(bodies.len(), undisturbed.len() + 1, "the answer that was lost is asked for again");
    assert_eq!(distinct(&bodies), undisturbed.iter().collect::<Vec<_>>(), "the same requests");
    assert_eq!(traces.journal("CONTEXT_REBASED").len(), 2);
}

#[tokio::test]
async fn a_worker_that_reads_only_what_a_rebase_shows_sends_what_one_that_has_everything_sends() {
    const WINDOW: &str = "[agents.default.context]\nstrategy = \"sliding_window\"\nhigh = 4\nlow = 2";
    let messages = ["First.", LONG, LATER, "A fourth thing.", "A fifth thing."];
    for context in [WINDOW, NARROW] {
        let one = Talk::new(context, obliging).await;
        let process = one.options.serve(&one.database).await;
        one.says(&process.client(), &messages).await;

        let many = Talk::new(context, obliging).await;
        let mut id = String::new();
        for message in messages {
            let process = many.options.serve(&many.database).await;
            id = many.says(&process.client(), &[message]).await;
            process.signal(libc::SIGTERM);
            process.ended().await;
        }
        assert_eq!(many.model.bodies(), one.model.bodies(), "{context}");
        let session = many.store().await.hydrate_tail(&id).await.unwrap().session;
        assert!(session.left_out.is_some(), "{context}: the last of them had only the end");

        // An agent that shall see everything again gets it.
        let strategy = "WAKEFUL_AGENTS__DEFAULT__CONTEXT__STRATEGY";
        let process = many.options.clone().env(strategy, "full").serve(&many.database).await;
        many.says(&process.client(), &["What was it all?"]).await;
        let bodies = many.model.bodies();
        let said = said(&parsed(bodies.last().unwrap()));
        let missing: Vec<&&str> =
            messages.iter().filter(|text| !said.contains(&(**text).to_owned())).collect();
        assert!(missing.is_empty(), "{context}: {missing:?} of {said:?}");
    }
}

#[tokio::test]
async fn verify_finds_a_rebase_that_the_journal_does_not_have_and_a_rebuild_mends_it() {
    let talk = Talk::new(NARROW, obliging).await;
    let process = talk.options.serve(&talk.database).await;
    let id = talk.says(&process.client(), &["First.", LONG]).await;
    let rebase: Value =
        talk.database.value("select rebase from conversation_sessions where session_id = $1", &id).await;
    sqlx::query("update conversation_sessions set rebase = null, compaction_failures = 2")
        .execute(&talk.database.pool)
        .await
        .unwrap();
    let store = talk.store().await;
    let differ: Vec<&str> = store
        .verify(&id)
        .await
        .unwrap()
        .checks
        .iter()
        .filter(|check| !check.agrees)
        .map(|check| check.name)
        .collect();
    assert_eq!(differ, ["rebase", "compaction_failures"]);
    let rebuilt = store.rebuild(&id).await.unwrap();
    assert!(rebuilt.left.is_empty(), "{rebuilt:?}");
    let mended: Value =
        talk.database.value("select rebase from conversation_sessions where session_id = $1", &id).await;
    assert_eq!(mended, rebase);
}

async fn cli(talk: &Talk, args: &[&str]) -> (i32, String, String) {
    let options =
        Options { args: args.iter().map(|arg| (*arg).to_owned()).collect(), ..talk.options.clone() };
    let (status, process) = options.spawn(&talk.database.url).ended().await;
    (status.code().expect("it was not killed"), process.output(), process.log())
}

/// Without its messages a context has the same sizes, under each strategy. They are read in another way.
pub(crate) async fn weighs_the_same_without_messages(client: &Client, id: &str) {
    for strategy in ["full", "sliding_window", "trim_tool_results", "compaction"] {
        let path = format!("/v1/sessions/{id}/context?strategy={strategy}");
        let (_, mut whole) = client.get(&path).await;
        let shown = whole.as_object_mut().and_then(|whole| whole.remove("shown"));
        let (_, sizes) = client.get(&format!("{path}&messages=false")).await;
        assert_eq!(sizes, whole, "{shown:?}");
    }
}

#[tokio::test]
async fn the_context_of_the_next_call_is_shown_before_it_is_made() {
    let talk =
        Talk::new("[models.\"openai/test\"]\ncontext_window = 1000\ninput_usd = 2\ncached_usd = 1", obliging)
            .await;
    let process = talk.options.serve(&talk.database).await;
    let client = process.client();
    talk.model.hold();
    let answer = client.chat("c1", "Hostile \u{1b}[31m\u{202e}text").await;
    let id = answer["session_id"].as_str().unwrap();
    talk.model.asked(1).await;

    let path = format!("/v1/sessions/{id}/context");
    let (status, view) = client.get(&path).await;
    assert_eq!(status, 200, "{view}");
    assert_eq!(
        (&view["strategy"], &view["messages"], &view["window_tokens"]),
        (&json!("full"), &json!(1), &json!(1000))
    );
    assert_eq!(view["shown"][0]["message_number"], 2);
    let strategies: Vec<&str> =
        view["strategies"].as_array().unwrap().iter().map(|one| one["strategy"].as_str().unwrap()).collect();
    assert_eq!(strategies, ["full", "sliding_window", "trim_tool_results", "compaction"]);
    let tokens = view["tokens"].as_i64().unwrap();
    assert_eq!(view["strategies"][0]["cost_micros"], 2 * tokens);
    assert_eq!(view["strategies"][0]["cached_cost_micros"], tokens);

    weighs_the_same_without_messages(&client, id).await;

    let sent = talk.model.bodies().remove(0);
    let raw = client.get_request(&format!("{path}?raw=true")).send().await.unwrap().text().await.unwrap();
    assert_eq!(raw, sent, "byte by byte what was sent");
    let (code, out, err) = cli(&talk, &["session", "context", id, "--raw"]).await;
    assert_eq!((code, out.trim_end()), (0, sent.as_str()), "{err}");
    let (code, out, err) = cli(&talk, &["session", "context", id, "--strategy", "sliding_window"]).await;
    assert_eq!(code, 0, "{err}");
    for part in ["openai/test sees 1000 tokens", "Hostile", "trim_tool_results"] {
        assert!(out.contains(part), "{part}: {out}");
    }
    assert!(!out.contains(['\u{1b}', '\u{202e}']), "{out}");
    let (code, out, _) = cli(&talk, &["session", "context", id, "-o", "json"]).await;
    assert_eq!((code, parsed(&out)["tokens"].as_i64()), (0, Some(tokens)));

    let (code, _, err) = cli(&talk, &["session", "context", id, "--strategy", "window"]).await;
    assert!(code == 2 && err.contains("there are: full, sliding_window"), "{code} {err}");
    assert_eq!(cli(&talk, &["session", "context", "sess_none"]).await.0, 3);
    assert_eq!(client.get("/v1/sessions/sess_none/context").await.0, 404);
    assert_eq!(client.get(&format!("{path}?strategy=window")).await.0, 400);
    talk.model.release();
    client.wait_for(id, "completed").await;
}

async fn bundle(store: &Store, id: &str, redacted: bool) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let mut export = store.export(id, redacted).await.unwrap();
    while let Some(chunk) = export.next().await.unwrap() {
        std::io::Write::write_all(&mut file, &chunk).unwrap();
    }
    file
}

async fn import(store: &Store, bundle: &tempfile::NamedTempFile) -> String {
    let imported = store.import(bundle.path(), "default", Limits::default(), |_| {}).await.unwrap();
    let session_id = imported.session_id.expect("it was imported");
    let verification = store.verify(&session_id).await.unwrap();
    assert!(verification.agrees, "{:?}", verification.checks);
    session_id
}

#[tokio::test]
async fn a_fork_begins_where_its_parents_context_did() {
    let talk = Talk::new(NARROW, obliging).await;
    let process = talk.options.serve(&talk.database).await;
    let client = process.client();
    let id = talk.says(&client, &["First.", LONG]).await;
    let parent = talk.traces(&id).await;
    let before = parsed(talk.model.bodies().last().unwrap());
    let store = talk.store().await;
    let request = ForkRequest { prompt: Some("Go on.".into()), ..ForkRequest::new(&id, CutPoint::End) };
    let child = store.fork(&request).await.unwrap();
    client.wait_for(&child.session_id, "completed").await;
    let traces = talk.traces(&child.session_id).await;
    assert_eq!(traces.session["rebase"], parent.session["rebase"]);
    let after = parsed(talk.model.bodies().last().unwrap());
    let messages = |body: &Value| body["messages"].as_array().unwrap().clone();
    assert!(messages(&after).starts_with(&messages(&before)), "{before:#}\nis no prefix of\n{after:#}");
    assert_eq!(last_text(&after), "Go on.");
    // The parent pays for the parent's summary.
    assert_eq!(traces.session["total_input_tokens"], 100);

    let early = ForkRequest { start: false, ..ForkRequest::new(&id, CutPoint::Message(2)) };
    let early = store.fork(&early).await.unwrap();
    assert!(talk.traces(&early.session_id).await.session["rebase"].is_null(), "it was decided later");
    let imported = import(&store, &bundle(&store, &id, false).await).await;
    assert_eq!(talk.traces(&imported).await.session["rebase"], parent.session["rebase"]);
}
