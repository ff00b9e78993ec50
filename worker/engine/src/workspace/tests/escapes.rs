//! Attempts to leave a workspace through snapshots, through links that are swapped meanwhile, and through git bundles. `make
//! trial` gives each its whole measure.

use super::super::codec::Out;
use super::super::folder::remove_all;
use super::super::git::Git;
use super::super::look::{Fault, Sink};
use super::super::pack::Writer;
use super::super::restore::Spool;
use super::super::tree::{hash_of, nothing};
use super::super::{codec::Hash, look::look};
use super::{Host, bounds, bundles, limits, listing, open};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use wakeful_workflow::workspace::Pack;

const SECRET: &str = "what only others may read";

/// How much of a whole measure this run takes.
fn share(whole: usize) -> usize {
    if std::env::var_os("WAKEFUL_TRIAL").is_some() { whole } else { whole.div_ceil(100) }
}

/// Numbers from a seed: SplitMix64.
pub(super) struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % limit.max(1) as u64) as usize
    }

    pub fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
}

/// Path, mode and content of each entry of a folder.
type Entries = Vec<(PathBuf, u32, Vec<u8>)>;

/// A host, and files beside its workspaces that a session may neither read nor change.
fn host_and_outside() -> (Host, PathBuf, Entries) {
    let host = Host::new();
    let outside = host.root.path().join("outside");
    fs::create_dir_all(outside.join("deep")).unwrap();
    fs::write(outside.join("secret.txt"), SECRET).unwrap();
    fs::write(outside.join("deep/secret.txt"), SECRET).unwrap();
    let before = listing(&outside);
    (host, outside, before)
}

fn names() -> Vec<Vec<u8>> {
    let mut names: Vec<Vec<u8>> = [
        "..",
        ".",
        "",
        "a",
        "b",
        "a/b",
        "/",
        "/etc/passwd",
        "../outside/secret.txt",
        "a\0",
        "\0",
        ".git",
        ".GIT",
        "git~1",
        ".gi\u{200c}t",
        "con",
        "nul",
        "aux.txt",
        "A",
        "\u{e4}",
        "a\u{308}",
        "\u{ff0e}\u{ff0e}",
        "..\\",
        "a\\..\\b",
        "-rf",
        "~",
        "\n",
        ".wakefulignore",
        "secret.txt",
        "deep",
    ]
    .into_iter()
    .map(|name| name.as_bytes().to_vec())
    .collect();
    names.extend([vec![b'n'; 255], vec![b'n'; 256], vec![0xff, 0xfe], vec![b'.'; 3]]);
    names
}

/// A snapshot's tree out of folders that no look would make: any name, any order, names that stand twice, links anywhere.
fn made_up(dice: &mut Dice, outside: &Path) -> (Hash, Vec<u8>, Pack) {
    let names = names();
    let targets = [
        outside.display().to_string(),
        outside.join("secret.txt").display().to_string(),
        "../../outside".to_owned(),
        "..".to_owned(),
        "/".to_owned(),
        "/dev/zero".to_owned(),
        "/proc/self/root".to_owned(),
        "a".to_owned(),
    ];
    let mut writer = Writer::new("sess_1");
    let mine = hash_of(b"mine");
    writer.add(mine, b"mine");
    let mut folder = nothing();
    writer.add(folder, b"");
    for _ in 0..=dice.below(4) {
        let mut entries: Vec<&[u8]> =
            (0..=dice.below(4)).map(|_| names[dice.below(names.len())].as_slice()).collect();
        if dice.below(3) > 0 {
            entries.sort_unstable();
        }
        if dice.below(8) == 0 {
            // A link, and a folder of the same name that would be made through it.
            entries = vec![entries[0]; 2];
        }
        let mut out = Out::default();
        for (number, name) in entries.iter().enumerate() {
            match if entries.len() == 2 { 2 - number } else { dice.below(3) } {
                0 => {
                    out.u8(b'f');
                    out.bytes(name);
                    out.u32(dice.of(&[0o644, 0o777, 0o4755, 0o100_644, u32::MAX]));
                    out.u64(dice.of(&[4, 0, 5, u64::MAX]));
                    out.u32(1);
                    out.hash(&mine);
                }
                1 => {
                    out.u8(b'd');
                    out.bytes(name);
                    out.u32(dice.of(&[0o700, 0, 0o7777]));
                    out.hash(&folder);
                }
                _ => {
                    out.u8(b'l');
                    out.bytes(name);
                    out.bytes(targets[dice.below(targets.len())].as_bytes());
                }
            }
        }
        folder = hash_of(&out.0);
        writer.add(folder, &out.0);
    }
    let packed = writer.finish().unwrap();
    let pack = Pack { sha256: hex::encode(packed.sha256), bytes: packed.bytes.len() as u64 };
    (folder, packed.bytes, pack)
}

