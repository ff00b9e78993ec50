//! What is wrong with a configuration, and where.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// Where a value was written. The order is that of precedence: a later one wins over an earlier one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Origin {
    /// Nowhere: something is missing.
    Nowhere,
    File {
        path: Arc<Path>,
        line: usize,
    },
    /// `WAKEFUL_SECTION__KEY`.
    Setting {
        variable: String,
    },
    /// A variable with a name of its own, such as `OPENAI_API_KEY`.
    Own {
        variable: String,
    },
}

impl Origin {
    /// Which source it is: two values of one rank were given side by side.
    pub fn rank(&self) -> u8 {
        match self {
            Origin::Nowhere => 0,
            Origin::File { .. } => 1,
            Origin::Setting { .. } => 2,
            Origin::Own { .. } => 3,
        }
    }

    pub fn is_environment(&self) -> bool {
        match self {
            Origin::Nowhere | Origin::File { .. } => false,
            Origin::Setting { .. } | Origin::Own { .. } => true,
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Nowhere => write!(f, "configuration"),
            Origin::File { path, line } => write!(f, "{}:{line}", path.display()),
            Origin::Setting { variable } | Origin::Own { variable } => write!(f, "{variable}"),
        }
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Problem {
    origin: Origin,
    text: String,
}

impl Problem {
    pub fn new(origin: Origin, text: impl Into<String>) -> Self {
        Problem { origin, text: text.into() }
    }
}

/// Everything that is wrong with a configuration, not only the first thing.
///
/// Its text is one line a problem: the place (a file and line, or a variable), the key, the value and the rule that
/// the value breaks. The value of a secret is never in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    problems: Vec<Problem>,
}

impl ConfigError {
    pub(super) fn new(mut problems: Vec<Problem>) -> Self {
        problems.sort();
        ConfigError { problems }
    }

    /// The problems, one line each.
    pub fn lines(&self) -> impl Iterator<Item = String> + '_ {
        self.problems.iter().map(|problem| format!("{}: {}", problem.origin, problem.text))
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, line) in self.lines().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            write!(f, "{line}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}
