//! What a step costs before it begins: hydration by length of the transcript, and a claim by length of the
//! queue. Both as multiples of the cheapest statement, a prepared `select 1`.

use crate::fixture::{self, Claims, Database, Held};
use crate::server::Server;
use crate::wire::Relay;
use anyhow::Result;
use sqlx::PgConnection;
use std::time::Instant;
use wakeful_store::Store;
use wakeful_workflow::advance::{Next, Transition};

/// One kind of read at one size.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Read {
    pub size: usize,
    pub microseconds: f64,
    /// How many `select 1` take the same time.
    pub round_trips_worth: f64,
    pub round_trips: Option<f64>,
}

/// Hydrates sessions of `sizes` messages in turn.
pub async fn hydrate(database: &Database, sizes: &[usize], times: usize) -> Result<Vec<Read>> {
    let store = database.store(4).await?;
    let mut held = fixture::hold_sessions(&store, 0, sizes.len()).await?;
    for (one, size) in held.iter_mut().zip(sizes) {
        while one.session.records.len() < *size {
            let missing = size - one.session.records.len();
            let transition = fixture::step(&one.session);
            let records = transition.records.into_iter().take(missing).collect();
            // Messages only: the kind of record does not matter here.
            let transition = Transition { records, step: None, next: Next::SameStep, ..transition };
            one.commit(&store, &transition).await?;
        }
    }
    vacuum(database).await?;
    let mut connection = database.connect().await?;
    let mut ones = Vec::new();
    let mut each = vec![Vec::new(); sizes.len()];
    for _ in 0..times {
        ones.push(select_one(&mut connection).await?);
        for (one, times) in held.iter().zip(&mut each) {
            let began = Instant::now();
            store.hydrate(one.session.session_id.as_str()).await?;
            times.push(began.elapsed().as_secs_f64() * 1e6);
        }
    }
    let round_trips = count_round_trips(database, &held).await?;
    store.close().await;
    Ok(reads(sizes, &ones, each, round_trips))
}

async fn count_round_trips(database: &Database, held: &[Held]) -> Result<Option<f64>> {
    const TIMES: u32 = 10;
    let relay = Relay::start(&database.url)?;
    let Ok(store) = Store::connect(relay.url(), 1, "wakeful bench").await else { return Ok(None) };
    store.hydrate(held[0].session.session_id.as_str()).await?;
    let before = relay.traffic();
    for _ in 0..TIMES {
        store.hydrate(held[0].session.session_id.as_str()).await?;
    }
    let traffic = relay.traffic() - before;
    store.close().await;
    Ok(Some(traffic.round_trips as f64 / f64::from(TIMES)))
}

/// Claims jobs one by one, alternating between a small and a large queue.
pub async fn claim(small: &Database, large: &Database, sizes: [usize; 2], times: usize) -> Result<Vec<Read>> {
    let mut stores = Vec::new();
    let mut claims = Vec::new();
    for (database, size) in [small, large].into_iter().zip(sizes) {
        let mut connection = database.connect().await?;
        sqlx::query(
            "insert into jobs (kind, space_id, conversation_id, session_id, step_number, run_at)
            select 'step', 'bench', 'bench/' || n, 'sess_' || n, 1, clock_timestamp() - make_interval(secs => n)
            from generate_series(1, $1) n",
        )
        .bind(size as i32)
        .execute(&mut connection)
        .await?;
        vacuum(database).await?;
        let store = database.store(2).await?;
        claims.push(Claims::start(&store, 1));
        stores.push(store);
    }
    let mut connection = small.connect().await?;
    let mut ones = Vec::new();
    let mut each = vec![Vec::new(); sizes.len()];
    let mut jobs = vec![None, None];
    for _ in 0..times {
        ones.push(select_one(&mut connection).await?);
        for ((claims, job), times) in claims.iter_mut().zip(&mut jobs).zip(&mut each) {
            // The queue claims its next job when this one's slot is free.
            drop(job.take());
            let began = Instant::now();
            *job = Some(claims.next().await?);
            times.push(began.elapsed().as_secs_f64() * 1e6);
        }
    }
    drop(jobs);
    drop(claims);
    for store in stores {
        store.close().await;
    }
    Ok(reads(&sizes, &ones, each, None))
}

/// Returns the milliseconds of claims, one by one, after `finished` jobs have come and gone. With
/// `reader`, another connection still sees all of them, so that vacuum removes none.
pub async fn claim_after(server: &Server, finished: i32, reader: bool) -> Result<Vec<f64>> {
    const WAITING: i32 = 2000;
    const TIMES: usize = 200;
    let database = Database::create(server.url(), "claims").await?;
    let mut connection = database.connect().await?;
    let insert = "insert into jobs (kind, space_id, conversation_id, session_id, step_number, run_at)
        select 'step', 'bench', 'bench/' || n, 'sess_' || $2 || n, 1, clock_timestamp() - make_interval(secs => n)
        from generate_series(1, $1) n";
    sqlx::query(insert).bind(finished).bind("done").execute(&mut connection).await?;
    let mut snapshot = database.connect().await?;
    if reader {
        sqlx::query("begin isolation level repeatable read").execute(&mut snapshot).await?;
        sqlx::query("select count(*) from jobs").execute(&mut snapshot).await?;
    }
    sqlx::query("delete from jobs").execute(&mut connection).await?;
    sqlx::query(insert).bind(WAITING).bind("waits").execute(&mut connection).await?;
    vacuum(&database).await?;
    let store = database.store(2).await?;
    let mut claims = Claims::start(&store, 1);
    let (mut times, mut job) = (Vec::new(), None);
    for number in 0..TIMES + 5 {
        drop(job.take());
        let began = Instant::now();
        job = Some(claims.next().await?);
        // The first claims prepare their statement.
        if number >= 5 {
            times.push(began.elapsed().as_secs_f64() * 1e3);
        }
    }
    drop((job, claims));
    store.close().await;
    drop(snapshot);
    database.remove().await?;
    Ok(times)
}

async fn select_one(connection: &mut PgConnection) -> Result<f64> {
    let began = Instant::now();
    sqlx::query("select 1").fetch_one(connection).await?;
    Ok(began.elapsed().as_secs_f64() * 1e6)
}

/// Vacuums the database, so that autovacuum does not start in the middle of a round.
async fn vacuum(database: &Database) -> Result<()> {
    sqlx::query("vacuum analyze").execute(&mut database.connect().await?).await?;
    Ok(())
}

fn reads(sizes: &[usize], ones: &[f64], each: Vec<Vec<f64>>, round_trips: Option<f64>) -> Vec<Read> {
    let one = median(ones);
    sizes
        .iter()
        .zip(each)
        .map(|(size, times)| {
            let microseconds = median(&times);
            Read { size: *size, microseconds, round_trips_worth: microseconds / one, round_trips }
        })
        .collect()
}

/// The middle value, or the mean of the two in the middle.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match (sorted.get(sorted.len().saturating_sub(1) / 2), sorted.get(sorted.len() / 2)) {
        (Some(low), Some(high)) => (low + high) / 2.0,
        (_, _) => f64::NAN,
    }
}