#[test]
fn no_snapshot_leads_out_of_its_folder() {
    let (host, outside, before) = host_and_outside();
    let held = host.take(1);
    let (all, mut made) = (share(100_000), 0);
    for seed in 0..all {
        let (tree, bytes, pack) = made_up(&mut Dice(seed as u64), &outside);
        let Ok(spool) = Spool::of(&[pack], &bounds(), |_| bytes.clone()) else { continue };
        made += usize::from(held.restore(&spool, tree, &bounds()).is_ok());
        if seed % 500 == 0 || seed + 1 == all {
            assert_eq!(listing(&outside), before, "before seed {seed}");
            let mut beside: Vec<_> =
                fs::read_dir(host.root.path()).unwrap().map(|one| one.unwrap().file_name()).collect();
            beside.sort();
            assert_eq!(beside, ["outside", "workspaces"], "before seed {seed}");
            let mut sessions: Vec<_> =
                fs::read_dir(&host.settings.folder).unwrap().map(|one| one.unwrap().file_name()).collect();
            sessions.retain(|name| name != "sess_1");
            assert_eq!(sessions, [".state"], "before seed {seed}");
        }
    }
    // If none was made, the trees were too crude.
    assert!(made > all / 20, "{made} of {all}");
}

/// Keeps whatever a look reads.
struct Reads(bool);

impl Sink for Reads {
    fn object(&mut self, _: Hash, bytes: &[u8]) -> Result<(), Fault> {
        self.0 |= bytes.windows(SECRET.len()).any(|part| part == SECRET.as_bytes());
        Ok(())
    }
}

#[test]
fn no_link_that_is_swapped_while_files_are_stored_leads_out() {
    let (host, outside, before) = host_and_outside();
    let held = host.take(1);
    held.make_empty().unwrap();
    let (folder, files) = (host.path().join("deep"), host.path().join("secret.txt"));
    let aside = |path: &Path| path.with_extension("aside");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("secret.txt"), "mine").unwrap();
    fs::write(&files, "mine").unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for (path, target) in [(&folder, outside.join("deep")), (&files, outside.join("secret.txt"))]
                {
                    fs::rename(path, aside(path)).unwrap();
                    std::os::unix::fs::symlink(target, path).unwrap();
                    fs::remove_file(path).unwrap();
                    fs::rename(aside(path), path).unwrap();
                }
            }
        });
        let (mut seen, mut whole) = (Reads(false), 0);
        let root = open(&host.path());
        for _ in 0..share(20_000) {
            whole += usize::from(look(&root, None, &limits(), &mut seen).is_ok());
        }
        stop.store(true, Ordering::Relaxed);
        assert!(!seen.0, "a file of outside was read");
        assert!(whole > 0, "if none ended, the swapping was too quick");
    });
    assert_eq!(listing(&outside), before);
}

/// Tries `count` bundles from number `first` on, each in the same folder of a host of their own. Returns how many git opened.
async fn opens_bundles(first: usize, count: usize) -> usize {
    let (host, outside, before) = host_and_outside();
    let found = Git::find().expect("git is installed");
    let (file, into) = (host.root.path().join("seed.bundle"), host.root.path().join("into"));
    let mut opened = 0;
    for seed in first..first + count {
        fs::write(&file, bundles::hostile(&mut Dice(seed as u64), &outside)).unwrap();
        fs::create_dir(&into).unwrap();
        opened += usize::from(found.unbundle(&file, &into, &limits()).await.is_ok());
        assert_eq!(listing(&outside), before, "seed {seed}");
        assert!(!into.join(".git/hooks").exists(), "seed {seed}");
        remove_all(&into).unwrap();
        let beside = fs::read_dir(host.root.path()).unwrap().count();
        assert_eq!(beside, 2, "seed {seed}: outside, seed.bundle");
    }
    opened
}

#[tokio::test]
async fn no_git_bundle_leads_out_of_its_folder_or_runs_anything() {
    // Each runs git about eight times. `WAKEFUL_BUNDLES` says another number.
    let asked = std::env::var("WAKEFUL_BUNDLES").ok().and_then(|number| number.parse().ok());
    let usual = if std::env::var_os("WAKEFUL_TRIAL").is_some() { 5_000 } else { 60 };
    let all: usize = asked.unwrap_or(usual);
    let lanes = std::thread::available_parallelism().map_or(2, usize::from);
    let each = all.div_ceil(lanes);
    let opened = futures::future::join_all((0..lanes).map(|lane| opens_bundles(lane * each, each)));
    let (opened, all): (usize, usize) = (opened.await.iter().sum(), lanes * each);
    // If none was opened, they were too crude.
    assert!(opened > all / 20, "{opened} of {all}");
    println!("{opened} of {all} bundles were opened");
}
