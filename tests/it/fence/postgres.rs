//! What only Postgres can show: several transactions at once, and a server that may be lost.

use std::future::{Future, IntoFuture as _};
use std::time::Duration;

use fencerow::fence::{Claim, Fence, FenceError, Isolation, Limits, Many, ManyOutcome, Table};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, PgConnection, PgPool, Postgres};
use tokio::sync::oneshot;

use super::fixtures::postgres::{Stage, stage};
use super::{RESOURCE, grant, polled};
use crate::support::eventually;
use crate::support::proxy::{Proxy, Way};

const ACCOUNT: Table<Many> = Table::many("account");
const LONG: Duration = Duration::from_secs(60);
const ENTRY: &str = "insert into entry (payout, amount) values (1, 100)";

async fn number(pool: &PgPool, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(pool).await.unwrap()
}

async fn entries(stage: &Stage) -> i64 {
    number(&stage.pool, "select count(*) from entry").await
}

/// Waits until as many sessions of this database as `count` wait for a lock.
async fn waiting(stage: &Stage, count: i64) {
    eventually("sessions wait for a lock", async || {
        let waiting = number(
            &stage.pool,
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'",
        )
        .await;
        (waiting >= count).then_some(())
    })
    .await;
}

// ---- one holder at a time ----

#[tokio::test]
async fn a_raise_waits_for_the_older_grants_transaction_and_sees_its_writes() {
    for level in [Isolation::ReadCommitted, Isolation::RepeatableRead, Isolation::Serializable] {
        let stage = stage().await;
        let (old, new) = (grant(33), grant(34));
        // The older one only locks the fence and inserts: it changes nothing that the newer one
        // could collide with.
        let mut tx = stage.fence.begin(&old).isolation(level).await.unwrap();
        let fence = stage.fence.clone();
        let newer = tokio::spawn(async move {
            let mut tx = fence.begin(&new).isolation(level).await?;
            let seen: i64 = sqlx::query_scalar("select count(*) from entry").fetch_one(&mut *tx).await?;
            tx.commit().await?;
            Ok::<_, FenceError>(seen)
        });
        waiting(&stage, 1).await;
        sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(newer.await.unwrap().unwrap(), 1, "{level:?}");
        assert!(stage.fence.begin(&old).isolation(level).await.unwrap_err().is_stale());
    }
}

/// An admission waits in the queue behind a raise, and its snapshot may be from before the wait: the
/// lock on the row is what makes it look again.
#[tokio::test]
async fn an_older_admission_that_waited_for_a_raise_is_refused_at_every_level() {
    for level in [Isolation::ReadCommitted, Isolation::RepeatableRead, Isolation::Serializable] {
        let stage = stage().await;
        let old = grant(33);
        let first = stage.fence.begin(&old).await.unwrap();
        let fence = stage.fence.clone();
        let newer = tokio::spawn(async move { fence.begin(&grant(34)).await });
        waiting(&stage, 1).await;
        let fence = stage.fence.clone();
        let older = tokio::spawn(async move { fence.begin(&old).isolation(level).await });
        waiting(&stage, 2).await;
        first.commit().await.unwrap();
        let newer = newer.await.unwrap().unwrap();
        assert!(older.await.unwrap().unwrap_err().is_stale(), "{level:?}");
        newer.commit().await.unwrap();
    }
}

/// The read-modify-write that a check of the token alone loses: the newer holder computes a
/// balance from what it has read, and the older one's late write is neither lost nor let in.
#[tokio::test]
async fn no_late_write_of_an_older_holder_is_lost_under_a_newer_ones_read_modify_write() {
    for level in [Isolation::ReadCommitted, Isolation::RepeatableRead] {
        let stage = stage().await;
        let (old, new) = (grant(33), grant(34));
        let mut tx = stage.fence.begin(&old).isolation(level).await.unwrap();
        let fence = stage.fence.clone();
        let newer = tokio::spawn(async move {
            let mut tx = fence.begin(&new).isolation(level).await?;
            let balance: i64 =
                sqlx::query_scalar("select balance from account where id = 1").fetch_one(&mut *tx).await?;
            let outcome = tx.update(&ACCOUNT).key("id", 1_i64).set("balance", balance - 50).await?;
            assert_eq!(outcome, ManyOutcome::Written);
            tx.commit().await
        });
        waiting(&stage, 1).await;
        let outcome = tx.update(&ACCOUNT).key("id", 1_i64).add("balance", -100_i64).await.unwrap();
        assert_eq!(outcome, ManyOutcome::Written);
        tx.commit().await.unwrap();
        newer.await.unwrap().unwrap();
        assert_eq!(number(&stage.pool, "select balance from account where id = 1").await, 850, "{level:?}");
    }
}

