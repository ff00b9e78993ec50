//! Who takes part in the rounds.

use crate::commits::Shape;
use crate::{SESSIONS, peers};

/// One contestant of the rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contestant {
    /// pgbench with the rows of this shape and this many clients.
    Floor(Shape, usize),
    /// The store's commits in this shape, at this many sessions. As a superuser: row-level security does not bind it.
    Commit(Shape, usize),
    /// The same as a superuser, of encrypted conversations.
    Sealed(Shape, usize),
    /// This many processes.
    Worker(usize),
    Peer(peers::Peer),
}

impl Contestant {
    pub fn name(self) -> String {
        let sessions =
            |count: usize| if count == 1 { "1 session".to_owned() } else { format!("{count} sessions") };
        match self {
            Contestant::Floor(Shape::Step, clients) => {
                format!("floor: pgbench, the same rows, {}", sessions(clients))
            }
            Contestant::Floor(Shape::Turn, clients) => {
                format!("floor: pgbench, the rows of a tool turn, {}", sessions(clients))
            }
            Contestant::Commit(Shape::Step, count) => format!("step commit, {}", sessions(count)),
            Contestant::Commit(Shape::Turn, count) => {
                format!("tool turn, {}", sessions(count))
            }
            Contestant::Sealed(shape, count) => {
                format!("{}, encrypted", Contestant::Commit(shape, count).name())
            }
            Contestant::Worker(1) => "whole worker, 1 process".to_owned(),
            Contestant::Worker(count) => format!("whole worker, {count} processes"),
            Contestant::Peer(peer) => peer.name().to_owned(),
        }
    }

    /// What it is compared with: commits of encrypted conversations with the same commits of others. The whole worker and the peers are compared with the smaller step.
    pub fn floor(self) -> Contestant {
        match self {
            Contestant::Floor(shape, clients) | Contestant::Commit(shape, clients) => {
                Contestant::Floor(shape, clients)
            }
            Contestant::Sealed(shape, clients) => Contestant::Commit(shape, clients),
            Contestant::Worker(_) | Contestant::Peer(_) => Contestant::Floor(Shape::Step, SESSIONS),
        }
    }
}
