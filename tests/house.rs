//! Checks the shape of the sources: no large circle of files in a crate, and the arrows between the crates.

use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The folder of each crate, by the name that ARCHITECTURE.md gives it.
const CRATES: [(&str, &str); 9] = [
    ("wakeful-workflow", "workflow"),
    ("wakeful-store", "store"),
    ("wakeful-config", "worker/config"),
    ("wakeful-engine", "worker/engine"),
    ("wakeful-http", "worker/http"),
    ("wakeful-channels", "worker/channels"),
    ("wakeful-console", "worker/console"),
    ("wakeful-mcp", "worker/mcp"),
    ("wakeful", "worker/cli"),
];

/// How many files may import one another in a circle, at most. A larger circle has no good reading order.
const LARGEST_CIRCLE: usize = 3;

#[test]
fn no_crate_has_a_circle_of_more_than_three_files() {
    let mut circles = String::new();
    for (name, folder) in CRATES {
        let files = Files::read(&root().join(folder).join("src"));
        assert!(files.0.len() > 5, "the files of {name} are read");
        circles.push_str(&report(name, &files));
    }
    assert!(circles.is_empty(), "circles of more than {LARGEST_CIRCLE} files:\n{circles}");
}

#[test]
fn a_circle_is_found_and_its_arrows_are_named() {
    let source = |path: &str, text: &str| (path.split('/').map(str::to_owned).collect(), text.to_owned());
    let mut files = Files(BTreeMap::from([
        (Vec::new(), "mod a; mod b; mod c; mod d; pub use d::Deep;".to_owned()),
        source("a", "use crate::b::{self, X};"),
        source("b", "fn f() { crate::c::g() }"),
        source(
            "c",
            "// use crate::a;\nuse crate::Deep;\n#[cfg(test)]\nmod tests {\n    use crate::a::Y;\n}\n",
        ),
        source("d", "pub struct Deep;"),
    ]));
    assert_eq!(report("x", &files), "");
    // A name that the crate's root re-exports counts as an arrow to the file that defines it.
    files.0.insert(vec!["d".to_owned()], "use super::a::Y; pub struct Deep;".to_owned());
    let found = report("x", &files);
    for arrow in ["a -> b", "b -> c", "c -> d", "d -> a"] {
        assert!(found.contains(arrow), "{found}");
    }
}

#[test]
fn the_crates_import_what_the_table_of_the_architecture_says() {
    let architecture = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let section = architecture.split("\n## ").find(|section| section.starts_with("Crates\n")).unwrap();
    let lock: toml::Table = std::fs::read_to_string(root().join("Cargo.lock")).unwrap().parse().unwrap();
    let rows: Vec<Vec<String>> = section
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect())
        .collect();
    assert_eq!(rows.len(), CRATES.len(), "one row for each crate: {rows:?}");
    for ((name, folder), row) in CRATES.into_iter().zip(&rows) {
        let [crate_name, path, imports, alone, never] = row.as_slice() else { panic!("five cells: {row:?}") };
        assert_eq!((crate_name.trim_matches('`'), path.trim_matches('`')), (name, folder));
        let direct = dependencies(folder);
        let ours: BTreeSet<String> =
            direct.iter().filter(|one| one.starts_with("wakeful-")).cloned().collect();
        assert_eq!(ours, listed(imports), "what {name} imports: the manifest, and the table");
        for one in listed(alone) {
            assert!(direct.contains(&one), "{name} does not depend on {one}");
            for (other, folder) in CRATES.into_iter().filter(|(other, _)| *other != name) {
                assert!(!dependencies(folder).contains(&one), "{one} is not only in {name}: {other} has it");
            }
        }
        let reached = reached(&lock, name);
        assert!(reached.len() > 5, "the lock file is read: {name} reaches {reached:?}");
        for one in listed(never) {
            assert!(!reached.contains(&one), "{name} must not reach {one}, and does");
        }
    }
}

fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The names in one cell of the table.
fn listed(cell: &str) -> BTreeSet<String> {
    cell.split(',').map(|name| name.trim().trim_matches('`').to_owned()).filter(|name| name != "-").collect()
}

/// The `[dependencies]` of a manifest.
fn dependencies(folder: &str) -> BTreeSet<String> {
    let text = std::fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
    let manifest: toml::Table = text.parse().unwrap();
    manifest["dependencies"].as_table().unwrap().keys().cloned().collect()
}

/// Everything that a package depends on, directly or not, by the lock file.
fn reached(lock: &toml::Table, name: &str) -> BTreeSet<String> {
    let mut by_name: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in lock["package"].as_array().unwrap() {
        let dependencies = package.get("dependencies").and_then(|list| list.as_array());
        let names = dependencies.into_iter().flatten().filter_map(|one| one.as_str()?.split(' ').next());
        by_name.entry(package["name"].as_str().unwrap()).or_default().extend(names);
    }
    let mut reached = BTreeSet::new();
    let mut open = vec![name];
    while let Some(package) = open.pop() {
        for one in by_name.get(package).into_iter().flatten() {
            if reached.insert((*one).to_owned()) {
                open.push(one);
            }
        }
    }
    reached
}

