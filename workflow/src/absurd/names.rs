//! Names of checkpoints, and the order that they give.
//!
//! A step that runs again under the same name becomes `name#2`, `name#3`, … `name#10`. So the order is that of the
//! number: as texts, `#10` comes before `#9`, and two checkpoints of one moment have the same time. `durable` puts a
//! hash of the step's parameters before the number, and counts for each hash alone. There the time decides between
//! two hashes, and the number within one.

use super::Listed;
use std::collections::BTreeMap;

/// Length of the hash that `durable` appends.
const HASH: usize = 64;

/// The parts of a checkpoint's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name<'a> {
    /// What the program called the step.
    pub base: &'a str,
    /// `durable`: the hash of the step's parameters.
    pub hash: Option<&'a str>,
    /// How often the step had run under this name, from 1.
    pub number: u64,
}

impl<'a> Name<'a> {
    /// Takes a name apart.
    pub fn of(name: &'a str) -> Name<'a> {
        let (stem, number) = match name.rsplit_once('#').map(|(stem, digits)| (stem, count(digits))) {
            Some((stem, Some(number))) => (stem, number),
            Some((_, None)) | None => (name, 1),
        };
        match stem.rsplit_once('-') {
            Some((base, hash)) if is_hash(hash) => Name { base, hash: Some(hash), number },
            Some(_) | None => Name { base: stem, hash: None, number },
        }
    }
}

/// The number of a repeated step: 2 or more, as Absurd writes it.
fn count(digits: &str) -> Option<u64> {
    let plain = !digits.is_empty() && !digits.starts_with('0') && digits.bytes().all(|b| b.is_ascii_digit());
    digits.parse().ok().filter(|number| plain && *number >= 2)
}

fn is_hash(text: &str) -> bool {
    text.len() == HASH && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Sorts the checkpoints of one base name.
pub fn sort(listed: &mut [Listed]) {
    let hashed = listed.iter().any(|one| Name::of(&one.name).hash.is_some());
    if !hashed {
        listed.sort_by_key(|one| Name::of(&one.name).number);
        return;
    }
    listed.sort_by(|a, b| {
        (&a.updated_at, Name::of(&a.name).number).cmp(&(&b.updated_at, Name::of(&b.name).number))
    });
    // The places that one hash has go to its checkpoints by their numbers.
    let mut places: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (place, one) in listed.iter().enumerate() {
        places.entry(Name::of(&one.name).hash.unwrap_or_default().to_owned()).or_default().push(place);
    }
    for places in places.values() {
        let mut own: Vec<Listed> = places.iter().map(|place| listed[*place].clone()).collect();
        own.sort_by_key(|one| Name::of(&one.name).number);
        for (place, one) in places.iter().zip(own) {
            listed[*place] = one;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(name: &str, updated_at: &str) -> Listed {
        Listed { name: name.to_owned(), updated_at: updated_at.to_owned(), ..Listed::default() }
    }

    fn names(listed: &[Listed]) -> Vec<&str> {
        listed.iter().map(|one| one.name.as_str()).collect()
    }

    #[test]
    fn a_name_has_a_base_and_a_number() {
        for (name, base, number) in [
            ("agent-loop", "agent-loop", 1),
            ("agent-loop#2", "agent-loop", 2),
            ("agent-loop#10", "agent-loop", 10),
            ("a#b#3", "a#b", 3),
            // Not a number that Absurd writes.
            ("a#1", "a#1", 1),
            ("a#02", "a#02", 1),
            ("a#", "a#", 1),
            ("#7", "", 7),
        ] {
            assert_eq!(Name::of(name), Name { base, hash: None, number }, "{name}");
        }
        let hash = "ab".repeat(32);
        let name = format!("agent-loop-{hash}#4");
        assert_eq!(Name::of(&name), Name { base: "agent-loop", hash: Some(&hash), number: 4 });
    }

    #[test]
    fn the_tenth_follows_the_ninth_whatever_the_clock_said() {
        let mut all: Vec<Listed> = (1..=12)
            .rev()
            .map(|n| listed(&if n == 1 { "s".to_owned() } else { format!("s#{n}") }, &format!("{}", 99 - n)))
            .collect();
        sort(&mut all);
        let right: Vec<String> =
            (1..=12).map(|n| if n == 1 { "s".to_owned() } else { format!("s#{n}") }).collect();
        assert_eq!(names(&all), right);
    }

    #[test]
    fn with_hashes_the_time_decides_between_two_and_the_number_within_one() {
        let (a, b) = ("a".repeat(64), "b".repeat(64));
        let mut all = [
            listed(&format!("s-{b}"), "2"),
            listed(&format!("s-{a}#3"), "3"),
            listed(&format!("s-{a}"), "1"),
            // The clock went back.
            listed(&format!("s-{a}#2"), "4"),
        ];
        sort(&mut all);
        let right = [format!("s-{a}"), format!("s-{b}"), format!("s-{a}#2"), format!("s-{a}#3")];
        assert_eq!(names(&all), right);
    }
}
