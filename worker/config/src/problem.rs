//! A problem of a configuration, and where it is.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where a value was written. Ordered by precedence: a later variant wins over an earlier one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Origin {
    /// The value is missing, so there is no place to name.
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
    /// The rank of the source. Two values with the same rank conflict.
    pub fn rank(&self) -> u8 {
        match self {
            Origin::Nowhere => 0,
            Origin::File { .. } => 1,
            Origin::Setting { .. } => 2,
            Origin::Own { .. } => 3,
        }
    }

    /// A path that was written there: in a file it is relative to the file's folder, in the environment to the working folder.
    pub fn beside(&self, text: &str) -> PathBuf {
        match self {
            Origin::File { path, .. } => path.parent().map_or(PathBuf::from(text), |dir| dir.join(text)),
            Origin::Nowhere | Origin::Setting { .. } | Origin::Own { .. } => PathBuf::from(text),
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

/// One problem.
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

/// All problems of a configuration, not only the first.
///
/// The text has one line per problem: the place (a file and line, or a variable), the key, the value and the
/// broken rule. It never contains the value of a secret.
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
