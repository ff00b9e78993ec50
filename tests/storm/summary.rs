//! What storms did, and how the sessions came through.

use std::time::Duration;

/// The counts of one storm, or of many.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    pub seeds: usize,
    pub sessions: usize,
    pub messages: usize,
    /// Kills from outside.
    pub kills: usize,
    /// Processes that ended themselves at a failpoint.
    pub failpoints: usize,
    pub stops: usize,
    /// Every connection at once, backends terminated, connections refused.
    pub cuts: usize,
    /// Connections cut at a chosen statement.
    pub cut_statements: usize,
    pub restarts: usize,
    /// Starts that ended at once because the database was away.
    pub refused_starts: usize,
    /// GEN_RESUMED in the journals.
    pub resumed: usize,
    pub model_calls: usize,
    pub rebilled: usize,
    /// Writes that a fence refused, counted in the logs.
    pub fenced: usize,
    /// Claims that ended because another worker had the session.
    pub stale_claims: usize,
    pub effects: usize,
    pub mails: usize,
    pub uncertain: usize,
    /// From a worker's death to the next claim of each job that it held.
    pub to_resume: Vec<Duration>,
    pub took: Duration,
}

impl Summary {
    pub fn deaths(&self) -> usize {
        self.kills + self.failpoints
    }

    /// Everything that can end a claim before its work is done.
    pub fn disruptions(&self) -> usize {
        self.deaths() + self.stops + self.cuts + self.cut_statements + self.restarts
    }

    pub fn add(&mut self, other: &Summary) {
        self.seeds += other.seeds;
        self.sessions += other.sessions;
        self.messages += other.messages;
        self.kills += other.kills;
        self.failpoints += other.failpoints;
        self.stops += other.stops;
        self.cuts += other.cuts;
        self.cut_statements += other.cut_statements;
        self.restarts += other.restarts;
        self.refused_starts += other.refused_starts;
        self.resumed += other.resumed;
        self.model_calls += other.model_calls;
        self.rebilled += other.rebilled;
        self.fenced += other.fenced;
        self.stale_claims += other.stale_claims;
        self.effects += other.effects;
        self.mails += other.mails;
        self.uncertain += other.uncertain;
        self.to_resume.extend(&other.to_resume);
        self.took += other.took;
    }

    /// Formats one line.
    pub fn line(&self) -> String {
        format!(
            "{} sessions, {} messages; {} kills, {} failpoints, {} stops, {} cuts, {} cut statements, {} restarts; \
             {} model calls ({} re-billed), {} uncertain, {} fenced; {:.1} s",
            self.sessions,
            self.messages,
            self.kills,
            self.failpoints,
            self.stops,
            self.cuts,
            self.cut_statements,
            self.restarts,
            self.model_calls,
            self.rebilled,
            self.uncertain,
            self.fenced,
            self.took.as_secs_f64()
        )
    }

    /// Formats a table.
    pub fn table(&self, wall: Duration) -> String {
        let mut to_resume = self.to_resume.clone();
        to_resume.sort();
        let seconds =
            |at: usize| to_resume.get(at).map_or("-".to_owned(), |t| format!("{:.2} s", t.as_secs_f64()));
        let (median, worst) = (seconds(to_resume.len() / 2), seconds(to_resume.len().saturating_sub(1)));
        let p99 = seconds((to_resume.len() * 99).div_ceil(100).saturating_sub(1));
        let a_kill = self.rebilled as f64 / self.deaths().max(1) as f64;
        let rows = [
            ("seeds", self.seeds.to_string()),
            ("sessions / messages", format!("{} / {}", self.sessions, self.messages)),
            ("kills from outside / at failpoints", format!("{} / {}", self.kills, self.failpoints)),
            ("kills together", self.deaths().to_string()),
            ("stopped past the lease", self.stops.to_string()),
            ("connections cut / at a statement", format!("{} / {}", self.cuts, self.cut_statements)),
            ("Postgres restarts", self.restarts.to_string()),
            ("starts without a database", self.refused_starts.to_string()),
            (
                "model calls / re-billed",
                format!("{} / {} ({a_kill:.2} a kill)", self.model_calls, self.rebilled),
            ),
            ("generations resumed", self.resumed.to_string()),
            ("claims lost / writes fenced", format!("{} / {}", self.stale_claims, self.fenced)),
            ("effects / uncertain", format!("{} / {}", self.effects, self.uncertain)),
            ("mails", self.mails.to_string()),
            ("kill to next claim, median", median),
            ("kill to next claim, p99", p99),
            ("kill to next claim, worst", worst),
            ("jobs that were resumed after a kill", to_resume.len().to_string()),
            ("wall time", format!("{:.0} s", wall.as_secs_f64())),
        ];
        let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
        rows.iter().map(|(name, value)| format!("  {name:width$}  {value}\n")).collect()
    }
}
