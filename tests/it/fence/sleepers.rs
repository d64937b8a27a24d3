//! A real process that is stopped inside a fenced transaction, and its successor.

use std::time::Duration;

use fencerow::Grant;
use fencerow::fence::{Fence, Limits};
use futures_util::TryStreamExt as _;
use sqlx::PgPool;

use super::fixtures::postgres::stage;
use super::grant;
use crate::support::child::{Child, hear, say};

/// In the other process: begins under the grant it is given, sleeps in the way it is told, and
/// goes on as if nothing had happened.
pub(crate) async fn sleeper() {
    let variable = |name| std::env::var(name).unwrap();
    let grant: Grant = variable("GRANT").parse().unwrap();
    // No limit of the database's comes to help: what ends the sleeper is its successor.
    let limits = Limits::new().idle(Duration::from_secs(600));
    let fence = Fence::new(PgPool::connect(&variable("DATABASE_URL")).await.unwrap()).with_limits(limits);
    let mut tx = fence.begin(&grant).await.unwrap();
    sqlx::query("insert into entry (payout, amount) values (1, 33)").execute(&mut *tx).await.unwrap();
    match variable("SLEEPS").as_str() {
        "idle" => {
            say("inside");
            hear().await;
        }
        "streaming" => {
            // Far more than the sockets hold: the server cannot finish sending.
            let rows = "select repeat('x', 10000) from generate_series(1, 100000)";
            let mut stream = sqlx::query(rows).fetch(&mut *tx);
            stream.try_next().await.unwrap();
            say("inside");
            hear().await;
            while let Ok(Some(_)) = stream.try_next().await {}
        }
        "copying" => {
            let mut copy = tx.lend().copy_in_raw("copy entry from stdin").await.unwrap();
            copy.send(&b"2\t33\n"[..]).await.unwrap();
            say("inside");
            hear().await;
            let _ = copy.finish().await;
        }
        other => panic!("cannot sleep {other}"),
    }
    say(tx.commit().await.is_ok());
    say(match fence.begin(&grant).await {
        Ok(_) => "admitted".to_owned(),
        Err(error) => error.to_string(),
    });
    hear().await;
}

async fn a_sleeper_is_passed(sleeps: &str) {
    let stage = stage().await;
    let held = grant(33);
    let printed = held.to_string();
    let variables = [("DATABASE_URL", stage.database.url.as_str()), ("GRANT", &printed), ("SLEEPS", sleeps)];
    let mut sleeper = Child::start("sleeper", variables);
    assert_eq!(sleeper.hear().await, "inside");
    sleeper.freeze();

    let fence = stage.fence.clone().with_patience(Duration::from_millis(200)).unwrap();
    let mut tx = fence.begin(&grant(34)).await.unwrap();
    sqlx::query("insert into entry (payout, amount) values (1, 34)").execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();

    sleeper.wake();
    sleeper.tell("go on").await;
    assert_eq!(sleeper.hear().await, "false", "its commit");
    let refusal = sleeper.hear().await;
    assert!(refusal.contains("stale fencing token 33") && refusal.contains("34 has been seen"), "{refusal}");
    let written: Vec<i64> =
        sqlx::query_scalar("select amount from entry").fetch_all(&stage.pool).await.unwrap();
    assert_eq!(written, [34]);
}

#[tokio::test]
async fn a_holder_paused_inside_an_idle_transaction_does_not_block_its_successor() {
    a_sleeper_is_passed("idle").await;
}

#[tokio::test]
async fn a_holder_paused_while_streaming_a_large_result_does_not_block_its_successor() {
    a_sleeper_is_passed("streaming").await;
}

#[tokio::test]
async fn a_holder_paused_in_copy_does_not_block_its_successor() {
    a_sleeper_is_passed("copying").await;
}
