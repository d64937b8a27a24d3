//! What every lock service must do. A service is supported when it passes.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, SystemTime};

use fencerow::clock::ManualClock;
use fencerow::fence::Fence;
use fencerow::lease::{
    Attempt, Label, LeaseError, Leases, LockService, Lost, MemoryLocks, PgLocks, RedisLocks, Request,
    SqliteLocks, Standing, Ttl,
};
use fencerow::{Credential as _, FencingToken, Group, Invalid, OwnerId, Renumber, Resource};
use futures_util::future::BoxFuture;

use crate::support::proxy::Proxy;
use crate::support::{PATIENCE, TestDatabase, TestRedis, eventually, postgres, redis};

/// Long enough not to run out in a test that does not mean it to.
const LONG: Duration = Duration::from_secs(600);
/// Short enough to be waited for.
const SHORT: Duration = Duration::from_millis(40);

/// A service under test.
trait Bench: Sized + Send + Sync + 'static {
    type Locks: LockService + Clone;

    async fn start() -> Self;

    fn locks(&self) -> Self::Locks;

    fn leases(&self) -> Leases {
        self.leases_numbered_by(fencerow::CounterOnly)
    }

    fn leases_numbered_by(&self, fence: impl Renumber) -> Leases {
        Leases::new(self.locks(), fence)
    }

    /// Lets time pass, for the service and for its leases.
    fn pass(&self, time: Duration) -> impl Future<Output = ()> + Send {
        tokio::time::sleep(time)
    }
}

/// A service that is asked over a network.
trait Networked: Bench {
    /// The same service, behind a network that can be broken.
    async fn far(&self) -> (Self, Proxy);
}

struct Memory(MemoryLocks, ManualClock);

impl Bench for Memory {
    type Locks = MemoryLocks;

    async fn start() -> Self {
        let hand = ManualClock::new();
        Self(MemoryLocks::with_clock(hand.clock()), hand)
    }

    fn locks(&self) -> MemoryLocks {
        self.0.clone()
    }

    fn leases_numbered_by(&self, fence: impl Renumber) -> Leases {
        Leases::new(self.locks(), fence).with_clock(self.1.clock())
    }

    async fn pass(&self, time: Duration) {
        self.1.advance(time);
        tokio::task::yield_now().await;
    }
}

struct Redis(RedisLocks, Arc<TestRedis>);

impl Networked for Redis {
    async fn far(&self) -> (Self, Proxy) {
        let proxy = Proxy::to(self.1.address()).await;
        (Self(self.1.locks_at(proxy.address()).await, self.1.clone()), proxy)
    }
}

impl Bench for Redis {
    type Locks = RedisLocks;

    async fn start() -> Self {
        let redis = redis().await;
        Self(redis.locks().await, Arc::new(redis))
    }

    fn locks(&self) -> RedisLocks {
        self.0.clone()
    }
}

struct Postgres(PgLocks, Arc<TestDatabase>);

impl Networked for Postgres {
    async fn far(&self) -> (Self, Proxy) {
        let proxy = Proxy::to(self.1.address()).await;
        (Self(PgLocks::connect(&self.1.url_at(proxy.address())).await.unwrap(), self.1.clone()), proxy)
    }
}

impl Bench for Postgres {
    type Locks = PgLocks;

    async fn start() -> Self {
        let database = postgres().await;
        Fence::new(database.pool().await).migrate().await.unwrap();
        Self(PgLocks::connect(&database.url).await.unwrap(), Arc::new(database))
    }

    fn locks(&self) -> PgLocks {
        self.0.clone()
    }
}

struct Sqlite(SqliteLocks, #[expect(dead_code, reason = "removed when it is dropped")] tempfile::TempDir);

impl Bench for Sqlite {
    type Locks = SqliteLocks;

    async fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self(SqliteLocks::beside(directory.path().join("bank.db")).await.unwrap(), directory)
    }

    fn locks(&self) -> SqliteLocks {
        self.0.clone()
    }
}

macro_rules! laws {
    ($([$module:ident $bench:ident])+ => $laws:tt) => {
        $(laws! { @ $module $bench $laws })+
    };
    (@ $module:ident $bench:ident { $($law:ident)+ }) => {
        mod $module {
            use super::{Bench as _, $bench};

            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $law() {
                    super::$law($bench::start().await).await;
                }
            )+
        }
    };
}

