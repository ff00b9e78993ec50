//! A pool of which no connection is free.

use super::world::World;
use futures::future::join_all;
use sqlx::{Postgres, Transaction};
use tokio::task::JoinHandle;

const WAITING: &str = "select count(*) from pg_locks where relation = 'pauses'::regclass and not granted";

/// While it lives, statements of a world's store wait for a connection, for about five seconds at most: then the waits for the
/// lock end.
pub(super) struct FullPool {
    lock: Transaction<'static, Postgres>,
    held: JoinHandle<()>,
}

impl FullPool {
    pub(super) async fn of(world: &World) -> FullPool {
        let mut lock = world.database.pool.begin().await.unwrap();
        sqlx::query("lock table pauses in access exclusive mode").execute(&mut *lock).await.unwrap();
        let store = world.store.clone();
        // Fewer than these get a connection.
        let held = tokio::spawn(async move {
            join_all((0..40).map(|_| store.pauses())).await;
        });
        crate::support::eventually("the pool to be full", || async {
            (world.one(WAITING).await > 2).then_some(())
        })
        .await;
        FullPool { lock, held }
    }

    /// Asserts that it was full until now, and frees it.
    pub(super) async fn end(self, world: &World) {
        assert!(world.one(WAITING).await > 0, "the pool is still full");
        self.lock.rollback().await.unwrap();
        self.held.await.unwrap();
    }
}
