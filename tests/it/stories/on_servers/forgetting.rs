//! A lock service that forgets, and a fence that does not.

use std::sync::Arc;
use std::time::Duration;

use fencerow::fence::{Fence, FenceError};
use fencerow::lease::{Lease, LeaseError, Lost};
use fencerow::{FencingToken, Group, OwnerId, Renumber, RenumberError, Resource};
use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use super::{Db, World, world};
use crate::support::eventually;

const LONG: Duration = Duration::from_secs(60);
const NAME: &str = "settlement";

async fn acquire(world: &World) -> Lease {
    world.leases.acquire(NAME, LONG).without_keep_alive().await.unwrap()
}

async fn write(fence: &Fence<Db>, lease: &Lease) -> Result<(), FenceError> {
    let mut tx = fence.begin(lease).await?;
    sqlx::query("insert into entry (payout, amount) values (1, 1)").execute(&mut *tx).await?;
    tx.commit().await
}

/// A03
#[tokio::test]
async fn after_a_flush_tokens_go_on_in_a_new_epoch_and_no_stale_write_is_accepted() {
    let world = world().await;
    let old = acquire(&world).await;
    write(&world.stage.fence, &old).await.unwrap();
    world.forget().await;

    let new = acquire(&world).await;
    assert_eq!((new.token().epoch(), new.token().sequence()), (old.token().epoch() + 1, 0));
    // Refused already, before the new holder has written anything.
    assert!(write(&world.stage.fence, &old).await.unwrap_err().is_stale());
    write(&world.stage.fence, &new).await.unwrap();
    new.release().await.unwrap();
    let next = acquire(&world).await;
    assert_eq!((next.token().epoch(), next.token().sequence()), (old.token().epoch() + 1, 1));
    next.release().await.unwrap();
}

/// A03
#[tokio::test]
async fn a_counter_lowered_by_hand_is_refused_as_regressed_and_healed_at_the_next_grant() {
    let world = world().await;
    for _ in 0..5 {
        acquire(&world).await.release().await.unwrap();
    }
    let five = acquire(&world).await;
    write(&world.stage.fence, &five).await.unwrap();
    let seen = five.token();
    five.release().await.unwrap();
    world.lower(3).await;

    let low = acquire(&world).await;
    let error = write(&world.stage.fence, &low).await.unwrap_err();
    assert_eq!(error.group(), Group::CounterRegressed);
    let FenceError::TokenRegressed { offered, seen: told, .. } = error else { panic!("{error:?}") };
    assert_eq!((offered.get(), told), (4, seen));
    // The term is over: it is told so, and a second try is an everyday refusal.
    assert_eq!(low.lost().await, Lost::Regressed);
    assert!(write(&world.stage.fence, &low).await.unwrap_err().is_stale());
    let error = low.release().await.unwrap_err();
    assert!(matches!(error, LeaseError::Lost { reason: Lost::Regressed, .. }), "{error:?}");

    let healed = acquire(&world).await;
    assert_eq!(healed.token().epoch(), seen.epoch() + 1);
    write(&world.stage.fence, &healed).await.unwrap();
    healed.release().await.unwrap();
}

/// A03: the counter gives the very number that another holder has raised the fence by.
#[tokio::test]
async fn an_equal_token_of_another_owner_is_refused_as_regressed() {
    let world = world().await;
    acquire(&world).await.release().await.unwrap();
    let second = acquire(&world).await;
    write(&world.stage.fence, &second).await.unwrap();
    world.take_away().await;
    world.lower(second.token().get() - 1).await;
    let third = acquire(&world).await;
    assert_eq!(third.token(), second.token());
    let error = write(&world.stage.fence, &third).await.unwrap_err();
    assert!(
        matches!(error, FenceError::TokenRegressed { offered, seen, .. } if offered == seen),
        "{error:?}"
    );
    // Equal tokens belong to whoever raised the fence with them first.
    write(&world.stage.fence, &second).await.unwrap();
}