/// A module's path: empty for the root of its crate.
type Module = Vec<String>;

/// The sources of one crate, by module.
struct Files(BTreeMap<Module, String>);

/// Which file imports which. A file may use the files below it, because it composes them and re-exports their
/// names.
type Arrows = BTreeMap<Module, BTreeSet<Module>>;

impl Files {
    fn read(src: &Path) -> Files {
        let mut files = BTreeMap::new();
        let mut open = vec![src.to_owned()];
        while let Some(folder) = open.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    open.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let inner = path.strip_prefix(src).unwrap().with_extension("");
                    let mut module: Module =
                        inner.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
                    if matches!(module.last().map(String::as_str), Some("mod" | "lib")) {
                        module.pop();
                    }
                    let is_test = module.last().is_some_and(|name| name.contains("test") || name == "main");
                    if !is_test {
                        files.insert(module, std::fs::read_to_string(path).unwrap());
                    }
                }
            }
        }
        Files(files)
    }

    /// The longest beginning of `path` that is a file.
    fn file_of(&self, path: &[String]) -> usize {
        (0..=path.len()).rev().find(|length| self.0.contains_key(&path[..*length])).unwrap_or(0)
    }

    fn has_child(&self, module: &[String], name: &str) -> bool {
        let mut child = module.to_vec();
        child.push(name.to_owned());
        self.0.contains_key(&child)
    }

    /// A path as its crate's root sees it. `None`: it leads out of the crate.
    fn absolute(&self, from: &[String], path: &[String]) -> Option<Module> {
        let first = path.first()?.as_str();
        match first {
            "crate" => Some(path[1..].to_vec()),
            "self" => Some([from, &path[1..]].concat()),
            "super" => {
                let ups = path.iter().take_while(|part| *part == "super").count();
                Some([&from[..from.len().checked_sub(ups)?], &path[ups..]].concat())
            }
            name => self.has_child(from, name).then(|| [from, path].concat()),
        }
    }

    fn arrows(&self) -> Arrows {
        let texts: BTreeMap<&Module, String> =
            self.0.iter().map(|(module, text)| (module, without_tests(text))).collect();
        // A file may import a name from another file that only imported it. Then the arrow goes to the file
        // that defines the name.
        let mut names: BTreeMap<&Module, BTreeMap<String, Module>> = BTreeMap::new();
        for (module, text) in &texts {
            for path in imports(text) {
                if let Some(target) = self.absolute(module, &path)
                    && let Some(name) = target.last()
                {
                    names.entry(module).or_default().insert(name.clone(), target.clone());
                }
            }
        }
        let mut arrows = Arrows::new();
        for (module, text) in &texts {
            for path in imports(text).into_iter().chain(inline(text)) {
                let Some(mut path) = self.absolute(module, &path) else { continue };
                let mut length = self.file_of(&path);
                for _ in 0..8 {
                    let file = path[..length].to_vec();
                    let Some(name) = path.get(length) else { break };
                    let Some(target) = names.get(&file).and_then(|names| names.get(name)) else { break };
                    if file == **module {
                        break;
                    }
                    path = [target.as_slice(), &path[length + 1..]].concat();
                    length = self.file_of(&path);
                }
                path.truncate(length);
                if !path.starts_with(module) {
                    arrows.entry((*module).clone()).or_default().insert(path);
                }
            }
        }
        arrows
    }
}

/// The circles that are too large, each with the arrows within it. Empty if there are none.
fn report(name: &str, files: &Files) -> String {
    let arrows = files.arrows();
    let reach: BTreeMap<&Module, BTreeSet<&Module>> =
        arrows.keys().map(|from| (from, reach(&arrows, from))).collect();
    let mut told = BTreeSet::new();
    let mut text = String::new();
    for (from, to) in &reach {
        let back = |other: &&Module| reach.get(*other).is_some_and(|to| to.contains(from));
        let circle: BTreeSet<&Module> = to.iter().copied().filter(back).collect();
        if circle.len() > LARGEST_CIRCLE && told.insert(circle.clone()) {
            text.push_str(&format!("{name}: {} files\n", circle.len()));
            for one in &circle {
                for other in arrows[*one].iter().filter(|other| circle.contains(other)) {
                    text.push_str(&format!("  {} -> {}\n", one.join("::"), other.join("::")));
                }
            }
        }
    }
    text
}

fn reach<'a>(arrows: &'a Arrows, from: &Module) -> BTreeSet<&'a Module> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from];
    while let Some(module) = open.pop() {
        for to in arrows.get(module).into_iter().flatten() {
            if reached.insert(to) {
                open.push(to);
            }
        }
    }
    reached
}

