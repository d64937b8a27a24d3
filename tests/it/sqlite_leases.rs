//! What only an SQLite file can do to a lease.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use fencerow::lease::{
    Attempt, LeaseError, Leases, LockService as _, Origin, Request, SqliteLocks, Standing,
};
use fencerow::{FencingToken, Invalid, OwnerId, Resource};
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _};

use crate::support::child::{self, Child};

const TTL: Duration = Duration::from_secs(60);

fn request(name: &str) -> Request {
    let resource = Resource::new(name).unwrap();
    Request::new(resource, OwnerId::random(), TTL.try_into().unwrap(), Origin::here("test"))
}

/// A connection of the test's own to the file of leases.
async fn open_leases(database: &Path) -> SqliteConnection {
    let mut file = database.as_os_str().to_owned();
    file.push("-leases");
    SqliteConnection::connect_with(&SqliteConnectOptions::new().filename(file)).await.unwrap()
}

const GRANTS: usize = 20;

/// In a child: opens the file when it is told to, takes the lease so many times, and says each token.
pub(crate) async fn contend() {
    child::say("ready");
    let database = child::hear().await;
    let leases = Leases::without_fence(SqliteLocks::beside(&database).await.unwrap());
    for _ in 0..GRANTS {
        let lease = leases.acquire("a", TTL).wait(TTL).await.unwrap();
        child::say(lease.token());
        lease.release().await.unwrap();
    }
}

#[tokio::test]
async fn processes_that_start_at_once_share_one_file_and_count_together() {
    let directory = tempfile::tempdir().unwrap();
    let database = directory.path().join("bank.db");
    let mut children: Vec<_> = (0..6).map(|_| Child::start("contend", [])).collect();
    for child in &mut children {
        assert_eq!(child.hear().await, "ready");
    }
    for child in &mut children {
        child.tell(database.display()).await;
    }
    let mut seen = BTreeSet::new();
    for child in &mut children {
        let mut last = 0;
        for _ in 0..GRANTS {
            let token: i64 = child.hear().await.parse().unwrap();
            assert!(token > last, "{token} after {last}");
            last = token;
            assert!(seen.insert(token), "{token} twice");
        }
    }
    assert_eq!(seen.last(), Some(&i64::try_from(seen.len()).unwrap()));
}

/// In a child: takes the lease for so many milliseconds, and says the token, and when it is lost.
pub(crate) async fn hold() {
    let leases = Leases::without_fence(SqliteLocks::beside(child::hear().await).await.unwrap());
    let ttl = Duration::from_millis(child::hear().await.parse().unwrap());
    let lease = leases.acquire("a", ttl).wait(TTL).await.unwrap();
    child::say(lease.token());
    let lost = lease.lost().await;
    child::say(format_args!("{lost:?}, {:?} left", lease.remaining()));
    child::say(lease.release().await.is_err());
}

async fn hold_in_a_child(database: &Path, ttl: Duration) -> (Child, FencingToken) {
    let mut child = Child::start("hold", []);
    child.tell(database.display()).await;
    child.tell(ttl.as_millis()).await;
    let token = child.hear().await.parse().unwrap();
    (child, token)
}

#[tokio::test]
async fn a_lease_of_a_killed_process_is_held_until_it_runs_out() {
    let directory = tempfile::tempdir().unwrap();
    let database = directory.path().join("bank.db");
    let leases = Leases::without_fence(SqliteLocks::beside(&database).await.unwrap());
    let ttl = Duration::from_secs(1);
    let (mut child, token) = hold_in_a_child(&database, ttl).await;
    child.kill().await;
    let holder = leases.holder("a").await.unwrap().expect("it is held on");
    assert!(holder.remaining <= Some(ttl));
    let next = leases.acquire("a", TTL).wait(TTL).await.unwrap();
    assert!(next.token() > token);
    next.release().await.unwrap();
}

/// A08
#[tokio::test]
async fn a_process_that_was_frozen_past_its_lease_learns_of_it_when_it_wakes() {
    let directory = tempfile::tempdir().unwrap();
    let database = directory.path().join("bank.db");
    let leases = Leases::without_fence(SqliteLocks::beside(&database).await.unwrap());
    let (mut child, token) = hold_in_a_child(&database, Duration::from_secs(1)).await;
    child.freeze();
    let next = leases.acquire("a", TTL).wait(TTL).await.unwrap();
    assert!(next.token() > token);
    child.wake();
    assert_eq!(child.hear().await, "Expired, 0ns left");
    assert_eq!(child.hear().await, "true", "its release is none");
    assert_eq!(leases.holder("a").await.unwrap().map(|holder| holder.owner), Some(next.owner()));
    next.release().await.unwrap();
}

