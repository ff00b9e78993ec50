//! Removes the files of sessions that have rested for long, or that take too much room. Each has a snapshot, so the next
//! tool that asks for them restores them.

use super::folder::{STATE_FOLDER, remove_all};
use super::lock;
use super::settings::Settings;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tracing::{info, warn};

/// How often a process looks.
pub(super) const EVERY: Duration = Duration::from_secs(600);

struct Resting {
    name: String,
    folder: PathBuf,
    used_at: SystemTime,
}

/// Removes what is too old, and then what is too much, the oldest first.
pub(super) fn sweep(settings: &Settings) {
    let mut resting = resting(&settings.folder);
    resting.sort_by_key(|one| one.used_at);
    let mut sizes: Vec<u64> = resting.iter().map(|one| size(&one.folder)).collect();
    let mut total: u64 = sizes.iter().sum();
    for (one, size) in resting.iter().zip(&mut sizes) {
        let too_old = one.used_at.elapsed().is_ok_and(|age| age > settings.keep);
        if !too_old && total <= settings.keep_bytes {
            break;
        }
        if remove(&settings.folder, one) {
            total -= *size;
        }
    }
}

/// The folders that have an index: those whose files are in a snapshot. Others are never removed.
fn resting(root: &Path) -> Vec<Resting> {
    let entries = fs::read_dir(root.join(STATE_FOLDER)).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let name = entry.file_name().to_str()?.strip_suffix(".index")?.to_owned();
            let used_at = entry.metadata().ok()?.modified().ok()?;
            Some(Resting { folder: root.join(&name), name, used_at })
        })
        .collect()
}

/// Removes a folder, unless a claim uses it.
fn remove(root: &Path, one: &Resting) -> bool {
    let Ok(Some(_lock)) = lock::take(&root.join(STATE_FOLDER), &one.name) else { return false };
    let index = super::folder::index_file(root, &one.name);
    if fs::metadata(&index).and_then(|metadata| metadata.modified()).ok() != Some(one.used_at) {
        return false;
    }
    if one.folder.exists()
        && let Err(error) = remove_all(&one.folder)
    {
        warn!(%error, folder = %one.folder.display(), "An unused workspace is still there");
        return false;
    }
    let _ = fs::remove_file(index);
    // Of an earlier build, which had a file for each session.
    let _ = fs::remove_file(root.join(STATE_FOLDER).join(format!("{}.lock", one.name)));
    info!(session.id = one.name, "Removed a workspace that was not used; its snapshot stays");
    true
}

/// Removes everything of a session that is on this host. Returns what could not be removed.
pub fn remove_session(root: &Path, session_id: &str) -> Vec<(PathBuf, std::io::Error)> {
    let of_session = |name: &str| {
        name.strip_prefix(session_id).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let mut left = Vec::new();
    for folder in [root.join(STATE_FOLDER), root.to_owned()] {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if !entry.file_name().to_str().is_some_and(of_session) {
                continue;
            }
            let path = entry.path();
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let removed = if is_folder { remove_all(&path) } else { fs::remove_file(&path) };
            match removed {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => left.push((path, error)),
                _ => {}
            }
        }
    }
    left
}

fn size(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => size(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}
