//! What can go wrong between a holder and its lock service.

use std::error::Error as StdError;
use std::time::Duration;

use thiserror::Error;

use crate::error::{Group, Invalid};
use crate::renumber::RenumberError;
use crate::resource::Resource;

/// Why there is no lease, or none any more.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The request makes no sense; nothing was sent.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// Somebody else holds the resource; the caller did not want to wait.
    #[error("{resource:?} is held by another")]
    Held {
        /// What was asked for.
        resource: Resource,
        /// When the lock service would let it run out, unless it is renewed.
        remaining: Option<Duration>,
    },
    /// Somebody else held the resource for as long as the caller would wait.
    #[error("{resource:?} was still held by another after {waited:?}")]
    Timeout {
        /// What was asked for.
        resource: Resource,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The lease is not ours any more: it ran out, or the lock service says so.
    #[error("the lease on {resource:?} is lost: {reason}")]
    Lost {
        /// What was held.
        resource: Resource,
        /// How it was lost.
        reason: Lost,
    },
    /// The lock service could not be asked. The request may have been carried out.
    #[error("the lock service could not be asked")]
    Unavailable(#[source] Box<dyn StdError + Send + Sync>),
    /// The lock service answered, and cannot serve this resource: a key of another type, a counter
    /// that is no number or at its end, a missing table or right.
    #[error("the lock service cannot serve {resource:?}")]
    Refused {
        /// What was asked for.
        resource: Resource,
        /// The server's words.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The lock was granted, and too few replicas have confirmed that they have it. It is being
    /// released.
    #[error("{confirmed} of {wanted} replicas have confirmed the grant of {resource:?}")]
    DurabilityUncertain {
        /// What was asked for.
        resource: Resource,
        /// How many have confirmed it; 0 where the connection broke and none could be asked.
        confirmed: u32,
        /// How many were to.
        wanted: u32,
    },
    /// The counter may have forgotten, and the database could not issue a token instead. The lock
    /// was given back.
    #[error("no token could be issued for {resource:?}")]
    Renumber {
        /// What was asked for.
        resource: Resource,
        /// Why not.
        source: RenumberError,
    },
}

/// How a lease was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum Lost {
    /// The deadline passed before a renewal was confirmed.
    #[error("it ran out")]
    Expired,
    /// It was held for as long as its holder had [allowed itself](super::Acquire::longest).
    #[error("it was held for as long as it may be")]
    HeldTooLong,
    /// The lock service says that the lock is not this owner's.
    #[error("the lock service holds it for another, or for nobody")]
    Taken,
    /// A fence has seen a higher token although the lock was still held: the counter went back.
    #[error("the token counter went back")]
    Regressed,
}

impl LeaseError {
    /// What to do about it.
    #[must_use]
    pub fn group(&self) -> Group {
        match self {
            Self::Invalid(_) | Self::Refused { .. } => Group::Misuse,
            Self::Held { .. } | Self::Timeout { .. } => Group::Contended,
            Self::Lost { reason: Lost::Regressed, .. } => Group::CounterRegressed,
            Self::Lost { .. } => Group::Superseded,
            Self::Unavailable(_) | Self::DurabilityUncertain { .. } => Group::Unavailable,
            Self::Renumber { source, .. } => source.group(),
        }
    }

    /// Whether somebody else has it: an answer rather than a failure.
    #[must_use]
    pub fn is_contended(&self) -> bool {
        self.group() == Group::Contended
    }
}
