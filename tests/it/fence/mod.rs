//! The fence alone, under grants made by hand.
//!
//! What must hold on every database is written once, in `laws.rs`, and runs on each.

mod migrations;
mod postgres;
pub(crate) mod sleepers;

use std::time::Duration;

use fencerow::{FencingToken, Grant, OwnerId, Resource};

#[path = "."]
mod on_postgres {
    use super::fixtures::postgres as fixture;
    mod laws;
}

#[path = "."]
mod on_sqlite {
    use super::fixtures::sqlite as fixture;
    #[allow(clippy::duplicate_mod, reason = "the same laws, on another database")]
    mod laws;
}

pub(crate) const RESOURCE: &str = "settlement:2026-11-30";

/// A grant of a new owner.
pub(crate) fn grant(token: i64) -> Grant {
    grant_on(RESOURCE, token)
}

pub(crate) fn grant_on(resource: &str, token: i64) -> Grant {
    let resource = Resource::new(resource).unwrap();
    Grant::new(resource, FencingToken::new(token).unwrap(), OwnerId::random(), Duration::from_secs(30))
}

/// Polls a future as often as it wakes, up to `polls` times, and drops it.
pub(crate) async fn polled<T>(polls: u32, future: impl Future<Output = T>) -> Option<T> {
    let mut future = std::pin::pin!(future);
    let mut left = polls;
    std::future::poll_fn(|cx| {
        if left == 0 {
            return std::task::Poll::Ready(None);
        }
        left -= 1;
        let outcome = future.as_mut().poll(cx).map(Some);
        if outcome.is_pending() && left == 0 {
            return std::task::Poll::Ready(None);
        }
        outcome
    })
    .await
}

/// A database with a fence and some tables to write to, for one test.
pub(crate) mod fixtures {
    /// Works on both databases.
    const TABLES: &str = "
        create table account (id bigint primary key, balance bigint not null, last_token bigint);
        create table payout (id bigint primary key, state text not null, last_token bigint not null default 0);
        create table entry (payout bigint not null, amount bigint not null);
        insert into account (id, balance) values (1, 1000), (2, 1000);
        insert into payout (id, state) values (1, 'new'), (2, 'new');";

    pub(crate) mod postgres {
        use fencerow::fence::Fence;

        use crate::support::{self, TestDatabase};

        pub(crate) type Db = sqlx::Postgres;

        pub(crate) struct Stage {
            pub(crate) fence: Fence<Db>,
            pub(crate) pool: sqlx::PgPool,
            pub(crate) database: TestDatabase,
        }

        pub(crate) async fn stage() -> Stage {
            let database = support::postgres().await;
            let pool = database.pool().await;
            let fence = Fence::new(pool.clone());
            fence.migrate().await.unwrap();
            sqlx::raw_sql(super::TABLES).execute(&pool).await.unwrap();
            Stage { fence, pool, database }
        }

        impl Stage {
            /// The same database, through one connection and no more.
            pub(crate) async fn narrow(&self) -> sqlx::PgPool {
                sqlx::postgres::PgPoolOptions::new()
                    .max_connections(1)
                    .connect(&self.database.url)
                    .await
                    .unwrap()
            }
        }
    }

    pub(crate) mod sqlite {
        use fencerow::fence::Fence;
        use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};

        pub(crate) type Db = sqlx::Sqlite;

        pub(crate) struct Stage {
            pub(crate) fence: Fence<Db>,
            pub(crate) pool: sqlx::SqlitePool,
            options: SqliteConnectOptions,
            /// Removes the files at the end.
            _folder: tempfile::TempDir,
        }

        pub(crate) async fn stage() -> Stage {
            let folder = tempfile::tempdir().unwrap();
            let options = SqliteConnectOptions::new()
                .filename(folder.path().join("test.sqlite"))
                .create_if_missing(true)
                .journal_mode(SqliteJournalMode::Wal);
            let pool =
                SqlitePoolOptions::new().max_connections(4).connect_with(options.clone()).await.unwrap();
            let fence = Fence::new(pool.clone());
            fence.migrate().await.unwrap();
            sqlx::raw_sql(super::TABLES).execute(&pool).await.unwrap();
            Stage { fence, pool, options, _folder: folder }
        }

        impl Stage {
            pub(crate) fn file(&self) -> &std::path::Path {
                self.options.get_filename()
            }

            /// The same database, through one connection and no more.
            pub(crate) async fn narrow(&self) -> sqlx::SqlitePool {
                SqlitePoolOptions::new().max_connections(1).connect_with(self.options.clone()).await.unwrap()
            }
        }
    }
}
