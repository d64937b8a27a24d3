//! Leases: time-bounded exclusive holds, each with a fencing token.
//!
//! # Who is authoritative
//!
//! The lock service says who *may* work on a resource; nothing here says who *does*. The lease
//! trusts the clock and never the database; the [fence](crate::fence) trusts the token and never
//! the clock. So a lease is about not working in vain, and a fence about not doing harm, and
//! there is no `is_held()` to be mistaken for safety: [`Lease::remaining`] and [`Lease::lost`] are advice.
//!
//! # A term
//!
//! ```text
//!            acquire                    renew (a third of the TTL)
//!   free ──────────────▶ granted ─────────────────────────────┐
//!     ▲                   │  │  ▲                             │
//!     │   release, drop   │  │  └─────────────────────────────┘
//!     ├───────────────────┘  │ deadline passed · service says "not yours" · counter regressed
//!     └──────────────────────┴──▶ lost (for ever: a new term is a new acquisition)
//! ```
//!
//! - **One owner a term.** Each acquisition makes a new [`OwnerId`] before anything is sent. A
//!   renewal keeps the token; the token is a field of the grant and never read again from the
//!   counter; the keep-alive never acquires. A holder that slept through its lease has lost it,
//!   whoever holds the resource now.
//! - **The clock may only make us stop sooner.** The deadline is counted from *before* the request
//!   was sent, less a drift allowance, on a [clock](crate::clock) that counts suspended time.
//! - **Loss is announced** by [`Lease::lost`] and [`Lease::cancellation`], no later than the
//!   deadline, also when the service hangs. "Not yours" ends a term at once; "could not ask" is
//!   tried again until the deadline. The runtime has to run for it: after a suspended machine has
//!   woken up it takes up to a second, and blocking code on the runtime's only thread delays it.
//! - **A term can be bounded.** [`Acquire::longest`] ends the renewals after so long, for work that
//!   hangs. [`Acquire::grace`] keeps the lock closed for a while after it ran out, though not after a
//!   release, for what cannot check a token.
//! - **Leases do not hinder each other.** Each is kept by a task of its own; a keep-alive that
//!   ran late, because something blocks the runtime or the machine slept, says so in a warning.
//! - **Nothing is left behind.** A dropped acquisition, a dropped lease and a dropped release all
//!   free the lock in the background; where that cannot be, its time to live does.
//!
//! # Numbers
//!
//! Where the service's counter may have forgotten tokens it grants without a number, and
//! [`Leases`] has the database [`Renumber`]: it issues the first token of the next epoch and
//! refuses all older ones, and the counter is seeded with it only while the lock is still ours.
//! A holder whose lock ran out in between gets nothing; if it was numbered all the same, whoever
//! got the lock meanwhile is fenced out by that number, as if the counter had gone back, and the
//! next grant is above both.
//!
//! # Services
//!
//! | service | feature | whose clock | its counter may have forgotten when |
//! |---|---|---|---|
//! | `RedisLocks` | `redis` | the server's | it is missing, or the server was restarted or promoted, or its slot moved |
//! | `PgLocks` | `postgres` | the database's | it is missing, or the database is on another timeline |
//! | `SqliteLocks` | `sqlite` | the machine's, since boot | it is missing (a file restored from an older copy is noticed by the fence only) |
//! | [`MemoryLocks`] | | the process's, or a manual one | it is missing: the process is new |
//!
//! [`FallbackLocks`] makes one of two, for when the first is away. One of your own implements
//! [`LockService`]. Each passes the same tests, of which this table is made:
//!
#![doc = include_str!("conformance.md")]
//!
//! `cluster` is `RedisLocks` on a Redis Cluster. Where a field is empty, the law is about the network to
//! one server, and the service has none.

mod acquire;
mod acquisition;
mod error;
mod fallback;
#[cfg(test)]
mod far;
mod guard;
mod keepalive;
mod memory;
mod polling;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
mod service;
mod several;
#[cfg(feature = "sqlite")]
mod sqlite;
mod tenure;
mod ttl;

#[cfg(feature = "redis")]
pub use self::redis::RedisLocks;
pub use acquire::{Acquire, Leases};
pub use error::{LeaseError, Lost};
pub use fallback::FallbackLocks;
pub use guard::Lease;
pub use memory::MemoryLocks;
#[cfg(feature = "postgres")]
pub use postgres::PgLocks;
pub use service::{Attempt, Holder, LockService, Origin, Request, Standing};
pub use several::AcquireMany;
#[cfg(feature = "sqlite")]
pub use sqlite::SqliteLocks;
pub use ttl::Ttl;

#[cfg(doc)]
use crate::{OwnerId, Renumber};