laws! { [memory Memory] [redis Redis] [postgres Postgres] [sqlite Sqlite] => {
    of_fifty_at_once_one_is_granted_and_the_others_are_told_how_long
    tokens_grow_with_each_grant_and_stay_on_renewal
    the_same_owner_asking_again_gets_the_same_grant
    a_counter_never_goes_back
    a_repeated_release_is_harmless_and_says_not_held
    an_expired_release_leaves_the_successor_alone
    a_release_at_the_very_end_never_frees_the_successor
    nothing_but_an_acquisition_makes_a_lock
    a_renewal_touches_nobody_elses_lock
    a_lock_that_ran_out_before_it_was_seeded_gets_nothing
    a_holder_whose_numbering_took_too_long_gets_nothing
    only_the_owner_can_disown_and_the_next_grant_is_unnumbered
    the_holder_can_be_read
    odd_names_stay_apart
    the_shortest_and_the_longest_time_to_live_end
    a_time_to_live_that_a_server_would_misread_is_refused_before_it_is_asked
    an_acquisition_dropped_at_any_await_leaves_nothing_behind
    a_release_dropped_at_any_await_goes_on
    a_dropped_lease_is_released
    a_waiter_gets_it_when_it_is_released
    a_waiter_gets_it_when_it_runs_out
    waiting_ends_with_timeout_and_trying_with_held
    the_keep_alive_keeps_a_lease_past_its_time_to_live
    without_keep_alive_a_lease_is_lost_at_its_deadline
    a_lease_that_was_taken_away_is_lost_for_ever
    a_lease_refused_by_a_fence_that_knows_better_is_disowned
} }

laws! { [redis_far Redis] [postgres_far Postgres] => {
    a_server_that_refuses_is_unavailable_and_not_held
    a_server_that_hangs_is_unavailable_and_not_held
    a_hanging_server_hides_no_loss_and_late_renewals_touch_no_successor
    a_cut_connection_does_not_end_a_lease
    an_acquisition_dropped_while_the_server_hangs_leaves_nothing_behind
    a_release_dropped_while_the_server_hangs_goes_on
} }

fn request(name: &str, ttl: Duration) -> Request {
    let resource = Resource::new(name).unwrap();
    Request::new(resource, OwnerId::random(), ttl.try_into().unwrap(), Label::here(name))
}

/// Acquires, and numbers the grant from the counter alone if it must be.
async fn take(locks: &impl LockService, request: &Request) -> Option<FencingToken> {
    match locks.acquire(request).await.unwrap() {
        Attempt::Granted(token) => Some(token),
        Attempt::Held { .. } => None,
        Attempt::Unnumbered { counter } => {
            let token = match counter {
                None => FencingToken::FIRST,
                Some(counter) => counter.first_of_next_epoch().unwrap(),
            };
            let seeded = locks.seed(&request.resource, request.owner, token).await.unwrap();
            (seeded == Standing::Held).then_some(token)
        }
    }
}

/// Has the counter of a resource begin, so that what is tested does not run out while it is seeded.
async fn number(locks: &impl LockService, name: &str) {
    let first = request(name, LONG);
    assert_eq!(take(locks, &first).await, Some(FencingToken::FIRST));
    assert_eq!(locks.release(&first.resource, first.owner).await.unwrap(), Standing::Held);
}

async fn remaining(locks: &impl LockService, resource: &Resource) -> Duration {
    locks.holder(resource).await.unwrap().unwrap().remaining.unwrap()
}

/// Lets a task get on, whatever clock it waits for, until it has ended.
async fn finish<T>(bench: &impl Bench, task: tokio::task::JoinHandle<T>) -> T {
    let ended = eventually("the task ends", async || {
        bench.pass(Duration::from_millis(5)).await;
        task.is_finished().then_some(())
    });
    ended.await;
    task.await.unwrap()
}

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

