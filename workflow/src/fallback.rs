//! Which of an agent's models is called next while providers fail. Pure; a model is an index: 0 is the agent's own, and those
//! after it are its `fallback`.
#![deny(missing_docs)]

/// The models of a step whose calls failed `faults` times, the next one first. After `each` faults it is the next one's turn,
/// and after the last one's that of the first again.
pub fn order(models: usize, faults: i64, each: i64) -> impl Iterator<Item = usize> + Clone {
    let turn = usize::try_from(faults / each.max(1)).unwrap_or(0);
    (0..models).map(move |step| (turn + step) % models)
}

/// Returns whether the next call is made at once, after the model `failed` had fault number `faults` of the step. `passes`
/// tells whether a model's gate lets the step through. The same model is never called at once again, and after each model had
/// its turn there is always a pause. So a request that fails with every model is not made again and again without one.
pub fn at_once(models: usize, failed: usize, faults: i64, each: i64, passes: impl Fn(usize) -> bool) -> bool {
    let first_round = usize::try_from(faults / each.max(1)).is_ok_and(|turn| turn < models);
    first_round && order(models, faults, each).find(|model| passes(*model)).is_some_and(|next| next != failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_model_gets_its_turn_and_then_the_first_one_again() {
        let first = |faults| order(3, faults, 2).next();
        let turns: Vec<_> = (0..8).filter_map(first).collect();
        assert_eq!(turns, [0, 0, 1, 1, 2, 2, 0, 0]);
        assert_eq!(order(3, 2, 2).collect::<Vec<_>>(), [1, 2, 0]);
        assert_eq!(order(1, 9, 3).collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn the_next_model_is_called_at_once_and_the_same_one_after_a_pause() {
        let open = |_: usize| true;
        assert!(!at_once(2, 0, 1, 3, open), "it is still the first one's turn");
        assert!(at_once(2, 0, 3, 3, open), "it is the second one's turn");
        assert!(at_once(2, 0, 1, 3, |model| model == 1), "the first one's gate is shut");
        assert!(!at_once(2, 0, 1, 3, |_| false), "both gates are shut");
        assert!(!at_once(1, 0, 3, 3, open), "there is no other");
        assert!(!at_once(3, 0, 7, 3, |model| model == 0), "the others may not be called");
    }

    /// Whatever gates are open, and whatever number of faults shuts one, calls without a pause come to an end.
    #[test]
    fn a_request_that_fails_with_every_model_is_soon_made_with_pauses() {
        for (models, each) in [(2, 1), (3, 1), (3, 3), (4, 2)] {
            for open in 1..1_u32 << models {
                let passes = |model: usize| open & (1 << model) != 0;
                let next = |faults| order(models, faults, each).find(|model| passes(*model)).unwrap();
                let unpaused: Vec<i64> = (1..200)
                    .filter(|faults| at_once(models, next(faults - 1), *faults, each, passes))
                    .collect();
                assert!(
                    unpaused.len() < models && unpaused.iter().all(|faults| *faults < 4 * models as i64),
                    "{models} models, {each} faults each, open {open:b}: {unpaused:?}"
                );
            }
        }
    }
}
