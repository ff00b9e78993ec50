//! `kill -9` anywhere in a step, then a fresh process. Seen each time by a checker that reads only what is left: one
//! reply a message, dense numbers, no effect twice, and no more model calls than the kill itself cost.

use crate::support::checker::{Traces, distinct};
use crate::support::world::wake;
use crate::support::{Answer, Database, ModelServer, Options, Process, World, eventually};
use futures::future::join_all;
use serde_json::{Value, json};

const GUARDED: &[&str] = &["charge"];
const IDEMPOTENT: &[&str] = &["reserve"];
const BOTH: &[&str] = &["charge", "reserve"];

/// How the first process ends.
#[derive(Clone, Copy, Debug)]
enum Kill {
    /// It kills itself at a failpoint.
    At(&'static str),
    /// From outside, while the model's answer of this number is half sent.
    DuringModelCall(usize),
    /// From outside, in the middle of this tool, when its neighbours have settled.
    DuringTool(&'static str),
}

/// A run that was killed once and went on.
struct Survived {
    world: World,
    traces: Traces,
}

impl Survived {
    /// Model calls that were made again.
    fn repeated(&self) -> usize {
        let bodies = self.world.model.bodies();
        bodies.len() - distinct(&bodies).len()
    }

    fn uncertain(&self) -> usize {
        self.traces.journal("TOOL_FAILED_UNCERTAIN").len()
    }
}

/// Kills a process in its first run, lets another one finish, and checks what is left.
async fn survive(tools: &[&str], kill: Kill) -> Survived {
    eprintln!("{tools:?} {kill:?}");
    let mut world = World::new("killed", tools).await;
    let process = match kill {
        Kill::At(failpoint) => world.serve_until(failpoint).await,
        Kill::DuringModelCall(number) => {
            world.model.hold_from(number);
            world.serve().await
        }
        Kill::DuringTool(tool) => {
            std::fs::write(world.options.path(&format!("hold-{tool}")), "").expect("the test's folder");
            world.serve().await
        }
    };
    world.begin(&process.client()).await;
    match kill {
        Kill::At(_) => {
            let (status, process) = process.ended().await;
            assert!(!status.success() && process.log().contains("failpoint"), "{}", process.log());
        }
        Kill::DuringModelCall(number) => {
            eventually("the model to be asked", || async {
                (world.model.bodies().len() > number).then_some(())
            })
            .await;
            if number % 2 == 1 {
                // It is a text: readers have been shown the first piece.
                rows(&world, "select count(*) from generation_chunks where session_id = $1", 1).await;
            }
            process.kill();
        }
        Kill::DuringTool(tool) => {
            eventually("the effect", || async { (world.effects(tool) == 1).then_some(()) }).await;
            let others = tools.len() as i64 - 1;
            rows(&world, "select count(*) from tool_calls where session_id = $1 and status = 'done'", others)
                .await;
            process.kill();
            std::fs::remove_file(world.options.path(&format!("hold-{tool}"))).expect("it was made");
        }
    }
    world.model.release();

    let process = world.serve().await;
    let traces = world.finish(&process.client()).await;
    assert!(process.terminate().success());
    Survived { world, traces }
}

async fn rows(world: &World, count: &'static str, expected: i64) {
    eventually(count, || async {
        let rows: i64 = world.database.value(count, &world.session_id).await;
        (rows == expected).then_some(())
    })
    .await;
}

/// Kills at each place, and compares the distinct request bodies with those of an undisturbed run, byte by byte.
async fn survive_all(kills: &[(&[&str], Kill)]) -> Vec<Survived> {
    let survived = join_all(kills.iter().map(async |(tools, kill)| {
        let survived = survive(tools, *kill).await;
        let undisturbed = World::undisturbed(tools).await;
        let bodies = survived.world.model.bodies();
        assert_eq!(
            distinct(&bodies),
            undisturbed.iter().collect::<Vec<_>>(),
            "{kill:?}: the same requests as undisturbed"
        );
        survived
    }));
    survived.await
}

#[tokio::test]
async fn a_kill_during_the_model_call_costs_that_call_and_nothing_else() {
    let kills = [(GUARDED, Kill::DuringModelCall(0)), (IDEMPOTENT, Kill::DuringModelCall(1))];
    for survived in survive_all(&kills).await {
        assert_eq!(survived.repeated(), 1);
        assert_eq!(survived.uncertain(), 0);
        let resumed = survived.traces.journal("GEN_RESUMED");
        assert_eq!(resumed.len(), 1);
        let attempts: Vec<&Value> =
            survived.traces.journal("LLM_CALLED").into_iter().map(|called| &called["attempt"]).collect();
        let resumed_at =
            survived.traces.events.iter().position(|event| event["type"] == "GEN_RESUMED").unwrap();
        let calls_before =
            survived.traces.events[..resumed_at].iter().filter(|event| event["type"] == "LLM_CALLED").count();
        assert_eq!(attempts[calls_before - 1], 1, "the attempt that was cut off");
        assert_eq!(attempts[calls_before], 2, "the one that replaced it");
        assert_eq!(attempts.len(), 5);
        let second = survived.traces.steps.iter().filter(|step| step["attempt"] == 2).count();
        assert_eq!(second, 1, "one step took two attempts");
    }
}

#[tokio::test]
async fn an_answer_that_was_not_committed_is_asked_for_again() {
    let kills = [
        (GUARDED, Kill::At("K10=1*return")),
        (GUARDED, Kill::At("K10_commit=1*return")),
        (IDEMPOTENT, Kill::At("K21=1*off->1*return")),
    ];
    for survived in survive_all(&kills).await {
        assert_eq!(survived.repeated(), 1);
        assert_eq!(survived.traces.journal("GEN_RESUMED").len(), 1);
        assert_eq!(survived.uncertain(), 0);
    }
}

#[tokio::test]
async fn a_kill_before_a_tool_starts_runs_it_once_and_asks_the_model_nothing_again() {
    let kill = Kill::At("K17=1*return");
    for survived in survive_all(&[(GUARDED, kill), (IDEMPOTENT, kill), (BOTH, kill)]).await {
        assert_eq!(survived.repeated(), 0);
        assert_eq!(survived.uncertain(), 0);
        for tool in ["charge", "reserve"] {
            let effects = survived.world.effects(tool);
            assert!(effects == 0 || effects == 2, "one effect a message: {tool} {effects}");
        }
    }
}

#[tokio::test]
async fn a_kill_during_a_guarded_call_tells_the_model_that_its_outcome_is_unknown() {
    let kills = [
        // Nobody can tell these three apart from the outside: the effect did not happen, happened, happened and ended.
        (Kill::At("K18=1*return"), 0),
        (Kill::DuringTool("charge"), 1),
        (Kill::At("K19=1*return"), 1),
    ];
    let undisturbed = World::undisturbed(GUARDED).await;
    let survived =
        join_all(kills.iter().map(async |(kill, effects)| (survive(GUARDED, *kill).await, *effects)));
    for (survived, effects) in survived.await {
        // The second message's charge is the other one.
        assert_eq!(survived.world.effects("charge"), effects + 1);
        assert_eq!(survived.repeated(), 0);
        assert_eq!(survived.uncertain(), 1);
        let bodies = survived.world.model.bodies();
        assert_eq!(bodies[0], undisturbed[0], "what was before is as it was");
        let next: Value = serde_json::from_str(&bodies[1]).unwrap();
        let result = next["messages"].as_array().unwrap().last().unwrap();
        assert_eq!(result["role"], "tool");
        assert!(result["content"].as_str().unwrap().contains("OUTCOME UNKNOWN"), "{result}");
        let statuses: Vec<&Value> = survived.traces.calls.iter().map(|call| &call["status"]).collect();
        assert_eq!(statuses, ["uncertain", "done"]);
    }
}

#[tokio::test]
async fn a_kill_during_an_idempotent_call_repeats_it_under_the_same_id() {
    let kills =
        [(Kill::At("K18=1*return"), 1), (Kill::DuringTool("reserve"), 2), (Kill::At("K19=1*return"), 2)];
    let table: Vec<_> = kills.iter().map(|(kill, _)| (IDEMPOTENT, *kill)).collect();
    for (survived, (_, times)) in survive_all(&table).await.into_iter().zip(kills) {
        assert_eq!(survived.repeated(), 0);
        assert_eq!(survived.uncertain(), 0);
        let effects = survived.world.options.effects();
        assert_eq!(effects.len(), times + 1, "and one of the second message");
        assert!(effects[..times].iter().all(|line| *line == effects[0]), "one key: {effects:?}");
        assert_eq!(survived.traces.calls[0]["attempts"], 2);
    }
}

#[tokio::test]
async fn a_kill_before_the_steps_commit_repeats_neither_tool_nor_model() {
    let kill = Kill::At("K21=1*return");
    for survived in survive_all(&[(GUARDED, kill), (IDEMPOTENT, kill), (BOTH, kill)]).await {
        assert_eq!(survived.repeated(), 0);
        assert_eq!(survived.uncertain(), 0);
        assert_eq!(survived.world.options.effects().len(), survived.traces.calls.len(), "each ran once");
        assert!(survived.traces.calls.iter().all(|call| call["attempts"] == 1));
    }
}

#[tokio::test]
async fn a_kill_right_after_a_steps_commit_repeats_nothing() {
    // The commits of a run: it begins, the turn with its calls, the step, the reply.
    let kill = Kill::At("K22=2*off->1*return");
    for survived in survive_all(&[(GUARDED, kill), (IDEMPOTENT, kill), (BOTH, kill)]).await {
        assert_eq!(survived.repeated(), 0);
        assert_eq!(survived.uncertain(), 0);
        assert_eq!(survived.world.options.effects().len(), survived.traces.calls.len(), "each ran once");
        assert!(survived.traces.journal("GEN_RESUMED").is_empty());
    }
}

#[tokio::test]
async fn a_kill_right_after_any_other_commit_repeats_nothing() {
    let kills = [
        (BOTH, Kill::At("K5=1*return")),
        (BOTH, Kill::At("K22=1*return")),
        (BOTH, Kill::At("K22=1*off->1*return")),
        (BOTH, Kill::At("K22=3*off->1*return")),
    ];
    for survived in survive_all(&kills).await {
        assert_eq!(survived.repeated(), 0);
        assert_eq!(survived.uncertain(), 0);
        assert_eq!(survived.world.options.effects().len(), survived.traces.calls.len(), "each ran once");
    }
}

#[tokio::test]
async fn of_two_calls_in_one_turn_only_the_open_one_is_recovered() {
    // The guarded one has settled: the idempotent one alone runs again, and the model sees nothing of it.
    let survived = survive_all(&[(BOTH, Kill::DuringTool("reserve"))]).await.remove(0);
    assert_eq!(survived.repeated(), 0);
    assert_eq!(survived.uncertain(), 0);
    assert_eq!((survived.world.effects("charge"), survived.world.effects("reserve")), (2, 3));

    // The other way about: the idempotent one is not run again, the guarded one is uncertain.
    let survived = survive(BOTH, Kill::DuringTool("charge")).await;
    assert_eq!(survived.repeated(), 0);
    assert_eq!(survived.uncertain(), 1);
    assert_eq!((survived.world.effects("charge"), survived.world.effects("reserve")), (2, 2));
    let next: Value = serde_json::from_str(&survived.world.model.bodies()[1]).unwrap();
    let messages = next["messages"].as_array().unwrap();
    let results: Vec<&str> =
        messages[messages.len() - 2..].iter().map(|m| m["content"].as_str().unwrap()).collect();
    assert!(results[0].contains("OUTCOME UNKNOWN"), "{results:?}");
    assert_eq!(results[1], "Reserved for 2.");
}

#[tokio::test]
async fn a_kill_around_a_send_leaves_one_mail() {
    const MAIL: &[&str] = &["compose_email"];
    let kills = [
        (MAIL, Kill::At("K12=1*return")),
        (MAIL, Kill::At("K13=1*return")),
        (MAIL, Kill::At("K21=1*return")),
        (MAIL, Kill::At("K22=2*off->1*return")),
    ];
    for survived in survive_all(&kills).await {
        let sent = async || {
            let sql = "select count(*) from deliveries where session_id = $1 and status = 'sent'";
            let sent: i64 = survived.world.database.value(sql, &survived.world.session_id).await;
            sent
        };
        // The model may have been asked for the reply when the deliverer killed its process.
        assert!(survived.repeated() <= 1);
        assert_eq!(sent().await, 2, "one a message");
        assert_eq!(survived.world.mails(), 2, "one a message");
        assert_eq!(survived.traces.journal("GEN_SENT").len(), 2);
    }
}

#[tokio::test]
async fn a_step_that_kills_its_worker_each_time_fails_its_run_and_not_its_neighbours() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| {
        let poisoned = body.to_string().contains("poison");
        if poisoned { Answer::call("charge", json!({"cents": 1})) } else { Answer::text("Fine.") }
    })
    .await;
    let options = Options::new()
        .model("openai/test")
        .config("[agents.default.limits]\nattempts = 4")
        .env("OPENAI_BASE_URL", &model.url)
        .env("FAILPOINTS", "K17=return");
    let store = database.store().await;
    let poisoned = wake(&store, "poisoned", "openai/test", "This is poison.").await;
    let mut neighbours = Vec::new();
    // The first attempt commits the message with the call; four more make no progress.
    for life in 1..=5 {
        neighbours.push(wake(&store, &format!("neighbour{life}"), "openai/test", "Hello.").await);
        let (status, process) = options.spawn(&database.url).ended().await;
        assert!(!status.success() && process.log().contains("failpoint"), "{}", process.log());
    }
    let process = options.serve(&database).await;
    let client = process.client();
    let failed = client.wait_for(&poisoned, "failed").await;
    let error = failed["error"].as_str().unwrap();
    assert!(error.contains("no progress in 4 attempts") && error.contains("Remedy: "), "{error}");
    for neighbour in &neighbours {
        client.wait_for(neighbour, "completed").await;
    }
    assert!(options.effects().is_empty());
    assert!(process.terminate().success());