#[tokio::test]
async fn a_lease_from_before_a_reboot_has_run_out() {
    let directory = tempfile::tempdir().unwrap();
    let database = directory.path().join("bank.db");
    let locks = SqliteLocks::beside(&database).await.unwrap();
    let mut file = open_leases(&database).await;
    // Another boot; and, where boots have no ids, more left than it was ever given.
    for (name, reboot) in [("a", "boot = 'another'"), ("b", "ttl_ms = 1")] {
        let before = request(name);
        locks.acquire(&before).await.unwrap();
        let seeded = locks.seed(&before.resource, before.owner, FencingToken::FIRST).await.unwrap();
        assert_eq!(seeded, Standing::Ours);
        let update = format!("update lease set {reboot} where resource = '{name}'");
        file.execute(AssertSqlSafe(update)).await.unwrap();
        assert_eq!(locks.holder(&before.resource).await.unwrap(), None, "{name}");
        assert_eq!(locks.renew(&before.resource, before.owner, before.ttl).await.unwrap(), Standing::NotOurs);
        let next = locks.acquire(&request(name)).await.unwrap();
        assert_eq!(next, Attempt::Granted(FencingToken::new(2).unwrap()), "{name}");
    }
}

#[tokio::test]
async fn a_writer_that_does_not_end_makes_the_file_unavailable() {
    let directory = tempfile::tempdir().unwrap();
    let database = directory.path().join("bank.db");
    let locks = SqliteLocks::beside(&database).await.unwrap();
    let first = request("a");
    locks.acquire(&first).await.unwrap();
    let mut stuck = open_leases(&database).await;
    stuck.execute("begin immediate").await.unwrap();
    let error = locks.renew(&first.resource, first.owner, first.ttl).await.unwrap_err();
    assert!(matches!(error, LeaseError::Unavailable(_)), "{error:?}");
    // Whoever only asks does not wait for it.
    assert!(matches!(locks.acquire(&request("a")).await.unwrap(), Attempt::Held { .. }));
    assert_eq!(locks.holder(&first.resource).await.unwrap().unwrap().owner, first.owner);
    stuck.execute("rollback").await.unwrap();
    assert_eq!(locks.renew(&first.resource, first.owner, first.ttl).await.unwrap(), Standing::Ours);
}

#[tokio::test]
async fn a_counter_at_its_end_is_refused_and_leaves_no_lock() {
    let directory = tempfile::tempdir().unwrap();
    let locks = SqliteLocks::beside(directory.path().join("bank.db")).await.unwrap();
    let first = request("a");
    locks.acquire(&first).await.unwrap();
    let last = FencingToken::new(i64::MAX).unwrap();
    assert_eq!(locks.seed(&first.resource, first.owner, last).await.unwrap(), Standing::Ours);
    locks.release(&first.resource, first.owner).await.unwrap();
    let error = locks.acquire(&request("a")).await.unwrap_err();
    assert!(matches!(error, LeaseError::Refused { .. }), "{error:?}");
    assert_eq!(locks.holder(&first.resource).await.unwrap(), None);
}

#[tokio::test]
async fn every_way_to_name_the_database_leads_to_the_same_leases() {
    let directory = tempfile::tempdir().unwrap();
    let (real, link) = (directory.path().join("bank.db"), directory.path().join("link.db"));
    std::fs::write(&real, []).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    let dotted = directory.path().join("..").join(directory.path().file_name().unwrap()).join("bank.db");
    let lease =
        Leases::without_fence(SqliteLocks::beside(&real).await.unwrap()).acquire("a", TTL).await.unwrap();
    for path in [link, dotted] {
        let others = Leases::without_fence(SqliteLocks::beside(&path).await.unwrap());
        assert!(others.try_acquire("a", TTL).await.unwrap().is_none(), "{path:?}");
    }
    lease.release().await.unwrap();
    assert!(std::fs::read(&real).unwrap().is_empty(), "the database itself is not touched");
}

#[tokio::test]
async fn what_has_no_place_beside_it_is_refused() {
    for path in ["", ":memory:", "sqlite::memory:", "sqlite://bank.db", "file:bank.db?mode=memory", "/", ".."]
    {
        let error = SqliteLocks::beside(path).await.unwrap_err();
        assert!(matches!(error, LeaseError::Invalid(Invalid::Option { .. })), "{path:?}: {error:?}");
    }
    let error = SqliteLocks::beside("/nowhere/at/all/bank.db").await.unwrap_err();
    assert!(matches!(error, LeaseError::Unavailable(_)), "{error:?}");
}
