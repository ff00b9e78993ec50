//! `kill -9` anywhere, then a fresh process. A checker then reads only what is left in the database: one
//! reply per message, dense numbers, no effect twice, and no more repeated model calls than the kill itself
//! cost.
//!
//! `table.rs` has one row per kill. The files beside it test what is special about some of them. Tests are
//! named after the kill points of `tests/README.md`.

mod arrival;
mod connection;
mod files;
mod fork;
mod poison;
pub mod repository;
mod step;
mod table;

use crate::stream::Reader;
use crate::support::checker::{Traces, distinct};
use crate::support::{Process, World, eventually};
use futures::future::join_all;

const GUARDED: &[&str] = &["charge"];
const IDEMPOTENT: &[&str] = &["reserve"];
const BOTH: &[&str] = &["charge", "reserve"];

/// How the first process ends.
#[derive(Clone, Copy, Debug)]
enum Kill {
    /// It kills itself at a failpoint.
    At(&'static str),
    /// From outside, while the model's answer with this number is half sent.
    DuringModelCall(usize),
    /// From outside, in the middle of this tool, after the calls beside it have settled.
    DuringTool(&'static str),
}

/// One kill of a process in its first run, and what the conversation's two messages leave in total.
#[derive(Clone, Copy, Debug)]
struct Row {
    k: &'static str,
    /// The tools that the model calls in parallel, for each of the two messages.
    tools: &'static [&'static str],
    kill: Kill,
    /// Model calls that are made again.
    repeated: usize,
    /// Calls that end as uncertain: their effect may have happened or not. If this is 0, the distinct request bodies equal
    /// those of an undisturbed run, byte for byte.
    uncertain: usize,
    /// Effects of `charge` and of `reserve`.
    effects: (usize, usize),
}

/// A run that was killed once and then continued.
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

/// Kills at each row with this name, and checks what is left against the row.
async fn survive_rows(k: &str) -> Vec<(&'static Row, Survived)> {
    survive_those(k, |_| true).await
}

/// Like [`survive_rows`], at those of the rows that are `wanted`.
async fn survive_those(k: &str, wanted: impl Fn(&Row) -> bool) -> Vec<(&'static Row, Survived)> {
    let chosen: Vec<&Row> = table::ROWS.iter().filter(|row| row.k == k && wanted(row)).collect();
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

/// Returns `None` if the run ended without the kill; the caller then tries again. It happens on a busy
/// machine: the heartbeat finds the job of the finished run gone before the step learns that its own commit
/// succeeded. The step then drops its claim as stale and never reaches the failpoint behind that commit.
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
            world.model.asked(number + 1).await;
            if number % 2 == 1 {
                // Odd answers are text, so readers have been shown the first piece.
                let mut reader = Reader::open(&process.client(), &world.session_id, None).await;
                reader.until("gen_chunk").await;
                rows(&world, "select count(*) from generation_chunks where session_id = $1", 1).await;
            }
            process.kill();
        }
        Kill::DuringTool(tool) => {
            world.has_effect(tool).await;
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

/// Returns whether the process dies before its run is over and its messages are sent.
async fn dies(process: &mut Process, world: &World) -> bool {
    let status = "select case when exists (select from jobs) then 'busy' else status end
        from conversation_sessions where session_id = $1";
    let end = process.end();
    let over = eventually("its death, or the end of its run", || async {
        // The worker logs this after the last failpoint of a claim.
        if !process.log().contains("The claim is over") {
            return None;
        }
        let status: String = world.database.value(status, &world.session_id).await;
        (status == "completed").then_some(())
    });
    tokio::select! {
        () = end.reached() => true,
        () = over => process.has_ended(),
    }
}

async fn rows(world: &World, count: &'static str, expected: i64) {
    eventually(count, || async {
        let rows: i64 = world.database.value(count, &world.session_id).await;
        (rows == expected).then_some(())
    })
    .await;
}
