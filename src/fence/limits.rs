//! The database's own limits on a fenced transaction.

use std::time::Duration;

use crate::error::Invalid;

/// The shortest and the longest limit that follows from a lease.
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);

/// What the database itself allows a fenced transaction, so that a holder that is paused, cut off
/// or slow does not keep it open.
///
/// Those that are not set follow from what is left of the lease at the beginning, between one
/// second and one minute. They are set for this transaction only. Postgres keeps them; SQLite has
/// none of them.
///
/// A running statement is not limited by default: under a lease that is renewed it may take longer
/// than the lease's time to live, and if the lease is lost, the next holder ends it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[must_use]
pub struct Limits {
    idle: Option<Duration>,
    lock: Option<Duration>,
    statement: Option<Duration>,
    transaction: Option<Duration>,
}

impl Limits {
    /// The limits that follow from the lease.
    pub fn new() -> Self {
        Self::default()
    }

    /// How long the transaction may wait for its client between two statements
    /// (`idle_in_transaction_session_timeout`), and for a silent network (`tcp_user_timeout`).
    pub fn idle(mut self, limit: Duration) -> Self {
        self.idle = Some(limit);
        self
    }

    /// How long one statement may wait for one lock (`lock_timeout`).
    pub fn lock(mut self, limit: Duration) -> Self {
        self.lock = Some(limit);
        self
    }

    /// How long one statement may take (`statement_timeout`).
    pub fn statement(mut self, limit: Duration) -> Self {
        self.statement = Some(limit);
        self
    }

    /// How long the whole transaction may take (`transaction_timeout`, from PostgreSQL 17 on;
    /// before it, this is not enforced).
    pub fn transaction(mut self, limit: Duration) -> Self {
        self.transaction = Some(limit);
        self
    }

    /// Every limit as the server takes it, in milliseconds.
    #[cfg_attr(not(feature = "postgres"), allow(dead_code, reason = "only Postgres has limits"))]
    pub(super) fn resolve(&self, remaining: Duration) -> Result<Resolved, Invalid> {
        let derived = remaining.clamp(SHORTEST, LONGEST);
        Ok(Resolved {
            idle: millis("idle limit", self.idle.unwrap_or(derived))?,
            lock: millis("lock limit", self.lock.unwrap_or(derived))?,
            statement: self.statement.map(|limit| millis("statement limit", limit)).transpose()?,
            transaction: self.transaction.map(|limit| millis("transaction limit", limit)).transpose()?,
        })
    }
}

/// Limits in whole milliseconds.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "postgres"), allow(dead_code, reason = "only Postgres has limits"))]
pub(super) struct Resolved {
    pub(super) idle: i32,
    pub(super) lock: i32,
    pub(super) statement: Option<i32>,
    pub(super) transaction: Option<i32>,
}

/// To the server, zero would mean "no limit".
pub(super) fn millis(what: &'static str, limit: Duration) -> Result<i32, Invalid> {
    match i32::try_from(limit.as_millis()) {
        Ok(millis) if millis > 0 => Ok(millis),
        _ => Err(Invalid::Option { what, reason: "it must be 1 ms to 2^31 - 1 ms" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_follow_from_the_lease_and_never_mean_none() {
        let short = Limits::new().resolve(Duration::ZERO).unwrap();
        assert_eq!((short.idle, short.lock, short.statement), (1_000, 1_000, None));
        let long = Limits::new().resolve(Duration::from_secs(86_400)).unwrap();
        assert_eq!((long.idle, long.lock), (60_000, 60_000));
        let own = Limits::new().idle(Duration::from_millis(1500)).statement(Duration::from_millis(7));
        let own = own.resolve(Duration::from_secs(10)).unwrap();
        assert_eq!((own.idle, own.lock, own.statement), (1_500, 10_000, Some(7)));
        for limit in [Duration::ZERO, Duration::from_micros(999), Duration::MAX] {
            assert!(Limits::new().lock(limit).resolve(Duration::from_secs(10)).is_err());
        }
    }
}
