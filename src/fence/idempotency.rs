//! Idempotency keys, which commit together with the effects they name.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::connection::Admitted;
use super::dialect::{ClaimRow, FenceDatabase};
use super::error::FenceError;
use super::fingerprint::fingerprint;
use crate::error::Invalid;

/// The longest key and the longest scope, in bytes.
const MAX_BYTES: usize = 512;

/// A caller's name for one piece of work.
///
/// A bare name (`"payout-8841"`) belongs to the resource that used it first: under another
/// resource it is refused as reused, so it is neither done twice nor answered with what was done
/// elsewhere. A name in a [scope](Key::scoped) is shared by every resource.
///
/// # Examples
///
/// ```
/// use fencerow::fence::Key;
///
/// let bare = Key::new("payout-8841")?;
/// let shared = Key::scoped("payouts", "8841")?;
/// assert!(Key::new("").is_err());
/// # Ok::<(), fencerow::Invalid>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Key {
    /// Empty for a bare name.
    scope: String,
    name: String,
}

impl Key {
    /// Takes a bare name.
    ///
    /// # Errors
    ///
    /// [`Invalid::Option`] if it is blank, longer than 512 bytes, or holds a NUL.
    pub fn new(name: impl Into<String>) -> Result<Self, Invalid> {
        let name = checked("idempotency key", name.into())?;
        Ok(Self { scope: String::new(), name })
    }

    /// Takes a name within a scope that every resource shares.
    ///
    /// # Errors
    ///
    /// [`Invalid::Option`] if either is blank, longer than 512 bytes, or holds a NUL.
    pub fn scoped(scope: impl Into<String>, name: impl Into<String>) -> Result<Self, Invalid> {
        let scope = checked("scope of an idempotency key", scope.into())?;
        Ok(Self { scope, name: checked("idempotency key", name.into())? })
    }

    /// The name, without its scope.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

fn checked(what: &'static str, text: String) -> Result<String, Invalid> {
    let reason = if text.trim().is_empty() {
        "it is empty or blank"
    } else if text.len() > MAX_BYTES {
        "it is longer than 512 bytes"
    } else if text.contains('\0') {
        "it contains a NUL"
    } else {
        return Ok(text);
    };
    Err(Invalid::Option { what, reason })
}

impl TryFrom<&str> for Key {
    type Error = Invalid;

    fn try_from(name: &str) -> Result<Self, Invalid> {
        Self::new(name)
    }
}

impl TryFrom<String> for Key {
    type Error = Invalid;

    fn try_from(name: String) -> Result<Self, Invalid> {
        Self::new(name)
    }
}

impl TryFrom<&String> for Key {
    type Error = Invalid;

    fn try_from(name: &String) -> Result<Self, Invalid> {
        Self::new(name)
    }
}

impl TryFrom<&Key> for Key {
    type Error = Invalid;

    fn try_from(key: &Key) -> Result<Self, Invalid> {
        Ok(key.clone())
    }
}

/// Whether the work has been done before.
#[derive(Debug)]
#[must_use = "a fresh claim has to be recorded, or the commit is refused"]
pub enum Claim<R> {
    /// It has not: do it now, in this transaction, and record its response.
    Fresh(Fresh<R>),
    /// It has, with this response. Do nothing.
    Replayed(R),
}

impl<DB: FenceDatabase> Admitted<'_, DB> {
    /// Claims an idempotency key for work on `payload` in this transaction.
    ///
    /// The record commits or vanishes with the transaction's other writes. A rival that has
    /// claimed the key and is still at it is waited for: if it commits, its response is replayed;
    /// if it rolls back, the claim is fresh. Records are kept until you delete them.
    ///
    /// `R` is what the work answers with; it is stored as JSON. Let it be a `Result` where a
    /// business failure is an answer, too, and see [`Fresh::undoable`].
    ///
    /// # Errors
    ///
    /// - [`FenceError::KeyReused`] if the key was used for another payload, by the digest of its
    ///   JSON with sorted members, or for another resource (see [`Key`]).
    /// - [`FenceError::Unrecorded`] if it was claimed before, and never given a response.
    /// - [`FenceError::Payload`] if the payload is not JSON, or the stored response not an `R`.
    /// - [`FenceError::Busy`], [`FenceError::Retry`] and others of the database.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, roll the transaction back; a commit asks the database first.
    ///
    /// # Examples
    ///
    /// See the [crate's page](crate).
    pub async fn claim<K, R>(&mut self, key: K, payload: &impl Serialize) -> Result<Claim<R>, FenceError>
    where
        K: TryInto<Key>,
        K::Error: Into<Invalid>,
        R: Serialize + DeserializeOwned,
    {
        let key = key.try_into().map_err(Into::into)?;
        let fingerprint = fingerprint(payload)?;
        let grant = self.grant.clone();
        let row = ClaimRow {
            scope: &key.scope,
            key: &key.name,
            fingerprint: &fingerprint,
            resource: grant.resource().as_str(),
            token: grant.token().get(),
            owner: grant.owner().get(),
        };
        let seen = DB::claim(self.begin_statement(), &row).await;
        let Some(seen) = self.end_statement(seen).map_err(|error| DB::explain(error, &grant))? else {
            self.health.unrecorded.push(key.clone());
            return Ok(Claim::Fresh(Fresh { key, fingerprint, response: PhantomData }));
        };
        if key.scope.is_empty() && seen.resource != row.resource {
            return Err(FenceError::KeyReused { key: key.name, what: "resource" });
        }
        if seen.fingerprint != fingerprint {
            return Err(FenceError::KeyReused { key: key.name, what: "input" });
        }
        let Some(response) = seen.response else {
            return Err(FenceError::Unrecorded { key: key.name });
        };
        tracing::debug!(resource = row.resource, key = key.name, "idempotency key replayed");
        serde_json::from_str(&response).map(Claim::Replayed).map_err(FenceError::Payload)
    }
}

