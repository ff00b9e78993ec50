//! Which commits share a statement, and when a lane takes them.

use super::waiting::{Connected, Queue, Writing};
use super::*;
use futures::FutureExt;
use std::collections::VecDeque;

/// What a lane takes now, after it has let others join.
fn now(waiting: &Waiting) -> Option<(Vec<Request>, Writing<'_>)> {
    let mut next = std::pin::pin!(waiting.next());
    for _ in 0..=YIELDS {
        if let Some(taken) = next.as_mut().now_or_never() {
            return taken;
        }
    }
    None
}

fn request(session: &str, bytes: usize) -> (Request, oneshot::Receiver<Reported>) {
    let (report, reported) = oneshot::channel();
    let rows = Rows { session_id: session.to_owned(), state: Some("x".repeat(bytes)), ..Rows::default() };
    (Request::new(Arc::new(rows), report), reported)
}

/// The sessions of each statement, one statement after the other.
fn statements(requests: &[(&str, usize)]) -> Vec<Vec<String>> {
    let (requests, _reported): (VecDeque<_>, Vec<_>) =
        requests.iter().map(|(session, bytes)| request(session, *bytes)).unzip();
    let mut queue = Queue { requests, ..Queue::default() };
    std::iter::from_fn(|| Some(queue.take()).filter(|taken| !taken.is_empty()))
        .map(|taken| taken.iter().map(|request| request.rows.session_id.clone()).collect())
        .collect()
}

#[test]
fn a_statement_has_its_sessions_once_and_in_order() {
    assert_eq!(statements(&[("b", 1), ("a", 1), ("b", 1), ("c", 1)]), [vec!["a", "b", "c"], vec!["b"]]);
}

#[test]
fn a_statement_has_at_most_16_sessions_and_about_1_mb() {
    let names: Vec<String> = (0..20).map(|number| format!("s{number:02}")).collect();
    let many: Vec<(&str, usize)> = names.iter().map(|name| (name.as_str(), 1)).collect();
    let lengths: Vec<usize> = statements(&many).iter().map(Vec::len).collect();
    assert_eq!(lengths, [16, 4]);
    let large = [("a", 600_000), ("b", 400_000), ("c", 400_000), ("d", 9_000_000), ("e", 1)];
    assert_eq!(statements(&large), [vec!["a", "b"], vec!["c"], vec!["d"], vec!["e"]]);
}

#[tokio::test]
async fn commits_gather_while_a_lane_writes_until_they_are_many_or_one_is_late() {
    let waiting = Waiting::default();
    let push = |name: &str| {
        let (request, reported) = request(name, 1);
        waiting.lock().requests.push_back(request);
        reported
    };
    let _first = push("first");
    let (taken, first_lane) = waiting.next().await.unwrap();
    assert_eq!(taken.len(), 1, "a lone commit waits for nothing");
    let mut reports: Vec<_> = (1..ENOUGH).map(|number| push(&format!("s{number:02}"))).collect();
    assert!(now(&waiting).is_none(), "they wait for the lane that writes");
    reports.push(push("last"));
    let (taken, second_lane) = now(&waiting).unwrap();
    assert_eq!(taken.len(), ENOUGH, "they are many");

    let _late = push("late");
    drop(second_lane);
    assert!(now(&waiting).is_none(), "the first lane still writes");
    waiting.lock().late = true;
    let (taken, third) = now(&waiting).unwrap();
    assert_eq!(taken.len(), 1);
    drop((third, first_lane));
    let _next = push("next");
    assert!(now(&waiting).is_some());
}

#[tokio::test(start_paused = true)]
async fn a_late_commit_that_finds_no_place_in_a_statement_goes_to_the_other_lane() {
    let waiting = Waiting::default();
    let push = |name: &str| {
        let (request, reported) = request(name, 1);
        waiting.lock().requests.push_back(request);
        reported
    };
    let names: Vec<String> = (0..=SESSIONS).map(|number| format!("s{number:02}")).collect();
    let _reports: Vec<_> = names.iter().map(|name| push(name)).collect();
    tokio::time::sleep(PATIENCE * 2).await;
    let _new = push("new");
    let (taken, _first_lane) = now(&waiting).unwrap();
    assert_eq!(taken.len(), SESSIONS);
    let (taken, _second_lane) = now(&waiting).unwrap();
    assert_eq!(taken.len(), 2, "with the late one goes what waits anyway");
    let _newer = push("newer");
    assert!(now(&waiting).is_none(), "it is not late");
}

#[tokio::test]
async fn tasks_that_can_run_join_the_statement_of_a_lane_that_is_about_to_write() {
    let waiting = Arc::new(Waiting::default());
    let push = |waiting: &Waiting, name: &str| {
        let (request, reported) = request(name, 1);
        waiting.lock().requests.push_back(request);
        Some(reported)
    };
    let _first = push(&waiting, "first");
    let joins = tokio::spawn({
        let waiting = Arc::clone(&waiting);
        async move { push(&waiting, "second") }
    });
    let (taken, lane) = waiting.next().await.unwrap();
    assert_eq!(taken.len(), 2);
    drop((taken, lane, joins.await.unwrap()));
}

#[tokio::test(start_paused = true)]
async fn of_two_idle_lanes_one_gives_its_connection_back() {
    let waiting = Waiting::default();
    let mut first = Connected::new(&waiting);
    let alone = tokio::time::timeout(KEPT_IDLE * 100, waiting.next_of(&mut first)).await;
    assert!(alone.is_err(), "the only connection is kept");
    let mut second = Connected::new(&waiting);
    assert!(matches!(waiting.next_of(&mut second).await, Next::Idle));
    drop(second);
    let alone = tokio::time::timeout(KEPT_IDLE * 100, waiting.next_of(&mut first)).await;
    assert!(alone.is_err(), "the last connection is kept");
    let (request, _reported) = request("a", 1);
    waiting.lock().requests.push_back(request);
    assert!(matches!(waiting.next_of(&mut first).await, Next::Commits(..)));
    drop(first);
    assert_eq!(waiting.lock().connected, 0);
}

#[tokio::test(start_paused = true)]
async fn commits_have_no_connection_as_soon_as_the_last_lane_has_lost_its_own() {
    let waiting = Waiting::default();
    // Nothing listens on port 1.
    let server = Server::new("postgres://127.0.0.1:1/none", "test").unwrap();
    // A lane that is idle does not know yet that its connection is dead.
    let idle = Connected::new(&waiting);
    let mut tries = std::pin::pin!(waiting.without_connection(&server, sqlx::Error::PoolClosed));
    assert!(tokio::time::timeout(Duration::from_secs(60), &mut tries).await.is_err());
    assert_eq!(server.links.all_lost(), []);
    drop(idle);
    assert!(tokio::time::timeout(Duration::from_secs(60), &mut tries).await.is_err());
    let lost: Vec<_> = server.links.all_lost().into_iter().map(|(name, _)| name).collect();
    assert_eq!(lost, ["commits"]);
}

#[test]
fn a_commit_whose_caller_went_away_is_left_out() {
    let (gone, _) = request("a", 1);
    let (here, _reported) = request("b", 1);
    let mut queue = Queue { requests: [gone, here].into(), ..Queue::default() };
    let taken = queue.take();
    assert_eq!(taken.len(), 1);
    assert_eq!(taken[0].rows.session_id, "b");
}