#[tokio::test]
async fn transactions_of_one_grant_run_side_by_side() {
    let stage = stage().await;
    let held = grant(1);
    let mut first = stage.fence.begin(&held).await.unwrap();
    let mut second = stage.fence.begin(&held).await.unwrap();
    // A process that shares the grant and has not raised it itself does not wait, either.
    let elsewhere = Fence::new(stage.pool.clone());
    let mut third = elsewhere.begin(&held).await.unwrap();
    for tx in [&mut first, &mut second, &mut third] {
        sqlx::query(ENTRY).execute(&mut **tx).await.unwrap();
    }
    for tx in [first, second, third] {
        tx.commit().await.unwrap();
    }
    assert_eq!(entries(&stage).await, 3);
}

/// Workers of the old lease whose transactions overlap: row locks alone would keep the raise out
/// for as long as they go on.
#[tokio::test]
async fn a_busy_old_lease_cannot_starve_its_successor() {
    let stage = stage().await;
    let (old, new) = (grant(33), grant(34));
    stage.fence.begin(&old).await.unwrap().commit().await.unwrap();
    let pool = PgPoolOptions::new().max_connections(12).connect(&stage.database.url).await.unwrap();
    // Nobody is ended here: the queue alone has to do it.
    let fence = Fence::new(pool).without_ending_blockers().with_patience(LONG).unwrap();
    let mut workers = tokio::task::JoinSet::new();
    for worker in 0..10_u64 {
        let (fence, old) = (fence.clone(), old.clone());
        workers.spawn(async move {
            // Out of step with each other, so that there is never a moment without one.
            tokio::time::sleep(Duration::from_millis(worker * 20)).await;
            loop {
                let mut tx = match fence.begin(&old).await {
                    Ok(tx) => tx,
                    Err(error) => return error,
                };
                sqlx::query("select pg_sleep(0.2)").execute(&mut *tx).await.unwrap();
                tx.commit().await.unwrap();
            }
        });
    }
    eventually("transactions overlap", async || (count_sleeping(&stage).await >= 8).then_some(())).await;
    fence.begin(&new).await.unwrap().commit().await.unwrap();
    for error in workers.join_all().await {
        assert!(error.is_stale(), "{error:?}");
    }
}

#[tokio::test]
async fn a_stale_raise_neither_waits_for_the_newer_holder_nor_ends_it() {
    let stage = stage().await;
    let mut newer = stage.fence.begin(&grant(34)).await.unwrap();
    let impatient = Fence::new(stage.pool.clone()).with_patience(Duration::from_millis(1)).unwrap();
    assert!(impatient.begin(&grant(33)).await.unwrap_err().is_stale());
    sqlx::query(ENTRY).execute(&mut *newer).await.unwrap();
    newer.commit().await.unwrap();
}

/// A raise that has waited for one round, and lost its place to a newer grant in between two.
#[tokio::test]
async fn a_raise_that_was_overtaken_while_it_waited_is_stale_and_ends_nobody() {
    let stage = stage().await;
    let oldest = stage.fence.begin(&grant(33)).await.unwrap();
    let limit = Duration::from_secs(5);
    let patient = stage.fence.clone().without_ending_blockers().with_patience(LONG).unwrap();
    let hasty = stage.fence.clone().with_patience(limit).unwrap();
    // The newer grant waits first, so it is first in the queue; the older one behind it.
    let newer = tokio::spawn(async move { patient.begin(&grant(35)).await });
    waiting(&stage, 1).await;
    let overtaken = tokio::spawn(async move { hasty.begin(&grant(34)).await });
    waiting(&stage, 2).await;
    oldest.commit().await.unwrap();
    let mut newer = newer.await.unwrap().unwrap();
    let error = overtaken.await.unwrap().unwrap_err();
    assert!(error.is_stale(), "{error:?}");
    sqlx::query(ENTRY).execute(&mut *newer).await.unwrap();
    newer.commit().await.unwrap();
}

#[tokio::test]
async fn a_raise_ends_nobody_once_the_fence_has_moved() {
    let stage = stage().await;
    let mut holder = stage.fence.begin(&grant(33)).await.unwrap();
    let fence = stage.fence.clone().with_patience(Duration::from_secs(3)).unwrap();
    let waiter = tokio::spawn(async move { fence.begin(&grant(34)).await });
    waiting(&stage, 1).await;
    // By hand, as if a newer grant had come in between two rounds. The holder's own lock on the
    // row is let go for it.
    let moved = "delete from fencerow.fence;
        insert into fencerow.fence values ('settlement:2026-11-30', 35, gen_random_uuid(), '1', now())";
    sqlx::raw_sql(moved).execute(holder.lend()).await.unwrap();
    let held = "select pg_advisory_lock_shared(fencerow.lock_key('settlement:2026-11-30'))";
    sqlx::raw_sql(held).execute(holder.lend()).await.unwrap();
    sqlx::raw_sql("commit").execute(holder.lend()).await.unwrap();

    let error = waiter.await.unwrap().unwrap_err();
    assert!(error.is_stale(), "{error:?}");
    // The session that held the lock is alive.
    sqlx::raw_sql("select pg_advisory_unlock_all()").execute(holder.lend()).await.unwrap();
    drop(holder);
}

