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
}

impl Rule {
    const fn new(method: &'static str, path: &'static str, needs: Scope, open_to: OpenTo) -> Rule {
        Rule { method, path, needs, open_to }
    }

    /// The rule of a request. Every GET route takes HEAD too.
    pub fn of(method: &str, path: &str) -> Option<&'static Rule> {
        let method = if method == "HEAD" { "GET" } else { method };
        RULES.iter().find(|rule| rule.method == method && rule.path == path)
    }
}

/// Every route behind the bearer token.
pub const RULES: &[Rule] = &[
    Rule::new("POST", "/v1/chat/{conversation_id}/messages", Operate, Users),
    Rule::new("GET", "/v1/chat/legacy", Read, Installation),
    Rule::new("GET", "/v1/sessions", Read, Users),
    Rule::new("GET", "/v1/sessions/{id}", Read, Users),
    Rule::new("GET", "/v1/sessions/{id}/messages", Read, Users),
    Rule::new("POST", "/v1/sessions/{id}/messages", Operate, Users),
    Rule::new("GET", "/v1/sessions/{id}/stream", Read, Users),
    Rule::new("GET", "/v1/sessions/{id}/steps", Read, Agents),
    Rule::new("GET", "/v1/sessions/{id}/events", Read, Agents),
    Rule::new("GET", "/v1/sessions/{id}/diff/{other}", Read, Agents),
    Rule::new("GET", "/v1/sessions/{id}/context", Read, Agents),
    Rule::new("GET", "/v1/sessions/{id}/tree", Read, Agents),
    Rule::new("POST", "/v1/sessions/{id}/retry", Operate, Agents),
    Rule::new("POST", "/v1/sessions/{id}/cancel", Operate, Agents),
    Rule::new("POST", "/v1/sessions/{id}/wake", Operate, Agents),
    Rule::new("POST", "/v1/sessions/{id}/resolve", Operate, Agents),
    Rule::new("POST", "/v1/sessions/{id}/archive", Operate, Agents),
    Rule::new("POST", "/v1/sessions/{id}/terminate", Operate, Agents),
    Rule::new("POST", "/v1/sessions/{id}/fork", Operate, Agents),
    Rule::new("POST", "/v1/sessions/import", Operate, Spaces),
    Rule::new("GET", "/v1/conversations/{id}/sessions", Read, Spaces),
    Rule::new("GET", "/v1/conversations/{id}/history", Read, Spaces),
    Rule::new("POST", "/v1/conversations/{id}/new", Operate, Spaces),
    Rule::new("GET", "/v1/deliveries", Read, Spaces),
    Rule::new("GET", "/v1/deliveries/{id}", Read, Spaces),
    Rule::new("POST", "/v1/deliveries/{id}/resend", Operate, Spaces),
    Rule::new("GET", "/v1/mails", Read, Spaces),
    Rule::new("POST", "/v1/triggers/email/raw", Operate, Installation),
    Rule::new("POST", "/v1/triggers/herald", Operate, Agents),
    Rule::new("GET", "/v1/schedules", Read, Spaces),
    Rule::new("POST", "/v1/schedules", Operate, Spaces),
    Rule::new("GET", "/v1/schedules/{id}", Read, Spaces),
    Rule::new("PUT", "/v1/schedules/{id}", Operate, Spaces),
    Rule::new("DELETE", "/v1/schedules/{id}", Operate, Spaces),
    Rule::new("POST", "/v1/schedules/{id}/pause", Operate, Spaces),
    Rule::new("POST", "/v1/schedules/{id}/resume", Operate, Spaces),
    Rule::new("POST", "/v1/schedules/{id}/trigger", Operate, Spaces),
    Rule::new("GET", "/v1/schedules/{id}/next", Read, Spaces),
    Rule::new("GET", "/v1/schedules/{id}/firings", Read, Spaces),
    Rule::new("POST", "/v1/user-tokens", Operate, Agents),
    Rule::new("GET", "/v1/tokens", Admin, Installation),
    Rule::new("POST", "/v1/tokens", Admin, Installation),
    Rule::new("DELETE", "/v1/tokens/{id}", Admin, Installation),
];
