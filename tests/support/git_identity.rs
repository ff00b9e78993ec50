//! Who commits in the tests' repositories, and when: so a commit has the same hash in each run. Also part of the fixture worker.

/// The environment of git. It reads no configuration of this machine.
pub const ENVIRONMENT: [(&str, &str); 8] = [
    ("GIT_CONFIG_NOSYSTEM", "1"),
    ("GIT_CONFIG_GLOBAL", "/dev/null"),
    ("GIT_AUTHOR_NAME", "Ann"),
    ("GIT_AUTHOR_EMAIL", "ann@example.com"),
    ("GIT_AUTHOR_DATE", "2026-01-01T00:00:00Z"),
    ("GIT_COMMITTER_NAME", "Ann"),
    ("GIT_COMMITTER_EMAIL", "ann@example.com"),
    ("GIT_COMMITTER_DATE", "2026-01-01T00:00:00Z"),
];
