//! The faults of a step, and whether each is retried or fails the run. One exhaustive match decides that.
#![deny(missing_docs)]

use serde::{Deserialize, Serialize};

/// Why a step could not be performed. A failed tool call is not a fault: the model gets its error as a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Fault {
    /// HTTP 429.
    #[error("the model's provider limits the rate of calls")]
    RateLimited {
        /// When the provider allows the next call, if it said so.
        retry_after_ms: Option<u64>,
    },
    /// HTTP 5xx or 529, or an overloaded error inside the stream.
    #[error("the model's provider is overloaded or failing (status {status}): {message}")]
    Overloaded {
        /// The HTTP status.
        status: u16,
        /// What the provider, or this process, says.
        message: String,
        /// When the provider allows the next call, if it said so.
        retry_after_ms: Option<u64>,
    },
    /// No answer within the time limit.
    #[error("the model did not answer within {after_ms} ms")]
    Timeout {
        /// How long the call waited.
        after_ms: u64,
    },
    /// The connection could not be made or broke before the response's head.
    #[error("the model's provider could not be reached: {message}")]
    Unreachable {
        /// What the provider, or this process, says.
        message: String,
    },
    /// The stream ended without its end marker. Its text is not a reply.
    #[error("the model's stream was cut before its end marker")]
    StreamCut,
    /// The stream began and did not end within the time limit. Its text is not a reply.
    #[error("the model's stream began and did not go on within {after_ms} ms")]
    Stalled {
        /// The limit: of a silence, or of the whole call.
        after_ms: u64,
    },
    /// The stream held something that its protocol does not define.
    #[error("the model's answer could not be read: {message}")]
    BadResponse {
        /// What the provider, or this process, says.
        message: String,
    },
    /// Neither text nor a tool call.
    #[error("the model's answer was empty")]
    EmptyReply,
    /// The request is larger than the model's context window.
    #[error("the conversation is longer than the model's context window: {message}")]
    ContextOverflow {
        /// What the provider, or this process, says.
        message: String,
    },
    /// HTTP 401 or 403.
    #[error("the model's provider refused the credentials: {message}")]
    Unauthorized {
        /// What the provider, or this process, says.
        message: String,
    },
    /// HTTP 404: no such model.
    #[error("the model's provider does not know the model: {message}")]
    UnknownModel {
        /// What the provider, or this process, says.
        message: String,
    },
    /// Any other HTTP 4xx: the same request will be refused again.
    #[error("the model's provider refused the request (status {status}): {message}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// What the provider, or this process, says.
        message: String,
    },
    /// The agent, or its model's provider, is not in this worker's configuration.
    #[error("{message}")]
    NotConfigured {
        /// What the provider, or this process, says.
        message: String,
    },
    /// The run took as many steps as its agent's `limits.steps`.
    #[error("the run reached its limit of {limit} steps")]
    StepLimit {
        /// The configured limit.
        limit: i64,
    },
    /// The run used as many tokens as its agent's `limits.tokens`.
    #[error("the run reached its limit of {limit} tokens")]
    TokenLimit {
        /// The configured limit.
        limit: i64,
    },
    /// The arguments of all calls that the model has made lately were no JSON object.
    #[error("the model made only malformed tool calls in {turns} turns in a row")]
    MalformedCalls {
        /// How many turns.
        turns: usize,
    },
    /// Every worker that claimed the step died or stopped answering.
    #[error("the step made no progress in {attempts} attempts: its worker died each time{}", .during.as_deref().map(|what| format!(", while it {what}")).unwrap_or_default())]
    WorkerDied {
        /// How many workers died at the step.
        attempts: i64,
        /// What they did: "ran charge (call_1)".
        #[serde(default, skip_serializing_if = "Option::is_none")]
        during: Option<String>,
    },
    /// Repeated claims made no progress, because of this fault and perhaps of crashes between the attempts.
    #[error("the step made no progress in {attempts} attempts; last error: {last_error}")]
    Stuck {
        /// How often the step was claimed.
        attempts: i64,
        /// The text of the last fault.
        last_error: String,
    },
    /// The provider failed for longer than the agent's `limits.outage_s`.
    #[error("{provider} failed for {for_s} s, in {attempts} attempts; last error: {last_error}")]
    ProviderDown {
        /// The provider, as the model's name begins.
        provider: String,
        /// Since the first fault, or since the wait for the provider began.
        for_s: u64,
        /// How many calls of this step failed.
        attempts: i64,
        /// The text of the last fault.
        last_error: String,
    },
    /// A replay with recorded replies reached the end of its source's replies.
    #[error("the recording ends here: {message}")]
    RecordingOver {
        /// What the provider, or this process, says.
        message: String,
    },
    /// Our own defect: a panic or an impossible state.
    #[error("internal error: {message}")]
    Internal {
        /// What the provider, or this process, says.
        message: String,
    },
}

