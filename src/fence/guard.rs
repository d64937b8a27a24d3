//! The fence of one database.

use std::collections::HashMap;
use std::fmt;
use std::future::IntoFuture;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use sqlx::{Connection, Pool, Transaction};
use sqlx_core::transaction::TransactionManager;

use super::checkout::Checkout;
use super::connection::Admitted;
use super::dialect::{FenceDatabase, Isolation, NOT_RAISED, Opening, Patience};
use super::error::FenceError;
use super::limits::{Limits, millis};
use super::transaction::FencedTransaction;
use crate::clock::Clock;
use crate::credential::Credential;
use crate::error::{Group, Invalid};
use crate::grant::Grant;
use crate::owner::OwnerId;
use crate::renumber::{Renumber, RenumberError};
use crate::resource::Resource;
use crate::token::FencingToken;

/// How long a raise waits, by default, before it ends the transactions of older grants.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often a transaction is begun anew whose snapshot was overtaken by a raise.
const BEGINNINGS: u32 = 3;
/// How many grants are remembered as raised; beyond it all are forgotten, which costs each a
/// plain read.
const REMEMBERED: usize = 4096;

/// The fence of one database: its memory of the newest grant of each resource, and the door
/// through which every transaction under a grant goes.
///
/// Cheap to clone; clones share the pool. It also [renumbers](Renumber) for lock services.
///
/// The rules and the argument for them are on the [module's page](crate::fence).
pub struct Fence<DB: FenceDatabase> {
    pool: Pool<DB>,
    raised: Arc<Mutex<HashMap<Resource, (FencingToken, OwnerId)>>>,
    patience: Patience,
    limits: Limits,
}

impl<DB: FenceDatabase> Fence<DB> {
    /// Guards the database behind `pool`. Nothing is sent yet; see [`Fence::migrate`] for its tables.
    #[must_use]
    pub fn new(pool: Pool<DB>) -> Self {
        let patience = Patience { limit: PATIENCE, end_blockers: true };
        Self { pool, raised: Arc::default(), patience, limits: Limits::new() }
    }

    /// Sets how long a raise waits for the transactions of older grants before it ends them: 2 s
    /// unless it is set.
    ///
    /// # Errors
    ///
    /// [`Invalid::Option`] outside 1 ms to 2^31 - 1 ms.
    pub fn with_patience(mut self, limit: Duration) -> Result<Self, Invalid> {
        millis("patience", limit)?;
        self.patience.limit = limit;
        Ok(self)
    }

    /// Leaves the transactions of older grants alone when the patience runs out; the newer grant is
    /// then told that the resource is [busy](FenceError::Busy).
    ///
    /// A holder that is paused inside a transaction may block its successor for as long as the
    /// pause lasts.
    #[must_use]
    pub fn without_ending_blockers(mut self) -> Self {
        self.patience.end_blockers = false;
        self
    }

    /// Sets the database's limits on the transactions that are begun here.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// The pool that transactions are taken from.
    #[must_use]
    pub fn pool(&self) -> &Pool<DB> {
        &self.pool
    }

    /// Creates the fence's tables, or brings them up to date.
    ///
    /// Once it has returned, they are there. On Postgres everything lives in a schema of its own,
    /// `fencerow`, with its own table of migrations. Several processes may call it at once.
    ///
    /// # Errors
    ///
    /// [`FenceError::Migration`] if a migration fails, or was changed since; nothing is changed then.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future undoes what was not finished.
    pub async fn migrate(&self) -> Result<(), FenceError> {
        let mut conn = Checkout::from(&self.pool).await?;
        let outcome = DB::migrate(&mut conn).await;
        conn.settle(outcome).await
    }

    /// Drops the fence's tables, **and with them all memory of tokens and idempotency keys.** For
    /// tests, and for taking the library out of use.
    ///
    /// # Errors
    ///
    /// [`FenceError::Migration`] if one cannot be undone; nothing is changed then.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future undoes what was not finished.
    pub async fn unmigrate(&self) -> Result<(), FenceError> {
        let mut conn = Checkout::from(&self.pool).await?;
        let outcome = DB::unmigrate(&mut conn).await;
        self.remembered(|raised| raised.clear());
        conn.settle(outcome).await
    }

