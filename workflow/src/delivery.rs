//! Deliveries: decides what a worker does with an outgoing message that it has claimed.
//!
//! A worker that dies while it sends leaves the delivery in status `sending`: the message may have gone out.
//! The next worker asks the channel, and [`decide`] returns what to do:
//!
//! | the channel says | before its `not_after` | past its `not_after` |
//! |---|---|---|
//! | sent | `sent`, with its receipt | `sent`, with its receipt |
//! | not sent, and no attempt can be under way | send it now | `expired` |
//! | not sent, but an attempt may be under way | ask again later; send now if the receiver drops a repeated key | ask again later |
//! | it cannot tell, and the receiver drops a repeated key | send it again under the same key | `uncertain` |
//! | it cannot tell, and a repeated message would arrive twice | `uncertain` | `uncertain` |
//!
//! After its last attempt a delivery is not sent again. It ends `failed` if it certainly did not go out, else
//! `uncertain`.

/// The facts about a claimed delivery that a decision needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// An earlier attempt may have sent it.
    pub maybe_sent: bool,
    /// It is past its `not_after`.
    pub late: bool,
    /// No earlier attempt can still be under way.
    pub quiet: bool,
    /// This attempt is the last one.
    pub given_up: bool,
    /// The receiver treats two messages with the same key as one.
    pub idempotent: bool,
}

/// The channel's answer about a delivery that may have been sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Sent,
    NotSent,
    /// The channel cannot tell.
    Unknown,
    /// The channel could not be asked.
    Unreachable,
    /// This worker has no such channel; another one may have it.
    NoChannel,
}

/// How an attempt to send ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    Sent,
    /// The receiver refused it for good.
    Refused,
    /// It was not sent, and a later attempt may succeed.
    Later,
    /// The worker could not see the result. It asked the channel and got this answer.
    Unknown(Answer),
}

/// Whether an earlier attempt may already have sent the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PriorAttempt {
    Unsent,
    MaybeSent,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Ask the channel whether it was sent.
    Ask,
    Send(PriorAttempt),
    /// Give the job back and try later.
    GiveBack(PriorAttempt),
    /// This and the following decisions end the delivery, in the status of that name.
    Sent,
    Failed,
    Expired,
    Uncertain(Doubt),
}

/// Why a delivery ends `uncertain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// The channel cannot tell, and it is too old to be sent again.
    TooOld,
    /// The channel cannot tell, and sending again could send it twice.
    CannotTell,
    /// The channel cannot tell, and its attempts are used up.
    GivenUp,
    /// The channel did not answer at the delivery's last attempt.
    NoAnswer,
}

/// Decides what to do with a claimed delivery. `answer` is the channel's answer, or `None` before the channel
/// was asked.
pub fn decide(facts: &Facts, answer: Option<Answer>) -> Decision {
    let before = if facts.maybe_sent { PriorAttempt::MaybeSent } else { PriorAttempt::Unsent };
    // Only one attempt at a time, unless a second one is harmless.
    let wait = !facts.quiet && (facts.late || facts.given_up || !facts.idempotent);
    match (answer, before) {
        (_, PriorAttempt::Unsent) if facts.late => Decision::Expired,
        (Some(Answer::NoChannel), _) if !facts.given_up => Decision::GiveBack(before),
        (Some(Answer::NoChannel), PriorAttempt::Unsent) => Decision::Failed,
        (Some(Answer::NoChannel), PriorAttempt::MaybeSent) => Decision::Uncertain(Doubt::NoAnswer),
        (_, PriorAttempt::Unsent) => Decision::Send(PriorAttempt::Unsent),
        (None, PriorAttempt::MaybeSent) => Decision::Ask,
        (Some(Answer::Sent), PriorAttempt::MaybeSent) => Decision::Sent,
        (Some(Answer::NotSent), PriorAttempt::MaybeSent) if wait => Decision::GiveBack(before),
        (Some(Answer::NotSent), PriorAttempt::MaybeSent) if facts.late => Decision::Expired,
        (Some(Answer::NotSent), PriorAttempt::MaybeSent) if facts.given_up => Decision::Failed,
        (Some(Answer::NotSent), PriorAttempt::MaybeSent) => {
            Decision::Send(if facts.quiet { PriorAttempt::Unsent } else { PriorAttempt::MaybeSent })
        }
        (Some(Answer::Unknown), PriorAttempt::MaybeSent) if facts.late => Decision::Uncertain(Doubt::TooOld),
        (Some(Answer::Unknown), PriorAttempt::MaybeSent) if !facts.idempotent => {
            Decision::Uncertain(Doubt::CannotTell)
        }
        (Some(Answer::Unknown), PriorAttempt::MaybeSent) if facts.given_up => {
            Decision::Uncertain(Doubt::GivenUp)
        }
        (Some(Answer::Unknown), PriorAttempt::MaybeSent) => Decision::Send(PriorAttempt::MaybeSent),
        (Some(Answer::Unreachable), PriorAttempt::MaybeSent) if facts.given_up => {
            Decision::Uncertain(Doubt::NoAnswer)
        }
        (Some(Answer::Unreachable), PriorAttempt::MaybeSent) => Decision::GiveBack(before),
    }
}

