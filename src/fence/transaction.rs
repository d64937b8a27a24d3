//! The guard value of a fenced transaction.

use std::fmt;
use std::ops::{Deref, DerefMut};

use sqlx::Database;
use sqlx::pool::PoolConnection;
use sqlx_core::transaction::TransactionManager;

use super::connection::Admitted;
use super::dialect::FenceDatabase;
use super::error::FenceError;
use crate::grant::Grant;

/// A transaction that was admitted under a grant; obtained from [`Fence::begin`](super::Fence::begin).
///
/// While it is open, the fence of its resource cannot be raised: what it reads is not changed by an
/// older holder, and a newer one waits for its end. It derefs to [`Admitted`], in which every sqlx
/// query runs: `query.execute(&mut *tx)`.
///
/// [`commit`](FencedTransaction::commit) stores it. Dropping it rolls it back: soon, in the
/// background, never blocking; where a statement was dropped half-way, the connection is closed
/// instead, so that the server ends the statement too. Dropping does not release the lease.
#[must_use = "a transaction that is dropped is rolled back"]
pub struct FencedTransaction<DB: FenceDatabase> {
    admitted: Admitted<'static, DB>,
    finished: bool,
}

impl<DB: FenceDatabase> FencedTransaction<DB> {
    pub(super) fn new(conn: PoolConnection<DB>, grant: Grant) -> Self {
        Self { admitted: Admitted::pooled(conn, grant), finished: false }
    }

    /// Commits, and returns only if it is known to have been stored.
    ///
    /// Where a statement failed, a result was left half-read, raw SQL was sent or the connection
    /// was lent out, it first asks the database whether this is still the admitted transaction,
    /// unharmed; otherwise that costs nothing.
    ///
    /// # Errors
    ///
    /// Nothing is stored, unless it is [`FenceError::CommitUnknown`], which says that the answer
    /// was lost; or [`FenceError::Unfenced`], where what was ended from within was stored then.
    ///
    /// - [`FenceError::Aborted`]: a statement had failed before.
    /// - [`FenceError::Unfenced`]: the transaction had been ended from within.
    /// - [`FenceError::Unrecorded`]: a claimed key has no response.
    /// - [`FenceError::Retry`], [`FenceError::Ended`], [`FenceError::Database`]: the database
    ///   refused the commit.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the outcome is unknown, as with [`FenceError::CommitUnknown`];
    /// the connection is closed.
    pub async fn commit(mut self) -> Result<(), FenceError> {
        let outcome = self.try_commit().await;
        match &outcome {
            Ok(()) => self.finished = true,
            // Known not to be committed, and answered: the connection is fit for a rollback.
            Err(FenceError::Aborted | FenceError::Unrecorded { .. } | FenceError::Unfenced { .. }) => {}
            Err(_) => self.admitted.health.in_flight = true,
        }
        outcome
    }

    async fn try_commit(&mut self) -> Result<(), FenceError> {
        let grant = self.admitted.grant.clone();
        if let Some(reason) = self.admitted.health.doomed {
            return Err(FenceError::Unfenced { reason });
        }
        if let Some(key) = self.admitted.health.unrecorded.first() {
            return Err(FenceError::Unrecorded { key: key.name().to_owned() });
        }
        if DB::TransactionManager::get_transaction_depth(self.admitted.conn()) != 1 {
            let reason = "a transaction was begun or ended on the lent connection, and left so";
            return Err(FenceError::Unfenced { reason });
        }
        if self.admitted.health.is_suspect() {
            let conn = self.admitted.begin_statement();
            let probed = DB::probe(conn, &grant).await;
            self.admitted.end_statement(probed)?;
            // It has answered: nothing is under way on it any more.
            self.admitted.health.lent = false;
        }
        let conn = self.admitted.begin_statement();
        let committed = DB::commit(conn, &grant).await;
        self.admitted.end_statement(committed)
    }

    /// Rolls back and waits for the answer.
    ///
    /// # Errors
    ///
    /// [`FenceError::Unavailable`] if the database could not be told; it then rolls back by itself
    /// when it notices that the connection is gone.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future closes the connection, which rolls back as well.
    pub async fn rollback(mut self) -> Result<(), FenceError> {
        let conn = self.admitted.begin_statement();
        DB::rollback(conn).await.map_err(FenceError::Unavailable)?;
        // Only now is the connection fit for the pool; otherwise it is closed.
        self.finished = true;
        Ok(())
    }
}

impl<DB: FenceDatabase> Deref for FencedTransaction<DB> {
    type Target = Admitted<'static, DB>;

    fn deref(&self) -> &Self::Target {
        &self.admitted
    }
}

impl<DB: FenceDatabase> DerefMut for FencedTransaction<DB> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.admitted
    }
}

impl<DB: FenceDatabase> Drop for FencedTransaction<DB> {
    fn drop(&mut self) {
        let finished = self.finished;
        let health = &self.admitted.health;
        let unfit = health.in_flight || health.lent || (health.suspect && !DB::ROLLBACK_MENDS);
        let Some(conn) = self.admitted.pooled_mut() else { return };
        if finished {
            return;
        }
        let depth = <DB as Database>::TransactionManager::get_transaction_depth(conn);
        if unfit || depth != 1 {
            // A statement may still run there, or the transaction is not what it was: the end of
            // the connection ends both.
            conn.close_on_drop();
        } else {
            DB::TransactionManager::start_rollback(conn);
        }
    }
}

impl<DB: FenceDatabase> fmt::Debug for FencedTransaction<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedTransaction").field("admitted", &self.admitted).finish()
    }
}
