//! Restores a fork's folder from the files in its transcript: all of them or none.

use super::{
    FILE_MODE, FOLDER_MODE, ToolError, io_fault, make_private, open_folder, relative, sync_folders,
    workspace_fault,
};
use cap_std::ambient_authority;
use cap_std::fs::{Dir, DirBuilder, DirBuilderExt as _, OpenOptions, OpenOptionsExt as _};
use std::io::{self, ErrorKind, Write as _};
use std::path::Path;
use wakeful_workflow::files::WrittenFile;

/// Largest number of missing files that an error lists.
const NAMED: usize = 5;

/// Creates the folder `path` with `files` in it. It is created under another name and then renamed, so a
/// folder that exists is complete even after a crash. Concurrent calls create the same folder.
pub(super) fn restore(path: &Path, files: &[WrittenFile]) -> Result<(), ToolError> {
    let unknown: Vec<String> = files
        .iter()
        .filter(|file| file.content.is_none())
        .map(|file| format!("{:?}", file.path.chars().take(120).collect::<String>()))
        .collect();
    if !unknown.is_empty() {
        let more = if unknown.len() > NAMED { " and others" } else { "" };
        return Err(ToolError::new(format!(
            "This session was forked, and its files cannot be made again: the transcript does not hold what was written \
             to {}{more}. Nothing was read or written. Tell the user that the files cannot be reached from here.",
            unknown[..unknown.len().min(NAMED)].join(", ")
        )));
    }
    let (Some(name), Some(parent)) = (path.file_name().and_then(|name| name.to_str()), path.parent()) else {
        return Err(ToolError::new("The workspace has no name.".to_owned()));
    };
    let parent = make_private(parent)
        .and_then(|()| Dir::open_ambient_dir(parent, ambient_authority()))
        .map_err(|error| workspace_fault(&error))?;
    let prefix = format!(".{name}.");
    let part = format!("{prefix}{}", wakeful_store::new_id("part"));
    let made = make(&parent, &part, files)
        .and_then(|()| parent.rename(&part, &parent, name).map_err(|error| workspace_fault(&error)));
    if let Err(error) = made {
        let _ = parent.remove_dir_all(&part);
        // Another call created the folder in the meantime, and removed our unfinished one.
        return if path.is_dir() { Ok(()) } else { Err(error) };
    }
    // The folder is complete without these two steps; a failure here only costs space.
    let _ = parent.open(".").and_then(|dir| dir.sync_all());
    let _ = remove_parts(&parent, &prefix);
    Ok(())
}

fn make(parent: &Dir, part: &str, files: &[WrittenFile]) -> Result<(), ToolError> {
    let mut folder = DirBuilder::new();
    folder.mode(FOLDER_MODE);
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(FILE_MODE);
    let dir = parent
        .create_dir_with(part, &folder)
        .and_then(|()| parent.open_dir(part))
        .map_err(|error| workspace_fault(&error))?;
    for file in files {
        let fault = |error: io::Error| io_fault("written", &file.path, &error);
        let relative = relative(&file.path)?;
        let (Some(name), Some(folder)) = (relative.file_name(), relative.parent()) else {
            return Err(ToolError::new(format!("{:?} names no file.", file.path)));
        };
        let content = file.content.as_deref().unwrap_or_default();
        let folder_of_file = open_folder(&dir, folder).map_err(fault)?;
        let mut made = folder_of_file.open_with(name, &options).map_err(fault)?;
        made.write_all(content.as_bytes()).and_then(|()| made.sync_all()).map_err(fault)?;
        sync_folders(&dir, folder).map_err(fault)?;
    }
    Ok(())
}

/// Removes the leftovers of attempts that died.
fn remove_parts(parent: &Dir, prefix: &str) -> io::Result<()> {
    for entry in parent.entries()? {
        let name = entry?.file_name();
        if name.to_str().is_some_and(|name| name.starts_with(prefix)) {
            match parent.remove_dir_all(&name) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn file(path: &str, content: &str) -> WrittenFile {
        WrittenFile { path: path.into(), content: Some(content.into()) }
    }

    fn entries(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_folder_has_every_file_and_nothing_lies_beside_it() {
        let root = tempfile::tempdir().unwrap();
        let ws = root.path().join("deep").join("sess_1");
        fs::create_dir_all(root.path().join("deep").join(".sess_1.part_dead")).unwrap();
        restore(&ws, &[file("notes/a.txt", "one"), file("b.txt", "two"), file("./b.txt", "three")]).unwrap();
        assert_eq!(fs::read_to_string(ws.join("notes/a.txt")).unwrap(), "one");
        assert_eq!(fs::read_to_string(ws.join("b.txt")).unwrap(), "three");
        assert_eq!(entries(&root.path().join("deep")), ["sess_1"]);
    }

    #[test]
    fn a_file_that_is_not_known_leaves_no_folder_and_is_named() {
        let root = tempfile::tempdir().unwrap();
        let ws = root.path().join("sess_1");
        let unknown = WrittenFile { path: "b.bin".into(), content: None };
        let error = restore(&ws, &[file("a.txt", "one"), unknown]).unwrap_err().to_string();
        assert!(error.contains("\"b.bin\"") && error.contains("cannot be made again"), "{error}");
        assert!(entries(root.path()).is_empty());
    }

    #[test]
    fn a_path_out_of_the_workspace_is_refused_and_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        for path in ["../secret", "/etc/passwd", "a/../../b"] {
            assert!(
                restore(&root.path().join("sess_1"), &[file("a.txt", "one"), file(path, "x")]).is_err(),
                "{path}"
            );
            assert!(entries(root.path()).is_empty(), "{path}");
        }
    }

    #[test]
    fn calls_side_by_side_make_one_folder() {
        let root = tempfile::tempdir().unwrap();
        let ws = root.path().join("sess_1");
        let files: Vec<WrittenFile> = (0..20).map(|n| file(&format!("{n}/a.txt"), "x")).collect();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| restore(&ws, &files).unwrap());
            }
        });
        assert_eq!(entries(&ws).len(), 20);
        // A call that found the folder may have left its own unfinished one, so other entries may exist.
        assert!(entries(root.path()).contains(&"sess_1".to_owned()));
    }
}