    // Nothing else was wrong with it: without the poison the retry goes on where it stood.
    let mut calm = options.clone();
    calm.env.remove("FAILPOINTS");
    assert_eq!(model.bodies().iter().filter(|body| body.contains("poison")).count(), 1);
    let process = calm.serve(&database).await;
    store.retry(&poisoned, None).await.unwrap();
    eventually("the effect", || async { (!calm.effects().is_empty()).then_some(()) }).await;
    drop(process);
}

#[tokio::test]
async fn losing_every_connection_ends_no_process_and_loses_nothing() {
    let mut world = World::new("cut", BOTH).await;
    world.model.hold();
    let process = world.serve().await;
    let client = process.client();
    world.begin(&client).await;

    eventually("the first model call", || async { (world.model.bodies().len() == 1).then_some(()) }).await;
    cut_connections(&world.database, &process).await;
    std::fs::write(world.options.path("hold"), "").unwrap();
    world.model.hold_from(1);
    eventually("both effects", || async { (world.options.effects().len() == 2).then_some(()) }).await;
    cut_connections(&world.database, &process).await;
    std::fs::remove_file(world.options.path("hold")).unwrap();
    rows(&world, "select count(*) from generation_chunks where session_id = $1", 1).await;
    cut_connections(&world.database, &process).await;
    world.model.release();

    let traces = world.finish(&client).await;
    assert_eq!(world.model.bodies(), World::undisturbed(BOTH).await, "no model call was repeated");
    assert!(traces.journal("TOOL_FAILED_UNCERTAIN").is_empty());
    assert_eq!(world.options.effects().len(), 4);
    assert!(process.terminate().success(), "it is the same process");
}

/// Ends every connection of the process, and waits until its heart beats on a new one.
async fn cut_connections(database: &Database, process: &Process) {
    let (cut, at): (i64, String) = sqlx::query_as(
        "select count(pg_terminate_backend(pid)), clock_timestamp()::text from pg_stat_activity
        where datname = current_database() and application_name = 'wakeful'",
    )
    .fetch_one(&database.pool)
    .await
    .expect("pg_stat_activity");
    assert!(cut > 0);
    eventually("the heart to beat again", || async {
        let beats: i64 = sqlx::query_scalar(
            "select count(*) from workers where pid = $1 and beat_at > $2::text::timestamptz",
        )
        .bind(process.pid())
        .bind(&at)
        .fetch_one(&database.pool)
        .await
        .expect("workers");
        (beats == 1).then_some(())
    })
    .await;
}
