//! What row-level security costs: commits in the role of `serve`, and in a role with the same rights that it does not bind.
//!
//! Other rounds last seconds, and a checkpoint in one of them costs more than the policies. So the two take turns of half a
//! second, and each turn is compared with its neighbour.

use crate::commits::Shape;
use crate::fixture::Database;
use crate::report::{Progress, Report};
use crate::server::Server;
use crate::{Committers, SESSIONS};
use anyhow::Result;

const TURN_S: f64 = 0.5;
const SECTION: &str = "Row-level security";

pub async fn measure(
    server: &Server,
    quick: bool,
    report: &mut Report,
    progress: &mut Progress,
) -> Result<()> {
    let database = Database::create(server.url(), "policies").await?;
    let bound = database.store_as_runtime(SESSIONS as u32).await?;
    let exempt = database.store_as_exempt(SESSIONS as u32).await?;
    let mut pair = [Committers::new(bound, 0).await?, Committers::new(exempt, SESSIONS + 1).await?];
    let pairs = if quick { 6 } else { 24 };
    for (shape, what) in [(Shape::Step, "step commit"), (Shape::Turn, "tool turn")] {
        for (sessions, many) in [(SESSIONS, format!("{SESSIONS} sessions")), (1, "1 session".to_owned())] {
            progress.say(&format!("row-level security: {what}, {many}"));
            // Each connection prepares its statements, and Postgres settles on their plans.
            for committers in &mut pair {
                committers.round(shape, sessions, 2.0 * TURN_S).await?;
            }
            let mut rates = [Vec::new(), Vec::new()];
            for turn in 0..pairs {
                let order = if turn % 2 == 0 { [0, 1] } else { [1, 0] };
                for at in order {
                    let round = pair[at].round(shape, sessions, TURN_S).await?;
                    rates[at].push(round.steps as f64 / round.seconds);
                }
            }
            let [bound, exempt] = rates;
            let quotients: Vec<f64> = bound.iter().zip(&exempt).map(|(one, other)| one / other).collect();
            report.add(SECTION, format!("{what}, {many}"), "steps/s", &bound);
            report.add(SECTION, format!("{what}, {many}: without it"), "steps/s", &exempt);
            report.add(SECTION, format!("{what}, {many}: as a multiple of without"), "", &quotients);
        }
    }
    for Committers { store, sixteen, one } in pair {
        drop((sixteen, one));
        store.close().await;
    }
    database.remove().await
}
