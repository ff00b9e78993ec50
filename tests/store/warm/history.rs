//! Random histories: copies of every age catch up with whatever others have done.

use super::*;
use std::hash::{DefaultHasher, Hash, Hasher};
use wakeful_store::fork::ForkRequest;
use wakeful_store::hydrate::Hydrated;
use wakeful_store::resolve::{Decision, Effect};
use wakeful_workflow::fork::CutPoint;
use wakeful_workflow::plan::PlannedCall;
use wakeful_workflow::resolve::Resolution;
use wakeful_workflow::strategy::Strategy;
use wakeful_workflow::workspace::Snapshot;

/// Another seed gives other histories.
const SEED: u64 = 11;
const ACTS: u64 = 160;
/// Copies of each session, of different ages.
const COPIES: usize = 3;

#[tokio::test]
#[ignore = "slow: make soak"]
async fn a_copy_that_catches_up_equals_hydration_whatever_others_have_done() {
    let mut history = History::new().await;
    // Whether a later act finds a run to stop in depends on whose job is claimed.
    assert_eq!(history.work(0, 1).await, "stops midway");
    for act in 0..ACTS {
        let what = history.act(act).await;
        history.check(act, what).await;
    }
    let History { caught_up, behind, refused, shorter, seen, .. } = &history;
    println!(
        "{caught_up} caught up, {behind} of them with new messages; {refused} refused; {shorter} tails; {seen:?}"
    );
    assert!(*shorter > 100, "{shorter} tails");
    assert!(*behind > 100 && *caught_up > behind + 100, "{caught_up} caught up, {behind} behind");
    assert_eq!(*refused, 0, "none of these acts makes a copy useless");
    for what in [
        "works",
        "stops midway",
        "sends",
        "cancels",
        "retries",
        "heals",
        "forks",
        "rebuilds",
        "archives",
        "resolves",
        "approves",
    ] {
        assert!(seen.contains(what), "nobody {what}: {seen:?}");
    }
}

/// Sessions of one world, and copies of them that grow old.
struct History {
    world: World,
    sessions: Vec<String>,
    copies: Vec<Warm>,
    caught_up: usize,
    /// Those that lacked messages.
    behind: usize,
    refused: usize,
    /// Times that a tail had fewer messages than its session.
    shorter: usize,
    seen: HashSet<&'static str>,
}

fn dice(act: u64, what: &str, sides: u64) -> u64 {
    let mut hasher = DefaultHasher::new();
    (SEED, act, what).hash(&mut hasher);
    hasher.finish() % sides
}

impl History {
    async fn new() -> History {
        let world = World::new().await;
        let mut sessions = Vec::new();
        // Two of the sessions have one conversation, so that its numbers have gaps for each of them.
        for (conversation, trigger) in [("c1", "t1"), ("c1", "t2"), ("c2", "t3")] {
            let new = new_session(conversation, trigger);
            sessions.push(world.store.wake(&new, &message("Begin.")).await.unwrap().session_id);
        }
        let (copies, seen) = (Vec::new(), HashSet::new());
        History { world, sessions, copies, caught_up: 0, behind: 0, refused: 0, shorter: 0, seen }
    }

