//! The task that renews a lease, announces its loss, and frees it at the end.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::error::{LeaseError, Lost};
use super::service::{LockService, Request, Standing};
use super::ttl::Ttl;
use crate::clock::{Clock, Moment};
use crate::grant::Grant;
use crate::owner::OwnerId;
use crate::resource::Resource;
use crate::token::FencingToken;

/// The shortest pause between two requests that failed.
const RETRY_PAUSE: Duration = Duration::from_millis(5);

/// The first pause between two attempts to free a lock; it doubles up to [`LONGEST_RELEASE_PAUSE`].
const RELEASE_PAUSE: Duration = Duration::from_millis(50);
/// A long lease whose service is away must not keep asking many times a second.
const LONGEST_RELEASE_PAUSE: Duration = Duration::from_secs(1);

/// How long a release of a lease that has run out may take: the answer is known, but the server may
/// still hold the lock for as long as the drift allowance.
const LATE_RELEASE: Duration = Duration::from_secs(1);

/// What a lease and its keep-alive share: one term, from its grant to its loss.
pub(super) struct Term {
    pub(super) resource: Resource,
    pub(super) owner: OwnerId,
    pub(super) token: FencingToken,
    pub(super) service: Arc<dyn LockService>,
    pub(super) clock: Clock,
    deadline: Mutex<Moment>,
    over: CancellationToken,
    reason: OnceLock<Lost>,
}

impl Term {
    pub(super) fn new(
        request: &Request,
        token: FencingToken,
        deadline: Moment,
        service: Arc<dyn LockService>,
        clock: Clock,
    ) -> Self {
        Self {
            resource: request.resource.clone(),
            owner: request.owner,
            token,
            service,
            clock,
            deadline: Mutex::new(deadline),
            over: CancellationToken::new(),
            reason: OnceLock::new(),
        }
    }

