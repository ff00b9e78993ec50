//! Git, for agents whose sessions begin with a git bundle. It is run for that only, and never in a folder that a model has
//! written in: so neither hooks nor filters nor other files of a session's `.git` are ever run or read by it here.
//!
//! It gets an environment of its own: no configuration of the host or of a user, no hook, no prompt, no network.

use super::look::Limits;
use std::ffi::{OsStr, OsString};
use std::io::{ErrorKind, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;
use tokio::time::Instant;

/// The most that git may write to its output: lists of names.
const OUTPUT_BYTES: u64 = 64 << 20;

/// The first bytes of a bundle.
const MAGIC: [&[u8]; 2] = [b"# v2 git bundle\n", b"# v3 git bundle\n"];

/// Settings of every call. They come before those of the folder's own configuration.
const SETTINGS: &[&str] = &[
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.protectHFS=true",
    "core.protectNTFS=true",
    "core.symlinks=true",
    // Reflogs would name the host and its user.
    "core.logAllRefUpdates=false",
    // Refuses objects that no checkout should meet: `.git` and its twins, `..`, links in place of git's own files.
    "fetch.fsckObjects=true",
    "transfer.fsckObjects=true",
    // What is fetched stays packed, so a small bundle does not become many files.
    "fetch.unpackLimit=1",
    "transfer.unpackLimit=1",
    "transfer.bundleURI=false",
    "submodule.recurse=false",
    "gc.auto=0",
    "maintenance.auto=false",
    "init.defaultBranch=main",
];

/// The program.
#[derive(Clone, Debug)]
pub struct Git(PathBuf);

impl Git {
    /// Finds git where the process looks for programs.
    pub fn find() -> Option<Git> {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).filter(|folder| folder.is_absolute()).find_map(|folder| {
            let program = folder.join("git");
            let found = std::fs::metadata(&program).ok()?;
            (found.is_file() && found.permissions().mode() & 0o111 != 0).then_some(Git(program))
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Makes the empty folder `into` a repository with the branches and tags of `bundle`, and checks out the branch that the
    /// bundle calls HEAD, else `main`, `master` or the first.
    ///
    /// # Errors
    /// What is wrong with the bundle, without a path.
    pub(super) async fn unbundle(&self, bundle: &Path, into: &Path, limits: &Limits) -> Result<(), String> {
        let mut start = Vec::new();
        let file = std::fs::File::open(bundle).map_err(|error| error.to_string())?;
        let size = file.metadata().map_err(|error| error.to_string())?.len();
        file.take(16).read_to_end(&mut start).map_err(|error| error.to_string())?;
        if !MAGIC.contains(&start.as_slice()) {
            return Err("it is neither a folder nor a git bundle".to_owned());
        }
        if size > limits.bytes {
            return Err(format!("it has more than {} bytes", limits.bytes));
        }
        let run = Run { git: self, into, until: Instant::now() + limits.time, limits };
        run.of(&["init", "-q", "--template=", "."]).await?;
        let heads = run.of_path(&["bundle", "list-heads"], bundle, &[]).await?;
        let (branch, fetched_as) = head(&heads).ok_or("it has no branch")?;
        let mut refs = vec!["+refs/heads/*:refs/heads/*".to_owned(), "+refs/tags/*:refs/tags/*".to_owned()];
        refs.extend(fetched_as);
        let refs: Vec<&str> = refs.iter().map(String::as_str).collect();
        let fetch = [
            "fetch",
            "-q",
            "--no-tags",
            "--update-head-ok",
            "--no-write-fetch-head",
            "--no-recurse-submodules",
        ];
        run.of_path(&fetch, bundle, &refs).await?;
        run.of(&["symbolic-ref", "HEAD", &format!("refs/heads/{branch}")]).await?;
        let attributes = run.fits(&run.of(&["ls-tree", "-r", "-l", "-z", "HEAD"]).await?)?;
        for path in attributes {
            let text = run.of(&["cat-file", "blob", &path]).await?;
            if String::from_utf8_lossy(&text).contains("filter=lfs") {
                return Err("it uses Git LFS, and a bundle does not have the files of that".to_owned());
            }
        }
        run.of(&["reset", "-q", "--hard"]).await?;
        Ok(())
    }
}

/// One bundle, and what it may take.
struct Run<'a> {
    git: &'a Git,
    into: &'a Path,
    until: Instant,
    limits: &'a Limits,
}

impl Run<'_> {
    async fn of(&self, arguments: &[&str]) -> Result<Vec<u8>, String> {
        self.with(arguments.iter().map(OsString::from).collect()).await
    }

    async fn of_path(&self, before: &[&str], path: &Path, after: &[&str]) -> Result<Vec<u8>, String> {
        let before = before.iter().map(OsString::from);
        self.with(before.chain([path.into()]).chain(after.iter().map(OsString::from)).collect()).await
    }

    async fn with(&self, arguments: Vec<OsString>) -> Result<Vec<u8>, String> {
        let mut command = Command::new(&self.git.0);
        command.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        for (name, value) in [
            ("GIT_CONFIG_NOSYSTEM", "1"),
            ("GIT_CONFIG_GLOBAL", "/dev/null"),
            ("GIT_ATTR_NOSYSTEM", "1"),
            ("HOME", "/dev/null"),
            ("GIT_TERMINAL_PROMPT", "0"),
            ("GIT_ASKPASS", "/bin/false"),
            // A bundle is a file.
            ("GIT_ALLOW_PROTOCOL", "file"),
            ("GIT_NO_LAZY_FETCH", "1"),
            ("GIT_NO_REPLACE_OBJECTS", "1"),
            ("GIT_DIR", ".git"),
            ("GIT_WORK_TREE", "."),
            ("LC_ALL", "C"),
        ] {
            command.env(name, value);
        }
        command.current_dir(self.into);
        command.args(SETTINGS.iter().flat_map(|setting| ["-c", setting])).args(&arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let ends = async {
            let mut child = command.spawn()?;
            let missing = || std::io::Error::from(ErrorKind::BrokenPipe);
            let stdout = child.stdout.take().ok_or_else(missing)?;
            let stderr = child.stderr.take().ok_or_else(missing)?;
            let (mut output, mut said) = (Vec::new(), Vec::new());
            let (mut stdout, mut stderr) = (stdout.take(OUTPUT_BYTES), stderr.take(OUTPUT_BYTES));
            tokio::try_join!(stdout.read_to_end(&mut output), stderr.read_to_end(&mut said))?;
            Ok::<_, std::io::Error>((child.wait().await?, output, said))
        };
        let left = self.until.saturating_duration_since(Instant::now());
        let (status, output, said) = match tokio::time::timeout(left, ends).await {
            Ok(ended) => ended.map_err(|error| format!("git could not be run: {error}"))?,
            Err(_) => return Err(format!("it was not copied within {} seconds", self.limits.time.as_secs())),
        };
        if status.success() {
            return Ok(output);
        }
        let said = String::from_utf8_lossy(&said);
        // Git names the file, and the model has no use for a path of the host.
        let line = said.lines().find(|line| line.contains("error") || line.contains("fatal"));
        let line = line.unwrap_or_default().replace(&*self.into.to_string_lossy(), "…");
        let of_bundle = arguments.iter().find(|one| Path::new(one).is_absolute());
        let line = of_bundle.map_or_else(|| line.clone(), |path| line.replace(&*path.to_string_lossy(), "…"));
        Err(format!("git refuses it: {}", line.chars().take(300).collect::<String>()))
    }

    /// Checks what a checkout would write, and returns the names of the objects that are attributes.
    fn fits(&self, listed: &[u8]) -> Result<Vec<String>, String> {
        let (mut files, mut bytes, mut attributes) = (0_u64, 0_u64, Vec::new());
        for entry in listed.split(|byte| *byte == 0).filter(|entry| !entry.is_empty()) {
            let at =
                entry.iter().position(|byte| *byte == b'\t').ok_or("its list of files cannot be read")?;
            let (facts, path) =
                (String::from_utf8_lossy(&entry[..at]), Path::new(OsStr::from_bytes(&entry[at + 1..])));
            let facts: Vec<&str> = facts.split_ascii_whitespace().collect();
            let [_, kind, object, size] = facts[..] else {
                return Err("its list of files cannot be read".to_owned());
            };
            if kind == "commit" {
                return Err(format!(
                    "{} is a submodule, and a bundle does not have its files",
                    path.display()
                ));
            }
            files += 1;
            bytes = bytes.saturating_add(size.parse().map_err(|_| "its list of files cannot be read")?);
            if path.file_name() == Some(OsStr::new(".gitattributes")) {
                attributes.push(object.to_owned());
            }
        }
        if files > self.limits.files {
            return Err(format!("it has more than {} files", self.limits.files));
        }
        if bytes > self.limits.bytes {
            return Err(format!("it has more than {} bytes", self.limits.bytes));
        }
        Ok(attributes)
    }
}

/// The branch to check out, and how it is fetched if the bundle has it as HEAD only.
fn head(listed: &[u8]) -> Option<(String, Option<String>)> {
    let listed = String::from_utf8_lossy(listed);
    let refs: Vec<(&str, &str)> = listed.lines().filter_map(|line| line.split_once(' ')).collect();
    let branches: Vec<(&str, &str)> =
        refs.iter().filter_map(|(hash, name)| Some((*hash, name.strip_prefix("refs/heads/")?))).collect();
    let head = refs.iter().find(|(_, name)| *name == "HEAD").map(|(hash, _)| *hash);
    // A bundle says which commit HEAD is, and not which branch.
    let of_head: Vec<&str> = branches
        .iter()
        .filter(|(hash, _)| head.is_none_or(|head| head == *hash))
        .map(|(_, name)| *name)
        .collect();
    let chosen =
        ["main", "master"].into_iter().find(|name| of_head.contains(name)).or(of_head.first().copied());
    match (chosen, head) {
        (Some(branch), _) => Some((branch.to_owned(), None)),
        (None, Some(_)) => {
            let is_taken = branches.iter().any(|(_, name)| *name == "main");
            let branch = if is_taken { "head" } else { "main" };
            Some((branch.to_owned(), Some(format!("+HEAD:refs/heads/{branch}"))))
        }
        (None, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::head;

    #[test]
    fn the_branch_of_a_bundle_is_that_of_its_head() {
        let of = |listed: &str| head(listed.as_bytes());
        let branch = |name: &str| Some((name.to_owned(), None));
        assert_eq!(of("1 refs/heads/a\n2 refs/heads/main\n2 HEAD\n"), branch("main"));
        assert_eq!(of("1 refs/heads/a\n2 refs/heads/main\n1 HEAD\n"), branch("a"));
        assert_eq!(of("1 refs/heads/a\n2 refs/heads/master\n"), branch("master"));
        assert_eq!(of("1 refs/heads/b\n2 refs/heads/c\n2 refs/tags/v1\n"), branch("b"));
        assert_eq!(of("1 HEAD\n").unwrap().1.as_deref(), Some("+HEAD:refs/heads/main"));
        assert_eq!(of("1 refs/heads/main\n2 HEAD\n").unwrap().1.as_deref(), Some("+HEAD:refs/heads/head"));
        assert_eq!(of("1 refs/tags/v1\n"), None);
    }
}
