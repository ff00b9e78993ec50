//! Checks of what this host talks to: the server that listens here, the database, the workers and their work.

use super::super::output::{count, span};
use super::{Report, database, fleet, upgrade};
use crate::client::address::{self, Address};
use crate::client::readyz;
use std::collections::BTreeSet;
use std::time::Duration;
use wakeful_channels::chat::legacy;
use wakeful_channels::email;
use wakeful_config::Config;
use wakeful_store::blob_store::BlobStores;
use wakeful_store::diagnosis::{self, NEWEST_SESSIONS, Troubles};
use wakeful_store::{Error, Store};
use wakeful_workflow::gate::{CLONE, STORE};
use wakeful_workflow::id::DEFAULT_SPACE;

/// Time for all database checks together. The whole command, like any health check, must end within ten
/// seconds.
const TIMEOUT: Duration = Duration::from_secs(8);
const CONNECT: Duration = Duration::from_secs(3);
const NOTIFICATION: Duration = Duration::from_secs(2);
const SERVER: Duration = Duration::from_secs(3);
/// If a job has been ready for longer than this, `doctor` reports that no worker takes it.
const WAITING_S: f64 = 60.0;
const SKEW_S: f64 = 2.0;

/// Checks the server that the client's commands talk to, if one listens there. No server is fine, unless it was named: this
/// host may run workers alone.
pub(super) async fn server(config: &Config) -> Report {
    let mut report = Report::default();
    let given = std::env::var(address::VARIABLE).ok();
    let Some(Address { url, named }) = address::server(given.as_deref(), config) else { return report };
    let shown = url.strip_prefix("http://").unwrap_or(&url).trim_end_matches('/').to_owned();
    let address = if named { format!("{shown} ({})", address::VARIABLE) } else { shown };
    match tokio::time::timeout(SERVER, readyz::ask(&url)).await {
        Ok(Ok(Some((200, body)))) => match readyz::lost(&body) {
            None => report.ok("server", format!("{address} is ready")),
            Some(lost) => report.warning(
                "server",
                format!("{address} works, and cannot open all of its connections to the database ({lost})"),
                "give Postgres a higher max_connections, or this process a lower [database] max_connections",
            ),
        },
        Ok(Ok(Some((_, body)))) if body["checks"]["draining"] == "draining" => report.warning(
            "server",
            format!("{address} is draining"),
            "it ends by itself; start it again if that was not meant",
        ),
        Ok(Ok(Some((status, body)))) if body["checks"].is_object() => report.problem(
            "server",
            format!("{address} is not ready ({status}): {}", readyz::said(&body)),
            "see what the database's checks say",
        ),
        Ok(Ok(Some((status, _)))) => report.warning(
            "server",
            format!("{address} answers {status} to /readyz: it is not Wakeful that listens there"),
            "give one of the two another port: [server] listen",
        ),
        Ok(Ok(None)) if named => report.problem(
            "server",
            format!("nothing listens on {address}"),
            "start it there, or correct or unset WAKEFUL_URL",
        ),
        Ok(Ok(None)) => report.ok("server", format!("nothing listens on {address}")),
        Ok(Err(error)) => report.problem(
            "server",
            format!("{address} takes connections and does not answer: {error}"),
            "look at its log, and restart it",
        ),
        Err(_) => report.problem(
            "server",
            format!("{address} takes connections and does not answer within {}", span(SERVER.as_secs_f64())),
            "look at its log, and restart it",
        ),
    }
    report
}