    pub(super) fn deadline(&self) -> Moment {
        *self.deadline.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn extend(&self, deadline: Moment) {
        *self.deadline.lock().unwrap_or_else(PoisonError::into_inner) = deadline;
    }

    pub(super) fn grant(&self) -> Grant {
        Grant::until(self.resource.clone(), self.token, self.owner, self.deadline(), self.clock.clone())
    }

    pub(super) fn cancellation(&self) -> &CancellationToken {
        &self.over
    }

    /// Why the term is over, if it is. The clock decides before anybody has announced it.
    pub(super) fn lost(&self) -> Option<Lost> {
        self.reason.get().copied().or_else(|| (self.clock.now() >= self.deadline()).then_some(Lost::Expired))
    }

    /// Ends the term; the first reason stays.
    pub(super) fn lose(&self, reason: Lost) {
        if self.reason.set(reason).is_ok() {
            tracing::warn!(resource = %self.resource, token = %self.token, owner = %self.owner, %reason, "lease lost");
        }
        self.over.cancel();
    }

    fn error(&self, reason: Lost) -> LeaseError {
        LeaseError::Lost { resource: self.resource.clone(), reason }
    }
}

/// How a lease asks its keep-alive to free it: with a channel for the answer.
pub(super) type ReleaseRequest = oneshot::Sender<Result<(), LeaseError>>;

/// Serves one term until it is released, dropped or lost.
///
/// `release` closing without a request means that the lease was dropped.
pub(super) async fn serve(
    term: Arc<Term>,
    ttl: Ttl,
    keep_alive: bool,
    mut release: oneshot::Receiver<ReleaseRequest>,
) {
    let over = term.over.clone();
    let asked = tokio::select! {
        biased;
        asked = &mut release => Some(asked.ok()),
        () = over.cancelled() => None,
        reason = watch(&term, ttl, keep_alive) => {
            term.lose(reason);
            None
        }
    };
    let answer_to = match asked {
        Some(answer_to) => answer_to,
        // Lost, but still in the holder's hands: it may yet ask for the release.
        None => release.await.ok(),
    };
    let outcome = free(&term).await;
    if let Some(answer_to) = answer_to {
        // A release that was dropped does not want the answer; the lock is freed all the same.
        let _ = answer_to.send(outcome);
    }
}

/// Renews until the term cannot be kept; returns why.
async fn watch(term: &Term, ttl: Ttl, keep_alive: bool) -> Lost {
    let interval = ttl.get() / 3;
    let mut renew_at = term.deadline();
    if keep_alive {
        renew_at = term.clock.now().plus(interval).min(renew_at);
    }
    loop {
        term.clock.sleep_until(renew_at).await;
        let deadline = term.deadline();
        let sent = term.clock.now();
        if sent >= deadline {
            return Lost::Expired;
        }
        let answer = tokio::select! {
            biased;
            answer = term.service.renew(&term.resource, term.owner, ttl) => answer,
            // A renewal that hangs must neither hide the loss nor keep the next one from being sent.
            () = term.clock.sleep_until(sent.plus(interval.max(RETRY_PAUSE)).min(deadline)) => continue,
        };
        match answer {
            Ok(Standing::Ours) => {
                // By the clock the term may have ended while the answer was under way, and others
                // may have been told so: it stays over.
                if term.clock.now() >= deadline {
                    return Lost::Expired;
                }
                term.extend(sent.plus(ttl.get().saturating_sub(ttl.drift())));
                renew_at = sent.plus(interval);
            }
            Ok(Standing::NotOurs) => return Lost::Taken,
            Err(error) => {
                tracing::debug!(resource = %term.resource, %error, "lease renewal failed, trying again");
                renew_at = term.clock.now().plus((interval / 4).max(RETRY_PAUSE)).min(deadline);
            }
        }
    }
}

/// Frees the lock of a term that is over.
async fn free(term: &Term) -> Result<(), LeaseError> {
    let end = term.deadline().max(term.clock.now().plus(LATE_RELEASE));
    match release_until(&*term.service, &term.resource, term.owner, &term.clock, end).await {
        // What the service confirms it held until now was not lost, whatever the clock says.
        Ok(Freed::Now) => {}
        // Until the deadline nobody else can have had it.
        Ok(Freed::Perhaps) if term.lost().is_none() => {}
        Ok(Freed::Perhaps | Freed::NotHeld) => {
            term.lose(Lost::Taken);
            return Err(term.error(term.reason.get().copied().unwrap_or(Lost::Taken)));
        }
        Err(error) => {
            if let Some(reason) = term.lost() {
                term.lose(reason);
            }
            return Err(error);
        }
    }
    tracing::debug!(resource = %term.resource, token = %term.token, "lease released");
    Ok(())
}

/// What came of a release.
pub(super) enum Freed {
    /// The lock was the owner's.
    Now,
    /// It is not the owner's any more, but the answer to an earlier attempt was lost: that may
    /// have freed it.
    Perhaps,
    /// It was not the owner's.
    NotHeld,
}

/// Asks the service to free a lock until it answers, or until `end`.
pub(super) async fn release_until(
    service: &dyn LockService,
    resource: &Resource,
    owner: OwnerId,
    clock: &Clock,
    end: Moment,
) -> Result<Freed, LeaseError> {
    let mut pause = RELEASE_PAUSE;
    let mut doubtful = false;
    loop {
        let released = tokio::select! {
            biased;
            released = service.release(resource, owner) => released,
            () = clock.sleep_until(end) => return Err(LeaseError::Unavailable("it did not answer".into())),
        };
        match released {
            Ok(Standing::Ours) => return Ok(Freed::Now),
            Ok(Standing::NotOurs) if doubtful => return Ok(Freed::Perhaps),
            Ok(Standing::NotOurs) => return Ok(Freed::NotHeld),
            Err(LeaseError::Unavailable(error)) if clock.now() < end => {
                tracing::debug!(%resource, %error, "lease release failed, trying again");
                doubtful = true;
                clock.sleep_until(clock.now().plus(pause).min(end)).await;
                pause = (pause * 2).min(LONGEST_RELEASE_PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::far::Far;
    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn loss_is_announced_at_the_deadline_while_a_renewal_hangs() {
        let far = Far::losing(0);
        far.acquire.add_permits(1);
        let leases = far.leases();
        let lease = leases.acquire("a", TTL).await.unwrap();
        let lost = tokio::spawn(lease.lost());
        // Up to the last millisecond it is not lost, however the renewals hang.
        let left = lease.remaining() - Duration::from_millis(1);
        for _ in 0..10 {
            far.hand.advance(left / 10);
            settle().await;
        }
        assert!(!lost.is_finished() && !lease.cancellation().is_cancelled());

        far.hand.advance(Duration::from_millis(1));
        assert_eq!(lease.remaining(), Duration::ZERO);
        assert_eq!(lost.await.unwrap(), Lost::Expired);
    }

    #[tokio::test]
    async fn a_renewal_that_is_confirmed_after_the_deadline_comes_too_late() {
        let far = Far::losing(0);
        far.acquire.add_permits(1);
        let lease = far.leases().acquire("a", TTL).await.unwrap();
        far.hand.advance(TTL / 2);
        settle().await;
        // The service still had it when it renewed; by the holder's own clock the term was over.
        far.renew.add_permits(10);
        far.hand.advance(lease.remaining());
        assert_eq!(lease.lost().await, Lost::Expired);
        settle().await;
        assert_eq!(lease.remaining(), Duration::ZERO);
    }

    #[tokio::test]
    async fn a_renewal_that_hangs_does_not_keep_the_next_one_from_being_sent() {
        let far = Far::losing(0);
        far.acquire.add_permits(1);
        let lease = far.leases().acquire("a", TTL).await.unwrap();
        settle().await;
        // Due, and hanging until it is given up.
        far.hand.advance(TTL / 3);
        settle().await;
        far.hand.advance(TTL / 3);
        settle().await;
        far.renew.add_permits(1);
        settle().await;
        assert!(lease.remaining() > TTL * 2 / 3, "{:?}", lease.remaining());
        drop(lease);
    }

    /// Lets every task of this thread get as far as it can.
    async fn settle() {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }
}