    /// Somebody does something.
    async fn act(&mut self, act: u64) -> &'static str {
        let store = self.world.store.clone();
        let id = self.sessions[dice(act, "session", self.sessions.len() as u64) as usize].clone();
        let mut done = Ok(());
        let what = match dice(act, "what", 20) {
            0..=6 => return self.work(act, u64::MAX).await,
            7 | 8 => return self.work(act, 1 + dice(act, "commits", 4)).await,
            9..=12 => {
                done = store.send(&id, &message(&format!("Message {act}."))).await.map(drop);
                "sends"
            }
            13 => {
                done = store.cancel(&id, Some("enough")).await.map(drop);
                "cancels"
            }
            14 => {
                done = store.retry(&id, None).await.map(drop);
                "retries"
            }
            15 => {
                store.wake_session(&id).await.unwrap();
                "heals"
            }
            16 if self.sessions.len() < 6 => {
                let request = ForkRequest { start: true, ..ForkRequest::new(&id, CutPoint::End) };
                match store.fork(&request).await {
                    Ok(forked) => self.sessions.push(forked.session_id),
                    Err(error) => done = Err(error),
                }
                "forks"
            }
            16 | 17 => {
                let breaks = [
                    "state = state || '{\"a\": 1}'",
                    "last_message_number = last_message_number + 1",
                    "to_message_number = 0",
                    "total_turns = 7",
                    "compaction_failures = 3",
                ];
                let at = dice(act, "breaks", breaks.len() as u64) as usize;
                let sql = format!("update conversation_sessions set {} where session_id = $1", breaks[at]);
                let broken = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(&id);
                broken.execute(&self.world.database.pool).await.unwrap();
                self.check(act, "a broken row").await;
                store.rebuild(&id).await.unwrap();
                "rebuilds"
            }
            18 => {
                done = store.archive(&id, None).await;
                if done.is_ok() {
                    self.another(act).await;
                }
                "archives"
            }
            _ => return self.decide(act, &id).await,
        };
        match done {
            Ok(()) => {
                self.seen.insert(what);
            }
            Err(Error::Conflict { .. } | Error::Refused { .. }) => {}
            Err(error) => panic!("{what}: {error}"),
        }
        what
    }

    /// Another session in the place of one that has ended.
    async fn another(&mut self, act: u64) {
        let new = new_session(&format!("c{act}"), &format!("t{act}"));
        let woken = self.world.store.wake(&new, &message("Begin.")).await.unwrap();
        self.sessions.push(woken.session_id);
    }

    /// A person settles what waits for one.
    async fn decide(&mut self, act: u64, id: &str) -> &'static str {
        let waits = "select c.call_id || ' ' || c.status from tool_calls c
            where c.session_id = $1 and c.status in ('uncertain', 'unapproved') limit 1";
        let waits: Option<String> =
            sqlx::query_scalar(waits).bind(id).fetch_optional(&self.world.database.pool).await.unwrap();
        let Some((call_id, status)) = waits.as_deref().and_then(|waits| waits.split_once(' ')) else {
            return "nothing to decide";
        };
        let (resolution, what) = match (status, dice(act, "yes", 2)) {
            ("unapproved", 0) => (Resolution::Declined, "approves"),
            ("unapproved", _) => (Resolution::Approved, "approves"),
            (_, 0) => (Resolution::LetModelDecide, "resolves"),
            (_, _) => (Resolution::Happened { result: "It was charged.".into() }, "resolves"),
        };
        let decision = Decision {
            effect: Effect::Call(call_id.to_owned()),
            resolution,
            by: None,
            reason: None,
            args_sha256: None,
            tell: true,
            trace_context: None,
        };
        match self.world.store.resolve(id, &decision).await {
            Ok(_) => {
                self.seen.insert(what);
            }
            Err(Error::Conflict { .. } | Error::Refused { .. }) => {}
            Err(error) => panic!("{what}: {error}"),
        }
        what
    }

    /// A worker takes a session and makes at most so many commits. It keeps a copy as the step job does.
    async fn work(&mut self, act: u64, most: u64) -> &'static str {
        let store = &self.world.store;
        let waiting =
            "select count(*) from jobs where kind = 'step' and lease is null and run_at <= clock_timestamp()";
        if self.world.one(waiting).await == 0 {
            let id = &self.sessions[dice(act, "session", self.sessions.len() as u64) as usize];
            // Refused if the session is archived.
            let _ = store.send(id, &message(&format!("Message {act}."))).await;
            if self.world.one(waiting).await == 0 {
                return "no work";
            }
        }
        let mut claims = Claims::start(store, Kind::Step, 1, LEASE);
        let job = claims.next().await;
        claims.stop();
        let id = job.session_id.clone().unwrap();
        let mut hydrated = store.hydrate_tail(&id).await.unwrap();
        let mut commits = 0;
        let what = loop {
            if hydrated.session.lacks_messages(Strategy::Compaction) {
                hydrated = store.hydrate_to_keep(&id).await.unwrap();
            }
            if commits == most {
                store.release(&job.lease).await.unwrap();
                break "stops midway";
            }
            commits += 1;
            let session = &mut hydrated.session;
            let outcome = match plan(session, &Limits { steps: i64::MAX, ..Limits::default() }) {
                Action::Rest => {
                    store.end_job(&job.lease).await.unwrap();
                    break "rests";
                }
                Action::Begin => Performed::Begun,
                Action::CallModel => replies(act, commits, session.last_message_number),
                Action::Compact => unreachable!("no strategy is asked here"),
                Action::CallTools { calls } => {
                    let ended = calls.into_iter().map(|planned| ends(act, planned));
                    let ended = ended.collect();
                    match dice(act, "files", 4) {
                        0 => Performed::CalledAndChanged(ended, snapshot(act)),
                        _ => Performed::Called(ended),
                    }
                }
                Action::Stop(stop) => Performed::Stopped(stop),
                Action::Pause => Performed::Paused,
            };
            let policy = AgentPolicy::default();
            let mut transition = advance(session, outcome, policy);
            transition.hold_calls(|call| call.name == "compose_email");
            match store.commit(&job.lease, session, &transition, performance()).await.unwrap() {
                Commit::Continued { wake_seq, .. } => {
                    session.apply(&transition.continuing());
                    if wake_seq != session.wake_seq {
                        store.refresh(session).await.unwrap();
                    }
                }
                Commit::Closed { .. } => {
                    session.records.extend(transition.records);
                    break "works";
                }
                Commit::Moved | Commit::Stale => panic!("nobody else works"),
            }
        };
        self.keep(act, hydrated);
        self.seen.insert(what);
        what
    }

    fn keep(&mut self, act: u64, mut hydrated: Hydrated) {
        if dice(act, "leaves out", 2) == 0 {
            hydrated.leave_out();
        }
        let copy = hydrated.keep().expect("nothing is sealed");
        let id = copy.session_id().clone();
        let mut of_it: Vec<usize> =
            (0..self.copies.len()).filter(|&at| *self.copies[at].session_id() == id).collect();
        if of_it.len() == COPIES {
            self.copies.remove(of_it.swap_remove(dice(act, "leaves", COPIES as u64) as usize));
        }
        self.copies.push(copy);
    }

    async fn check(&mut self, act: u64, what: &str) {
        let store = &self.world.store;
        for copy in &self.copies {
            let mut cold = store.hydrate(copy.session_id().as_str()).await.unwrap();
            self.shorter += usize::from(tail::is_the_end_of(store, &cold).await);
            match store.catch_up(copy.clone()).await.unwrap() {
                Some(warm) => {
                    cold.leave_out_like(&warm.session);
                    assert_eq!(warm.session, cold, "act {act}: somebody {what}");
                    self.caught_up += 1;
                    let bytes = |hydrated: Hydrated| hydrated.keep().unwrap().bytes();
                    self.behind += usize::from(bytes(warm) > copy.bytes());
                }
                None => self.refused += 1,
            }
        }
    }
}