#[tokio::test]
async fn a_token_superseded_in_the_everyday_way_is_stale_and_not_regressed() {
    let world = world().await;
    let old = acquire(&world).await;
    write(&world.stage.fence, &old).await.unwrap();
    world.take_away().await;
    let new = acquire(&world).await;
    write(&world.stage.fence, &new).await.unwrap();
    let error = write(&world.stage.fence, &old).await.unwrap_err();
    assert_eq!(error.group(), Group::Superseded);
    assert!(error.is_stale(), "{error:?}");
    // The successor's lock is untouched by the sleeper's question.
    assert!(world.leases.try_acquire(NAME, LONG).await.unwrap().is_none());
    new.release().await.unwrap();
}

/// A fence that takes its time to number.
struct Slow {
    fence: Fence<Db>,
    numbering: Arc<Notify>,
    go_on: Arc<Notify>,
}

impl Renumber for Slow {
    fn renumber<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        counter: Option<FencingToken>,
        within: Duration,
    ) -> BoxFuture<'a, Result<FencingToken, RenumberError>> {
        Box::pin(async move {
            self.numbering.notify_one();
            self.go_on.notified().await;
            self.fence.renumber(resource, owner, counter, within).await
        })
    }
}

#[tokio::test]
async fn a_holder_whose_lock_ran_out_between_grant_and_seed_gets_nothing() {
    let world = world().await;
    let (numbering, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let slow = Slow { fence: world.stage.fence.clone(), numbering: numbering.clone(), go_on: go_on.clone() };
    let slow = world.leases_numbered_by(slow);
    let late = tokio::spawn(async move { slow.acquire(NAME, LONG).await.map(|lease| lease.token()) });
    numbering.notified().await;
    // Its lock runs out; another acquires, and is numbered and seeded.
    world.take_away().await;
    let other = acquire(&world).await;
    write(&world.stage.fence, &other).await.unwrap();
    go_on.notify_one();
    let error = late.await.unwrap().unwrap_err();
    assert!(matches!(error, LeaseError::Lost { .. }), "{error:?}");

    // Its number was above the other's, and has superseded it: the other's term ends as a counter
    // that went back, and the next grant is above both.
    let error = write(&world.stage.fence, &other).await.unwrap_err();
    assert_eq!(error.group(), Group::CounterRegressed);
    let next = acquire(&world).await;
    write(&world.stage.fence, &next).await.unwrap();
    next.release().await.unwrap();
}

/// A keep-alive that took the lock again after a flush would fence out its rightful successor.
#[tokio::test]
async fn a_lease_whose_lock_vanished_is_lost_and_not_taken_again() {
    let world = world().await;
    let lease = world.leases.acquire(NAME, Duration::from_secs(3)).wait(LONG).await.unwrap();
    world.forget().await;
    assert_eq!(lease.lost().await, Lost::Taken);
    assert!(world.leases.holder(NAME).await.unwrap().is_none());
}

#[tokio::test]
async fn concurrent_healers_give_the_resource_to_one_of_them_at_a_time() {
    let world = world().await;
    let first = acquire(&world).await;
    write(&world.stage.fence, &first).await.unwrap();
    world.forget().await;
    let mut healers = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (leases, fence) = (world.leases.clone(), world.stage.fence.clone());
        healers.spawn(async move {
            let lease = leases.acquire(NAME, LONG).wait(LONG).await.unwrap();
            write(&fence, &lease).await.unwrap();
            let token = lease.token();
            lease.release().await.unwrap();
            token
        });
    }
    let mut tokens = healers.join_all().await;
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), 8);
    assert!(tokens.iter().all(|token| token.epoch() == first.token().epoch() + 1));
    assert!(write(&world.stage.fence, &first).await.unwrap_err().is_stale());
}

#[tokio::test]
async fn a_database_that_cannot_number_gives_the_lock_back() {
    let world = world().await;
    world.stage.pool.close().await;
    let error = world.leases.acquire(NAME, LONG).await.unwrap_err();
    assert!(matches!(error, LeaseError::Renumber { .. }), "{error:?}");
    assert_eq!(error.group(), Group::Unavailable);
    eventually("the lock is free", async || world.leases.holder(NAME).await.unwrap().is_none().then_some(()))
        .await;
}