/// Reads the keys of the issuer of users' tokens, if one is configured.
pub(super) async fn users(config: &Config) -> Report {
    let mut report = Report::default();
    let Some(jwt) = &config.users.jwt else { return report };
    match wakeful_http::access::count_keys(jwt).await {
        Ok(0) => report.problem(
            "users",
            format!("{} has no key for {}", jwt.issuer, jwt.algorithms.join(", ")),
            "check [users.jwt] algorithms, and whether these are the issuer's keys",
        ),
        Ok(keys) => {
            report.ok("users", format!("{} has {} for users' tokens", jwt.issuer, count(keys as i64, "key")))
        }
        Err(error) => report.problem(
            "users",
            format!("the keys of {} cannot be read: {error}", jwt.issuer),
            "check [users.jwt] jwks_url or jwks_file, and whether this host may connect there",
        ),
    }
    report
}

/// Checks the SMTP server, if one is configured: it must answer and accept the user. Sends no mail.
pub(super) async fn mail(config: &Config) -> Report {
    let mut report = Report::default();
    let Some(smtp) = &config.email.smtp else { return report };
    let address = format!("{}:{}", smtp.host, smtp.port);
    let sender = match email::smtp_sender(config) {
        Ok(Some(sender)) => sender,
        Ok(None) => return report,
        Err(error) => {
            report.problem("mail", format!("{error:#}"), "correct [email.smtp] or [email.dkim]");
            return report;
        }
    };
    match tokio::time::timeout(TIMEOUT, sender.greet()).await {
        Ok(Ok(())) => report.ok("mail", format!("{address} answers")),
        Ok(Err(error)) => {
            let remedy = smtp_remedy(&error);
            report.problem("mail", error, remedy);
        }
        Err(_) => report.problem(
            "mail",
            format!("{address} does not answer within {}", span(TIMEOUT.as_secs_f64())),
            "check [email.smtp] host and port, and the firewall between: many networks close port 25",
        ),
    }
    report
}

fn smtp_remedy(error: &str) -> &'static str {
    // An expired certificate, or one of another host, needs another certificate and no file here.
    let is_of_strangers = ["UnknownIssuer", "CaUsedAsEndEntity"].iter().any(|why| error.contains(why));
    if error.contains("invalid peer certificate") && is_of_strangers {
        "set [email.smtp] `ca_file` to the CA that signed the server's certificate; that CA's own certificate cannot be the \
         server's"
    } else {
        "check [email.smtp] host, port, security, user and password, and whether this host may connect there"
    }
}

/// Checks the database, and the workers, queues and sessions that it knows of.
pub(super) async fn database(config: &Config, since: Duration) -> Report {
    let mut report = Report::default();
    let Ok(url) = super::super::database_url(config) else {
        report.problem("database", "no database is configured", "set DATABASE_URL, or [database] url");
        return report;
    };
    match tokio::time::timeout(TIMEOUT, ask(config, &url, since, &mut report)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => database::stopped(&error, &mut report),
        Err(_) => report.problem(
            "database",
            format!("its answers take more than {}", span(TIMEOUT.as_secs_f64())),
            "look at the server's load, its locks (pg_stat_activity) and the network between",
        ),
    }
    report
}

