//! The processes of one storm: started, struck, and started again the way a supervisor would.

use super::plan::Plan;
use super::summary::Summary;
use crate::support::{Options, Process, eventually, timeout};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How long a supervisor waits before it starts a process again.
const RESTART_AFTER: Duration = Duration::from_millis(100);

pub struct Fleet {
    slots: Vec<Slot>,
    url: String,
    began: Instant,
    /// Where the API listens now.
    pub api: watch::Sender<Option<String>>,
    /// Name and log of each process that has ended.
    pub logs: Vec<(String, String)>,
    pub summary: Summary,
}

/// One position in the fleet. Its processes live one after the other.
struct Slot {
    /// A worker's number; `None` for the API.
    worker: Option<usize>,
    options: Options,
    process: Option<Process>,
    life: u64,
    start_at: Instant,
    continue_at: Option<Instant>,
}

impl Fleet {
    /// `url` leads to the database through the proxy.
    pub fn new(plan: &Plan, options: &Options, url: &str) -> Fleet {
        let slot = |worker: Option<usize>| {
            let role = if worker.is_some() { "--roles=worker" } else { "--roles=api" };
            let options = options.clone().arg(role);
            Slot { worker, options, process: None, life: 0, start_at: Instant::now(), continue_at: None }
        };
        let mut slots = vec![slot(None)];
        slots.extend((0..plan.workers).map(|worker| slot(Some(worker))));
        Fleet {
            slots,
            url: url.to_owned(),
            began: Instant::now(),
            api: watch::Sender::default(),
            logs: Vec::new(),
            summary: Summary::default(),
        }
    }

    /// Starts everything. The storm's clock begins when the API can take a message, however slow the machine
    /// is.
    pub async fn start(&mut self, plan: &Plan) {
        eventually("the API to come up", || {
            self.look_after(plan);
            let url = self.api.borrow().clone();
            async { url }
        })
        .await;
        self.began = Instant::now();
    }

    /// Acts as a supervisor: starts what is down, continues what was stopped long enough, and notices deaths.
    /// Returns the pids of workers that died since the last call.
    pub fn look_after(&mut self, plan: &Plan) -> Vec<i32> {
        let now = Instant::now();
        let calm = self.began.elapsed() > plan.window;
        let mut died = Vec::new();
        for at in 0..self.slots.len() {
            let slot = &mut self.slots[at];
            if slot.process.as_mut().is_some_and(Process::has_ended) {
                died.extend(self.bury(at));
            }
            let slot = &mut self.slots[at];
            if slot.continue_at.is_some_and(|due| due <= now || calm)
                && let Some(process) = &slot.process
            {
                process.signal(libc::SIGCONT);
                slot.continue_at = None;
            }
            if slot.process.is_none() && slot.start_at <= now {
                let failpoints = match slot.worker {
                    _ if calm => None,
                    Some(worker) => plan.worker_failpoints(worker, slot.life),
                    None => plan.api_failpoints(slot.life),
                };
                let mut options = slot.options.clone();
                if let Some(failpoints) = failpoints {
                    options = options.env("FAILPOINTS", failpoints);
                }
                slot.process = Some(options.spawn(&self.url));
                slot.life += 1;
            }
        }
        self.find_api();
        died
    }

    /// `kill -9`. Returns the pid if this was a running worker.
    pub fn kill(&mut self, worker: Option<usize>) -> Option<i32> {
        let at = self.at(worker);
        self.slots[at].process.as_ref()?.signal(libc::SIGKILL);
        self.bury(at)
    }

    pub fn stop(&mut self, worker: usize, until: Instant) {
        let at = self.at(Some(worker));
        let slot = &mut self.slots[at];
        if let Some(process) = slot.process.as_mut()
            && !process.has_ended()
        {
            process.signal(libc::SIGSTOP);
            slot.continue_at = Some(until);
            self.summary.stops += 1;
        }
    }

    /// Sends SIGTERM to all. Returns the processes that did not end well.
    pub async fn end(&mut self) -> Vec<String> {
        for slot in &self.slots {
            if let Some(process) = &slot.process {
                // One that has just been started takes no signals yet.
                let started = if slot.worker.is_some() { "\"Working\"" } else { "\"Listening\"" };
                process.wait_for_log(started).await;
                process.signal(libc::SIGTERM);
            }
        }
        let mut unwell = Vec::new();
        for slot in &mut self.slots {
            let Some(process) = slot.process.as_mut() else { continue };
            // The deadline is its own, because a process that does not end is reported here.
            if tokio::time::timeout(timeout() / 2, process.end().reached()).await.is_err() {
                unwell.push(format!("{} does not end", name(slot)));
                continue;
            }
            let Some(mut process) = slot.process.take() else { continue };
            let status = process.wait();
            if !status.success() {
                unwell.push(format!("{}: {status}", name(slot)));
            }
            self.logs.push((name(slot), process.log()));
        }
        unwell
    }

    /// Ends what is left, in whatever state, and keeps the logs.
    pub fn abandon(&mut self) {
        for slot in &mut self.slots {
            if let Some(mut process) = slot.process.take() {
                process.signal(libc::SIGKILL);
                process.wait();
                self.logs.push((name(slot), process.log()));
            }
        }
    }

    fn at(&self, worker: Option<usize>) -> usize {
        self.slots.iter().position(|slot| slot.worker == worker).expect("the plan knows its workers")
    }

    /// Counts a death, keeps the log, and plans the next life. Returns the pid if this was a worker.
    fn bury(&mut self, at: usize) -> Option<i32> {
        let slot = &mut self.slots[at];
        let mut process = slot.process.take()?;
        let pid = process.pid();
        let status = process.wait();
        let killed = std::os::unix::process::ExitStatusExt::signal(&status) == Some(libc::SIGKILL);
        let log = process.log();
        match (killed, log.contains("killing this process")) {
            (true, true) => self.summary.failpoints += 1,
            (true, false) => self.summary.kills += 1,
            // It could not start because the database was away. Processes end by themselves for no other
            // reason.
            (false, _) => {
                assert_eq!(status.code(), Some(6), "{} ended by itself:\n{log}", name(slot));
                self.summary.refused_starts += 1;
            }
        }
        self.logs.push((name(slot), log));
        slot.continue_at = None;
        slot.start_at = Instant::now() + RESTART_AFTER;
        if slot.worker.is_none() {
            self.api.send_replace(None);
        }
        slot.worker.map(|_| pid)
    }

    fn find_api(&self) {
        let is_known = self.api.borrow().is_some();
        if !is_known
            && let Some(process) = &self.slots[0].process
            && process.log().contains("\"Listening\"")
        {
            self.api.send_replace(Some(process.url()));
        }
    }
}

fn name(slot: &Slot) -> String {
    match slot.worker {
        Some(worker) => format!("worker{worker}-{}", slot.life),
        None => format!("api-{}", slot.life),
    }
}
