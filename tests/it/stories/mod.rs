//! The whole way: a lease, its token, a fenced write, on every pair of a lock service and a
//! database.

mod blocked;
mod chaos;
mod cluster;
mod failover;
mod fallback;
pub(crate) mod holder;
mod idle;
mod replicas;
mod sentinel;

use fencerow::Renumber;
use fencerow::lease::{Leases, PgLocks, RedisLocks, SqliteLocks};

use crate::fence::fixtures;

/// Where a second process finds the same locks and the same database.
pub(crate) type Directions = Vec<(&'static str, String)>;

/// Redis and Postgres.
mod on_servers {
    use super::*;
    use crate::support;

    pub(crate) use fixtures::postgres::{Db, Stage};

    pub(crate) struct World {
        pub(crate) stage: Stage,
        pub(crate) leases: Leases,
        pub(crate) directions: Directions,
        locks: RedisLocks,
        redis: support::TestRedis,
    }

    pub(crate) async fn world() -> World {
        let redis = support::redis().await;
        let stage = fixtures::postgres::stage().await;
        let locks = redis.locks().await;
        let leases = Leases::new(locks.clone(), stage.fence.clone());
        let directions = vec![
            ("DATABASE_URL", stage.database.url.clone()),
            ("REDIS_URL", redis.url.clone()),
            ("REDIS_PREFIX", redis.prefix.clone()),
        ];
        World { stage, leases, directions, locks, redis }
    }

    impl World {
        /// The same locks, numbered by another fence.
        pub(crate) fn leases_numbered_by(&self, fence: impl Renumber) -> Leases {
            Leases::new(self.locks.clone(), fence)
        }

        fn key(&self, suffix: &str) -> String {
            format!("{}{{settlement}}:{suffix}", self.redis.prefix)
        }

        async fn ask(&self, command: &[&str]) {
            let mut connection = self.redis.connection().await;
            let () = ::redis::cmd(command[0]).arg(&command[1..]).query_async(&mut connection).await.unwrap();
        }

        /// The lock service forgets all there was of the resource.
        pub(crate) async fn forget(&self) {
            self.ask(&["DEL", &self.key("lock"), &self.key("token"), &self.key("run")]).await;
        }

        /// Somebody lowers the counter by hand.
        pub(crate) async fn lower(&self, counter: i64) {
            self.ask(&["SET", &self.key("token"), &counter.to_string()]).await;
        }

        /// The lock alone is gone.
        pub(crate) async fn take_away(&self) {
            self.ask(&["DEL", &self.key("lock")]).await;
        }
    }

    mod forgetting;
    mod laws;
}

/// Postgres alone.
#[path = "."]
mod on_postgres {
    use super::*;

    pub(crate) use fixtures::postgres::{Db, Stage};

    pub(crate) struct World {
        pub(crate) stage: Stage,
        pub(crate) leases: Leases,
        pub(crate) directions: Directions,
        locks: PgLocks,
    }

    pub(crate) async fn world() -> World {
        let stage = fixtures::postgres::stage().await;
        let locks = PgLocks::connect(&stage.database.url).await.unwrap();
        let leases = Leases::new(locks.clone(), stage.fence.clone());
        let directions = vec![("DATABASE_URL", stage.database.url.clone())];
        World { stage, leases, directions, locks }
    }

    impl World {
        /// The same locks, numbered by another fence.
        pub(crate) fn leases_numbered_by(&self, fence: impl Renumber) -> Leases {
            Leases::new(self.locks.clone(), fence)
        }

        async fn ask(&self, sql: &'static str) {
            sqlx::query(sql).execute(&self.stage.pool).await.unwrap();
        }

        /// The lock service forgets all there was of the resource.
        pub(crate) async fn forget(&self) {
            self.ask("delete from fencerow.lease").await;
        }

        /// Somebody lowers the counter by hand.
        pub(crate) async fn lower(&self, counter: i64) {
            sqlx::query("update fencerow.lease set counter = $1")
                .bind(counter)
                .execute(&self.stage.pool)
                .await
                .unwrap();
        }

        /// The lock alone is gone.
        pub(crate) async fn take_away(&self) {
            self.ask("update fencerow.lease set owner = null, token = null, since = null, expires_at = null")
                .await;
        }
    }

    #[path = "on_servers/forgetting.rs"]
    #[allow(clippy::duplicate_mod, reason = "the same stories, elsewhere")]
    mod forgetting;
    #[path = "on_servers/laws.rs"]
    #[allow(clippy::duplicate_mod, reason = "the same stories, elsewhere")]
    mod laws;
}

/// SQLite and a file beside it.
#[path = "."]
mod on_sqlite {
    use super::*;

    pub(crate) use fixtures::sqlite::{Db, Stage};

    pub(crate) struct World {
        pub(crate) stage: Stage,
        pub(crate) leases: Leases,
        pub(crate) directions: Directions,
        locks: SqliteLocks,
    }

    pub(crate) async fn world() -> World {
        let stage = fixtures::sqlite::stage().await;
        let locks = SqliteLocks::beside(stage.file()).await.unwrap();
        let leases = Leases::new(locks.clone(), stage.fence.clone());
        let directions = vec![("DATABASE_URL", stage.file().display().to_string())];
        World { stage, leases, directions, locks }
    }

    impl World {
        /// The same locks, numbered by another fence.
        pub(crate) fn leases_numbered_by(&self, fence: impl Renumber) -> Leases {
            Leases::new(self.locks.clone(), fence)
        }

        /// Opens the file of leases, as an operator would.
        async fn leases(&self) -> sqlx::SqliteConnection {
            let file = format!("{}-leases", self.stage.file().display());
            let options = sqlx::sqlite::SqliteConnectOptions::new().filename(file);
            <sqlx::SqliteConnection as sqlx::Connection>::connect_with(&options).await.unwrap()
        }

        /// The lock service forgets all there was of the resource.
        pub(crate) async fn forget(&self) {
            sqlx::query("delete from lease").execute(&mut self.leases().await).await.unwrap();
        }

        /// Somebody lowers the counter by hand.
        pub(crate) async fn lower(&self, counter: i64) {
            let lower = sqlx::query("update lease set counter = $1").bind(counter);
            lower.execute(&mut self.leases().await).await.unwrap();
        }

        /// The lock alone is gone.
        pub(crate) async fn take_away(&self) {
            let free = "update lease set owner = null, token = null, boot = null, ends_ms = null";
            sqlx::query(free).execute(&mut self.leases().await).await.unwrap();
        }
    }

    #[path = "on_servers/forgetting.rs"]
    #[allow(clippy::duplicate_mod, reason = "the same stories, elsewhere")]
    mod forgetting;
    #[path = "on_servers/laws.rs"]
    #[allow(clippy::duplicate_mod, reason = "the same stories, elsewhere")]
    mod laws;
}
