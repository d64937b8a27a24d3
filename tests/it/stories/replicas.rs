//! Grants that count once replicas have them.

use std::time::Duration;

use fencerow::lease::{LeaseError, Leases, RedisLocks};
use fencerow::{CounterOnly, Group};

use crate::support::{Node, cluster, eventually, primary_and_replica};

const LONG: Duration = Duration::from_secs(60);
/// For replicas that answer: as long as may be, on a slow machine.
const ENOUGH: Duration = Duration::from_secs(2);
/// For those that do not.
const BRIEF: Duration = Duration::from_millis(50);

async fn leases(primary: &Node, within: Duration) -> Leases {
    let locks = RedisLocks::connect(&primary.url()).await.unwrap();
    Leases::new(locks.with_replicas(1, within).unwrap(), CounterOnly)
}

fn uncertain(error: &LeaseError) -> (u32, u32) {
    assert_eq!(error.group(), Group::Unavailable);
    match error {
        LeaseError::DurabilityUncertain { confirmed, wanted, .. } => (*confirmed, *wanted),
        other => panic!("{other:?}"),
    }
}

/// The second server is stopped while the connection that asks for it has been used before.
#[tokio::test]
async fn a_grant_counts_only_when_the_replica_has_it() {
    let (primary, replica) = primary_and_replica().await;
    let (patient, brief) = (leases(&primary, ENOUGH).await, leases(&primary, BRIEF).await);
    let lock = |name: &str| format!("fencerow:{{{name}}}:lock");
    for (round, leases) in [&patient, &patient, &brief].into_iter().enumerate() {
        let lease = leases.acquire("a", LONG).without_keep_alive().wait(LONG).await.unwrap();
        // Already, with nothing waited for.
        let holder: Option<String> = replica.ask(&["GET", &lock("a")]).await;
        assert_eq!(&holder.unwrap()[..36], lease.owner().to_string(), "round {round}");
        lease.release().await.unwrap();
    }

    replica.server.container.pause().await.unwrap();
    // A counter that goes on, and one that is seeded.
    for name in ["a", "b"] {
        let error = brief.acquire(name, LONG).await.unwrap_err();
        assert_eq!(uncertain(&error), (0, 1), "{name}");
        eventually("its lock is released", async || {
            (!primary.ask::<bool>(&["EXISTS", &lock(name)]).await).then_some(())
        })
        .await;
    }
    replica.server.container.unpause().await.unwrap();
    patient.acquire("a", LONG).wait(LONG).await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_connection_that_broke_before_the_replicas_answered_speaks_for_nobody() {
    let (primary, replica) = primary_and_replica().await;
    let leases = leases(&primary, ENOUGH).await;
    leases.acquire("a", LONG).wait(LONG).await.unwrap().release().await.unwrap();
    replica.server.container.pause().await.unwrap();
    let asking = tokio::spawn({
        let leases = leases.clone();
        async move { leases.acquire("a", LONG).await.map(drop) }
    });
    eventually("it waits for the replica", async || {
        let clients: String = primary.ask(&["CLIENT", "LIST"]).await;
        let waiting = clients.lines().find(|line| line.contains(" cmd=wait "))?;
        let id = waiting.split(' ').find_map(|field| field.strip_prefix("id="))?;
        primary.try_ask::<i64>(&["CLIENT", "KILL", "ID", id]).await.ok().filter(|killed| *killed == 1)
    })
    .await;
    assert_eq!(uncertain(&asking.await.unwrap().unwrap_err()), (0, 1));
    replica.server.container.unpause().await.unwrap();
}

/// Each primary of the cluster has one replica, and there are more of both.
#[tokio::test]
async fn in_a_cluster_the_replicas_of_the_slot_are_counted() {
    let cluster = cluster().await;
    let one = cluster.locks().await.with_replicas(1, ENOUGH).unwrap();
    let two = cluster.locks().await.with_replicas(2, BRIEF).unwrap();
    let (one, two) = (Leases::new(one, CounterOnly), Leases::new(two, CounterOnly));
    for number in 0..12 {
        let name = format!("replicated-{number}");
        one.acquire(&name, LONG).wait(LONG).await.unwrap().release().await.unwrap();
        let error = two.acquire(&name, LONG).await.unwrap_err();
        let (confirmed, wanted) = uncertain(&error);
        assert!(confirmed <= 1 && wanted == 2, "{error}");
    }
}

#[tokio::test]
async fn no_replicas_or_no_time_for_them_is_refused() {
    let client = redis::Client::open("redis://127.0.0.1:1/").unwrap();
    let locks = RedisLocks::from_client(client);
    for (replicas, within) in [(0, ENOUGH), (1, Duration::ZERO), (1, Duration::from_micros(999)), (1, LONG)] {
        assert!(locks.clone().with_replicas(replicas, within).is_err(), "{replicas} {within:?}");
    }
}
