//! A lease held by one process, used by another: its grant crosses in an environment variable.
//!
//! `cargo run --example grant_across_processes`: this program starts itself as the child, which
//! knows the fence and no lock service. Whether the grant still counts is for the fence to say.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use fencerow::Grant;
use fencerow::fence::{Fence, FenceError};
use fencerow::lease::{Leases, SqliteLocks};
use sqlx::Sqlite;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
use tokio::process::Command;

/// Where the child finds its grant.
const GRANT: &str = "FENCEROW_GRANT";
/// Where the child finds the database.
const FILE: &str = "BANK_FILE";

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    match (std::env::var(GRANT), std::env::var_os(FILE)) {
        (Ok(grant), Some(file)) => child(&grant.parse()?, Path::new(&file)).await,
        _ => parent().await,
    }
}

async fn parent() -> Result<(), Box<dyn Error>> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("bank.db");
    let fence = open(&file).await?;
    fence.migrate().await?;
    sqlx::query("create table note (token integer not null)").execute(fence.pool()).await?;
    let leases = Leases::new(SqliteLocks::beside(&file).await?, fence.clone());

    // The parent keeps the lease alive for as long as the child works under its grant.
    let lease = leases.acquire("ledger", Duration::from_secs(10)).await?;
    let grant = lease.grant();
    println!("parent: {GRANT}={grant}");
    run_child(&grant, &file).await?;
    lease.release().await?;

    let newer = leases.acquire("ledger", Duration::from_secs(10)).await?;
    println!("parent: the next lease has token {}", newer.token());
    run_child(&newer.grant(), &file).await?;
    // As a job that was queued with the first grant, and comes too late.
    run_child(&grant, &file).await?;
    newer.release().await?;
    Ok(())
}

async fn run_child(grant: &Grant, file: &Path) -> Result<(), Box<dyn Error>> {
    let mut child = Command::new(std::env::current_exe()?);
    let status = child.env(GRANT, grant.to_string()).env(FILE, file).status().await?;
    if status.success() { Ok(()) } else { Err(format!("the child failed: {status}").into()) }
}

async fn child(grant: &Grant, file: &Path) -> Result<(), Box<dyn Error>> {
    let fence = open(file).await?;
    let mut tx = match fence.begin(grant).await {
        Ok(tx) => tx,
        Err(refusal @ FenceError::Stale { .. }) => {
            println!(" child: {refusal}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    sqlx::query("insert into note values ($1)").bind(grant.token().get()).execute(&mut *tx).await?;
    tx.commit().await?;
    println!(" child: wrote under token {}", grant.token());
    Ok(())
}

async fn open(file: &Path) -> Result<Fence<Sqlite>, sqlx::Error> {
    let options = SqliteConnectOptions::new().filename(file).create_if_missing(true);
    Ok(Fence::new(SqlitePool::connect_with(options).await?))
}
