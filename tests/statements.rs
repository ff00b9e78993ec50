//! What a step costs, in figures that a slow machine does not change: statements, round trips, bytes of WAL, allocations.
//!
//! `statements.toml` has the limit of each figure. A change that lowers a figure lowers its limit in the same commit.
//! `make bench-smoke` prints the figures and the statements behind them.

use crate::support::recorder::{Recorder, Sent};
use crate::support::world::{send, wake};
use crate::support::{Client, Database, Options, Process, Server, eventually};
use futures::StreamExt as _;
use futures::future::join_all;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;
use wakeful_store::Store;

/// Tool steps of the longer of two runs. Their difference is the cost of these steps.
const STEPS: usize = 16;

/// Runs of each kind. The figure is their median.
const RUNS: usize = 5;

/// Calls that stream at one time, each with a reader.
const READERS: usize = 6;

/// Statements that timers and notifications cause, each with a part of its text. Their number depends on time, so the figures
/// leave them out.
const TIMED: [(&str, &str); 11] = [
    ("heartbeat", "with mine as materialized"),
    ("heartbeat of the process", "insert into workers"),
    ("claim", "with ready as materialized"),
    ("proof of the listener", "select pg_notify($1, '')"),
    ("notification", "pg_notify"),
    ("listen", "LISTEN"),
    ("look for cancels", "= any($1) and cancel_requested"),
    ("look for work without a job", "with page as materialized"),
    ("look for dead workers", "with named as materialized"),
    ("look for batches", "update batches"),
    ("look for expired questions", "s.status = 'waiting_input'"),
];

#[tokio::test]
async fn a_pure_tool_step_sends_no_more_statements_than_its_limit() {
    check("pure_tool_step", &cost_of_a_step(&format!("{STEPS} steps")).await);
}

#[tokio::test]
async fn an_effectful_tool_step_sends_no_more_statements_than_its_limit() {
    check("effectful_tool_step", &cost_of_a_step("reservations").await);
}

#[tokio::test]
async fn a_guarded_tool_step_sends_no_more_statements_than_its_limit() {
    check("guarded_tool_step", &cost_of_a_step("charges").await);
}

#[tokio::test]
async fn an_answer_sends_no_more_statements_than_its_limit() {
    let world = World::new().await;
    let worker = world.worker().await;
    let answer = cost(&world, "answer").await;
    drop(worker);
    check("answer", &answer);
}

#[tokio::test]
async fn the_next_answer_of_a_session_reads_only_what_is_new_of_it() {
    let world = World::new().await;
    let worker = world.worker().await;
    world.run("c1", &format!("{STEPS} steps")).await;
    let mut runs = Vec::new();
    for _ in 0..RUNS {
        let sent = world.next("c1", "answer").await;
        // A ping of a connection that has rested has the text of the statement before it.
        let reads: Vec<&Sent> =
            sent.iter().filter(|one| !one.is_ping && one.sql.contains("as changing")).collect();
        let new = reads.iter().all(|one| one.sql.contains("m.message_number >= $2"));
        assert!(new && reads.len() == 1, "{reads:#?}");
        runs.push(Cost::of(&sent, |sql| kind(sql).is_none()));
    }
    drop(worker);
    check("next_answer", &median(runs));
}

#[tokio::test]
async fn a_streamed_answer_that_nobody_reads_sends_no_more_statements_than_its_limit() {
    let world = World::new().await;
    let worker = world.worker().await;
    world.run("warm", "answer").await;
    let streamed = world.run("streamed", "slow").await;
    drop(worker);
    // No user cancels or reads, so the looks for a cancel and the notifications are part of this cost.
    let timed = ["look for cancels", "notification"];
    check("streamed_answer", &Cost::of(&streamed, |sql| kind(sql).is_none_or(|kind| timed.contains(&kind))));
}

