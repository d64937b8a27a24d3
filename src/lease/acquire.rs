//! Taking a lease: once, or waiting for it.

use std::fmt;
use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::error::{LeaseError, Lost};
use super::guard::Lease;
use super::keepalive::Term;
use super::service::{Attempt, Holder, Label, LockService, Request, Standing};
use crate::clock::{Clock, Moment};
use crate::error::Invalid;
use crate::owner::OwnerId;
use crate::renumber::{CounterOnly, Renumber};
use crate::resource::Resource;
use crate::token::FencingToken;

/// The first pause between two attempts of a waiting acquisition; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// Short enough that a freed lock is found within half a second.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// How long one request may take. A service that has not answered by then is asked again: the
/// same owner gets the same grant.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);

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
    service: Arc<dyn LockService>,
    renumber: Arc<dyn Renumber>,
    clock: Clock,
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
    /// [`Acquire::wait`] waits. Awaiting the result sends the request.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Invalid`] for a name or a duration that no service takes, before anything is
    /// sent; otherwise see [`LeaseError`].
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
            wait: Duration::ZERO,
            keep_alive: true,
            note: String::new(),
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

    /// One attempt: a lease, or how long another still has it.
    async fn attempt(
        &self,
        request: &Request,
        keep_alive: bool,
    ) -> Result<Result<Lease, Option<Duration>>, LeaseError> {
        let mut abandoned = ReleaseOnDrop::new(self, request);
        let mut sent = self.clock.now();
        let mut answer = self.ask(request).await;
        if matches!(answer, Err(LeaseError::Unavailable(_))) {
            // The answer may have been lost after the lock was granted; the owner is recognised.
            sent = self.clock.now();
            answer = self.ask(request).await;
        }
        let deadline = sent.plus(request.ttl.get().saturating_sub(request.ttl.drift()));
        let token = match answer? {
            Attempt::Held { remaining } => {
                abandoned.defuse();
                return Ok(Err(remaining));
            }
            Attempt::Granted(token) => token,
            Attempt::Unnumbered { counter } => self.number(request, counter, deadline).await?,
        };
        let term = Term::new(request, token, deadline, self.service.clone(), self.clock.clone());
        if self.clock.now() >= deadline {
            return Err(lost(request, Lost::Expired));
        }
        abandoned.defuse();
        tracing::debug!(resource = %request.resource, %token, owner = %request.owner, "lease acquired");
        Ok(Ok(Lease::start(term, request.ttl, keep_alive)))
    }

    async fn ask(&self, request: &Request) -> Result<Attempt, LeaseError> {
        // An answer that comes after the lock has run out would be of no use.
        let limit = request.ttl.get().min(REQUEST_LIMIT);
        match tokio::time::timeout(limit, self.service.acquire(request)).await {
            Ok(answer) => answer,
            Err(elapsed) => Err(LeaseError::Unavailable(elapsed.into())),
        }
    }

    /// Has the database issue a token for a grant without one, and seeds the counter with it.
    async fn number(
        &self,
        request: &Request,
        counter: Option<FencingToken>,
        deadline: Moment,
    ) -> Result<FencingToken, LeaseError> {
        let numbered = async {
            let token = self
                .renumber
                .renumber(&request.resource, request.owner, counter)
                .await
                .map_err(|source| LeaseError::Renumber { resource: request.resource.clone(), source })?;
            tracing::info!(resource = %request.resource, %token, "token counter is new or may have forgotten: renumbered");
            match self.service.seed(&request.resource, request.owner, token).await? {
                Standing::Held => Ok(token),
                Standing::NotHeld => Err(lost(request, Lost::Taken)),
            }
        };
        tokio::select! {
            numbered = numbered => numbered,
            () = self.clock.sleep_until(deadline) => Err(lost(request, Lost::Expired)),
        }
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
    wait: Duration,
    keep_alive: bool,
    note: String,
}

impl Acquire<'_> {
    /// Waits up to `limit` for another holder to leave, polling with a jittered, growing pause.
    ///
    /// It has nothing to do with the time to live. `Duration::ZERO`, the default, tries exactly
    /// once; `Duration::MAX` waits without limit.
    pub fn wait(mut self, limit: Duration) -> Self {
        self.wait = limit;
        self
    }

    /// Does not renew: the lease ends when its time to live does.
    pub fn without_keep_alive(mut self) -> Self {
        self.keep_alive = false;
        self
    }

    /// Tells operators what the lease is for; they read it with [`Leases::holder`].
    pub fn label(mut self, note: impl Into<String>) -> Self {
        self.note = note.into();
        self
    }

    async fn run(self) -> Result<Lease, LeaseError> {
        let leases = self.leases;
        let request = Request {
            resource: self.resource?,
            owner: OwnerId::random(),
            ttl: self.ttl.try_into()?,
            label: Label::here(self.note),
        };
        let began = leases.clock.now();
        let end = began.plus(self.wait);
        let mut pause = FIRST_PAUSE;
        loop {
            let outcome = leases.attempt(&request, self.keep_alive).await;
            let held_for = match outcome {
                Ok(Ok(lease)) => return Ok(lease),
                Ok(Err(remaining)) => remaining,
                // While there is time left, a service that cannot be asked is asked again.
                Err(LeaseError::Unavailable(_)) => None,
                Err(error) => return Err(error),
            };
            let now = leases.clock.now();
            if now >= end {
                return Err(match outcome {
                    Err(error) => error,
                    Ok(_) if self.wait.is_zero() => {
                        LeaseError::Held { resource: request.resource, remaining: held_for }
                    }
                    Ok(_) => LeaseError::Timeout { resource: request.resource, waited: now.since(began) },
                });
            }
            // Never asleep past the holder's end; jittered, so that waiters do not come in step.
            let next = jittered(pause).min(held_for.unwrap_or(Duration::MAX)).max(Duration::from_millis(1));
            leases.clock.sleep_until(now.plus(next).min(end)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
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

fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + fastrand::f64() / 2.0)
}

fn lost(request: &Request, reason: Lost) -> LeaseError {
    LeaseError::Lost { resource: request.resource.clone(), reason }
}

/// Frees in the background what an acquisition that failed or was dropped may have been granted.
struct ReleaseOnDrop {
    service: Option<Arc<dyn LockService>>,
    resource: Resource,
    owner: OwnerId,
}

impl ReleaseOnDrop {
    fn new(leases: &Leases, request: &Request) -> Self {
        Self {
            service: Some(leases.service.clone()),
            resource: request.resource.clone(),
            owner: request.owner,
        }
    }

    fn defuse(&mut self) {
        self.service = None;
    }
}

impl Drop for ReleaseOnDrop {
    fn drop(&mut self) {
        // Without a runtime, as when it is shutting down, the time to live frees the lock.
        if let (Some(service), Ok(runtime)) = (self.service.take(), tokio::runtime::Handle::try_current()) {
            let (resource, owner) = (self.resource.clone(), self.owner);
            runtime.spawn(async move {
                let released = tokio::time::timeout(REQUEST_LIMIT, service.release(&resource, owner)).await;
                if !matches!(released, Ok(Ok(_))) {
                    tracing::debug!(%resource, %owner, "an abandoned acquisition is left to its time to live");
                }
            });
        }
    }
}