/// Whether a fault is retried or fails the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Try the step again, no sooner than the given delay; the queue adds its own backoff.
    Retry {
        /// The delay.
        after_ms: Option<u64>,
    },
    /// Fail the run. A retry changes nothing until a person follows the remedy. Then `session retry`
    /// continues the run.
    Fail {
        /// What the person should do.
        remedy: &'static str,
    },
}

/// The message of [`Fault::withheld`].
const WITHHELD: &str = "the provider withheld the whole answer";

/// Whether a refusal says that the account has no credit or quota left.
fn is_about_money(status: u16, message: &str) -> bool {
    matches!(status, 402 | 429) || message.to_lowercase().contains("credit balance")
}

impl Fault {
    /// The provider's filter kept the whole answer back. Another try would get no more.
    pub fn withheld() -> Fault {
        Fault::Refused { status: 200, message: WITHHELD.to_owned() }
    }

    /// Returns whether the step is retried or the run fails. No other place decides this.
    pub fn verdict(&self) -> Verdict {
        match self {
            Fault::RateLimited { retry_after_ms } | Fault::Overloaded { retry_after_ms, .. } => {
                Verdict::Retry { after_ms: *retry_after_ms }
            }
            Fault::Timeout { .. }
            | Fault::Unreachable { .. }
            | Fault::StreamCut
            | Fault::Stalled { .. }
            | Fault::BadResponse { .. }
            | Fault::EmptyReply
            | Fault::Internal { .. } => Verdict::Retry { after_ms: None },
            Fault::ContextOverflow { .. } => Verdict::Fail {
                remedy: "let the agent shorten its context ([agents.NAME.context] strategy = \"compaction\"), or give it a model with a \
                         larger context window, and restart the workers; then retry the session. Or begin anew: wakeful session \
                         new CONVERSATION",
            },
            Fault::Unauthorized { .. } => Verdict::Fail {
                remedy: "set the provider's API key (ANTHROPIC_API_KEY, OPENAI_API_KEY) on the workers, then retry the session",
            },
            Fault::UnknownModel { .. } => Verdict::Fail {
                remedy: "correct the agent's `model` in wakeful.toml, restart the workers, then retry the session",
            },
            Fault::Refused { status, message } if is_about_money(*status, message) => Verdict::Fail {
                remedy: "the account at the provider has no credit or quota left: add some there, or give the agent a model of \
                         another provider and restart the workers; then retry the session",
            },
            Fault::Refused { message, .. } if message == WITHHELD => Verdict::Fail {
                remedy: "the provider's filter keeps back what the model answers here: change the agent's system prompt or its tools, \
                         or give it another model, and restart the workers; then retry the session",
            },
            Fault::Refused { .. } => Verdict::Fail {
                remedy: "read the provider's message, correct the agent or its tools, then retry the session",
            },
            Fault::NotConfigured { .. } => Verdict::Fail {
                remedy: "correct the file that it names, or else the workers' wakeful.toml and restart them; then retry the session",
            },
            Fault::StepLimit { .. } => Verdict::Fail {
                remedy: "raise `limits.steps` of the agent if the work is sound, then retry the session; it goes on where it stood",
            },
            Fault::TokenLimit { .. } => Verdict::Fail {
                remedy: "raise `limits.tokens` of the agent if the work is sound, then retry the session; it goes on where it stood",
            },
            Fault::MalformedCalls { .. } => Verdict::Fail {
                remedy: "give the agent a model that calls tools soundly, or raise the model's `max_output_tokens` if its calls are \
                         cut off, and restart the workers; then retry the session, and the model is asked once more",
            },
            Fault::WorkerDied { .. } => Verdict::Fail {
                remedy: "read the end of the dead workers' logs (they name a tool that crashed or did not yield; if they \
                         name none, the process was killed, most often for its memory), fix or remove the cause, then \
                         retry the session; it goes on where it stood",
            },
            Fault::ProviderDown { .. } => Verdict::Fail {
                remedy: "look at the provider's status page and at the network; raise `limits.outage_s` of the agent, or give \
                         it a `fallback` of another provider; then retry the session; it goes on where it stood",
            },
            Fault::RecordingOver { .. } => Verdict::Fail {
                remedy: "replay with a model that is called (`wakeful replay --model`), or begin at another message",
            },
            Fault::Stuck { .. } => Verdict::Fail {
                remedy: "fix the cause that the last error names, then retry the session; it goes on where it stood",
            },
        }
    }

    /// Returns whether the provider is down or overloaded for now, so that the same request may succeed later. Such a fault
    /// uses up the agent's `limits.outage_s` and no attempt.
    pub fn is_outage(&self) -> bool {
        matches!(
            self,
            Fault::RateLimited { .. }
                | Fault::Overloaded { .. }
                | Fault::Timeout { .. }
                | Fault::Unreachable { .. }
        )
    }

