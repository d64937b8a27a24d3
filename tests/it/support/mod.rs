//! Servers, processes and a bad network, for tests.

pub(crate) mod child;
pub(crate) mod containers;
mod postgres;
pub(crate) mod proxy;
mod redis;
mod topology;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

pub(crate) use postgres::{TestDatabase, postgres};
pub(crate) use redis::{OwnRedis, TestRedis, own_redis, redis, run_a_server};
pub(crate) use topology::{Node, cluster, primary_and_replica, sentinels};

/// How long anything may take that takes milliseconds when all is well. Long, since it only ends
/// tests that have failed, on machines that are slower than this one.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Outlives each test's own runtime: what is shared by tests runs here.
pub(crate) static BACKGROUND: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
});

/// Asks until the answer is there, and fails the test if it does not come.
pub(crate) async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(began.elapsed() < PATIENCE, "{what}: not after {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
