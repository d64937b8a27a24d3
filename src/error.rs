//! What can be wrong with a value, and what a caller is to do about an error.

use thiserror::Error;

/// Input that is refused before anything is sent or written. Fix the program.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Invalid {
    /// Not a resource name.
    #[error("not a resource name ({bytes} bytes): {reason}")]
    Resource {
        /// Which rule it breaks.
        reason: &'static str,
        /// Its length.
        bytes: usize,
    },
    /// Not a fencing token: zero or negative.
    #[error("{0} is not a fencing token: tokens are positive")]
    Token(i64),
    /// A time to live that no lock service takes.
    #[error("a lease cannot last {0:?}: the shortest is 1 ms, the longest 2^53 - 1 ms")]
    Ttl(std::time::Duration),
    /// A text that does not parse; only its beginning is kept.
    #[error("not a valid {what}: {text:?}")]
    Text {
        /// What it was to be.
        what: &'static str,
        /// The text.
        text: String,
    },
    /// An option outside its range.
    #[error("{what}: {reason}")]
    Option {
        /// Which option.
        what: &'static str,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// An identifier that SQL cannot take, or not as it stands.
    #[error("{name:?} cannot be used as an SQL identifier: {reason}")]
    Identifier {
        /// The identifier.
        name: String,
        /// Which rule it breaks.
        reason: &'static str,
    },
}

impl Invalid {
    /// What to do about it: always [`Group::Misuse`].
    #[must_use]
    pub fn group(&self) -> Group {
        Group::Misuse
    }
}

/// A value that is what it is to be already cannot be invalid.
impl From<std::convert::Infallible> for Invalid {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}

/// What a caller is to do about an error; every error enum of the crate answers with one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Group {
    /// Stop: somebody else holds the resource now, or may. A new lease is needed.
    Superseded,
    /// Somebody else is at it; try again later, with the same lease if there is one.
    Contended,
    /// The program asks for something that cannot be; trying again will not help.
    Misuse,
    /// A server could not be asked, or could not do it now. Back off, then try again.
    Unavailable,
    /// It may have happened or not. Run it again under the same idempotency key, or ask for the outcome.
    UnknownOutcome,
    /// The lock service counts below what the database has seen. The term is over; the next grant
    /// is numbered anew. Seen repeatedly, it is worth waking somebody.
    CounterRegressed,
}
