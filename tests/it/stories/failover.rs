//! A Redis that was restarted, demoted or replaced by another.

use std::time::Duration;

use fencerow::Credential;
use fencerow::fence::{Fence, FenceError};
use fencerow::lease::{Lease, Leases, RedisLocks};
use sqlx::Postgres;

use crate::fence::fixtures::postgres::stage;
use crate::support::{self, OwnRedis, eventually};

const LONG: Duration = Duration::from_secs(60);
pub(super) const NAME: &str = "settlement";

pub(super) async fn write(fence: &Fence<Postgres>, lease: &impl Credential) -> Result<(), FenceError> {
    let mut tx = fence.begin(lease).await?;
    sqlx::query("insert into entry (payout, amount) values (1, 1)").execute(&mut *tx).await?;
    tx.commit().await
}

#[tokio::test]
async fn after_a_restart_without_data_tokens_go_on_in_a_new_epoch() {
    let (stage, own) = (stage().await, support::own_redis().await);
    let leases = Leases::new(own.redis.locks().await, stage.fence.clone());
    let old = leases.acquire(NAME, LONG).without_keep_alive().await.unwrap();
    write(&stage.fence, &old).await.unwrap();
    let mut connection = own.redis.connection().await;
    let () = redis::cmd("FLUSHALL").query_async(&mut connection).await.unwrap();
    own.restart().await;

    let new = leases.acquire(NAME, LONG).wait(LONG).await.unwrap();
    assert_eq!(new.token().epoch(), old.token().epoch() + 1);
    assert!(write(&stage.fence, &old).await.unwrap_err().is_stale());
    write(&stage.fence, &new).await.unwrap();
    new.release().await.unwrap();
}

/// A primary and a replica of it, both in sync; leases are taken from the primary.
struct Pair {
    primary: OwnRedis,
    replica: OwnRedis,
}

impl Pair {
    async fn start() -> Self {
        let (primary, replica) = tokio::join!(support::own_redis(), support::own_redis());
        let pair = Self { primary, replica };
        follow(&pair.replica, &pair.primary).await;
        pair
    }

    /// Leases from one of the two, under the same keys.
    async fn leases(&self, server: &OwnRedis, fence: &Fence<Postgres>) -> Leases {
        let locks = RedisLocks::connect(&server.redis.url).await.unwrap();
        Leases::new(locks.with_prefix(&self.primary.redis.prefix).unwrap(), fence.clone())
    }

    /// Waits until both hold the same counter.
    async fn in_step(&self) {
        let key = format!("{}{{{NAME}}}:token", self.primary.redis.prefix);
        eventually("the replica has the counter", async || {
            let here: Option<String> = ask(&self.primary, &["GET", &key]).await;
            let there: Option<String> = ask(&self.replica, &["GET", &key]).await;
            (here.is_some() && here == there).then_some(())
        })
        .await;
    }
}

async fn ask<T: redis::FromRedisValue>(server: &OwnRedis, command: &[&str]) -> T {
    let mut connection = server.redis.connection().await;
    redis::cmd(command[0]).arg(&command[1..]).query_async(&mut connection).await.unwrap()
}

/// Makes one server a replica of another, and waits until it has everything.
async fn follow(replica: &OwnRedis, primary: &OwnRedis) {
    let () = ask(replica, &["REPLICAOF", &primary.inner_address().await, "6379"]).await;
    eventually("the replica is in sync", async || {
        let info: String = ask(replica, &["INFO", "replication"]).await;
        info.contains("master_link_status:up").then_some(())
    })
    .await;
}

async fn promote(replica: &OwnRedis) {
    let () = ask(replica, &["REPLICAOF", "NO", "ONE"]).await;
}

async fn acquire(leases: &Leases) -> Lease {
    leases.acquire(NAME, LONG).without_keep_alive().wait(LONG).await.unwrap()
}

/// The case that "just above the fence" gets wrong: the token was issued, and never shown to the
/// database before the failover.
#[tokio::test]
async fn a_token_issued_and_slept_on_before_a_failover_is_refused_after_it() {
    let (stage, pair) = (stage().await, Pair::start().await);
    let before = pair.leases(&pair.primary, &stage.fence).await;
    let first = acquire(&before).await;
    write(&stage.fence, &first).await.unwrap();
    let epoch = first.token().epoch();
    first.release().await.unwrap();
    pair.in_step().await;

    // The replica is cut off here, and does not hear of the last grants.
    promote(&pair.replica).await;
    for _ in 0..3 {
        acquire(&before).await.release().await.unwrap();
    }
    let lease = acquire(&before).await;
    let slept_on = lease.grant();

    let after = pair.leases(&pair.replica, &stage.fence).await;
    let new = acquire(&after).await;
    assert_eq!((new.token().epoch(), new.token().sequence()), (epoch + 1, 0));
    assert!(write(&stage.fence, &slept_on).await.unwrap_err().is_stale());
    write(&stage.fence, &new).await.unwrap();
    assert!(write(&stage.fence, &slept_on).await.unwrap_err().is_stale());
    // Its own lock service, which nobody else asks any more, still thinks that it is the holder.
    let error = write(&stage.fence, &lease).await.unwrap_err();
    assert!(matches!(error, FenceError::TokenRegressed { .. }), "{error:?}");
    new.release().await.unwrap();
}

/// The process is the same as before, and so is its `run_id`; its history is not.
#[tokio::test]
async fn a_primary_that_was_demoted_and_promoted_again_is_not_trusted_for_what_it_had_forgotten() {
    let (stage, pair) = (stage().await, Pair::start().await);
    let leases = pair.leases(&pair.primary, &stage.fence).await;
    let first = acquire(&leases).await;
    write(&stage.fence, &first).await.unwrap();
    let epoch = first.token().epoch();
    first.release().await.unwrap();
    pair.in_step().await;

    promote(&pair.replica).await;
    for _ in 0..2 {
        acquire(&leases).await.release().await.unwrap();
    }
    let slept_on = acquire(&leases).await;
    follow(&pair.primary, &pair.replica).await;
    promote(&pair.primary).await;

    let new = acquire(&leases).await;
    assert_eq!((new.token().epoch(), new.token().sequence()), (epoch + 1, 0));
    write(&stage.fence, &new).await.unwrap();
    assert!(write(&stage.fence, &slept_on).await.unwrap_err().is_stale());
    new.release().await.unwrap();
}
