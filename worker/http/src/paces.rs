//! How many messages each user sends in a minute.
//!
//! A user's token is in a browser, and anyone who has it can send as fast as the network allows. Each message may begin a
//! conversation, and each conversation takes a slot when its turn comes. Without a bound, one user's conversations would keep
//! everybody waiting. Other tokens belong to programs and have no bound.

use crate::access::{Caller, Who};
use crate::holder::Holder;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A bound counts what came within so long.
const MINUTE: Duration = Duration::from_secs(60);

/// While there are no more users than this, those that sent nothing lately may stay.
const FEW: usize = 1000;

/// The messages of this process's users.
#[derive(Debug)]
pub(crate) struct Paces {
    most: usize,
    users: Mutex<HashMap<Holder, Sent>>,
}

#[derive(Debug)]
struct Sent {
    /// When the first of them came.
    since: Instant,
    messages: usize,
    /// How many more were repetitions.
    repetitions: usize,
}

/// A message that was counted.
#[derive(Debug)]
pub(crate) struct Counted {
    user: Holder,
    at: Instant,
}

impl Paces {
    /// Each user may send `most` messages a minute.
    pub fn new(most: usize) -> Paces {
        Paces { most, users: Mutex::default() }
    }

    /// Counts a message of `caller`. `None`: of a caller without a bound.
    ///
    /// # Errors
    /// It is one too many: in how many seconds the next one is taken.
    pub fn count(&self, caller: &Caller, now: Instant) -> Result<Option<Counted>, u32> {
        match (&caller.who, Holder::of(caller)) {
            (Who::User { .. }, Some(user)) => self.count_of(user, now).map(Some),
            _ => Ok(None),
        }
    }

    fn count_of(&self, user: Holder, now: Instant) -> Result<Counted, u32> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = |sent: &Sent| now.duration_since(sent.since) >= MINUTE;
        if users.len() > FEW {
            users.retain(|_, sent| !is_over(sent));
        }
        let begun = Sent { since: now, messages: 0, repetitions: 0 };
        let sent = users.entry(user.clone()).or_insert(begun);
        if is_over(sent) {
            *sent = Sent { since: now, messages: 0, repetitions: 0 };
        }
        if sent.messages >= self.most {
            let left = MINUTE.saturating_sub(now.duration_since(sent.since));
            return Err(u32::try_from(left.as_secs()).unwrap_or(u32::MAX).saturating_add(1));
        }
        sent.messages += 1;
        Ok(Counted { user, at: now })
    }

    /// Gives back the place of a message that was a repetition.
    pub fn was_repeated(&self, counted: &Counted) {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        // The minute in which it was counted may be over, and another one have begun.
        if let Some(sent) = users.get_mut(&counted.user)
            && sent.since <= counted.at
            && sent.repetitions < self.most
        {
            sent.repetitions += 1;
            sent.messages = sent.messages.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_a_bound_a_minute_and_leaves_no_entry_for_long() {
        let user = |user_id: &str| Holder::User { space_id: "default".into(), user_id: user_id.into() };
        let (paces, now) = (Paces::new(2), Instant::now());
        let count = |user_id: &str, now: Instant| paces.count_of(user(user_id), now).map(|_| ());
        assert_eq!([0, 1].map(|_| count("ann", now)), [Ok(()), Ok(())]);
        assert_eq!(count("ann", now + Duration::from_secs(20)), Err(41));
        assert_eq!(count("bob", now), Ok(()));
        assert_eq!(count("ann", now + MINUTE), Ok(()));
        for number in 0..3 * FEW {
            paces.count_of(user(&number.to_string()), now).unwrap();
        }
        paces.count_of(user("late"), now + 3 * MINUTE).unwrap();
        assert_eq!(paces.users.lock().unwrap().len(), 1);
    }

    #[test]
    fn as_many_repetitions_take_no_place_in_their_minute_as_there_are_places() {
        let ann = || Holder::User { space_id: "default".into(), user_id: "ann".into() };
        let (paces, now) = (Paces::new(2), Instant::now());
        let first = paces.count_of(ann(), now).unwrap();
        for _ in 0..2 {
            paces.was_repeated(&paces.count_of(ann(), now).unwrap());
        }
        let third = paces.count_of(ann(), now).unwrap();
        assert!(paces.count_of(ann(), now).is_err(), "two new messages");
        paces.was_repeated(&third);
        assert!(paces.count_of(ann(), now).is_err(), "and two repetitions");
        let later = now + MINUTE;
        for _ in 0..2 {
            paces.count_of(ann(), later).unwrap();
        }
        paces.was_repeated(&first);
        assert!(paces.count_of(ann(), later).is_err(), "that one was of the minute before");
    }
}
