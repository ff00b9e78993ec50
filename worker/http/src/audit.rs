//! Every request that changes something is in the audit, and every refused one. See [`wakeful_store::audit`].

use crate::access::{Caller, Rule, Who};
use crate::body::{check_text, check_word};
use crate::front::Peer;
use crate::openapi::Operation;
use crate::sessions::{Answer, limit, next_page, page};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use chrono::{DateTime, Utc};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tracing::error;
use wakeful_engine::ctx::Ctx;
use wakeful_store::audit::AuditFilter;
use wakeful_store::audit::Audited;
use wakeful_store::audit::act::{Act, acting};

/// How often the process checks whether counted refusals are due to be written.
const COUNT_EVERY: Duration = Duration::from_secs(30);

/// How a request may have ended.
const OUTCOMES: [&str; 2] = ["done", "refused"];

/// The longest target that is kept: ids are shorter.
pub(crate) const TARGET_BYTES: usize = 300;

/// A request as an act of a stranger, who gets a name later.
pub(crate) fn act_of(request: &Request, rule: Option<&Rule>) -> Act {
    let path = request.uri().path();
    let verb = match rule {
        Some(Rule { verb: Some(verb), .. }) => (*verb).to_owned(),
        Some(rule) => format!("{} {}", rule.method, rule.path),
        None => request.method().to_string(),
    };
    // The id is the part of the path where the rule has a name in braces. Counted from the end, because a nested router
    // sees the path without its beginning.
    let names = rule.map_or("", |rule| rule.path).rsplit('/');
    let target =
        names.zip(path.rsplit('/')).filter(|(name, _)| name.starts_with('{')).last().map(|(_, part)| part);
    let address = request.extensions().get::<Peer>().map(|peer| shown(peer.0));
    Act {
        actor_kind: "stranger",
        actor: "unknown".to_owned(),
        verb,
        target: target.filter(|target| target.len() <= TARGET_BYTES).map(str::to_owned),
        address,
        ..Act::default()
    }
}

/// An address. Of IPv6 only the /64, because one host usually has all of its addresses.
pub(crate) fn shown(address: IpAddr) -> String {
    match address.to_canonical() {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) if address.is_loopback() => address.to_string(),
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            format!("{a:x}:{b:x}:{c:x}:{d:x}::/64")
        }
    }
}

/// Says who acts.
pub(crate) fn name(act: &mut Act, caller: &Caller) {
    act.space_id.clone_from(&caller.reach.space_id);
    (act.actor_kind, act.actor) = match &caller.who {
        Who::ThisMachine => ("machine", "this machine".to_owned()),
        Who::Configuration => ("configuration", "the configured token".to_owned()),
        Who::Token { token_id, name } => {
            act.token_id = Some(token_id.clone());
            ("token", name.as_ref().unwrap_or(token_id).clone())
        }
        Who::User { user_id, issuer } => {
            act.token_id.clone_from(issuer);
            act.user_id = Some(user_id.clone());
            ("user", user_id.clone())
        }
    };
}

/// Notes a refused request.
pub(crate) async fn refused(ctx: &Ctx, act: Act, status: StatusCode) {
    // A fault of the process is not recorded as an act of the caller.
    if !status.is_client_error() {
        return;
    }
    if let Err(error) = ctx.store.audit_refusal(&act, status.as_u16()).await {
        error!(%error, act.verb, "A refusal could not be written to the audit");
    }
}

/// Answers a request that changes something. Its transaction writes its row; a request that changed nothing gets its row
/// here.
pub(crate) async fn carry_out(ctx: &Ctx, act: Act, answer: impl Future<Output = Response>) -> Response {
    let (response, act, is_written) = acting(act, answer).await;
    let status = response.status();
    if !status.is_success() {
        refused(ctx, act, status).await;
    } else if !is_written && let Err(error) = ctx.store.audit(&act).await {
        error!(%error, act.verb, "An act could not be written to the audit");
    }
    response
}

/// Writes counted refusals when their time has come, and once more when the process ends.
pub(crate) fn count_refusals(ctx: &Arc<Ctx>) {
    let ctx = Arc::clone(ctx);
    tokio::spawn(async move {
        loop {
            let ends = tokio::select! {
                () = ctx.shutdown.abort.cancelled() => true,
                () = tokio::time::sleep(COUNT_EVERY) => false,
            };
            if let Err(error) = ctx.store.audit_refusals(ends).await {
                error!(%error, "Counted refusals could not be written to the audit");
            }
            if ends {
                return;
            }
        }
    });
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListQuery {
    actor: Option<String>,
    verb: Option<String>,
    target: Option<String>,
    #[schemars(extend("enum" = OUTCOMES))]
    outcome: Option<String>,
    #[serde(default, deserialize_with = "crate::times::usual")]
    #[schemars(with = "Option<DateTime<Utc>>")]
    since: Option<DateTime<Utc>>,
    cursor: Option<i64>,
    limit: Option<i64>,
}

/// The audit, newest first.
pub(crate) async fn list(
    State(ctx): State<Arc<Ctx>>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query?;
    check_word("outcome", query.outcome.as_deref(), &OUTCOMES)?;
    for (name, given) in [("actor", &query.actor), ("verb", &query.verb), ("target", &query.target)] {
        check_text(name, given.as_deref(), 512)?;
    }
    let limit = limit(query.limit)?;
    let filter = AuditFilter {
        actor: query.actor,
        verb: query.verb,
        target: query.target,
        space: None,
        outcome: query.outcome,
        since: query.since,
        before: query.cursor,
        limit,
    };
    let items = ctx.store.audited(&filter).await?;
    let next = next_page(&items, limit, |last| json!(last.audit_id));
    page(&items, next)
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![Operation::get("/v1/audit", "Who did what, newest first").query::<ListQuery>().lists::<Audited>()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_the_sixth_version_counts_as_its_network() {
        let shown = |text: &str| shown(text.parse().unwrap());
        assert_eq!(shown("192.0.2.7"), "192.0.2.7");
        assert_eq!(shown("::ffff:192.0.2.7"), "192.0.2.7");
        assert_eq!(shown("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::/64");
        assert_eq!(shown("2001:db8:1:2:ffff::1"), shown("2001:db8:1:2::1"));
        assert_eq!(shown("::1"), "::1");
    }
}
