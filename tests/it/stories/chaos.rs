//! Many holders, short leases, and somebody who takes Redis apart while they work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use fencerow::fence::{Fence, FenceError};
use fencerow::lease::{Lease, Leases};
use sqlx::Postgres;

use crate::fence::fixtures::postgres::stage;
use crate::support::{self, TestRedis};

const NAME: &str = "settlement";
const TTL: Duration = Duration::from_millis(120);
const WORKERS: u64 = 6;
const TURNS: u32 = 15;

/// Reads a balance, thinks, and writes one more than it has read: what a stale holder would spoil.
async fn add_one(fence: &Fence<Postgres>, lease: &Lease, think: Duration) -> Result<(), FenceError> {
    let mut tx = fence.begin(lease).await?;
    let balance: i64 =
        sqlx::query_scalar("select balance from account where id = 1").fetch_one(&mut *tx).await?;
    tokio::time::sleep(think).await;
    sqlx::query("update account set balance = $1 where id = 1").bind(balance + 1).execute(&mut *tx).await?;
    sqlx::query("insert into written (token, owner) values ($1, $2)")
        .bind(lease.token().get())
        .bind(lease.owner().get())
        .execute(&mut *tx)
        .await?;
    tx.commit().await
}

/// Takes turns, many of them longer than its lease.
async fn work(leases: Leases, fence: Fence<Postgres>, seed: u64, written: Arc<AtomicI64>) {
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..TURNS {
        let acquire = leases.acquire(NAME, TTL).without_keep_alive().wait(support::PATIENCE);
        let lease = acquire.await.unwrap();
        for _ in 0..random.u32(1..4) {
            tokio::time::sleep(Duration::from_millis(random.u64(0..150))).await;
            match add_one(&fence, &lease, Duration::from_millis(random.u64(0..20))).await {
                Ok(()) => drop(written.fetch_add(1, Ordering::SeqCst)),
                Err(FenceError::Stale { .. } | FenceError::TokenRegressed { .. }) => break,
                // Ended by a newer holder, or too late for it: certainly not stored.
                Err(FenceError::Ended(_) | FenceError::Busy { .. } | FenceError::Database(_)) => {}
                Err(other) => panic!("{other:?}"),
            }
        }
        if random.bool() {
            drop(lease);
        }
    }
}

/// Deletes, lowers and forges what Redis knows, until it is told to stop.
async fn sabotage(redis: &TestRedis, seed: u64, stop: &AtomicBool) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut connection = redis.connection().await;
    let key = |suffix: &str| format!("{}{{{NAME}}}:{suffix}", redis.prefix);
    while !stop.load(Ordering::SeqCst) {
        tokio::time::sleep(Duration::from_millis(random.u64(20..120))).await;
        let (lock, token, run) = (key("lock"), key("token"), key("run"));
        let command: &[&str] = match random.u8(0..5) {
            // The lock alone, as if it had run out early.
            0 | 1 => &["DEL", &lock],
            // A flush.
            2 => &["DEL", &lock, &token, &run],
            // Another server's run.
            3 => &["SET", &run, "another"],
            // A counter lowered by hand, within the run.
            _ => &["SET", &token, "1"],
        };
        let () = redis::cmd(command[0]).arg(&command[1..]).query_async(&mut connection).await.unwrap();
    }
}

/// Whatever happens to the lock service: writes are never lost, and the tokens that commit never go
/// back nor change their owner.
#[tokio::test]
async fn while_redis_is_taken_apart_no_write_is_lost_and_no_token_commits_after_a_newer_one() {
    let (stage, redis) = (stage().await, support::redis().await);
    sqlx::raw_sql("create table written (n bigint generated always as identity, token bigint, owner uuid)")
        .execute(&stage.pool)
        .await
        .unwrap();
    let fence = stage.fence.clone().with_patience(Duration::from_millis(100)).unwrap();
    let leases = Leases::new(redis.locks().await, fence.clone());
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let (written, stop) = (Arc::new(AtomicI64::new(0)), AtomicBool::new(false));
    let workers = async {
        let mut workers = tokio::task::JoinSet::new();
        for worker in 0..WORKERS {
            workers.spawn(work(leases.clone(), fence.clone(), seed ^ worker, written.clone()));
        }
        workers.join_all().await;
        stop.store(true, Ordering::SeqCst);
    };
    tokio::join!(workers, sabotage(&redis, seed ^ WORKERS, &stop));

    let balance: i64 = sqlx::query_scalar("select balance - 1000 from account where id = 1")
        .fetch_one(&stage.pool)
        .await
        .unwrap();
    assert_eq!(balance, written.load(Ordering::SeqCst));
    let rows: Vec<(i64, uuid::Uuid)> =
        sqlx::query_as("select token, owner from written order by n").fetch_all(&stage.pool).await.unwrap();
    assert_eq!(i64::try_from(rows.len()).unwrap(), balance);
    for pair in rows.windows(2) {
        let ((before, first), (after, second)) = (pair[0], pair[1]);
        assert!(
            before < after || (before == after && first == second),
            "{before} {first}, then {after} {second}"
        );
    }
    // It was not all refusals, and it was not all one holder.
    let owners: std::collections::HashSet<_> = rows.iter().map(|(_, owner)| owner).collect();
    assert!(balance > 20 && owners.len() > 10, "{balance} writes by {} holders", owners.len());
}
