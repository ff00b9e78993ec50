//! The agent of a claim's session. It follows from the configuration, which a process reads once, and from the session's own
//! policy. So it is the same from step to step, until the session is read again with another policy.

use crate::ctx::Ctx;
use wakeful_config::AgentError;
use wakeful_workflow::agent::Agent;
use wakeful_workflow::policy::SessionPolicy;
use wakeful_workflow::session::Session;

pub(super) struct OwnAgent {
    agent: Result<Agent, AgentError>,
    policy: SessionPolicy,
}

impl OwnAgent {
    pub(super) fn of(ctx: &Ctx, session: &Session) -> OwnAgent {
        OwnAgent { agent: ctx.agent_here(session), policy: session.policy.clone() }
    }

    /// Returns the agent for the session as it is now. An agent that this process lacks is looked for again: the session's
    /// files may have come since.
    pub(super) fn now(&mut self, ctx: &Ctx, session: &Session) -> &Result<Agent, AgentError> {
        if self.agent.is_err() || self.policy != session.policy {
            *self = OwnAgent::of(ctx, session);
        }
        &self.agent
    }
}