#[tokio::test]
async fn an_older_transaction_that_nobody_may_end_makes_the_resource_busy_and_not_stale() {
    let stage = stage().await;
    let held = grant(33);
    let mut tx = stage.fence.begin(&held).await.unwrap();
    let patient =
        stage.fence.clone().without_ending_blockers().with_patience(Duration::from_millis(50)).unwrap();
    let error = patient.begin(&grant(34)).await.unwrap_err();
    assert!(matches!(error, FenceError::Busy { .. }), "{error:?}");
    sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
    patient.begin(&grant(34)).await.unwrap().commit().await.unwrap();
}

#[tokio::test]
async fn an_ended_transaction_is_told_so_and_its_holder_is_stale() {
    let stage = stage().await;
    let held = grant(33);
    let mut tx = stage.fence.begin(&held).await.unwrap();
    sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
    let impatient = stage.fence.clone().with_patience(Duration::from_millis(50)).unwrap();
    impatient.begin(&grant(34)).await.unwrap().commit().await.unwrap();
    let error = tx.commit().await.unwrap_err();
    assert!(matches!(error, FenceError::Ended(_)), "{error:?}");
    assert!(stage.fence.begin(&held).await.unwrap_err().is_stale());
    assert_eq!(entries(&stage).await, 0);
}

#[tokio::test]
async fn a_conflict_of_two_transactions_is_retry_and_never_stale() {
    let stage = stage().await;
    let held = grant(1);
    let mut first = stage.fence.begin(&held).isolation(Isolation::RepeatableRead).await.unwrap();
    let mut second = stage.fence.begin(&held).isolation(Isolation::RepeatableRead).await.unwrap();
    let outcome = first.update(&ACCOUNT).key("id", 1_i64).add("balance", 1_i64).await.unwrap();
    assert_eq!(outcome, ManyOutcome::Written);
    first.commit().await.unwrap();
    let error = second.update(&ACCOUNT).key("id", 1_i64).add("balance", 1_i64).await.unwrap_err();
    assert!(matches!(error, FenceError::Retry { .. }), "{error:?}");
}

/// A row changed between a write's snapshot and its turn: the explanation must not come from the
/// snapshot.
#[tokio::test]
async fn a_write_that_waited_for_a_rival_is_explained_by_what_the_rival_left() {
    let stage = stage().await;
    let held = grant(5);
    let mut rival = stage.pool.begin().await.unwrap();
    sqlx::query("update account set last_token = 9 where id = 1").execute(&mut *rival).await.unwrap();
    let fence = stage.fence.clone();
    let write = tokio::spawn(async move {
        let mut tx = fence.begin(&held).await.unwrap();
        let outcome = tx.update(&ACCOUNT).key("id", 1_i64).add("balance", 1_i64).await;
        tx.rollback().await.unwrap();
        outcome
    });
    waiting(&stage, 1).await;
    rival.commit().await.unwrap();
    let error = write.await.unwrap().unwrap_err();
    assert!(
        matches!(error, FenceError::Stale { offered, seen, .. } if (offered.get(), seen.get()) == (5, 9)),
        "{error:?}"
    );
}

/// Two transactions of one lease that both find the row absent.
#[tokio::test]
async fn two_first_upserts_of_one_row_both_count() {
    let stage = stage().await;
    let held = grant(5);
    let mut first = stage.fence.begin(&held).await.unwrap();
    let outcome = first.upsert(&ACCOUNT).key("id", 7_i64).add("balance", 1_i64).await.unwrap();
    assert_eq!(outcome, ManyOutcome::Written);
    let fence = stage.fence.clone();
    let second = tokio::spawn(async move {
        let mut tx = fence.begin(&held).await?;
        let outcome = tx.upsert(&ACCOUNT).key("id", 7_i64).add("balance", 10_i64).await?;
        assert_eq!(outcome, ManyOutcome::Written);
        tx.commit().await
    });
    waiting(&stage, 1).await;
    first.commit().await.unwrap();
    second.await.unwrap().unwrap();
    assert_eq!(number(&stage.pool, "select balance from account where id = 7").await, 11);
}

// ---- the same key twice at once ----

async fn claim_under(fence: Fence<Postgres>, held: fencerow::Grant) -> Result<bool, FenceError> {
    let mut tx = fence.begin(&held).await?;
    let fresh = match tx.claim("payout-1", &100).await? {
        Claim::Replayed(1) => false,
        Claim::Replayed(other) => panic!("replayed {other}"),
        Claim::Fresh(claim) => {
            sqlx::query(ENTRY).execute(&mut *tx).await?;
            claim.record(&mut tx, 1).await?;
            true
        }
    };
    tx.commit().await?;
    Ok(fresh)
}

#[tokio::test]
async fn a_duplicate_waits_for_the_first_and_replays_it() {
    let stage = stage().await;
    let held = grant(1);
    let mut first = stage.fence.begin(&held).await.unwrap();
    let Claim::Fresh(claim) = first.claim("payout-1", &100).await.unwrap() else { panic!("used before") };
    let duplicate = tokio::spawn(claim_under(stage.fence.clone(), held));
    waiting(&stage, 1).await;
    sqlx::query(ENTRY).execute(&mut *first).await.unwrap();
    claim.record(&mut first, 1).await.unwrap();
    first.commit().await.unwrap();
    assert!(!duplicate.await.unwrap().unwrap());
    assert_eq!(entries(&stage).await, 1);
}