/// A source without comments, string literals, and everything after `#[cfg(test)]`.
fn without_tests(source: &str) -> String {
    let mut kept = String::new();
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        if line.trim() == "#[cfg(test)]" {
            let indent = line.len() - line.trim_start().len();
            let item = lines.by_ref().find(|line| !line.trim_start().starts_with("#["));
            if item.is_some_and(|item| item.trim_end().ends_with('{')) {
                let closes = |line: &&str| line.trim() == "}" && line.len() - 1 == indent;
                lines.by_ref().find(closes);
            }
            continue;
        }
        let code = line.split("//").next().unwrap_or_default();
        // Every second part is inside quotes.
        kept.extend(code.replace("\\\"", "").split('"').step_by(2));
        kept.push('\n');
    }
    kept
}

/// The paths of every `use`, one for each name.
fn imports(text: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    for part in text.split("use ").skip(1) {
        if let Some((tree, _)) = part.split_once(';') {
            expand(tree, &[], &mut paths);
        }
    }
    paths
}

fn expand(tree: &str, before: &[String], paths: &mut Vec<Vec<String>>) {
    let segments = |text: &str| -> Vec<String> {
        let text = text.split(" as ").next().unwrap_or_default();
        text.split("::").map(str::trim).filter(|one| !one.is_empty()).map(str::to_owned).collect()
    };
    let Some((start, list)) = tree.split_once('{') else {
        let mut path = [before, &segments(tree)].concat();
        if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
            path.pop();
        }
        paths.push(path);
        return;
    };
    let before = [before, &segments(start)].concat();
    let list = list.trim_end().strip_suffix('}').unwrap_or(list);
    let (mut depth, mut begin) = (0, 0);
    for (at, c) in list.char_indices().chain([(list.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !list[begin..at].trim().is_empty() {
                    expand(&list[begin..at], &before, paths);
                }
                begin = at + 1;
            }
            _ => {}
        }
    }
}

/// The paths in the code outside of `use`, such as `crate::run::open(..)`.
fn inline(text: &str) -> Vec<Vec<String>> {
    let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    // Leave out every `use`: [`imports`] reads them. Here `use super::{a, b}` would wrongly give an arrow to
    // the parent.
    let mut code = String::new();
    let mut parts = text.split("use ");
    code.push_str(parts.next().unwrap_or_default());
    parts.for_each(|part| code.push_str(part.split_once(';').map_or(part, |(_, rest)| rest)));
    let words = code.split(|c: char| !is_path(c)).filter(|word| word.contains("::"));
    words.map(|word| word.split("::").filter(|one| !one.is_empty()).map(str::to_owned).collect()).collect()
}

/// A client that is made elsewhere would follow redirects, with keys, and resolve any name to any address.
#[test]
fn every_http_client_is_made_in_one_place() {
    let (place, mut users) = (root().join("worker/engine/src/web.rs"), 0);
    for crate_folder in ["worker/engine", "worker/http", "worker/channels", "worker/cli"] {
        for file in rust_files(&root().join(crate_folder).join("src")) {
            // Such a file has nothing but tests, and is a module of its own.
            if ["tests", "faults"].iter().any(|name| file.file_stem().is_some_and(|stem| stem == *name)) {
                continue;
            }
            let text = without_tests(&std::fs::read_to_string(&file).unwrap());
            let makes = ["Client::builder()", "Client::new()", "ClientBuilder::new()", "reqwest::get("];
            for words in makes.into_iter().filter(|words| {
                text.contains(&format!("reqwest::{words}"))
                    || text.contains(&format!(" {words}")) && text.contains("use reqwest::")
            }) {
                assert_eq!(file, place, "{words} makes an HTTP client; web::client makes one that is safe");
            }
            users += text.matches("client(Reach::").count() + text.matches("client(reach").count();
        }
    }
    let made = without_tests(&std::fs::read_to_string(place).unwrap());
    assert!(
        made.contains("reqwest::Client::builder()") && made.contains("redirect::Policy::none()"),
        "{made}"
    );
    assert!(users >= 9, "the clients are made elsewhere: {users}");
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(rust_files(&path));
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
    found
}

/// A database that has applied a migration refuses to migrate when its text is another one, be it a comment only.
#[test]
fn a_migration_that_was_released_stays_as_it_is() {
    let sums = include_str!("support/migrations.sha256").lines();
    let mut listed: BTreeMap<&str, &str> = sums
        .map(|line| line.split_once("  ").expect("a line of sha256sum"))
        .map(|(sum, name)| (name, sum))
        .collect();
    for file in std::fs::read_dir(root().join("migrations")).unwrap().flatten() {
        let name = file.file_name().into_string().unwrap();
        let sum = hex::encode(Sha256::digest(std::fs::read(file.path()).unwrap()));
        assert_eq!(
            listed.remove(name.as_str()),
            Some(sum.as_str()),
            "{name}: was it released, it must stay as it is; a new one is listed by: cd migrations && sha256sum *.sql > \
             ../tests/support/migrations.sha256"
        );
    }
    assert!(listed.is_empty(), "released migrations are gone: {listed:?}");
}
