//! `kill -9` in the middle of eight agents that charge cards: Wakeful, and three systems that others wrote. `make compare-crash`
//! prints what each of them did.
//!
//! All have the same task and the same two services. An agent asks its model, which answers after [`MODEL`] and asks for a charge;
//! the charge is a line in a file, and its answer comes after [`CHARGE`]. It has no idempotency key, as a mail has none. After
//! [`TURNS`] charges the model ends the run. The agents begin one after the other, so the kill meets half of them in a model call and
//! half in a charge. The next process starts in the same instant, as a supervisor would do it. Nothing is configured but
//! connections: leases, timeouts and retries are what each system has by default.
//!
//! The others are written as their documents write an agent: each model call and each charge is a step (a node) of its own.

use crate::support::model::turns_since_user;
use crate::support::{Answer, Database, ModelServer, Options};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

const AGENTS: usize = 8;
const TURNS: usize = 5;
const MODEL: Duration = Duration::from_millis(300);
const CHARGE: Duration = Duration::from_millis(300);
/// Between the begins of two agents.
const BETWEEN: Duration = Duration::from_millis(75);
/// The kill comes right after this charge.
const KILLED_AT: usize = 16;

#[derive(Clone, Copy)]
enum Contestant {
    Wakeful,
    Absurd,
    Dbos,
    LangGraph,
}

impl Contestant {
    const ALL: [Contestant; 4] =
        [Contestant::Wakeful, Contestant::Absurd, Contestant::Dbos, Contestant::LangGraph];

    fn name(self) -> &'static str {
        match self {
            Contestant::Wakeful => "Wakeful",
            Contestant::Absurd => "Absurd",
            Contestant::Dbos => "DBOS",
            Contestant::LangGraph => "LangGraph",
        }
    }
}

/// What became of the agents.
#[derive(Debug)]
struct Outcome {
    /// Runs that ended without a person.
    completed: usize,
    /// Charges that were made, and how many cards were charged again for the same call.
    charges: usize,
    charged_twice: usize,
    /// Charges of which the model was told that nobody knows whether they were made.
    unknown: usize,
    /// Model calls, and how many of them were asked for a reply that an agent had asked for before.
    calls: usize,
    repeated: usize,
    /// From the kill until the next process asks a model or charges, and until the last run ended.
    resumed: Duration,
    ended: Duration,
}

/// The services of one contestant, and where it keeps its state.
struct Stage {
    database: Database,
    model: ModelServer,
    options: Options,
}

impl Stage {
    async fn new(database: Database) -> Stage {
        let model = ModelServer::start(|body, _| {
            if turns_since_user(body) < TURNS {
                Answer::call("charge", json!({"cents": 100}))
            } else {
                Answer::text("All is charged.")
            }
        })
        .await;
        // An answer with a call has three pieces, and so two pauses.
        model.pace(MODEL / 2);
        let options = Options::new()
            .model("openai/test")
            .env("OPENAI_BASE_URL", &model.url)
            .env("FIXTURE_TAKE_MS", CHARGE.as_millis().to_string());
        // As without any setting.
        let options =
            ["LEASE_S=30", "HEARTBEAT_S=10", "POLL_MS=1000"].iter().fold(options, |options, set| {
                let (name, value) = set.split_once('=').expect("a setting");
                options.env(&format!("WAKEFUL_QUEUE__{name}"), value)
            });
        Stage { database, model, options }
    }

    /// Waits for the charge after which the process is killed.
    async fn until_the_kill(&self) {
        self.options.has_effects(KILLED_AT).await;
    }

    fn outcome(&self, killed: Instant, completed: usize, unknown: usize) -> Outcome {
        let ended = killed.elapsed();
        let charges = self.options.effects();
        let mut cards: BTreeMap<&str, usize> = BTreeMap::new();
        for charge in &charges {
            *cards.entry(charge).or_default() += 1;
        }
        let calls = self.model.bodies();
        // Not by their bytes: some write what they read back in another order.
        let asked = calls.iter().map(|body| {
            let body: Value = serde_json::from_str(body).expect("bodies are JSON");
            let messages = body["messages"].as_array().expect("messages");
            let agent = messages.iter().find(|message| message["role"] == "user").expect("a user");
            (agent["content"].to_string(), turns_since_user(&body))
        });
        let distinct = asked.collect::<BTreeSet<_>>().len();
        let next_call = self.model.arrivals().into_iter().find(|at| *at > killed);
        Outcome {
            completed,
            charges: charges.len(),
            charged_twice: cards.values().map(|times| times - 1).sum(),
            unknown,
            calls: calls.len(),
            repeated: calls.len() - distinct,
            resumed: next_call.map_or(ended, |at| at - killed),
            ended,
        }
    }
}