#[tokio::test]
async fn a_duplicate_runs_if_the_first_rolls_back() {
    let stage = stage().await;
    let held = grant(1);
    let mut first = stage.fence.begin(&held).await.unwrap();
    let claim = first.claim::<_, i32>("payout-1", &100).await.unwrap();
    assert!(matches!(claim, Claim::Fresh(_)));
    let duplicate = tokio::spawn(claim_under(stage.fence.clone(), held));
    waiting(&stage, 1).await;
    first.rollback().await.unwrap();
    assert!(duplicate.await.unwrap().unwrap());
    assert_eq!(entries(&stage).await, 1);
}

#[tokio::test]
async fn a_duplicate_above_read_committed_is_told_to_run_again() {
    let stage = stage().await;
    let held = grant(1);
    let mut first = stage.fence.begin(&held).await.unwrap();
    let mut second = stage.fence.begin(&held).isolation(Isolation::RepeatableRead).await.unwrap();
    let Claim::Fresh(claim) = first.claim("payout-1", &100).await.unwrap() else { panic!("used before") };
    claim.record(&mut first, 1).await.unwrap();
    first.commit().await.unwrap();
    let error = second.claim::<_, i32>("payout-1", &100).await.unwrap_err();
    assert!(matches!(error, FenceError::Retry { .. }), "{error:?}");
}

// ---- failed transactions ----

#[tokio::test]
async fn a_transaction_whose_failure_was_passed_over_is_not_called_committed() {
    let stage = stage().await;
    let mut tx = stage.fence.begin(&grant(1)).await.unwrap();
    sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
    assert!(sqlx::query("select 1 / 0").execute(&mut *tx).await.is_err());
    let error = tx.commit().await.unwrap_err();
    assert!(matches!(error, FenceError::Aborted), "{error:?}");
    assert_eq!(entries(&stage).await, 0);
}

#[tokio::test]
async fn a_result_left_half_read_does_not_hide_its_failure() {
    use futures_util::TryStreamExt as _;
    let stage = stage().await;
    let mut tx = stage.fence.begin(&grant(1)).await.unwrap();
    // The rows before the failing one are enough to fill what a server sends at once.
    let late = "select repeat('x', 1000), 1 / (5000 - n) from generate_series(1, 5000) n";
    let first = sqlx::query(late).fetch(&mut *tx).try_next().await.unwrap();
    assert!(first.is_some());
    let error = tx.commit().await.unwrap_err();
    assert!(matches!(error, FenceError::Aborted | FenceError::Database(_)), "{error:?}");

    let mut tx = stage.fence.begin(&grant(2)).await.unwrap();
    let fine = "select n from generate_series(1, 5000) n";
    assert!(sqlx::query(fine).fetch(&mut *tx).try_next().await.unwrap().is_some());
    sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(entries(&stage).await, 1);
}

#[tokio::test]
async fn a_deferred_constraint_fails_the_commit() {
    let stage = stage().await;
    sqlx::raw_sql("create table d (id int primary key deferrable initially deferred)")
        .execute(&stage.pool)
        .await
        .unwrap();
    let mut tx = stage.fence.begin(&grant(1)).await.unwrap();
    for _ in 0..2 {
        sqlx::query("insert into d values (1)").execute(&mut *tx).await.unwrap();
    }
    let error = tx.commit().await.unwrap_err();
    assert!(matches!(error, FenceError::Database(_)), "{error:?}");
    stage.fence.begin(&grant(2)).await.unwrap().commit().await.unwrap();
}

#[tokio::test]
async fn a_query_that_is_dropped_ends_at_the_server() {
    let stage = stage().await;
    let mut tx = stage.fence.begin(&grant(1)).await.unwrap();
    {
        let mut query = Box::pin(sqlx::query("select pg_sleep(600)").execute(&mut *tx));
        tokio::select! {
            _ = &mut query => panic!("it sleeps for ten minutes"),
            () = sleeping(&stage, 1) => {}
        }
    }
    drop(tx);
    sleeping(&stage, 0).await;
}

#[tokio::test]
async fn a_query_that_is_dropped_on_a_lent_connection_ends_at_the_server() {
    let stage = stage().await;
    let mut tx = stage.fence.begin(&grant(1)).await.unwrap();
    {
        let mut query = Box::pin(sqlx::query("select pg_sleep(600)").execute(tx.lend()));
        tokio::select! {
            _ = &mut query => panic!("it sleeps for ten minutes"),
            () = sleeping(&stage, 1) => {}
        }
    }
    drop(tx);
    sleeping(&stage, 0).await;
}

