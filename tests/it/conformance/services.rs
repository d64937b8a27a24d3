//! The services under test.

use std::sync::Arc;
use std::time::Duration;

use fencerow::clock::ManualClock;
use fencerow::fence::Fence;
use fencerow::lease::{FallbackLocks, Leases, LockService, MemoryLocks, PgLocks, RedisLocks, SqliteLocks};
use fencerow::{CounterOnly, FencingToken, OwnerId, Renumber, RenumberError, Resource};
use futures_util::future::BoxFuture;

use crate::support::proxy::Proxy;
use crate::support::{TestDatabase, TestRedis, cluster, postgres, redis};

/// A service under test.
pub(super) trait Bench: Sized + Send + Sync + 'static {
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
pub(super) trait Networked: Bench {
    /// The same service, behind a network that can be broken.
    async fn far(&self) -> (Self, Proxy);
}

pub(super) struct Memory(MemoryLocks, ManualClock);

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

pub(super) struct Redis(RedisLocks, Arc<TestRedis>);

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

/// Redis Cluster.
pub(super) struct Cluster(RedisLocks);

impl Bench for Cluster {
    type Locks = RedisLocks;

    async fn start() -> Self {
        Self(cluster().await.locks().await)
    }

    fn locks(&self) -> RedisLocks {
        self.0.clone()
    }
}

pub(super) struct Postgres(PgLocks, Arc<TestDatabase>);

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

pub(super) struct Sqlite(
    SqliteLocks,
    #[expect(dead_code, reason = "removed when it is dropped")] tempfile::TempDir,
);

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

/// Numbers like the counter alone, and says that it remembers: within one test it need not.
struct Remembering;

impl Renumber for Remembering {
    fn renumber<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        counter: Option<FencingToken>,
        within: Duration,
    ) -> BoxFuture<'a, Result<FencingToken, RenumberError>> {
        CounterOnly.renumber(resource, owner, counter, within)
    }
}

/// Redis, and Postgres for when it is away, which it is not.
pub(super) struct Fallback(FallbackLocks, #[expect(dead_code, reason = "kept to the end")] Postgres);

impl Bench for Fallback {
    type Locks = FallbackLocks;

    async fn start() -> Self {
        let (Redis(primary, _), secondary) = (Redis::start().await, Postgres::start().await);
        Self(FallbackLocks::new(primary, secondary.locks()), secondary)
    }

    fn locks(&self) -> FallbackLocks {
        self.0.clone()
    }

    fn leases(&self) -> Leases {
        self.leases_numbered_by(Remembering)
    }
}

/// The same, where Redis is away.
pub(super) struct FallenBack(
    FallbackLocks,
    #[expect(dead_code, reason = "kept to the end")] Postgres,
    #[expect(dead_code, reason = "kept to the end")] Proxy,
);

impl Bench for FallenBack {
    type Locks = FallbackLocks;

    async fn start() -> Self {
        let ((Redis(primary, _), mut proxy), secondary) =
            (Redis::start().await.far().await, Postgres::start().await);
        proxy.refuse().await;
        Self(FallbackLocks::new(primary, secondary.locks()), secondary, proxy)
    }

    fn locks(&self) -> FallbackLocks {
        self.0.clone()
    }

    fn leases(&self) -> Leases {
        self.leases_numbered_by(Remembering)
    }
}
