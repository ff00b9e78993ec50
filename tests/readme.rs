//! Documents that name tests name tests that exist.

use std::path::{Path, PathBuf};

#[test]
fn every_test_that_is_named_here_exists() {
    let tests = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests"));
    let text = std::fs::read_to_string(tests.join("README.md")).unwrap();
    let names = named(&text);
    assert!(names.len() > 30, "the table is read: {names:?}");
    let missing: Vec<&String> = names.iter().filter(|name| !exists(&tests, name)).collect();
    assert!(missing.is_empty(), "tests/README.md names tests that do not exist: {missing:#?}");
    for number in 1..=45 {
        let row = text.lines().find(|line| line.starts_with(&format!("| K{number} |")));
        let row = row.unwrap_or_else(|| panic!("no row for K{number}"));
        assert!(row.contains("::") || row.contains("open: ") || row.contains("the same two"), "{row}");
    }
}

#[test]
fn a_name_that_nothing_has_is_noticed() {
    let tests = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests"));
    assert!(exists(&tests, "readme::a_name_that_nothing_has_is_noticed"));
    assert!(exists(&tests, "crash::step::k22_…"));
    assert!(exists(&tests, "nothing_of_this_name_yet::k99_…"));
    assert!(!exists(&tests, "readme::a_name_that_nothing_has"));
    assert!(!exists(&tests, "crash::step::k99_…"));
    assert!(!exists(&tests, "nothing_of_this_name_yet::k99_a_test"));
}

/// What stands in backticks and looks like `module::test`.
fn named(text: &str) -> Vec<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    let test = |name: &&str| {
        let last = name.rsplit("::").next().unwrap_or_default();
        name.contains("::") && !last.is_empty() && !name.contains([' ', '(', '\n'])
    };
    quoted.filter(test).map(str::to_owned).collect()
}

/// Whether the file of the name's module has a function of that name, or, after `…`, one that begins so. A module that
/// is not there yet may still be promised by such a name.
fn exists(tests: &Path, name: &str) -> bool {
    let (module, function) = name.rsplit_once("::").unwrap();
    let path = module.replace("::", "/");
    let files = [tests.join(format!("{path}.rs")), tests.join(&path).join("mod.rs")];
    let source = files.iter().find_map(|file| std::fs::read_to_string(file).ok());
    match (source, function.strip_suffix('…')) {
        (None, beginning) => beginning.is_some(),
        (Some(source), Some(beginning)) => source.contains(&format!("fn {beginning}")),
        (Some(source), None) => source.contains(&format!("fn {function}(")),
    }
}
