//! The fence: the database itself refuses every write under an older token.
//!
//! # Who is authoritative
//!
//! The fence of a resource is a row in the database: the newest (token, owner) that was ever raised
//! for it. It trusts the token and never the clock. Whatever a holder believes of its
//! [lease](crate::lease), this row decides.
//!
//! # The rules
//!
//! **Forward only.** A fence never goes back. Equal tokens belong to the owner that raised the
//! fence with them first: a lock service that issued a number twice still cannot let two holders in.
//!
//! **Raise, then admit, then read.** Before a grant's first transaction the fence is raised to it,
//! in a committed transaction of its own, so that a rollback does not forget it. Every transaction
//! then begins with its admission, which locks the fence and checks that it stands at exactly this
//! grant. What is read after that is not changed by an older holder any more; what was read before
//! may be, and a sum computed from it would lose the older holder's last write.
//!
//! **One holder at a time, in the order of the lock.** An admitted transaction keeps the fence from
//! being raised until it ends. Transactions of one grant run side by side; a raise waits for them,
//! and while it waits, no older transaction can begin.
//!
//! **A sleeper cannot block its successor for long.** The database's own [limits](Limits) end an
//! idle transaction, and a raise that has waited for its
//! [patience](Fence::with_patience) ends the backends that still block it. Transactions prepared
//! for two-phase commit are outside of this. On SQLite nobody can be ended.
//!
//! **Effects and key commit together.** An [idempotency key](Admitted::claim) is written in the
//! transaction whose work it names.
//!
//! **Nothing is lost silently.** [`FencedTransaction::commit`] returns `Ok` only when it is known
//! to be stored; a transaction that had failed, or that was ended from within, is an error, and an
//! answer that was lost is [`FenceError::CommitUnknown`].
//!
//! # One message
//!
//! On Postgres, raise and admission travel in one message, so a fenced transaction has no more
//! round trips than a plain one:
//!
//! ```text
//! begin; select fencerow.raise(…); commit; begin; set local …; select fencerow.admit_first(…)
//! ```
//!
//! The rules are SQL functions, and any language may call them: `select fencerow.raise('x', 33,
//! '…')`, committed by itself, then `begin; select fencerow.admit('x', 33, '…'); …; commit`.

mod checkout;
mod connection;
mod dialect;
mod error;
mod fingerprint;
mod guard;
mod idempotency;
mod limits;
mod migrate;
#[cfg(feature = "postgres")]
mod postgres;
mod repository;
#[cfg(feature = "sqlite")]
mod sqlite;
mod transaction;

pub use connection::Admitted;
pub use dialect::{FenceDatabase, Isolation};
pub use error::FenceError;
pub use guard::{Begin, Fence};
pub use idempotency::{Claim, Fresh, Key, Undoable};
pub use limits::Limits;
pub use repository::{Form, Many, ManyOutcome, Once, OnceOutcome, Table, Write};
pub use transaction::FencedTransaction;