async fn of_fifty_at_once_one_is_granted_and_the_others_are_told_how_long(bench: impl Bench) {
    // The first round meets a resource that was never seen, the second one that counts.
    for round in 1..=2 {
        let tries: Vec<_> = (0..50)
            .map(|_| {
                let locks = bench.locks();
                tokio::spawn(async move {
                    let request = request("a", LONG);
                    (locks.acquire(&request).await.unwrap(), request)
                })
            })
            .collect();
        let mut winner = None;
        for task in tries {
            match task.await.unwrap() {
                (Attempt::Held { remaining: Some(remaining) }, _) => {
                    assert!(remaining > LONG / 2 && remaining <= LONG, "{remaining:?}");
                }
                (Attempt::Held { remaining: None }, _) => panic!("an endless lock"),
                (attempt, request) => {
                    assert!(winner.replace((attempt, request)).is_none(), "two were granted")
                }
            }
        }
        let (attempt, request) = winner.expect("nobody was granted");
        let locks = bench.locks();
        if round == 1 {
            assert_eq!(attempt, Attempt::Unnumbered { counter: None });
            locks.seed(&request.resource, request.owner, FencingToken::FIRST).await.unwrap();
        } else {
            assert_eq!(attempt, Attempt::Granted(FencingToken::new(2).unwrap()));
        }
        assert_eq!(locks.release(&request.resource, request.owner).await.unwrap(), Standing::Held);
    }
}

async fn tokens_grow_with_each_grant_and_stay_on_renewal(bench: impl Bench) {
    let locks = bench.locks();
    for expected in 1..=5 {
        let request = request("a", LONG);
        let (resource, owner) = (&request.resource, request.owner);
        assert_eq!(take(&locks, &request).await.map(FencingToken::get), Some(expected));
        assert_eq!(locks.renew(resource, owner, request.ttl).await.unwrap(), Standing::Held);
        let holder = locks.holder(resource).await.unwrap().unwrap();
        assert_eq!(holder.token.map(FencingToken::get), Some(expected));
        assert_eq!(locks.release(resource, owner).await.unwrap(), Standing::Held);
    }
    assert_eq!(take(&locks, &request("b", LONG)).await, Some(FencingToken::FIRST), "another counter");
}

async fn the_same_owner_asking_again_gets_the_same_grant(bench: impl Bench) {
    let locks = bench.locks();
    let unnumbered = Attempt::Unnumbered { counter: None };
    let first = request("a", LONG / 10);
    assert_eq!(locks.acquire(&first).await.unwrap(), unnumbered);
    let mut again = first.clone();
    again.ttl = LONG.try_into().unwrap();
    assert_eq!(locks.acquire(&again).await.unwrap(), unnumbered);
    assert!(remaining(&locks, &first.resource).await > LONG / 2, "its time to live begins again");

    locks.seed(&first.resource, first.owner, FencingToken::FIRST).await.unwrap();
    assert_eq!(locks.acquire(&again).await.unwrap(), Attempt::Granted(FencingToken::FIRST));
    assert_eq!(locks.seed(&first.resource, first.owner, FencingToken::FIRST).await.unwrap(), Standing::Held);
    locks.release(&first.resource, first.owner).await.unwrap();
    // No number was used up by asking again.
    assert_eq!(take(&locks, &request("a", LONG)).await.map(FencingToken::get), Some(2));
}

async fn a_counter_never_goes_back(bench: impl Bench) {
    let locks = bench.locks();
    let high = FencingToken::new(9_007_199_254_740_993).unwrap();
    for (seeded, then) in [(high, high.get() + 1), (FencingToken::FIRST, high.get() + 3)] {
        let first = request("a", LONG);
        locks.acquire(&first).await.unwrap();
        assert_eq!(locks.seed(&first.resource, first.owner, seeded).await.unwrap(), Standing::Held);
        assert_eq!(locks.acquire(&first).await.unwrap(), Attempt::Granted(seeded));
        locks.release(&first.resource, first.owner).await.unwrap();
        let next = request("a", LONG);
        assert_eq!(take(&locks, &next).await.map(FencingToken::get), Some(then));
        locks.release(&next.resource, next.owner).await.unwrap();
    }
}

