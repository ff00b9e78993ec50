//! Checks whether people hear of what happens: the messages of `[[notify]]`.

use super::super::output::{age, count, printable};
use super::Report;
use std::time::Duration;
use wakeful_store::notify::outbox::NotificationFilter;
use wakeful_store::{Result, Store};

/// How many of the newest messages that did not go out are looked at.
const NEWEST: i64 = 100;

/// Says whether messages of the time `since` did not go out.
pub(super) async fn check(store: &Store, since: Duration, report: &mut Report) -> Result<()> {
    let statuses = Some(vec!["failed".to_owned()]);
    let lost = store
        .notifications(&NotificationFilter { statuses, limit: NEWEST, ..NotificationFilter::default() })
        .await?;
    let from = chrono::Utc::now() - since;
    let lately = || lost.iter().filter(|one| one.settled_at.is_some_and(|at| at >= from));
    if let Some(newest) = lately().next() {
        let many = count(lately().count() as i64, "message");
        let error = newest.last_error.as_deref().unwrap_or("no error is known");
        report.warning(
            "alerts",
            format!(
                "{many} of [[notify]] did not reach people; the newest, of rule {}, {} ago: {}",
                printable(&newest.rule),
                age(newest.created_at),
                printable(error)
            ),
            format!(
                "mend the rule's address or its channel, then wakeful notification resend {}; all of them: wakeful \
                 notification list --status failed",
                newest.notification_id
            ),
        );
    }
    Ok(())
}