    /// Begins a transaction under a lease or a grant, in one round trip.
    ///
    /// Once it has returned, no transaction of an older grant on the resource is open and none can
    /// begin; what is read in the transaction is not changed by an older holder afterwards; and a
    /// newer grant waits for its end. Transactions of the *same* grant run side by side, and see to
    /// each other as any do: by [`Write::add`](super::Write::add), `select … for update`, or a stricter
    /// [isolation level](Begin::isolation). Awaiting the result sends it; [`Begin`] has options.
    ///
    /// # Errors
    ///
    /// - [`FenceError::Stale`]: a newer grant has been here. Stop.
    /// - [`FenceError::TokenRegressed`]: stale although the lease is still held.
    /// - [`FenceError::Busy`]: older transactions did not leave within the patience.
    /// - [`FenceError::Unavailable`] and others of the database.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the connection is closed, and no transaction is left open. The
    /// fence may have been raised to the grant.
    pub fn begin<'a>(&'a self, credential: &'a impl Credential) -> Begin<'a, DB> {
        Begin { fence: self, credential, isolation: Isolation::default(), limits: self.limits }
    }

    /// Admits a transaction of the caller's own. Do it first: what was read before may have been
    /// changed by an older holder since. On SQLite, let it have begun without `immediate`: the
    /// fence is raised on another connection, which could not write beside it.
    ///
    /// The caller commits. What [`FencedTransaction::commit`] sees to is then the caller's business:
    /// sqlx's commit says `Ok` also where the transaction had failed. On SQLite it even stores a
    /// claimed key without a response; Postgres refuses that. No limits are set.
    ///
    /// # Errors
    ///
    /// As [`Fence::begin`], and [`FenceError::Unfenced`] in a nested transaction or after a savepoint,
    /// whose rollback would lift the admission; [`FenceError::Retry`] if a stricter isolation level's snapshot was
    /// taken before the fence was raised. On any of them, roll back.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, roll the transaction back.
    pub async fn admit<'c>(
        &self,
        tx: &'c mut Transaction<'_, DB>,
        credential: &impl Credential,
    ) -> Result<Admitted<'c, DB>, FenceError> {
        let grant = credential.grant();
        if DB::TransactionManager::get_transaction_depth(tx) != 1 {
            let reason = "a nested transaction cannot be admitted: its rollback would lift the admission";
            return Err(FenceError::Unfenced { reason });
        }
        let outcome = async {
            if !self.is_raised(&grant) {
                self.raise_beside(&grant).await?;
            }
            DB::admit(tx, &grant).await
        };
        match outcome.await {
            Ok(()) => {
                self.remember(&grant);
                Ok(Admitted::borrowed(&mut **tx, grant))
            }
            Err(error) => {
                self.forget(&grant);
                Err(told(credential, overtaken(error, &grant)).await)
            }
        }
    }

    /// Raises the fence on a connection other than the caller's.
    async fn raise_beside(&self, grant: &Grant) -> Result<(), FenceError> {
        // Waiting for the pool could be waiting for the caller's own transaction.
        if let Some(mut conn) = Checkout::idle(&self.pool)
            && conn.ping().await.is_ok()
        {
            let outcome = DB::raise(&mut conn, grant, self.patience).await;
            return conn.settle(outcome).await;
        }
        let options = self.pool.connect_options();
        let mut conn = DB::Connection::connect_with(&options).await.map_err(FenceError::Unavailable)?;
        let outcome = DB::raise(&mut conn, grant, self.patience).await;
        // The answer is known; how the connection ends makes no difference to it.
        let _ = conn.close().await;
        outcome
    }

    async fn open(
        &self,
        grant: &Grant,
        isolation: Isolation,
        limits: Limits,
    ) -> Result<FencedTransaction<DB>, FenceError> {
        let mut attempt = 1;
        loop {
            let opening =
                Opening { isolation, limits, patience: self.patience, raised: self.is_raised(grant) };
            let mut conn = Checkout::from(&self.pool).await?;
            match DB::open(&mut conn, grant, opening).await {
                Ok(()) => {
                    self.remember(grant);
                    return Ok(FencedTransaction::new(conn.keep(), grant.clone()));
                }
                Err(error) => {
                    conn.abandon().await;
                    self.forget(grant);
                    match error {
                        FenceError::Retry { .. } if attempt < BEGINNINGS => attempt += 1,
                        error => return Err(error),
                    }
                }
            }
        }
    }

    fn remembered<T>(&self, with: impl FnOnce(&mut HashMap<Resource, (FencingToken, OwnerId)>) -> T) -> T {
        with(&mut self.raised.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn is_raised(&self, grant: &Grant) -> bool {
        self.remembered(|raised| raised.get(grant.resource()) == Some(&(grant.token(), grant.owner())))
    }

    fn remember(&self, grant: &Grant) {
        self.remembered(|raised| {
            if raised.len() >= REMEMBERED && !raised.contains_key(grant.resource()) {
                raised.clear();
            }
            raised.insert(grant.resource().clone(), (grant.token(), grant.owner()));
        });
    }

    fn forget(&self, grant: &Grant) {
        self.remembered(|raised| raised.remove(grant.resource()));
    }
}

/// The fence has just been raised: a transaction that does not see it has an older snapshot.
fn overtaken(error: FenceError, grant: &Grant) -> FenceError {
    match error {
        FenceError::Unfenced { reason } if reason == NOT_RAISED => {
            let source = sqlx::Error::Protocol("its snapshot was taken before the fence was raised".into());
            FenceError::Retry { resource: grant.resource().clone(), source }
        }
        error => error,
    }
}

/// Tells the lease of a refusal, and learns whether its counter went back.
async fn told(credential: &dyn Credential, error: FenceError) -> FenceError {
    let FenceError::Stale { resource, offered, seen } = error else { return error };
    tracing::warn!(%resource, %offered, %seen, "stale fencing token refused");
    if credential.refused(seen).await {
        FenceError::TokenRegressed { resource, offered, seen }
    } else {
        FenceError::Stale { resource, offered, seen }
    }
}

impl<DB: FenceDatabase> Renumber for Fence<DB> {
    fn renumber<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        counter: Option<FencingToken>,
        within: Duration,
    ) -> BoxFuture<'a, Result<FencingToken, RenumberError>> {
        Box::pin(async move {
            let clock = Clock::boot();
            let end = clock.now().plus(within);
            let mut conn = Checkout::from(&self.pool).await?;
            // The pool may have taken its time.
            let within = end.since(clock.now());
            if within.is_zero() {
                conn.abandon().await;
                return Err(RenumberError::new(Group::Unavailable, "no connection came in time"));
            }
            let outcome = DB::renumber(&mut conn, resource, owner, counter, within, self.patience).await;
            Ok(conn.settle(outcome).await?)
        })
    }
}