#[tokio::test]
async fn calls_that_stream_at_one_time_share_the_statements_that_write_their_text() {
    let world = World::new().await;
    let worker = world.worker().await;
    let api = world.process("api", &world.database.url, "\"Listening\"").await;
    let client = api.client();
    world.settled().await;
    let texts = join_all((0..READERS).map(async |number| {
        let session = client.chat(&format!("c{number}"), "slow").await;
        let stream = client.stream(session["session_id"].as_str().unwrap(), None).await;
        let call = stream.take_while(|event| std::future::ready(event.event != "gen_complete"));
        call.filter(|event| std::future::ready(event.event == "gen_chunk")).count().await
    }))
    .await;
    let sent = world.settled().await;
    drop((api, worker));
    let writes = sent.iter().filter(|one| one.sql.contains("insert into generation_chunks")).count();
    assert!(texts.iter().all(|read| *read > 1), "each is read while it streams: {texts:?}");
    // A slow machine writes less often. All that is written at one moment is one statement all the same.
    let texts: usize = texts.iter().sum();
    assert!(writes * 2 <= texts, "{writes} statements for {texts} texts of {READERS} calls");
}

#[tokio::test]
async fn a_message_that_comes_in_sends_no_more_statements_than_its_limit() {
    let world = World::new().await;
    let api = world.process("api", &world.recorder.url, "\"Listening\"").await;
    let client = api.client();
    client.chat("warm", "answer").await;
    let (mut first, mut next) = (Vec::new(), Vec::new());
    let worker = world.process("worker", &world.database.url, "\"Working\"").await;
    for number in 0..RUNS {
        let conversation = format!("c{number}");
        first.push(world.post(&client, &conversation).await);
        next.push(world.post(&client, &conversation).await);
    }
    drop((api, worker));
    check("first_message", &median(first));
    check("next_message", &median(next));
}

#[tokio::test]
async fn a_message_that_its_own_process_answers_sends_no_more_statements_than_its_limit() {
    let world = World::new().await;
    let process = world.process("api,worker", &world.recorder.url, "\"Listening\"").await;
    process.wait_for_log("\"Working\"").await;
    let client = process.client();
    let mut runs = Vec::new();
    // The first run prepares the statements.
    for number in 0..=RUNS {
        world.settled().await;
        let session = client.chat(&format!("c{number}"), "answer").await;
        world.over(session["session_id"].as_str().unwrap()).await;
        runs.push(Cost::of(&world.settled().await, |sql| kind(sql).is_none()));
    }
    drop(process);
    check("message_and_answer", &median(runs.split_off(1)));
}

#[tokio::test]
async fn a_pure_tool_step_allocates_no_more_than_its_limit() {
    let world = World::new().await;
    let file = world.options.path("allocations");
    let worker =
        world.options.clone().arg("--roles").arg("worker").env("FIXTURE_ALLOCATIONS", file.to_str().unwrap());
    let worker = worker.spawn(&world.database.url);
    worker.wait_for_log("\"Working\"").await;
    world.run("warm", &format!("{STEPS} steps")).await;
    let counts = || {
        let bytes = std::fs::read(&file).expect("the counts");
        [&bytes[..8], &bytes[8..]]
            .map(|eight| u64::from_ne_bytes(eight.try_into().expect("eight bytes")) as f64)
    };
    let (mut short, mut long) = (Vec::new(), Vec::new());
    for number in 0..RUNS {
        let before = counts();
        world.run(&format!("one-{number}"), "answer").await;
        let between = counts();
        world.run(&format!("many-{number}"), &format!("{STEPS} steps")).await;
        let after = counts();
        short.push([0, 1].map(|at| between[at] - before[at]));
        long.push([0, 1].map(|at| after[at] - between[at]));
    }
    drop(worker);
    // Timers only ever add to a run, and more on a busy machine, so the smallest of each is the run's own.
    let least = |runs: &[[f64; 2]], at: usize| runs.iter().map(|run| run[at]).fold(f64::INFINITY, f64::min);
    for (at, unit) in ["allocations", "allocated_bytes"].into_iter().enumerate() {
        within("pure_tool_step", unit, (least(&long, at) - least(&short, at)) / STEPS as f64, "");
    }
}

