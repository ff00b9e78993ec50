//! Checks the documents: each test that they name exists, and each route is documented.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

#[test]
fn every_test_that_is_named_exists() {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let tests = root.join("tests");
    let map = std::fs::read_to_string(tests.join("README.md")).unwrap();
    for number in 1..=45 {
        let row = map.lines().find(|line| line.starts_with(&format!("| K{number} |")));
        let row = row.unwrap_or_else(|| panic!("no row for K{number}"));
        assert!(row.contains("::") || row.contains("open: ") || row.contains("the same two"), "{row}");
    }
    for number in 1..=30 {
        let row = map.lines().find(|line| line.starts_with(&format!("| A{number} |")));
        let row = row.unwrap_or_else(|| panic!("no row for A{number}"));
        let told = ["`workflow/", "elsewhere", "no behaviour"].iter().any(|word| row.contains(word));
        assert!(row.contains("::") || told, "{row}");
    }
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let promises = readme.split("\n## ").find(|section| section.starts_with("Promises")).unwrap();
    let all = std::fs::read_to_string(tests.join("PROMISES.md")).unwrap();
    let architecture = std::fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    let invariants = architecture.split("\n## ").find(|section| section.starts_with("Invariants")).unwrap();
    let security = std::fs::read_to_string(root.join("SECURITY.md")).unwrap();
    let defences = security.split("\n## ").find(|section| section.starts_with("What is defended")).unwrap();
    for row in defences.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| defence")) {
        assert!(row.contains("::"), "a defence without a test: {row}");
    }
    let tables = [(map.as_str(), 40), (all.as_str(), 60), (promises, 12), (invariants, 20), (defences, 25)];
    for (text, least) in tables {
        let names = named(text);
        assert!(names.len() >= least, "the table is read: {names:?}");
        let missing: Vec<&String> = names.iter().filter(|name| !exists(&tests, name)).collect();
        assert!(missing.is_empty(), "tests that are named and do not exist: {missing:#?}");
    }
}

/// `make check` runs no slow test, so a reader must see which promise rests on `make soak` alone.
#[test]
fn a_row_that_only_slow_tests_hold_says_so() {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let tests = root.join("tests");
    let mut silent = Vec::new();
    for document in ["tests/README.md", "tests/PROMISES.md", "README.md", "ARCHITECTURE.md", "SECURITY.md"] {
        let text = std::fs::read_to_string(root.join(document)).unwrap();
        for row in text.lines().filter(|line| line.starts_with("| ") && !line.contains("`make soak`")) {
            let names = named(row);
            // What stands in `peers` needs servers of others, and says so by its name.
            let is_peer = |name: &&String| name.starts_with("peers::");
            let all_slow = names.iter().all(|name| is_peer(&name) || is_slow(&tests, name));
            if all_slow && !names.iter().all(|name| is_peer(&name)) {
                silent.push(format!("{document}: {row}"));
            }
        }
    }
    assert!(silent.is_empty(), "add `make soak` to the row: {silent:#?}");
}

/// Returns whether a name belongs to slow tests only.
fn is_slow(tests: &Path, name: &str) -> bool {
    let (source, begins) = source_of(tests, name);
    let source = source.unwrap_or_default();
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let named = |line: &str| line.trim_start_matches("async ").starts_with(&format!("fn {begins}"));
    // An attribute stands before each test, and the last one says whether it is slow.
    let attributes = lines
        .iter()
        .zip(lines.iter().skip(1))
        .filter(|(before, line)| before.starts_with("#[") && named(line));
    let slow: Vec<bool> = attributes.map(|(before, _)| before.starts_with("#[ignore")).collect();
    !slow.is_empty() && !slow.contains(&false)
}

#[test]
fn every_failpoint_stands_in_the_table_of_failpoints() {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let map = std::fs::read_to_string(root.join("tests/README.md")).unwrap();
    let table = map.split("\n## Failpoints").nth(1).unwrap();
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let rows: BTreeSet<String> = rows.map(str::to_owned).collect();
    let sources =
        ["store/src", "worker/engine/src", "worker/http/src", "worker/channels/src", "worker/cli/src"];
    let mut set = BTreeSet::new();
    for source in sources {
        failpoints(&root.join(source), &mut set);
    }
    assert!(set.len() >= 50, "the sources are read: {set:?}");
    assert_eq!(rows, set, "left: the table, right: the sources");
}

/// The names of all failpoints in the sources below `dir`.
fn failpoints(dir: &Path, names: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            failpoints(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = std::fs::read_to_string(&path).unwrap();
            let set = source.split("failpoint!(\"").skip(1).filter_map(|rest| rest.split('"').next());
            names.extend(set.map(str::to_owned));
        }
    }
}

#[test]
fn what_the_readme_promises_is_among_all_promises() {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let all = std::fs::read_to_string(root.join("tests/PROMISES.md")).unwrap();
    let promises = readme.split("\n## ").find(|section| section.starts_with("Promises")).unwrap();
    let rows: Vec<&str> = promises.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    assert!(rows.len() >= 12, "the table is read: {rows:?}");
    for row in rows {
        assert!(all.lines().any(|line| line == row), "not in tests/PROMISES.md: {row}");
    }
}