async fn ask(config: &Config, url: &str, since: Duration, report: &mut Report) -> Result<(), Error> {
    let address = diagnosis::address(url)?;
    if let Err(error) = diagnosis::reach(url, CONNECT).await {
        database::unreached(&address, &error, report);
        return Ok(());
    }
    let blobs = wakeful_engine::blobs::stores(&config.blobs).unwrap_or_else(|wrong| {
        report.problem("blobs", wrong, "correct [blobs]");
        BlobStores::default()
    });
    let store = Store::connect(url, 2, "wakeful doctor").await?.with_blob_stores(blobs);
    let facts = store.server_facts().await?;
    let took = span(facts.round_trip.as_secs_f64());
    if facts.version_num / 10_000 < diagnosis::OLDEST_SERVER {
        report.problem(
            "database",
            format!("{address} is Postgres {}, which is too old", facts.version),
            format!("upgrade it to {} or newer", diagnosis::OLDEST_SERVER),
        );
    } else {
        report.ok("database", format!("{address}, Postgres {}, answers in {took}", facts.version));
    }
    let skew_s = (chrono::Utc::now() - facts.now).num_milliseconds() as f64 / 1000.0;
    if skew_s.abs() > SKEW_S + facts.round_trip.as_secs_f64() {
        let which = if skew_s > 0.0 { "ahead of" } else { "behind" };
        report.warning(
            "clock",
            format!("this host's clock is {} {which} the database's", span(skew_s)),
            "run a time service on both; leases go by the database's clock, logs and ages by this one",
        );
    } else {
        report.ok("clock", "agrees with the database's");
    }
    database::writes(&facts, report);
    database::rights(&store, report).await?;
    // A standby refuses LISTEN.
    let heard = if facts.standby { None } else { Some(store.notification_round_trip(NOTIFICATION).await?) };
    match heard {
        None => {}
        Some(Some(took)) => report.ok("notifications", format!("arrive in {}", span(took.as_secs_f64()))),
        Some(None) => report.warning(
            "notifications",
            "LISTEN hears nothing: is there a pooler in transaction mode between?",
            "connect directly, or by a pooler in session mode; until then work waits for the next poll",
        ),
    }
    if !upgrade::schema(&store, report).await? {
        // The remaining checks query tables of this binary's schema.
        return Ok(());
    }
    super::keys::check(config, &store, report).await?;
    database::role(config, &store, report).await?;
    database::tokens(config, &store, report).await?;
    work(config, &store, report).await?;
    schedules(&store, config.queue.silent_after_s(), report).await?;
    withdrawn(config, &store, report).await?;
    troubles(&store.troubles(Duration::from_secs_f64(WAITING_S), since).await?, since, report);
    super::alerts::check(&store, since, report).await?;
    if config.chat.legacy.redis_url.is_some() {
        report.ok("old chats", legacy::advice(&config.chat.legacy, &store.legacy_counts().await?));
    }
    store.close().await;
    Ok(())
}

async fn work(config: &Config, store: &Store, report: &mut Report) -> Result<(), Error> {
    let workers = store.workers().await?;
    let alive = fleet::check(&workers, config.queue.heartbeat, report);
    upgrade::workers(store, &alive, report).await?;
    let connections = store.fleet_connections(None).await?;
    match connections.shortage() {
        Some((said, remedy)) => report.warning("connections", said, remedy),
        None => report.ok(
            "connections",
            format!(
                "workers want up to {} of {}; other programs use {}",
                connections.wanted, connections.limit, connections.others
            ),
        ),
    }
    let gates = store.closed_gates().await?;
    for gate in &gates {
        // No session has made the probe that was due a minute ago. So it is unknown whether the model answers by now.
        let is_unasked = |at| chrono::Utc::now() - at > chrono::TimeDelta::minutes(1);
        if gate.waiting == 0 && gate.next_probe_at.is_some_and(is_unasked) {
            report.ok(
                "providers",
                format!("{}. The next call tells whether it answers", crate::command::queue::said(gate)),
            );
            continue;
        }
        report.warning(
            "providers",
            crate::command::queue::said(gate),
            if gate.provider.starts_with(STORE) || gate.provider.starts_with(CLONE) {
                "nothing is lost: the sessions go on when it answers"
            } else {
                "nothing is lost: the sessions go on when it answers. Look at its status page; `fallback` of an agent names \
                 models that answer meanwhile"
            },
        );
    }
    if gates.is_empty() {
        report.ok("providers", "none is known to fail");
    }
    for pause in store.pauses().await? {
        report.warning(
            "pauses",
            crate::command::pause::said(&pause),
            format!("when it may go on: wakeful pause end {} {}", pause.kind, pause.name)
                .trim_end()
                .to_owned(),
        );
    }
    super::blobs::check(store, report).await?;
    faulty(store, report).await?;
    deadly(store, report).await?;
    let depth = store.queue_depth().await?;
    let waiting: Vec<_> = depth.iter().filter(|one| one.oldest_ready_s > WAITING_S).collect();
    for one in &waiting {
        report.warning(
            "queue",
            format!("{} {} jobs are ready and the oldest waits for {}", one.ready, one.kind, span(one.oldest_ready_s)),
            if alive.is_empty() {
                "start a worker: wakeful serve --roles worker"
            } else {
                "workers have no free slot: add workers, or raise [queue] concurrency; look with `wakeful queue status`"
            },
        );
    }
    if waiting.is_empty() {
        let sum = |count: fn(&wakeful_store::queue::Depth) -> i64| depth.iter().map(count).sum::<i64>();
        let (ready, leased, delayed) = (sum(|one| one.ready), sum(|one| one.leased), sum(|one| one.delayed));
        report.ok("queue", format!("{ready} ready, {leased} leased, {delayed} delayed"));
    }
    Ok(())
}

