//! Properties of every history under every strategy. Between two rebases requests only grow. No cut leaves a
//! result without its call. A worker that repeats a call that was interrupted sends the same bytes.

use super::{Context, build, build_as, compaction, numbered, weigh, weigh_as};
use crate::advance::{CallEnd, Compaction, CompactionEnd, EndedCall, Generated, Performed, advance};
use crate::agent::{Agent, AgentPolicy, JournalLevel, Limits, OnUncertain, ToolDefinition};
use crate::effect::Effect;
use crate::event::Event;
use crate::example;
use crate::fault::Fault;
use crate::plan::{Action, How, in_context, plan};
use crate::prefix::Prefix;
use crate::record::{Block, FinishReason, Reply, Role, Usage};
use crate::session::{CallOutcome, CallStatus, InboxMessage, Session, SessionStatus};
use crate::strategy::{ContextPolicy, Strategy as Selection};
use crate::wire::laws::{WIRES, prompt};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

/// Small, so that short histories reach every limit.
const WINDOW_TOKENS: i64 = 2_000;

fn agent(strategy: Selection) -> Agent {
    let context = ContextPolicy {
        strategy,
        high: 9,
        low: 5,
        keep_results: 2,
        trim_at_bytes: 2_500,
        compact_at_percent: 80,
    };
    Agent {
        name: "assistant".into(),
        system_prompt: String::new(),
        model: "m".into(),
        fallback: Vec::new(),
        tools: vec!["tool".into()],
        limits: Limits { steps: 10_000, tokens: i64::MAX, ..Limits::default() },
        on_uncertain: OnUncertain::default(),
        approve: Vec::new(),
        on_empty_reply: crate::agent::OnEmptyReply::default(),
        journal: JournalLevel::default(),
        context,
        recipients: Vec::new(),
        web: crate::policy::WebPolicy::default(),
    }
}

/// Counted in the context itself.
fn bytes(context: &Context) -> usize {
    let definition =
        |tool: &ToolDefinition| tool.name.len() + tool.description.len() + tool.parameters.to_string().len();
    let tools: usize = context.tools.iter().map(definition).sum();
    context.system.len() + tools + context.messages.iter().map(|message| message.bytes()).sum::<usize>()
}

#[derive(Clone, Debug)]
enum Happening {
    /// The user sends a message of this many bytes.
    Message(usize),
    /// The model asks for tools, whose results have these sizes. A result of even size is an error. Then the
    /// run goes on.
    Tools(Vec<usize>),
    /// The model answers, and the run closes.
    Answer(usize),
    /// The next summary fails.
    NoSummary,
}

fn happening() -> impl Strategy<Value = Happening> {
    let size = select(vec![1_usize, 40, 701, 900, 1501, 2501]);
    prop_oneof![
        3 => select(vec![5_usize, 60, 400, 3_000]).prop_map(Happening::Message),
        4 => vec(size, 1..5).prop_map(Happening::Tools),
        3 => select(vec![10_usize, 300]).prop_map(Happening::Answer),
        1 => Just(Happening::NoSummary),
    ]
}

struct World {
    session: Session,
    /// The same without what rebases left out, as another worker has it that read the session a while ago.
    tail: Session,
    agent: Agent,
    /// The last request in every provider's format. A later request must begin with it, unless `rebased` is
    /// set.
    before: Option<Vec<Vec<(String, Value)>>>,
    rebased: bool,
    no_summary: bool,
    calls: usize,
    rebases: usize,
    left_out: usize,
    compactions: usize,
    counted: i64,
}

impl World {
    fn new(strategy: Selection, with_reader: bool) -> World {
        let tool = |name: &str| ToolDefinition {
            name: name.into(),
            description: String::new(),
            parameters: json!({"type": "object", "properties": {}}),
            effect: Effect::Pure,
        };
        let mut tools = vec![tool("tool")];
        tools.extend(with_reader.then(|| tool("read_output")));
        let session = Session {
            prefix: Some(Prefix { system: "Be brief.".into(), tools: tools.into() }),
            ..example::session()
        };
        World {
            tail: session.clone(),
            session,
            agent: agent(strategy),
            before: None,
            rebased: false,
            no_summary: false,
            calls: 0,
            rebases: 0,
            left_out: 0,
            compactions: 0,
            counted: 0,
        }
    }