impl<DB: FenceDatabase> Clone for Fence<DB> {
    fn clone(&self) -> Self {
        Self { pool: self.pool.clone(), raised: self.raised.clone(), ..*self }
    }
}

impl<DB: FenceDatabase> fmt::Debug for Fence<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fence")
            .field("database", &DB::NAME)
            .field("patience", &self.patience)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// A fenced transaction that has yet to be awaited, and its options.
#[must_use = "no transaction begins until this is awaited"]
pub struct Begin<'a, DB: FenceDatabase> {
    fence: &'a Fence<DB>,
    credential: &'a dyn Credential,
    isolation: Isolation,
    limits: Limits,
}

impl<DB: FenceDatabase> Begin<'_, DB> {
    /// Sets the isolation level; READ COMMITTED unless it is set.
    ///
    /// At every level the admission takes the snapshot, after the raise. Above READ COMMITTED a
    /// statement or the commit may answer [`FenceError::Retry`].
    pub fn isolation(mut self, isolation: Isolation) -> Self {
        self.isolation = isolation;
        self
    }

    /// Sets the database's limits on this transaction, instead of the fence's.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }
}

impl<'a, DB: FenceDatabase> IntoFuture for Begin<'a, DB> {
    type Output = Result<FencedTransaction<DB>, FenceError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let grant = self.credential.grant();
            match self.fence.open(&grant, self.isolation, self.limits).await {
                Ok(tx) => Ok(tx),
                Err(error) => Err(told(self.credential, error).await),
            }
        })
    }
}

impl<DB: FenceDatabase> fmt::Debug for Begin<'_, DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Begin")
            .field("isolation", &self.isolation)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}