/// The tables that the statements of `store/src/step/` write to.
fn tables_of_a_step() -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../store/src/step");
    let mut tables = BTreeSet::new();
    for entry in std::fs::read_dir(folder).expect("the parts of the step's commit").flatten() {
        let path = entry.path();
        if path.extension().is_none_or(|it| it != "rs") || path.ends_with("statement_tests.rs") {
            continue;
        }
        let text = std::fs::read_to_string(path).expect("a part");
        for verb in ["insert into ", "update ", "delete from "] {
            let written = text.split(verb).skip(1);
            let name = |rest: &str| {
                rest.split(|c: char| !c.is_ascii_lowercase() && c != '_').next().map(str::to_owned)
            };
            tables.extend(written.filter_map(name).filter(|name| !name.is_empty()));
        }
    }
    tables
}

/// Postgres prepares a CHECK again for each statement. The tables of a step have none but one, which refuses what a count that drifted
/// would become; the databases of the tests have all that there were.
#[tokio::test]
async fn no_condition_is_prepared_again_by_each_step_and_the_tests_databases_have_them() {
    let (installed, tested) = (Database::without_schema().await, Database::new().await);
    let store = installed.store().await;
    store.migrate(|_| {}).await.expect("the migrations apply");
    store.close().await;
    let tables = tables_of_a_step();
    for known in ["conversation_sessions", "deliveries", "generation_chunks", "jobs", "run_failures"] {
        assert!(tables.contains(known), "{known} is not found: {tables:?}");
    }
    let tables: Vec<String> = tables.into_iter().collect();
    let of_steps = "select coalesce(array_agg(conname::text order by conname), '{}') from pg_constraint
        where contype = 'c' and conrelid::regclass::text = any(string_to_array($1, ' '))";
    let kept = ["conversation_counters_queued_runs_check"];
    assert_eq!(installed.value::<Vec<String>>(of_steps, &tables.join(" ")).await, kept);
    let mut all = tested.value::<Vec<String>>(of_steps, &tables.join(" ")).await;
    all.retain(|name| !kept.contains(&name.as_str()));
    assert_eq!(all.len(), 13, "{all:?}");
}

#[tokio::test]
async fn a_step_writes_no_more_wal_than_its_limit() {
    let server = Server::quiet().await;
    let mut world = World::on(Database::on(&server.url(), "pg_default").await).await;
    world.options = world.options.env("WAKEFUL_AGENTS__DEFAULT__JOURNAL", "checkpoint");
    let worker = world.worker().await;
    world.run("warm", &format!("{STEPS} steps")).await;
    let mut each = Vec::new();
    for number in 0..RUNS {
        let before = world.wal_bytes().await;
        world.run(&format!("one-{number}"), "answer").await;
        let between = world.wal_bytes().await;
        world.run(&format!("many-{number}"), &format!("{STEPS} steps")).await;
        let after = world.wal_bytes().await;
        each.push((after - between - (between - before)) as f64 / STEPS as f64);
    }
    drop(worker);
    each.sort_by(f64::total_cmp);
    println!("pure_tool_step, in each pair of runs: {each:.0?}");
    let wal_bytes = each[RUNS / 2];
    within("pure_tool_step", "wal_bytes", wal_bytes, "");
    // What the worker sends of a step's messages. Postgres compresses most of it.
    let sql = "select sum(octet_length(content::text) + octet_length(details::text))::float8 / $1::float8
        from conversation_records where session_id = (
            select session_id from conversation_sessions where conversation_id = 'default/many-0'
        ) and step_number <= $1::integer";
    let said: f64 = world.database.value(sql, &STEPS.to_string()).await;
    within("pure_tool_step", "wal_bytes_above_messages", wal_bytes - said, "");
}

/// A database behind a recorder, and what a worker on it needs.
struct World {
    database: Database,
    recorder: Recorder,
    store: Store,
    options: Options,
}

impl World {
    async fn new() -> World {
        World::on(Database::new().await).await
    }

    async fn on(database: Database) -> World {
        let options = Options::new()
            .model("scripted/costs")
            .config("[scripted]\ndir = \"scenarios\"")
            // The search is filled beside the steps, and is not part of what they cost.
            .config("[queue]\nsearch_s = 3600")
            // Keeps timers from firing during a run.
            .env("WAKEFUL_QUEUE__LEASE_S", "90")
            .env("WAKEFUL_QUEUE__HEARTBEAT_S", "30")
            .env("WAKEFUL_QUEUE__POLL_MS", "30000")
            .env("WAKEFUL_QUEUE__HEAL_S", "86400");
        std::fs::create_dir(options.path("scenarios")).expect("a folder");
        std::fs::write(options.path("scenarios/costs.toml"), scenario()).expect("a scenario");
        let (recorder, store) = (Recorder::start(&database.url), database.store().await);
        World { database, recorder, store, options }
    }

