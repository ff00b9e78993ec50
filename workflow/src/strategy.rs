//! Context strategies, their settings in an agent's configuration, and the rebase that they decide.

use serde::{Deserialize, Serialize};

/// How the context of a model call is selected out of the session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// Everything that was said.
    #[default]
    Full,
    /// The newest messages: the window grows to [`ContextPolicy::high`] and is then cut to [`ContextPolicy::low`].
    SlidingWindow,
    /// Everything, but old results of tools are replaced by a line that says how to read them again.
    TrimToolResults,
    /// Old results are trimmed first; what is still too much is replaced by a summary that the model writes.
    Compaction,
}

impl Strategy {
    /// Every strategy, from the one that leaves out nothing.
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

/// An agent's strategy with its measures. Each strategy looks at its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContextPolicy {
    pub strategy: Strategy,
    /// Messages to which a sliding window grows …
    pub high: i64,
    /// … and to which it is cut then. The distance is what makes cuts, and so misses of the prompt cache, rare.
    pub low: i64,
    /// The newest results of tools, which are never trimmed. Errors are not either.
    pub keep_results: i64,
    /// Results are trimmed when all trimmable results together exceed this.
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

/// Where the context begins from a message on: pointers into the session, and no copy of anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rebase {
    pub strategy: Strategy,
    /// The newest message that it was decided on: it holds for the requests after that one. A fork that has this message
    /// has the rebase too.
    pub at_message_number: i64,
    /// Messages below it are left out. 0: nothing is, seeds included.
    pub keep_from_message_number: i64,
    /// Messages of the user from this one on are shown although they are below `keep_from_message_number`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_messages_from: Option<i64>,
    /// The record of the summary that the context begins with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary_message_number: Option<i64>,
    /// Results of tools below it are shown as a line that says how to read them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trim_results_before: Option<i64>,
}

impl Rebase {
    /// The rebase that leaves everything as it is.
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

    /// Whether it leaves out or changes nothing.
    pub fn is_nothing(&self) -> bool {
        *self == Rebase::nothing(self.strategy, self.at_message_number)
    }
}
