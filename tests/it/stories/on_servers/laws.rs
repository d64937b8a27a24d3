//! What a holder may expect, whatever keeps the locks and whatever keeps the money.

use std::time::Duration;

use fencerow::fence::{Claim, FenceError};
use fencerow::lease::{Lease, LeaseError, Lost};

use super::{Db, Stage, World, world};
use crate::support::child::Child;

const TTL: Duration = Duration::from_millis(600);
const LONG: Duration = Duration::from_secs(60);
const ENTRY: &str = "insert into entry (payout, amount) values (1, 100)";

async fn entries(stage: &Stage) -> i64 {
    sqlx::query_scalar("select count(*) from entry").fetch_one(&stage.pool).await.unwrap()
}

/// One payout under a lease, as an application writes it: whether it ran, or was replayed.
async fn settle(stage: &Stage, lease: &Lease, key: &str) -> Result<bool, FenceError> {
    let mut tx = stage.fence.begin(lease).await?;
    let ran = match tx.claim(key, &100).await? {
        Claim::Replayed(()) => false,
        Claim::Fresh(claim) => {
            sqlx::query(ENTRY).execute(&mut *tx).await?;
            claim.record(&mut tx, ()).await?;
            true
        }
    };
    tx.commit().await?;
    Ok(ran)
}

#[tokio::test]
async fn a_lease_its_token_and_a_write_go_together() {
    let World { stage, leases, .. } = world().await;
    let mut last = None;
    for round in 0..3 {
        let lease = leases.acquire("settlement", LONG).await.unwrap();
        assert!(Some(lease.token()) > last);
        last = Some(lease.token());
        assert_eq!(settle(&stage, &lease, "payout-1").await.unwrap(), round == 0);
        lease.release().await.unwrap();
    }
    assert_eq!(entries(&stage).await, 1);
}

/// A24
#[tokio::test]
async fn a_name_goes_the_whole_way_or_is_refused_at_its_beginning() {
    let World { stage, leases, .. } = world().await;
    let long = |bytes: usize| "x".repeat(bytes);
    let names = ["{a}:b", "a{b}c", "{}", "}{", "{{x}}", "a b", "naïve/λ"].map(str::to_owned);
    let names = names.into_iter().chain([64, 255, 256, 300, 512].map(long));
    for (entry, name) in names.enumerate() {
        let lease = leases.acquire(&name, LONG).await.unwrap();
        // Distinct names share neither a counter nor a fence: each begins at 1.
        assert_eq!(lease.token(), fencerow::FencingToken::FIRST, "{name:?}");
        assert!(settle(&stage, &lease, &format!("payout-{entry}")).await.unwrap());
        lease.release().await.unwrap();
    }
    for name in [513, 10_000, 1 << 20].map(long) {
        let error = leases.acquire(&name, LONG).await.unwrap_err();
        assert!(matches!(error, LeaseError::Invalid(fencerow::Invalid::Resource { .. })), "{error:?}");
        assert!(fencerow::Resource::new(&name).is_err());
    }
}

/// The reason for all of this: a holder that is stopped past its lease, in a real process.
#[tokio::test]
async fn a_paused_holder_cannot_write_after_its_successor() {
    let World { stage, leases, directions, .. } = world().await;
    let mut sleeper = holder(&directions);
    let token: i64 = sleeper.hear().await.parse().unwrap();
    sleeper.freeze();

    let successor = leases.acquire("settlement", LONG).wait(LONG).await.unwrap();
    assert!(successor.token().get() > token);
    assert!(settle(&stage, &successor, "payout-1").await.unwrap());

    sleeper.wake();
    sleeper.tell("write").await;
    let seen = successor.token();
    assert_eq!(sleeper.hear().await, format!("stale: offered {token}, seen {seen}"));
    assert_eq!(entries(&stage).await, 1);
    successor.release().await.unwrap();
}