    /// Starts a process of one role.
    async fn process(&self, role: &str, url: &str, started: &str) -> Process {
        let process = self.options.clone().arg("--roles").arg(role).spawn(url);
        process.wait_for_log(started).await;
        process
    }

    /// Starts a worker whose statements are recorded, and lets it prepare them.
    async fn worker(&self) -> Process {
        let worker = self.process("worker", &self.recorder.url, "\"Working\"").await;
        self.run("first", "answer").await;
        worker
    }

    /// Runs one message of a new conversation to its end, and returns what the worker sent for it.
    async fn run(&self, conversation: &str, text: &str) -> Vec<Sent> {
        let session_id = wake(&self.store, conversation, "scripted/costs", text).await;
        let workspace = self.options.path("workspaces").join(&session_id);
        std::fs::create_dir_all(&workspace).expect("a folder");
        std::fs::write(workspace.join("notes.txt"), words(2000)).expect("a file");
        self.settled().await;
        self.store.announce(&session_id).await.expect("a notification");
        self.over(&session_id).await;
        self.settled().await
    }

    /// Runs one more message of a conversation to its end, and returns what the worker sent for it.
    async fn next(&self, conversation: &str, text: &str) -> Vec<Sent> {
        let session_id: String = self
            .database
            .value(
                "select session_id from conversation_sessions where conversation_id = 'default/' || $1",
                conversation,
            )
            .await;
        send(&self.store, &session_id, text).await;
        self.settled().await;
        self.store.announce(&session_id).await.expect("a notification");
        self.over(&session_id).await;
        self.settled().await
    }

    /// Posts a message, and returns what the API process sent until it was quiet again. Then waits for the run's end.
    async fn post(&self, client: &Client, conversation: &str) -> Cost {
        self.settled().await;
        let session_id = client.chat(conversation, "answer").await["session_id"].as_str().unwrap().to_owned();
        let sent = self.settled().await;
        self.over(&session_id).await;
        Cost::of(&sent, |sql| kind(sql).is_none())
    }

    async fn over(&self, session_id: &str) {
        eventually("the run to be over", || async {
            let status: String = self
                .database
                .value("select status from conversation_sessions where session_id = $1", session_id)
                .await;
            assert_ne!(status, "failed");
            let jobs: i64 =
                self.database.value("select count(*) from jobs where session_id = $1", session_id).await;
            (status == "completed" && jobs == 0).then_some(())
        })
        .await;
    }

    /// Waits until the process has sent nothing for a while, and returns what it sent before.
    async fn settled(&self) -> Vec<Sent> {
        self.recorder.quiet(Duration::from_millis(80)).await;
        self.recorder.take()
    }

    async fn wal_bytes(&self) -> i64 {
        let sql = "select (pg_current_wal_insert_lsn() - $1::text::pg_lsn)::bigint";
        self.database.value(sql, "0/0").await
    }
}

/// What one of the steps of a run that begins with `text` costs.
async fn cost_of_a_step(text: &str) -> Cost {
    let world = World::new().await;
    let _worker = world.worker().await;
    let steps = cost(&world, text).await.minus(&cost(&world, "answer").await);
    steps.divided_by(STEPS as f64)
}

/// The median cost of a run that begins with `text`.
async fn cost(world: &World, text: &str) -> Cost {
    let mut runs = Vec::new();
    for number in 0..RUNS {
        let sent = world.run(&format!("{}-{number}", text.replace(' ', "-")), text).await;
        runs.push(Cost::of(&sent, |sql| kind(sql).is_none()));
    }
    median(runs)
}

fn median(mut costs: Vec<Cost>) -> Cost {
    costs.sort_by(|one, other| {
        one.statements.total_cmp(&other.statements).then(one.round_trips.total_cmp(&other.round_trips))
    });
    costs.swap_remove(costs.len() / 2)
}

