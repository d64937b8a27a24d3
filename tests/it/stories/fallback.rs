//! Redis is away from some processes, or from all, and the database keeps the locks instead.

use std::time::Duration;

use fencerow::fence::Fence;
use fencerow::lease::{FallbackLocks, Lease, LeaseError, Leases, LockService as _, PgLocks, RedisLocks};
use fencerow::{Credential, Group, Invalid, Resource};
use sqlx::Postgres;

use super::failover::write;
use crate::fence::fixtures::postgres::{Stage, stage};
use crate::support::proxy::Proxy;
use crate::support::{self, TestRedis, eventually};

const LONG: Duration = Duration::from_secs(60);
const NAME: &str = "settlement";

/// Two processes: one that reaches Redis whatever happens, and one behind a proxy. Both reach Postgres.
struct World {
    stage: Stage,
    redis: TestRedis,
    proxy: Proxy,
    near: Process,
    far: Process,
}

struct Process {
    locks: FallbackLocks,
    leases: Leases,
}

impl Process {
    async fn start(primary: RedisLocks, stage: &Stage) -> Self {
        let secondary = PgLocks::connect(&stage.database.url).await.unwrap();
        let locks = FallbackLocks::new(primary, secondary);
        Self { leases: Leases::new(locks.clone(), stage.fence.clone()), locks }
    }

    async fn acquire(&self) -> Lease {
        self.leases.acquire(NAME, LONG).await.unwrap()
    }
}

async fn world() -> World {
    let (stage, redis) = (stage().await, support::redis().await);
    let proxy = Proxy::to(redis.address()).await;
    let near = Process::start(redis.locks().await, &stage).await;
    let far = Process::start(redis.locks_at(proxy.address()).await, &stage).await;
    World { stage, redis, proxy, near, far }
}

fn resource() -> Resource {
    Resource::new(NAME).unwrap()
}

/// Who holds it in Redis, whatever the secondary says.
async fn in_redis(redis: &TestRedis) -> bool {
    redis.locks().await.holder(&resource()).await.unwrap().is_some()
}

async fn is_refused(fence: &Fence<Postgres>, credential: &impl Credential) -> Group {
    write(fence, credential).await.unwrap_err().group()
}

#[tokio::test]
async fn while_the_primary_answers_it_alone_is_asked() {
    let World { stage, redis, near, .. } = world().await;
    let first = near.acquire().await;
    first.release().await.unwrap();
    // Where there is a number, the secondary is not asked at all.
    stage.pool.close().await;
    sqlx::query("drop table fencerow.lease cascade").execute(&stage.database.pool().await).await.unwrap();
    let second = near.acquire().await;
    assert!(in_redis(&redis).await);
    second.release().await.unwrap();
}

#[tokio::test]
async fn when_the_primary_is_away_the_secondary_grants_in_an_epoch_of_its_own() {
    let World { stage, mut proxy, far, .. } = world().await;
    let before = far.acquire().await;
    write(&stage.fence, &before).await.unwrap();
    // Issued by the primary and never used: the fence has not seen its number.
    before.release().await.unwrap();
    let sleeper = far.acquire().await;
    let grant = sleeper.grant();
    sleeper.release().await.unwrap();

    proxy.refuse().await;
    let after = far.acquire().await;
    assert_eq!((after.token().epoch(), after.token().sequence()), (grant.token().epoch() + 1, 0));
    assert_eq!(is_refused(&stage.fence, &grant).await, Group::Superseded);
    write(&stage.fence, &after).await.unwrap();
    assert!(far.leases.try_acquire(NAME, LONG).await.unwrap().is_none());
    after.release().await.unwrap();
    let next = far.acquire().await;
    assert_eq!((next.token().epoch(), next.token().sequence()), (grant.token().epoch() + 1, 1));
    next.release().await.unwrap();
}

