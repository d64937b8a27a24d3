//! Setting the fence's tables up and taking them away.

use std::path::Path;

use fencerow::fence::Fence;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};

use crate::support;

#[tokio::test]
async fn eight_processes_that_migrate_at_once_all_succeed() {
    for _ in 0..3 {
        let database = support::postgres().await;
        let mut starts = tokio::task::JoinSet::new();
        for _ in 0..8 {
            // A pool each, as in eight processes.
            let pool = database.pool().await;
            starts.spawn(async move { Fence::new(pool).migrate().await });
        }
        for outcome in starts.join_all().await {
            outcome.unwrap();
        }
        let pool = database.pool().await;
        let applied: i64 =
            sqlx::query_scalar("select count(*) from fencerow.migrations").fetch_one(&pool).await.unwrap();
        let files =
            std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations/postgres")).unwrap();
        let ups =
            files.filter(|file| file.as_ref().unwrap().file_name().to_string_lossy().ends_with(".up.sql"));
        assert_eq!(usize::try_from(applied).unwrap(), ups.count());
        let locks: i64 = sqlx::query_scalar("select count(*) from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())").fetch_one(&pool).await.unwrap();
        assert_eq!(locks, 0);
    }
}

#[tokio::test]
async fn eight_users_of_one_sqlite_file_that_migrate_at_once_all_succeed() {
    let folder = tempfile::tempdir().unwrap();
    let options =
        SqliteConnectOptions::new().filename(folder.path().join("x.sqlite")).create_if_missing(true);
    let mut starts = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let options = options.clone();
        starts.spawn(async move {
            let pool = SqlitePoolOptions::new().max_connections(1).connect_with(options).await.unwrap();
            Fence::new(pool).migrate().await
        });
    }
    for outcome in starts.join_all().await {
        outcome.unwrap();
    }
}

#[tokio::test]
async fn migrations_go_down_and_up_again_and_leave_the_applications_own_alone() {
    let database = support::postgres().await;
    let pool = database.pool().await;
    sqlx::raw_sql("create table _sqlx_migrations (theirs integer); create schema app; set search_path = app")
        .execute(&pool)
        .await
        .unwrap();
    let fence = Fence::new(pool.clone());
    for _ in 0..2 {
        fence.migrate().await.unwrap();
        fence.migrate().await.unwrap();
        let functions: i64 =
            count(&pool, "select count(*) from pg_proc where pronamespace = 'fencerow'::regnamespace").await;
        assert!(functions > 0);
        fence.unmigrate().await.unwrap();
        fence.unmigrate().await.unwrap();
        let left = "select (select count(*) from pg_proc where pronamespace = 'fencerow'::regnamespace)
                         + (select count(*) from pg_class where relnamespace = 'fencerow'::regnamespace and relkind = 'r')";
        assert_eq!(count(&pool, left).await, 1, "only the table of migrations is left");
    }
    assert_eq!(count(&pool, "select count(*) from public._sqlx_migrations").await, 0);
}

async fn count(pool: &sqlx::PgPool, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(pool).await.unwrap()
}
