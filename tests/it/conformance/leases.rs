//! Leases made of the steps of a service: waiting, keeping alive, losing, freeing.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use fencerow::lease::{Acquire, Attempt, LeaseError, LockService as _, Lost, Standing};
use fencerow::{Credential as _, FencingToken, Group, Invalid, OwnerId, Renumber, RenumberError, Resource};
use futures_util::future::BoxFuture;

use super::services::Bench;
use super::{LONG, SHORT, finish, number, request, take};
use crate::support::{PATIENCE, eventually};

laws! { [memory Memory] [redis Redis] [cluster Cluster] [postgres Postgres] [sqlite Sqlite] [fallback Fallback] [fallen_back FallenBack] => {
    a_holder_whose_numbering_took_too_long_gets_nothing
    a_time_to_live_that_a_server_would_misread_is_refused_before_it_is_asked
    an_acquisition_dropped_at_any_await_leaves_nothing_behind
    a_release_dropped_at_any_await_goes_on
    a_dropped_lease_is_released
    a_waiter_gets_it_when_it_is_released
    a_waiter_gets_it_when_it_runs_out
    several_are_acquired_together_or_not_at_all
    callers_who_want_the_same_in_opposite_orders_do_not_block_each_other
    waiting_ends_with_timeout_and_trying_with_held
    a_wait_its_pauses_and_its_attempts_are_numbers_of_their_own
    the_keep_alive_keeps_a_lease_past_its_time_to_live
    without_keep_alive_a_lease_is_lost_at_its_deadline
    no_lease_is_held_for_longer_than_it_may_be
    a_lock_that_ran_out_stays_closed_for_its_grace_and_a_released_one_does_not
    a_lease_that_was_taken_away_is_lost_for_ever
    a_lease_refused_by_a_fence_that_knows_better_is_disowned
} }

/// Polls a future so many times, as it asks to be, and drops it; its output if it was done by then.
async fn poll_and_drop<F: Future>(future: F, times: u32) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = times;
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => {
            left -= 1;
            if left == 0 { Poll::Ready(None) } else { Poll::Pending }
        }
    })
    .await
}

/// Takes its time to number a grant.
struct SlowFence<B>(Arc<B>, Duration);

impl<B: Bench> Renumber for SlowFence<B> {
    fn renumber<'a>(
        &'a self,
        _: &'a Resource,
        _: OwnerId,
        _: Option<FencingToken>,
        _: Duration,
    ) -> BoxFuture<'a, Result<FencingToken, RenumberError>> {
        Box::pin(async {
            self.0.pass(self.1).await;
            Ok(FencingToken::FIRST)
        })
    }
}

async fn a_holder_whose_numbering_took_too_long_gets_nothing(bench: impl Bench) {
    let bench = Arc::new(bench);
    let ttl = SHORT * 25;
    let leases = bench.leases_numbered_by(SlowFence(bench.clone(), ttl * 2));
    let error = leases.acquire("a", ttl).await.unwrap_err();
    assert!(matches!(error, LeaseError::Lost { reason: Lost::Expired | Lost::Taken, .. }), "{error:?}");
    let unnumbered = Attempt::Unnumbered { counter: None };
    bench.pass(ttl).await;
    assert_eq!(bench.locks().acquire(&request("a", LONG)).await.unwrap(), unnumbered);
}

/// A25
async fn a_time_to_live_that_a_server_would_misread_is_refused_before_it_is_asked(bench: impl Bench) {
    let leases = bench.leases();
    for ttl in [Duration::ZERO, Duration::from_nanos(1), Duration::from_micros(999), Duration::MAX] {
        let error = leases.acquire("a", ttl).await.unwrap_err();
        assert!(matches!(error, LeaseError::Invalid(Invalid::Ttl(_))), "{error:?}");
        assert_eq!(error.group(), Group::Misuse);
    }
    assert!(matches!(leases.acquire(" ", LONG).await, Err(LeaseError::Invalid(Invalid::Resource { .. }))));
    let unnumbered = Attempt::Unnumbered { counter: None };
    assert_eq!(bench.locks().acquire(&request("a", LONG)).await.unwrap(), unnumbered);
}

async fn an_acquisition_dropped_at_any_await_leaves_nothing_behind(bench: impl Bench) {
    let leases = bench.leases();
    // A resource that was never seen is renumbered and seeded on the way, one that counts is not.
    for fresh in [true, false] {
        let mut times = 0;
        loop {
            times += 1;
            let name = if fresh { format!("fresh {times}") } else { "counting".to_owned() };
            let done = poll_and_drop(leases.acquire(&name, LONG).into_future(), times).await;
            let done = done.map(Result::unwrap);
            let ended = done.is_some();
            drop(done);
            let leases = leases.clone();
            let next = tokio::spawn(async move { leases.acquire(name, LONG).wait(PATIENCE).await });
            finish(&bench, next).await.unwrap().release().await.unwrap();
            if ended {
                break;
            }
        }
    }
}

