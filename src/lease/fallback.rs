//! Another lock service for when the first cannot be asked.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::error::LeaseError;
use super::keepalive::release_until;
use super::service::{Attempt, Holder, LockService, Origin, Request, Standing};
use super::ttl::Ttl;
use crate::clock::{Clock, Moment};
use crate::error::Invalid;
use crate::owner::OwnerId;
use crate::resource::Resource;
use crate::token::FencingToken;

/// How long the primary may take by default, and for how long it is left alone when it failed.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long an acquisition that was given up is seen to, at most.
const ABANDONED_LIMIT: Duration = Duration::from_secs(10);
/// How long a lock is asked for to hand a resource back.
const HAND_BACK: Duration = Duration::from_secs(30);

/// Two lock services in one: a primary, and another for when that cannot be asked.
///
/// What to do when Redis is down is decided per call site, by the leases that it is given:
///
/// - **Halt**: [`Leases`](super::Leases) of one service. No grant, and
///   [`LeaseError::Unavailable`]. That is right for settlement.
/// - **Fall back**: leases of this, most often with `RedisLocks` and `PgLocks`. Everybody who
///   acquires a resource must do it through the same two; a fence is needed, and leases without
///   one are refused.
///
/// # Who is in charge
///
/// As long as the primary answers, it alone is asked. When it does not, the secondary is, and from
/// its first grant on **the secondary stays in charge of that resource** until it is
/// [handed back](FallbackLocks::hand_back) on purpose. Otherwise a process that is cut off from
/// Redis and one that is not would take the resource from each other for ever.
///
/// The record of that is the secondary's counter, which every process sees: it remembers only while
/// the secondary is in charge. It is looked at where it matters, and costs nothing where it does
/// not: whenever the primary grants without a number. A database that was itself promoted has
/// forgotten, and its resources go back to the primary as if they were handed back.
///
/// # Why it is safe
///
/// The first grant after each change of service has no number, and the database issues one above
/// all before. While the secondary is in charge the primary may still grant, to a process that has
/// not heard of it, but only numbers of an older epoch: the fence refuses them as a counter that
/// went back, that term is over, and the primary's next grant is without a number, which is where
/// the process learns who is in charge. So for one term two may believe that they hold the resource,
/// and only the newer one writes.
#[derive(Clone)]
pub struct FallbackLocks {
    primary: Arc<dyn LockService>,
    secondary: Arc<dyn LockService>,
    clock: Clock,
    patience: Duration,
    known: Arc<Mutex<Known>>,
}

/// What this process has seen so far. All of it can be forgotten: it would be learned again.
#[derive(Default)]
struct Known {
    /// The primary is not asked again before.
    primary_away_until: Option<Moment>,
    /// Resources that the secondary was in charge of when it was last asked.
    moved: HashSet<Resource>,
    /// Which service an owner has to do with, and when that can be forgotten at the latest.
    owners: HashMap<OwnerId, (Side, Moment)>,
    /// Releases under way of what was given up. Until they have ended, the same owner must not be
    /// granted anything there, which they would free.
    abandoned: HashSet<(OwnerId, Side)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Side {
    Primary,
    Secondary,
    /// It is being found out which.
    Either,
}

impl FallbackLocks {
    /// Asks `primary`, and `secondary` when that is away.
    pub fn new(primary: impl LockService, secondary: impl LockService) -> Self {
        Self {
            primary: Arc::new(primary),
            secondary: Arc::new(secondary),
            clock: Clock::boot(),
            patience: PATIENCE,
            known: Arc::default(),
        }
    }

    /// How long the primary may take to grant, and for how long it is not asked again after it
    /// failed: 1 s unless it is set. For short leases it is half the time to live.
    ///
    /// # Errors
    ///
    /// [`Invalid::Option`] below a millisecond.
    pub fn with_patience(mut self, patience: Duration) -> Result<Self, Invalid> {
        if patience < Duration::from_millis(1) {
            return Err(Invalid::Option { what: "patience", reason: "it is shorter than a millisecond" });
        }
        self.patience = patience;
        Ok(self)
    }