/// Waits until as many sessions as `count` are in `pg_sleep`.
async fn sleeping(stage: &Stage, count: i64) {
    eventually("sessions sleep", async || (count_sleeping(stage).await == count).then_some(())).await;
}

async fn count_sleeping(stage: &Stage) -> i64 {
    let sleeping =
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'";
    number(&stage.pool, sleeping).await
}

// ---- limits ----

#[tokio::test]
async fn the_limits_are_the_transactions_own() {
    let stage = stage().await;
    let fence = Fence::new(stage.narrow().await);
    let limits = Limits::new()
        .idle(Duration::from_millis(12_345))
        .lock(Duration::from_millis(2_345))
        .statement(Duration::from_millis(3_456))
        .transaction(Duration::from_millis(4_567));
    let shown = "select concat_ws(' ', current_setting('idle_in_transaction_session_timeout'),
        current_setting('lock_timeout'), current_setting('statement_timeout'),
        coalesce(current_setting('transaction_timeout', true), 'none'),
        current_setting('tcp_user_timeout'), current_setting('client_connection_check_interval'))";
    let before: String = sqlx::query_scalar(shown).fetch_one(fence.pool()).await.unwrap();
    let mut tx = fence.begin(&grant(1)).limits(limits).await.unwrap();
    let version: i32 = sqlx::query_scalar("select current_setting('server_version_num')::int")
        .fetch_one(&mut *tx)
        .await
        .unwrap();
    let within: String = sqlx::query_scalar(shown).fetch_one(&mut *tx).await.unwrap();
    let transaction = if version >= 170_000 { "4567ms" } else { "none" };
    assert_eq!(within, format!("12345ms 2345ms 3456ms {transaction} 12345 1s"));
    tx.commit().await.unwrap();
    let after: String = sqlx::query_scalar(shown).fetch_one(fence.pool()).await.unwrap();
    assert_eq!(after, before);
}

#[tokio::test]
async fn a_limit_of_zero_is_refused_before_anything_is_sent() {
    let stage = stage().await;
    let error = stage.fence.begin(&grant(1)).limits(Limits::new().idle(Duration::ZERO)).await.unwrap_err();
    assert!(matches!(error, FenceError::Invalid(_)), "{error:?}");
    assert!(stage.fence.clone().with_patience(Duration::ZERO).is_err());
    assert_eq!(number(&stage.pool, "select count(*) from fencerow.fence").await, 0);
}

#[tokio::test]
async fn a_transaction_idle_beyond_its_limit_is_ended_by_the_database() {
    let stage = stage().await;
    let tx =
        stage.fence.begin(&grant(1)).limits(Limits::new().idle(Duration::from_millis(50))).await.unwrap();
    eventually("the idle session is ended", async || {
        let open = "select count(*) from pg_stat_activity where datname = current_database() and state like 'idle in%'";
        (number(&stage.pool, open).await == 0).then_some(())
    })
    .await;
    let error = tx.commit().await.unwrap_err();
    assert!(matches!(error, FenceError::Ended(_)), "{error:?}");
    assert_eq!(entries(&stage).await, 0);
}

/// A session's own limits must not keep a raise from getting rid of a sleeper.
#[tokio::test]
async fn a_raise_outlasts_the_limits_of_its_session() {
    let stage = stage().await;
    let sleeper = stage.fence.begin(&grant(33)).await.unwrap();
    // The second is of PostgreSQL 17.
    let version: i32 = sqlx::query_scalar("select current_setting('server_version_num')::int")
        .fetch_one(&stage.pool)
        .await
        .unwrap();
    let limit = if version >= 170_000 { "transaction_timeout" } else { "statement_timeout" };
    let hasty = format!("{}?options[statement_timeout]=1s&options[{limit}]=1s", stage.database.url);
    let fence =
        Fence::new(PgPool::connect(&hasty).await.unwrap()).with_patience(Duration::from_secs(2)).unwrap();
    fence.begin(&grant(34)).await.unwrap().commit().await.unwrap();
    assert!(sleeper.commit().await.is_err());
}

// ---- a connection that breaks ----

/// A fence behind a proxy, with one connection.
async fn behind(proxy: &Proxy, stage: &Stage) -> Fence<Postgres> {
    let url = stage.database.url_at(proxy.address());
    Fence::new(
        PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(Duration::from_secs(2))
            .connect(&url)
            .await
            .unwrap(),
    )
}