async fn a_repeated_release_is_harmless_and_says_not_held(bench: impl Bench) {
    let locks = bench.locks();
    let request = request("a", LONG);
    let release = async || locks.release(&request.resource, request.owner).await.unwrap();
    assert_eq!(release().await, Standing::NotHeld);
    take(&locks, &request).await.unwrap();
    assert_eq!(release().await, Standing::Held);
    assert_eq!(release().await, Standing::NotHeld);
    assert_eq!(locks.holder(&request.resource).await.unwrap(), None);
}

/// A01
async fn an_expired_release_leaves_the_successor_alone(bench: impl Bench) {
    let locks = bench.locks();
    number(&locks, "a").await;
    let late = request("a", SHORT);
    let old = take(&locks, &late).await.unwrap();
    bench.pass(SHORT * 2).await;
    let successor = request("a", LONG);
    let new = take(&locks, &successor).await.unwrap();
    assert!(new > old);
    let before = locks.holder(&late.resource).await.unwrap().unwrap();

    assert_eq!(locks.release(&late.resource, late.owner).await.unwrap(), Standing::NotHeld);
    let after = locks.holder(&late.resource).await.unwrap().unwrap();
    assert_eq!((after.owner, after.token, after.since), (successor.owner, Some(new), before.since));
    assert!(after.remaining > Some(LONG / 2));
    assert!(matches!(locks.acquire(&request("a", LONG)).await.unwrap(), Attempt::Held { .. }));
}

/// A01
async fn a_release_at_the_very_end_never_frees_the_successor(bench: impl Bench) {
    let locks = bench.locks();
    let ttl = Duration::from_millis(6);
    number(&locks, "a").await;
    for round in 0..50_u64 {
        let late = request("a", ttl);
        take(&locks, &late).await.unwrap();
        let successor = request("a", LONG);
        let wait = async {
            while let Attempt::Held { .. } = locks.acquire(&successor).await.unwrap() {
                bench.pass(Duration::from_micros(500)).await;
            }
        };
        let release = async {
            bench.pass(Duration::from_millis(3) + Duration::from_micros(100 * round)).await;
            locks.release(&late.resource, late.owner).await.unwrap();
        };
        tokio::join!(wait, release);
        let holder = locks.holder(&late.resource).await.unwrap();
        assert_eq!(holder.map(|holder| holder.owner), Some(successor.owner), "round {round}");
        assert_eq!(locks.release(&successor.resource, successor.owner).await.unwrap(), Standing::Held);
    }
}

async fn nothing_but_an_acquisition_makes_a_lock(bench: impl Bench) {
    let locks = bench.locks();
    number(&locks, "ended").await;
    let ended = request("ended", SHORT);
    take(&locks, &ended).await.unwrap();
    bench.pass(SHORT * 2).await;
    for request in [request("never", LONG), ended] {
        let (resource, owner) = (&request.resource, request.owner);
        assert_eq!(locks.renew(resource, owner, request.ttl).await.unwrap(), Standing::NotHeld);
        assert_eq!(locks.seed(resource, owner, FencingToken::FIRST).await.unwrap(), Standing::NotHeld);
        assert_eq!(locks.disown(resource, owner).await.unwrap(), Standing::NotHeld);
        assert_eq!(locks.holder(resource).await.unwrap(), None);
    }
    // The refused seed and disown left no trace in the counters either.
    assert_eq!(locks.acquire(&request("never", LONG)).await.unwrap(), Attempt::Unnumbered { counter: None });
    let token = FencingToken::new(3).unwrap();
    assert_eq!(locks.acquire(&request("ended", LONG)).await.unwrap(), Attempt::Granted(token));
}

/// A06
async fn a_renewal_touches_nobody_elses_lock(bench: impl Bench) {
    let locks = bench.locks();
    let holder = request("a", LONG);
    let token = take(&locks, &holder).await.unwrap();
    let stranger = request("a", LONG * 10);
    assert_eq!(
        locks.renew(&stranger.resource, stranger.owner, stranger.ttl).await.unwrap(),
        Standing::NotHeld
    );
    let high = FencingToken::new(1000).unwrap();
    assert_eq!(locks.seed(&stranger.resource, stranger.owner, high).await.unwrap(), Standing::NotHeld);
    assert!(remaining(&locks, &holder.resource).await <= LONG);
    assert_eq!(locks.acquire(&holder).await.unwrap(), Attempt::Granted(token));
}

