//! Whose turn it is: how the spaces share the slots while more jobs wait than there are slots.
//!
//! A claim by age takes what has waited longest. If one space sends ten thousand messages, those of all other spaces would wait
//! until they are done. So while jobs wait, claims go round the spaces: each gives the free slots to the oldest jobs of the next spaces
//! that wait, the same number to each space as far as it has them. Every fourth claim goes by age, and so does the claim after the end of
//! a round. It also finds what a claim in turn leaves out (suspects, and jobs whose worker died), and the oldest job waits for a bounded
//! number of claims.
//!
//! A claim in turn looks at each space that waits, which takes longer than a look at the oldest jobs. So when no two spaces wait, the
//! next round comes after a second. Rounds that are slow, because very many spaces wait, take half of the time at most.

use std::time::Duration;

/// One of so many claims goes by age.
const BY_AGE: u32 = 4;

/// The shortest time between two rounds in which fewer than two spaces had a job.
const PAUSE: Duration = Duration::from_secs(1);

/// A round that found no two spaces takes this part of the time at most.
const SHARE: u64 = 10;

/// A round that took longer is followed by as long a pause.
const SLOW: Duration = Duration::from_millis(50);

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
    /// How many spaces have had a turn in this round, and had one in the last.
    spaces: usize,
    last_round: usize,
    /// How long the claims of this round took.
    took_ms: u64,
    /// Claims in turn since the last one by age.
    in_turn: u32,
    /// When the next round may begin.
    next_at: u64,
}

impl Turns {
    /// Returns the space after which the next claim goes on, if it goes round the spaces. `None`: it goes by age. The caller knows that
    /// jobs wait.
    pub fn after(&mut self, now: u64) -> Option<&str> {
        if self.in_turn + 1 >= BY_AGE || now < self.next_at {
            self.in_turn = 0;
            return None;
        }
        self.in_turn += 1;
        Some(&self.after)
    }

    /// How many of `free` slots each space gets, if as many spaces wait as in the last round.
    pub fn share(&self, free: usize) -> usize {
        free.div_ceil(self.last_round.max(1))
    }

    /// Returns whether the last claim in turn ended a round. Then the next claim goes by age.
    pub fn round_ended(&self) -> bool {
        self.in_turn == BY_AGE
    }

    /// A claim in turn that began at `began` has ended at `now`. `turn`: what it took, if anything. `is_full`: as much as it asked for.
    pub fn claimed(&mut self, turn: Option<Turn>, is_full: bool, began: u64, now: u64) {
        self.took_ms += now.saturating_sub(began);
        self.spaces += turn.as_ref().map_or(0, |turn| turn.spaces);
        if let Some(turn) = turn.filter(|_| is_full) {
            self.after = turn.last_space;
            return;
        }
        // The last space has had its turn, so the round is over. The next claim goes by age, and fills the slots that are still free.
        let millis = |pause: Duration| pause.as_millis() as u64;
        if self.spaces < 2 {
            self.next_at = now + (self.took_ms * SHARE).max(millis(PAUSE));
        } else if self.took_ms > millis(SLOW) {
            self.next_at = now + self.took_ms;
        }
        self.last_round = self.spaces;
        (self.spaces, self.took_ms, self.in_turn) = (0, 0, BY_AGE);
        self.after.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(turns: &mut Turns, now: u64) -> Option<String> {
        turns.after(now).map(str::to_owned)
    }

    fn turn(last_space: &str, spaces: usize) -> Option<Turn> {
        Some(Turn { last_space: last_space.into(), spaces })
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
    fn a_round_ends_with_its_last_space_and_the_next_claim_fills_the_slots() {
        let mut turns = Turns::default();
        assert_eq!(after(&mut turns, 0).as_deref(), Some(""));
        turns.claimed(turn("b", 2), false, 0, 1);
        assert!(turns.round_ended());
        assert_eq!(turns.after(1), None);
        assert_eq!(
            after(&mut turns, 1).as_deref(),
            Some(""),
            "two spaces wait, so the next round begins at once"
        );
    }

    #[test]
    fn the_spaces_of_the_last_round_share_the_slots() {
        let mut turns = Turns::default();
        assert_eq!(turns.share(16), 16, "nothing is known of the others");
        turns.claimed(turn("a", 1), true, 0, 1);
        turns.claimed(turn("b", 2), false, 1, 2);
        assert_eq!((turns.share(16), turns.share(1)), (6, 1), "three spaces had a turn");
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
    }

    #[test]
    fn a_slow_round_of_many_spaces_is_followed_by_a_pause() {
        let mut turns = Turns::default();
        assert!(turns.after(0).is_some());
        turns.claimed(turn("z", 5000), false, 0, 60);
        assert_eq!(turns.after(119), None);
        assert_eq!(after(&mut turns, 120).as_deref(), Some(""));
    }
}
