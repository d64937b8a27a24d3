//! Where a run keeps its ledger, its fence and its leases.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fencerow::fence::{Fence, Limits};
use fencerow::lease::{Leases, RedisLocks, SqliteLocks};
use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, Postgres, Sqlite};

use crate::in_full;

/// More than a worker ever needs at once.
const CONNECTIONS: u32 = 4;
/// How long a raise waits for transactions of older leases before it ends them.
const PATIENCE: Duration = Duration::from_secs(1);
/// Postgres would end a transaction whose client sleeps when the lease runs out. Here that is put
/// off, so that the successor itself has to do it: as it must where no limit of the database's
/// ends the sleeper, in a COPY for example.
const IDLE: Duration = Duration::from_secs(20);

/// Where everything is; a worker is told by its director.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Place {
    /// A SQLite file, and the leases in another one beside it.
    Embedded { file: PathBuf },
    /// Leases in Redis, fence and ledger in Postgres, the ledger in a schema of its own.
    Servers { postgres: String, redis: String, schema: String },
}

impl Place {
    /// Makes what is not there by itself.
    pub(crate) async fn make(&self) -> Result<(), Box<dyn Error>> {
        self.execute(|schema| format!("create schema {schema}")).await
    }

    /// Removes what was made.
    pub(crate) async fn clear(&self) -> Result<(), Box<dyn Error>> {
        self.execute(|schema| format!("drop schema {schema} cascade")).await
    }

    async fn execute(&self, sql: impl FnOnce(&str) -> String) -> Result<(), Box<dyn Error>> {
        if let Self::Servers { postgres, schema, .. } = self {
            let mut conn = PgConnection::connect(postgres)
                .await
                .map_err(|error| format!("--postgres: {}", in_full(&error)))?;
            // The name is this program's own: letters, digits and underscores.
            conn.execute(AssertSqlSafe(sql(schema))).await?;
            conn.close().await?;
        }
        Ok(())
    }
}

pub(crate) async fn embedded(file: &Path) -> Result<(Leases, Fence<Sqlite>), Box<dyn Error>> {
    let options = SqliteConnectOptions::new()
        .filename(file)
        .create_if_missing(true)
        // Readers go on while somebody writes.
        .journal_mode(SqliteJournalMode::Wal);
    let pool = SqlitePoolOptions::new().max_connections(CONNECTIONS).connect_with(options).await?;
    let fence = Fence::new(pool);
    let locks = SqliteLocks::beside(file).await?;
    Ok((Leases::new(locks, fence.clone()), fence))
}

pub(crate) async fn servers(
    postgres: &str,
    redis: &str,
    schema: &str,
) -> Result<(Leases, Fence<Postgres>), Box<dyn Error>> {
    let options = postgres.parse::<PgConnectOptions>()?.options([("search_path", schema)]);
    let pool = PgPoolOptions::new().max_connections(CONNECTIONS).connect_with(options).await?;
    let fence = Fence::new(pool).with_patience(PATIENCE)?.with_limits(Limits::new().idle(IDLE));
    let locks = RedisLocks::connect(redis).await.map_err(|error| format!("--redis: {}", in_full(&error)))?;
    Ok((Leases::new(locks, fence.clone()), fence))
}
