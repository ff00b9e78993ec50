//! Context strategies, their settings in an agent's configuration, and the rebase that they decide.

use serde::{Deserialize, Serialize};

/// How the context of a model call is selected from the session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// The whole transcript.
    #[default]
    Full,
    /// The newest messages: the window grows to [`ContextPolicy::high`] and is then cut to [`ContextPolicy::low`].
    SlidingWindow,
    /// The whole transcript, but a line replaces each old tool result and says how to read it again.
    TrimToolResults,
    /// Old tool results are trimmed first. If that is not enough, the model writes a summary, which replaces
    /// old messages.
    Compaction,
}

impl Strategy {
    /// Every strategy.
    pub const ALL: [Strategy; 4] =
        [Strategy::Full, Strategy::SlidingWindow, Strategy::TrimToolResults, Strategy::Compaction];

    /// The word that is configured, stored and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Strategy::Full => "full",
            Strategy::SlidingWindow => "sliding_window",
            Strategy::TrimToolResults => "trim_tool_results",
            Strategy::Compaction => "compaction",
        }
    }

    /// Reads the word.
    pub fn parse(word: &str) -> Option<Strategy> {
        Strategy::ALL.into_iter().find(|strategy| strategy.as_str() == word)
    }
}

/// An agent's strategy and the limits for all strategies. Each strategy reads only its own limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContextPolicy {
    pub strategy: Strategy,
    /// The number of messages to which a sliding window grows before it is cut.
    pub high: i64,
    /// The number of messages to which a sliding window is cut. Keep it well below `high`: each cut makes the
    /// prompt cache miss.
    pub low: i64,
    /// How many of the newest tool results are never trimmed. Errors are never trimmed either.
    pub keep_results: i64,
    /// Tool results are trimmed when all results that may be trimmed exceed this size together.
    pub trim_at_bytes: i64,
    /// Percent of the model's context window at which a summary is written.
    pub compact_at_percent: i64,
}

impl Default for ContextPolicy {
    fn default() -> Self {
        ContextPolicy {
            strategy: Strategy::Full,
            high: 75,
            low: 50,
            keep_results: 10,
            trim_at_bytes: 100_000,
            compact_at_percent: 80,
        }
    }
}

/// Where the context begins: pointers into the session. Copies nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Rebase {
    pub strategy: Strategy,
    /// The newest message when the rebase was decided. The rebase applies to all requests after this message.
    /// A fork that contains this message also gets the rebase.
    pub at_message_number: i64,
    /// Messages with a lower number are left out, and then the seeds too. 0: all messages and seeds are
    /// shown.
    pub keep_from_message_number: i64,
    /// User messages from this number on are shown although they are below `keep_from_message_number`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_messages_from: Option<i64>,
    /// The number of the summary with which the context begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary_message_number: Option<i64>,
    /// Tool results with a lower number are shown as a line that says how to read them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trim_results_before: Option<i64>,
}

impl Rebase {
    /// Returns the rebase that leaves out nothing.
    pub fn nothing(strategy: Strategy, at_message_number: i64) -> Rebase {
        Rebase {
            strategy,
            at_message_number,
            keep_from_message_number: 0,
            user_messages_from: None,
            summary_message_number: None,
            trim_results_before: None,
        }
    }

    /// Returns whether the rebase leaves out and trims nothing.
    pub fn is_nothing(&self) -> bool {
        *self == Rebase::nothing(self.strategy, self.at_message_number)
    }
}