    fn happens(&mut self, happening: &Happening) {
        match happening {
            Happening::Message(bytes) => {
                let inbox_id = self.session.last_event_seq + 1_000;
                self.session.inbox.push(InboxMessage {
                    inbox_id,
                    text: "u".repeat(*bytes),
                    attachments: Vec::new(),
                });
            }
            Happening::Tools(sizes) => self.turn(&[], sizes),
            Happening::Answer(bytes) => self.turn(&"a".repeat(*bytes).into_bytes(), &[]),
            Happening::NoSummary => self.no_summary = true,
        }
    }

    /// One turn: the summary if one is due, the model call, its tools.
    fn turn(&mut self, text: &[u8], sizes: &[usize]) {
        self.session.status = SessionStatus::Running;
        if !self.session.awaits_model() && self.session.inbox.is_empty() {
            return;
        }
        loop {
            self.without_what_is_left_out();
            let action = plan(&self.session, &self.agent.limits);
            match in_context(action, &self.session, &self.agent, &[], WINDOW_TOKENS) {
                Action::Compact => self.compact(),
                Action::CallModel => break,
                other => panic!("{other:?}"),
            }
        }
        let built = build(&self.session, Vec::new(), &self.agent.context, WINDOW_TOKENS);
        let weight = weigh(&self.session, &[], built.rebase.as_ref());
        assert_eq!((weight.messages, weight.bytes), (built.context.messages.len(), bytes(&built.context)));
        for strategy in Selection::ALL {
            let policy = &self.agent.context;
            let other = build_as(&self.session, Vec::new(), policy, WINDOW_TOKENS, strategy).context;
            let (weight, _) = weigh_as(&self.session, &[], policy, WINDOW_TOKENS, strategy);
            assert_eq!(
                (weight.messages, weight.bytes),
                (other.messages.len(), bytes(&other)),
                "{strategy:?}"
            );
        }
        let again = build(&self.session.clone(), Vec::new(), &self.agent.context, WINDOW_TOKENS);
        assert_eq!(built, again, "whoever finds the call interrupted makes the same");
        self.look_at(&built);
        let usage =
            Usage { input_tokens: (bytes(&built.context) / 4) as i64, output_tokens: 10, ..example::USAGE };
        self.counted += usage.input_tokens + usage.output_tokens;
        self.calls += 1;
        let calls = sizes.iter().enumerate().map(|(index, _)| {
            Block::ToolCall(example::tool_call(&format!("call_{}_{index}", self.calls % 7)))
        });
        let mut content: Vec<Block> = calls.collect();
        content.insert(0, Block::Text { text: format!("I say {}", String::from_utf8_lossy(text)) });
        let finish_reason = if sizes.is_empty() { FinishReason::Stop } else { FinishReason::ToolCalls };
        self.advance(Performed::Replied(Generated {
            generation_id: "gen".into(),
            attempt: 1,
            model: "m".into(),
            request_sha256: String::new(),
            started_at: None,
            repairs: 0,
            resumes: None,
            prefill_bytes: None,
            reply: Reply { content, finish_reason, usage },
            context_strategy: self.agent.context.strategy,
            rebase: built.rebase,
            effects: [("tool".to_owned(), Effect::Pure)].into(),
        }));
        if let Action::CallTools { calls } = plan(&self.session, &self.agent.limits) {
            let performed = calls.into_iter().zip(sizes).map(|(planned, size)| {
                assert_eq!(planned.how, How::Run);
                EndedCall { call: planned.call, ending: ending(*size) }
            });
            let performed = performed.collect();
            self.advance(Performed::Called(performed));
        }
    }

