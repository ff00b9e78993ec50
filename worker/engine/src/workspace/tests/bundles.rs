//! Git bundles that are made in memory, of any objects whatsoever: trees, links, attributes, references and bytes that would
//! leave the folder, or run something, if git or Wakeful believed them.

use super::escapes::Dice;
use flate2::Compression;
use flate2::write::ZlibEncoder;
use sha1::{Digest as _, Sha1};
use std::io::Write as _;
use std::path::Path;

type Id = [u8; 20];

/// The objects of a pack, each with its kind as a pack has it: 1 a commit, 2 a tree, 3 a blob, 4 a tag.
#[derive(Default)]
struct Objects(Vec<(u8, Vec<u8>)>);

impl Objects {
    fn add(&mut self, kind: u8, bytes: Vec<u8>) -> Id {
        let word = ["commit", "tree", "blob", "tag"][usize::from(kind) - 1];
        let mut hash = Sha1::new();
        hash.update(format!("{word} {}\0", bytes.len()));
        hash.update(&bytes);
        self.0.push((kind, bytes));
        hash.finalize().into()
    }

    fn blob(&mut self, text: &str) -> Id {
        self.add(3, text.as_bytes().to_vec())
    }

    fn pack(&self) -> Vec<u8> {
        let mut pack = b"PACK\0\0\0\x02".to_vec();
        pack.extend((self.0.len() as u32).to_be_bytes());
        for (kind, bytes) in &self.0 {
            let (mut first, mut rest) = (kind << 4 | (bytes.len() & 15) as u8, bytes.len() >> 4);
            while rest > 0 {
                pack.push(first | 0x80);
                (first, rest) = ((rest & 127) as u8, rest >> 7);
            }
            pack.push(first);
            let mut packed = ZlibEncoder::new(&mut pack, Compression::fast());
            packed.write_all(bytes).unwrap();
            packed.finish().unwrap();
        }
        let hash: Id = Sha1::digest(&pack).into();
        pack.extend(hash);
        pack
    }
}

/// Names that git refuses stand in every other bundle only, so that the rest of the others is tried too.
const TAME: [&str; 11] = [
    "a",
    "b",
    "hooks",
    "post-checkout",
    "config",
    "objects",
    "info",
    "alternates",
    "attributes",
    ".gitconfig",
    ".gitattributes",
];
const WILD: [&str; 26] = [
    "a",
    "b",
    "..",
    ".",
    "",
    ".git",
    ".GIT",
    "git~1",
    ".gi\u{200c}t",
    "hooks",
    "post-checkout",
    "config",
    ".gitattributes",
    ".gitmodules",
    ".gitmodules ",
    ".gitconfig",
    "objects",
    "info",
    "alternates",
    "attributes",
    "a/b",
    "../outside/x",
    "/etc/x",
    "secret.txt",
    "HEAD",
    "con",
];

/// The blobs that trees name.
fn blobs(objects: &mut Objects, outside: &Path) -> Vec<Id> {
    let touch = format!("touch {}", outside.join("owned").display());
    [
        "mine".to_owned(),
        format!("#!/bin/sh\n{touch}\n"),
        format!(
            "[core]\n\tfsmonitor = {touch}\n\thooksPath = .\n[filter \"evil\"]\n\tsmudge = {touch}\n\tprocess = {touch}\n"
        ),
        "* filter=evil diff=evil merge=evil\n".to_owned(),
        format!("[submodule \"x\"]\n\tpath = x\n\turl = ext::sh -c \"{touch}\"\n\tupdate = !{touch}\n"),
        outside.join(".git/objects").display().to_string(),
        outside.display().to_string(),
        ".git/hooks".to_owned(),
        format!("gitdir: {}\n", outside.display()),
    ]
    .map(|text| objects.blob(&text))
    .to_vec()
}

/// A few trees, one in the other. Returns the outermost.
fn trees(dice: &mut Dice, objects: &mut Objects, blobs: &[Id]) -> Id {
    let is_tame = dice.below(2) == 0;
    let names: &[&str] = if is_tame { &TAME } else { &WILD };
    let mut tree: Option<Id> = None;
    for _ in 0..=dice.below(4) {
        let mut entries: Vec<&str> = (0..=dice.below(4)).map(|_| dice.of(names)).collect();
        // A link, and a folder of the same name that would be made through it.
        let twice = !is_tame && dice.below(6) == 0;
        if twice {
            entries = vec![entries[0]; 2];
        } else if is_tame || dice.below(3) > 0 {
            entries.sort_unstable();
            entries.dedup();
        }
        let mut bytes = Vec::new();
        for (number, name) in entries.iter().enumerate() {
            let (mode, id) = match (if twice { 2 - 2 * number } else { dice.below(7) }, tree) {
                (0 | 1, Some(tree)) => ("40000", tree),
                (2, _) => ("120000", dice.of(blobs)),
                (3, _) => ("100755", dice.of(blobs)),
                (4, _) if !is_tame => (dice.of(&["160000", "777", "040000", "100644x", ""]), dice.of(blobs)),
                (_, _) => ("100644", dice.of(blobs)),
            };
            bytes.extend(format!("{mode} {name}\0").bytes());
            bytes.extend(id);
        }
        tree = Some(objects.add(2, bytes));
    }
    tree.unwrap_or_default()
}

/// A bundle that should not be believed.
pub(super) fn hostile(dice: &mut Dice, outside: &Path) -> Vec<u8> {
    let mut objects = Objects::default();
    let blobs = blobs(&mut objects, outside);
    let tree = trees(dice, &mut objects, &blobs);
    let by = "Ann <ann@example.com> 1700000000 +0000";
    let commit =
        format!("tree {}\nauthor {by}\ncommitter {by}\n\nseed {}\n", hex::encode(tree), dice.below(1 << 30));
    let commit = hex::encode(objects.add(1, commit.into_bytes()));
    let reference = match dice.below(3) {
        0 => dice.of(&[
            "refs/heads/../../../../outside/x",
            "refs/heads/--upload-pack=x",
            "-c",
            "refs/heads/a b",
            "HEAD",
            "refs/heads/.git/hooks/x",
            "refs/heads/main\0x",
            "refs/heads/x.lock",
            "refs/heads/HEAD",
            "refs/tags/../heads/x",
        ]),
        _ => "refs/heads/main",
    };
    let before = match dice.below(12) {
        0 => "@filter=blob:none\n".to_owned(),
        1 => "@object-format=sha256\n".to_owned(),
        2 => format!("-{} what it builds on\n", hex::encode(blobs[0])),
        _ => String::new(),
    };
    let version = if before.starts_with('@') { 3 } else { 2 };
    let mut references = format!("{commit} {reference}\n");
    if dice.below(4) == 0 {
        references.push_str(&format!("{commit} {}\n", dice.of(&["HEAD", "refs/tags/v1", "refs/heads/side"])));
    }
    match dice.below(12) {
        // Objects that are named and missing.
        0 => drop(objects.0.swap_remove(dice.below(objects.0.len()))),
        // One that stands twice.
        1 => objects.0.push(objects.0[0].clone()),
        _ => {}
    }
    let mut bundle = format!("# v{version} git bundle\n{before}{references}\n").into_bytes();
    bundle.extend(objects.pack());
    if dice.below(4) == 0 {
        let at = dice.below(bundle.len());
        bundle[at] ^= 1 << dice.below(8);
    }
    bundle
}