/// A02
async fn a_release_dropped_at_any_await_goes_on(bench: impl Bench) {
    let leases = bench.leases();
    for times in 1.. {
        let lease = leases.acquire("a", LONG).await.unwrap();
        let done = poll_and_drop(lease.release(), times).await;
        let leases = leases.clone();
        let next = tokio::spawn(async move { leases.acquire("a", LONG).wait(PATIENCE).await });
        finish(&bench, next).await.unwrap().release().await.unwrap();
        if let Some(done) = done {
            done.unwrap();
            break;
        }
    }
}

async fn a_dropped_lease_is_released(bench: impl Bench) {
    let leases = bench.leases();
    let take = || {
        let leases = leases.clone();
        tokio::spawn(async move { leases.acquire("a", LONG).wait(PATIENCE).await })
    };
    drop(finish(&bench, take()).await.unwrap());
    let lease = finish(&bench, take()).await.unwrap();
    // The same for one whose task is aborted.
    let task = tokio::spawn(async move {
        let _lease = lease;
        std::future::pending::<()>().await;
    });
    tokio::task::yield_now().await;
    task.abort();
    finish(&bench, take()).await.unwrap().release().await.unwrap();
}

async fn a_waiter_gets_it_when_it_is_released(bench: impl Bench) {
    let leases = bench.leases();
    let holder = leases.acquire("a", LONG).await.unwrap();
    let token = holder.token();
    let wait = {
        let leases = leases.clone();
        tokio::spawn(async move { leases.acquire("a", LONG).wait(LONG).await })
    };
    bench.pass(Duration::from_millis(30)).await;
    assert!(!wait.is_finished());
    holder.release().await.unwrap();
    assert!(finish(&bench, wait).await.unwrap().token() > token);
}

async fn a_waiter_gets_it_when_it_runs_out(bench: impl Bench) {
    let leases = bench.leases();
    number(&bench.locks(), "a").await;
    let holder = request("a", SHORT * 2);
    let token = take(&bench.locks(), &holder).await.unwrap();
    let wait = tokio::spawn(async move { leases.acquire("a", LONG).wait(LONG).await });
    let lease = finish(&bench, wait).await.unwrap();
    assert!(lease.token() > token);
    // Counted from the attempt that won, not from the first one (A12).
    assert!(lease.remaining() > LONG / 2);
}

