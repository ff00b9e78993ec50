//! The trial: hostile input in bulk, from seeds, against the real process on a real Postgres. `make trial` gives each test its
//! whole measure; without it each takes a small share, so that `make test` stays quick.

mod bundles;
mod paths;
mod requests;
mod secrets;
mod spaces;
mod stalled;

use crate::support::Process;

/// How much of a whole measure this run takes.
pub fn share(whole: usize) -> usize {
    if std::env::var_os("WAKEFUL_TRIAL").is_some() { whole } else { whole.div_ceil(50) }
}

/// Numbers from a seed: SplitMix64. A failure names its seed, and the same seed gives the same input.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: usize) -> Dice {
        Dice(seed as u64 ^ 0x5eed_0000)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    pub fn of<'a, T: ?Sized>(&mut self, list: &[&'a T]) -> &'a T {
        list[self.below(list.len())]
    }

    /// Breaks a text in one to four places: bytes are replaced, doubled, removed, or hostile ones put in.
    pub fn broken(&mut self, text: &str) -> String {
        const HOSTILE: [&str; 22] = [
            "\0",
            "\u{202e}",
            "\u{feff}",
            "'",
            "\"",
            "\\",
            "{",
            "}",
            "[[[[[[[[",
            "]",
            "null",
            "-1",
            "1e999",
            "18446744073709551616",
            "\\ud800",
            "\\u0000",
            "%00",
            "../",
            "<script>",
            "';--",
            "\r\n",
            ",,",
        ];
        let mut text = text.to_owned();
        for _ in 0..=self.below(4) {
            let mut at = self.below(text.len() + 1);
            while !text.is_char_boundary(at) {
                at -= 1;
            }
            let mut to = (at + self.below(12)).min(text.len());
            while !text.is_char_boundary(to) {
                to += 1;
            }
            match self.below(5) {
                0 => text.replace_range(at..to, ""),
                1 => text.insert_str(at, self.of(&HOSTILE)),
                2 => text.replace_range(at..to, self.of(&HOSTILE)),
                3 => text.insert_str(at, &text[at..to].repeat(1 + self.below(50))),
                _ => text.truncate(to),
            }
        }
        text
    }
}

/// The process has not panicked so far.
pub fn is_whole(process: &Process) {
    let log = process.log();
    let panics: Vec<&str> = log.lines().filter(|line| line.contains("panicked")).take(3).collect();
    assert!(panics.is_empty(), "{panics:#?}");
}