#[tokio::test]
async fn a_commit_whose_answer_is_lost_is_unknown_and_the_key_tells() {
    let stage = stage().await;
    for arrives in [true, false] {
        let proxy = Proxy::to(stage.database.address()).await;
        let fence = behind(&proxy, &stage).await;
        let (held, key) = if arrives { (grant(1), "arrives") } else { (grant(2), "does not arrive") };
        let before = entries(&stage).await;
        let mut tx = fence.begin(&held).await.unwrap();
        let Claim::Fresh(claim) = tx.claim(key, &100).await.unwrap() else { panic!("used before") };
        sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
        claim.record(&mut tx, 1).await.unwrap();
        proxy.set(if arrives { Way::Pass } else { Way::Lose }, Way::Lose);
        let commit = tokio::spawn(tx.commit());
        if arrives {
            eventually("the commit is done", async || (entries(&stage).await == before + 1).then_some(()))
                .await;
        } else {
            tokio::task::yield_now().await;
        }
        proxy.cut();
        let error = commit.await.unwrap().unwrap_err();
        assert!(matches!(error, FenceError::CommitUnknown(_)), "{error:?}");
        proxy.pass();

        // The same holder, the same key: never stale by its own token, never twice.
        let mut tx = fence.begin(&held).await.unwrap();
        match tx.claim(key, &100).await.unwrap() {
            Claim::Replayed(response) => assert!(arrives && response == 1),
            Claim::Fresh(claim) => {
                assert!(!arrives);
                sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
                claim.record(&mut tx, 1).await.unwrap();
            }
        }
        tx.commit().await.unwrap();
        assert_eq!(entries(&stage).await, before + 1);
    }
}

#[tokio::test]
async fn a_server_that_cannot_be_reached_is_unavailable() {
    let stage = stage().await;
    let mut proxy = Proxy::to(stage.database.address()).await;
    let fence = behind(&proxy, &stage).await;
    let held = grant(1);
    let tx = fence.begin(&held).await.unwrap();
    proxy.cut();
    let error = tx.commit().await.unwrap_err();
    assert!(matches!(error, FenceError::CommitUnknown(_)), "{error:?}");
    proxy.refuse().await;
    let error = fence.begin(&held).await.unwrap_err();
    assert!(matches!(error, FenceError::Unavailable(_)), "{error:?}");
    proxy.accept().await;
    fence.begin(&held).await.unwrap().commit().await.unwrap();
}

/// Every await of begin and commit, on a slow line, with a pool of one.
#[tokio::test]
async fn two_hundred_begins_and_commits_dropped_at_every_await_leave_no_transaction_open() {
    let stage = stage().await;
    let proxy = Proxy::to(stage.database.address()).await;
    proxy.set(Way::Delay(Duration::from_millis(2)), Way::Delay(Duration::from_millis(2)));
    let fence = behind(&proxy, &stage).await;
    let held = grant(1);
    let (mut dropped, mut round) = (0, 0_u32);
    while dropped < 200 {
        round += 1;
        assert!(round < 2_000, "only {dropped} drops in {round} rounds");
        let polls = round % 7;
        let begun = polled(polls, fence.begin(&held).into_future()).await;
        dropped += i32::from(begun.is_none());
        if let Some(tx) = begun {
            dropped += i32::from(polled(polls, tx.unwrap().commit()).await.is_none());
        }
        if round % 10 == 0 {
            // The pool works, and its connection is in nobody's transaction.
            let one: i64 = number(fence.pool(), "select 1::bigint").await;
            assert_eq!(one, 1);
            let mut tx = fence.begin(&held).await.unwrap();
            sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
            tx.commit().await.unwrap();
        }
    }
    proxy.pass();
    eventually("nothing is idle in a transaction", async || {
        let open = "select count(*) from pg_stat_activity where datname = current_database()
            and pid <> pg_backend_pid() and xact_start is not null";
        (number(&stage.pool, open).await == 0).then_some(())
    })
    .await;
    fence.begin(&held).await.unwrap().commit().await.unwrap();
}

// ---- round trips ----

/// How many more round trips `work` takes.
async fn round_trips<T>(proxy: &Proxy, work: impl Future<Output = T>) -> (T, usize) {
    let before = proxy.round_trips();
    let done = work.await;
    (done, proxy.round_trips() - before)
}

#[tokio::test]
async fn the_fence_takes_no_more_round_trips_than_a_plain_transaction() {
    let stage = stage().await;
    let proxy = Proxy::to(stage.database.address()).await;
    let pool = PgPoolOptions::new().max_connections(1).test_before_acquire(false);
    let fence = Fence::new(pool.connect(&stage.database.url_at(proxy.address())).await.unwrap());
    let held = grant(1);
    for raised in [false, true] {
        // What the pool does with a connection that comes back is not counted.
        eventually("the connection is back", async || (fence.pool().num_idle() == 1).then_some(())).await;
        let (tx, trips) = round_trips(&proxy, fence.begin(&held).into_future()).await;
        let mut tx = tx.unwrap();
        assert_eq!(trips, 1, "for a begin where the fence was raised before: {raised}");

        // Prepared once, then one round trip each, also where the row has to be explained.
        for (id, expected) in [(1_i64, ManyOutcome::Written), (99, ManyOutcome::Missing)] {
            let write = tx.update(&ACCOUNT).key("id", id).add("balance", 1_i64).into_future();
            let (outcome, trips) = round_trips(&proxy, write).await;
            assert_eq!(outcome.unwrap(), expected);
            assert!(trips == 1 || !raised, "{trips} for a write");
        }
        let key = format!("key-{raised}");
        let (claim, trips) = round_trips(&proxy, tx.claim::<_, ()>(&key, &1)).await;
        assert!(trips == 1 || !raised, "{trips} for a claim");
        let Claim::Fresh(claim) = claim.unwrap() else { panic!("used before") };
        let (recorded, trips) = round_trips(&proxy, claim.record(&mut tx, ())).await;
        recorded.unwrap();
        assert!(trips == 1 || !raised, "{trips} for a record");
        let (committed, trips) = round_trips(&proxy, tx.commit()).await;
        committed.unwrap();
        assert_eq!(trips, 1, "for a commit");
    }
}

