//! A lock service inside this process, for unit tests.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use futures_util::future::BoxFuture;

use super::error::LeaseError;
use super::service::{Attempt, Holder, LockService, Origin, Request, Standing};
use super::ttl::Ttl;
use crate::clock::{Clock, Moment};
use crate::owner::OwnerId;
use crate::resource::Resource;
use crate::token::FencingToken;

/// Keeps locks and counters in this process's memory; clones share them.
///
/// It follows every law of [`LockService`] for the tasks of one process, and forgets with it. Give
/// it a [`ManualClock`](crate::clock::ManualClock)'s clock, and the same to
/// [`Leases::with_clock`](super::Leases::with_clock), to let leases run out without sleeping.
///
/// # Examples
///
/// ```
/// use fencerow::clock::ManualClock;
/// use fencerow::lease::{Leases, MemoryLocks};
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let hand = ManualClock::new();
/// let leases = Leases::without_fence(MemoryLocks::with_clock(hand.clock())).with_clock(hand.clock());
/// let slow = leases.acquire("report", Duration::from_secs(10)).without_keep_alive().await?;
/// hand.advance(Duration::from_secs(11));
/// let next = leases.acquire("report", Duration::from_secs(10)).await?;
/// assert!(next.token() > slow.token());
/// assert!(slow.release().await.is_err());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
pub struct MemoryLocks {
    slots: Arc<Mutex<HashMap<Resource, Slot>>>,
    clock: Clock,
}

#[derive(Debug, Default)]
struct Slot {
    counter: Option<FencingToken>,
    forgotten: bool,
    lock: Option<Lock>,
}

#[derive(Debug)]
struct Lock {
    owner: OwnerId,
    token: Option<FencingToken>,
    ends: Moment,
    since: SystemTime,
    origin: Origin,
}

impl Slot {
    fn is_held_by(&self, owner: OwnerId, now: Moment) -> bool {
        self.lock.as_ref().is_some_and(|lock| lock.owner == owner && now < lock.ends)
    }
}

impl MemoryLocks {
    /// Makes an empty service, judged by the system's clock.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes an empty service, judged by `clock`.
    #[must_use]
    pub fn with_clock(clock: Clock) -> Self {
        Self { slots: Arc::default(), clock }
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<Resource, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one atomic step of `owner` on its lock, if it has it.
    fn step(&self, resource: &Resource, owner: OwnerId, step: impl FnOnce(&mut Slot, Moment)) -> Standing {
        let now = self.clock.now();
        let mut slots = self.slots();
        let held = slots.get_mut(resource).filter(|slot| slot.is_held_by(owner, now));
        held.map_or(Standing::NotOurs, |slot| {
            step(slot, now);
            Standing::Ours
        })
    }

    fn take(&self, request: &Request) -> Result<Attempt, LeaseError> {
        let now = self.clock.now();
        let mut slots = self.slots();
        let slot = slots.entry(request.resource.clone()).or_default();
        let ends = now.plus(request.ttl.get());
        let counter = slot.counter;
        if let Some(lock) = slot.lock.as_mut().filter(|lock| now < lock.ends) {
            if lock.owner != request.owner {
                return Ok(Attempt::Held { remaining: Some(lock.ends.since(now)) });
            }
            lock.ends = ends;
            return Ok(lock.token.map_or(Attempt::Unnumbered { counter }, Attempt::Granted));
        }
        let token = match counter.filter(|_| !slot.forgotten) {
            None => None,
            Some(counter) => {
                Some(counter.get().checked_add(1).and_then(|next| FencingToken::new(next).ok()).ok_or_else(
                    || LeaseError::Refused {
                        resource: request.resource.clone(),
                        source: "the token counter is at its end".into(),
                    },
                )?)
            }
        };
        slot.counter = token.or(counter);
        slot.lock = Some(Lock {
            owner: request.owner,
            token,
            ends,
            since: SystemTime::now(),
            origin: request.origin.clone(),
        });
        Ok(token.map_or(Attempt::Unnumbered { counter }, Attempt::Granted))
    }
}

impl LockService for MemoryLocks {
    fn acquire<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Attempt, LeaseError>> {
        Box::pin(async move { self.take(request) })
    }

    fn seed<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        token: FencingToken,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(async move {
            Ok(self.step(resource, owner, |slot, _| {
                slot.counter = slot.counter.max(Some(token));
                slot.forgotten = false;
                if let Some(lock) = &mut slot.lock {
                    lock.token = Some(token);
                }
            }))
        })
    }

    fn renew<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        ttl: Ttl,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(async move {
            Ok(self.step(resource, owner, |slot, now| {
                if let Some(lock) = &mut slot.lock {
                    lock.ends = now.plus(ttl.get());
                }
            }))
        })
    }

    fn release<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(async move { Ok(self.step(resource, owner, |slot, _| slot.lock = None)) })
    }

    fn disown<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(async move {
            Ok(self.step(resource, owner, |slot, _| {
                slot.lock = None;
                slot.forgotten = true;
            }))
        })
    }

    fn holder<'a>(&'a self, resource: &'a Resource) -> BoxFuture<'a, Result<Option<Holder>, LeaseError>> {
        Box::pin(async move {
            let now = self.clock.now();
            let slots = self.slots();
            let lock = slots.get(resource).and_then(|slot| slot.lock.as_ref()).filter(|lock| now < lock.ends);
            Ok(lock.map(|lock| {
                let remaining = Some(lock.ends.since(now));
                Holder::new(lock.owner, lock.token, lock.since, remaining, lock.origin.clone())
            }))
        })
    }
}