/// What a model says.
fn replies(act: u64, commit: u64, last_message_number: i64) -> Performed {
    let tool = |name: &str| replied(vec![text("One moment."), asks(&call(&new_id("call"), name))]);
    match (dice(act, "says", 8) + commit) % 8 {
        0 => tool("reserve"),
        1 => tool("charge"),
        2 => tool("ask_user"),
        3 => tool("compose_email"),
        4 | 6 => {
            let users_from = commit.is_multiple_of(2).then_some(last_message_number - 5);
            tail::summary(last_message_number + 1, last_message_number, users_from)
        }
        _ => replied(vec![text(&format!("Answer {act}."))]),
    }
}

fn ends(act: u64, planned: PlannedCall) -> EndedCall {
    let asks = planned.call.name == "ask_user";
    let ending = match planned.how {
        How::Abandon => CallEnd::Abandoned,
        How::Answer { inbox_id, text } => CallEnd::Answered { inbox_id, text },
        How::Reuse(status, outcome) => CallEnd::Settled(status, outcome),
        How::Uncertain { known } => CallEnd::Uncertain { known, why: None },
        How::Run if asks => CallEnd::Asked("When?".into()),
        How::Run if planned.call.name == "charge" => CallEnd::Uncertain { known: false, why: None },
        How::Run => {
            let mail = json!({"type": "sentEmail", "to": ["b@example.com"], "subject": "x", "body": act});
            done("Done.", Some(mail))
        }
    };
    EndedCall { call: planned.call, ending }
}

fn snapshot(act: u64) -> Snapshot {
    Snapshot {
        tree_sha256: format!("{act:064x}"),
        packs: Vec::new(),
        files: 1,
        bytes: act,
        message_number: 0,
    }
}
