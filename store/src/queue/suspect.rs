//! The one place of a process for a suspect.
//!
//! The queues of a process share it, and all of them look for suspects. While one looks, the others wait for its claim: a queue
//! that looked without the place would find no suspect, and the next look may be a second away. When the suspect is gone, those
//! that found the place taken look again.

use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::{Mutex, MutexGuard, watch};

#[derive(Debug, Default)]
pub(super) struct SuspectPlace {
    taken: AtomicBool,
    looking: Mutex<()>,
    /// Changes when a suspect has gone.
    left: watch::Sender<()>,
}

/// A queue looks for a suspect.
pub(super) struct Looking<'a> {
    place: &'a SuspectPlace,
    _alone: MutexGuard<'a, ()>,
}

impl SuspectPlace {
    /// Waits until no other queue looks. `None`: the process has a suspect.
    pub async fn look(&self) -> Option<Looking<'_>> {
        let alone = self.looking.lock().await;
        (!self.taken.load(Ordering::Acquire)).then_some(Looking { place: self, _alone: alone })
    }

    /// The suspect is gone.
    pub fn leave(&self) {
        self.taken.store(false, Ordering::Release);
        self.left.send_replace(());
    }

    /// Tells each time that a suspect has gone.
    pub fn departures(&self) -> watch::Receiver<()> {
        self.left.subscribe()
    }
}

impl Looking<'_> {
    /// A suspect was claimed.
    pub fn found(self) {
        self.place.taken.store(true, Ordering::Release);
    }
}
