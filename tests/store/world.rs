//! Helpers for the tests of the store: a store, claims on its jobs, and what a worker does with one.

use super::LEASE;
use super::made_up::{asks, call, done, message, new_session, performance, performed, replied};
use crate::support::{Database, timeout};
use apalis_core::backend::Backend;
use apalis_core::worker::context::WorkerContext;
use futures::future::poll_fn;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Row};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use wakeful_store::delivery::{DeliveryLimits, Settled};
use wakeful_store::generation::NewGeneration;
use wakeful_store::queue::{Holdings, Job, Kind, News, Queue, Served, Settings};
use wakeful_store::step::Commit;
use wakeful_store::{Store, new_id};
use wakeful_workflow::advance::{CallEnd, Performed, Transition, advance};
use wakeful_workflow::agent::AgentPolicy;
use wakeful_workflow::generation::Purpose;
use wakeful_workflow::id::GenerationId;
use wakeful_workflow::record::ToolCall;
use wakeful_workflow::session::{CallStatus, Session};
use wakeful_workflow::strategy::Strategy;

/// No delivery expires, and an attempt may take one second.
pub(super) const TERMS: DeliveryLimits = DeliveryLimits {
    max_age: None,
    attempt_limit: Duration::from_secs(1),
    longest_pause: Duration::from_secs(7200),
};

/// Somebody waits for a lock of a test's trigger.
pub(super) const WAITS_HERE: &str =
    "select exists (select from pg_locks where locktype = 'advisory' and not granted
    and database = (select oid from pg_database where datname = current_database()))";

pub(super) struct World {
    pub(super) database: Database,
    pub(super) store: Store,
}

impl World {
    pub(super) async fn new() -> World {
        let database = Database::new().await;
        let store = database.store().await;
        World { database, store }
    }

    pub(super) async fn wake(&self, conversation: &str, text: &str) -> String {
        self.store.wake(&new_session(conversation, conversation), &message(text)).await.unwrap().session_id
    }

    pub(super) async fn send(&self, session_id: &str, text: &str) -> wakeful_store::wake::Woken {
        self.store.send(session_id, &message(text)).await.unwrap()
    }

