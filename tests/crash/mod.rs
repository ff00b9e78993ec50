//! `kill -9` anywhere, then a fresh process. Seen each time by a checker that reads only what is left: one reply a
//! message, dense numbers, no effect twice, and no more model calls than the kill itself cost.
//!
//! `table.rs` has a row a kill; the files beside it ask what is particular to a few of them. Tests are named after the
//! kill points of `tests/README.md`.

mod arrival;
mod connection;
mod fork;
mod poison;
mod step;
mod table;

use crate::support::checker::{Traces, distinct};
use crate::support::{PATIENCE, Process, World, eventually};
use futures::future::join_all;
use std::time::{Duration, Instant};

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

/// One kill of a process in its first run, and what the two messages of the conversation leave together.
#[derive(Clone, Copy, Debug)]
struct Row {
    k: &'static str,
    /// What the model calls, side by side, for each of the two messages.
    tools: &'static [&'static str],
    kill: Kill,
    /// Model calls that are made again.
    repeated: usize,
    /// Calls of which nobody can know whether they had their effect. Without any, the distinct request bodies are those
    /// of an undisturbed run, byte by byte.
    uncertain: usize,
    /// Effects of `charge` and of `reserve`.
    effects: (usize, usize),
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

/// Kills at each row of this name, and holds what is left against the row.
async fn survive_rows(k: &str) -> Vec<(&'static Row, Survived)> {
    let chosen: Vec<&Row> = table::ROWS.iter().filter(|row| row.k == k).collect();
    assert!(!chosen.is_empty(), "the table has no {k}");
    let survived = join_all(chosen.into_iter().map(async |row| {
        let survived = survive(row.tools, row.kill).await;
        assert_eq!(survived.repeated(), row.repeated, "model calls that were made again: {row:?}");
        assert_eq!(survived.uncertain(), row.uncertain, "uncertain calls: {row:?}");
        let effects = (survived.world.effects("charge"), survived.world.effects("reserve"));
        assert_eq!(effects, row.effects, "effects: {row:?}");
        if row.uncertain == 0 {
            let undisturbed = World::undisturbed(row.tools).await;
            let bodies = survived.world.model.bodies();
            let undisturbed: Vec<&String> = undisturbed.iter().collect();
            assert_eq!(distinct(&bodies), undisturbed, "the same requests as undisturbed: {row:?}");
        }
        (row, survived)
    }));
    survived.await
}

/// Kills a process in its first run, lets another one finish, and checks what is left.
async fn survive(tools: &[&str], kill: Kill) -> Survived {
    for _ in 0..3 {
        if let Some(survived) = try_survive(tools, kill).await {
            return survived;
        }
    }
    panic!("the process was never killed: {tools:?} {kill:?}");
}

/// `None`: the run ended without the kill. On a busy machine the heart may find the job of a run that was just closed gone
/// before the step hears of its own commit: the claim is dropped as stale, short of the failpoint behind that commit. Nothing
/// was shown then, and it is to be tried again.
async fn try_survive(tools: &[&str], kill: Kill) -> Option<Survived> {
    eprintln!("{tools:?} {kill:?}");
    let mut world = World::new("killed", tools).await;
    let mut process = match kill {
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
            if !dies(&mut process, &world).await {
                return None;
            }
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
    Some(Survived { world, traces })
}

/// Whether the process dies before its run is over.
async fn dies(process: &mut Process, world: &World) -> bool {
    let began = Instant::now();
    let status = "select status from conversation_sessions where session_id = $1";
    loop {
        if process.has_ended() {
            return true;
        }
        // Written after the last failpoint of a claim.
        if process.log().contains("The claim is over") {
            let status: String = world.database.value(status, &world.session_id).await;
            if status == "completed" {
                return process.has_ended();
            }
        }
        assert!(began.elapsed() < PATIENCE, "it neither dies nor ends its run:\n{}", process.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn rows(world: &World, count: &'static str, expected: i64) {
    eventually(count, || async {
        let rows: i64 = world.database.value(count, &world.session_id).await;
        (rows == expected).then_some(())
    })
    .await;
}