async fn several_are_acquired_together_or_not_at_all(bench: impl Bench) {
    let leases = bench.leases();
    let both = leases.acquire_many(["b", "a"], LONG).label("both").await.unwrap();
    let names: Vec<&str> = both.iter().map(|lease| lease.resource().as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    // `b` cannot be had, so `a2` is given back.
    let error = leases.acquire_many(["a2", "b", "c"], LONG).await.unwrap_err();
    assert!(matches!(error, LeaseError::Held { .. }), "{error:?}");
    for name in ["a2", "c"] {
        assert_eq!(leases.holder(name).await.unwrap(), None, "{name}");
    }
    let error = leases.acquire_many(["d", "e", "d"], LONG).await.unwrap_err();
    assert!(matches!(error, LeaseError::Invalid(Invalid::Option { .. })), "{error:?}");
    let error = leases.acquire_many(["d", " "], LONG).await.unwrap_err();
    assert!(matches!(error, LeaseError::Invalid(Invalid::Resource { .. })), "{error:?}");
    assert_eq!(leases.holder("d").await.unwrap(), None);
    assert!(leases.acquire_many([""; 0], LONG).await.unwrap().is_empty());
    for lease in both {
        lease.release().await.unwrap();
    }
}

async fn callers_who_want_the_same_in_opposite_orders_do_not_block_each_other(bench: impl Bench) {
    let leases = bench.leases();
    let callers = [["a", "b"], ["b", "a"]].map(|names| {
        let leases = leases.clone();
        tokio::spawn(async move {
            for _ in 0..5 {
                for lease in leases.acquire_many(names, LONG).wait(LONG).await.unwrap() {
                    lease.release().await.unwrap();
                }
            }
        })
    });
    for caller in callers {
        finish(&bench, caller).await;
    }
}

async fn waiting_ends_with_timeout_and_trying_with_held(bench: impl Bench) {
    let leases = bench.leases();
    let holder = leases.acquire("a", LONG).await.unwrap();
    // Longer than one answer takes on a slow machine.
    let limit = Duration::from_secs(2);
    let wait = {
        let leases = leases.clone();
        tokio::spawn(async move { leases.acquire("a", LONG).wait(limit).await })
    };
    match finish(&bench, wait).await.unwrap_err() {
        error @ LeaseError::Timeout { waited, .. } => {
            assert!(waited >= limit, "{waited:?}");
            assert!(error.is_contended());
        }
        other => panic!("{other:?}"),
    }
    match leases.acquire("a", LONG).await.unwrap_err() {
        error @ LeaseError::Held { remaining, .. } => {
            assert!(remaining <= Some(LONG) && remaining > Some(LONG / 2), "{remaining:?}");
            assert!(error.is_contended());
        }
        other => panic!("{other:?}"),
    }
    assert!(leases.try_acquire("a", LONG).await.unwrap().is_none());
    holder.release().await.unwrap();
}

/// A14
async fn a_wait_its_pauses_and_its_attempts_are_numbers_of_their_own(bench: impl Bench) {
    let leases = bench.leases();
    let holder = leases.acquire("a", LONG).await.unwrap();
    let spawn = |configure: fn(Acquire<'_>) -> Acquire<'_>, ttl: Duration| {
        let leases = leases.clone();
        tokio::spawn(async move { configure(leases.acquire("a", ttl)).await })
    };
    // A pause that is longer than the wait does not make it longer.
    let limited = spawn(|acquire| acquire.wait(SHORT * 5).retry_delay(LONG), LONG);
    let error = finish(&bench, limited).await.unwrap_err();
    // Where a first answer takes longer than that, nobody can tell who holds it.
    assert!(matches!(error, LeaseError::Timeout { .. } | LeaseError::Unavailable(_)), "{error:?}");
    // Nor do attempts that are left, nor a limit that is none.
    let once = spawn(|acquire| acquire.wait(Duration::ZERO).attempts(9), LONG);
    assert!(matches!(finish(&bench, once).await, Err(LeaseError::Held { .. })));
    let once = spawn(|acquire| acquire.wait(Duration::MAX).attempts(1), LONG);
    assert!(matches!(finish(&bench, once).await, Err(LeaseError::Held { .. })));
    let thrice = spawn(|acquire| acquire.attempts(3).retry_delay(SHORT / 4), LONG);
    assert!(matches!(finish(&bench, thrice).await, Err(LeaseError::Timeout { .. })));

    // Waited for longer than it is wanted for.
    let ttl = Duration::from_secs(3);
    let unlimited = spawn(|acquire| acquire.wait(Duration::MAX).retry_delay(SHORT), ttl);
    bench.pass(ttl).await;
    bench.pass(SHORT).await;
    assert!(!unlimited.is_finished());
    holder.release().await.unwrap();
    let lease = finish(&bench, unlimited).await.unwrap();
    assert!(lease.remaining() <= ttl);
    lease.release().await.unwrap();

    for nonsense in
        [leases.acquire("b", LONG).attempts(0), leases.acquire("b", LONG).retry_delay(Duration::ZERO)]
    {
        let error = nonsense.await.unwrap_err();
        assert!(matches!(error, LeaseError::Invalid(Invalid::Option { .. })), "{error:?}");
    }
}

async fn the_keep_alive_keeps_a_lease_past_its_time_to_live(bench: impl Bench) {
    let (leases, locks) = (bench.leases(), bench.locks());
    // A renewal every second, of which one may be late by two.
    let ttl = Duration::from_secs(3);
    let lease = leases.acquire("a", ttl).wait(LONG).await.unwrap();
    let token = lease.token();
    for _ in 0..6 {
        bench.pass(ttl / 4).await;
        let renewed = eventually("it is renewed", async || {
            bench.pass(Duration::from_millis(5)).await;
            let holder = locks.holder(lease.resource()).await.unwrap().expect("it ran out");
            (holder.remaining > Some(ttl / 2)).then_some(holder)
        });
        let holder = renewed.await;
        assert_eq!((holder.owner, holder.token), (lease.owner(), Some(token)));
    }
    assert!(!lease.cancellation().is_cancelled());
    assert!(lease.remaining() > Duration::ZERO);
    assert_eq!(lease.token(), token);
    lease.release().await.unwrap();
}

async fn without_keep_alive_a_lease_is_lost_at_its_deadline(bench: impl Bench) {
    let leases = bench.leases();
    number(&bench.locks(), "a").await;
    // On a slow machine it has run out before its answer is there, and is not handed out.
    let acquire = async || leases.acquire("a", SHORT).without_keep_alive().wait(SHORT).await.ok();
    let lease = eventually("it is acquired in time", acquire).await;
    let cancelled = lease.cancellation();
    bench.pass(SHORT * 2).await;
    assert_eq!(lease.lost().await, Lost::Expired);
    assert!(cancelled.is_cancelled());
    assert_eq!(lease.remaining(), Duration::ZERO);
    let next = leases.acquire("a", LONG).await.unwrap();
    assert!(next.token() > lease.token());
    let error = lease.release().await.unwrap_err();
    assert!(matches!(error, LeaseError::Lost { reason: Lost::Expired, .. }), "{error:?}");
    next.release().await.unwrap();
}

async fn no_lease_is_held_for_longer_than_it_may_be(bench: impl Bench) {
    let leases = bench.leases();
    // Where the first time to live is longer already, the lock ends with the hold.
    number(&bench.locks(), "a").await;
    let brief = leases.acquire("a", LONG).longest(SHORT * 5).await.unwrap();
    assert!(brief.remaining() <= SHORT * 5);
    let lost = tokio::spawn(brief.lost());
    let next = {
        let leases = leases.clone();
        tokio::spawn(async move { leases.acquire("a", LONG).wait(PATIENCE).await })
    };
    assert_eq!(finish(&bench, lost).await, Lost::HeldTooLong);
    finish(&bench, next).await.unwrap().release().await.unwrap();

    // Renewed once, and then no further than that.
    let ttl = Duration::from_millis(1500);
    let lease = leases.acquire("b", ttl).longest(ttl * 4 / 3).wait(LONG).await.unwrap();
    let lost = tokio::spawn(lease.lost());
    assert_eq!(finish(&bench, lost).await, Lost::HeldTooLong);
    for hold in [Duration::ZERO, Duration::from_micros(999)] {
        let error = leases.acquire("c", ttl).longest(hold).await.unwrap_err();
        assert!(matches!(error, LeaseError::Invalid(Invalid::Option { .. })), "{error:?}");
    }
}

async fn a_lock_that_ran_out_stays_closed_for_its_grace_and_a_released_one_does_not(bench: impl Bench) {
    let leases = bench.leases();
    number(&bench.locks(), "a").await;
    let acquire = async || leases.acquire("a", SHORT).grace(LONG).without_keep_alive().await.ok();
    let lease = eventually("it is acquired in time", acquire).await;
    assert!(lease.remaining() <= SHORT);
    bench.pass(SHORT * 2).await;
    assert_eq!(lease.lost().await, Lost::Expired);
    match leases.acquire("a", LONG).await.unwrap_err() {
        LeaseError::Held { remaining, .. } => assert!(remaining > Some(LONG / 2), "{remaining:?}"),
        other => panic!("{other:?}"),
    }
    // Nobody else can have had it: its holder may open it before the time.
    lease.release().await.unwrap();
    leases.acquire("a", LONG).grace(LONG).await.unwrap().release().await.unwrap();
    leases.acquire("a", LONG).await.unwrap().release().await.unwrap();
    let error = leases.acquire("a", LONG).grace(Duration::MAX).await.unwrap_err();
    assert!(matches!(error, LeaseError::Invalid(Invalid::Option { .. })), "{error:?}");
}

async fn a_lease_that_was_taken_away_is_lost_for_ever(bench: impl Bench) {
    let (leases, locks) = (bench.leases(), bench.locks());
    let ttl = Duration::from_secs(3);
    let lease = leases.acquire("a", ttl).wait(LONG).await.unwrap();
    // By an operator, or by a failover that forgot it.
    assert_eq!(locks.release(lease.resource(), lease.owner()).await.unwrap(), Standing::Ours);
    let lost = tokio::spawn(lease.lost());
    assert_eq!(finish(&bench, lost).await, Lost::Taken);
    assert_eq!(lease.remaining(), Duration::ZERO);
    // The keep-alive does not take it again, though it is free.
    assert_eq!(locks.holder(lease.resource()).await.unwrap(), None);
    assert!(matches!(lease.release().await, Err(LeaseError::Lost { reason: Lost::Taken, .. })));
}

async fn a_lease_refused_by_a_fence_that_knows_better_is_disowned(bench: impl Bench) {
    let leases = bench.leases();
    let lease = leases.acquire("a", LONG).await.unwrap();
    let seen = FencingToken::new(40).unwrap();
    assert!(lease.refused(seen).await, "the lock was still held: the counter went back");
    assert_eq!(lease.lost().await, Lost::Regressed);
    assert!(!lease.refused(seen).await, "and now it is not");
    let error = lease.release().await.unwrap_err();
    assert_eq!(error.group(), Group::CounterRegressed, "{error:?}");
    let next = leases.acquire("a", LONG).await.unwrap();
    assert_eq!((next.token().epoch(), next.token().sequence()), (1, 0));
    assert!(!next.cancellation().is_cancelled());
    next.release().await.unwrap();
}