    /// Claims the one job that is ready, and hydrates its session.
    pub(super) async fn drive(&self, session_id: &str) -> Driver<'_> {
        let mut claims = Claims::start(&self.store, Kind::Step, 1, LEASE);
        let job = claims.next().await;
        claims.stop();
        assert_eq!(job.session_id.as_deref(), Some(session_id));
        let session = self.store.hydrate(session_id).await.unwrap();
        Driver { world: self, session, job, policy: AgentPolicy::default() }
    }

    /// Commits `outcome` while another claim has the job. Asserts that the store reports it and writes
    /// nothing.
    pub(super) async fn refuses(&self, driver: &Driver<'_>, outcome: Performed) {
        let job_id = driver.job.lease.job_id;
        let token = self.steal(job_id).await;
        let before = self.dump().await;
        let transition = driver.transition(outcome);
        assert_eq!(driver.write(&transition).await, Commit::Stale, "{transition:?}");
        assert_eq!(self.dump().await, before, "{transition:?}");
        self.give_back(job_id, token).await;
    }

    /// Sends the one open delivery.
    pub(super) async fn deliver(&self, job: &Job) {
        let claimed =
            self.store.claim_delivery(&job.lease, &job.conversation_id, "email", TERMS).await.unwrap();
        let claimed = claimed.expect("a delivery is open");
        let sent = Settled::Sent { receipt: json!({}) };
        assert!(self.store.settle_delivery(&job.lease, &claimed, "email", &sent).await.unwrap());
    }

    /// Changes the lease, as a later claim would. Returns the old token.
    pub(super) async fn steal(&self, job_id: i64) -> i64 {
        let token = sqlx::query_scalar("select lease from jobs where job_id = $1").bind(job_id);
        let token = token.fetch_one(&self.database.pool).await.unwrap();
        let steal = sqlx::query("update jobs set lease = nextval('leases') where job_id = $1").bind(job_id);
        steal.execute(&self.database.pool).await.unwrap();
        token
    }

    /// Runs `act` while a later claim's transaction holds the job's row. The claim commits when `act` waits for
    /// a lock or has ended, so `act` reads the job as it was before the claim.
    pub(super) async fn claim_during<T>(&self, job_id: i64, act: impl Future<Output = T>) -> T {
        let mut claim = self.database.pool.begin().await.unwrap();
        let steal = sqlx::query("update jobs set lease = nextval('leases') where job_id = $1").bind(job_id);
        steal.execute(&mut *claim).await.unwrap();
        let waits = self.until(
            "select exists (select from pg_stat_activity
            where datname = current_database() and wait_event_type = 'Lock')",
        );
        tokio::pin!(act);
        let ended = tokio::select! {
            ended = &mut act => Some(ended),
            () = waits => None,
        };
        claim.commit().await.unwrap();
        match ended {
            Some(ended) => ended,
            None => act.await,
        }
    }

    pub(super) async fn give_back(&self, job_id: i64, token: i64) {
        let back = sqlx::query("update jobs set lease = $2 where job_id = $1").bind(job_id).bind(token);
        back.execute(&self.database.pool).await.unwrap();
    }

    /// Every row of every table.
    pub(super) async fn dump(&self) -> BTreeMap<String, Value> {
        let tables: Vec<String> = sqlx::query_scalar(
            "select tablename::text from pg_tables where schemaname = 'public' and tablename <> '_sqlx_migrations'",
        )
        .fetch_all(&self.database.pool)
        .await
        .unwrap();
        assert!(tables.len() > 10, "{tables:?}");
        let mut dump = BTreeMap::new();
        for table in tables {
            let sql = format!("select coalesce(json_agg(to_json(t) order by t::text), '[]') from {table} t");
            let rows = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&self.database.pool).await.unwrap();
            dump.insert(table, rows);
        }
        dump
    }

    pub(super) async fn status(&self, session_id: &str) -> String {
        self.database
            .value("select status from conversation_sessions where session_id = $1", session_id)
            .await
    }

    pub(super) async fn journal(&self, session_id: &str) -> Vec<String> {
        let kinds = sqlx::query("select type from session_events where session_id = $1 order by seq")
            .bind(session_id);
        kinds.fetch_all(&self.database.pool).await.unwrap().iter().map(|row| row.get(0)).collect()
    }

    pub(super) async fn run_sql(&self, sql: &'static str) {
        sqlx::query(sql).execute(&self.database.pool).await.unwrap();
    }

    pub(super) async fn one(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.database.pool).await.unwrap()
    }

    pub(super) async fn count(&self, table: &str) -> i64 {
        let sql = AssertSqlSafe(format!("select count(*) from {table}"));
        sqlx::query_scalar(sql).fetch_one(&self.database.pool).await.unwrap()
    }

    pub(super) async fn until(&self, sql: &'static str) {
        crate::support::eventually(sql, || async {
            sqlx::query_scalar::<_, bool>(sql).fetch_one(&self.database.pool).await.unwrap().then_some(())
        })
        .await;
    }
}

/// A claimed session and its warm copy, driven by made-up outcomes.
pub(super) struct Driver<'a> {
    pub(super) world: &'a World,
    pub(super) session: Session,
    pub(super) job: Job,
    pub(super) policy: AgentPolicy,
}

