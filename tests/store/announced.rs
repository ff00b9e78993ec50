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
    /// The number of the last session that it announced.
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
    /// It listens and rests when this returns.
    async fn start(world: &World, slots: usize) -> Worker {
        let claims = Claims::start_with_poll(&world.store, Kind::Step, slots, LEASE, NEVER);
        let notifier = Notifier::start(world.store.clone(), &claims.news);
        heard(&mut claims.news.sessions(), EVERY_SESSION).await;
        let worker = Worker { claims, notifier };
        worker.rests().await;
        worker
    }

    /// Waits until it has claimed all that it had heard of.
    async fn rests(&self) {
        drop(eventually("the worker rests", async || self.notifier.offer(Kind::Step)).await);
    }

    /// A worker with one slot, which a job has.
    async fn full(world: &World) -> (Worker, Job) {
        let mut worker = Worker::start(world, 1).await;
        world.wake("first", "Hello").await;
        worker.notifier.job(Kind::Step);
        let job = worker.claims.next().await;
        (worker, job)
    }

    fn id(&self) -> &str {
        &self.claims.worker_id
    }
}

/// Its heartbeat does not grow old during a test.
async fn beats(world: &World, worker_id: &str) {
    let beat = "insert into workers (worker_id, host, pid, version, concurrency, beat_at)
        values ($1, 'host', 1, '0', 1, clock_timestamp() + interval '1 hour')";
    sqlx::query(beat).bind(worker_id).execute(&world.database.pool).await.unwrap();
}

#[tokio::test]
async fn of_three_workers_one_is_told_of_each_job() {
    const ROUNDS: usize = 10;
    let world = World::new().await;
    let mut workers = [
        Worker::start(&world, 2 * ROUNDS).await,
        Worker::start(&world, 2 * ROUNDS).await,
        Worker::start(&world, 2 * ROUNDS).await,
    ];
    for worker in &workers {
        beats(&world, worker.id()).await;
    }
    let mut api = Api::start(&world).await;
    let (mut jobs, mut told_to_all) = (Vec::new(), 0);
    for round in 0..ROUNDS {
        // The second one comes while it is not yet time to look whether the first one waits.
        for job in ["first", "second"] {
            let session_id = world.wake(&format!("{job} of {round}"), "Hello").await;
            api.notifier.job(Kind::Step);
            let claims = workers.iter_mut().map(|worker| Box::pin(worker.claims.next()));
            let (job, ..) = select_all(claims).await;
            assert_eq!(job.session_id, Some(session_id));
            jobs.push(job);
        }
        let mut said = api.said().await;
        said.append(&mut api.said().await);
        let named = said.iter().filter_map(|said| said.strip_prefix('@')?.strip_suffix(" step:"));
        let named: Vec<&str> = named.collect();
        assert!(!named.is_empty(), "nobody is named: {said:?}");
        assert!(named.iter().all(|named| workers.iter().any(|worker| worker.id() == *named)), "{named:?}");
        // On a busy machine a job may be claimed too late.
        told_to_all += usize::from(named.len() < said.len());
    }
    assert!(told_to_all <= ROUNDS / 2, "all are told in {told_to_all} of {ROUNDS} rounds");
}

#[tokio::test]
async fn a_worker_without_room_or_without_a_queue_tells_the_others() {
    let world = World::new().await;
    let (full, _job) = Worker::full(&world).await;
    let drained = Worker::start(&world, 1).await;
    drained.claims.stop.cancel();
    let has_ended = async || drained.notifier.offer(Kind::Step).is_none().then_some(());
    eventually("its queue has ended", has_ended).await;
    let mut other = Worker::start(&world, 2).await;
    for worker in [full.id(), drained.id()] {
        let session_id = world.wake(worker, "Hello").await;
        // No process looks later whether anybody has taken it.
        let named = "select pg_notify('wakeful_jobs', '@' || $1 || ' step:')";
        sqlx::query(named).bind(worker).execute(&world.database.pool).await.unwrap();
        let job = other.claims.next().await;
        assert_eq!(job.session_id, Some(session_id));
        world.store.end_job(&job.lease).await.unwrap();
    }
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
            "update workers set beat_at = beat_at - case when worker_id = 'w_silent' then interval '61 minutes' else '0' end,
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
