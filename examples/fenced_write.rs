//! One fenced, idempotent write; and what becomes of a holder whose lease ran out.
//!
//! `cargo run --example fenced_write`: in a temporary SQLite file, so it needs no server. With
//! `RedisLocks` and a `PgPool` in their places the rest stays as it is.

use std::error::Error;
use std::time::Duration;

use fencerow::Credential;
use fencerow::fence::{Claim, Fence};
use fencerow::lease::{Leases, SqliteLocks};
use sqlx::Sqlite;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};

const DAY: &str = "settlement:2026-11-30";

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("bank.db");
    let options = SqliteConnectOptions::new().filename(&file).create_if_missing(true);
    let fence = Fence::new(SqlitePool::connect_with(options).await?);
    fence.migrate().await?;
    sqlx::query("create table payout (id integer primary key, state text not null)")
        .execute(fence.pool())
        .await?;
    sqlx::query("insert into payout values (8841, 'pending')").execute(fence.pool()).await?;
    let leases = Leases::new(SqliteLocks::beside(&file).await?, fence.clone());

    // A holder that will not renew, as if its process were frozen after this.
    let frozen = leases.acquire(DAY, Duration::from_millis(300)).without_keep_alive().await?;
    println!("A holds {DAY} under token {}", frozen.token());
    println!("A settles: {}", settle(&fence, &frozen).await?);

    let lease = leases.acquire(DAY, Duration::from_secs(10)).wait(Duration::from_secs(5)).await?;
    println!("A's lease ran out; B holds {DAY} under token {}", lease.token());
    println!("B settles again: {}", settle(&fence, &lease).await?);

    match settle(&fence, &frozen).await {
        Ok(_) => return Err("a stale write went through".into()),
        Err(refusal) => println!("A wakes up: {refusal}"),
    }
    lease.release().await?;
    Ok(())
}

/// Settles a payout, once, however often and by whomever it is asked for.
async fn settle(fence: &Fence<Sqlite>, lease: &impl Credential) -> Result<String, Box<dyn Error>> {
    let mut tx = fence.begin(lease).await?;
    let receipt = match tx.claim("payout-8841", &("acct-7", 12_500)).await? {
        Claim::Replayed(receipt) => format!("{receipt}, which was stored before"),
        Claim::Fresh(claim) => {
            sqlx::query("update payout set state = 'settled' where id = 8841").execute(&mut *tx).await?;
            let receipt = format!("receipt of token {}", tx.token());
            claim.record(&mut tx, receipt).await?
        }
    };
    tx.commit().await?;
    Ok(receipt)
}
