//! A Redis that forgets, and a fence that does not.

use std::sync::Arc;
use std::time::Duration;

use fencerow::fence::{Fence, FenceError};
use fencerow::lease::{Lease, LeaseError, Leases, Lost};
use fencerow::{FencingToken, Group, OwnerId, Renumber, RenumberError, Resource};
use futures_util::future::BoxFuture;
use sqlx::Postgres;
use tokio::sync::Notify;

use crate::fence::fixtures::postgres::{Stage, stage};
use crate::support::{self, TestRedis};

const LONG: Duration = Duration::from_secs(60);
const NAME: &str = "settlement";

struct World {
    stage: Stage,
    redis: TestRedis,
    leases: Leases,
}

async fn world() -> World {
    let (stage, redis) = (stage().await, support::redis().await);
    let leases = Leases::new(redis.locks().await, stage.fence.clone());
    World { stage, redis, leases }
}

impl World {
    fn key(&self, suffix: &str) -> String {
        format!("{}{{{NAME}}}:{suffix}", self.redis.prefix)
    }

    async fn redis(&self, command: &[&str]) {
        let mut connection = self.redis.connection().await;
        let () = redis::cmd(command[0]).arg(&command[1..]).query_async(&mut connection).await.unwrap();
    }

    /// Everything of this resource is gone, as after a flush.
    async fn forget(&self) {
        self.redis(&["DEL", &self.key("lock"), &self.key("token"), &self.key("run")]).await;
    }

    async fn acquire(&self) -> Lease {
        self.leases.acquire(NAME, LONG).without_keep_alive().await.unwrap()
    }
}

async fn write(fence: &Fence<Postgres>, lease: &Lease) -> Result<(), FenceError> {
    let mut tx = fence.begin(lease).await?;
    sqlx::query("insert into entry (payout, amount) values (1, 1)").execute(&mut *tx).await?;
    tx.commit().await
}

#[tokio::test]
async fn after_a_flush_tokens_go_on_in_a_new_epoch_and_no_stale_write_is_accepted() {
    let world = world().await;
    let old = world.acquire().await;
    write(&world.stage.fence, &old).await.unwrap();
    world.forget().await;

    let new = world.acquire().await;
    assert_eq!((new.token().epoch(), new.token().sequence()), (old.token().epoch() + 1, 0));
    // Refused already, before the new holder has written anything.
    assert!(write(&world.stage.fence, &old).await.unwrap_err().is_stale());
    write(&world.stage.fence, &new).await.unwrap();
    new.release().await.unwrap();
    let next = world.acquire().await;
    assert_eq!((next.token().epoch(), next.token().sequence()), (old.token().epoch() + 1, 1));
    next.release().await.unwrap();
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

/// The case that "just above the fence" gets wrong: the token was issued, and never shown to the
/// database before the failover.
#[tokio::test]
async fn a_token_issued_and_slept_on_before_a_failover_is_refused_after_it() {
    let world = world().await;
    let first = world.acquire().await;
    write(&world.stage.fence, &first).await.unwrap();
    let seen = first.token();
    first.release().await.unwrap();
    for _ in 0..3 {
        world.acquire().await.release().await.unwrap();
    }
    let slept_on = world.acquire().await;

    // A replica takes over that had not heard of the last grants, and has a run of its own.
    world.redis(&["DEL", &world.key("lock")]).await;
    world.redis(&["SET", &world.key("token"), &seen.to_string()]).await;
    world.redis(&["SET", &world.key("run"), "0123456789abcdef"]).await;

    let new = world.acquire().await;
    assert_eq!(new.token().epoch(), seen.epoch() + 1);
    assert!(write(&world.stage.fence, &slept_on).await.unwrap_err().is_stale());
    write(&world.stage.fence, &new).await.unwrap();
    assert!(write(&world.stage.fence, &slept_on).await.unwrap_err().is_stale());
    new.release().await.unwrap();
}

#[tokio::test]
async fn a_counter_lowered_by_hand_is_refused_as_regressed_and_healed_at_the_next_grant() {
    let world = world().await;
    for _ in 0..5 {
        world.acquire().await.release().await.unwrap();
    }
    let five = world.acquire().await;
    write(&world.stage.fence, &five).await.unwrap();
    let seen = five.token();
    five.release().await.unwrap();
    world.redis(&["SET", &world.key("token"), "3"]).await;

    let low = world.acquire().await;
    let error = write(&world.stage.fence, &low).await.unwrap_err();
    assert_eq!(error.group(), Group::CounterRegressed);
    let FenceError::TokenRegressed { offered, seen: told, .. } = error else { panic!("{error:?}") };
    assert_eq!((offered.get(), told), (4, seen));
    // The term is over: it is told so, and a second try is an everyday refusal.
    assert_eq!(low.lost().await, Lost::Regressed);
    assert!(write(&world.stage.fence, &low).await.unwrap_err().is_stale());
    let error = low.release().await.unwrap_err();
    assert!(matches!(error, LeaseError::Lost { reason: Lost::Regressed, .. }), "{error:?}");

    let healed = world.acquire().await;
    assert_eq!(healed.token().epoch(), seen.epoch() + 1);
    write(&world.stage.fence, &healed).await.unwrap();
    healed.release().await.unwrap();
}

/// The counter gives the very number that another holder has raised the fence by.
#[tokio::test]
async fn an_equal_token_of_another_owner_is_refused_as_regressed() {
    let world = world().await;
    let first = world.acquire().await;
    write(&world.stage.fence, &first).await.unwrap();
    world.redis(&["DEL", &world.key("lock")]).await;
    let one_less = (first.token().get() - 1).to_string();
    world.redis(&["SET", &world.key("token"), &one_less]).await;
    if one_less == "0" {
        // The counter refuses to stand at nothing; the first token of all is given out twice like this.
        world.redis(&["SET", &world.key("token"), "1"]).await;
        let second = world.acquire().await;
        write(&world.stage.fence, &second).await.unwrap();
        world.redis(&["DEL", &world.key("lock")]).await;
        world.redis(&["SET", &world.key("token"), "1"]).await;
        let third = world.acquire().await;
        assert_eq!(third.token(), second.token());
        let error = write(&world.stage.fence, &third).await.unwrap_err();
        assert!(
            matches!(error, FenceError::TokenRegressed { offered, seen, .. } if offered == seen),
            "{error:?}"
        );
        write(&world.stage.fence, &second).await.unwrap();
    }
}

#[tokio::test]
async fn a_token_superseded_in_the_everyday_way_is_stale_and_not_regressed() {
    let world = world().await;
    let old = world.acquire().await;
    write(&world.stage.fence, &old).await.unwrap();
    world.redis(&["DEL", &world.key("lock")]).await;
    let new = world.acquire().await;
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
    fence: Fence<Postgres>,
    numbering: Arc<Notify>,
    go_on: Arc<Notify>,
}

impl Renumber for Slow {
    fn renumber<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        counter: Option<FencingToken>,
    ) -> BoxFuture<'a, Result<FencingToken, RenumberError>> {
        Box::pin(async move {
            self.numbering.notify_one();
            self.go_on.notified().await;
            self.fence.renumber(resource, owner, counter).await
        })
    }
}

