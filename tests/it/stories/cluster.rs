//! Leases in a Redis Cluster.

use std::time::Duration;

use fencerow::lease::{Attempt, LeaseError, Leases, LockService as _, Origin, Request, Standing};
use fencerow::{FencingToken, OwnerId, Resource};
use futures_util::future::join_all;

use super::failover::write;
use crate::fence::fixtures::postgres::stage;
use crate::support::cluster;

const LONG: Duration = Duration::from_secs(60);

/// A24
#[tokio::test]
async fn each_name_works_all_the_way_or_is_refused_before_anything_is_written() {
    let (stage, cluster) = tokio::join!(stage(), cluster());
    let leases = Leases::new(cluster.locks().await, stage.fence.clone());
    let long = |length| "x".repeat(length);
    let names = ["{a}:b", "a{b}c", "{}", "}{", "{{x}}", "a b", "naïve/λ"].map(str::to_owned);
    let taken = names.into_iter().chain([64, 255, 256, 300, Resource::MAX_BYTES].map(long));
    let mut held = Vec::new();
    for name in taken {
        let lease = leases.acquire(&name, LONG).without_keep_alive().await.unwrap();
        write(&stage.fence, &lease).await.unwrap();
        // Held until the end: no two names are one.
        held.push(lease);
    }
    for name in [String::new(), " ".into(), "a\0".into(), long(10_000), long(1 << 20)] {
        let error = leases.acquire(&name, LONG).await.unwrap_err();
        assert!(matches!(error, LeaseError::Invalid(_)), "{error:?}");
    }
    let mut slots = std::collections::HashSet::new();
    let (mut keys, pattern) = (0, format!("{}*", cluster.prefix));
    for node in cluster.primaries().await {
        for key in node.ask::<Vec<String>>(&["KEYS", &pattern]).await {
            slots.insert(node.ask::<u16>(&["CLUSTER", "KEYSLOT", &key]).await);
            keys += 1;
        }
    }
    assert_eq!((slots.len(), keys), (held.len(), 3 * held.len()));
    for lease in held {
        lease.release().await.unwrap();
    }
}

/// A22
#[tokio::test]
async fn emptying_the_script_caches_of_all_shards_goes_unnoticed() {
    let cluster = cluster().await;
    let locks = cluster.locks().await;
    let flush = async || {
        join_all(cluster.nodes.iter().map(|node| node.ask::<()>(&["SCRIPT", "FLUSH"]))).await;
    };
    let resource = Resource::new("flushed").unwrap();
    let mut last = None;
    for _ in 0..3 {
        let owner = OwnerId::random();
        let request = Request::new(resource.clone(), owner, LONG.try_into().unwrap(), Origin::here("test"));
        flush().await;
        match (locks.acquire(&request).await.unwrap(), last) {
            (Attempt::Unnumbered { counter: None }, None) => {
                flush().await;
                let seeded = locks.seed(&resource, owner, FencingToken::FIRST).await.unwrap();
                assert_eq!(seeded, Standing::Ours);
                last = Some(FencingToken::FIRST.get());
            }
            (Attempt::Granted(token), Some(before)) => {
                assert_eq!(token.get(), before + 1);
                last = Some(token.get());
            }
            other => panic!("{other:?}"),
        }
        flush().await;
        assert_eq!(locks.renew(&resource, owner, LONG.try_into().unwrap()).await.unwrap(), Standing::Ours);
        flush().await;
        assert_eq!(locks.release(&resource, owner).await.unwrap(), Standing::Ours);
    }
}

#[tokio::test]
async fn a_lock_survives_the_move_of_its_slot_and_tokens_grow_after_it() {
    // No other test's name is in its slot.
    const NAME: &str = "moved from shard to shard";
    let (stage, cluster) = tokio::join!(stage(), cluster());
    let locks = cluster.locks().await;
    let leases = Leases::new(locks.clone(), stage.fence.clone());
    let lease = leases.acquire(NAME, LONG).without_keep_alive().await.unwrap();
    write(&stage.fence, &lease).await.unwrap();
    let old = lease.grant();
    let still_held = async |when: &str| {
        let (resource, owner) = (old.resource(), old.owner());
        let renewed = locks.renew(resource, owner, LONG.try_into().unwrap()).await;
        assert_eq!(renewed.unwrap(), Standing::Ours, "{when}");
        let holder = locks.holder(resource).await.unwrap().unwrap();
        assert_eq!(holder.owner, owner, "{when}");
        assert!(holder.remaining.unwrap() <= LONG, "{when}");
    };

    let keys = ["lock", "token", "run"]
        .map(|suffix| format!("{}{{{}}}:{suffix}", cluster.prefix, NAME.replace(' ', "%20")));
    let (from, to) = cluster.owner_and_another(&keys[0]).await;
    let slot: u16 = from.ask(&["CLUSTER", "KEYSLOT", &keys[0]]).await;
    let slot = slot.to_string();
    let (from_id, to_id): (String, String) =
        (from.ask(&["CLUSTER", "MYID"]).await, to.ask(&["CLUSTER", "MYID"]).await);
    let () = to.ask(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]).await;
    let () = from.ask(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]).await;
    still_held("before its keys are moved").await;
    let (host, port) = to.address.split_once(':').unwrap();
    let mut migrate = vec!["MIGRATE", host, port, "", "0", "30000", "KEYS"];
    migrate.extend(keys.iter().map(String::as_str));
    let () = from.ask(&migrate).await;
    still_held("when its keys are moved, and their slot is not").await;
    for node in [to, from] {
        let () = node.ask(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]).await;
    }
    still_held("when its slot is moved").await;
    assert!(to.ask::<i64>(&["PTTL", &keys[0]]).await > 0);

    lease.release().await.unwrap();
    let new = leases.acquire(NAME, LONG).without_keep_alive().await.unwrap();
    assert_eq!((new.token().epoch(), new.token().sequence()), (old.token().epoch() + 1, 0));
    write(&stage.fence, &new).await.unwrap();
    assert!(write(&stage.fence, &old).await.unwrap_err().is_stale());
    new.release().await.unwrap();
}