/// Names the steps at which workers died.
async fn deadly(store: &Store, report: &mut Report) -> Result<(), Error> {
    for step in store.deadly_steps().await?.into_iter().take(3) {
        let tools = if step.tools.is_empty() {
            "called its model".to_owned()
        } else {
            format!("ran {}", step.tools.join(", "))
        };
        report.warning(
            "steps",
            format!(
                "{} workers died at a step of session {}, most likely while it {tools}",
                step.died, step.session_id
            ),
            format!(
                "read the end of their logs; stop it before it takes more: wakeful session cancel {}",
                step.session_id
            ),
        );
    }
    Ok(())
}

/// Names the steps that the database fails although it answers.
async fn faulty(store: &Store, report: &mut Report) -> Result<(), Error> {
    let faulty = store.faulty_steps().await?;
    let Some(first) = faulty.first() else { return Ok(()) };
    report.problem(
        "steps",
        format!(
            "the database fails {} again and again. Session {}, {} times within {}: {}",
            if faulty.len() == 1 { "one step".to_owned() } else { format!("{} steps", faulty.len()) },
            first.session_id,
            first.times,
            span(first.lasted_s),
            first.last_error
        ),
        format!(
            "mend what the error names; the server's log has its place. Then it goes on by itself: wakeful session why {}",
            first.session_id
        ),
    );
    Ok(())
}

/// Checks for schedules that no scheduler fires.
async fn schedules(store: &Store, silent_after_s: f64, report: &mut Report) -> Result<(), Error> {
    let late = store.late_schedules().await?;
    let live =
        store.workers().await?.into_iter().filter(|one| one.is_fresh(silent_after_s)).collect::<Vec<_>>();
    for one in &late {
        // Commands take names in the space `default` unless they are told otherwise.
        let (of_space, name) = match one.space_id.as_str() {
            DEFAULT_SPACE => (String::new(), one.name.clone()),
            space => (format!(" of the space {space}"), format!("{} --space {space}", one.name)),
        };
        let shown = &one.name;
        if one.overdue_s > 0.0 {
            let agent = &one.agent;
            let (lacks, needs) = if live.iter().any(|worker| worker.has_agent(agent, &one.space_id)) {
                (String::new(), String::new())
            } else {
                (
                    format!(": no live worker has agent {agent}"),
                    format!(" whose configuration has [agents.{agent}]"),
                )
            };
            report.warning(
                "schedules",
                format!("{shown}{of_space} should have fired {} ago{lacks}", span(one.overdue_s)),
                format!(
                    "start a scheduler{needs}: wakeful serve --roles scheduler; or pause it: wakeful schedule pause {name}"
                ),
            );
        } else {
            report.warning(
                "schedules",
                format!("{shown}{of_space} was fired {} ahead of the database's clock", span(one.ahead_s)),
                format!(
                    "see that the clock is right now; then wakeful schedule resume {name} counts from now on"
                ),
            );
        }
    }
    if late.is_empty() {
        report.ok("schedules", "none is late");
    }
    Ok(())
}

