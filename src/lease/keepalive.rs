//! The task that renews a lease, announces its loss, and frees it at the end.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::error::{LeaseError, Lost};
use super::service::{LockService, Request, Standing};
use super::tenure::{Due, Tenure};
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
    tenure: Tenure,
    /// When it is over whatever is renewed.
    end: Option<Moment>,
    due: Mutex<Due>,
    over: CancellationToken,
    reason: OnceLock<Lost>,
}

impl Term {
    pub(super) fn new(
        request: &Request,
        token: FencingToken,
        tenure: Tenure,
        sent: Moment,
        service: Arc<dyn LockService>,
        clock: Clock,
    ) -> Self {
        let end = tenure.end(sent);
        Self {
            resource: request.resource.clone(),
            owner: request.owner,
            token,
            service,
            clock,
            tenure,
            end,
            due: Mutex::new(tenure.due(sent, end)),
            over: CancellationToken::new(),
            reason: OnceLock::new(),
        }
    }

    pub(super) fn deadline(&self) -> Moment {
        self.due().deadline
    }

    fn due(&self) -> Due {
        *self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A renewal of `sent` was confirmed.
    fn extend(&self, sent: Moment) {
        *self.due.lock().unwrap_or_else(PoisonError::into_inner) = self.tenure.due(sent, self.end);
    }

    pub(super) fn grant(&self) -> Grant {
        Grant::until(self.resource.clone(), self.token, self.owner, self.deadline(), self.clock.clone())
    }

    pub(super) fn cancellation(&self) -> &CancellationToken {
        &self.over
    }

    /// Why the term is over, if it is. The clock decides before anybody has announced it.
    pub(super) fn lost(&self) -> Option<Lost> {
        let due = self.due();
        self.reason.get().copied().or_else(|| (self.clock.now() >= due.deadline).then_some(due.reason))
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
pub(super) async fn serve(term: Arc<Term>, mut release: oneshot::Receiver<ReleaseRequest>) {
    let over = term.over.clone();
    let asked = tokio::select! {
        biased;
        asked = &mut release => Some(asked.ok()),
        () = over.cancelled() => None,
        reason = watch(&term) => {
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
async fn watch(term: &Term) -> Lost {
    let interval = term.tenure.interval();
    let mut renew_at = next_renewal(term, term.clock.now());
    loop {
        term.clock.sleep_until(renew_at).await;
        let due = term.due();
        let sent = term.clock.now();
        let late = sent.since(renew_at);
        if late > interval / 2 {
            // The work is not hindered by that, and would not notice; its lease is running out.
            tracing::warn!(
                resource = %term.resource, token = %term.token, ?late,
                "the keep-alive ran late: the runtime is blocked or starved, or the machine slept",
            );
        }
        if sent >= due.deadline {
            return due.reason;
        }
        let ttl = term.tenure.asked(sent, term.end);
        let answer = tokio::select! {
            biased;
            answer = term.service.renew(&term.resource, term.owner, ttl) => answer,
            // A renewal that hangs must neither hide the loss nor keep the next one from being sent.
            () = term.clock.sleep_until(sent.plus(interval.max(RETRY_PAUSE)).min(due.deadline)) => {
                renew_at = term.clock.now();
                continue;
            }
        };
        match answer {
            Ok(Standing::Ours) => {
                // By the clock the term may have ended while the answer was under way, and others
                // may have been told so: it stays over.
                if term.clock.now() >= due.deadline {
                    return due.reason;
                }
                term.extend(sent);
                renew_at = next_renewal(term, sent);
            }
            Ok(Standing::NotOurs) => return Lost::Taken,
            Err(error) => {
                tracing::debug!(resource = %term.resource, %error, "lease renewal failed, trying again");
                renew_at = term.clock.now().plus((interval / 4).max(RETRY_PAUSE)).min(due.deadline);
            }
        }
    }
}

/// When to renew after a request of `sent`: not at all where that would not make the term last longer.
fn next_renewal(term: &Term, sent: Moment) -> Moment {
    let due = term.due();
    if !term.tenure.is_renewed() || due.reason == Lost::HeldTooLong {
        return due.deadline;
    }
    sent.plus(term.tenure.interval()).min(due.deadline)
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

    #[tokio::test]
    async fn a_keep_alive_that_ran_late_says_so() {
        let warnings = Warnings::default();
        let _heard = tracing::subscriber::set_default(warnings.clone());
        let far = Far::losing(0);
        far.acquire.add_permits(1);
        far.renew.add_permits(10);
        let lease = far.leases().acquire("a", TTL).await.unwrap();
        settle().await;
        far.hand.advance(TTL / 3);
        settle().await;
        assert_eq!(warnings.count(), 0);
        // The work kept the thread to itself until well after the next renewal was due.
        far.hand.advance(TTL * 2 / 3);
        settle().await;
        assert_eq!(warnings.count(), 1);
        assert!(lease.remaining() > TTL * 2 / 3, "it was in time all the same");
    }

    #[tokio::test]
    async fn one_stuck_renewal_delays_no_other_leases() {
        let far = Far::losing(0);
        far.acquire.add_permits(2);
        let leases = far.leases();
        let stuck = leases.acquire("stuck", TTL).await.unwrap();
        settle().await;
        far.hand.advance(TTL / 3);
        settle().await;
        // Its renewal hangs from now on; that of the other comes later, and is let through.
        let other = leases.acquire("other", TTL).await.unwrap();
        let resource = other.resource().clone();
        far.only.lock().unwrap().replace(resource);
        far.renew.add_permits(10);
        settle().await;
        for _ in 0..6 {
            far.hand.advance(TTL / 3);
            settle().await;
        }
        assert_eq!(stuck.lost().await, Lost::Expired);
        assert!(other.remaining() > TTL / 2, "{:?}", other.remaining());
    }

    /// Counts warnings.
    #[derive(Clone, Default)]
    struct Warnings(Arc<std::sync::atomic::AtomicUsize>);

    impl Warnings {
        fn count(&self) -> usize {
            self.0.load(std::sync::atomic::Ordering::SeqCst)
        }
    }

    impl tracing::Subscriber for Warnings {
        fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
            *metadata.level() == tracing::Level::WARN
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }

    /// Lets every task of this thread get as far as it can.
    async fn settle() {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }
}
