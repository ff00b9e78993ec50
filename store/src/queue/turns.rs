//! Whose turn it is: how the spaces share the slots while more jobs wait than there are slots.
//!
//! A claim by age takes what has waited longest. If one space sends ten thousand messages, those of all other spaces would wait
//! until they are done. So while jobs wait, claims go round the spaces: each claim divides the free slots evenly among the next spaces that
//! wait, and takes the oldest jobs of each. A space with fewer jobs gets fewer.
//!
//! Every fourth claim goes by age, and so does one that fills the slots that a turn left. Claims by age also find what claims in turn
//! leave out (suspects, and jobs of dead workers), and the oldest job waits for a bounded number of claims.
//!
//! A claim in turn looks at each space that waits, which takes longer than a look at the oldest jobs. If fewer than two spaces wait, the
//! next round begins a second later. After a round with a slow claim, claims go by age for as long as the round took.

use std::time::Duration;

/// One of so many claims goes by age.
const BY_AGE: u32 = 4;

/// The shortest time between two rounds in which fewer than two spaces had a job. Such rounds take a tenth of the time at most.
const PAUSE: Duration = Duration::from_secs(1);
const TENTH: u64 = 10;

/// A claim in turn that takes longer is slow.
const SLOW: Duration = Duration::from_millis(50);

/// The longest time between two rounds. A statement may have stood still for minutes, which says nothing of the next.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// What a claim in turn says of the jobs that it took.
#[derive(Clone, Debug, serde::Deserialize)]
pub(super) struct Turn {
    /// The last space whose turn it was.
    pub last_space: String,
    /// How many spaces had a turn.
    pub spaces: usize,
}

/// The turns of one queue. Times are milliseconds of `CLOCK_BOOTTIME`.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// The space whose turn was the last one. Empty: a round begins.
    after: String,
    /// Spaces that have had a turn in this round.
    spaces: usize,
    /// Spaces that had a turn in the last round.
    last_round: usize,
    /// How long the claims of this round took together, and the slowest of them.
    took_ms: u64,
    slowest_ms: u64,
    /// Claims in turn since the last one by age.
    in_turn: u32,
    /// The last claim in turn left slots free.
    left_slots: bool,
    /// When the next round may begin.
    next_at: u64,
}

impl Turns {
    /// Returns the space after which the next claim goes on, if it goes round the spaces. `None`: it goes by age. The caller knows that
    /// jobs wait.
    pub fn after(&mut self, now: u64) -> Option<&str> {
        self.left_slots = false;
        if self.in_turn + 1 >= BY_AGE || now < self.next_at {
            self.in_turn = 0;
            return None;
        }
        self.in_turn += 1;
        Some(&self.after)
    }

    /// How many of the `free` slots each space gets. Assumes that as many spaces wait as in the last round, and two at least.
    pub fn share(&self, free: usize) -> usize {
        (free / self.last_round.max(2)).max(1)
    }

    /// Returns whether the last claim in turn left slots free, so that the next claim is not to wait for more.
    pub fn left_slots(&self) -> bool {
        self.left_slots
    }