impl Driver<'_> {
    pub(super) fn transition(&self, outcome: Performed) -> Transition {
        advance(&self.session, outcome, self.policy)
    }

    pub(super) async fn write(&self, transition: &Transition) -> Commit {
        let store = &self.world.store;
        store.commit(&self.job.lease, &self.session, transition, performance()).await.unwrap()
    }

    /// Commits, and updates the warm copy as the step job does.
    pub(super) async fn commit(&mut self, outcome: Performed) -> Commit {
        let transition = self.transition(outcome);
        let commit = self.write(&transition).await;
        if let Commit::Continued { wake_seq, .. } = commit {
            self.session.apply(&transition.continuing());
            if wake_seq != self.session.wake_seq {
                self.world.store.refresh(&mut self.session).await.unwrap();
            }
            let mut cold = self.world.store.hydrate(self.session.session_id.as_str()).await.unwrap();
            cold.leave_out_like(&self.session);
            if self.world.one("select count(*) from session_events where type = 'GEN_SENT'").await > 0 {
                // The deliverer journals GEN_SENT without waking the session, so the warm copy's event number
                // may lag. No plan depends on it.
                self.session.last_event_seq = cold.last_event_seq;
            }
            assert_eq!(self.session, cold);
        }
        commit
    }

    pub(super) async fn continues(&mut self, outcome: Performed) {
        let commit = self.commit(outcome).await;
        assert!(matches!(commit, Commit::Continued { .. }), "{commit:?}");
    }

    pub(super) async fn start(&self, call: &ToolCall) -> Option<wakeful_store::ledger::Started> {
        let (lease, id) = (&self.job.lease, &self.session.session_id);
        self.world
            .store
            .start_call(
                lease,
                id,
                &call.call_id,
                &wakeful_store::ledger::new_nonce(),
                CallStatus::Invoked,
                60,
            )
            .await
            .unwrap()
    }

    pub(super) async fn settle(&self, call: &ToolCall, ending: &CallEnd) {
        let CallEnd::Settled(status, outcome) = ending else { panic!("{ending:?}") };
        let started = self.start(call).await.expect("the lease is held");
        let (lease, id) = (&self.job.lease, &self.session.session_id);
        let settled =
            self.world.store.settle_call(lease, id, &call.call_id, &started, *status, outcome).await;
        assert!(settled.unwrap());
    }

    pub(super) fn generation<'a>(&'a self, id: &'a GenerationId, attempt: i64) -> NewGeneration<'a> {
        NewGeneration {
            session_id: &self.session.session_id,
            generation_id: id,
            step_number: self.session.last_step_number + 1,
            attempt,
            model: "test/test",
            request_sha256: "0",
            base_sha256: "0",
            repairs: 0,
            resumes: None,
            purpose: Purpose::Reply,
            context_strategy: Strategy::Full,
        }
    }

    pub(super) async fn try_generation(&self, id: &str, attempt: i64) -> bool {
        let id = id.into();
        let new = self.generation(&id, attempt);
        self.world.store.begin_generation(&self.job.lease, &new).await.unwrap().is_some()
    }

    pub(super) async fn begin_generation(&self, id: &str, attempt: i64) {
        assert!(self.try_generation(id, attempt).await, "the lease is held");
    }

    /// One step that enqueues one email.
    pub(super) async fn sends_mail(&mut self, call_id: &str) {
        self.sends_mail_as(call_id, call_id).await;
    }

    /// Like [`Driver::sends_mail`], for a model's call id `asked` that is already in use. The call gets the
    /// id `given` instead.
    pub(super) async fn sends_mail_as(&mut self, asked: &str, given: &str) {
        self.continues(replied(vec![asks(&call(asked, "compose_email"))])).await;
        let email = call(given, "compose_email");
        let mail = json!({"type": "sentEmail", "to": ["bob@example.com"], "subject": "Hi", "body": "Bob."});
        self.continues(Performed::Called(vec![performed(&email, done("Queued.", Some(mail)))])).await;
    }
}

/// The queue, read as apalis reads it.
pub(super) struct Claims {
    pub(super) queue: Queue,
    pub(super) context: WorkerContext,
    pub(super) news: News,
    pub(super) holdings: Arc<Holdings>,
    pub(super) worker_id: Arc<str>,
    pub(super) stop: CancellationToken,
}

