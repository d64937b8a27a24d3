//! A holder whose own code keeps its runtime from running: nothing renews its lease.

use std::time::Duration;

use fencerow::fence::Fence;
use fencerow::lease::{Leases, Lost};

use super::failover::write;
use crate::fence::fixtures::postgres::stage;
use crate::support::{self, eventually};

const NAME: &str = "settlement";
const TTL: Duration = Duration::from_millis(400);
const LONG: Duration = Duration::from_secs(60);

/// Keeps the caller's thread until another one, with a runtime of its own, is done.
fn block_until<T: Send + 'static>(elsewhere: impl AsyncFnOnce() -> T + Send + 'static) -> T {
    let other = std::thread::spawn(|| tokio::runtime::Runtime::new().unwrap().block_on(elsewhere()));
    other.join().unwrap()
}

/// A08
#[tokio::test]
async fn a_blocked_holder_learns_on_waking_that_its_lease_ran_out_and_takes_nothing_back() {
    let redis = support::redis().await;
    let leases = Leases::without_fence(redis.locks().await);
    leases.acquire(NAME, LONG).await.unwrap().release().await.unwrap();
    let lease = leases.acquire(NAME, TTL).wait(LONG).await.unwrap();
    let cancelled = lease.cancellation();
    // Nobody else acquires it meanwhile.
    block_until(async move || {
        let near = Leases::without_fence(redis.locks().await);
        eventually("it runs out", async || near.holder(NAME).await.unwrap().is_none().then_some(())).await;
    });
    assert_eq!(lease.remaining(), Duration::ZERO, "before anything else has run");
    let lost = lease.lost().await;
    assert!(matches!(lost, Lost::Expired | Lost::Taken), "{lost:?}");
    assert!(cancelled.is_cancelled());
    assert_eq!(leases.holder(NAME).await.unwrap(), None);
    assert_eq!(lease.release().await.unwrap_err().group(), fencerow::Group::Superseded);
}

/// A08
#[tokio::test]
async fn a_blocked_holder_that_was_succeeded_writes_nothing() {
    let (stage, redis) = (stage().await, support::redis().await);
    let leases = Leases::new(redis.locks().await, stage.fence.clone());
    leases.acquire(NAME, LONG).await.unwrap().release().await.unwrap();
    let lease = leases.acquire(NAME, TTL).wait(LONG).await.unwrap();
    write(&stage.fence, &lease).await.unwrap();
    let url = stage.database.url.clone();
    let successor = block_until(async move || {
        let fence = Fence::new(sqlx::PgPool::connect(&url).await.unwrap());
        let leases = Leases::new(redis.locks().await, fence.clone());
        let lease = leases.acquire(NAME, LONG).wait(LONG).await.unwrap();
        write(&fence, &lease).await.unwrap();
        lease.token()
    });
    assert_eq!(lease.remaining(), Duration::ZERO, "before anything else has run");
    let error = write(&stage.fence, &lease).await.unwrap_err();
    assert!(error.is_stale(), "{error:?}");
    assert!(lease.token() < successor);
    let entries: i64 = sqlx::query_scalar("select count(*) from entry").fetch_one(&stage.pool).await.unwrap();
    assert_eq!(entries, 2);
    assert!(lease.release().await.is_err());
}