/// Decides what follows from an attempt to send. `before` tells whether an earlier attempt may have sent the
/// message.
pub fn after(facts: &Facts, before: PriorAttempt, attempt: Attempt) -> Decision {
    match (attempt, before) {
        (Attempt::Sent | Attempt::Unknown(Answer::Sent), _) => Decision::Sent,
        (Attempt::Refused, PriorAttempt::Unsent) => Decision::Failed,
        // The receiver refuses it now, but may have accepted an earlier attempt.
        (Attempt::Refused, PriorAttempt::MaybeSent) => Decision::Uncertain(Doubt::CannotTell),
        (Attempt::Later, PriorAttempt::Unsent) if facts.given_up => Decision::Failed,
        (Attempt::Later, PriorAttempt::MaybeSent) if facts.given_up => Decision::Uncertain(Doubt::GivenUp),
        (Attempt::Later, _) => Decision::GiveBack(before),
        (Attempt::Unknown(Answer::Unknown), _) if !facts.idempotent => Decision::Uncertain(Doubt::CannotTell),
        // The next claim asks again, or sends it again under its key.
        (
            Attempt::Unknown(Answer::Unknown | Answer::NotSent | Answer::Unreachable | Answer::NoChannel),
            _,
        ) => Decision::GiveBack(PriorAttempt::MaybeSent),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FOUND: Facts =
        Facts { maybe_sent: true, late: false, quiet: true, given_up: false, idempotent: false };

    #[test]
    fn a_delivery_that_was_found_half_sent_goes_by_the_table() {
        let busy = Facts { quiet: false, ..FOUND };
        let keyed = |facts: Facts| Facts { idempotent: true, ..facts };
        let late = |facts: Facts| Facts { late: true, ..facts };
        use Decision::{Expired, GiveBack, Send, Sent, Uncertain};
        for (what, answer, facts, young, old) in [
            ("sent", Answer::Sent, FOUND, Sent, Sent),
            ("not sent", Answer::NotSent, FOUND, Send(PriorAttempt::Unsent), Expired),
            (
                "under way",
                Answer::NotSent,
                busy,
                GiveBack(PriorAttempt::MaybeSent),
                GiveBack(PriorAttempt::MaybeSent),
            ),
            (
                "under way, harmless",
                Answer::NotSent,
                keyed(busy),
                Send(PriorAttempt::MaybeSent),
                GiveBack(PriorAttempt::MaybeSent),
            ),
            (
                "cannot tell, harmless",
                Answer::Unknown,
                keyed(FOUND),
                Send(PriorAttempt::MaybeSent),
                Uncertain(Doubt::TooOld),
            ),
            ("cannot tell", Answer::Unknown, FOUND, Uncertain(Doubt::CannotTell), Uncertain(Doubt::TooOld)),
        ] {
            assert_eq!(decide(&facts, Some(answer)), young, "{what}");
            assert_eq!(decide(&late(facts), Some(answer)), old, "{what}, late");
        }
    }

    #[test]
    fn what_was_not_begun_is_sent_or_expires() {
        let fresh = Facts { maybe_sent: false, ..FOUND };
        assert_eq!(decide(&fresh, None), Decision::Send(PriorAttempt::Unsent));
        assert_eq!(decide(&Facts { late: true, ..fresh }, None), Decision::Expired);
        assert_eq!(decide(&fresh, Some(Answer::NoChannel)), Decision::GiveBack(PriorAttempt::Unsent));
        let last = Facts { given_up: true, ..fresh };
        assert_eq!(decide(&last, Some(Answer::NoChannel)), Decision::Failed);
        assert_eq!(after(&last, PriorAttempt::Unsent, Attempt::Later), Decision::Failed);
        assert_eq!(
            after(&last, PriorAttempt::MaybeSent, Attempt::Later),
            Decision::Uncertain(Doubt::GivenUp)
        );
    }

    fn facts() -> impl Strategy<Value = Facts> {
        any::<[bool; 5]>().prop_map(|[maybe_sent, late, quiet, given_up, idempotent]| Facts {
            maybe_sent,
            late,
            quiet,
            given_up,
            idempotent,
        })
    }

    fn answer() -> impl Strategy<Value = Answer> {
        proptest::sample::select(vec![
            Answer::Sent,
            Answer::NotSent,
            Answer::Unknown,
            Answer::Unreachable,
            Answer::NoChannel,
        ])
    }

    proptest! {
        #[test]
        fn nothing_is_sent_twice_late_or_after_it_was_given_up(
            facts in facts(), answer in proptest::option::of(answer()),
        ) {
            let decision = decide(&facts, answer);
            if let Decision::Send(_) = decision {
                prop_assert!(!facts.late);
                // A message that may have been sent is sent again only if the receiver drops a repeated key.
                let outside = facts.maybe_sent && !(facts.quiet && answer == Some(Answer::NotSent));
                prop_assert!(!outside || facts.idempotent);
                prop_assert!(!(facts.maybe_sent && facts.given_up));
            }
            if let Decision::Failed | Decision::Expired = decision {
                prop_assert!(!facts.maybe_sent || (facts.quiet && answer == Some(Answer::NotSent)));
            }
        }

        #[test]
        fn a_sending_that_may_have_worked_never_ends_as_failed(facts in facts(), answer in answer()) {
            prop_assert_ne!(after(&facts, PriorAttempt::Unsent, Attempt::Unknown(answer)), Decision::Failed);
            for attempt in [Attempt::Refused, Attempt::Later, Attempt::Unknown(answer)] {
                prop_assert_ne!(after(&facts, PriorAttempt::MaybeSent, attempt), Decision::Failed);
            }
        }
    }
}
