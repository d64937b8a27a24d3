//! One acquisition, from its first request to its lease.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::acquire::Leases;
use super::error::{LeaseError, Lost};
use super::guard::Lease;
use super::keepalive::{Term, release_until};
use super::service::{Attempt, LockService, Request, Standing};
use super::tenure::Tenure;
use crate::clock::Clock;
use crate::renumber::Renumber;
use crate::token::FencingToken;

/// How long one request may take. A service that has not answered by then is asked again: the
/// same owner gets the same grant.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);
/// How long a service is asked to free what was abandoned; afterwards the time to live does.
const ABANDONED_LIMIT: Duration = Duration::from_secs(10);

/// The requests of one owner, who has no lease yet.
///
/// Dropped while the lock may be the owner's, it frees the lock in the background. There is one
/// for all attempts of an owner: a release left over from an earlier attempt would free what a
/// later one was granted.
pub(super) struct Acquisition {
    service: Arc<dyn LockService>,
    renumber: Arc<dyn Renumber>,
    clock: Clock,
    request: Arc<Request>,
    tenure: Tenure,
    /// The latest request, while it is under way. It is kept to be seen to its end: a release that
    /// overtakes it, on another connection, would find nothing to free.
    asking: Option<BoxFuture<'static, Result<Attempt, LeaseError>>>,
    /// From the first request until an answer says otherwise.
    may_hold: bool,
}

impl Acquisition {
    pub(super) fn new(leases: &Leases, request: Request, tenure: Tenure) -> Self {
        Self {
            service: leases.service.clone(),
            renumber: leases.renumber.clone(),
            clock: leases.clock.clone(),
            request: Arc::new(request),
            tenure,
            asking: None,
            may_hold: false,
        }
    }

    /// One attempt: a lease, or how long another still has it.
    pub(super) async fn attempt(&mut self) -> Result<Result<Lease, Option<Duration>>, LeaseError> {
        let mut sent = self.clock.now();
        let mut answer = self.ask().await;
        if matches!(answer, Err(LeaseError::Unavailable(_))) {
            // The answer may have been lost after the lock was granted; the owner is recognised.
            sent = self.clock.now();
            answer = self.ask().await;
        }
        let deadline = self.tenure.due(sent, self.tenure.end(sent)).deadline;
        let within = deadline.since(self.clock.now());
        let token = match answer? {
            Attempt::Held { remaining } => return Ok(Err(remaining)),
            Attempt::Granted(token) => token,
            // The deadline is looked at first: a process that was paused here must not number, since
            // that would fence out whoever holds the lock by now.
            Attempt::Unnumbered { counter } => tokio::select! {
                biased;
                () = self.clock.sleep_until(deadline) => return Err(lost(&self.request, Lost::Expired)),
                token = number(&self.request, counter, within, &*self.renumber, &*self.service) => token?,
            },
        };
        if self.clock.now() >= deadline {
            return Err(lost(&self.request, Lost::Expired));
        }
        let term =
            Term::new(&self.request, token, self.tenure, sent, self.service.clone(), self.clock.clone());
        // From here on the lease sees to the release.
        self.may_hold = false;
        tracing::debug!(
            resource = %self.request.resource, %token, owner = %self.request.owner, "lease acquired",
        );
        Ok(Ok(Lease::start(term)))
    }

    async fn ask(&mut self) -> Result<Attempt, LeaseError> {
        let (service, request) = (self.service.clone(), self.request.clone());
        // An answer that comes after the lock has run out would be of no use.
        let limit = request.ttl.get().min(REQUEST_LIMIT);
        self.may_hold = true;
        let asking = self.asking.insert(Box::pin(async move { service.acquire(&request).await }));
        let answer = match tokio::time::timeout(limit, asking).await {
            Ok(answer) => answer,
            Err(elapsed) => return Err(LeaseError::Unavailable(elapsed.into())),
        };
        self.asking = None;
        if let Ok(Attempt::Held { .. }) = answer {
            self.may_hold = false;
        }
        answer
    }
}

impl Drop for Acquisition {
    fn drop(&mut self) {
        if !self.may_hold {
            return;
        }
        // Without a runtime, as when it is shutting down, the time to live frees the lock.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let asking = self.asking.take();
        let (service, clock, request) = (self.service.clone(), self.clock.clone(), self.request.clone());
        runtime.spawn(async move {
            if let Some(asking) = asking {
                let _ = tokio::time::timeout(REQUEST_LIMIT, asking).await;
            }
            let Request { resource, owner, ttl, .. } = &*request;
            let end = clock.now().plus(ttl.get().min(ABANDONED_LIMIT));
            if let Err(error) = release_until(&*service, resource, *owner, &clock, end).await {
                tracing::debug!(%resource, %owner, %error, "an abandoned acquisition is left to its time to live");
            }
        });
    }
}

/// Has the database issue a token for a grant without one, and seeds the counter with it.
async fn number(
    request: &Request,
    counter: Option<FencingToken>,
    within: Duration,
    renumber: &dyn Renumber,
    service: &dyn LockService,
) -> Result<FencingToken, LeaseError> {
    let Request { resource, owner, .. } = request;
    let token = renumber
        .renumber(resource, *owner, counter, within)
        .await
        .map_err(|source| LeaseError::Renumber { resource: resource.clone(), source })?;
    tracing::info!(%resource, %token, "token counter is new or may have forgotten: renumbered");
    let mut seeded = service.seed(resource, *owner, token).await;
    if matches!(seeded, Err(LeaseError::Unavailable(_))) {
        // A lost answer again; seeding twice is seeding once.
        seeded = service.seed(resource, *owner, token).await;
    }
    match seeded? {
        Standing::Ours => Ok(token),
        Standing::NotOurs => Err(lost(request, Lost::Taken)),
    }
}

fn lost(request: &Request, reason: Lost) -> LeaseError {
    LeaseError::Lost { resource: request.resource.clone(), reason }
}

#[cfg(test)]
mod tests {
    use super::super::far::Far;
    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    #[tokio::test]
    async fn an_abandoned_request_that_arrives_late_is_released_after_it_has_arrived() {
        let far = Far::losing(0);
        far.release.add_permits(10);
        let leases = far.leases();
        let acquire = leases.acquire("a", LONG);
        assert!(tokio::time::timeout(Duration::from_millis(1), acquire).await.is_err());

        far.acquire.add_permits(1);
        while far.release.available_permits() == 10 {
            tokio::task::yield_now().await;
        }
        assert_eq!(leases.holder("a").await.unwrap(), None);
        assert_eq!(far.acquire.available_permits(), 0, "the request did arrive");
    }

    #[tokio::test]
    async fn what_was_granted_after_lost_answers_is_not_released_again() {
        let far = Far::losing(4);
        far.acquire.add_permits(10);
        far.release.add_permits(10);
        let leases = far.leases();
        let waiting = {
            let leases = leases.clone();
            tokio::spawn(async move { leases.acquire("a", LONG).wait(LONG).await })
        };
        while !waiting.is_finished() {
            far.hand.advance(Duration::from_millis(10));
            tokio::task::yield_now().await;
        }
        let lease = waiting.await.unwrap().unwrap();
        tokio::task::yield_now().await;
        assert_eq!(leases.holder("a").await.unwrap().map(|holder| holder.owner), Some(lease.owner()));
        assert_eq!(far.release.available_permits(), 10);
    }
}