impl Claims {
    pub(super) fn start(store: &Store, kind: Kind, concurrency: usize, lease: Duration) -> Claims {
        Claims::start_with_poll(store, kind, concurrency, lease, Duration::from_millis(10))
    }

    pub(super) fn start_with_poll(
        store: &Store,
        kind: Kind,
        concurrency: usize,
        lease: Duration,
        poll: Duration,
    ) -> Claims {
        let stop = CancellationToken::new();
        // A process listens until it has drained.
        let news = News::listen(store, CancellationToken::new());
        Claims::of_process(store, kind, concurrency, lease, poll, (news, Arc::default(), stop))
    }

    /// Of a process that has these agents.
    pub(super) fn start_with_agents(store: &Store, agents: &[Served], lease: Duration) -> Claims {
        let (news, stop) = (News::listen(store, CancellationToken::new()), CancellationToken::new());
        let poll = Duration::from_millis(10);
        let settings = Settings {
            kind: Kind::Step,
            runner: Arc::from(""),
            concurrency: 1,
            lease,
            poll,
            agents: agents.into(),
        };
        Claims::of_settings(store, settings, (news, Arc::default(), stop))
    }

    /// A queue of the same process for another kind of work.
    pub(super) fn beside(&self, store: &Store, kind: Kind, lease: Duration, poll: Duration) -> Claims {
        let process = (self.news.clone(), Arc::clone(&self.holdings), self.stop.clone());
        Claims::of_process(store, kind, 1, lease, poll, process)
    }

    fn of_process(
        store: &Store,
        kind: Kind,
        concurrency: usize,
        lease: Duration,
        poll: Duration,
        (news, holdings, stop): (News, Arc<Holdings>, CancellationToken),
    ) -> Claims {
        let settings =
            Settings { kind, runner: Arc::from(""), concurrency, lease, poll, agents: Arc::default() };
        Claims::of_settings(store, settings, (news, holdings, stop))
    }

    fn of_settings(
        store: &Store,
        settings: Settings,
        (news, holdings, stop): (News, Arc<Holdings>, CancellationToken),
    ) -> Claims {
        let worker_id: Arc<str> = Arc::from(&new_id("w")[..20]);
        let queue = Queue::start(
            store.clone(),
            settings,
            Arc::clone(&worker_id),
            Arc::clone(&holdings),
            &news,
            stop.clone(),
        );
        Claims { queue, context: WorkerContext::new("test"), news, holdings, worker_id, stop }
    }

    pub(super) async fn next(&mut self) -> Job {
        let next = poll_fn(|cx| self.queue.poll_next(cx, &self.context));
        let task = tokio::time::timeout(timeout(), next).await.expect("a job is ready");
        task.expect("the queue is open").expect("claiming works").args
    }

    pub(super) fn stop(&self) {
        self.stop.cancel();
    }

    /// Ends the queue as apalis ends it.
    pub(super) async fn close(&mut self) {
        poll_fn(|cx| self.queue.poll_close(cx, &self.context)).await.unwrap();
    }
}

/// A dump without what differs between two worlds that did the same: ids, times, and numbers that a sequence gives.
pub(super) fn comparable(mut dump: BTreeMap<String, Value>) -> BTreeMap<String, Value> {
    for rows in dump.values_mut() {
        blank(rows);
        let rows = rows.as_array_mut().expect("the rows of a table");
        rows.sort_by_key(Value::to_string);
    }
    dump
}

fn blank(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            let numbers =
                ["ts", "at", "settled_by", "wake_seq", "inbox_id", "job_id", "lease", "worker_id", "bytes"];
            fields.retain(|name, _| !name.ends_with("_at") && !numbers.contains(&name.as_str()));
            fields.values_mut().for_each(blank);
        }
        Value::Array(values) => values.iter_mut().for_each(blank),
        Value::String(text) => {
            let made = text
                .rsplit_once('_')
                .is_some_and(|(_, id)| id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()));
            if made {
                text.truncate(text.len() - 32);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}
