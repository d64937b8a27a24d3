//! Taking a lease: once, or waiting for it.

use std::fmt;
use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::acquisition::Acquisition;
use super::error::LeaseError;
use super::guard::Lease;
use super::polling::Polling;
use super::service::{Holder, LockService, Origin, Request};
use super::tenure::Tenure;
use crate::clock::Clock;
use crate::error::{Group, Invalid};
use crate::owner::OwnerId;
use crate::renumber::{CounterOnly, Renumber};
use crate::resource::Resource;

/// The longest label, in bytes: it is stored with the lock and sent with each acquisition.
const LONGEST_LABEL: usize = 1024;

/// Hands out leases from a lock service, numbered by it and, where it may have forgotten, by a fence.
///
/// Cheap to clone; clones share the service.
///
/// # Examples
///
/// ```
/// use fencerow::lease::{Leases, MemoryLocks};
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let leases = Leases::without_fence(MemoryLocks::new());
/// let lease = leases.acquire("settlement:2026-11-30", Duration::from_secs(10)).await?;
/// assert!(leases.try_acquire("settlement:2026-11-30", Duration::from_secs(10)).await?.is_none());
/// lease.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Leases {
    pub(super) service: Arc<dyn LockService>,
    pub(super) renumber: Arc<dyn Renumber>,
    pub(super) clock: Clock,
}

impl Leases {
    /// Takes leases from `service`; where its counter may have forgotten, `fence` numbers them.
    ///
    /// Give it the fence that the leases will be shown to: it must be the memory that refuses.
    pub fn new(service: impl LockService, fence: impl Renumber) -> Self {
        Self { service: Arc::new(service), renumber: Arc::new(fence), clock: Clock::boot() }
    }

    /// Takes leases from `service` with no database to remember their tokens.
    ///
    /// The locks exclude as ever; what is lost is said at [`CounterOnly`].
    pub fn without_fence(service: impl LockService) -> Self {
        Self::new(service, CounterOnly)
    }

    /// Judges deadlines by another clock; for tests.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }

    /// Acquires the resource for `ttl`, and keeps it until the lease is released, dropped or lost.
    ///
    /// As it stands it tries once, and says [`LeaseError::Held`] if another holds it;
    /// [`Acquire::wait`] waits. Awaiting the result sends the request. A try takes no longer than
    /// two answers of the service may, and twice the time to live.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`]: a name, a duration or a label that no service takes; nothing was sent.
    /// - [`LeaseError::Held`], [`LeaseError::Timeout`]: another holds it.
    /// - [`LeaseError::Unavailable`]: the service could not be asked.
    /// - [`LeaseError::Refused`]: the service cannot serve this resource.
    /// - [`LeaseError::Renumber`]: the counter may have forgotten, and the database could not number.
    /// - [`LeaseError::DurabilityUncertain`]: too few replicas have the grant, where that was asked for.
    /// - [`LeaseError::Lost`]: the grant ran out before it could be handed out.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up: what was already granted is released in the background, or
    /// ends by its time to live.
    pub fn acquire<R>(&self, resource: R, ttl: Duration) -> Acquire<'_>
    where
        R: TryInto<Resource>,
        R::Error: Into<Invalid>,
    {
        Acquire {
            leases: self,
            resource: resource.try_into().map_err(Into::into),
            ttl,
            polling: Polling::default(),
            keep_alive: true,
            grace: Duration::ZERO,
            longest: None,
            label: String::new(),
        }
    }

    /// Tries once: a lease, or nothing if another holds the resource.
    ///
    /// # Errors
    ///
    /// As [`Leases::acquire`], but never [`LeaseError::Held`].
    ///
    /// # Cancel safety
    ///
    /// As [`Leases::acquire`].
    pub async fn try_acquire<R>(&self, resource: R, ttl: Duration) -> Result<Option<Lease>, LeaseError>
    where
        R: TryInto<Resource>,
        R::Error: Into<Invalid>,
    {
        match self.acquire(resource, ttl).await {
            Ok(lease) => Ok(Some(lease)),
            Err(LeaseError::Held { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Who holds the resource now, for an operator to read. Nothing can be decided by it: it may
    /// have changed before it arrives.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Invalid`] or [`LeaseError::Unavailable`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect.
    pub async fn holder<R>(&self, resource: R) -> Result<Option<Holder>, LeaseError>
    where
        R: TryInto<Resource>,
        R::Error: Into<Invalid>,
    {
        let resource = resource.try_into().map_err(Into::into)?;
        self.service.holder(&resource).await
    }
}

impl fmt::Debug for Leases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leases").field("clock", &self.clock).finish_non_exhaustive()
    }
}

/// An acquisition that has yet to be awaited, and its options.
#[derive(Debug)]
#[must_use = "nothing is acquired until this is awaited"]
pub struct Acquire<'a> {
    leases: &'a Leases,
    resource: Result<Resource, Invalid>,
    ttl: Duration,
    polling: Polling,
    keep_alive: bool,
    grace: Duration,
    longest: Option<Duration>,
    label: String,
}

impl Acquire<'_> {
    /// Waits up to `limit` for another holder to leave, asking again after a jittered, growing pause.
    ///
    /// It has nothing to do with the time to live. `Duration::ZERO`, the default, tries exactly
    /// once; `Duration::MAX` waits without limit. When the limit is reached, the error is what kept
    /// the last attempt: [`LeaseError::Timeout`] where another held it. A service that cannot be
    /// asked for now, and a grant that came too late, are tried again until then.
    pub fn wait(mut self, limit: Duration) -> Self {
        self.polling.limit = Some(limit);
        self
    }

