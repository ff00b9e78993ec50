//! A session of many steps, made without a worker: the commits go through the store, as a worker's would.

use apalis_core::backend::Backend;
use apalis_core::worker::context::WorkerContext;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use wakeful_engine::tool::registry::Registry;
use wakeful_store::Store;
use wakeful_store::queue::{Holdings, Job, Kind, News, Queue, Settings};
use wakeful_store::step::{Commit, Performance};
use wakeful_store::wake::{Continues, NewMessage, NewSession};
use wakeful_workflow::advance::{CallEnd, EndedCall, Generated, Performed, advance};
use wakeful_workflow::agent::{AgentPolicy, ToolDefinition};
use wakeful_workflow::effect::Effect;
use wakeful_workflow::policy::SessionPolicy;
use wakeful_workflow::record::{Block, FinishReason, Reply, Role, ToolCall, Usage};
use wakeful_workflow::seed::Seed;
use wakeful_workflow::session::{CallOutcome, CallStatus, Session};
use wakeful_workflow::strategy::Strategy;
use wakeful_workflow::wire::openai;

/// The model that the session names.
pub const MODEL: &str = "openai/test";

/// The session to make.
#[derive(Clone, Copy, Debug)]
pub struct Long {
    /// Each step but the last reads a file. The last one says goodbye.
    pub steps: usize,
    /// Length of each message's text, for model and tool.
    pub message_bytes: usize,
    /// Whether the journal gets the hashes of the exact requests that a worker would send. That takes time.
    pub hashes: bool,
}

impl Long {
    /// Makes the session in a conversation of its own, and returns its id.
    pub async fn make(self, store: &Store, conversation: &str) -> String {
        let new = NewSession {
            space_id: "default".to_owned(),
            mailbox_id: "default".to_owned(),
            conversation_id: format!("default/{conversation}"),
            trigger_type: "chat".to_owned(),
            trigger_id: conversation.to_owned(),
            continues: Continues::Trigger,
            agent: "default".to_owned(),
            model_id: MODEL.to_owned(),
            model_context_window: 2_000_000,
            tools: tools(),
            policy: SessionPolicy::default(),
            repository_id: None,
            speaker: None,
            only_agent: false,
            seeds: vec![Seed { role: Role::System, content: "You are a test.".to_owned(), is_new: true }],
        };
        let text = words(0, self.message_bytes);
        let message =
            NewMessage { client_key: None, text, sender: None, trace_context: None, attachments: Vec::new() };
        let session_id = store.wake(&new, &message).await.expect("a message is taken").session_id;
        let claim = Claim::of(store).await;
        assert_eq!(claim.job.session_id.as_deref(), Some(session_id.as_str()), "no other job waits");
        let mut session = store.hydrate(&session_id).await.expect("it is there");
        claim.commit(store, &mut session, Performed::Begun).await;
        for step in 1..=self.steps {
            let call = (step < self.steps).then(|| ToolCall {
                call_id: format!("call_{step}").into(),
                name: "read_file".to_owned(),
                arguments: serde_json::json!({"path": format!("notes/{step}.md")}),
                malformed: None,
            });
            let reply = self.reply(&session, step, call.clone());
            claim.commit(store, &mut session, reply).await;
            if let Some(call) = call {
                let content = words(step + 1_000_000, self.message_bytes);
                let outcome = CallOutcome { content, is_error: false, details: None };
                let ending = CallEnd::Settled(CallStatus::Done, outcome);
                claim.commit(store, &mut session, Performed::Called(vec![EndedCall { call, ending }])).await;
            }
        }
        session_id
    }

    /// One more turn of the session: a message, and the answer to it.
    pub async fn go_on(self, store: &Store, session_id: &str) {
        let text = words(2_000_000, self.message_bytes);
        let message =
            NewMessage { client_key: None, text, sender: None, trace_context: None, attachments: Vec::new() };
        store.send(session_id, &message).await.expect("a message is taken");
        let claim = Claim::of(store).await;
        let mut session = store.hydrate(session_id).await.expect("it is there");
        claim.commit(store, &mut session, Performed::Begun).await;
        let reply = self.reply(&session, session.last_step_number as usize + 1, None);
        claim.commit(store, &mut session, reply).await;
    }

