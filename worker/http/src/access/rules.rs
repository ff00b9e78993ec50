//! What each route below `/v1` needs. A route that is not in this table is refused, and a test compares the table with
//! the routes.

use Scope::{Admin, Operate, Read};
use wakeful_workflow::access::Scope;

/// Which limited tokens a route is open to. Each includes those before it. Tokens without a limit may ask for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OpenTo {
    /// Only tokens of the whole installation.
    Installation,
    /// Also tokens of one space.
    Spaces,
    /// Also tokens of one agent.
    Agents,
    /// Also tokens of users.
    Users,
}
use OpenTo::{Agents, Installation, Spaces, Users};

/// The rule of one method of one route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    pub method: &'static str,
    /// As the router has it, with `/v1`.
    pub path: &'static str,
    pub needs: Scope,
    pub open_to: OpenTo,
    /// What the audit calls it. `None`: it only looks.
    pub verb: Option<&'static str>,
}

impl Rule {
    const fn look(path: &'static str, needs: Scope, open_to: OpenTo) -> Rule {
        Rule { method: "GET", path, needs, open_to, verb: None }
    }

    const fn act(
        method: &'static str,
        path: &'static str,
        needs: Scope,
        open_to: OpenTo,
        verb: &'static str,
    ) -> Rule {
        Rule { method, path, needs, open_to, verb: Some(verb) }
    }

    /// The rule of a request. Every GET route takes HEAD too.
    pub fn of(method: &str, path: &str) -> Option<&'static Rule> {
        let method = if method == "HEAD" { "GET" } else { method };
        RULES.iter().find(|rule| rule.method == method && rule.path == path)
    }
}