#[tokio::test]
async fn a_holder_whose_lock_ran_out_between_grant_and_seed_gets_nothing() {
    let world = world().await;
    let (numbering, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let slow = Slow { fence: world.stage.fence.clone(), numbering: numbering.clone(), go_on: go_on.clone() };
    let slow = Leases::new(world.redis.locks().await, slow);
    let late = tokio::spawn(async move { slow.acquire(NAME, LONG).await.map(|lease| lease.token()) });
    numbering.notified().await;
    // Its lock runs out; another acquires, and is numbered and seeded.
    world.redis(&["DEL", &world.key("lock")]).await;
    let other = world.acquire().await;
    write(&world.stage.fence, &other).await.unwrap();
    go_on.notify_one();
    let error = late.await.unwrap().unwrap_err();
    assert!(matches!(error, LeaseError::Lost { .. }), "{error:?}");

    // Its number was above the other's, and has superseded it: the other's term ends as a counter
    // that went back, and the next grant is above both.
    let error = write(&world.stage.fence, &other).await.unwrap_err();
    assert_eq!(error.group(), Group::CounterRegressed);
    let next = world.acquire().await;
    write(&world.stage.fence, &next).await.unwrap();
    next.release().await.unwrap();
}

/// A keep-alive that took the lock again after a flush would fence out its rightful successor.
#[tokio::test]
async fn a_lease_whose_lock_vanished_is_lost_and_not_taken_again() {
    let world = world().await;
    let lease = world.leases.acquire(NAME, Duration::from_millis(300)).await.unwrap();
    world.forget().await;
    assert_eq!(lease.lost().await, Lost::Taken);
    assert!(world.leases.holder(NAME).await.unwrap().is_none());
}

#[tokio::test]
async fn concurrent_healers_give_the_resource_to_one_of_them_at_a_time() {
    let world = world().await;
    let first = world.acquire().await;
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
    sqlx::query("drop schema fencerow cascade").execute(&world.stage.pool).await.unwrap();
    let error = world.leases.acquire(NAME, LONG).await.unwrap_err();
    assert!(matches!(error, LeaseError::Renumber { .. }), "{error:?}");
    support::eventually("the lock is free", async || {
        world.leases.holder(NAME).await.unwrap().is_none().then_some(())
    })
    .await;
}