async fn a_lock_that_ran_out_before_it_was_seeded_gets_nothing(bench: impl Bench) {
    let locks = bench.locks();
    let slow = request("a", SHORT);
    let unnumbered = Attempt::Unnumbered { counter: None };
    assert_eq!(locks.acquire(&slow).await.unwrap(), unnumbered);
    bench.pass(SHORT * 2).await;
    let seed = async || locks.seed(&slow.resource, slow.owner, FencingToken::new(7).unwrap()).await.unwrap();
    assert_eq!(seed().await, Standing::NotHeld);

    let next = request("a", LONG);
    assert_eq!(locks.acquire(&next).await.unwrap(), unnumbered);
    assert_eq!(seed().await, Standing::NotHeld);
    assert_eq!(locks.acquire(&next).await.unwrap(), unnumbered);
}

/// Takes its time to number a grant.
struct SlowFence<B>(Arc<B>, Duration);

impl<B: Bench> Renumber for SlowFence<B> {
    fn renumber<'a>(
        &'a self,
        _: &'a Resource,
        _: OwnerId,
        _: Option<FencingToken>,
    ) -> BoxFuture<'a, Result<FencingToken, Box<dyn std::error::Error + Send + Sync>>> {
        Box::pin(async {
            self.0.pass(self.1).await;
            Ok(FencingToken::FIRST)
        })
    }
}

async fn a_holder_whose_numbering_took_too_long_gets_nothing(bench: impl Bench) {
    let bench = Arc::new(bench);
    let leases = bench.leases_numbered_by(SlowFence(bench.clone(), SHORT * 2));
    let error = leases.acquire("a", SHORT).await.unwrap_err();
    assert!(matches!(error, LeaseError::Lost { reason: Lost::Expired | Lost::Taken, .. }), "{error:?}");
    let unnumbered = Attempt::Unnumbered { counter: None };
    bench.pass(SHORT).await;
    assert_eq!(bench.locks().acquire(&request("a", LONG)).await.unwrap(), unnumbered);
}

async fn only_the_owner_can_disown_and_the_next_grant_is_unnumbered(bench: impl Bench) {
    let locks = bench.locks();
    let holder = request("a", LONG);
    let token = take(&locks, &holder).await.unwrap();
    assert_eq!(locks.disown(&holder.resource, OwnerId::random()).await.unwrap(), Standing::NotHeld);
    assert_eq!(locks.acquire(&holder).await.unwrap(), Attempt::Granted(token));

    assert_eq!(locks.disown(&holder.resource, holder.owner).await.unwrap(), Standing::Held);
    assert_eq!(locks.holder(&holder.resource).await.unwrap(), None);
    assert_eq!(locks.disown(&holder.resource, holder.owner).await.unwrap(), Standing::NotHeld);
    let next = request("a", LONG);
    // What it holds is still a bound.
    let unnumbered = Attempt::Unnumbered { counter: Some(token) };
    assert_eq!(locks.acquire(&next).await.unwrap(), unnumbered);
    locks.release(&next.resource, next.owner).await.unwrap();
    assert_eq!(locks.acquire(&request("a", LONG)).await.unwrap(), unnumbered, "until it is seeded");
}

async fn the_holder_can_be_read(bench: impl Bench) {
    let locks = bench.locks();
    let note = "settling {2026-11-30} \"naïve/λ\"\n\\";
    let mut request = request("a", LONG);
    request.label = Label::here(note);
    assert_eq!(locks.holder(&request.resource).await.unwrap(), None);
    locks.acquire(&request).await.unwrap();
    let holder = locks.holder(&request.resource).await.unwrap().unwrap();
    assert_eq!((holder.owner, holder.token, &holder.label), (request.owner, None, &request.label));
    assert_eq!(holder.label.process, std::process::id());
    assert!(!holder.label.host.is_empty());
    let now = SystemTime::now();
    let age = now.duration_since(holder.since).unwrap_or_else(|later| later.duration());
    assert!(age < PATIENCE, "{age:?}");
    assert!(holder.remaining > Some(LONG / 2) && holder.remaining <= Some(LONG));

    locks.seed(&request.resource, request.owner, FencingToken::FIRST).await.unwrap();
    let numbered = locks.holder(&request.resource).await.unwrap().unwrap();
    assert_eq!(
        (numbered.token, numbered.since, numbered.label),
        (Some(FencingToken::FIRST), holder.since, holder.label)
    );
}

