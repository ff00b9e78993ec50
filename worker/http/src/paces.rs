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
}

impl Paces {
    /// Each user may send `most` messages a minute.
    pub fn new(most: usize) -> Paces {
        Paces { most, users: Mutex::default() }
    }

    /// Counts a message of `caller`.
    ///
    /// # Errors
    /// It is one too many: in how many seconds the next one is taken.
    pub fn count(&self, caller: &Caller, now: Instant) -> Result<(), u32> {
        match (&caller.who, Holder::of(caller)) {
            (Who::User { .. }, Some(user)) => self.count_of(user, now),
            _ => Ok(()),
        }
    }

    fn count_of(&self, user: Holder, now: Instant) -> Result<(), u32> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = |sent: &Sent| now.duration_since(sent.since) >= MINUTE;
        if users.len() > FEW {
            users.retain(|_, sent| !is_over(sent));
        }
        let sent = users.entry(user).or_insert(Sent { since: now, messages: 0 });
        if is_over(sent) {
            *sent = Sent { since: now, messages: 0 };
        }
        if sent.messages >= self.most {
            let left = MINUTE.saturating_sub(now.duration_since(sent.since));
            return Err(u32::try_from(left.as_secs()).unwrap_or(u32::MAX).saturating_add(1));
        }
        sent.messages += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_a_bound_a_minute_and_leaves_no_entry_for_long() {
        let user = |user_id: &str| Holder::User { space_id: "default".into(), user_id: user_id.into() };
        let (paces, now) = (Paces::new(2), Instant::now());
        assert_eq!([0, 1].map(|_| paces.count_of(user("ann"), now)), [Ok(()), Ok(())]);
        assert_eq!(paces.count_of(user("ann"), now + Duration::from_secs(20)), Err(41));
        assert_eq!(paces.count_of(user("bob"), now), Ok(()));
        assert_eq!(paces.count_of(user("ann"), now + MINUTE), Ok(()));
        for number in 0..3 * FEW {
            paces.count_of(user(&number.to_string()), now).unwrap();
        }
        paces.count_of(user("late"), now + 3 * MINUTE).unwrap();
        assert_eq!(paces.users.lock().unwrap().len(), 1);
    }
}
