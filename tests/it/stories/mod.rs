//! The whole way: a lease, its token, a fenced write, on every pair of a lock service and a
//! database.

mod forgetting;
pub(crate) mod holder;

use fencerow::lease::{Leases, PgLocks, SqliteLocks};

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
    }

    pub(crate) async fn world() -> World {
        let redis = support::redis().await;
        let stage = fixtures::postgres::stage().await;
        let leases = Leases::new(redis.locks().await, stage.fence.clone());
        let directions = vec![
            ("DATABASE_URL", stage.database.url.clone()),
            ("REDIS_URL", redis.url.clone()),
            ("REDIS_PREFIX", redis.prefix.clone()),
        ];
        World { stage, leases, directions }
    }

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
    }

    pub(crate) async fn world() -> World {
        let stage = fixtures::postgres::stage().await;
        let locks = PgLocks::connect(&stage.database.url).await.unwrap();
        let leases = Leases::new(locks, stage.fence.clone());
        let directions = vec![("DATABASE_URL", stage.database.url.clone())];
        World { stage, leases, directions }
    }

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
    }

    pub(crate) async fn world() -> World {
        let stage = fixtures::sqlite::stage().await;
        let leases = Leases::new(SqliteLocks::beside(stage.file()).await.unwrap(), stage.fence.clone());
        let directions = vec![("DATABASE_URL", stage.file().display().to_string())];
        World { stage, leases, directions }
    }

    #[path = "on_servers/laws.rs"]
    #[allow(clippy::duplicate_mod, reason = "the same stories, elsewhere")]
    mod laws;
}
