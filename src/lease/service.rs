//! What a lock service can be asked: the trait that every one implements.

use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;

use super::error::LeaseError;
use super::ttl::Ttl;
use crate::owner::OwnerId;
use crate::resource::Resource;
use crate::token::FencingToken;

/// A lock service: atomic steps on one resource each, judged by the service's own clock.
///
/// [`Leases`](super::Leases) makes leases of them. Every step names the owner, so that a delayed
/// one cannot touch a later term. Every implementation keeps these laws:
///
/// - At most one owner holds a resource at a time.
/// - Each numbered grant carries a larger token than every grant before it, as long as the
///   counter remembers; where it may not, the grant is [`Attempt::Unnumbered`].
/// - [`acquire`](LockService::acquire) repeated by its owner answers with the same grant, and its
///   time to live begins again; a lost answer costs nothing but the repetition.
/// - [`renew`](LockService::renew), [`seed`](LockService::seed) and
///   [`disown`](LockService::disown) never make a lock that is not there.
/// - [`release`](LockService::release) repeated is harmless and says [`Standing::NotOurs`].
/// - "It is not yours" and "could not ask" are different answers: [`Standing::NotOurs`] and
///   [`LeaseError::Unavailable`].
///
/// # Errors
///
/// Every step answers [`LeaseError::Unavailable`] where the service cannot be asked or cannot do it
/// now, and [`LeaseError::Refused`] where it will not do it for this resource, now or later.
///
/// # Cancel safety
///
/// A future that is dropped may have been carried out or not; the lock then ends by its time to
/// live at the latest, or by a [`release`](LockService::release) with the same owner.
pub trait LockService: Send + Sync + 'static {
    /// Takes the lock if it is free, counting the token up in the same atomic step.
    fn acquire<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Attempt, LeaseError>>;

    /// Gives an unnumbered grant its token, and lets the counter go on from there; only while the
    /// lock is still `owner`'s. A counter that stands higher stays where it is.
    fn seed<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        token: FencingToken,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>>;

    /// Lets the lock last for `ttl` from now on, if it is still `owner`'s.
    fn renew<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        ttl: Ttl,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>>;

    /// Frees the lock, if it is still `owner`'s.
    fn release<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>>;

    /// Frees the lock and marks its counter as one that has forgotten, if the lock is still
    /// `owner`'s: a fence has seen a higher token than the counter gave.
    fn disown<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>>;

    /// Whether only a fence that numbers anew keeps its tokens growing, since counters are dropped or
    /// changed in the ordinary course of things. Leases without one are then refused.
    fn needs_fence(&self) -> bool {
        false
    }

    /// Who holds the lock now, for an operator to read.
    fn holder<'a>(&'a self, resource: &'a Resource) -> BoxFuture<'a, Result<Option<Holder>, LeaseError>>;
}

/// One acquisition.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Request {
    /// What is to be held.
    pub resource: Resource,
    /// By whom; made before the request is sent, so that it can be released whatever happens.
    pub owner: OwnerId,
    /// For how long at first.
    pub ttl: Ttl,
    /// Who asks, for operators.
    pub origin: Origin,
}

impl Request {
    /// Describes an acquisition; for those who ask a service themselves.
    #[must_use]
    pub fn new(resource: Resource, owner: OwnerId, ttl: Ttl, origin: Origin) -> Self {
        Self { resource, owner, ttl, origin }
    }
}

/// The answer to one acquisition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attempt {
    /// The lock is the owner's, under this token.
    Granted(FencingToken),
    /// The lock is the owner's, but the counter may have forgotten tokens: one must be issued by
    /// who remembers, and [seeded](LockService::seed).
    Unnumbered {
        /// What the counter holds all the same.
        counter: Option<FencingToken>,
    },
    /// Somebody else holds it.
    Held {
        /// When it runs out, unless it is renewed.
        remaining: Option<Duration>,
    },
}

/// Whether the lock is the asking owner's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It is (for a release: it was), and the step was done.
    Ours,
    /// It is another's or nobody's; nothing was changed.
    NotOurs,
}

/// Who holds a lock, as an operator reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The acquisition.
    pub owner: OwnerId,
    /// Its token; none while it is being numbered.
    pub token: Option<FencingToken>,
    /// Since when, by the service's clock.
    pub since: SystemTime,
    /// How long it still lasts, unless it is renewed.
    pub remaining: Option<Duration>,
    /// Where it runs and what it says of itself.
    pub origin: Origin,
}

impl Holder {
    /// Describes a holder; for implementations of [`LockService`].
    #[must_use]
    pub fn new(
        owner: OwnerId,
        token: Option<FencingToken>,
        since: SystemTime,
        remaining: Option<Duration>,
        origin: Origin,
    ) -> Self {
        Self { owner, token, since, remaining, origin }
    }
}

/// Where a holder runs and what it says of itself. Nothing is decided by it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Origin {
    /// The host's name.
    pub host: String,
    /// The process id.
    pub process: u32,
    /// Free text from the caller.
    pub label: String,
}

impl Origin {
    /// Names this host and process.
    #[must_use]
    pub fn here(label: impl Into<String>) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self { host, process: std::process::id(), label: label.into() }
    }
}
