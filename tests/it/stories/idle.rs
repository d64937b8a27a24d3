//! Counters that go when nobody uses them.

use std::time::Duration;

use fencerow::Invalid;
use fencerow::lease::{Attempt, LeaseError, Leases, LockService as _, Origin, Request};

use super::failover::write;
use crate::fence::fixtures::postgres::stage;
use crate::support::{self, TestRedis, eventually};

const LONG: Duration = Duration::from_secs(60);
const IDLE: Duration = Duration::from_millis(300);

async fn keys(redis: &TestRedis) -> Vec<String> {
    let mut connection = redis.connection().await;
    redis::cmd("KEYS").arg(format!("{}*", redis.prefix)).query_async(&mut connection).await.unwrap()
}

#[tokio::test]
async fn a_counter_that_expired_is_numbered_anew_and_what_was_issued_before_is_refused() {
    let (stage, redis) = (stage().await, support::redis().await);
    let locks = redis.locks().await.with_idle_expiry(IDLE).unwrap();
    let leases = Leases::new(locks, stage.fence.clone());
    // Issued, and not used yet: the fence has never seen its number.
    let mut sleeper = leases.acquire("a", LONG).without_keep_alive().await.unwrap();
    for _ in 0..2 {
        sleeper.release().await.unwrap();
        sleeper = leases.acquire("a", LONG).without_keep_alive().await.unwrap();
    }
    let grant = fencerow::Credential::grant(&sleeper);
    sleeper.release().await.unwrap();
    eventually("no key is left", async || keys(&redis).await.is_empty().then_some(())).await;

    let next = leases.acquire("a", LONG).without_keep_alive().await.unwrap();
    assert!(next.token() > grant.token() && next.token().epoch() > grant.token().epoch());
    assert!(write(&stage.fence, &grant).await.unwrap_err().is_stale());
    write(&stage.fence, &next).await.unwrap();
    next.release().await.unwrap();
}

/// The lock outlasts its counter where the one lives longer than the other.
#[tokio::test]
async fn a_lease_outlives_its_counter() {
    let (stage, redis) = (stage().await, support::redis().await);
    let locks = redis.locks().await.with_idle_expiry(Duration::from_millis(1)).unwrap();
    let leases = Leases::new(locks, stage.fence.clone());
    let mut last = None;
    for _ in 0..3 {
        let lease = leases.acquire("a", LONG).await.unwrap();
        eventually("only the lock is left", async || (keys(&redis).await.len() == 1).then_some(())).await;
        assert!(Some(lease.token()) > last);
        last = Some(lease.token());
        write(&stage.fence, &lease).await.unwrap();
        lease.release().await.unwrap();
    }
}

/// A03
#[tokio::test]
async fn counters_stay_unless_the_caller_says_otherwise() {
    let redis = support::redis().await;
    let (stays, goes) =
        (redis.locks().await, redis.locks().await.with_idle_expiry(Duration::from_secs(600)).unwrap());
    let mut connection = redis.connection().await;
    let mut ends = async || {
        let mut ends = Vec::new();
        for suffix in ["token", "run"] {
            let key = format!("{}{{a}}:{suffix}", redis.prefix);
            let end: i64 = redis::cmd("PTTL").arg(key).query_async(&mut connection).await.unwrap();
            ends.push(end > 0);
        }
        ends
    };
    Leases::without_fence(stays.clone()).acquire("a", LONG).await.unwrap().release().await.unwrap();
    assert_eq!(ends().await, [false, false]);
    // Two programs that are set up differently: whoever used it last decides.
    for (locks, ending) in [(&goes, true), (&stays, false)] {
        let resource = "a".try_into().unwrap();
        let owner = fencerow::OwnerId::random();
        let request = Request::new(resource, owner, LONG.try_into().unwrap(), Origin::here("test"));
        assert!(matches!(locks.acquire(&request).await.unwrap(), Attempt::Granted(_)));
        assert_eq!(ends().await, [ending, ending]);
        locks.release(&request.resource, owner).await.unwrap();
    }
}

#[tokio::test]
async fn expiring_counters_are_refused_where_there_is_no_fence() {
    let redis = support::redis().await;
    let locks = redis.locks().await.with_idle_expiry(IDLE).unwrap();
    let error = Leases::without_fence(locks).acquire("a", LONG).await.unwrap_err();
    assert!(matches!(error, LeaseError::Invalid(Invalid::Option { .. })), "{error:?}");
    assert!(keys(&redis).await.is_empty());
    for idle in [Duration::ZERO, Duration::from_micros(999), Duration::MAX] {
        assert!(matches!(redis.locks().await.with_idle_expiry(idle), Err(Invalid::Ttl(_))));
    }
}
