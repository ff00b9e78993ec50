//! What a seed decides: who says what when, and which failure (a "blow") happens when. The schedule of a seed
//! is always the same. How the processes interleave depends on the machine, so a seed does not replay every
//! race.

use crate::support::proxy::CutAt;
use std::time::Duration;

/// How long failures happen and messages are posted.
const WINDOW: Duration = Duration::from_secs(5);

/// The same with the default settings, where a lease lasts 30 seconds.
const LONG_WINDOW: Duration = Duration::from_secs(120);

pub struct Plan {
    pub seed: u64,
    /// The processes have the settings that they ship with, instead of a short lease.
    pub at_defaults: bool,
    pub window: Duration,
    pub workers: usize,
    pub sessions: Vec<Vec<Message>>,
    /// Sorted by time.
    pub blows: Vec<(Duration, Blow)>,
}

pub struct Message {
    /// The earliest time to post it.
    pub at: Duration,
    pub key: String,
    pub text: String,
}

#[derive(Clone, Debug)]
pub enum Blow {
    /// `kill -9`.
    KillWorker(usize),
    KillApi,
    /// SIGSTOP, then SIGCONT after this time, which is longer than the lease.
    StopWorker(usize, Duration),
    /// `pg_terminate_backend` of one backend in this many.
    TerminateBackends(i32),
    /// Cuts every connection.
    Cut,
    /// Cuts every connection, and refuses new ones for this time.
    Refuse(Duration),
    /// Cuts the connection at the next statement with this text.
    CutStatement(&'static str, CutAt),
    /// Shuts Postgres down in immediate mode, and starts it again.
    RestartPostgres,
}

/// Parts of the statements to cut at: a transaction's end, the step's own statement, the one that ends a run, the one
/// that accepts a message, the ledger's two.
const STATEMENTS: &[&str] = &[
    "COMMIT",
    "set last_message_number = session.last_message_number",
    "delete from jobs as job",
    "insert into session_inbox",
    "set status = 'started'",
    "set status = $4, outcome",
];

const WORKER_FAILPOINTS: &[&str] = &[
    "K3",
    "K5",
    "K6",
    "K7",
    "K8",
    "K9",
    "K10",
    "K10_commit",
    "K12",
    "K13",
    "K14",
    "K17",
    "K18",
    "K19",
    "K21",
    "K22",
];

const API_FAILPOINTS: &[&str] = &["K1", "K2", "K4"];

/// The turns that a message's run is made of: one call, or several in parallel.
const TURNS: &[&str] =
    &["charge", "reserve", "charge+reserve", "compose_email", "reserve+compose_email", "current_time"];

impl Plan {
    pub fn of(seed: u64) -> Plan {
        let mut rng = Rng::new(seed);
        let sessions = (0..5 + rng.below(4))
            .map(|session| {
                let count = 2 + rng.below(2);
                messages(&mut rng, session, count, WINDOW)
            })
            .collect();
        let workers = 2 + rng.below(2) as usize;
        let mut blows = Vec::new();
        let mut some = |rng: &mut Rng, least: u64, most: u64, blow: &dyn Fn(&mut Rng) -> Blow| {
            for _ in 0..least + rng.below(most - least + 1) {
                let at = moment(rng, WINDOW);
                let blow = blow(rng);
                blows.push((at, blow));
            }
        };
        some(&mut rng, 3, 6, &|rng| Blow::KillWorker(rng.below(workers as u64) as usize));
        some(&mut rng, 1, 2, &|_| Blow::KillApi);
        some(&mut rng, 0, 2, &|rng| {
            let past_the_lease = Duration::from_millis(2_200 + rng.below(1_500));
            Blow::StopWorker(rng.below(workers as u64) as usize, past_the_lease)
        });
        some(&mut rng, 0, 2, &|rng| Blow::TerminateBackends(1 + rng.below(4) as i32));
        some(&mut rng, 0, 1, &|_| Blow::Cut);
        some(&mut rng, 0, 1, &|rng| Blow::Refuse(Duration::from_millis(100 + rng.below(700))));
        some(&mut rng, 2, 5, &|rng| {
            let at = if rng.below(3) == 0 { CutAt::BeforeServer } else { CutAt::BeforeAnswer };
            Blow::CutStatement(rng.pick(STATEMENTS), at)
        });
        some(&mut rng, 0, 1, &|_| Blow::RestartPostgres);
        blows.sort_by_key(|(at, _)| *at);
        Plan { seed, at_defaults: false, window: WINDOW, workers, sessions, blows }
    }