    /// Waits so long between two attempts, jittered down to half of it, instead of pauses that grow
    /// from 20 ms to half a second. It waits no longer than the holder's lock lasts, and the wait
    /// still ends at its limit. Refused below a millisecond.
    pub fn retry_delay(mut self, delay: Duration) -> Self {
        self.polling.delay = Some(delay);
        self
    }

    /// Gives up after so many attempts, with [`LeaseError::Timeout`], or with [`LeaseError::Held`]
    /// where that is one. Without a [limit](Acquire::wait) they alone decide.
    ///
    /// An attempt is one request, and one more where its answer was lost. Refused if it is zero.
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.polling.attempts = Some(attempts);
        self
    }

    /// Does not renew: the lease ends when its time to live does.
    pub fn without_keep_alive(mut self) -> Self {
        self.keep_alive = false;
        self
    }

    /// Ends the lease at the latest so long after its grant, however well it is renewed: work that
    /// hangs does not keep a resource for ever. The loss is announced as any other, as
    /// [`Lost::HeldTooLong`](super::Lost::HeldTooLong).
    ///
    /// Refused below a millisecond; `Duration::MAX` is no limit.
    pub fn longest(mut self, hold: Duration) -> Self {
        self.longest = Some(hold);
        self
    }

    /// Keeps the lock closed for so long after it ran out, for work on something that cannot check
    /// a token: a holder that was paused has that time to notice before the next one begins.
    ///
    /// A release opens it at once. The holder's own deadline stays where it was. This makes harm less
    /// likely, and only a fence rules it out.
    pub fn grace(mut self, period: Duration) -> Self {
        self.grace = period;
        self
    }

    /// Tells operators what the lease is for, in up to 1024 bytes; they read it with
    /// [`Leases::holder`].
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self
    }

    async fn run(self) -> Result<Lease, LeaseError> {
        let clock = &self.leases.clock;
        if self.label.len() > LONGEST_LABEL {
            return Err(Invalid::Option { what: "label", reason: "it is longer than 1024 bytes" }.into());
        }
        if self.leases.service.needs_fence() && !self.leases.renumber.remembers() {
            let reason = "its tokens grow only where a fence numbers anew, and there is none";
            return Err(Invalid::Option { what: "lock service", reason }.into());
        }
        self.polling.check()?;
        let polling = self.polling;
        let resource = self.resource?;
        let tenure = Tenure::new(self.ttl, self.grace, self.longest, self.keep_alive)?;
        let origin = Origin::here(self.label);
        // An owner is used up by a grant that came to nothing: its lock is freed in the background.
        let acquisition = || {
            let (owner, now) = (OwnerId::random(), clock.now());
            let ttl = tenure.asked(now, tenure.end(now));
            let request = Request { resource: resource.clone(), owner, ttl, origin: origin.clone() };
            Acquisition::new(self.leases, request, tenure)
        };
        let mut current = acquisition();
        let began = clock.now();
        let end = began.plus(polling.limit());
        let timeout = || LeaseError::Timeout { resource: resource.clone(), waited: clock.now().since(began) };
        let mut last = None;
        let mut attempts = 0_u32;
        loop {
            attempts = attempts.saturating_add(1);
            let outcome = if polling.tries_once() {
                current.attempt().await
            } else {
                tokio::select! {
                    biased;
                    outcome = current.attempt() => outcome,
                    () = clock.sleep_until(end) => {
                        return Err(match last {
                            Some(LeaseError::Timeout { .. }) => timeout(),
                            Some(error) => error,
                            None => LeaseError::Unavailable("it did not answer in time".into()),
                        });
                    }
                }
            };
            let mut held_for = None;
            let error = match outcome {
                Ok(Ok(lease)) => return Ok(lease),
                Ok(Err(remaining)) => {
                    held_for = remaining;
                    if polling.tries_once() {
                        LeaseError::Held { resource: resource.clone(), remaining }
                    } else {
                        timeout()
                    }
                }
                // While there is time left, a service that cannot be asked is asked again.
                Err(error @ LeaseError::Unavailable(_)) => error,
                // The grant came too late, reached too few replicas, or could not be numbered for now.
                Err(error) if may_pass(&error) => {
                    current = acquisition();
                    error
                }
                Err(error) => return Err(error),
            };
            let now = clock.now();
            if now >= end || polling.tries_once() || polling.is_over_after(attempts) {
                return Err(error);
            }
            last = Some(error);
            // Never asleep past the holder's end.
            let left = held_for.map_or(Duration::MAX, |left| left.max(Duration::from_millis(1)));
            clock.sleep_until(now.plus(polling.pause(attempts).min(left)).min(end)).await;
        }
    }
}

impl<'a> IntoFuture for Acquire<'a> {
    type Output = Result<Lease, LeaseError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

/// Whether an acquisition by a new owner may fare better.
fn may_pass(error: &LeaseError) -> bool {
    match error {
        LeaseError::Lost { .. } | LeaseError::DurabilityUncertain { .. } => true,
        LeaseError::Renumber { source, .. } => {
            matches!(source.group(), Group::Contended | Group::Unavailable)
        }
        _ => false,
    }
}
