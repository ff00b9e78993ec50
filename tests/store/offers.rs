//! A message whose statement claims its job for a queue of the same process.

use super::*;
use crate::support::proxy::{CutAt, Proxy};
use sqlx::postgres::PgListener;
use wakeful_store::queue::{Notifier, Offer};

/// A queue that rests, and what offers its slots.
struct Resting {
    claims: Claims,
    notifier: Notifier,
}

impl Resting {
    /// It looks for work once a minute, so a job that comes out of it was handed over or announced.
    fn start(store: &Store, slots: usize) -> Resting {
        let claims = Claims::start_with_poll(store, Kind::Step, slots, LEASE, Duration::from_secs(60));
        Resting { notifier: Notifier::start(store.clone(), &claims.news), claims }
    }

    async fn offer(&self) -> Offer {
        eventually("the queue rests", async || self.notifier.offer(Kind::Step)).await
    }
}

/// The workers of other processes, as far as they hear of jobs.
async fn others(world: &World) -> PgListener {
    let mut others = PgListener::connect(&world.database.url).await.unwrap();
    others.listen("wakeful_jobs").await.unwrap();
    others
}

/// What the others hear next.
async fn heard(others: &mut PgListener) -> String {
    let heard =
        tokio::time::timeout(crate::support::timeout(), others.recv()).await.expect("they are told").unwrap();
    heard.payload().to_owned()
}

async fn lease(world: &World) -> Option<i64> {
    sqlx::query_scalar("select lease from jobs").fetch_one(&world.database.pool).await.unwrap()
}

#[tokio::test]
async fn a_first_message_fills_the_offer_and_leaves_the_session_that_hydration_reads() {
    let world = World::new().await;
    let mut resting = Resting::start(&world.store, 1);
    let mut offer = resting.offer().await;
    assert!(resting.notifier.offer(Kind::Step).is_none(), "the only slot is offered");
    let mut new = new_session("c1", "c1");
    new.policy.model = Some("test/other".into());
    let woken = world.store.wake_for(&new, &message("Hello"), Some(&mut offer)).await.unwrap();
    let held = lease(&world).await;
    assert!(held.is_some(), "the message has claimed its job");
    assert!(offer.begin());
    let job = resting.claims.next().await;
    assert_eq!((Some(job.lease.token), job.session_id.as_ref()), (held, Some(&woken.session_id)));
    assert_eq!((job.attempt, job.stuck, job.died, job.step_number), (1, 1, 0, 1));
    let session = job.take_session().expect("the statement has made the session");
    assert_eq!(session, world.store.hydrate(&woken.session_id).await.unwrap());
    assert!(job.take_session().is_none(), "it is taken once");

    // The claim is as good as any other, and the run's end frees its slot.
    let mut driver = Driver { world: &world, session, job, policy: AgentPolicy::default() };
    driver.continues(Performed::Begun).await;
    assert_eq!(driver.commit(replied(vec![text("Hi.")])).await, Commit::Closed { opened: false });
    drop(driver);

    let mut offer = resting.offer().await;
    let again = world.store.wake_for(&new, &message("And then?"), Some(&mut offer)).await.unwrap();
    assert_eq!(again.session_id, woken.session_id);
    assert!(offer.begin());
    let job = resting.claims.next().await;
    assert_eq!(Some(job.lease.token), lease(&world).await);
    assert!(job.take_session().is_none(), "an older session is read");
    assert!(world.store.holds(&job.lease).await.unwrap());
}

#[tokio::test]
async fn a_message_that_opens_no_run_leaves_the_offer_unused() {
    let world = World::new().await;
    let resting = Resting::start(&world.store, 1);
    let mut offer = resting.offer().await;
    // The queue has not heard of this job.
    let session_id = world.wake("c1", "Hello").await;
    let joined = world.store.send_for(&session_id, &message("Are you there?"), Some(&mut offer)).await;
    assert_eq!(joined.unwrap().outcome, Acceptance::Queued);
    assert_eq!(lease(&world).await, None);
    assert!(!offer.begin());
}

#[tokio::test]
async fn a_job_whose_caller_went_away_is_given_back_and_so_is_its_slot() {
    let world = World::new().await;
    let mut resting = Resting::start(&world.store, 1);
    let mut offer = resting.offer().await;
    world.store.wake_for(&new_session("c1", "c1"), &message("Hello"), Some(&mut offer)).await.unwrap();
    let offered = lease(&world).await;
    assert!(offered.is_some());
    drop(offer);
    // Whoever gives it back tells the queue, which looks once a minute.
    let job = resting.claims.next().await;
    assert_ne!(Some(job.lease.token), offered);
    assert_eq!(Some(job.lease.token), lease(&world).await);
    assert_eq!((job.attempt, job.stuck, job.died), (1, 1, 0), "the claim for the message does not count");
}

