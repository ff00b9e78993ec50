//! Whose turn it is: how the spaces share the slots while more jobs wait than there are slots.
//!
//! A claim by age takes what has waited longest. If one space sends ten thousand messages, those of all other spaces would wait
//! until they are done. So while jobs wait, three of four claims go round the spaces: each takes the oldest job of the next spaces that
//! wait. Every fourth claim goes by age. So it also finds what a claim in turn leaves out (suspects, and jobs whose worker died), and
//! the oldest job waits for a bounded number of claims.
//!
//! A claim in turn looks at each space that waits, which takes longer than a look at the oldest jobs. So when no two spaces wait, the next
//! one comes after a second, and all rounds together take a tenth of the time at most.

use std::time::Duration;

/// One of so many claims goes by age.
const BY_AGE: u32 = 4;

/// The shortest time between two rounds in which fewer than two spaces had a job.
const PAUSE: Duration = Duration::from_secs(1);

/// A round that found no two spaces takes this part of the time at most.
const SHARE: u64 = 10;

/// The turns of one queue. Times are milliseconds of `CLOCK_BOOTTIME`.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// The space whose turn was the last one. Empty: a round begins.
    after: String,
    /// How many jobs the round has claimed.
    claimed: usize,
    /// How long the claims of the round took.
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

    /// Returns whether the last claim in turn ended a round. Then the next claim goes by age.
    pub fn round_ended(&self) -> bool {
        self.in_turn == BY_AGE
    }

    /// A claim in turn that began at `began` and asked for `wanted` jobs has ended at `now`. `last_space` is that of its last job.
    pub fn claimed(&mut self, jobs: usize, last_space: Option<String>, wanted: usize, began: u64, now: u64) {
        self.claimed += jobs;
        self.took_ms += now.saturating_sub(began);
        if jobs >= wanted
            && let Some(space) = last_space
        {
            self.after = space;
            return;
        }
        // The last space has had its turn, so the round is over. The next claim goes by age, and fills the slots that are still free.
        if self.claimed < 2 {
            self.next_at = now + (self.took_ms * SHARE).max(PAUSE.as_millis() as u64);
        }
        (self.claimed, self.took_ms, self.in_turn) = (0, 0, BY_AGE);
        self.after.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(turns: &mut Turns, now: u64) -> Option<String> {
        turns.after(now).map(str::to_owned)
    }

    #[test]
    fn three_of_four_claims_go_round_the_spaces() {
        let mut turns = Turns::default();
        for space in ["a", "b", "c"] {
            assert!(turns.after(0).is_some());
            turns.claimed(1, Some(space.into()), 1, 0, 1);
        }
        assert_eq!(turns.after(0), None, "by age");
        assert_eq!(after(&mut turns, 0).as_deref(), Some("c"), "the round goes on where it was");
    }

    #[test]
    fn a_round_ends_with_its_last_space_and_the_next_claim_fills_the_slots() {
        let mut turns = Turns::default();
        assert_eq!(after(&mut turns, 0).as_deref(), Some(""));
        turns.claimed(2, Some("b".into()), 5, 0, 1);
        assert_eq!(turns.after(1), None);
        assert_eq!(
            after(&mut turns, 1).as_deref(),
            Some(""),
            "two spaces wait, so the next round begins at once"
        );
    }

    #[test]
    fn a_round_in_which_fewer_than_two_spaces_waited_is_not_made_again_at_once() {
        let mut turns = Turns::default();
        assert!(turns.after(0).is_some());
        turns.claimed(1, Some("a".into()), 1, 0, 1);
        assert_eq!(after(&mut turns, 1).as_deref(), Some("a"));
        turns.claimed(0, None, 1, 1, 2);
        for now in [2, 500, 1001] {
            assert_eq!(turns.after(now), None);
        }
        assert_eq!(after(&mut turns, 1002).as_deref(), Some(""));
        turns.claimed(1, Some("a".into()), 5, 1002, 1502);
        assert_eq!(turns.after(6501), None, "it took half a second, so the next one is later");
        assert_eq!(after(&mut turns, 6502).as_deref(), Some(""));
    }
}