async fn of_wakeful() -> Outcome {
    let stage = Stage::new(Database::new().await).await;
    let first = stage.options.serve(&stage.database).await;
    let client = first.client();
    let mut sessions = Vec::new();
    for number in 0..AGENTS {
        let woken = client.chat(&format!("c{number}"), &format!("agent {number}")).await;
        sessions.push(woken["session_id"].as_str().expect("an id").to_owned());
        tokio::time::sleep(BETWEEN).await;
    }
    stage.until_the_kill().await;
    let killed = Instant::now();
    first.kill();
    let second = stage.options.serve(&stage.database).await;
    let client = second.client();
    for session in &sessions {
        client.wait_for(session, "completed").await;
    }
    let unknown: i64 = stage
        .database
        .value("select count(*) from tool_calls where status = 'uncertain' and $1 <> ''", "all")
        .await;
    stage.outcome(killed, sessions.len(), usize::try_from(unknown).expect("a count"))
}

/// A process of another system.
struct Peer {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    fn start(contestant: Contestant, stage: &Stage, is_first: bool) -> Peer {
        let peers =
            PathBuf::from(std::env::var("WAKEFUL_PEERS").expect("make compare-crash sets WAKEFUL_PEERS"));
        let (program, script) = match contestant {
            Contestant::Absurd => (PathBuf::from("node"), "absurd.mjs"),
            Contestant::Dbos => (peers.join("python/bin/python"), "dbos_agent.py"),
            Contestant::LangGraph => (peers.join("python/bin/python"), "langgraph_agent.py"),
            Contestant::Wakeful => unreachable!("it is no peer"),
        };
        let mut child = Command::new(program)
            .arg(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("compare").join(script))
            .env("AGENT_PEERS", &peers)
            .env("AGENT_DATABASE_URL", &stage.database.url)
            .env("AGENT_MODEL_URL", &stage.model.url)
            .env("AGENT_SESSIONS", AGENTS.to_string())
            .env("AGENT_BETWEEN_MS", BETWEEN.as_millis().to_string())
            .env("AGENT_FIRST", if is_first { "1" } else { "0" })
            .env("FIXTURE_EFFECTS", stage.options.path("effects"))
            .env("FIXTURE_TAKE_MS", CHARGE.as_millis().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("scripts/setup compare-peers installs it");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Peer { child, lines }
    }

    /// How many runs it says that it has completed, once it has ended.
    async fn completed(&mut self) -> usize {
        let said = async {
            while let Some(line) = self.lines.next_line().await.expect("text") {
                if let Some(count) = line.strip_prefix("completed ") {
                    return count.trim().parse().expect("a number");
                }
            }
            panic!("it ended and said nothing: {:?}", self.child.wait().await);
        };
        crate::support::within("the runs of a peer", said).await
    }
}

async fn of_peer(contestant: Contestant) -> Outcome {
    let stage = Stage::new(Database::without_schema().await).await;
    let mut first = Peer::start(contestant, &stage, true);
    tokio::select! {
        () = stage.until_the_kill() => {}
        ended = first.child.wait() => panic!("{} ended before the kill: {ended:?}", contestant.name()),
    }
    let killed = Instant::now();
    first.child.kill().await.expect("it runs");
    let mut second = Peer::start(contestant, &stage, false);
    let completed = second.completed().await;
    stage.outcome(killed, completed, 0)
}

#[tokio::test]
#[ignore = "needs Absurd, DBOS and LangGraph, and minutes: make compare-crash"]
async fn a_kill_in_the_middle_of_charges_charges_no_card_twice() {
    println!("\n{AGENTS} agents, {TURNS} charges each; kill -9 right after charge {KILLED_AT}\n");
    println!(
        "{:<11}{:>10}{:>9}{:>15}{:>10}{:>13}{:>10}{:>11}{:>9}",
        "",
        "completed",
        "charges",
        "charged twice",
        "unknown",
        "model calls",
        "repeated",
        "resumed s",
        "ended s"
    );
    for contestant in Contestant::ALL {
        let outcome = match contestant {
            Contestant::Wakeful => of_wakeful().await,
            peer => of_peer(peer).await,
        };
        println!(
            "{:<11}{:>10}{:>9}{:>15}{:>10}{:>13}{:>10}{:>11.1}{:>9.1}",
            contestant.name(),
            outcome.completed,
            outcome.charges,
            outcome.charged_twice,
            outcome.unknown,
            outcome.calls,
            outcome.repeated,
            outcome.resumed.as_secs_f64(),
            outcome.ended.as_secs_f64()
        );
        assert_eq!(outcome.completed, AGENTS, "{}: {outcome:?}", contestant.name());
        if let Contestant::Wakeful = contestant {
            assert_eq!((outcome.charges, outcome.charged_twice), (AGENTS * TURNS, 0), "{outcome:?}");
            assert!(outcome.unknown > 0, "the kill met no charge: {outcome:?}");
        }
    }
}
