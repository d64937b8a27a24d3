//! What only Postgres can do to a lease.

use std::time::Duration;

use fencerow::fence::Fence;
use fencerow::lease::{Attempt, LeaseError, Leases, LockService as _, Origin, PgLocks, Request, Standing};
use fencerow::{FencingToken, Group, Invalid, OwnerId, Resource};
use sqlx::postgres::{PgConnection, PgPoolOptions};
use sqlx::{Connection as _, Executor as _};

use crate::support::{TestDatabase, postgres};

const TTL: Duration = Duration::from_secs(60);

async fn database() -> TestDatabase {
    let database = postgres().await;
    Fence::new(database.pool().await).migrate().await.unwrap();
    database
}

fn request(name: &str) -> Request {
    let resource = Resource::new(name).unwrap();
    Request::new(resource, OwnerId::random(), TTL.try_into().unwrap(), Origin::here("test"))
}

#[tokio::test]
async fn a_refused_attempt_writes_nothing_and_locks_nothing() {
    let database = database().await;
    let holder = Leases::without_fence(PgLocks::connect(&database.url).await.unwrap());
    let lease = holder.acquire("a", TTL).await.unwrap();

    let mut refused = PgConnection::connect(&database.url).await.unwrap();
    refused.execute("begin").await.unwrap();
    let outcome: String = sqlx::query_scalar(
        "select outcome from fencerow.acquire_lease('a', gen_random_uuid(), 1000, 'host', 1, 'label')",
    )
    .fetch_one(&mut refused)
    .await
    .unwrap();
    assert_eq!(outcome, "held");
    let wrote: Option<String> = sqlx::query_scalar("select pg_current_xact_id_if_assigned()::text")
        .fetch_one(&mut refused)
        .await
        .unwrap();
    assert_eq!(wrote, None);
    // Its transaction is still open; the holder's steps do not wait for it.
    let mut rival = PgConnection::connect(&database.url).await.unwrap();
    rival.execute("select from fencerow.lease where resource = 'a' for update nowait").await.unwrap();
    lease.release().await.unwrap();
}