    /// Puts the primary in charge of a resource again; for whoever has seen to it that it works and
    /// that every process can reach it. The next grant is numbered anew.
    ///
    /// It takes the locks of both services for the purpose, so it is refused while one is held.
    /// A resource that was never with the secondary is left as it is, but for its number.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Held`]: somebody works under one of the two. Try again.
    /// - [`LeaseError::Unavailable`]: one of the two could not be asked; the secondary stays in charge.
    /// - [`LeaseError::Refused`]: one of the two cannot serve this resource.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future may or may not have handed back; locks that were taken end after 30 s.
    pub async fn hand_back(&self, resource: &Resource) -> Result<(), LeaseError> {
        let Self { primary, secondary, .. } = self;
        let owner = OwnerId::random();
        let ttl = Ttl::try_from(HAND_BACK)?;
        let request = Request::new(resource.clone(), owner, ttl, Origin::here("handing back"));
        let outcome = async {
            for service in [secondary, primary] {
                if let Attempt::Held { remaining } = service.acquire(&request).await? {
                    return Err(LeaseError::Held { resource: resource.clone(), remaining });
                }
            }
            // The secondary last: until then it is in charge.
            for service in [primary, secondary] {
                if service.disown(resource, owner).await? == Standing::NotOurs {
                    return Err(LeaseError::Held { resource: resource.clone(), remaining: None });
                }
            }
            Ok(())
        };
        let outcome = outcome.await;
        if outcome.is_err() {
            for side in [Side::Primary, Side::Secondary] {
                self.abandon(side, &request, None);
            }
        }
        outcome
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the service of an owner do one step.
    async fn step<'a>(
        &'a self,
        owner: OwnerId,
        step: impl Fn(&'a dyn LockService) -> BoxFuture<'a, Result<Standing, LeaseError>>,
    ) -> Result<(Standing, Side), LeaseError> {
        let side = self.known().owners.get(&owner).map(|(side, _)| *side);
        match side {
            Some(Side::Primary) => Ok((step(&*self.primary).await?, Side::Primary)),
            Some(Side::Secondary) => Ok((step(&*self.secondary).await?, Side::Secondary)),
            // One that this process has not heard of, or is asking for at this very moment.
            side => {
                if step(&*self.secondary).await? == Standing::Ours {
                    return Ok((Standing::Ours, Side::Secondary));
                }
                match step(&*self.primary).await {
                    // While it is away, the secondary is in charge.
                    Err(LeaseError::Unavailable(_)) if side.is_none() => {
                        Ok((Standing::NotOurs, Side::Secondary))
                    }
                    answer => Ok((answer?, Side::Primary)),
                }
            }
        }
    }

    fn remember(&self, owner: OwnerId, side: Side, ttl: Ttl) {
        let now = self.clock.now();
        let mut known = self.known();
        // Those of the past; looked for each time there are twice as many.
        if !known.owners.contains_key(&owner) && known.owners.len().is_power_of_two() {
            known.owners.retain(|_, (_, end)| now < *end);
        }
        known.owners.insert(owner, (side, now.plus(ttl.get()).plus(ABANDONED_LIMIT)));
    }

    /// Frees in the background what a service may have granted, after its answer if that is still
    /// under way: a release that overtook it would find nothing.
    fn abandon(
        &self,
        side: Side,
        request: &Request,
        asking: Option<BoxFuture<'static, Result<Attempt, LeaseError>>>,
    ) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (locks, request) = (self.clone(), request.clone());
        self.known().abandoned.insert((request.owner, side));
        runtime.spawn(async move {
            if let Some(asking) = asking {
                let _ = tokio::time::timeout(ABANDONED_LIMIT, asking).await;
            }
            let service = if side == Side::Primary { &locks.primary } else { &locks.secondary };
            let end = locks.clock.now().plus(request.ttl.get().min(ABANDONED_LIMIT));
            // Where that fails, the time to live does it.
            let _ = release_until(&**service, &request.resource, request.owner, &locks.clock, end).await;
            locks.known().abandoned.remove(&(request.owner, side));
        });
    }

    async fn take(&self, request: &Request) -> Result<Attempt, LeaseError> {
        let resource = &request.resource;
        let (owner, moved, away) = {
            let known = self.known();
            let away = known.primary_away_until.is_some_and(|until| self.clock.now() < until)
                || known.abandoned.contains(&(request.owner, Side::Primary));
            (known.owners.get(&request.owner).map(|(side, _)| *side), known.moved.contains(resource), away)
        };
        // Asked again after a lost answer, it has to be the same service.
        match owner {
            Some(Side::Secondary) => return self.ask_secondary(request).await,
            Some(_) => return self.ask_primary(request).await,
            None => {}
        }
        if moved {
            let attempt = self.ask_secondary(request).await?;
            if !matches!(attempt, Attempt::Unnumbered { .. }) || away {
                return Ok(attempt);
            }
            // It has forgotten: the resource was handed back, or was never seen to have moved.
            self.give_back(request).await?;
            self.known().moved.remove(resource);
        }
        if !away {
            match self.ask_primary(request).await {
                Err(LeaseError::Unavailable(error)) => {
                    tracing::warn!(%resource, %error, "the primary lock service is away: falling back");
                    let until = self.clock.now().plus(self.patience);
                    self.known().primary_away_until = Some(until);
                }
                answer => return answer,
            }
        }
        self.ask_secondary(request).await
    }