#[tokio::test]
async fn a_job_is_given_back_if_the_answer_of_its_message_is_lost() {
    let world = World::new().await;
    let proxy = Proxy::start(&world.database.url);
    let store = Store::connect(&proxy.url, 4, "test").await.unwrap();
    let mut resting = Resting::start(&store, 1);
    let mut offer = resting.offer().await;
    proxy.cut_when("insert into conversation_counters", CutAt::BeforeAnswer);
    let lost = store.wake_for(&new_session("c1", "c1"), &message("Hello"), Some(&mut offer)).await;
    assert!(matches!(&lost, Err(error) if error.is_transient()), "{lost:?}");
    // The sender tries again, as every sender does whose message was not acknowledged.
    assert!(!offer.begin());
    let job = resting.claims.next().await;
    assert_eq!((job.attempt, job.died), (1, 0));
}

#[tokio::test]
async fn a_statement_that_was_refused_leaves_the_offer_for_nobody() {
    let world = World::new().await;
    let resting = Resting::start(&world.store, 1);
    // Both see no conversation. One is faster, and the other takes the way with locks.
    let (mut one, new) = (resting.offer().await, new_session("c1", "c1"));
    let [fast, slow] = [message("one"), message("two")];
    let (fast, slow) =
        tokio::join!(world.store.wake(&new, &fast), world.store.wake_for(&new, &slow, Some(&mut one)));
    assert_eq!(fast.unwrap().session_id, slow.unwrap().session_id);
    let held = lease(&world).await.is_some();
    assert_eq!(one.begin(), held, "either the offered statement made the job, or it did not");
}

#[tokio::test]
async fn a_queue_that_drains_gives_back_what_a_message_claimed_for_it() {
    let world = World::new().await;
    let mut others = others(&world).await;
    let mut resting = Resting::start(&world.store, 1);
    let mut offer = resting.offer().await;
    world.store.wake_for(&new_session("c1", "c1"), &message("Hello"), Some(&mut offer)).await.unwrap();
    resting.claims.close().await;
    assert!(offer.begin());
    eventually("the job is given back", async || lease(&world).await.is_none().then_some(())).await;
    assert_eq!(heard(&mut others).await, "step:");
    assert!(resting.notifier.offer(Kind::Step).is_none());
}

#[tokio::test]
async fn a_queue_that_drains_hands_over_what_it_has_not_begun() {
    let world = World::new().await;
    let mut others = others(&world).await;
    world.wake("c1", "Hello").await;
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
    eventually("it is claimed", async || lease(&world).await).await;
    claims.close().await;
    eventually("the job is given back", async || lease(&world).await.is_none().then_some(())).await;
    assert_eq!(heard(&mut others).await, "step:");
}

#[tokio::test]
async fn a_queue_that_drains_hands_over_what_it_has_not_begun_while_another_job_of_it_runs() {
    let world = World::new().await;
    let mut others = others(&world).await;
    let mut resting = Resting::start(&world.store, 3);
    let mut offer = resting.offer().await;
    world.store.wake_for(&new_session("c1", "c1"), &message("Hello"), Some(&mut offer)).await.unwrap();
    assert!(offer.begin());
    let runs = resting.claims.next().await;
    let [mut on_its_way, mut late] = [resting.offer().await, resting.offer().await];
    world.store.wake_for(&new_session("c2", "c2"), &message("Hello"), Some(&mut on_its_way)).await.unwrap();
    world.store.wake_for(&new_session("c3", "c3"), &message("Hello"), Some(&mut late)).await.unwrap();
    assert!(on_its_way.begin());
    // apalis asks for no more, and closes the queue when its last job has ended.
    resting.claims.stop();
    let held = "select count(*) from jobs where lease is not null";
    eventually("one is given back", async || (world.one(held).await == 2).then_some(())).await;
    assert!(late.begin());
    eventually("so is the other", async || (world.one(held).await == 1).then_some(())).await;
    assert_eq!([heard(&mut others).await, heard(&mut others).await], ["step:", "step:"]);
    assert!(world.store.holds(&runs.lease).await.unwrap());
}

#[tokio::test]
async fn a_queue_that_is_dropped_hands_over_what_it_has_not_begun_and_claims_no_more() {
    let world = World::new().await;
    let mut others = others(&world).await;
    let Resting { claims, notifier } = Resting::start(&world.store, 2);
    let mut offer = eventually("the queue rests", async || notifier.offer(Kind::Step)).await;
    world.store.wake_for(&new_session("c1", "c1"), &message("Hello"), Some(&mut offer)).await.unwrap();
    assert!(offer.begin());
    // As apalis does with the queue of a worker that failed, before it starts another one.
    drop(claims);
    eventually("the job is given back", async || lease(&world).await.is_none().then_some(())).await;
    assert_eq!(heard(&mut others).await, "step:");
    eventually("no queue claims", async || notifier.offer(Kind::Step).is_none().then_some(())).await;
    assert_eq!(lease(&world).await, None);
}

#[tokio::test]
async fn jobs_that_wait_go_before_a_message() {
    let world = World::new().await;
    for number in 0..3 {
        world.wake(&format!("c{number}"), "Hello").await;
    }
    let mut resting = Resting::start(&world.store, 1);
    let first = resting.claims.next().await;
    assert!(resting.notifier.offer(Kind::Step).is_none(), "its slot is taken");
    drop(first);
    // The queue takes the next one that waits before it rests again.
    let second = resting.claims.next().await;
    assert!(resting.notifier.offer(Kind::Step).is_none());
    drop(second);
    drop(resting.claims.next().await);
    drop(resting.offer().await);
}