/// Every route behind the bearer token.
pub const RULES: &[Rule] = &[
    Rule::act("POST", "/v1/chat/{conversation_id}/messages", Operate, Users, "chat.message"),
    Rule::look("/v1/chat/legacy", Read, Installation),
    Rule::look("/v1/sessions", Read, Users),
    Rule::look("/v1/sessions/{id}", Read, Users),
    Rule::look("/v1/sessions/{id}/messages", Read, Users),
    Rule::act("POST", "/v1/sessions/{id}/messages", Operate, Users, "session.send"),
    Rule::look("/v1/sessions/{id}/stream", Read, Users),
    Rule::look("/v1/sessions/{id}/runs", Read, Users),
    Rule::look("/v1/sessions/{id}/steps", Read, Agents),
    Rule::look("/v1/sessions/{id}/events", Read, Agents),
    Rule::look("/v1/sessions/{id}/diff/{other}", Read, Agents),
    Rule::look("/v1/sessions/{id}/context", Read, Agents),
    Rule::look("/v1/sessions/{id}/files", Read, Agents),
    Rule::look("/v1/sessions/{id}/tree", Read, Agents),
    Rule::act("POST", "/v1/sessions/{id}/retry", Operate, Agents, "session.retry"),
    Rule::act("POST", "/v1/sessions/{id}/cancel", Operate, Agents, "session.cancel"),
    Rule::act("POST", "/v1/sessions/{id}/wake", Operate, Agents, "session.wake"),
    Rule::act("POST", "/v1/sessions/{id}/resolve", Operate, Agents, "session.resolve"),
    Rule::act("POST", "/v1/sessions/{id}/approve", Operate, Agents, "session.approve"),
    Rule::act("POST", "/v1/sessions/{id}/decline", Operate, Agents, "session.decline"),
    Rule::act("POST", "/v1/sessions/{id}/archive", Operate, Agents, "session.archive"),
    Rule::act("POST", "/v1/sessions/{id}/terminate", Operate, Agents, "session.terminate"),
    Rule::act("POST", "/v1/sessions/{id}/fork", Operate, Agents, "session.fork"),
    Rule::act("POST", "/v1/sessions/import", Operate, Spaces, "session.import"),
    Rule::look("/v1/conversations/{id}/sessions", Read, Spaces),
    Rule::look("/v1/conversations/{id}/history", Read, Spaces),
    Rule::act("POST", "/v1/conversations/{id}/new", Operate, Spaces, "session.new"),
    Rule::look("/v1/deliveries", Read, Spaces),
    Rule::look("/v1/deliveries/{id}", Read, Spaces),
    Rule::act("POST", "/v1/deliveries/{id}/resend", Operate, Spaces, "delivery.resend"),
    Rule::look("/v1/effects", Read, Agents),
    Rule::look("/v1/mails", Read, Spaces),
    Rule::act("POST", "/v1/triggers/email/raw", Operate, Installation, "mail.accept"),
    Rule::act("POST", "/v1/triggers/absurd", Operate, Agents, "absurd.accept"),
    Rule::act("POST", "/v1/triggers/herald", Operate, Agents, "herald.accept"),
    Rule::look("/v1/schedules", Read, Spaces),
    Rule::act("POST", "/v1/schedules", Operate, Spaces, "schedule.create"),
    Rule::look("/v1/schedules/{id}", Read, Spaces),
    Rule::act("PUT", "/v1/schedules/{id}", Operate, Spaces, "schedule.edit"),
    Rule::act("DELETE", "/v1/schedules/{id}", Operate, Spaces, "schedule.delete"),
    Rule::act("POST", "/v1/schedules/{id}/pause", Operate, Spaces, "schedule.pause"),
    Rule::act("POST", "/v1/schedules/{id}/resume", Operate, Spaces, "schedule.resume"),
    Rule::act("POST", "/v1/schedules/{id}/trigger", Operate, Spaces, "schedule.trigger"),
    Rule::look("/v1/schedules/{id}/next", Read, Spaces),
    Rule::look("/v1/schedules/{id}/firings", Read, Spaces),
    Rule::act("POST", "/v1/user-tokens", Operate, Agents, "token.user"),
    Rule::look("/v1/tokens", Admin, Installation),
    Rule::look("/v1/pauses", Read, Installation),
    Rule::act("POST", "/v1/pauses", Operate, Installation, "pause.begin"),
    Rule::act("POST", "/v1/pauses/end", Operate, Installation, "pause.end"),
    Rule::look("/v1/audit", Admin, Installation),
    Rule::act("POST", "/v1/batches", Operate, Spaces, "batch.create"),
    Rule::look("/v1/batches", Read, Spaces),
    Rule::look("/v1/batches/{id}", Read, Spaces),
    Rule::look("/v1/batches/{id}/members", Read, Spaces),
    Rule::act("POST", "/v1/batches/{id}/pause", Operate, Spaces, "batch.pause"),
    Rule::act("POST", "/v1/batches/{id}/resume", Operate, Spaces, "batch.resume"),
    Rule::act("POST", "/v1/batches/{id}/cancel", Operate, Spaces, "batch.cancel"),
    Rule::look("/v1/search", Read, Spaces),
    Rule::look("/v1/replays", Read, Spaces),
    Rule::look("/v1/errors", Read, Spaces),
    Rule::look("/v1/errors/{id}", Read, Spaces),
    Rule::act("POST", "/v1/errors/{id}/mute", Operate, Spaces, "errors.mute"),
    Rule::act("POST", "/v1/errors/{id}/note", Operate, Spaces, "errors.note"),
    Rule::look("/v1/notifications", Read, Spaces),
    Rule::look("/v1/notifications/{id}", Read, Spaces),
    Rule::act("POST", "/v1/notifications/{id}/resend", Operate, Spaces, "notification.resend"),
    Rule::look("/v1/me", Read, Users),
    Rule::look("/v1/openapi.json", Read, Users),
    Rule::look("/v1/overview", Read, Agents),
    Rule::look("/v1/queue", Read, Installation),
    Rule::look("/v1/capabilities", Read, Installation),
    Rule::look("/v1/workers", Read, Installation),
    Rule::act("POST", "/v1/workers/{id}/drain", Operate, Installation, "worker.drain"),
    Rule::act("POST", "/v1/tokens", Admin, Installation, "token.create"),
    Rule::act("DELETE", "/v1/tokens/{id}", Admin, Installation, "token.revoke"),
];