/// Names the schedules of this configuration that a scheduler with another configuration has paused since.
async fn withdrawn(config: &Config, store: &Store, report: &mut Report) -> Result<(), Error> {
    let spaces: BTreeSet<&str> = config.schedules.values().map(|one| one.space.as_str()).collect();
    for space_id in spaces {
        for stored in store.schedules(space_id).await? {
            let name = &stored.definition.name;
            let is_ours = config.schedules.get(name).is_some_and(|one| one.space == space_id);
            if is_ours && stored.paused_by.as_deref() == Some("config") {
                report.warning(
                    "schedules",
                    format!("{name} is paused: a scheduler of this deployment started whose configuration lacks it"),
                    "restart a scheduler with this file; give the other deployment another name: [server] deployment",
                );
            }
        }
    }
    Ok(())
}

fn troubles(troubles: &Troubles, since: Duration, report: &mut Report) {
    let all: i64 = troubles.sessions.iter().map(|(_, count)| count).sum();
    let scope = if all >= NEWEST_SESSIONS { format!("the newest {all}") } else { all.to_string() };
    let within = span(since.as_secs_f64());
    if troubles.failed_since == 0 && troubles.in_need == 0 {
        report.ok("sessions", format!("{scope}; none failed within {within}, and none needs attention"));
    }
    if let Some(session) = &troubles.failed_session {
        report.warning(
            "sessions",
            format!("{} of {scope} failed within {within}", troubles.failed_since),
            format!("wakeful session list --status failed; the newest: wakeful session why {session}"),
        );
    }
    if let Some(session) = &troubles.in_need_session {
        report.warning(
            "sessions",
            format!("{} of {scope} need attention", troubles.in_need),
            format!(
                "wakeful session list --status needs_attention; the newest: wakeful session why {session}"
            ),
        );
    }
    if let Some(session) = &troubles.uncertain_call_session {
        report.warning(
            "tool calls",
            format!("{} are uncertain: they may have taken effect", troubles.uncertain_calls),
            format!(
                "look at the newest: wakeful session why {session}; then say what you found: wakeful session resolve \
                 {session} {} --happened RESULT (or --did-not-happen, --let-model-decide). Of many at once: wakeful effect list, \
                 then wakeful effect resolve",
                troubles.uncertain_call_id.as_deref().unwrap_or("CALL")
            ),
        );
    }
    deliveries(troubles, report);
}

fn deliveries(troubles: &Troubles, report: &mut Report) {
    if let Some(session) = &troubles.uncertain_delivery_session {
        report.warning(
            "deliveries",
            format!("{} are uncertain: they may have been sent", troubles.uncertain_deliveries),
            format!("look at the newest: wakeful session why {session}; at all of them: wakeful effect list"),
        );
    }
    if let Some(delivery) = &troubles.failed_delivery {
        let oldest = span(troubles.failed_oldest_s);
        report.warning(
            "deliveries",
            format!("{} failed, the oldest is of {oldest} ago", troubles.failed_deliveries),
            format!(
                "look at them: wakeful delivery list --status failed; mend the cause, then wakeful delivery resend {delivery}"
            ),
        );
    }
    if troubles.waiting_deliveries > 0 {
        let oldest = span(troubles.waiting_oldest_s);
        report.warning(
            "deliveries",
            format!("{} wait to be sent, the oldest for {oldest}", troubles.waiting_deliveries),
            "see what for: wakeful delivery list --status waiting",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_ca_of_a_mail_server_has_the_key_as_its_remedy() {
        assert!(smtp_remedy("tls: invalid peer certificate: UnknownIssuer").contains("`ca_file`"));
        assert!(smtp_remedy("tls: invalid peer certificate: Expired").contains("check [email.smtp]"));
        assert!(smtp_remedy("535 no").contains("check [email.smtp]"));
    }
}
