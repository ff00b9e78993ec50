//! Whom a process without a worker tells of a job.

use super::*;
use futures::future::select_all;
use sqlx::postgres::PgListener;
use tokio_util::sync::CancellationToken;
use wakeful_store::queue::{EVERY_SESSION, Job, News, Notifier, heard};

/// Only what it is told of makes it look for work.
const NEVER: Duration = Duration::from_secs(3600);

/// A process that takes messages and has no worker, and what it sends.
struct Api {
    notifier: Notifier,
    sent: PgListener,
    /// Of the last session that it announced.
    sessions: u32,
}

impl Api {
    async fn start(world: &World) -> Api {
        let mut sent = PgListener::connect(&world.database.url).await.unwrap();
        sent.listen_all(["wakeful_jobs", "wakeful_sessions"]).await.unwrap();
        let news = News::listen(&world.store, CancellationToken::new());
        Api { notifier: Notifier::start(world.store.clone(), &news), sent, sessions: 0 }
    }

    /// All that was said of jobs until now, also by the others.
    async fn said(&mut self) -> Vec<String> {
        // This comes after what the process has to say of the jobs before it.
        self.sessions += 1;
        let last = format!("sess_{}", self.sessions);
        self.notifier.session(&last);
        let mut said = Vec::new();
        loop {
            let heard = tokio::time::timeout(crate::support::timeout(), self.sent.recv());
            let heard = heard.await.expect("the session is announced").unwrap();
            if heard.payload() == last {
                return said;
            }
            if heard.channel() == "wakeful_jobs" {
                said.push(heard.payload().to_owned());
            }
        }
    }
}

/// A worker of another process.
struct Worker {
    claims: Claims,
    notifier: Notifier,
}

impl Worker {
    /// It listens when this returns.
    async fn start(world: &World, slots: usize) -> Worker {
        let claims = Claims::start_with_poll(&world.store, Kind::Step, slots, LEASE, NEVER);
        let notifier = Notifier::start(world.store.clone(), &claims.news);
        heard(&mut claims.news.sessions(), EVERY_SESSION).await;
        Worker { claims, notifier }
    }

    /// A worker with one slot, which a job has.
    async fn full(world: &World) -> (Worker, Job) {
        world.wake("first", "Hello").await;
        let mut worker = Worker::start(world, 1).await;
        let job = worker.claims.next().await;
        (worker, job)
    }

    fn id(&self) -> &str {
        &self.claims.worker_id
    }
}

async fn beats(world: &World, worker_id: &str) {
    let beat =
        "insert into workers (worker_id, host, pid, version, concurrency) values ($1, 'host', 1, '0', 1)";
    sqlx::query(beat).bind(worker_id).execute(&world.database.pool).await.unwrap();
}

#[tokio::test]
async fn of_three_workers_one_is_told_of_a_job() {
    const JOBS: usize = 20;
    let world = World::new().await;
    let mut workers = [
        Worker::start(&world, JOBS).await,
        Worker::start(&world, JOBS).await,
        Worker::start(&world, JOBS).await,
    ];
    for worker in &workers {
        beats(&world, worker.id()).await;
    }
    let mut api = Api::start(&world).await;
    let (mut jobs, mut told_to_all) = (Vec::new(), 0);
    for number in 0..JOBS {
        let session_id = world.wake(&format!("c{number}"), "Hello").await;
        api.notifier.job(Kind::Step);
        let said = api.said().await;
        let [said] = said.as_slice() else { panic!("said {said:?}") };
        let named = said.strip_prefix('@').and_then(|said| said.strip_suffix(" step:"));
        assert!(workers.iter().any(|worker| Some(worker.id()) == named), "no worker is called so: {said}");
        let claims = workers.iter_mut().map(|worker| Box::pin(worker.claims.next()));
        let (job, ..) = select_all(claims).await;
        assert_eq!(job.session_id, Some(session_id));
        jobs.push(job);
        // On a busy machine it may be claimed too late.
        told_to_all += api.said().await.len();
    }
    assert!(told_to_all < JOBS, "each time, all are told");
}

#[tokio::test]
async fn a_worker_without_room_tells_the_others() {
    let world = World::new().await;
    let (full, _job) = Worker::full(&world).await;
    let mut other = Worker::start(&world, 1).await;
    let session_id = world.wake("second", "Hello").await;
    // No process looks later whether anybody has taken it.
    let named = "select pg_notify('wakeful_jobs', '@' || $1 || ' step:')";
    sqlx::query(named).bind(full.id()).execute(&world.database.pool).await.unwrap();
    assert_eq!(other.claims.next().await.session_id, Some(session_id));
}

#[tokio::test]
async fn what_a_dead_worker_was_told_of_all_hear() {
    let world = World::new().await;
    let mut other = Worker::start(&world, 1).await;
    beats(&world, "w_gone").await;
    let mut api = Api::start(&world).await;
    let session_id = world.wake("c1", "Hello").await;
    api.notifier.job(Kind::Step);
    assert_eq!(api.said().await, ["@w_gone step:"]);
    assert_eq!(other.claims.next().await.session_id, Some(session_id));
    assert_eq!(api.said().await, ["step:"]);
}

#[tokio::test]
async fn a_worker_that_is_silent_or_drains_or_is_the_same_process_is_not_named() {
    let world = World::new().await;
    let (full, _job) = Worker::full(&world).await;
    for worker_id in ["w_silent", "w_drains", full.id()] {
        beats(&world, worker_id).await;
    }
    world
        .run_sql(
            "update workers set beat_at = beat_at - case when worker_id = 'w_silent' then interval '1 minute' else '0' end,
                drain_asked_at = case when worker_id = 'w_drains' then clock_timestamp() end",
        )
        .await;
    let mut api = Api::start(&world).await;
    full.notifier.job(Kind::Step);
    let mut said = Vec::new();
    while said.is_empty() {
        said = api.said().await;
    }
    assert_eq!(said, ["step:"]);
}