#[tokio::test]
async fn an_application_needs_no_right_on_the_table() {
    let database = database().await;
    let mut owner = PgConnection::connect(&database.url).await.unwrap();
    let role = format!("app_{}", uuid::Uuid::new_v4().simple());
    let grants = format!(
        "create role {role} login password 'app';
         grant usage on schema fencerow to {role};
         grant execute on all functions in schema fencerow to {role}"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(grants)).execute(&mut owner).await.unwrap();
    let url = database.url.replacen("postgres:fencerow@", &format!("{role}:app@"), 1);

    let leases = Leases::without_fence(PgLocks::connect(&url).await.unwrap());
    let lease = leases.acquire("a", TTL).await.unwrap();
    assert_eq!(leases.holder("a").await.unwrap().unwrap().owner, lease.owner());
    lease.release().await.unwrap();
    let mut app = PgConnection::connect(&url).await.unwrap();
    for forbidden in ["select from fencerow.lease", "delete from fencerow.lease"] {
        let error = app.execute(forbidden).await.unwrap_err();
        assert_eq!(error.as_database_error().unwrap().code().as_deref(), Some("42501"), "{forbidden}");
    }
}

#[tokio::test]
async fn what_was_never_migrated_or_may_not_be_called_is_refused() {
    let database = postgres().await;
    let locks = PgLocks::connect(&database.url).await.unwrap();
    let error = locks.acquire(&request("a")).await.unwrap_err();
    assert!(matches!(error, LeaseError::Refused { .. }), "{error:?}");
    assert_eq!(error.group(), Group::Misuse);

    Fence::new(database.pool().await).migrate().await.unwrap();
    let mut owner = PgConnection::connect(&database.url).await.unwrap();
    owner.execute("revoke execute on all functions in schema fencerow from public").await.unwrap();
    let role = format!("app_{}", uuid::Uuid::new_v4().simple());
    let create = format!("create role {role} login password 'app'; grant usage on schema fencerow to {role}");
    sqlx::raw_sql(sqlx::AssertSqlSafe(create)).execute(&mut owner).await.unwrap();
    let url = database.url.replacen("postgres:fencerow@", &format!("{role}:app@"), 1);
    let error = PgLocks::connect(&url).await.unwrap().acquire(&request("a")).await.unwrap_err();
    assert!(matches!(error, LeaseError::Refused { .. }), "{error:?}");
}

#[tokio::test]
async fn after_a_promotion_the_next_grant_is_numbered_anew() {
    let database = database().await;
    let leases = Leases::without_fence(PgLocks::connect(&database.url).await.unwrap());
    for expected in [1, 2] {
        let lease = leases.acquire("a", TTL).await.unwrap();
        assert_eq!(lease.token().get(), expected);
        lease.release().await.unwrap();
    }
    // As on a promoted replica, which writes another timeline than the one that was counted on.
    let mut connection = PgConnection::connect(&database.url).await.unwrap();
    let moved = connection
        .execute("update fencerow.lease set counted_under = replace(counted_under, ':00000001', ':00000000')")
        .await
        .unwrap();
    assert_eq!(moved.rows_affected(), 1);
    let lease = leases.acquire("a", TTL).await.unwrap();
    assert_eq!((lease.token().epoch(), lease.token().sequence()), (1, 0));
    lease.release().await.unwrap();
    assert_eq!(leases.acquire("a", TTL).await.unwrap().token().sequence(), 1);
}

#[tokio::test]
async fn a_counter_at_its_end_is_refused_and_leaves_no_lock() {
    let database = database().await;
    let locks = PgLocks::connect(&database.url).await.unwrap();
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
async fn a_stricter_default_isolation_is_coped_with() {
    let database = database().await;
    let pool = PgPoolOptions::new()
        .max_connections(16)
        .after_connect(|connection, _| {
            Box::pin(async move {
                connection.execute("set default_transaction_isolation = 'serializable'").await.map(drop)
            })
        })
        .connect(&database.url)
        .await
        .unwrap();
    let locks = PgLocks::new(pool);
    for _ in 0..5 {
        let tries: Vec<_> = (0..16)
            .map(|_| {
                let locks = locks.clone();
                tokio::spawn(async move {
                    let request = request("a");
                    (locks.acquire(&request).await.unwrap(), request)
                })
            })
            .collect();
        let mut granted = Vec::new();
        for task in tries {
            match task.await.unwrap() {
                (Attempt::Held { .. }, _) => {}
                (_, request) => granted.push(request),
            }
        }
        let [winner] = granted.as_slice() else { panic!("{} were granted", granted.len()) };
        assert_eq!(locks.release(&winner.resource, winner.owner).await.unwrap(), Standing::Ours);
    }
}

#[tokio::test]
async fn a_token_is_on_disk_before_it_is_handed_out() {
    let database = database().await;
    let mut connection = PgConnection::connect(&database.url).await.unwrap();
    connection.execute("set synchronous_commit = off").await.unwrap();
    for (step, until) in [
        ("select fencerow.acquire_lease('a', '00000000-0000-0000-0000-000000000001', 1000, '', 1, '')", "on"),
        ("select fencerow.seed_lease('a', '00000000-0000-0000-0000-000000000001', 1)", "on"),
        ("select fencerow.renew_lease('a', '00000000-0000-0000-0000-000000000001', 1000)", "off"),
    ] {
        connection.execute("begin").await.unwrap();
        connection.execute(step).await.unwrap();
        let now: String =
            sqlx::query_scalar("show synchronous_commit").fetch_one(&mut connection).await.unwrap();
        assert_eq!(now, until, "{step}");
        connection.execute("commit").await.unwrap();
    }
}

#[tokio::test]
async fn a_row_that_somebody_has_locked_is_unavailable_in_the_end() {
    let database = database().await;
    let locks = PgLocks::connect(&database.url).await.unwrap();
    let first = request("a");
    locks.acquire(&first).await.unwrap();
    let mut operator = PgConnection::connect(&database.url).await.unwrap();
    operator.execute("begin; select from fencerow.lease for update").await.unwrap();
    let error = locks.renew(&first.resource, first.owner, first.ttl).await.unwrap_err();
    assert!(matches!(error, LeaseError::Unavailable(_)), "{error:?}");
    assert_eq!(locks.holder(&first.resource).await.unwrap().unwrap().owner, first.owner);
    operator.execute("rollback").await.unwrap();
    assert_eq!(locks.renew(&first.resource, first.owner, first.ttl).await.unwrap(), Standing::Ours);
}

#[tokio::test]
async fn arguments_that_make_no_sense_are_refused_by_the_functions_too() {
    let database = database().await;
    let mut connection = PgConnection::connect(&database.url).await.unwrap();
    for call in [
        "acquire_lease('', gen_random_uuid(), 1000, '', 1, '')",
        "acquire_lease(repeat('x', 513), gen_random_uuid(), 1000, '', 1, '')",
        "acquire_lease('a', null, 1000, '', 1, '')",
        "acquire_lease('a', gen_random_uuid(), 0, '', 1, '')",
        "acquire_lease('a', gen_random_uuid(), -1, '', 1, '')",
        "acquire_lease('a', gen_random_uuid(), 9007199254740992, '', 1, '')",
        "renew_lease('a', gen_random_uuid(), 0)",
    ] {
        let query = sqlx::AssertSqlSafe(format!("select fencerow.{call}"));
        let error = sqlx::query(query).execute(&mut connection).await.unwrap_err();
        assert_eq!(error.as_database_error().unwrap().code().as_deref(), Some("ZF004"), "{call}");
    }
}

#[tokio::test]
async fn a_url_that_is_none_is_told_from_a_database_that_is_away() {
    for url in ["", "localhost", "mysql://:secret@localhost/", "postgres://:secret@localhost:port/"] {
        let error = PgLocks::connect(url).await.unwrap_err();
        assert!(matches!(error, LeaseError::Invalid(Invalid::Option { .. })), "{url:?}: {error:?}");
        assert!(!format!("{error} {error:?}").contains("secret"));
    }
    let database = postgres().await;
    let wrong = database.url.replacen(":fencerow@", ":wrong@", 1);
    let error = PgLocks::connect(&wrong).await.unwrap_err();
    assert!(matches!(error, LeaseError::Unavailable(_)), "{error:?}");
}