    /// 25 kills and 25 stops past the lease, and nothing else, of workers with the default settings.
    pub fn at_defaults(seed: u64) -> Plan {
        const WORKERS: u64 = 12;
        let mut rng = Rng::new(seed);
        // Of that many sessions, several are at work at any time, so a kill mostly finds its worker busy.
        let sessions = (0..36).map(|session| messages(&mut rng, session, 30, LONG_WINDOW)).collect();
        let mut blows = Vec::new();
        for _ in 0..25 {
            let at = moment(&mut rng, LONG_WINDOW);
            blows.push((at, Blow::KillWorker(rng.below(WORKERS) as usize)));
            // A stop ends within the window, or the storm's calm would end it before its lease is over.
            let past_the_lease = Duration::from_millis(31_000 + rng.below(5_000));
            let at = moment(&mut rng, LONG_WINDOW - past_the_lease);
            blows.push((at, Blow::StopWorker(rng.below(WORKERS) as usize, past_the_lease)));
        }
        blows.sort_by_key(|(at, _)| *at);
        Plan { seed, at_defaults: true, window: LONG_WINDOW, workers: WORKERS as usize, sessions, blows }
    }

    /// The failpoints of this life of a worker, if any.
    pub fn worker_failpoints(&self, worker: usize, life: u64) -> Option<String> {
        if self.at_defaults {
            return None;
        }
        let mut rng = Rng::new(self.seed ^ ((worker as u64 + 1) << 40) ^ ((life + 1) << 50));
        (rng.below(5) < 3).then(|| failpoints(&mut rng, WORKER_FAILPOINTS))
    }

    pub fn api_failpoints(&self, life: u64) -> Option<String> {
        if self.at_defaults {
            return None;
        }
        let mut rng = Rng::new(self.seed ^ ((life + 1) << 56));
        (rng.below(4) == 0).then(|| failpoints(&mut rng, API_FAILPOINTS))
    }
}

/// Returns the setting of one failpoint, chosen from `names`. It kills the process at its first to fourth
/// hit.
fn failpoints(rng: &mut Rng, names: &[&'static str]) -> String {
    let name = rng.pick(names);
    match rng.below(4) {
        0 => format!("{name}=1*return"),
        times => format!("{name}={times}*off->1*return"),
    }
}

/// A moment of the window, but not its very beginning.
fn moment(rng: &mut Rng, window: Duration) -> Duration {
    Duration::from_millis(200 + rng.below(window.as_millis() as u64 - 200))
}

fn messages(rng: &mut Rng, session: u64, count: u64, window: Duration) -> Vec<Message> {
    let window_ms = window.as_millis() as u64;
    (0..count)
        .map(|number| {
            let name = format!("s{session}m{number}");
            let mut turns: Vec<&str> = (0..1 + rng.below(2)).map(|_| rng.pick(TURNS)).collect();
            if rng.below(6) == 0 {
                turns.insert(0, "ask_user");
            }
            // Some messages arrive close together and are answered together. Others arrive after the previous
            // run has ended.
            let at = Duration::from_millis(rng.below(window_ms / count) + number * window_ms / count);
            Message { at, text: format!("{name} do {}", turns.join(";")), key: name }
        })
        .collect()
}

/// SplitMix64: small, and the same on every machine.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.below(from.len() as u64) as usize]
    }
}