    async fn ask_primary(&self, request: &Request) -> Result<Attempt, LeaseError> {
        let limit = self.patience.min(request.ttl.get() / 2);
        self.remember(request.owner, Side::Primary, request.ttl);
        let (service, asked) = (self.primary.clone(), request.clone());
        let mut asking: BoxFuture<'static, _> = Box::pin(async move { service.acquire(&asked).await });
        let answer = tokio::time::timeout(limit, &mut asking).await;
        let (answer, asking) = match answer {
            Ok(answer) => (answer, None),
            Err(elapsed) => (Err(LeaseError::Unavailable(elapsed.into())), Some(asking)),
        };
        match answer {
            Ok(Attempt::Unnumbered { counter }) => self.ask_who_is_in_charge(request, counter).await,
            Err(error @ LeaseError::Unavailable(_)) => {
                self.known().owners.remove(&request.owner);
                self.abandon(Side::Primary, request, asking);
                Err(error)
            }
            answer => {
                if !matches!(answer, Ok(Attempt::Granted(_))) {
                    self.known().owners.remove(&request.owner);
                }
                answer
            }
        }
    }

    /// The primary has forgotten, or never knew. The secondary knows whether it is in charge.
    async fn ask_who_is_in_charge(
        &self,
        request: &Request,
        counter: Option<FencingToken>,
    ) -> Result<Attempt, LeaseError> {
        self.remember(request.owner, Side::Either, request.ttl);
        let attempt = match self.secondary.acquire(request).await {
            Ok(Attempt::Unnumbered { .. }) => {
                self.give_back(request).await?;
                self.remember(request.owner, Side::Primary, request.ttl);
                return Ok(Attempt::Unnumbered { counter });
            }
            attempt => attempt,
        };
        self.known().owners.remove(&request.owner);
        self.abandon(Side::Primary, request, None);
        match &attempt {
            Ok(Attempt::Granted(_)) => {
                self.remember(request.owner, Side::Secondary, request.ttl);
                self.known().moved.insert(request.resource.clone());
            }
            // Whoever holds it is in charge, or is just finding out.
            Ok(_) => {}
            Err(_) => self.abandon(Side::Secondary, request, None),
        }
        attempt
    }

    async fn ask_secondary(&self, request: &Request) -> Result<Attempt, LeaseError> {
        if self.known().abandoned.contains(&(request.owner, Side::Secondary)) {
            return Err(LeaseError::Unavailable("what was given up is still being freed".into()));
        }
        self.remember(request.owner, Side::Secondary, request.ttl);
        let answer = self.secondary.acquire(request).await;
        if let Ok(Attempt::Granted(_)) = &answer {
            self.known().moved.insert(request.resource.clone());
        }
        if let Ok(Attempt::Held { .. }) = &answer {
            self.known().owners.remove(&request.owner);
        }
        answer
    }

    /// Frees the secondary's lock at once, since others may need it to see who is in charge.
    async fn give_back(&self, request: &Request) -> Result<(), LeaseError> {
        let released = self.secondary.release(&request.resource, request.owner).await;
        if released.is_err() {
            self.abandon(Side::Secondary, request, None);
            self.abandon(Side::Primary, request, None);
            self.known().owners.remove(&request.owner);
        }
        released.map(drop)
    }
}

impl LockService for FallbackLocks {
    fn acquire<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Attempt, LeaseError>> {
        Box::pin(self.take(request))
    }

    fn seed<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        token: FencingToken,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(async move {
            let (standing, side) = self.step(owner, |service| service.seed(resource, owner, token)).await?;
            if (standing, side) == (Standing::Ours, Side::Secondary) {
                self.known().moved.insert(resource.clone());
            }
            Ok(standing)
        })
    }

    fn renew<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        ttl: Ttl,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(async move {
            let (standing, side) = self.step(owner, |service| service.renew(resource, owner, ttl)).await?;
            if standing == Standing::Ours {
                self.remember(owner, side, ttl);
            }
            Ok(standing)
        })
    }

    fn release<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(async move {
            // Its service is remembered for a while: a release may be asked for again.
            self.step(owner, |service| service.release(resource, owner)).await.map(|(standing, _)| standing)
        })
    }

    fn disown<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(async move {
            self.step(owner, |service| service.disown(resource, owner)).await.map(|(standing, _)| standing)
        })
    }

    fn needs_fence(&self) -> bool {
        true
    }

    fn holder<'a>(&'a self, resource: &'a Resource) -> BoxFuture<'a, Result<Option<Holder>, LeaseError>> {
        Box::pin(async move {
            // Whoever works under the secondary is the newer one.
            if let Some(holder) = self.secondary.holder(resource).await? {
                return Ok(Some(holder));
            }
            match self.primary.holder(resource).await {
                // While it is away, the secondary is in charge.
                Err(LeaseError::Unavailable(_)) => Ok(None),
                answer => answer,
            }
        })
    }
}

impl fmt::Debug for FallbackLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FallbackLocks").field("patience", &self.patience).finish_non_exhaustive()
    }
}
