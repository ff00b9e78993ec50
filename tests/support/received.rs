//! What a server of a test has received, in its order. A test that waits for more is woken by it.

use super::within;
use tokio::sync::watch;

pub struct Received<T>(watch::Sender<Vec<T>>);

impl<T> Default for Received<T> {
    fn default() -> Received<T> {
        Received(watch::channel(Vec::new()).0)
    }
}

impl<T: Clone> Received<T> {
    /// Adds one, and returns how many came before it.
    pub fn push(&self, one: T) -> usize {
        let mut before = 0;
        self.0.send_modify(|all| {
            before = all.len();
            all.push(one);
        });
        before
    }

    pub fn all(&self) -> Vec<T> {
        self.0.borrow().clone()
    }

    /// Waits until it is enough, and returns all.
    pub async fn until(&self, what: &str, mut is_enough: impl FnMut(&[T]) -> bool) -> Vec<T> {
        let mut received = self.0.subscribe();
        let all = within(what, received.wait_for(|all| is_enough(all))).await;
        all.expect("the server keeps it").clone()
    }
}
