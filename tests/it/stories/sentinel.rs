//! Sentinel gives a primary up while leases are held.

use std::time::{Duration, Instant};

use fencerow::CounterOnly;
use fencerow::lease::{Leases, LockService as _};
use redis::Client;

use super::failover::{NAME, write};
use crate::fence::fixtures::postgres::stage;
use crate::support::{Node, eventually, sentinels};

const LONG: Duration = Duration::from_secs(60);

/// Acquires new resources until it succeeds with one whose lock is on `node`.
async fn works_on(leases: &Leases, node: &Node, prefix: &str) {
    let began = Instant::now();
    let mut number = 0;
    eventually("leases are granted by the new primary", async || {
        number += 1;
        let name = format!("try-{number}");
        let lease = leases.acquire(&name, LONG).without_keep_alive().await.ok()?;
        let is_there = node.try_ask::<bool>(&["EXISTS", &format!("{prefix}{{{name}}}:lock")]).await;
        let is_there = is_there.unwrap_or(false);
        // What the old one granted, the new one does not know.
        let released = lease.release().await;
        assert!(released.is_ok() || !is_there, "{released:?}");
        is_there.then_some(())
    })
    .await;
    println!("granted {:?} after the promotion", began.elapsed());
}

/// A03
#[tokio::test]
async fn after_a_failover_under_a_held_lease_the_same_process_goes_on_in_a_new_epoch() {
    let (stage, servers) = tokio::join!(stage(), sentinels());
    let locks = servers.locks("").await;
    let leases = Leases::new(locks.clone(), stage.fence.clone());
    let held = leases.acquire(NAME, LONG).without_keep_alive().await.unwrap();
    write(&stage.fence, &held).await.unwrap();
    let old = held.grant();
    eventually("the replica has the lock", async || {
        let key = format!("{}{{{NAME}}}:run", servers.prefix);
        servers.replica.ask::<bool>(&["EXISTS", &key]).await.then_some(())
    })
    .await;

    servers.primary.server.container.pause().await.unwrap();
    servers.promoted().await;
    works_on(&leases, &servers.replica, &servers.prefix).await;

    // The lock came along, and is still its holder's alone.
    let holder = locks.holder(old.resource()).await.unwrap().unwrap();
    assert_eq!(holder.owner, old.owner());
    held.release().await.unwrap();
    let new = leases.acquire(NAME, LONG).without_keep_alive().await.unwrap();
    assert_eq!((new.token().epoch(), new.token().sequence()), (old.token().epoch() + 1, 0));
    write(&stage.fence, &new).await.unwrap();
    assert!(write(&stage.fence, &old).await.unwrap_err().is_stale());
    servers.primary.server.container.unpause().await.unwrap();
}

/// The sentinels and the replica cannot reach it; its clients can.
#[tokio::test]
async fn a_primary_that_was_deposed_without_knowing_it_is_left_although_it_answers() {
    let servers = sentinels().await;
    for node in [&servers.primary, &servers.replica] {
        let () = node.ask(&["ACL", "SETUSER", "worker", "on", ">secret", "~*", "&*", "+@all"]).await;
    }
    let leases = Leases::new(servers.locks("worker:secret@").await, CounterOnly);
    leases.acquire("a", LONG).await.unwrap().release().await.unwrap();

    let () = servers.primary.ask(&["ACL", "SETUSER", "default", "-@all"]).await;
    servers.promoted().await;
    works_on(&leases, &servers.replica, &servers.prefix).await;

    let worker = Client::open(format!("redis://worker:secret@{}/", servers.primary.address)).unwrap();
    let mut connection = worker.get_multiplexed_async_connection().await.unwrap();
    let role: String = redis::cmd("INFO").arg("replication").query_async(&mut connection).await.unwrap();
    assert!(role.contains("role:master"), "it was told: {role}");
}
