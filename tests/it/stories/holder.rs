//! In the other process: a holder that does as it is told.

use std::time::Duration;

use fencerow::fence::{Claim, Fence, FenceError};
use fencerow::lease::{Lease, Leases, PgLocks, RedisLocks, SqliteLocks};
use sqlx::{PgPool, SqlitePool};

use crate::support::child::{hear, say};

/// Acquires, says its token, and waits for instructions.
pub(crate) async fn holder() {
    let database = variable("DATABASE_URL").unwrap();
    if let Ok(redis) = variable("REDIS_URL") {
        let fence = Fence::new(PgPool::connect(&database).await.unwrap());
        let locks = RedisLocks::connect(&redis).await.unwrap();
        let locks = locks.with_prefix(&variable("REDIS_PREFIX").unwrap()).unwrap();
        on_postgres(Leases::new(locks, fence.clone()), fence).await;
    } else if database.starts_with("postgres:") {
        let fence = Fence::new(PgPool::connect(&database).await.unwrap());
        let locks = PgLocks::connect(&database).await.unwrap();
        on_postgres(Leases::new(locks, fence.clone()), fence).await;
    } else {
        let locks = SqliteLocks::beside(&database).await.unwrap();
        let fence = Fence::new(SqlitePool::connect(&format!("sqlite://{database}")).await.unwrap());
        on_sqlite(Leases::new(locks, fence.clone()), fence).await;
    }
}

fn variable(name: &str) -> Result<String, std::env::VarError> {
    std::env::var(name)
}

/// sqlx has no way to say "any of these databases" for a statement, so the text is kept once here.
macro_rules! obey {
    ($name:ident, $database:ty) => {
        async fn $name(leases: Leases, fence: Fence<$database>) {
            let lease = acquire(&leases).await;
            loop {
                let instruction = hear().await;
                match instruction.as_str() {
                    "lost" => say(format!("{:?}", lease.lost().await)),
                    "write" => {
                        let written: Result<(), FenceError> = async {
                            let mut tx = fence.begin(&lease).await?;
                            sqlx::query("insert into entry (payout, amount) values (1, 1)")
                                .execute(&mut *tx)
                                .await?;
                            tx.commit().await
                        }
                        .await;
                        say(told(written));
                    }
                    key @ ("die before commit" | "die after commit") => {
                        let mut tx = fence.begin(&lease).await.unwrap();
                        let Claim::Fresh(claim) = tx.claim(key, &100).await.unwrap() else {
                            panic!("used before")
                        };
                        sqlx::query("insert into entry (payout, amount) values (1, 100)")
                            .execute(&mut *tx)
                            .await
                            .unwrap();
                        claim.record(&mut tx, ()).await.unwrap();
                        if key == "die before commit" {
                            say("here");
                            hear().await;
                        }
                        tx.commit().await.unwrap();
                        say("here");
                    }
                    other => panic!("no such instruction: {other}"),
                }
            }
        }
    };
}

obey!(on_postgres, sqlx::Postgres);
obey!(on_sqlite, sqlx::Sqlite);

async fn acquire(leases: &Leases) -> Lease {
    let ttl = Duration::from_millis(variable("TTL").unwrap().parse().unwrap());
    let lease = leases.acquire("settlement", ttl).wait(Duration::from_secs(30)).await.unwrap();
    say(lease.token());
    lease
}

fn told(written: Result<(), FenceError>) -> String {
    match written {
        Ok(()) => "written".to_owned(),
        Err(FenceError::Stale { offered, seen, .. }) => format!("stale: offered {offered}, seen {seen}"),
        Err(other) => format!("{other:?}"),
    }
}
