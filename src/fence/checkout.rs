//! A pooled connection that may be inside a transaction.

use std::ops::{Deref, DerefMut};

use sqlx::pool::PoolConnection;
use sqlx::{Database, Pool};

use super::dialect::FenceDatabase;
use super::error::FenceError;

/// A connection on its way into a transaction, or out of one.
///
/// sqlx returns a connection to the pool inside an open transaction when the future that begins it
/// is dropped, or its statement fails; the next borrower then works in somebody else's
/// transaction. So the connection is owned by this guard, which closes it when dropped, until it
/// is known what state it is in.
pub(super) struct Checkout<DB: Database>(Option<PoolConnection<DB>>);

impl<DB: FenceDatabase> Checkout<DB> {
    /// Takes a connection from the pool.
    pub(super) async fn from(pool: &Pool<DB>) -> Result<Self, FenceError> {
        let conn = pool.acquire().await.map_err(FenceError::Unavailable)?;
        Ok(Self(Some(conn)))
    }

    /// Takes a connection if the pool has an idle one.
    pub(super) fn idle(pool: &Pool<DB>) -> Option<Self> {
        pool.try_acquire().map(|conn| Self(Some(conn)))
    }

    /// Hands the connection on, now that its state is known.
    pub(super) fn keep(mut self) -> PoolConnection<DB> {
        self.0.take().expect("it is taken only here, by value")
    }

    /// Ends the transaction that the connection may be in, and gives it back to the pool; or
    /// closes it.
    pub(super) async fn abandon(mut self) {
        if DB::rollback(&mut self).await.is_ok() {
            drop(self.keep());
        }
    }

    /// Gives the connection back if `outcome` is good, and abandons it otherwise.
    pub(super) async fn settle<T>(self, outcome: Result<T, FenceError>) -> Result<T, FenceError> {
        match &outcome {
            Ok(_) => drop(self.keep()),
            Err(_) => self.abandon().await,
        }
        outcome
    }
}

impl<DB: Database> Deref for Checkout<DB> {
    type Target = DB::Connection;

    fn deref(&self) -> &DB::Connection {
        self.0.as_ref().expect("it is taken only by value")
    }
}

impl<DB: Database> DerefMut for Checkout<DB> {
    fn deref_mut(&mut self) -> &mut DB::Connection {
        self.0.as_mut().expect("it is taken only by value")
    }
}

impl<DB: Database> Drop for Checkout<DB> {
    fn drop(&mut self) {
        if let Some(conn) = &mut self.0 {
            conn.close_on_drop();
        }
    }
}
