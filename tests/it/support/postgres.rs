//! One Postgres for all tests, with a database of its own for each.

use std::sync::atomic::{AtomicU32, Ordering};

use sqlx::postgres::{PgConnection, PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection as _};
use testcontainers::ImageExt as _;
use tokio::sync::OnceCell;

use super::containers::{self, Server};
use super::eventually;

const PASSWORD: &str = "fencerow";

static SERVER: OnceCell<Server> = OnceCell::const_new();
static DATABASES: AtomicU32 = AtomicU32::new(0);

/// A fresh, empty database.
pub(crate) struct TestDatabase {
    pub(crate) url: String,
    name: String,
    address: String,
}

impl TestDatabase {
    /// A pool of a few connections.
    pub(crate) async fn pool(&self) -> PgPool {
        PgPoolOptions::new().max_connections(8).connect(&self.url).await.unwrap()
    }

    /// `host:port` of the server, for a proxy in front of it.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// The URL of this database behind another address.
    pub(crate) fn url_at(&self, address: impl std::fmt::Display) -> String {
        url(address, &self.name)
    }
}

/// Makes a database for one test.
pub(crate) async fn postgres() -> TestDatabase {
    let server = SERVER.get_or_init(start).await;
    let address = format!("{}:{}", server.host, server.port);
    let name = format!("test_{}", DATABASES.fetch_add(1, Ordering::Relaxed));
    let mut admin = PgConnection::connect(&url(&address, "postgres")).await.unwrap();
    sqlx::query(AssertSqlSafe(format!("create database {name}"))).execute(&mut admin).await.unwrap();
    admin.close().await.unwrap();
    TestDatabase { url: url(&address, &name), name, address }
}

fn url(address: impl std::fmt::Display, database: &str) -> String {
    format!("postgres://postgres:{PASSWORD}@{address}/{database}")
}

async fn start() -> Server {
    let server = containers::start("FENCEROW_POSTGRES_IMAGE", "postgres:17", 5432, |request| {
        request.with_env_var("POSTGRES_PASSWORD", PASSWORD).with_cmd([
            "postgres",
            "-c",
            "max_connections=300",
            "-c",
            "fsync=off",
        ])
    })
    .await;
    let url = url(format_args!("{}:{}", server.host, server.port), "postgres");
    // The official image first runs a server that listens on no port.
    eventually("Postgres answers", async || {
        let mut connection = PgConnection::connect(&url).await.ok()?;
        connection.ping().await.ok()
    })
    .await;
    server
}

#[tokio::test]
async fn every_test_has_a_database_of_its_own() {
    for _ in 0..2 {
        let pool = postgres().await.pool().await;
        sqlx::query("create table here (value integer)").execute(&pool).await.unwrap();
    }
}
