//! Schedulers, either in the test with a clock that the test sets, or as processes that fire every second.

use crate::support::{Database, Options, Process, eventually};
use chrono::{DateTime, TimeDelta, Utc};
use std::collections::BTreeSet;
use wakeful_store::Store;
use wakeful_store::schedule::{Definition, Fired, Firing, Schedule};
use wakeful_store::wake::{Continues, NewSession};
use wakeful_workflow::policy::SessionPolicy;
use wakeful_workflow::record::Role;
use wakeful_workflow::schedule::{Missed, Overlap};
use wakeful_workflow::seed::Seed;

pub(super) const SPACE: &str = "default";

pub(super) fn at(text: &str) -> DateTime<Utc> {
    text.parse().expect("an instant")
}

pub(super) fn definition(name: &str, cron: &str) -> Definition {
    Definition {
        name: name.to_owned(),
        cron: cron.to_owned(),
        time_zone: "UTC".to_owned(),
        agent: "default".to_owned(),
        conversation_id: format!("default/schedule-{name}"),
        prompt: "Say what is due.".to_owned(),
        mail_to: Vec::new(),
        missed: Missed::One,
        missed_limit: 10,
        overlap: Overlap::Queue,
    }
}

#[expect(clippy::unnecessary_wraps, reason = "it is what a scheduler composes with")]
pub(super) fn compose(schedule: &Schedule) -> Result<NewSession, String> {
    Ok(NewSession {
        space_id: SPACE.to_owned(),
        mailbox_id: "default".to_owned(),
        conversation_id: schedule.definition.conversation_id.clone(),
        trigger_type: "chat".to_owned(),
        trigger_id: String::new(),
        continues: Continues::Conversation,
        agent: "default".to_owned(),
        model_id: "openai/test".to_owned(),
        model_context_window: 1000,
        tools: Vec::new(),
        policy: SessionPolicy::default(),
        repository_id: None,
        speaker: None,
        only_agent: false,
        seeds: vec![Seed { role: Role::System, content: "You are a test.".to_owned(), is_new: true }],
    })
}

/// A store with one schedule, made at `now`.
pub(super) struct Stage {
    pub(super) database: Database,
    pub(super) store: Store,
    pub(super) name: String,
}

impl Stage {
    pub(super) async fn new(definition: Definition, now: &str) -> Stage {
        let database = Database::new().await;
        let store = database.store().await;
        store.create_schedule(SPACE, &definition, Some(at(now))).await.unwrap();
        Stage { database, store, name: definition.name }
    }

    /// Looks at the schedules once.
    pub(super) async fn look(&self, now: DateTime<Utc>) -> Option<Fired> {
        self.store.fire_due(Some(now), &["default".to_owned()], &mut Vec::new(), &compose).await.unwrap()
    }

    pub(super) async fn firings(&self) -> Vec<Firing> {
        let mut firings = self.store.firings(SPACE, &self.name, None, 100).await.unwrap();
        firings.reverse();
        firings
    }

    /// The ticks that became sessions, in the order of their firing.
    pub(super) async fn fired(&self) -> Vec<DateTime<Utc>> {
        self.firings().await.iter().filter(|one| one.session_id.is_some()).map(|one| one.tick).collect()
    }

    /// The sessions' keys. A tick that fired twice would show here.
    pub(super) async fn sessions(&self) -> Vec<String> {
        sqlx::query_scalar(
            "select trigger_id from conversation_sessions where trigger_type = 'cron' order by ordinal",
        )
        .fetch_all(&self.database.pool)
        .await
        .unwrap()
    }

    pub(super) async fn reasons(&self) -> Vec<String> {
        self.firings().await.into_iter().filter_map(|one| one.reason).collect()
    }
}

/// Asserts that the newest firings are one per second without a gap, each with one session. Returns their
/// number.
pub(super) async fn each_second_once(database: &Database) -> usize {
    let store = database.store().await;
    let mut firings = store.firings(SPACE, "often", None, 100).await.unwrap();
    firings.reverse();
    assert!(firings.iter().all(|one| one.reason.is_none()), "{firings:?}");
    for pair in firings.windows(2) {
        assert_eq!(pair[1].tick - pair[0].tick, TimeDelta::seconds(1), "{firings:?}");
    }
    let sessions: i64 =
        database.value("select count(*) from conversation_sessions where trigger_type = $1", "cron").await;
    let messages: i64 =
        database.value("select count(*) from session_inbox where client_key like $1", "cron:%").await;
    let distinct: BTreeSet<_> = firings.iter().map(|one| one.session_id.clone()).collect();
    assert_eq!((sessions as usize, messages), (distinct.len(), sessions), "{firings:?}");
    assert_eq!(distinct.len(), firings.len());
    store.close().await;
    firings.len()
}

pub(super) async fn until_fired(database: &Database, count: usize) {
    let sql = "select count(*) from schedule_firings where schedule_id <> $1";
    eventually("enough firings", || async {
        (database.value::<i64>(sql, "").await >= count as i64).then_some(())
    })
    .await;
}

/// A scheduler alone, with one schedule that fires every second.
pub(super) fn scheduler() -> Options {
    let often =
        "[schedules.often]\ncron = \"* * * * * *\"\nprompt = \"Go.\"\nmissed = \"all\"\nmissed_limit = 100\n";
    Options::new()
        .model("openai/test")
        .env("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
        .config(often)
        .arg("--roles")
        .arg("scheduler")
}

pub(super) async fn start(options: &Options, database: &Database) -> Process {
    let process = options.spawn(&database.url);
    process.wait_for_log("\"Scheduling\"").await;
    process
}