/// One process is cut off from Redis, and the other is not.
#[tokio::test]
async fn two_who_see_different_services_do_not_take_it_from_each_other_for_ever() {
    let World { stage, redis, mut proxy, near, far } = world().await;
    let first = near.acquire().await;
    write(&stage.fence, &first).await.unwrap();
    proxy.refuse().await;
    // It takes over from whoever the primary thinks holds it.
    let moved = far.acquire().await;
    let epoch = moved.token().epoch();
    write(&stage.fence, &moved).await.unwrap();
    assert_eq!(is_refused(&stage.fence, &first).await, Group::CounterRegressed);

    // That was the only time: now the other is told, and waits.
    let error = near.leases.acquire(NAME, LONG).await.unwrap_err();
    assert!(matches!(error, LeaseError::Held { .. }), "{error:?}");
    write(&stage.fence, &moved).await.unwrap();
    moved.release().await.unwrap();
    eventually("Redis is left alone", async || (!in_redis(&redis).await).then_some(())).await;
    let mut last = None;
    for _ in 0..3 {
        for process in [&near, &far] {
            let lease = process.acquire().await;
            assert_eq!(lease.token().epoch(), epoch, "nobody numbers anew");
            assert!(Some(lease.token()) > last && !in_redis(&redis).await);
            last = Some(lease.token());
            write(&stage.fence, &lease).await.unwrap();
            lease.release().await.unwrap();
        }
    }
    // One that is new here, and reaches Redis, finds out as well.
    let new = Process::start(redis.locks().await, &stage).await;
    let lease = new.acquire().await;
    assert_eq!(lease.token().epoch(), epoch);
    write(&stage.fence, &lease).await.unwrap();
    lease.release().await.unwrap();
}

#[tokio::test]
async fn each_change_of_service_numbers_anew_and_what_was_issued_before_is_refused() {
    let World { stage, redis, mut proxy, near, far } = world().await;
    let mut last: Option<fencerow::Grant> = None;
    for round in 0..5 {
        let lease = far.acquire().await;
        if let Some(last) = &last {
            assert_eq!(lease.token().epoch(), last.token().epoch() + 1);
            assert_eq!(is_refused(&stage.fence, last).await, Group::Superseded);
        }
        assert_eq!(in_redis(&redis).await, round % 2 == 0);
        write(&stage.fence, &lease).await.unwrap();
        last = Some(lease.grant());
        if round % 2 == 0 {
            lease.release().await.unwrap();
            proxy.refuse().await;
        } else {
            let error = near.locks.hand_back(&resource()).await.unwrap_err();
            assert!(matches!(error, LeaseError::Held { .. }), "{error:?}");
            lease.release().await.unwrap();
            proxy.accept().await;
            eventually("its locks are free", async || near.locks.hand_back(&resource()).await.ok()).await;
            eventually("Redis answers it again", async || {
                far.leases.acquire("another", LONG).await.unwrap().release().await.unwrap();
                let another = Resource::new("another").unwrap();
                let lease = far.leases.acquire(&another, LONG).await.unwrap();
                let back = redis.locks().await.holder(&another).await.unwrap().is_some();
                lease.release().await.unwrap();
                if !back {
                    let _ = near.locks.hand_back(&another).await;
                }
                back.then_some(())
            })
            .await;
        }
    }
}

#[tokio::test]
async fn a_primary_that_hangs_is_given_up_and_what_it_grants_late_is_freed() {
    let World { stage, redis, proxy, far, .. } = world().await;
    let first = far.acquire().await;
    let epoch = first.token().epoch();
    first.release().await.unwrap();
    proxy.hang();
    let lease = far.acquire().await;
    assert_eq!(lease.token().epoch(), epoch + 1);
    proxy.pass();
    write(&stage.fence, &lease).await.unwrap();
    eventually("the late grant is freed", async || {
        let token: i64 = redis::cmd("GET")
            .arg(format!("{}{{{NAME}}}:token", redis.prefix))
            .query_async(&mut redis.connection().await)
            .await
            .unwrap();
        (token == 2 && !in_redis(&redis).await).then_some(())
    })
    .await;
    lease.release().await.unwrap();
}

#[tokio::test]
async fn with_both_away_nothing_is_granted() {
    let World { stage, mut proxy, .. } = world().await;
    let secondary = Proxy::to(stage.database.address()).await;
    let mut secondary = secondary;
    let locks = FallbackLocks::new(
        RedisLocks::from_client(redis::Client::open(format!("redis://{}/", proxy.address())).unwrap()),
        PgLocks::connect(&stage.database.url_at(secondary.address())).await.unwrap(),
    );
    proxy.refuse().await;
    secondary.refuse().await;
    let leases = Leases::new(locks.clone(), stage.fence.clone());
    let error = leases.acquire(NAME, Duration::from_secs(1)).await.unwrap_err();
    assert_eq!(error.group(), Group::Unavailable, "{error:?}");
    let error = locks.hand_back(&resource()).await.unwrap_err();
    assert_eq!(error.group(), Group::Unavailable, "{error:?}");
}

#[tokio::test]
async fn falling_back_is_refused_where_there_is_no_fence() {
    let World { near, .. } = world().await;
    let error = Leases::without_fence(near.locks.clone()).acquire(NAME, LONG).await.unwrap_err();
    assert!(matches!(error, LeaseError::Invalid(Invalid::Option { .. })), "{error:?}");
    assert!(matches!(near.locks.with_patience(Duration::ZERO), Err(Invalid::Option { .. })));
}