    fn reply(self, session: &Session, step: usize, call: Option<ToolCall>) -> Performed {
        let text = Block::Text { text: words(step, self.message_bytes) };
        let finish_reason = if call.is_some() { FinishReason::ToolCalls } else { FinishReason::Stop };
        let request_sha256 = if self.hashes {
            openai::project(
                &wakeful_workflow::context::full(session, Vec::new()),
                &openai::Options::new("test", 8192),
            )
            .sha256()
        } else {
            format!("{step:064x}")
        };
        Performed::Replied(Generated {
            generation_id: format!("gen_{step:032x}").as_str().into(),
            attempt: 1,
            model: MODEL.to_owned(),
            request_sha256,
            started_at: Some("2026-01-01T00:00:00+00:00".to_owned()),
            repairs: 0,
            resumes: None,
            prefill_bytes: None,
            context_strategy: Strategy::Full,
            rebase: None,
            reply: Reply::new(
                [text].into_iter().chain(call.map(Block::ToolCall)).collect(),
                finish_reason,
                Usage {
                    input_tokens: 100,
                    output_tokens: 10,
                    cached_tokens: 40,
                    cache_write_tokens: 2,
                    cost_micros: 7,
                },
            ),
            effects: [("read_file".to_owned(), Effect::Pure)].into(),
        })
    }
}

/// The tools that a long session has.
pub fn tools() -> Vec<ToolDefinition> {
    let registry = Registry::built_in().expect("the built-in tools register");
    registry.definitions(&["read_file"]).expect("it is registered")
}

/// A claim of the one waiting job.
struct Claim {
    job: Job,
    stop: CancellationToken,
}

impl Claim {
    async fn of(store: &Store) -> Claim {
        let stop = CancellationToken::new();
        let news = News::listen(store, stop.clone());
        let settings = Settings {
            kind: Kind::Step,
            runner: Arc::from(""),
            concurrency: 1,
            lease: Duration::from_secs(3600),
            poll: Duration::from_millis(10),
            agents: Arc::default(),
        };
        let holdings = Arc::new(Holdings::default());
        let mut queue = Queue::start(store.clone(), settings, "long".into(), holdings, &news, stop.clone());
        let context = WorkerContext::new("long");
        let task = poll_fn(|cx| queue.poll_next(cx, &context)).await;
        let job = task.expect("the queue is open").expect("claiming works").args;
        Claim { job, stop }
    }

    async fn commit(&self, store: &Store, session: &mut Session, outcome: Performed) {
        let transition = advance(session, outcome, AgentPolicy::default());
        let performance = Performance { elapsed_s: 0.1, attempt: 1, intent: None };
        let commit = store.commit(&self.job.lease, session, &transition, performance).await;
        match commit.expect("it commits") {
            Commit::Continued { .. } => session.apply(&transition.continuing()),
            Commit::Closed { .. } => {}
            lost @ (Commit::Moved | Commit::Stale) => panic!("{lost:?}: nobody else writes here"),
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Text of this many bytes, similar to English, so that it compresses as messages do. Each number gives other
/// words.
pub fn words(number: usize, bytes: usize) -> String {
    const WORDS: [&str; 16] = [
        "the",
        "order",
        "was",
        "shipped",
        "to",
        "Hamburg",
        "on",
        "Tuesday",
        "and",
        "customer",
        "asked",
        "whether",
        "invoice",
        "could",
        "be",
        "corrected",
    ];
    let mut seed = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut text = format!("{number}:");
    while text.len() < bytes {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        text.push(' ');
        if seed.is_multiple_of(9) {
            text.push_str(&(seed % 1_000_000).to_string());
        } else {
            text.push_str(WORDS[(seed >> 8) as usize % WORDS.len()]);
        }
    }
    text.truncate(bytes);
    text
}