/// A24
async fn odd_names_stay_apart(bench: impl Bench) {
    let locks = bench.locks();
    let longest = "λ".repeat(256);
    let names = [
        "a",
        "A",
        " a",
        "a ",
        "a\n",
        "{a}",
        "{a}:b",
        "a{b}c",
        "{}",
        "}{",
        "{{x}}",
        "a b",
        "a%20b",
        "naïve/λ",
        "nai\u{308}ve/λ",
        "'; drop table lease; --",
        "\u{feff}a",
        "😀",
        "a:lock",
        "a:token",
        "%",
        "_",
        "\\",
        longest.as_str(),
    ];
    let requests: Vec<_> = names.iter().map(|name| request(name, LONG)).collect();
    for request in &requests {
        assert_eq!(take(&locks, request).await, Some(FencingToken::FIRST), "{:?}", request.resource);
    }
    for request in &requests {
        let holder = locks.holder(&request.resource).await.unwrap().unwrap();
        assert_eq!((holder.owner, holder.label.note.as_str()), (request.owner, request.resource.as_str()));
        assert_eq!(locks.release(&request.resource, request.owner).await.unwrap(), Standing::Held);
    }
}

/// A25
async fn the_shortest_and_the_longest_time_to_live_end(bench: impl Bench) {
    let locks = bench.locks();
    let shortest = request("a", Duration::from_millis(1));
    locks.acquire(&shortest).await.unwrap();
    bench.pass(Duration::from_millis(10)).await;
    assert_eq!(locks.holder(&shortest.resource).await.unwrap(), None);

    let longest = request("a", Ttl::MAX.get());
    take(&locks, &longest).await.unwrap();
    assert_eq!(locks.renew(&longest.resource, longest.owner, Ttl::MAX).await.unwrap(), Standing::Held);
    let nearly = Ttl::MAX.get() - LONG;
    assert!(remaining(&locks, &longest.resource).await > nearly);
    match locks.acquire(&request("a", LONG)).await.unwrap() {
        Attempt::Held { remaining: Some(remaining) } => {
            assert!(remaining > nearly && remaining <= Ttl::MAX.get(), "{remaining:?}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(locks.renew(&longest.resource, longest.owner, shortest.ttl).await.unwrap(), Standing::Held);
    bench.pass(Duration::from_millis(10)).await;
    assert_eq!(locks.holder(&longest.resource).await.unwrap(), None);
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

async fn waiting_ends_with_timeout_and_trying_with_held(bench: impl Bench) {
    let leases = bench.leases();
    let holder = leases.acquire("a", LONG).await.unwrap();
    let limit = Duration::from_millis(60);
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

async fn the_keep_alive_keeps_a_lease_past_its_time_to_live(bench: impl Bench) {
    let (leases, locks) = (bench.leases(), bench.locks());
    // A renewal every 200 ms, of which one may be late by 400 ms.
    let ttl = Duration::from_millis(600);
    let lease = leases.acquire("a", ttl).await.unwrap();
    let token = lease.token();
    for _ in 0..8 {
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

async fn a_lease_that_was_taken_away_is_lost_for_ever(bench: impl Bench) {
    let (leases, locks) = (bench.leases(), bench.locks());
    let ttl = Duration::from_millis(600);
    let lease = leases.acquire("a", ttl).await.unwrap();
    // By an operator, or by a failover that forgot it.
    assert_eq!(locks.release(lease.resource(), lease.owner()).await.unwrap(), Standing::Held);
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

/// How long a request may take here: the time to live that is asked for bounds it.
const IMPATIENT: Duration = Duration::from_millis(200);

async fn a_server_that_refuses_is_unavailable_and_not_held(bench: impl Networked) {
    let (far, mut proxy) = bench.far().await;
    let leases = far.leases();
    leases.acquire("a", LONG).await.unwrap().release().await.unwrap();
    proxy.refuse().await;
    let error = leases.try_acquire("a", IMPATIENT).await.unwrap_err();
    assert!(matches!(error, LeaseError::Unavailable(_)), "{error:?}");
    assert_eq!(error.group(), Group::Unavailable);
    assert!(!error.is_contended());

    // Whoever waits, waits for the server as well.
    let waiting = {
        let leases = leases.clone();
        tokio::spawn(async move { leases.acquire("a", LONG).wait(PATIENCE).await })
    };
    far.pass(Duration::from_millis(100)).await;
    assert!(!waiting.is_finished());
    proxy.accept().await;
    waiting.await.unwrap().unwrap().release().await.unwrap();
}

async fn a_server_that_hangs_is_unavailable_and_not_held(bench: impl Networked) {
    let (far, proxy) = bench.far().await;
    let leases = far.leases();
    leases.acquire("a", LONG).await.unwrap().release().await.unwrap();
    proxy.hang();
    let error = leases.try_acquire("a", IMPATIENT).await.unwrap_err();
    assert!(matches!(error, LeaseError::Unavailable(_)), "{error:?}");
    proxy.pass();
    let waiting = leases.acquire("a", LONG).wait(PATIENCE);
    waiting.await.unwrap().release().await.unwrap();
}

async fn a_hanging_server_hides_no_loss_and_late_renewals_touch_no_successor(bench: impl Networked) {
    let (far, proxy) = bench.far().await;
    number(&bench.locks(), "a").await;
    let cut_off = far.leases().acquire("a", IMPATIENT).wait(PATIENCE).await.unwrap();
    proxy.hang();
    let lost = tokio::time::timeout(PATIENCE, cut_off.lost()).await.expect("it is announced");
    // Taken, if it had run out on a slow machine before the server hung.
    assert!(matches!(lost, Lost::Expired | Lost::Taken), "{lost:?}");
    assert_eq!(cut_off.remaining(), Duration::ZERO);

    let successor = bench.leases().acquire("a", LONG).without_keep_alive().wait(PATIENCE).await.unwrap();
    assert!(successor.token() > cut_off.token());
    let before = remaining(&bench.locks(), successor.resource()).await;
    // Now all that was held up arrives, and the release after it.
    proxy.pass();
    let error = cut_off.release().await.unwrap_err();
    assert!(matches!(error, LeaseError::Lost { .. } | LeaseError::Unavailable(_)), "{error:?}");
    assert!(remaining(&bench.locks(), successor.resource()).await <= before);
    successor.release().await.unwrap();
}

async fn a_cut_connection_does_not_end_a_lease(bench: impl Networked) {
    let (far, proxy) = bench.far().await;
    let lease = far.leases().acquire("a", Duration::from_secs(3)).await.unwrap();
    proxy.cut();
    let mut last = Duration::MAX;
    eventually("it is renewed", async || {
        let now = remaining(&bench.locks(), lease.resource()).await;
        let renewed = now > last;
        last = now;
        renewed.then_some(())
    })
    .await;
    assert!(!lease.cancellation().is_cancelled());
    lease.release().await.unwrap();
}

async fn an_acquisition_dropped_while_the_server_hangs_leaves_nothing_behind(bench: impl Networked) {
    let (far, proxy) = bench.far().await;
    let leases = far.leases();
    leases.acquire("a", LONG).await.unwrap().release().await.unwrap();
    proxy.hang();
    let dropped = tokio::time::timeout(IMPATIENT / 2, leases.acquire("a", LONG)).await;
    assert!(dropped.is_err());
    proxy.pass();
    let next = bench.leases().acquire("a", LONG).wait(PATIENCE).await.unwrap();
    next.release().await.unwrap();
}

/// A02
async fn a_release_dropped_while_the_server_hangs_goes_on(bench: impl Networked) {
    let (far, proxy) = bench.far().await;
    let lease = far.leases().acquire("a", LONG).await.unwrap();
    proxy.hang();
    assert!(tokio::time::timeout(IMPATIENT / 2, lease.release()).await.is_err());
    proxy.pass();
    let next = bench.leases().acquire("a", LONG).wait(PATIENCE).await.unwrap();
    next.release().await.unwrap();
}
