//! What a claim leaves to others, and what it takes from them.

use super::*;
use crate::support::proxy::{CutAt, Proxy};
use tokio_util::sync::CancellationToken;
use wakeful_store::queue::{Heartbeat, Served};

/// Jobs that have killed the processes that claimed them.
const SUSPECTS: &str = "update jobs set stuck = 2, lease = nextval('leases')";

#[tokio::test]
async fn a_suspect_that_has_made_progress_lets_the_next_one_in() {
    let world = World::new().await;
    world.wake("c1", "Hello.").await;
    world.wake("c2", "Hello.").await;
    world.run_sql(SUSPECTS).await;
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
    let first = claims.next().await;
    assert_eq!(first.stuck, 3);
    assert!(first.has_room_beside(), "it takes the place for suspects, and no slot");
    first.made_progress();
    assert!(!first.has_room_beside(), "it is a job like others, and has the only slot");
    // The slot is taken, and the place for suspects is free.
    assert_eq!(claims.next().await.stuck, 3);
    drop(first);
    world
        .run_sql("update jobs set stuck = 0, lease = null, run_at = clock_timestamp() - interval '1 second'")
        .await;
    claims.next().await;
    claims.stop();
}

#[tokio::test]
async fn a_suspect_keeps_its_place_until_a_slot_is_free() {
    let world = World::new().await;
    world.wake("c1", "Hello.").await;
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
    let other = claims.next().await;
    world.wake("c2", "Hello.").await;
    world
        .run_sql("update jobs set stuck = 2, lease = nextval('leases') where run_at <= clock_timestamp()")
        .await;
    let suspect = claims.next().await;
    assert_eq!(suspect.stuck, 3, "a full queue takes one suspect");
    suspect.made_progress();
    drop(other);
    assert!(suspect.has_room_beside(), "it has not taken the slot of the other, which still ran");
    suspect.made_progress();
    assert!(!suspect.has_room_beside());
    claims.stop();
}

#[tokio::test]
async fn a_claim_whose_answer_is_lost_gives_its_jobs_back() {
    let world = World::new().await;
    let proxy = Proxy::start(&world.database.url);
    let store = Store::connect(&proxy.url, 4, "test").await.unwrap();
    world.wake("c1", "Hello.").await;
    world.wake("c2", "Hello.").await;
    proxy.cut_when("with ready as materialized", CutAt::BeforeAnswer);
    let mut claims = Claims::start(&store, Kind::Step, 2, LEASE);
    for _ in 0..2 {
        let job = claims.next().await;
        assert_eq!((job.attempt, job.stuck, job.died), (1, 1, 0), "the lost claim does not count");
    }
    assert_eq!(proxy.cut_count(), 1);
    claims.stop();
}

#[tokio::test]
async fn a_suspect_whose_claim_is_not_answered_stays_a_suspect() {
    let world = World::new().await;
    let proxy = Proxy::start(&world.database.url);
    let store = Store::connect(&proxy.url, 4, "test").await.unwrap();
    world.wake("c1", "Hello.").await;
    world.run_sql(SUSPECTS).await;
    proxy.cut_when("with ready as materialized", CutAt::BeforeAnswer);
    let mut claims = Claims::start(&store, Kind::Step, 1, LEASE);
    let job = claims.next().await;
    assert_eq!((job.stuck, job.died), (3, 1), "one worker died");
    assert!(job.has_room_beside(), "it takes no slot");
    assert_eq!(proxy.cut_count(), 1);
    claims.stop();
}

#[tokio::test]
async fn a_claim_of_left_steps_whose_answer_is_lost_gives_them_back() {
    let world = World::new().await;
    let proxy = Proxy::start(&world.database.url);
    let store = Store::connect(&proxy.url, 4, "test").await.unwrap();
    world.wake("c1", "Hello.").await;
    let mut lacks = Claims::start(&world.store, Kind::Step, 1, LEASE);
    let job = lacks.next().await;
    lacks.stop();
    let hour = Duration::from_secs(3600);
    world.store.leave(&job.lease, "default", hour).await.unwrap();
    drop(job);
    proxy.cut_when("as served (held_by, space_id)", CutAt::BeforeAnswer);
    let served = [Served { agent: "default".into(), space_id: None }];
    let mut has = Claims::start_with_agents(&store, &served, LEASE);
    let job = has.next().await;
    assert_eq!((job.attempt, job.stuck, job.died), (1, 1, 0), "the lost claim does not count");
    assert_eq!(proxy.cut_count(), 1);
    has.stop();
}

/// A process with one slot, whose way to the server can be cut.
struct Worker {
    proxy: Proxy,
    claims: Claims,
    beats: CancellationToken,
}

impl Worker {
    async fn start(world: &World, name: &str) -> Worker {
        let lease = Duration::from_secs(8);
        let proxy = Proxy::start(&world.database.url);
        let store = Store::connect(&proxy.url, 4, name).await.unwrap();
        let claims = Claims::start(&store, Kind::Step, 1, lease);
        let beats = CancellationToken::new();
        let heartbeat = Heartbeat {
            store,
            worker_id: Arc::from(name),
            listed: true,
            host: "here".to_owned(),
            concurrency: 1,
            connections: 4,
            agents: Vec::new(),
            lease,
            every: Duration::from_secs(1),
            holdings: Arc::clone(&claims.holdings),
            drain_asked: CancellationToken::new(),
        };
        tokio::spawn(heartbeat.run(beats.clone()));
        Worker { proxy, claims, beats }
    }

    fn cut_off(&self) {
        self.proxy.refuse(true);
        self.proxy.cut();
    }
}

#[tokio::test]
async fn who_comes_back_first_after_an_outage_longer_than_a_lease_leaves_the_others_their_jobs() {
    let world = World::new().await;
    let mut holder = Worker::start(&world, "holder").await;
    world.wake("c1", "Hello.").await;
    let job = holder.claims.next().await;
    let mut other = Worker::start(&world, "other").await;
    world.until("select count(*) = 2 from workers").await;

    holder.cut_off();
    other.cut_off();
    world.until("select run_at < clock_timestamp() - interval '1 second' from jobs").await;
    world.run_sql("create table cut as select clock_timestamp() as ended").await;
    other.proxy.refuse(false);
    world.until("select beat_at > ended from workers, cut where worker_id = 'other'").await;
    holder.proxy.refuse(false);
    world.until("select beat_at > ended from workers, cut where worker_id = 'holder'").await;
    assert!(world.store.holds(&job.lease).await.unwrap(), "it goes on");
    assert!(!job.lease.lost().is_cancelled());

    // Later it takes what nobody keeps.
    holder.claims.stop();
    holder.beats.cancel();
    assert_eq!(other.claims.next().await.lease.job_id, job.lease.job_id);
    other.claims.stop();
    other.beats.cancel();
}
