//! Seeded storms: several workers and an API, several sessions, and every kind of failure at once. After each
//! storm a checker reads what is left. It shares no code with the product.
//!
//! `make storm SEEDS=200` runs as many as you like; `make test` runs a few.

mod fleet;
mod plan;
mod run;
mod summary;
mod verdict;

use crate::support::server::Server;
use plan::Plan;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use summary::Summary;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "slow: make soak"]
async fn k45_a_few_seeds_leave_nothing_wrong() {
    seeds(Plan::of, 1, 3, 2).await;
}

/// Driven by the environment: SEEDS, SEED_BASE, JOBS.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "any number of seeds: make storm"]
async fn as_many_seeds_as_one_likes() {
    seeds(Plan::of, number("SEED_BASE", 1), number("SEEDS", 20), number("JOBS", 2)).await;
}

/// 25 kills and 25 stops a seed, of workers with the default settings. Driven by the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "any number of seeds: make storm DEFAULTS=1"]
async fn as_many_seeds_as_one_likes_at_the_default_settings() {
    seeds(Plan::at_defaults, number("SEED_BASE", 1), number("SEEDS", 1), number("JOBS", 1)).await;
}

fn number(name: &str, otherwise: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) if !text.is_empty() => text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")),
        Ok(_) | Err(_) => otherwise,
    }
}

#[test]
fn a_seed_is_one_schedule() {
    let blows = |seed| format!("{:?}", Plan::of(seed).blows);
    assert_eq!(blows(7), blows(7));
    assert_ne!(blows(7), blows(8));
    let lives = |seed| (0..9).map(|life| Plan::of(seed).worker_failpoints(0, life)).collect::<Vec<_>>();
    assert_eq!(lives(7), lives(7));
    assert_ne!(lives(7), lives(8));
}

/// Runs the seeds from `base` on, `jobs` at a time, each on a server of its own, up to the first that fails.
async fn seeds(plan: fn(u64) -> Plan, base: u64, count: u64, jobs: u64) {
    let began = Instant::now();
    let next = Arc::new(AtomicU64::new(base));
    let failed = Arc::new(AtomicBool::new(false));
    let total = Arc::new(Mutex::new(Summary::default()));
    let work = (0..jobs.clamp(1, count.max(1))).map(|_| {
        let (next, failed, total) = (Arc::clone(&next), Arc::clone(&failed), Arc::clone(&total));
        tokio::spawn(async move {
            let mut server = Server::start().await;
            while !failed.load(Ordering::SeqCst) {
                let seed = next.fetch_add(1, Ordering::SeqCst);
                if seed >= base + count {
                    break;
                }
                println!("seed {seed}");
                match run::run(plan(seed), &mut server).await {
                    Ok(summary) => {
                        println!("seed {seed}: {}", summary.line());
                        total.lock().expect("nobody panics with it").add(&summary);
                    }
                    Err(wrong) => {
                        failed.store(true, Ordering::SeqCst);
                        println!("seed {seed} FAILED: {}", wrong.reason);
                        println!("  logs and rows: {}", wrong.logs.display());
                        let defaults = if plan(seed).at_defaults { " DEFAULTS=1" } else { "" };
                        println!("  again: make storm SEEDS=1 SEED_BASE={seed}{defaults}");
                    }
                }
            }
        })
    });
    for ended in futures::future::join_all(work).await {
        ended.expect("a storm ends in words");
    }
    let total = total.lock().expect("nobody panics with it").clone();
    println!("\n{}", total.table(began.elapsed()));
    assert!(!failed.load(Ordering::SeqCst), "a seed failed: see above");
    assert_eq!(total.seeds as u64, count);
    let (rebilled, disruptions) = (total.rebilled, total.disruptions());
    assert!(
        rebilled <= disruptions,
        "{rebilled} model calls were paid for again, {disruptions} things broke"
    );
}