    /// Whoever has only what the rebase shows decides the same as one who has everything.
    fn without_what_is_left_out(&mut self) {
        let (whole, policy) = (&self.session, &self.agent.context);
        let mut old = whole.clone();
        old.leave_out_like(&self.tail);
        let mut new = old.clone();
        let is_new = new.leave_out();
        for tail in [&old, &new] {
            assert!(!tail.lacks_messages(policy.strategy));
            let action = plan(whole, &self.agent.limits);
            assert_eq!(plan(tail, &self.agent.limits), action);
            let next = |session| in_context(action.clone(), session, &self.agent, &[], WINDOW_TOKENS);
            assert_eq!(next(tail), next(whole));
            assert_eq!(tail.open_turn(), whole.open_turn());
            assert_eq!(tail.awaits_model(), whole.awaits_model());
            let built = build(whole, Vec::new(), policy, WINDOW_TOKENS);
            assert_eq!(build(tail, Vec::new(), policy, WINDOW_TOKENS), built);
            let rebase = built.rebase.as_ref();
            assert_eq!(weigh(tail, &[], rebase), weigh(whole, &[], rebase));
            assert_eq!(compaction::is_possible(tail, policy), compaction::is_possible(whole, policy));
            for without in [0, 1, 2] {
                let request = |session| compaction::request(session, Vec::new(), without);
                assert_eq!(request(tail), request(whole));
            }
            let rebase = |session| compaction::rebase(session, &[], WINDOW_TOKENS);
            assert_eq!(rebase(tail), rebase(whole));
        }
        // A worker has read the session at any time, so not each turn leaves out more.
        if is_new && self.calls.is_multiple_of(3) {
            self.left_out += 1;
            self.tail = new;
        }
    }

    fn look_at(&mut self, built: &super::Built) {
        let rebase = built.rebase.as_ref().or(self.session.rebase.as_ref());
        let numbers = numbered(&self.session, rebase);
        assert_eq!(numbers.len(), built.context.messages.len());
        let begins = built.context.messages.first().map(|message| message.role);
        assert_ne!(begins, Some(Role::Tool), "a window begins with no result");
        let newest = self.session.records.iter().rev().find(|record| record.role == Role::User);
        assert!(
            newest.is_none_or(|user| numbers.contains(&Some(user.message_number))),
            "the newest question stays"
        );
        let unseen = self.session.records.iter().rev().take_while(|record| !record.is_reply());
        // A summary may replace a turn that is too large to keep. The summary call itself was shown the whole
        // turn.
        let whole = self.agent.context.strategy != Selection::Compaction;
        for record in unseen.filter(|record| whole && !record.is_summary()) {
            let at = numbers.iter().position(|number| *number == Some(record.message_number));
            let shown = at.map(|at| &built.context.messages[at].content);
            assert_eq!(shown, Some(&record.content), "what the model has not seen yet is whole");
        }
        if built.rebase.is_none()
            && let Some(most) = super::weight::at_most(&self.session)
        {
            let weight = weigh(&self.session, &[], None);
            assert!(weight.tokens <= most, "{weight:?} is more than {most}");
        }
        self.rebases += usize::from(built.rebase.is_some());
        let began_anew = std::mem::take(&mut self.rebased) || built.rebase.is_some();
        let mut prompts = Vec::new();
        for wire in &WIRES {
            let request = (wire.project)(&built.context);
            (wire.check)(&request.body).expect("a strict server takes it");
            let repairs = request.repairs;
            assert_eq!((repairs.orphan_results, repairs.unanswered_calls), (0, 0), "{repairs:?}");
            prompts.push(prompt(&request.body));
        }
        if let Some(before) = self.before.as_ref().filter(|_| !began_anew) {
            for (before, now) in before.iter().zip(&prompts) {
                assert!(now.starts_with(before), "{before:#?}\nis no prefix of\n{now:#?}");
            }
        }
        self.before = Some(prompts);
    }

    fn compact(&mut self) {
        let context = compaction::request(&self.session, Vec::new(), 0).expect("there is something");
        for wire in &WIRES {
            (wire.check)(&(wire.project)(&context).body).expect("a strict server takes it");
        }
        let usage = Usage { input_tokens: 7, output_tokens: 5, ..Usage::default() };
        let end = if std::mem::take(&mut self.no_summary) {
            CompactionEnd::Failed(Fault::EmptyReply)
        } else {
            self.rebased = true;
            self.compactions += 1;
            self.counted += usage.input_tokens + usage.output_tokens;
            CompactionEnd::Written {
                text: compaction::text("What was said.", &self.session.state),
                finish_reason: FinishReason::Stop,
                usage,
                rebase: compaction::rebase(&self.session, &[], WINDOW_TOKENS),
            }
        };
        self.advance(Performed::Compacted(Compaction {
            generation_id: "gen".into(),
            attempt: 1,
            model: "m".into(),
            request_sha256: String::new(),
            started_at: String::new(),
            repairs: 0,
            end,
        }));
    }

