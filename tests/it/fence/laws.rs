//! What holds on every database.

use std::future::IntoFuture as _;

use fencerow::fence::{
    Claim, Fence, FenceError, Isolation, Key, Many, ManyOutcome, Once, OnceOutcome, Table,
};
use fencerow::{FencingToken, OwnerId, Renumber as _, Resource};

use super::super::{RESOURCE, grant, grant_on, polled};
use super::fixture::{Db, Stage, stage};

const ACCOUNT: Table<Many> = Table::many("account");
const PAYOUT: Table<Once> = Table::once("payout");

impl Stage {
    async fn number(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    async fn entries(&self) -> i64 {
        self.number("select count(*) from entry").await
    }
}

const SOON: std::time::Duration = std::time::Duration::from_secs(30);
const ENTRY: &str = "insert into entry (payout, amount) values (1, 100)";

/// Both tokens of a refusal.
fn refused(error: &FenceError) -> (i64, i64) {
    match error {
        FenceError::Stale { offered, seen, .. } => (offered.get(), seen.get()),
        other => panic!("not stale: {other:?}"),
    }
}

#[tokio::test]
async fn an_older_grant_is_refused_after_a_newer_one_was_here() {
    let stage = stage().await;
    let (old, new) = (grant(33), grant(34));

    let mut tx = stage.fence.begin(&old).await.unwrap();
    sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
    stage.fence.begin(&new).await.unwrap().commit().await.unwrap();

    assert_eq!(refused(&stage.fence.begin(&old).await.unwrap_err()), (33, 34));
    // Another process, which does not remember what it has raised.
    let elsewhere = Fence::new(stage.pool.clone());
    assert_eq!(refused(&elsewhere.begin(&old).await.unwrap_err()), (33, 34));
    assert_eq!(stage.entries().await, 1);
}

#[tokio::test]
async fn an_equal_token_of_another_owner_is_refused() {
    let stage = stage().await;
    let (first, second) = (grant(6), grant(6));
    stage.fence.begin(&first).await.unwrap().commit().await.unwrap();
    assert_eq!(refused(&stage.fence.begin(&second).await.unwrap_err()), (6, 6));
    stage.fence.begin(&first).await.unwrap().commit().await.unwrap();
}

/// A05
#[tokio::test]
async fn one_holder_writes_as_often_as_it_likes_on_as_many_resources_as_it_holds() {
    let stage = stage().await;
    for resource in ["a", "b"] {
        let ten = grant_on(resource, 10);
        for _ in 0..3 {
            let mut tx = stage.fence.begin(&ten).await.unwrap();
            sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
            tx.commit().await.unwrap();
        }
    }
    assert_eq!(stage.entries().await, 6);
    stage.fence.begin(&grant_on("a", 11)).await.unwrap().commit().await.unwrap();
    assert_eq!(refused(&stage.fence.begin(&grant_on("a", 10)).await.unwrap_err()), (10, 11));
    stage.fence.begin(&grant_on("b", 11)).await.unwrap().commit().await.unwrap();
}

#[tokio::test]
async fn an_admission_that_was_rolled_back_is_still_remembered() {
    let stage = stage().await;
    let old = grant(33);
    stage.fence.begin(&old).await.unwrap().commit().await.unwrap();
    stage.fence.begin(&grant(34)).await.unwrap().rollback().await.unwrap();
    assert_eq!(refused(&stage.fence.begin(&old).await.unwrap_err()), (33, 34));
}

#[tokio::test]
async fn a_dropped_transaction_stores_nothing_and_gives_its_connection_back() {
    let stage = stage().await;
    let fence: Fence<Db> = Fence::new(stage.narrow().await);
    let held = grant(1);
    for _ in 0..3 {
        let mut tx = fence.begin(&held).await.unwrap();
        sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
        drop(tx);
    }
    let mut tx = fence.begin(&held).await.unwrap();
    let seen: i64 = sqlx::query_scalar("select count(*) from entry").fetch_one(&mut *tx).await.unwrap();
    assert_eq!(seen, 0);
}

#[tokio::test]
async fn tokens_beyond_two_to_the_53_stay_apart() {
    let stage = stage().await;
    let odd = grant(9_007_199_254_740_993);
    stage.fence.begin(&odd).await.unwrap().commit().await.unwrap();
    let just_below = grant(9_007_199_254_740_992);
    assert_eq!(
        refused(&stage.fence.begin(&just_below).await.unwrap_err()),
        (9_007_199_254_740_992, 9_007_199_254_740_993)
    );
    stage.fence.begin(&grant(i64::MAX)).await.unwrap().commit().await.unwrap();
}

/// A24
#[tokio::test]
async fn odd_names_have_fences_of_their_own() {
    let stage = stage().await;
    let longest = "x".repeat(Resource::MAX_BYTES);
    let names = ["{a}:b", "a{b}c", "{}", "}{", "{{x}}", "a b", "a'b", "a\\b", "naïve/λ", "a", "A", &longest];
    for (token, name) in (1..).zip(names) {
        stage.fence.begin(&grant_on(name, token)).await.unwrap().commit().await.unwrap();
    }
    for (token, name) in (1..).zip(names) {
        assert_eq!(refused(&stage.fence.begin(&grant_on(name, token)).await.unwrap_err()), (token, token));
    }
}

// ---- numbering ----

#[tokio::test]
async fn a_fresh_resource_is_numbered_from_one_and_every_forgetting_opens_an_epoch() {
    let stage = stage().await;
    let resource = Resource::new(RESOURCE).unwrap();
    let (first, second) = (OwnerId::random(), OwnerId::random());
    let renumber =
        async |owner, counter| stage.fence.renumber(&resource, owner, counter, SOON).await.unwrap().get();

    assert_eq!(renumber(first, None).await, 1);
    assert_eq!(renumber(first, None).await, 1, "asked again after a lost answer");
    assert_eq!(renumber(second, None).await, 1 << 32);
    assert_eq!(renumber(second, Some(FencingToken::new(7).unwrap())).await, 1 << 32);
    let ahead = FencingToken::new((5 << 32) + 3).unwrap();
    assert_eq!(renumber(OwnerId::random(), Some(ahead)).await, 6 << 32, "above the counter, too");
}

#[tokio::test]
async fn a_token_that_was_issued_and_slept_on_is_refused_after_renumbering() {
    let stage = stage().await;
    let resource = Resource::new(RESOURCE).unwrap();
    stage.fence.begin(&grant(3)).await.unwrap().commit().await.unwrap();
    // Issued by the lock service, and never shown to the database before the counter was lost.
    let slept_on = grant(9);
    let owner = OwnerId::random();
    let token = stage.fence.renumber(&resource, owner, None, SOON).await.unwrap();
    let (offered, seen) = refused(&stage.fence.begin(&slept_on).await.unwrap_err());
    assert_eq!((offered, seen), (9, token.get()));
    let renumbered = fencerow::Grant::new(resource, token, owner, std::time::Duration::from_secs(5));
    stage.fence.begin(&renumbered).await.unwrap().commit().await.unwrap();
}

#[tokio::test]
async fn the_last_epoch_has_no_next() {
    let stage = stage().await;
    stage.fence.begin(&grant(i64::MAX)).await.unwrap().commit().await.unwrap();
    let resource = Resource::new(RESOURCE).unwrap();
    assert!(stage.fence.renumber(&resource, OwnerId::random(), None, SOON).await.is_err());
}

// ---- idempotency ----

async fn settle(
    stage: &Stage,
    token: &fencerow::Grant,
    key: &str,
    amount: i64,
) -> Result<(bool, i64), FenceError> {
    let mut tx = stage.fence.begin(token).await?;
    let outcome = match tx.claim(key, &amount).await? {
        Claim::Replayed(receipt) => (false, receipt),
        Claim::Fresh(claim) => {
            sqlx::query("insert into entry (payout, amount) values (1, $1)")
                .bind(amount)
                .execute(&mut *tx)
                .await?;
            (true, claim.record(&mut tx, amount * 10).await?)
        }
    };
    tx.commit().await?;
    Ok(outcome)
}

#[tokio::test]
async fn a_key_used_twice_runs_once_and_replays_its_response() {
    let stage = stage().await;
    assert_eq!(settle(&stage, &grant(1), "payout-1", 100).await.unwrap(), (true, 1000));
    assert_eq!(settle(&stage, &grant(2), "payout-1", 100).await.unwrap(), (false, 1000));
    assert_eq!(stage.entries().await, 1);
}

#[tokio::test]
async fn a_key_with_another_payload_is_refused() {
    let stage = stage().await;
    let held = grant(1);
    settle(&stage, &held, "payout-1", 100).await.unwrap();
    let error = settle(&stage, &held, "payout-1", 200).await.unwrap_err();
    assert!(matches!(error, FenceError::KeyReused { what: "input", .. }), "{error:?}");
    assert_eq!(settle(&stage, &held, "payout-1", 100).await.unwrap(), (false, 1000));
    assert_eq!(stage.entries().await, 1);
}

#[tokio::test]
async fn a_bare_key_belongs_to_its_resource_and_a_scoped_one_to_its_scope() {
    let stage = stage().await;
    let (monday, tuesday) = (grant_on("monday", 1), grant_on("tuesday", 1));
    settle(&stage, &monday, "payout-1", 100).await.unwrap();
    let error = settle(&stage, &tuesday, "payout-1", 100).await.unwrap_err();
    assert!(matches!(error, FenceError::KeyReused { what: "resource", .. }), "{error:?}");

    let scoped = Key::scoped("payouts", "payout-1").unwrap();
    for (day, expected) in [(&monday, false), (&tuesday, true)] {
        let mut tx = stage.fence.begin(day).await.unwrap();
        match tx.claim(&scoped, &100).await.unwrap() {
            Claim::Fresh(claim) => drop(claim.record(&mut tx, 7).await.unwrap()),
            Claim::Replayed(response) => assert!(expected && response == 7),
        }
        tx.commit().await.unwrap();
    }
}

#[tokio::test]
async fn a_key_whose_transaction_was_rolled_back_is_fresh_again() {
    let stage = stage().await;
    let held = grant(1);
    let mut tx = stage.fence.begin(&held).await.unwrap();
    let Claim::Fresh(claim) = tx.claim("payout-1", &100).await.unwrap() else { panic!("used before") };
    sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
    claim.record(&mut tx, 1).await.unwrap();
    drop(tx);
    assert_eq!(settle(&stage, &held, "payout-1", 100).await.unwrap(), (true, 1000));
    assert_eq!(stage.entries().await, 1);
}

#[tokio::test]
async fn a_claim_without_a_response_is_not_committed() {
    let stage = stage().await;
    let mut tx = stage.fence.begin(&grant(1)).await.unwrap();
    let claim = tx.claim::<_, ()>("payout-1", &100).await.unwrap();
    assert!(matches!(claim, Claim::Fresh(_)));
    let error = tx.claim::<_, ()>("payout-1", &100).await.unwrap_err();
    assert!(matches!(error, FenceError::Unrecorded { .. }), "{error:?}");
    sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
    let error = tx.commit().await.unwrap_err();
    assert!(matches!(error, FenceError::Unrecorded { .. }), "{error:?}");
    assert_eq!(stage.entries().await, 0);
    assert_eq!(settle(&stage, &grant(2), "payout-1", 100).await.unwrap(), (true, 1000));
}

#[tokio::test]
async fn a_claim_is_recorded_in_its_own_transaction_only() {
    let stage = stage().await;
    let mut first = stage.fence.begin(&grant_on("a", 1)).await.unwrap();
    let Claim::Fresh(claim) = first.claim("payout-1", &100).await.unwrap() else { panic!("used before") };
    first.rollback().await.unwrap();
    let mut second = stage.fence.begin(&grant_on("a", 2)).await.unwrap();
    let error = claim.record(&mut second, 1).await.unwrap_err();
    assert!(matches!(error, FenceError::Unfenced { .. }), "{error:?}");
}

#[tokio::test]
async fn a_business_failure_is_remembered_and_its_work_undone() {
    let stage = stage().await;
    let held = grant(1);
    let decline = async || -> Result<Result<i64, String>, FenceError> {
        let mut tx = stage.fence.begin(&held).await?;
        let outcome = match tx.claim("payout-1", &100).await? {
            Claim::Replayed(outcome) => outcome,
            Claim::Fresh(claim) => {
                let work = claim.undoable(&mut tx).await?;
                sqlx::query(ENTRY).execute(&mut *tx).await?;
                // The database's own refusal: a row with that key is there.
                let failed =
                    sqlx::query("insert into account (id, balance) values (1, 0)").execute(&mut *tx).await;
                assert!(failed.is_err());
                work.undo_and_record(&mut tx, Err("declined".to_owned())).await?
            }
        };
        tx.commit().await?;
        Ok(outcome)
    };
    assert_eq!(decline().await.unwrap(), Err("declined".to_owned()));
    assert_eq!(decline().await.unwrap(), Err("declined".to_owned()));
    assert_eq!(stage.entries().await, 0);
    assert_eq!(stage.number("select count(*) from account").await, 2);
}

#[tokio::test]
async fn undoing_the_work_of_one_claim_leaves_the_others_of_its_transaction() {
    let stage = stage().await;
    let held = grant(1);
    let mut tx = stage.fence.begin(&held).await.unwrap();
    let Claim::Fresh(outer) = tx.claim("outer", &1).await.unwrap() else { panic!("used before") };
    sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
    let outer = outer.undoable(&mut tx).await.unwrap();
    for key in ["kept", "undone"] {
        let Claim::Fresh(inner) = tx.claim(key, &1).await.unwrap() else { panic!("used before") };
        let inner = inner.undoable(&mut tx).await.unwrap();
        sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
        if key == "kept" {
            inner.record(&mut tx, 1).await.unwrap();
        } else {
            inner.undo_and_record(&mut tx, 0).await.unwrap();
        }
    }
    outer.record(&mut tx, 1).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(stage.entries().await, 2);

    // And undoing an outer claim takes the inner ones with it, open or not.
    let mut tx = stage.fence.begin(&held).await.unwrap();
    let Claim::Fresh(outer) = tx.claim("outer-2", &1).await.unwrap() else { panic!("used before") };
    let outer = outer.undoable(&mut tx).await.unwrap();
    let inner = tx.claim::<_, i32>("inner-2", &1).await.unwrap();
    assert!(matches!(inner, Claim::Fresh(_)));
    outer.undo_and_record(&mut tx, 0).await.unwrap();
    tx.commit().await.unwrap();
    let mut tx = stage.fence.begin(&held).await.unwrap();
    assert!(matches!(tx.claim("outer-2", &1).await.unwrap(), Claim::Replayed(0)));
    assert!(matches!(tx.claim::<_, i32>("inner-2", &1).await.unwrap(), Claim::Fresh(_)));
}

#[tokio::test]
async fn claims_of_one_transaction_that_is_admitted_twice_are_undone_apart() {
    let stage = stage().await;
    let held = grant(1);
    stage.fence.begin(&held).await.unwrap().commit().await.unwrap();
    let mut tx = stage.pool.begin().await.unwrap();
    let mut first = stage.fence.admit(&mut tx, &held).await.unwrap();
    let Claim::Fresh(kept) = first.claim("kept", &1).await.unwrap() else { panic!("used before") };
    let kept = kept.undoable(&mut first).await.unwrap();
    sqlx::query(ENTRY).execute(&mut first).await.unwrap();
    let mut second = match stage.fence.admit(&mut tx, &held).await {
        Ok(second) => second,
        // Postgres admits nothing inside a savepoint, and the claim has set one.
        Err(error) => {
            assert!(matches!(error, FenceError::Unfenced { .. }), "{error:?}");
            return;
        }
    };
    let Claim::Fresh(undone) = second.claim("undone", &1).await.unwrap() else { panic!("used before") };
    let undone = undone.undoable(&mut second).await.unwrap();
    sqlx::query(ENTRY).execute(&mut second).await.unwrap();
    undone.undo_and_record(&mut second, 0).await.unwrap();
    kept.record(&mut second, 1).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(stage.entries().await, 1);
}

#[tokio::test]
async fn a_response_comes_back_to_the_last_digit_or_is_refused() {
    let stage = stage().await;
    let mut tx = stage.fence.begin(&grant(1)).await.unwrap();
    let exact = 3_186.339_326_629_059_f64.next_up();
    let Claim::Fresh(claim) = tx.claim("exact", &1).await.unwrap() else { panic!("used before") };
    claim.record(&mut tx, exact).await.unwrap();
    match tx.claim::<_, f64>("exact", &1).await.unwrap() {
        Claim::Replayed(replayed) => assert_eq!(replayed.to_bits(), exact.to_bits()),
        Claim::Fresh(_) => panic!("forgotten"),
    }
    let Claim::Fresh(claim) = tx.claim("nan", &1).await.unwrap() else { panic!("used before") };
    let error = claim.record(&mut tx, f64::NAN).await.unwrap_err();
    assert!(matches!(error, FenceError::Payload(_)), "{error:?}");
}

#[tokio::test]
async fn a_response_whose_record_was_rolled_back_is_not_committed() {
    let stage = stage().await;
    let mut tx = stage.fence.begin(&grant(1)).await.unwrap();
    let Claim::Fresh(claim) = tx.claim("payout-1", &100).await.unwrap() else { panic!("used before") };
    sqlx::raw_sql("savepoint s").execute(&mut *tx).await.unwrap();
    claim.record(&mut tx, 1).await.unwrap();
    sqlx::raw_sql("rollback to s").execute(&mut *tx).await.unwrap();
    let error = tx.commit().await.unwrap_err();
    assert!(matches!(error, FenceError::Unrecorded { .. }), "{error:?}");
    assert_eq!(settle(&stage, &grant(2), "payout-1", 100).await.unwrap(), (true, 1000));
}

#[tokio::test]
async fn a_response_of_another_shape_is_an_error_and_not_a_guess() {
    let stage = stage().await;
    settle(&stage, &grant(1), "payout-1", 100).await.unwrap();
    let mut tx = stage.fence.begin(&grant(2)).await.unwrap();
    let error = tx.claim::<_, String>("payout-1", &100).await.unwrap_err();
    assert!(matches!(error, FenceError::Payload(_)), "{error:?}");
}

#[tokio::test]
async fn large_amounts_and_odd_text_come_back_exactly() {
    let stage = stage().await;
    let held = grant(1);
    let response = (9_007_199_254_740_993_i64, "\u{0}\n\"λ\\".to_owned());
    for _ in 0..2 {
        let mut tx = stage.fence.begin(&held).await.unwrap();
        match tx.claim("odd", &response).await.unwrap() {
            Claim::Fresh(claim) => drop(claim.record(&mut tx, response.clone()).await.unwrap()),
            Claim::Replayed(replayed) => assert_eq!(replayed, response),
        }
        tx.commit().await.unwrap();
    }
}

// ---- commits ----

#[tokio::test]
async fn statements_that_end_the_transaction_are_refused_before_they_are_sent() {
    let stage = stage().await;
    let mut tx = stage.fence.begin(&grant(1)).await.unwrap();
    sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
    for sql in ["commit", "ROLLBACK", " /* why */ end", "begin"] {
        assert!(sqlx::query(sql).execute(&mut *tx).await.is_err(), "{sql}");
        assert!(sqlx::raw_sql(sql).execute(&mut *tx).await.is_err(), "{sql}");
        assert!(sqlx::query(sql).fetch_optional(&mut *tx).await.is_err(), "{sql}");
    }
    tx.commit().await.unwrap();
    assert_eq!(stage.entries().await, 1);
}

#[tokio::test]
async fn a_transaction_that_was_ended_from_within_is_not_called_committed() {
    let stage = stage().await;
    let mut tx = stage.fence.begin(&grant(1)).await.unwrap();
    sqlx::raw_sql("select 1; commit").execute(&mut *tx).await.unwrap();
    let error = tx.commit().await.unwrap_err();
    assert!(matches!(error, FenceError::Unfenced { .. }), "{error:?}");

    let mut tx = stage.fence.begin(&grant(2)).await.unwrap();
    sqlx::query("rollback").execute(tx.lend()).await.unwrap();
    let error = tx.commit().await.unwrap_err();
    assert!(matches!(error, FenceError::Unfenced { .. }), "{error:?}");

    // The pool is none the worse for it.
    let narrow: Fence<Db> = Fence::new(stage.narrow().await);
    let mut tx = narrow.begin(&grant(3)).await.unwrap();
    sqlx::raw_sql("select 1; commit").execute(&mut *tx).await.unwrap();
    drop(tx);
    let mut tx = narrow.begin(&grant(4)).await.unwrap();
    sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(stage.entries().await, 1);
}

#[tokio::test]
async fn a_nested_transaction_that_was_forgotten_is_not_called_committed() {
    use sqlx::Connection as _;
    let stage = stage().await;
    let mut tx = stage.fence.begin(&grant(1)).await.unwrap();
    std::mem::forget(tx.lend().begin().await.unwrap());
    sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
    let error = tx.commit().await.unwrap_err();
    assert!(matches!(error, FenceError::Unfenced { .. }), "{error:?}");
    assert_eq!(stage.entries().await, 0);
}

#[tokio::test]
async fn a_rollback_of_a_transaction_with_a_forgotten_nested_one_leaves_the_only_connection_fit() {
    use sqlx::Connection as _;
    let stage = stage().await;
    let fence: Fence<Db> = Fence::new(stage.narrow().await);
    let mut tx = fence.begin(&grant(1)).await.unwrap();
    sqlx::query(ENTRY).execute(&mut *tx).await.unwrap();
    std::mem::forget(tx.lend().begin().await.unwrap());
    assert!(tx.rollback().await.is_err());
    let seen: i64 = sqlx::query_scalar("select count(*) from entry").fetch_one(fence.pool()).await.unwrap();
    assert_eq!(seen, 0);
    fence.begin(&grant(2)).await.unwrap().commit().await.unwrap();
}

#[tokio::test]
async fn a_lent_connection_may_be_used_for_anything_that_does_not_end_the_transaction() {
    use sqlx::Connection as _;
    let stage = stage().await;
    let mut tx = stage.fence.begin(&grant(1)).await.unwrap();
    let mut nested = tx.lend().begin().await.unwrap();
    sqlx::query(ENTRY).execute(&mut *nested).await.unwrap();
    nested.commit().await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(stage.entries().await, 1);
}

#[tokio::test]
async fn futures_dropped_anywhere_leave_the_only_connection_fit() {
    let stage = stage().await;
    let fence: Fence<Db> = Fence::new(stage.narrow().await);
    let held = grant(1);
    let (mut dropped, mut round) = (0, 0_u32);
    while dropped < 200 {
        round += 1;
        assert!(round < 5_000, "only {dropped} drops in {round} rounds");
        // Polled a few times and dropped: each round gets a little further.
        let polls = round % 7;
        let begun = polled(polls, fence.begin(&held).into_future()).await;
        dropped += i32::from(begun.is_none());
        let Some(tx) = begun else { continue };
        let mut tx = tx.unwrap();
        let done = async {
            let claim = polled(polls, tx.claim(format!("key-{round}"), &round)).await?;
            let Claim::Fresh(claim) = claim.unwrap() else { panic!("used before") };
            polled(polls, claim.record(&mut tx, round)).await?.unwrap();
            let write = tx.update(&ACCOUNT).key("id", 1_i64).add("balance", 1_i64).into_future();
            assert_eq!(polled(polls, write).await?.unwrap(), ManyOutcome::Written);
            polled(polls, sqlx::query(ENTRY).execute(&mut *tx)).await?.unwrap();
            Some(())
        };
        let done = done.await;
        dropped += i32::from(done.is_none());
        if done.is_some() {
            dropped += i32::from(polled(polls, tx.commit()).await.is_none());
        }
    }
    let one: i64 = sqlx::query_scalar("select count(*) from account").fetch_one(fence.pool()).await.unwrap();
    assert_eq!(one, 2);
    fence.begin(&held).await.unwrap().commit().await.unwrap();
    // Whatever was stored was stored whole.
    let (keys, recorded) = ("select count(*) from entry", "select balance - 1000 from account where id = 1");
    assert_eq!(stage.number(keys).await, stage.number(recorded).await);
}

// ---- the caller's own transaction ----

#[tokio::test]
async fn a_transaction_of_the_callers_own_is_admitted() {
    let stage = stage().await;
    let held = grant(1);
    let mut tx = stage.pool.begin().await.unwrap();
    let admitted = async {
        let mut admitted = stage.fence.admit(&mut tx, &held).await?;
        if let Claim::Fresh(claim) = admitted.claim("payout-1", &100).await? {
            sqlx::query(ENTRY).execute(&mut admitted).await?;
            claim.record(&mut admitted, 1).await?;
        }
        Ok::<_, FenceError>(())
    };
    admitted.await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(stage.entries().await, 1);

    stage.fence.begin(&grant(2)).await.unwrap().commit().await.unwrap();
    let mut tx = stage.pool.begin().await.unwrap();
    assert_eq!(refused(&stage.fence.admit(&mut tx, &held).await.unwrap_err()), (1, 2));
}

#[tokio::test]
async fn a_nested_transaction_is_not_admitted() {
    use sqlx::Connection as _;
    let stage = stage().await;
    let mut tx = stage.pool.begin().await.unwrap();
    let mut nested = tx.begin().await.unwrap();
    let error = stage.fence.admit(&mut nested, &grant(1)).await.unwrap_err();
    assert!(matches!(error, FenceError::Unfenced { .. }), "{error:?}");
}

#[tokio::test]
async fn a_reader_that_is_admitted_too_late_cannot_write() {
    let stage = stage().await;
    let (old, new) = (grant(1), grant(2));
    stage.fence.begin(&old).await.unwrap().commit().await.unwrap();
    let mut tx = stage.pool.begin().await.unwrap();
    sqlx::query("select count(*) from account").fetch_one(&mut *tx).await.unwrap();
    stage.fence.begin(&new).await.unwrap().commit().await.unwrap();
    let error = stage.fence.admit(&mut tx, &old).await.unwrap_err();
    assert!(matches!(error, FenceError::Stale { .. } | FenceError::Retry { .. }), "{error:?}");
    drop(tx);
    let mut tx = stage.pool.begin().await.unwrap();
    stage.fence.admit(&mut tx, &new).await.unwrap();
    tx.commit().await.unwrap();
}

#[tokio::test]
async fn a_database_without_the_fence_says_so() {
    let stage = stage().await;
    stage.fence.unmigrate().await.unwrap();
    let error = stage.fence.begin(&grant(1)).await.unwrap_err();
    assert!(matches!(error, FenceError::NotMigrated(_)), "{error:?}");
}

// ---- rows with a token ----

#[tokio::test]
async fn two_payouts_on_one_account_under_one_lease_both_count() {
    let stage = stage().await;
    let mut tx = stage.fence.begin(&grant(1)).await.unwrap();
    for payout in [100_i64, 250] {
        let outcome = tx.update(&ACCOUNT).key("id", 1_i64).add("balance", -payout).await.unwrap();
        assert_eq!(outcome, ManyOutcome::Written);
    }
    tx.commit().await.unwrap();
    let mut tx = stage.fence.begin(&grant(2)).await.unwrap();
    let outcome = tx.update(&ACCOUNT).key("id", 1_i64).add("balance", -50_i64).await.unwrap();
    assert_eq!(outcome, ManyOutcome::Written);
    tx.commit().await.unwrap();
    assert_eq!(stage.number("select balance from account where id = 1").await, 600);
    assert_eq!(stage.number("select last_token from account where id = 1").await, 2);
}

#[tokio::test]
async fn a_row_written_once_a_term_says_so_the_second_time() {
    let stage = stage().await;
    let mut tx = stage.fence.begin(&grant(1)).await.unwrap();
    let mut outcomes = Vec::new();
    for state in ["settled", "again"] {
        outcomes.push(tx.update(&PAYOUT).key("id", 1_i64).set("state", state).await.unwrap());
    }
    assert_eq!(outcomes, [OnceOutcome::Written, OnceOutcome::AlreadyWritten]);
    let missing = tx.update(&PAYOUT).key("id", 99_i64).set("state", "settled").await.unwrap();
    assert_eq!(missing, OnceOutcome::Missing);
    tx.commit().await.unwrap();
    let state: String =
        sqlx::query_scalar("select state from payout where id = 1").fetch_one(&stage.pool).await.unwrap();
    assert_eq!(state, "settled");
}

#[tokio::test]
async fn a_row_with_a_higher_token_is_stale_with_both_tokens() {
    let stage = stage().await;
    sqlx::raw_sql("update account set last_token = 9; update payout set last_token = 9")
        .execute(&stage.pool)
        .await
        .unwrap();
    let mut tx = stage.fence.begin(&grant(5)).await.unwrap();
    let errors = [
        tx.update(&ACCOUNT).key("id", 1_i64).add("balance", 1_i64).await.unwrap_err(),
        tx.upsert(&ACCOUNT).key("id", 1_i64).set("balance", 1_i64).await.unwrap_err(),
        tx.delete(&ACCOUNT).key("id", 1_i64).await.unwrap_err(),
        tx.insert(&ACCOUNT).key("id", 1_i64).set("balance", 1_i64).await.unwrap_err(),
        tx.update(&PAYOUT).key("id", 1_i64).set("state", "x").await.unwrap_err(),
        tx.upsert(&PAYOUT).key("id", 1_i64).set("state", "x").await.unwrap_err(),
        tx.delete(&PAYOUT).key("id", 1_i64).await.unwrap_err(),
        tx.insert(&PAYOUT).key("id", 1_i64).set("state", "x").await.unwrap_err(),
    ];
    for error in errors {
        assert_eq!(refused(&error), (5, 9));
    }
    tx.commit().await.unwrap();
    assert_eq!(stage.number("select count(*) from account where last_token = 9 and balance = 1000").await, 2);
    assert_eq!(stage.number("select count(*) from payout where last_token = 9 and state = 'new'").await, 2);
}

#[tokio::test]
async fn rows_are_inserted_upserted_and_deleted() {
    let stage = stage().await;
    let mut tx = stage.fence.begin(&grant(5)).await.unwrap();
    let many = [
        tx.insert(&ACCOUNT).key("id", 7_i64).add("balance", 5_i64).await.unwrap(),
        tx.insert(&ACCOUNT).key("id", 7_i64).add("balance", 5_i64).await.unwrap(),
        tx.upsert(&ACCOUNT).key("id", 7_i64).add("balance", 5_i64).await.unwrap(),
        tx.upsert(&ACCOUNT).key("id", 8_i64).add("balance", 5_i64).await.unwrap(),
        tx.delete(&ACCOUNT).key("id", 2_i64).await.unwrap(),
        tx.delete(&ACCOUNT).key("id", 2_i64).await.unwrap(),
    ];
    use ManyOutcome::{Exists, Missing, Written};
    assert_eq!(many, [Written, Exists, Written, Written, Written, Missing]);
    let once = [
        tx.insert(&PAYOUT).key("id", 1_i64).set("state", "x").await.unwrap(),
        tx.insert(&PAYOUT).key("id", 7_i64).set("state", "x").await.unwrap(),
        tx.insert(&PAYOUT).key("id", 7_i64).set("state", "y").await.unwrap(),
        tx.upsert(&PAYOUT).key("id", 7_i64).set("state", "y").await.unwrap(),
        tx.upsert(&PAYOUT).key("id", 8_i64).set("state", "x").await.unwrap(),
        tx.upsert(&PAYOUT).key("id", 2_i64).set("state", "x").await.unwrap(),
        tx.delete(&PAYOUT).key("id", 2_i64).await.unwrap(),
        tx.delete(&PAYOUT).key("id", 9_i64).await.unwrap(),
    ];
    assert_eq!(
        once,
        [
            OnceOutcome::Exists,
            OnceOutcome::Written,
            OnceOutcome::AlreadyWritten,
            OnceOutcome::AlreadyWritten,
            OnceOutcome::Written,
            OnceOutcome::Written,
            OnceOutcome::AlreadyWritten,
            OnceOutcome::Missing,
        ]
    );
    tx.commit().await.unwrap();
    assert_eq!(stage.number("select balance from account where id = 7").await, 10);
    assert_eq!(stage.number("select balance from account where id = 8").await, 5);
    assert_eq!(stage.number("select count(*) from payout where state = 'x' and last_token = 5").await, 3);
}

#[tokio::test]
async fn a_write_without_a_key_or_with_one_that_fits_several_rows_is_refused() {
    let stage = stage().await;
    let mut tx = stage.fence.begin(&grant(5)).await.unwrap();
    let error = tx.update(&ACCOUNT).set("balance", 0_i64).await.unwrap_err();
    assert!(matches!(error, FenceError::Invalid(_)), "{error:?}");
    let error = tx.update(&ACCOUNT).key("balance", 1000_i64).set("balance", 0_i64).await.unwrap_err();
    assert!(matches!(error, FenceError::Invalid(_)), "{error:?}");
    assert!(tx.commit().await.is_err());
    assert_eq!(stage.number("select cast(sum(balance) as bigint) from account").await, 2000);
}

#[tokio::test]
async fn a_column_that_is_not_there_or_is_the_fences_own_is_refused() {
    let stage = stage().await;
    let mut tx = stage.fence.begin(&grant(5)).await.unwrap();
    for name in ["last_token", "LAST_TOKEN"] {
        let error = tx.update(&ACCOUNT).key("id", 1_i64).set(name, 999_i64).await.unwrap_err();
        assert!(matches!(error, FenceError::Invalid(_)), "{error:?}");
    }
    let error = tx.delete(&ACCOUNT).key("idd", "idd").await.unwrap_err();
    assert!(matches!(error, FenceError::Database(_)), "{error:?}");
    drop(tx);
    assert_eq!(stage.number("select count(*) from account").await, 2);
}

#[tokio::test]
async fn an_odd_identifier_is_quoted_or_refused_and_never_executed() {
    const ODD: Table<Many> = Table::many("Odd \"table\"; drop table account; --");
    const LONG: Table<Many> = Table::many("x123456789x123456789x123456789x123456789x123456789x123456789abcd");
    let stage = stage().await;
    sqlx::raw_sql(
        "create table \"Odd \"\"table\"\"; drop table account; --\" (\"select\" bigint primary key, \"A b\" text, last_token bigint)",
    )
    .execute(&stage.pool)
    .await
    .unwrap();
    let mut tx = stage.fence.begin(&grant(5)).await.unwrap();
    let outcome = tx.upsert(&ODD).key("select", 1_i64).set("A b", "x").await.unwrap();
    assert_eq!(outcome, ManyOutcome::Written);
    let error = tx.upsert(&LONG).key("id", 1_i64).await.unwrap_err();
    assert!(matches!(error, FenceError::Invalid(_)), "{error:?}");
    tx.commit().await.unwrap();
    assert_eq!(stage.number("select count(*) from account").await, 2);
}

/// What a `last_token` on the rows alone is worth, and why the fence belongs to the resource.
#[tokio::test]
async fn a_row_token_alone_lets_a_sleeper_write_every_row_that_its_successor_has_not_touched() {
    let stage = stage().await;
    let (sleeper, successor) = (grant(33), grant(34));
    stage.fence.begin(&sleeper).await.unwrap().commit().await.unwrap();
    let mut tx = stage.fence.begin(&successor).await.unwrap();
    let outcome = tx.update(&ACCOUNT).key("id", 1_i64).add("balance", -1_i64).await.unwrap();
    assert_eq!(outcome, ManyOutcome::Written);
    tx.commit().await.unwrap();

    // The sleeper wakes, and guards its rows by hand: the row that 34 wrote refuses, the other takes it.
    let by_hand = "update account set balance = balance - 500, last_token = 33 where id = $1 and coalesce(last_token, 0) < 33";
    let touched = sqlx::query(by_hand).bind(1_i64).execute(&stage.pool).await.unwrap();
    let untouched = sqlx::query(by_hand).bind(2_i64).execute(&stage.pool).await.unwrap();
    assert_eq!((touched.rows_affected(), untouched.rows_affected()), (0, 1));

    // Through the fence it writes neither.
    assert_eq!(refused(&stage.fence.begin(&sleeper).await.unwrap_err()), (33, 34));
}

#[tokio::test]
async fn every_isolation_level_refuses_a_stale_grant_as_stale() {
    let stage = stage().await;
    stage.fence.begin(&grant(34)).await.unwrap().commit().await.unwrap();
    for level in [Isolation::ReadCommitted, Isolation::RepeatableRead, Isolation::Serializable] {
        let error = stage.fence.begin(&grant(33)).isolation(level).await.unwrap_err();
        assert_eq!(refused(&error), (33, 34));
    }
}