    /// A claim in turn that began at `began` has ended at `now`. `turn`: what it took, if anything. `is_full`: as much as it asked for.
    pub fn claimed(&mut self, turn: Option<Turn>, is_full: bool, began: u64, now: u64) {
        let took = now.saturating_sub(began);
        (self.took_ms, self.slowest_ms) = (self.took_ms + took, self.slowest_ms.max(took));
        self.spaces += turn.as_ref().map_or(0, |turn| turn.spaces);
        self.left_slots = !is_full;
        let took_none = turn.is_none();
        if let Some(turn) = turn.filter(|_| is_full) {
            self.after = turn.last_space;
            return;
        }
        // The last space has had its turn, so the round is over.
        let millis = |pause: Duration| pause.as_millis() as u64;
        if self.spaces < 2 {
            self.next_at = now + (self.took_ms * TENTH).clamp(millis(PAUSE), millis(LONGEST_PAUSE));
        } else if self.slowest_ms > millis(SLOW) {
            self.next_at = now + self.took_ms.min(millis(LONGEST_PAUSE));
        }
        // If the claim before was the last space's and took all slots, this one was only to learn that. It counts for nothing, and the next
        // round begins. Otherwise the next claim goes by age, and fills the slots that are left.
        self.in_turn = if took_none && self.spaces >= 2 { self.in_turn.saturating_sub(1) } else { BY_AGE };
        self.last_round = self.spaces;
        (self.spaces, self.took_ms, self.slowest_ms) = (0, 0, 0);
        self.after.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn after(turns: &mut Turns, now: u64) -> Option<String> {
        turns.after(now).map(str::to_owned)
    }

    fn turn(last_space: &str, spaces: usize) -> Option<Turn> {
        Some(Turn { last_space: last_space.into(), spaces })
    }

    /// How many of a hundred slots each of `spaces` gets, in percent, if `free` slots become free again and again, each space has more
    /// jobs than that, and those of the first are the oldest. A claim takes `took_ms`.
    fn shares(spaces: &[&'static str], free: usize, took_ms: u64) -> BTreeMap<&'static str, usize> {
        let (mut turns, mut now, mut left) = (Turns::default(), 0, free);
        let mut got: BTreeMap<&'static str, usize> = spaces.iter().map(|space| (*space, 0)).collect();
        let names: Vec<&'static str> = got.keys().copied().collect();
        while got.values().sum::<usize>() < 10_000 {
            let began = now;
            now += took_ms;
            let Some(after) = after(&mut turns, began) else {
                *got.get_mut(spaces[0]).unwrap() += left;
                left = free;
                continue;
            };
            let (share, mut last) = (turns.share(left), None);
            for space in names.iter().filter(|space| **space > after.as_str()) {
                let takes = share.min(left);
                if takes > 0 {
                    *got.get_mut(space).unwrap() += takes;
                    left -= takes;
                    let spaces = last.map_or(0, |turn: Turn| turn.spaces) + 1;
                    last = turn(space, spaces);
                }
            }
            let is_full = left == 0;
            turns.claimed(last, is_full, began, now);
            if is_full {
                left = free;
            }
        }
        got.values_mut().for_each(|jobs| *jobs /= 100);
        got
    }

    #[test]
    fn each_space_that_waits_gets_much_of_its_even_share_whatever_number_of_slots_is_free() {
        for free in [1, 2, 3, 4, 5, 8, 16, 64] {
            for spaces in [&["b", "a"][..], &["a", "b"], &["b", "a", "c"], &["c", "a", "b", "d"]] {
                for took_ms in [1, 40, 200] {
                    // Three of four claims are shared. After a slow round, claims go by age for as long.
                    let least = if took_ms > 50 { 25 } else { 60 } / spaces.len();
                    let got = shares(spaces, free, took_ms);
                    assert!(got.values().all(|part| *part >= least), "{free} free, {took_ms} ms: {got:?}");
                }
            }
        }
    }

    #[test]
    fn three_of_four_claims_go_round_the_spaces() {
        let mut turns = Turns::default();
        for space in ["a", "b", "c"] {
            assert!(turns.after(0).is_some());
            turns.claimed(turn(space, 1), true, 0, 1);
        }
        assert_eq!(turns.after(0), None, "by age");
        assert_eq!(after(&mut turns, 0).as_deref(), Some("c"), "the round goes on where it was");
    }

    #[test]
    fn a_claim_by_age_fills_the_slots_that_the_last_space_left() {
        let mut turns = Turns::default();
        assert_eq!(after(&mut turns, 0).as_deref(), Some(""));
        turns.claimed(turn("b", 2), false, 0, 1);
        assert!(turns.left_slots());
        assert_eq!(turns.after(1), None);
        assert_eq!(
            after(&mut turns, 1).as_deref(),
            Some(""),
            "two spaces wait, so the next round begins at once"
        );
    }

    #[test]
    fn a_claim_that_only_learns_that_the_round_is_over_takes_no_turn() {
        let mut turns = Turns::default();
        assert!(turns.after(0).is_some());
        turns.claimed(turn("b", 2), true, 0, 1);
        assert_eq!(after(&mut turns, 1).as_deref(), Some("b"));
        turns.claimed(None, false, 1, 2);
        assert!(turns.left_slots());
        assert_eq!(after(&mut turns, 2).as_deref(), Some(""), "the next round");
        turns.claimed(None, false, 2, 3);
        assert_eq!(turns.after(3), None, "the spaces have no job left");
    }

    #[test]
    fn the_spaces_of_the_last_round_share_the_slots() {
        let mut turns = Turns::default();
        assert_eq!(turns.share(16), 8, "another space may wait");
        turns.claimed(turn("c", 3), false, 0, 1);
        assert_eq!((turns.share(16), turns.share(1)), (5, 1));
    }

    #[test]
    fn a_round_in_which_fewer_than_two_spaces_waited_is_not_made_again_at_once() {
        let mut turns = Turns::default();
        assert!(turns.after(0).is_some());
        turns.claimed(turn("a", 1), true, 0, 1);
        assert_eq!(after(&mut turns, 1).as_deref(), Some("a"));
        turns.claimed(None, false, 1, 2);
        for now in [2, 500, 1001] {
            assert_eq!(turns.after(now), None);
        }
        assert_eq!(after(&mut turns, 1002).as_deref(), Some(""));
        turns.claimed(turn("a", 1), false, 1002, 1502);
        assert_eq!(turns.after(6501), None, "it took half a second, so the next one is later");
        assert_eq!(after(&mut turns, 6502).as_deref(), Some(""));
        turns.claimed(None, false, 6502, 70_000);
        assert_eq!(turns.after(79_999), None);
        assert_eq!(
            after(&mut turns, 80_000).as_deref(),
            Some(""),
            "one that stood still for a minute says little"
        );
    }

    #[test]
    fn a_slow_claim_in_turn_is_followed_by_as_long_a_pause() {
        let mut turns = Turns::default();
        assert!(turns.after(0).is_some());
        turns.claimed(turn("z", 5000), false, 0, 60);
        assert_eq!(turns.after(119), None);
        assert_eq!(after(&mut turns, 120).as_deref(), Some(""));
    }
}