/// The name of a statement that a timer or a notification causes. `None` for all others.
fn kind(sql: &str) -> Option<&'static str> {
    TIMED.iter().find(|(_, text)| sql.contains(text)).map(|(name, _)| *name)
}

/// Statements and round trips, in all and by the beginning of their text.
#[derive(Clone, Debug, Default)]
struct Cost {
    statements: f64,
    round_trips: f64,
    by_text: BTreeMap<String, [f64; 2]>,
}

impl Cost {
    fn of(sent: &[Sent], counts: impl Fn(&str) -> bool) -> Cost {
        let mut cost = Cost::default();
        // A slow machine may make a process open another connection.
        let opens = |sql: &str| sql.contains("set_config('statement_timeout'");
        for one in sent.iter().filter(|one| counts(&one.sql) && !opens(&one.sql)) {
            let here = [f64::from(u8::from(!one.is_ping)), f64::from(one.round_trips)];
            cost.statements += here[0];
            cost.round_trips += here[1];
            let text: Vec<&str> = one.sql.split_whitespace().collect();
            let text: String = text.join(" ").chars().take(110).collect();
            let all = cost.by_text.entry(text).or_default();
            *all = [all[0] + here[0], all[1] + here[1]];
        }
        cost
    }

    fn minus(mut self, other: &Cost) -> Cost {
        self.statements -= other.statements;
        self.round_trips -= other.round_trips;
        for (text, there) in &other.by_text {
            let here = self.by_text.entry(text.clone()).or_default();
            *here = [here[0] - there[0], here[1] - there[1]];
        }
        self
    }

    fn divided_by(mut self, number: f64) -> Cost {
        self.statements /= number;
        self.round_trips /= number;
        for here in self.by_text.values_mut() {
            *here = here.map(|count| count / number);
        }
        self
    }
}

fn check(figure: &str, cost: &Cost) {
    let mut table = String::new();
    for (text, [statements, round_trips]) in &cost.by_text {
        if [*statements, *round_trips] != [0.0, 0.0] {
            writeln!(table, "  {statements:>6.2} {round_trips:>6.2}  {text}").expect("a string takes text");
        }
    }
    let table = format!("  statements, round trips:\n{table}");
    println!("{figure}\n{table}");
    within(figure, "statements", cost.statements, &table);
    within(figure, "round_trips", cost.round_trips, &table);
}

fn within(figure: &str, unit: &str, measured: f64, why: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("statements.toml");
    let limits: toml::Table = std::fs::read_to_string(file).unwrap().parse().unwrap();
    let limit = limits[figure][unit].as_float().expect("limits are written with a point");
    println!("{figure}.{unit} = {measured:.2}, limit {limit}");
    assert!(
        measured <= limit,
        "{figure}.{unit} is {measured:.2}, and its limit in tests/statements.toml is {limit}\n{why}"
    );
}

/// The scenario of the scripted model: a turn for each text that a test posts.
fn scenario() -> String {
    let text = words(2000);
    let tool = |name: &str, arguments: &str| {
        format!(
            "[[turn.reply]]\ntext = \"{text}\"\ntool_calls = [{{ name = \"{name}\", arguments = {arguments} }}]\n"
        )
    };
    let last = "[[turn.reply]]\ntext = \"That is all.\"\n";
    let turn = |when: &str, replies: String| format!("[[turn]]\nwhen = \"{when}\"\n{replies}");
    [
        turn("answer", last.to_owned()),
        turn(&format!("{STEPS} steps"), tool("read_file", "{ path = \"notes.txt\" }").repeat(STEPS) + last),
        turn("reservations", tool("reserve", "{ persons = 2 }").repeat(STEPS) + last),
        turn("charges", tool("charge", "{ cents = 500 }").repeat(STEPS) + last),
        // 26 words in 3.25 s.
        turn(
            "slow",
            format!("[[turn.reply]]\nchunk_ms = 125\ntext = \"{}\"\n", "word ".repeat(26).trim_end()),
        ),
    ]
    .concat()
}

/// Text of this many bytes, with words as a stream has them.
fn words(bytes: usize) -> String {
    let mut text = "the order was shipped to Hamburg on Tuesday and ".repeat(bytes / 40);
    text.truncate(bytes);
    text.trim_end().to_owned()
}