// ---- from SQL ----

#[tokio::test]
async fn any_language_can_be_admitted_by_the_sql_functions() {
    let stage = stage().await;
    let held = grant(33);
    let raise = format!("select fencerow.raise('{RESOURCE}', 33, '{}')", held.owner());
    let admit = format!("select fencerow.admit('{RESOURCE}', 33, '{}')", held.owner());
    let mut session = PgConnection::connect(&stage.database.url).await.unwrap();
    let mut run = async |sql: &str| {
        let outcome = sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut session).await;
        outcome.map(drop).map_err(|error| error.as_database_error().unwrap().code().unwrap().into_owned())
    };

    assert_eq!(run(&format!("begin; {admit}")).await, Err("ZF002".into()), "not raised");
    run("rollback").await.unwrap();
    assert_eq!(run(&format!("begin; {raise}; {admit}")).await, Err("ZF002".into()), "raised, not committed");
    run("rollback").await.unwrap();
    assert_eq!(run(&format!("begin; savepoint s; {raise}; release s; {admit}")).await, Err("ZF002".into()));
    run("rollback").await.unwrap();
    run(&raise).await.unwrap();
    run(&format!("begin; {admit}; {ENTRY}; commit")).await.unwrap();
    let another = format!("select fencerow.admit('{RESOURCE}', 33, gen_random_uuid())");
    assert_eq!(run(&format!("begin; {another}")).await, Err("ZF001".into()), "another owner's token");
    run("rollback").await.unwrap();
    assert_eq!(entries(&stage).await, 1);

    stage.fence.begin(&grant(34)).await.unwrap().commit().await.unwrap();
    assert_eq!(run(&raise).await, Err("ZF001".into()));
    assert_eq!(run(&format!("begin; {admit}")).await, Err("ZF001".into()));
    run("rollback").await.unwrap();
    for arguments in [
        "null, 1, gen_random_uuid()",
        "'x', null, gen_random_uuid()",
        "'x', 1, null",
        "'x', 0, gen_random_uuid()",
        "'x', -1, gen_random_uuid()",
        "'', 1, gen_random_uuid()",
    ] {
        for function in ["raise", "admit"] {
            let call = format!("select fencerow.{function}({arguments})");
            assert_eq!(run(&call).await, Err("ZF004".into()), "{call}");
        }
    }
}

#[tokio::test]
async fn a_role_without_rights_on_the_tables_can_do_everything() {
    let stage = stage().await;
    let role = format!("app_{}", uuid::Uuid::new_v4().simple());
    let setup = format!(
        "create role {role} login password 'app';
         grant usage on schema fencerow to {role};
         create table ledger (id bigint primary key, last_token bigint);
         grant select, insert on entry, ledger to {role};"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(setup)).execute(&stage.pool).await.unwrap();
    let mut url = stage.database.url.clone();
    url = url.replacen("postgres:fencerow", &format!("{role}:app"), 1);
    let fence = Fence::new(PgPoolOptions::new().max_connections(4).connect(&url).await.unwrap())
        .with_patience(Duration::from_millis(50))
        .unwrap();
    assert!(claim_under(fence.clone(), grant(1)).await.unwrap());
    // Its own sleeper, too, it may end.
    let sleeper = fence.begin(&grant(2)).await.unwrap();
    fence.begin(&grant(3)).await.unwrap().commit().await.unwrap();
    assert!(sleeper.commit().await.is_err());
    // An insert takes no more than the right to insert, and to read.
    let mut tx = fence.begin(&grant(4)).await.unwrap();
    const LEDGER: Table<Many> = Table::many("ledger");
    for expected in [ManyOutcome::Written, ManyOutcome::Exists] {
        assert_eq!(tx.insert(&LEDGER).key("id", 1_i64).await.unwrap(), expected);
    }
    tx.commit().await.unwrap();
    for sql in ["update fencerow.fence set last_token = 1", "delete from fencerow.idempotency"] {
        assert!(sqlx::query(sql).execute(fence.pool()).await.is_err(), "{sql}");
    }
}

#[tokio::test]
async fn a_transaction_of_the_callers_own_whose_snapshot_is_older_than_the_raise_has_to_begin_again() {
    let stage = stage().await;
    let mut tx = stage.pool.begin_with("begin isolation level repeatable read").await.unwrap();
    sqlx::query("select count(*) from fencerow.fence").execute(&mut *tx).await.unwrap();
    // On a resource whose fence is there already, the admission finds a newer row than it may see.
    stage.fence.begin(&grant(1)).await.unwrap().commit().await.unwrap();
    let error = stage.fence.admit(&mut tx, &grant(2)).await.unwrap_err();
    assert!(matches!(error, FenceError::Retry { .. }), "{error:?}");
}

#[tokio::test]
async fn a_claim_without_a_response_is_not_committed_by_the_caller_either() {
    let stage = stage().await;
    let held = grant(1);
    let mut tx = stage.pool.begin().await.unwrap();
    let mut admitted = stage.fence.admit(&mut tx, &held).await.unwrap();
    let claim = admitted.claim::<_, ()>("payout-1", &100).await.unwrap();
    assert!(matches!(claim, Claim::Fresh(_)));
    let error = tx.commit().await.unwrap_err();
    assert_eq!(error.as_database_error().unwrap().code().as_deref(), Some("ZF006"));
    assert!(claim_under(stage.fence.clone(), held).await.unwrap());
}

/// Its rollback would lift the admission, and sqlx does not count it as nested.
#[tokio::test]
async fn a_transaction_inside_a_savepoint_is_not_admitted() {
    let stage = stage().await;
    let held = grant(33);
    let mut tx = stage.pool.begin().await.unwrap();
    sqlx::raw_sql("savepoint s").execute(&mut *tx).await.unwrap();
    let error = stage.fence.admit(&mut tx, &held).await.unwrap_err();
    assert!(matches!(error, FenceError::Unfenced { .. }), "{error:?}");
    tx.rollback().await.unwrap();

    let sql = format!(
        "begin; do $$ begin
            perform fencerow.admit('{RESOURCE}', 33, '{}');
        exception when division_by_zero then null; end $$",
        held.owner()
    );
    let mut session = PgConnection::connect(&stage.database.url).await.unwrap();
    let error = sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut session).await.unwrap_err();
    assert_eq!(error.as_database_error().unwrap().code().as_deref(), Some("25001"));
}