/// Its lease has run out, and nobody has come: the fence has nothing against it.
#[tokio::test]
async fn a_paused_holder_without_a_successor_is_told_that_its_lease_is_lost() {
    let World { stage, directions, .. } = world().await;
    let mut sleeper = holder(&directions);
    sleeper.hear().await;
    sleeper.freeze();
    tokio::time::sleep(TTL * 2).await;
    sleeper.wake();
    sleeper.tell("lost").await;
    assert!(["Expired", "Taken"].contains(&sleeper.hear().await.as_str()));
    sleeper.tell("write").await;
    assert_eq!(sleeper.hear().await, "written");
    assert_eq!(entries(&stage).await, 1);
}

/// A process that acquires `settlement` for [`TTL`], and says its token.
fn holder(directions: &[(&'static str, String)]) -> Child {
    let ttl = TTL.as_millis().to_string();
    let variables = directions.iter().map(|(name, value)| (*name, value.as_str()));
    Child::start("holder", variables.chain([("TTL", ttl.as_str())]))
}

#[tokio::test]
async fn work_that_was_killed_before_its_commit_runs_again_and_after_it_is_replayed() {
    let World { stage, leases, directions, .. } = world().await;
    for (instruction, runs_again) in [("die before commit", true), ("die after commit", false)] {
        let before = entries(&stage).await;
        let mut process = holder(&directions);
        process.hear().await;
        process.tell(instruction).await;
        assert_eq!(process.hear().await, "here");
        process.kill().await;

        let lease = leases.acquire("settlement", LONG).wait(LONG).await.unwrap();
        assert_eq!(settle(&stage, &lease, instruction).await.unwrap(), runs_again);
        assert_eq!(entries(&stage).await, before + 1);
        lease.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_late_release_leaves_the_new_owners_lock_alone() {
    let World { stage, leases, .. } = world().await;
    let old = leases.acquire("settlement", TTL).without_keep_alive().wait(LONG).await.unwrap();
    let new = leases.acquire("settlement", LONG).wait(LONG).await.unwrap();
    let error = old.release().await.unwrap_err();
    assert!(matches!(error, LeaseError::Lost { .. }), "{error:?}");
    assert!(leases.try_acquire("settlement", LONG).await.unwrap().is_none());
    assert!(settle(&stage, &new, "payout-1").await.unwrap());
    new.release().await.unwrap();
}

#[tokio::test]
async fn two_payouts_under_one_lease_both_count() {
    let World { stage, leases, .. } = world().await;
    let lease = leases.acquire("settlement", LONG).await.unwrap();
    assert!(settle(&stage, &lease, "payout-1").await.unwrap());
    assert!(settle(&stage, &lease, "payout-2").await.unwrap());
    assert!(!settle(&stage, &lease, "payout-2").await.unwrap());
    assert_eq!(entries(&stage).await, 2);
    lease.release().await.unwrap();
}

#[tokio::test]
async fn a_grant_can_be_used_by_another_process_of_the_same_work() {
    let World { stage, leases, .. } = world().await;
    let lease = leases.acquire("settlement", LONG).await.unwrap();
    let elsewhere: fencerow::Grant = lease.grant().to_string().parse().unwrap();
    stage.fence.begin(&elsewhere).await.unwrap().commit().await.unwrap();
    assert!(settle(&stage, &lease, "payout-1").await.unwrap());
    lease.release().await.unwrap();

    let next = leases.acquire("settlement", LONG).await.unwrap();
    stage.fence.begin(&next).await.unwrap().commit().await.unwrap();
    assert!(stage.fence.begin(&elsewhere).await.unwrap_err().is_stale());
    next.release().await.unwrap();
}

#[tokio::test]
async fn a_holder_that_lost_its_lease_hears_of_it_while_it_works() {
    let World { stage: _stage, leases, .. } = world().await;
    let lease = leases.acquire("settlement", TTL).without_keep_alive().wait(LONG).await.unwrap();
    let (lost, cancelled) = (lease.lost(), lease.cancellation());
    assert_eq!(lost.await, Lost::Expired);
    assert!(cancelled.is_cancelled());
    assert_eq!(lease.remaining(), Duration::ZERO);
}

/// The type of the database is only named here so that each pair is told apart in failures.
#[test]
fn the_pair_is_what_it_says() {
    assert!(["PostgreSQL", "SQLite"].contains(&<Db as sqlx::Database>::NAME));
}