    /// Returns whether the fault counts towards shutting the provider's gate. A stream that is cut or stalls does, because a
    /// proxy in front of a dead provider cuts every stream. It uses up attempts all the same: what was streamed is paid for.
    pub fn shuts_gate(&self) -> bool {
        self.is_outage() || matches!(self, Fault::StreamCut | Fault::Stalled { .. })
    }

    /// Returns whether the provider answered, if only with a refusal or something unreadable.
    pub fn is_answer(&self) -> bool {
        matches!(
            self,
            Fault::BadResponse { .. }
                | Fault::EmptyReply
                | Fault::ContextOverflow { .. }
                | Fault::Unauthorized { .. }
                | Fault::UnknownModel { .. }
                | Fault::Refused { .. }
        )
    }

    /// The text for logs: without what the provider said, which may quote the prompt or the answer. The run's error and the journal
    /// have all of it.
    pub fn in_log(&self) -> String {
        let text = self.to_string();
        let (Fault::Overloaded { message: said, .. }
        | Fault::BadResponse { message: said }
        | Fault::ContextOverflow { message: said }
        | Fault::Unauthorized { message: said }
        | Fault::UnknownModel { message: said }
        | Fault::Refused { message: said, .. }
        | Fault::Stuck { last_error: said, .. }
        | Fault::ProviderDown { last_error: said, .. }) = self
        else {
            return text;
        };
        // It stands at the end of each of these texts.
        let ours = text.strip_suffix(said.as_str()).unwrap_or(self.kind());
        ours.trim_end_matches([':', ' ']).trim_end_matches("; last error").to_owned()
    }

    /// Returns when the provider allows the next call, if it said so.
    pub fn retry_after_ms(&self) -> Option<u64> {
        match self.verdict() {
            Verdict::Retry { after_ms } => after_ms,
            Verdict::Fail { .. } => None,
        }
    }

    /// The fault's kind as one word, for logs, metrics and `error.type`.
    pub fn kind(&self) -> &'static str {
        match self {
            Fault::RateLimited { .. } => "rate_limited",
            Fault::Overloaded { .. } => "overloaded",
            Fault::Timeout { .. } => "timeout",
            Fault::Unreachable { .. } => "unreachable",
            Fault::StreamCut => "stream_cut",
            Fault::Stalled { .. } => "stalled",
            Fault::BadResponse { .. } => "bad_response",
            Fault::EmptyReply => "empty_reply",
            Fault::ContextOverflow { .. } => "context_overflow",
            Fault::Unauthorized { .. } => "unauthorized",
            Fault::UnknownModel { .. } => "unknown_model",
            Fault::Refused { .. } => "refused",
            Fault::NotConfigured { .. } => "not_configured",
            Fault::StepLimit { .. } => "step_limit",
            Fault::TokenLimit { .. } => "token_limit",
            Fault::MalformedCalls { .. } => "malformed_calls",
            Fault::WorkerDied { .. } => "worker_died",
            Fault::Stuck { .. } => "stuck",
            Fault::ProviderDown { .. } => "provider_down",
            Fault::RecordingOver { .. } => "recording_over",
            Fault::Internal { .. } => "internal",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_for_logs_has_nothing_that_the_provider_said() {
        const SAID: &str = "invalid prompt: a secret: ";
        let message = || SAID.to_owned();
        for (fault, text) in [
            (
                Fault::Overloaded { status: 503, message: message(), retry_after_ms: None },
                "the model's provider is overloaded or failing (status 503)",
            ),
            (Fault::BadResponse { message: message() }, "the model's answer could not be read"),
            (
                Fault::ContextOverflow { message: message() },
                "the conversation is longer than the model's context window",
            ),
            (Fault::Unauthorized { message: message() }, "the model's provider refused the credentials"),
            (Fault::UnknownModel { message: message() }, "the model's provider does not know the model"),
            (
                Fault::Refused { status: 400, message: message() },
                "the model's provider refused the request (status 400)",
            ),
            (Fault::Stuck { attempts: 3, last_error: message() }, "the step made no progress in 3 attempts"),
            (
                Fault::ProviderDown {
                    provider: "openai".to_owned(),
                    for_s: 60,
                    attempts: 4,
                    last_error: message(),
                },
                "openai failed for 60 s, in 4 attempts",
            ),
            (Fault::EmptyReply, "the model's answer was empty"),
            (
                Fault::Unreachable { message: "connection refused".to_owned() },
                "the model's provider could not be reached: connection refused",
            ),
        ] {
            assert_eq!(fault.in_log(), text);
        }
        let silent = Fault::Refused { status: 400, message: String::new() };
        assert_eq!(silent.in_log(), "the model's provider refused the request (status 400)");
    }
}
