//! A connection in use, and what it may be used for afterwards.
//!
//! A future may be dropped in the middle of a statement: then the answer is unread, and after an unread BEGIN
//! the connection would be in a transaction that nothing ends. So a connection counts as unusable while a
//! statement of the pool, a BEGIN or a COMMIT is on its way, and is closed if it is given back then. What happens
//! between a BEGIN and its COMMIT is unknown to the pool. So an open transaction that is dropped is rolled back,
//! and the connection must answer before it is used again.

use super::{Live, Shared, in_time};
use crate::audit::act;
use crate::lines::Front;
use crate::space::Scope;
use sqlx::postgres::{PgDatabaseError, PgSeverity, PgTransactionManager};
use sqlx::{AssertSqlSafe, PgConnection};
use sqlx_core::transaction::TransactionManager;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// What a connection is when it is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// Its last statement was answered, and no transaction is open.
    Ready,
    /// It must be asked.
    Unknown,
    /// It is broken, or in the middle of a statement.
    Unusable,
}

/// A connection in use. It goes back to the pool when it is dropped.
#[derive(Debug)]
pub(crate) struct Lent {
    lent: Option<(Live, OwnedSemaphorePermit)>,
    pool: Arc<Shared>,
    after: After,
    /// Others that want the same row come after it.
    _front: Option<Front>,
}

impl Lent {
    pub(super) fn new(
        live: Live,
        pool: Arc<Shared>,
        door: OwnedSemaphorePermit,
        front: Option<Front>,
    ) -> Lent {
        Lent { lent: Some((live, door)), pool, after: After::Unknown, _front: front }
    }

    /// Tells the server what the connection sees, if it is not that already.
    pub(super) async fn see(&mut self, scope: &Scope) -> Result<(), sqlx::Error> {
        if self.live().sees.as_ref() == Some(scope) {
            return Ok(());
        }
        self.live().sees = None;
        let told = in_time(sqlx::raw_sql(AssertSqlSafe(scope.told())).execute(self.sends())).await;
        self.answered(&told);
        told?;
        self.live().sees = Some(scope.clone());
        self.after = After::Unknown;
        Ok(())
    }

    fn live(&mut self) -> &mut Live {
        &mut self.lent.as_mut().expect(LENT).0
    }

    /// Call this before a statement whose end is reported to [`Lent::answered`].
    pub(crate) fn sends(&mut self) -> &mut PgConnection {
        self.after = After::Unusable;
        self
    }

    /// Notes how a statement ended.
    pub(crate) fn answered<T>(&mut self, answer: &Result<T, sqlx::Error>) {
        match answer {
            Ok(_) => self.after = After::Ready,
            Err(error) => self.failed(error),
        }
    }

    /// Notes that a statement ended with this error.
    pub(crate) fn failed(&mut self, error: &sqlx::Error) {
        self.after = after(error);
        if self.after == After::Unusable {
            self.pool.server.breaks.note();
        }
    }
}

/// The code of a write in a transaction or on a server that only reads.
const READ_ONLY: &str = "25006";

fn after(error: &sqlx::Error) -> After {
    match error {
        // The server writes nothing: after a failover this is the host that was the writer before. The next connection may
        // lead to the new one.
        sqlx::Error::Database(error) if error.code().as_deref() == Some(READ_ONLY) => After::Unusable,
        sqlx::Error::Database(error) => match error.downcast_ref::<PgDatabaseError>().severity() {
            PgSeverity::Fatal | PgSeverity::Panic => After::Unusable,
            _ => After::Ready,
        },
        sqlx::Error::Encode(_) => After::Ready,
        sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::Protocol(_) => After::Unusable,
        _ => After::Unknown,
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some((live, door)) = self.lent.take() {
            self.pool.give_back(live, self.after, door);
        }
    }
}

const LENT: &str = "a connection is taken only in drop";

impl Deref for Lent {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.lent.as_ref().expect(LENT).0.connection
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.lent.as_mut().expect(LENT).0.connection
    }
}

/// A transaction. Dropping it rolls it back.
#[derive(Debug)]
pub(crate) struct Transaction(Lent);

impl Transaction {
    pub(super) async fn begin(mut lent: Lent) -> Result<Transaction, sqlx::Error> {
        let begun = in_time(PgTransactionManager::begin(lent.sends(), None)).await;
        lent.answered(&begun);
        begun?;
        lent.after = After::Unknown;
        Ok(Transaction(lent))
    }

    pub async fn rollback(mut self) -> Result<(), sqlx::Error> {
        let undone = in_time(PgTransactionManager::rollback(self.0.sends())).await;
        self.ended(undone)
    }

    /// Commits. If the task is an act, its row of the audit is part of the commit.
    pub async fn commit(mut self) -> Result<(), sqlx::Error> {
        act::write(&mut self.0).await?;
        let committed = in_time(PgTransactionManager::commit(self.0.sends())).await;
        self.ended(committed)?;
        act::is_written();
        Ok(())
    }

    /// Commits a part of an act whose row of the audit is written by a statement, or by another commit.
    pub async fn commit_part(mut self) -> Result<(), sqlx::Error> {
        let committed = in_time(PgTransactionManager::commit(self.0.sends())).await;
        self.ended(committed)
    }

    fn ended(&mut self, answer: Result<(), sqlx::Error>) -> Result<(), sqlx::Error> {
        self.0.answered(&answer);
        if answer.is_err() && self.0.after == After::Ready {
            // sqlx counts the transaction as open.
            self.0.after = After::Unknown;
        }
        answer
    }
}

/// Sends ROLLBACK with the next statement, if a transaction is open. Returns whether one is.
pub(super) fn roll_back(connection: &mut PgConnection) -> bool {
    let is_open = PgTransactionManager::get_transaction_depth(connection) > 0;
    while PgTransactionManager::get_transaction_depth(connection) > 0 {
        PgTransactionManager::start_rollback(connection);
    }
    is_open
}

impl Deref for Transaction {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.0
    }
}

impl DerefMut for Transaction {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.0
    }
}