#[test]
fn every_route_stands_in_the_interfaces_document() {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let document = std::fs::read_to_string(root.join("API.md")).unwrap();
    let routes =
        routes(&root.join("worker/http/src")).into_iter().chain(routes(&root.join("worker/channels/src")));
    let routes: Vec<String> = routes.collect();
    assert!(routes.len() >= 40, "the routes are read: {routes:?}");
    // A row may list `/sessions/{id}/cancel` as `/sessions/{id}/retry`, `/cancel`.
    let is_missing = |route: &&String| {
        let end = route.rfind('/').unwrap();
        let row = |line: &str| line.contains(&route[..end]) && line.contains(&format!("{}`", &route[end..]));
        !(document.contains(&format!("{route}`")) || document.lines().any(row))
    };
    let missing: Vec<&String> = routes.iter().filter(is_missing).collect();
    assert!(missing.is_empty(), "routes that API.md does not name: {missing:#?}");
}

/// The paths of all routes in the sources below `dir`, as written there.
pub fn routes(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(routes(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = std::fs::read_to_string(&path).unwrap();
            // Skip the servers that unit tests start.
            let source = source.split("#[cfg(test)]").next().unwrap();
            let calls = source.split(".route(").skip(1);
            let quoted = calls.filter_map(|call| call.trim_start().strip_prefix('"')?.split('"').next());
            found.extend(quoted.map(|path| path.replace("{conversation_id}", "{conversation}")));
        }
    }
    found
}

#[test]
fn every_link_and_every_path_in_a_document_leads_to_a_file() {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let documents = documents(&root);
    assert!(documents.len() >= 25, "the documents are found: {documents:?}");
    let mut dangling = Vec::new();
    for document in &documents {
        let text = std::fs::read_to_string(document).unwrap();
        let folder = document.parent().unwrap();
        let links = links(&text).into_iter().filter(|link| !folder.join(link).exists());
        let paths = paths(&text).into_iter().filter(|path| !root.join(path).exists());
        dangling.extend(links.chain(paths).map(|missing| format!("{}: {missing}", document.display())));
    }
    assert!(dangling.is_empty(), "documents lead to files that do not exist: {dangling:#?}");
}

#[test]
fn a_link_that_leads_nowhere_is_noticed() {
    let text = "See [the map](ARCHITECTURE.md#words), [a site](https://example.com), `store/src/step.rs`, `store/src/*` and \
                `worker/engine/src/none.rs`.";
    assert_eq!(links(text), ["ARCHITECTURE.md"]);
    assert_eq!(paths(text), ["store/src/step.rs", "worker/engine/src/none.rs"]);
}

/// Every Markdown file of the project below `dir`: no build output, no hidden folder, no installed package.
fn documents(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with('.') || name.starts_with("target") || name == "node_modules" {
            continue;
        }
        if path.is_dir() {
            found.extend(documents(&path));
        } else if name.ends_with(".md") {
            found.push(path);
        }
    }
    found
}

/// The targets of relative Markdown links, without their fragments. Links of rustdoc (`crate::…`) are rustdoc's to check.
fn links(text: &str) -> Vec<String> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let relative = targets
        .filter(|target| !target.contains("://") && !target.contains("::") && !target.starts_with('#'));
    relative.filter_map(|target| target.split('#').next()).map(str::to_owned).collect()
}

/// The paths in backticks that begin with one of the project's folders.
fn paths(text: &str) -> Vec<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    let folders = ["workflow/", "store/", "worker/", "migrations/", "deploy/", "tests/", "scripts/"];
    let path = |name: &&str| {
        folders.iter().any(|folder| name.starts_with(folder)) && !name.contains(['*', ' ', '<', '…', '{'])
    };
    quoted.filter(path).map(str::to_owned).collect()
}

#[test]
fn a_name_that_nothing_has_is_noticed() {
    let tests = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests"));
    assert!(exists(&tests, "readme::a_name_that_nothing_has_is_noticed"));
    assert!(exists(&tests, "crash::step::k22_*"));
    assert!(exists(&tests, "zombie::*"));
    assert!(!exists(&tests, "readme::a_name_that_nothing_has"));
    assert!(!exists(&tests, "crash::step::k99_*"));
    assert!(!exists(&tests, "nothing_of_this_name::*"));
    assert!(is_slow(&tests, "thousand::*"));
    assert!(is_slow(&tests, "crash::connection::k32_a_commit*"));
    assert!(!is_slow(&tests, "crash::connection::k32_*"));
    assert!(!is_slow(&tests, "crash::connection::*"));
}

/// The texts in backticks that look like `module::test`.
fn named(text: &str) -> Vec<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    let test = |name: &&str| {
        let last = name.rsplit("::").next().unwrap_or_default();
        name.contains("::") && !last.is_empty() && !name.contains([' ', '(', '\n'])
    };
    quoted.filter(test).map(str::to_owned).collect()
}

/// Returns whether the file of the name's module has a function with that name. If the name ends in `*`, a
/// function that begins with it is enough.
fn exists(tests: &Path, name: &str) -> bool {
    let (source, function) = source_of(tests, name);
    let end = if name.ends_with('*') { "" } else { "(" };
    source.is_some_and(|source| source.contains(&format!("fn {function}{end}")))
}

/// The text of the file of the name's module, and the function's name or its beginning.
fn source_of<'n>(tests: &Path, name: &'n str) -> (Option<String>, &'n str) {
    let (module, function) = name.rsplit_once("::").unwrap();
    let path = module.replace("::", "/");
    let files = [tests.join(format!("{path}.rs")), tests.join(&path).join("mod.rs")];
    let source = files.iter().find_map(|file| std::fs::read_to_string(file).ok());
    (source, function.trim_end_matches('*'))
}