#[tokio::test]
async fn a_write_that_the_database_suppresses_is_said_to_be() {
    let stage = stage().await;
    sqlx::raw_sql(
        "create function nothing() returns trigger language plpgsql as 'begin return null; end';
         create trigger nothing before update on account for each row execute function nothing();",
    )
    .execute(&stage.pool)
    .await
    .unwrap();
    let mut tx = stage.fence.begin(&grant(1)).await.unwrap();
    let error = tx.update(&ACCOUNT).key("id", 1_i64).add("balance", 1_i64).await.unwrap_err();
    assert!(matches!(error, FenceError::Invalid(_)), "{error:?}");
}

#[tokio::test]
async fn a_raise_above_read_committed_is_refused() {
    let stage = stage().await;
    let sql = "begin isolation level repeatable read; select fencerow.raise('x', 1, gen_random_uuid())";
    let mut session = PgConnection::connect(&stage.database.url).await.unwrap();
    let error = sqlx::raw_sql(sql).execute(&mut session).await.unwrap_err();
    assert_eq!(error.as_database_error().unwrap().code().as_deref(), Some("ZF004"));
}

#[tokio::test]
async fn a_pool_of_one_can_admit_a_transaction_of_the_callers_own() {
    let stage = stage().await;
    let narrow = stage.narrow().await;
    let fence = Fence::new(narrow.clone());
    let mut tx = narrow.begin().await.unwrap();
    fence.admit(&mut tx, &grant(1)).await.unwrap();
    tx.commit().await.unwrap();
}

#[tokio::test]
async fn a_fence_that_was_restored_lower_is_raised_again() {
    let stage = stage().await;
    let held = grant(7);
    stage.fence.begin(&held).await.unwrap().commit().await.unwrap();
    sqlx::query("delete from fencerow.fence").execute(&stage.pool).await.unwrap();
    stage.fence.begin(&held).await.unwrap().commit().await.unwrap();
    assert_eq!(number(&stage.pool, "select last_token from fencerow.fence").await, 7);
}

#[tokio::test]
async fn a_dropped_begin_that_waits_for_an_older_holder_leaves_nothing_behind() {
    let stage = stage().await;
    let old = stage.fence.begin(&grant(33)).await.unwrap();
    let (give_up, given_up) = oneshot::channel::<()>();
    let fence = stage.fence.clone().with_patience(LONG).unwrap();
    let waiter = tokio::spawn(async move {
        let newer = grant(34);
        tokio::select! {
            _ = fence.begin(&newer).into_future() => panic!("it cannot get in"),
            _ = given_up => {}
        }
    });
    waiting(&stage, 1).await;
    give_up.send(()).unwrap();
    waiter.await.unwrap();
    // Long before its patience is over, and while the older one is still at work.
    eventually("the waiter's session is gone", async || {
        let open = "select count(*) from pg_stat_activity where datname = current_database()
            and wait_event_type = 'Lock'";
        (number(&stage.pool, open).await == 0).then_some(())
    })
    .await;
    old.commit().await.unwrap();
    assert_eq!(number(&stage.pool, "select last_token from fencerow.fence").await, 33);
}
