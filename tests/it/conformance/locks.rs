//! The steps of a service, each asked for by itself.

use std::time::{Duration, SystemTime};

use fencerow::lease::{Attempt, LockService as _, Origin, Standing, Ttl};
use fencerow::{FencingToken, OwnerId};

use super::services::Bench;
use super::{LONG, SHORT, number, remaining, request, take};
use crate::support::PATIENCE;

laws! { [memory Memory] [redis Redis] [cluster Cluster] [postgres Postgres] [sqlite Sqlite] [fallback Fallback] [fallen_back FallenBack] => {
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
    only_the_owner_can_disown_and_the_next_grant_is_unnumbered
    the_holder_can_be_read
    odd_names_stay_apart
    the_shortest_and_the_longest_time_to_live_end
} }

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
        assert_eq!(locks.release(&request.resource, request.owner).await.unwrap(), Standing::Ours);
    }
}

async fn tokens_grow_with_each_grant_and_stay_on_renewal(bench: impl Bench) {
    let locks = bench.locks();
    for expected in 1..=5 {
        let request = request("a", LONG);
        let (resource, owner) = (&request.resource, request.owner);
        assert_eq!(take(&locks, &request).await.map(FencingToken::get), Some(expected));
        assert_eq!(locks.renew(resource, owner, request.ttl).await.unwrap(), Standing::Ours);
        let holder = locks.holder(resource).await.unwrap().unwrap();
        assert_eq!(holder.token.map(FencingToken::get), Some(expected));
        assert_eq!(locks.release(resource, owner).await.unwrap(), Standing::Ours);
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
    assert_eq!(locks.seed(&first.resource, first.owner, FencingToken::FIRST).await.unwrap(), Standing::Ours);
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
        assert_eq!(locks.seed(&first.resource, first.owner, seeded).await.unwrap(), Standing::Ours);
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
    assert_eq!(release().await, Standing::NotOurs);
    take(&locks, &request).await.unwrap();
    assert_eq!(release().await, Standing::Ours);
    assert_eq!(release().await, Standing::NotOurs);
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

    assert_eq!(locks.release(&late.resource, late.owner).await.unwrap(), Standing::NotOurs);
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
        assert_eq!(locks.release(&successor.resource, successor.owner).await.unwrap(), Standing::Ours);
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
        assert_eq!(locks.renew(resource, owner, request.ttl).await.unwrap(), Standing::NotOurs);
        assert_eq!(locks.seed(resource, owner, FencingToken::FIRST).await.unwrap(), Standing::NotOurs);
        assert_eq!(locks.disown(resource, owner).await.unwrap(), Standing::NotOurs);
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
        Standing::NotOurs
    );
    let high = FencingToken::new(1000).unwrap();
    assert_eq!(locks.seed(&stranger.resource, stranger.owner, high).await.unwrap(), Standing::NotOurs);
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
    assert_eq!(seed().await, Standing::NotOurs);

    let next = request("a", LONG);
    assert_eq!(locks.acquire(&next).await.unwrap(), unnumbered);
    assert_eq!(seed().await, Standing::NotOurs);
    assert_eq!(locks.acquire(&next).await.unwrap(), unnumbered);
}

async fn only_the_owner_can_disown_and_the_next_grant_is_unnumbered(bench: impl Bench) {
    let locks = bench.locks();
    let holder = request("a", LONG);
    let token = take(&locks, &holder).await.unwrap();
    assert_eq!(locks.disown(&holder.resource, OwnerId::random()).await.unwrap(), Standing::NotOurs);
    assert_eq!(locks.acquire(&holder).await.unwrap(), Attempt::Granted(token));

    assert_eq!(locks.disown(&holder.resource, holder.owner).await.unwrap(), Standing::Ours);
    assert_eq!(locks.holder(&holder.resource).await.unwrap(), None);
    assert_eq!(locks.disown(&holder.resource, holder.owner).await.unwrap(), Standing::NotOurs);
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
    request.origin = Origin::here(note);
    assert_eq!(locks.holder(&request.resource).await.unwrap(), None);
    locks.acquire(&request).await.unwrap();
    let holder = locks.holder(&request.resource).await.unwrap().unwrap();
    assert_eq!((holder.owner, holder.token, &holder.origin), (request.owner, None, &request.origin));
    assert_eq!(holder.origin.process, std::process::id());
    assert!(!holder.origin.host.is_empty());
    let now = SystemTime::now();
    let age = now.duration_since(holder.since).unwrap_or_else(|later| later.duration());
    assert!(age < PATIENCE, "{age:?}");
    assert!(holder.remaining > Some(LONG / 2) && holder.remaining <= Some(LONG));

    locks.seed(&request.resource, request.owner, FencingToken::FIRST).await.unwrap();
    let numbered = locks.holder(&request.resource).await.unwrap().unwrap();
    assert_eq!(
        (numbered.token, numbered.since, numbered.origin),
        (Some(FencingToken::FIRST), holder.since, holder.origin)
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
        assert_eq!((holder.owner, holder.origin.label.as_str()), (request.owner, request.resource.as_str()));
        assert_eq!(locks.release(&request.resource, request.owner).await.unwrap(), Standing::Ours);
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
    assert_eq!(locks.renew(&longest.resource, longest.owner, Ttl::MAX).await.unwrap(), Standing::Ours);
    let nearly = Ttl::MAX.get() - LONG;
    assert!(remaining(&locks, &longest.resource).await > nearly);
    match locks.acquire(&request("a", LONG)).await.unwrap() {
        Attempt::Held { remaining: Some(remaining) } => {
            assert!(remaining > nearly && remaining <= Ttl::MAX.get(), "{remaining:?}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(locks.renew(&longest.resource, longest.owner, shortest.ttl).await.unwrap(), Standing::Ours);
    bench.pass(Duration::from_millis(10)).await;
    assert_eq!(locks.holder(&longest.resource).await.unwrap(), None);
}