    fn advance(&mut self, outcome: Performed) {
        let mut tail = self.session.clone();
        tail.leave_out_like(&self.tail);
        let by_tail = advance(&tail, outcome.clone(), AgentPolicy::default());
        let transition = advance(&self.session, outcome, AgentPolicy::default());
        assert_eq!(by_tail, transition, "and what comes of it is the same");
        let rebased: Vec<_> = transition
            .events
            .iter()
            .filter_map(|event| if let Event::ContextRebased(rebase) = event { Some(rebase) } else { None })
            .collect();
        assert_eq!(rebased.last().copied(), transition.rebase.as_ref(), "the row has what the journal has");
        if let Some(rebase) = &transition.rebase {
            let last = transition.records.last().expect("it comes with a record").message_number;
            assert!(rebase.at_message_number <= last);
            assert!(rebase.summary_message_number.is_none_or(|number| number <= rebase.at_message_number));
        }
        let closes = matches!(transition.next, crate::advance::Next::Close(_));
        let run = self.session.run.clone();
        self.session.apply(&transition);
        if closes {
            // The next message opens a run again.
            self.session.run = run;
            self.session.status = SessionStatus::Running;
        }
    }
}

fn ending(size: usize) -> CallEnd {
    let is_error = size.is_multiple_of(2);
    let status = if is_error { CallStatus::Failed } else { CallStatus::Done };
    CallEnd::Settled(status, CallOutcome { content: "r".repeat(size), is_error, details: None })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn l6_between_rebases_requests_only_grow(
        happenings in vec(happening(), 1..40),
        strategy in select(Selection::ALL.to_vec()),
        with_reader in any::<bool>(),
    ) {
        let mut world = World::new(strategy, with_reader);
        for happening in &happenings {
            world.happens(happening);
        }
        let totals = world.session.totals.usage;
        if world.session.open_turn().is_none() {
            let uncounted: i64 = world.session.records.iter()
                .filter(|record| record.message_number > world.session.to_message_number)
                .filter_map(|record| record.details.usage)
                .map(|usage| usage.input_tokens + usage.output_tokens)
                .sum();
            prop_assert_eq!(totals.input_tokens + totals.output_tokens + uncounted, world.counted, "every call is counted once");
        }
        if strategy == Selection::Full {
            prop_assert_eq!(world.rebases + world.compactions, 0);
        }
    }
}

#[test]
fn long_histories_pass_every_mark() {
    for strategy in Selection::ALL {
        let mut world = World::new(strategy, true);
        for round in 0..30 {
            world.happens(&Happening::Message(100));
            world.happens(&Happening::Tools(vec![701, 901, 40]));
            world.happens(&Happening::Tools(vec![801; 1 + round % 3]));
            world.happens(&Happening::Answer(200));
        }
        let built = build(&world.session, Vec::new(), &world.agent.context, WINDOW_TOKENS);
        let weight = weigh(&world.session, &[], built.rebase.as_ref());
        match strategy {
            Selection::Full => assert_eq!((world.rebases, world.compactions, world.left_out), (0, 0, 0)),
            Selection::SlidingWindow => {
                assert!(world.rebases > 10 && weight.messages <= 9, "{} {weight:?}", world.rebases);
                assert!(world.calls > 2 * world.rebases, "the window is not cut at every call");
                assert!(world.left_out > 5, "{}", world.left_out);
            }
            Selection::TrimToolResults => {
                assert!(world.rebases > 10, "{}", world.rebases);
                assert!(world.calls > 2 * world.rebases, "results are trimmed in batches");
            }
            Selection::Compaction => {
                assert!(
                    world.compactions > 5 && world.rebases > 5,
                    "{} {}",
                    world.compactions,
                    world.rebases
                );
                assert!(weight.tokens < WINDOW_TOKENS, "{weight:?}");
                assert!(world.left_out > 1, "{}", world.left_out);
            }
        }
    }
}