/// A key that was free: its work is to be done now, and its response recorded.
#[derive(Debug)]
#[must_use = "a fresh claim has to be recorded, or the commit is refused"]
pub struct Fresh<R> {
    key: Key,
    fingerprint: Vec<u8>,
    response: PhantomData<fn(R)>,
}

impl<R: Serialize + DeserializeOwned> Fresh<R> {
    /// Records the response, to be stored with the work when the transaction commits, and returns it.
    ///
    /// # Errors
    ///
    /// [`FenceError::Payload`] if it is not JSON that reads back; [`FenceError::Unfenced`] if `tx` is not the
    /// transaction that claimed the key; otherwise the database's.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the commit is refused.
    pub async fn record<DB: FenceDatabase>(
        self,
        tx: &mut Admitted<'_, DB>,
        response: R,
    ) -> Result<R, FenceError> {
        let text = serde_json::to_string(&response).map_err(FenceError::Payload)?;
        // What does not read back (a NaN becomes null) could never be replayed.
        serde_json::from_str::<R>(&text).map_err(FenceError::Payload)?;
        let grant = tx.grant.clone();
        let row = ClaimRow {
            scope: &self.key.scope,
            key: &self.key.name,
            fingerprint: &self.fingerprint,
            resource: grant.resource().as_str(),
            token: grant.token().get(),
            owner: grant.owner().get(),
        };
        let recorded = DB::record(tx.begin_statement(), &row, &text).await;
        if !tx.end_statement(recorded).map_err(|error| DB::explain(error, &grant))? {
            let reason = "the idempotency key was claimed in another one";
            return Err(FenceError::Unfenced { reason });
        }
        tx.health.unrecorded.retain(|key| *key != self.key);
        Ok(response)
    }

    /// Marks this point, so that the work can be undone and a failure recorded in its place: one
    /// round trip more.
    ///
    /// Rolling the whole transaction back would forget the key as well, and a retry would run the
    /// work again. Where "declined" is an answer that a retry is to get, too, begin like this, and
    /// end with [`Undoable::record`] or [`Undoable::undo_and_record`].
    ///
    /// # Errors
    ///
    /// The database's.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the commit is refused.
    pub async fn undoable<DB: FenceDatabase>(
        self,
        tx: &mut Admitted<'_, DB>,
    ) -> Result<Undoable<R>, FenceError> {
        let point = Savepoint { number: SAVEPOINTS.fetch_add(1, Ordering::Relaxed) };
        run(tx, point.set()).await?;
        Ok(Undoable { fresh: self, point, unrecorded: tx.health.unrecorded.clone() })
    }
}

/// A fresh claim whose work can be undone without losing the claim.
#[derive(Debug)]
#[must_use = "a fresh claim has to be recorded, or the commit is refused"]
pub struct Undoable<R> {
    fresh: Fresh<R>,
    point: Savepoint,
    /// The claims that were open then; those made since are undone with the work.
    unrecorded: Vec<Key>,
}

impl<R: Serialize + DeserializeOwned> Undoable<R> {
    /// Keeps the work and records its response, as [`Fresh::record`].
    ///
    /// # Errors
    ///
    /// As [`Fresh::record`].
    ///
    /// # Cancel safety
    ///
    /// As [`Fresh::record`].
    pub async fn record<DB: FenceDatabase>(
        self,
        tx: &mut Admitted<'_, DB>,
        response: R,
    ) -> Result<R, FenceError> {
        self.fresh.record(tx, response).await
    }

    /// Undoes what was done in the transaction since [`Fresh::undoable`], also where a statement
    /// of it failed, and records the response: typically a failure that a retry is to get, too.
    ///
    /// # Errors
    ///
    /// As [`Fresh::record`].
    ///
    /// # Cancel safety
    ///
    /// As [`Fresh::record`].
    pub async fn undo_and_record<DB: FenceDatabase>(
        self,
        tx: &mut Admitted<'_, DB>,
        response: R,
    ) -> Result<R, FenceError> {
        run(tx, self.point.undo()).await?;
        tx.health.unrecorded = self.unrecorded;
        self.fresh.record(tx, response).await
    }
}

/// A savepoint of this crate's, by a name that no other of the transaction has.
#[derive(Debug, Clone, Copy)]
struct Savepoint {
    number: u64,
}

/// Counts savepoints in the whole process: one transaction may be admitted more than once.
static SAVEPOINTS: AtomicU64 = AtomicU64::new(1);

impl Savepoint {
    fn set(self) -> String {
        format!("savepoint fencerow_claim_{}", self.number)
    }

    fn undo(self) -> String {
        format!("rollback to savepoint fencerow_claim_{}", self.number)
    }
}

async fn run<DB: FenceDatabase>(tx: &mut Admitted<'_, DB>, sql: String) -> Result<(), FenceError> {
    let grant = tx.grant.clone();
    let outcome = DB::run(tx.begin_statement(), sql).await;
    tx.end_statement(outcome).map_err(|error| DB::explain(error, &grant))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_checked_before_it_is_sent() {
        let long = "x".repeat(513);
        for name in ["", " \t", "a\0b", &long] {
            assert!(Key::new(name).is_err());
            assert!(Key::scoped(name, "a").is_err());
            assert!(Key::scoped("a", name).is_err());
        }
        assert!(Key::scoped("a", "x".repeat(512)).is_ok());
    }
}
