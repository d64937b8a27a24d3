//! Locks in Postgres.

use std::fmt;
use std::str::FromStr as _;
use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgArguments, PgConnectOptions, PgPool, PgPoolOptions, PgRow};
use sqlx::query::Query;
use sqlx::{Postgres, Row as _};
use uuid::Uuid;

use super::error::LeaseError;
use super::service::{Attempt, Holder, LockService, Origin, Request, Standing};
use super::ttl::Ttl;
use crate::error::Invalid;
use crate::owner::OwnerId;
use crate::resource::Resource;
use crate::token::FencingToken;

/// How many connections [`PgLocks::connect`] opens at most. Each step is short; one more than a
/// single one keeps a stuck connection from holding everybody up.
const CONNECTIONS: u32 = 4;
/// How long a step may take to get a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);
/// How long a step may take on it.
const RESPONSE_LIMIT: Duration = Duration::from_secs(3);
/// How often a step is sent that lost against another one: only where the database's default is a
/// stricter isolation than READ COMMITTED. Nothing was done then, and one of the two always wins.
const SERIALIZATION_TRIES: u32 = 10;

/// Keeps leases and token counters in a Postgres database, in the table `fencerow.lease`; clones
/// share the connections.
///
/// Each step is one call of an SQL function, judged by the database's clock, which is a wall clock:
/// set back, it makes leases longer; set forward, it lets the next holder in early, whom the fence
/// tells from the last. The crate's migrations create the functions. The role needs no right on the table. A counter is trusted only
/// on the timeline that it was counted on: after a promotion the next grant is numbered anew.
///
/// Leases live on connections of their own, so that a keep-alive never waits for a connection that
/// a writer has; nothing is held between two steps. A pooler in transaction mode may stand in
/// between if it knows prepared statements.
///
/// # Examples
///
/// ```no_run
/// use fencerow::lease::{Leases, PgLocks};
/// use std::time::Duration;
///
/// # async fn example(fence: impl fencerow::Renumber) -> Result<(), fencerow::lease::LeaseError> {
/// let leases = Leases::new(PgLocks::connect("postgres://localhost/bank").await?, fence);
/// let lease = leases.acquire("settlement:2026-11-30", Duration::from_secs(10)).await?;
/// println!("token {}", lease.token());
/// lease.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct PgLocks {
    pool: PgPool,
}

impl PgLocks {
    /// Opens a small pool of connections for leases alone.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Invalid`] if that is no `postgres://` URL, [`LeaseError::Unavailable`] if the
    /// database cannot be reached or does not let us in.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect.
    pub async fn connect(url: &str) -> Result<Self, LeaseError> {
        // The error of the parser may quote the URL, and with it a password.
        let malformed = |reason| Invalid::Option { what: "Postgres URL", reason };
        if !(url.starts_with("postgres://") || url.starts_with("postgresql://")) {
            return Err(malformed("it does not begin with postgres://").into());
        }
        let mut options = PgConnectOptions::from_str(url).map_err(|_| malformed("it is malformed"))?;
        if options.get_application_name().is_none() {
            options = options.application_name("fencerow leases");
        }
        let pool = PgPoolOptions::new().max_connections(CONNECTIONS).acquire_timeout(CONNECT_LIMIT);
        let pool = pool.connect_with(options).await.map_err(|error| LeaseError::Unavailable(error.into()))?;
        Ok(Self { pool })
    }

    /// Takes its connections from `pool`. Let it be one that no writer takes its own from: where
    /// they are used up, keep-alives wait, and leases are lost.
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        Self { pool }
    }

    /// Sends one step, which is a single statement.
    async fn ask<'q>(
        &self,
        resource: &Resource,
        step: impl Fn() -> Query<'q, Postgres, PgArguments>,
    ) -> Result<Option<PgRow>, LeaseError> {
        let mut tries = 1;
        loop {
            let connection = self.pool.acquire().await.map_err(|error| failure(resource, error))?;
            let mut lent = Lent { connection, ended: false };
            let answer = match tokio::time::timeout(RESPONSE_LIMIT, lent.fetch(step())).await {
                Ok(answer) => answer,
                Err(elapsed) => return Err(LeaseError::Unavailable(elapsed.into())),
            };
            match answer {
                Err(sqlx::Error::Database(error))
                    if error.code().as_deref() == Some("40001") && tries < SERIALIZATION_TRIES =>
                {
                    tries += 1;
                }
                answer => return answer.map_err(|error| failure(resource, error)),
            }
        }
    }

    async fn step<'q>(
        &self,
        resource: &Resource,
        step: impl Fn() -> Query<'q, Postgres, PgArguments>,
    ) -> Result<Standing, LeaseError> {
        let row =
            self.ask(resource, step).await?.ok_or_else(|| failure(resource, sqlx::Error::RowNotFound))?;
        let done = row.try_get(0).map_err(|error| failure(resource, error))?;
        Ok(if done { Standing::Ours } else { Standing::NotOurs })
    }
}

/// A connection that is closed unless its step has ended: a step that is dropped or hangs would
/// otherwise keep its place in the pool for as long as the server is silent.
struct Lent {
    connection: PoolConnection<Postgres>,
    ended: bool,
}

impl Lent {
    async fn fetch(&mut self, step: Query<'_, Postgres, PgArguments>) -> Result<Option<PgRow>, sqlx::Error> {
        let answer = step.fetch_optional(&mut *self.connection).await;
        self.ended = matches!(answer, Ok(_) | Err(sqlx::Error::Database(_)));
        answer
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if !self.ended {
            self.connection.close_on_drop();
        }
    }
}

impl LockService for PgLocks {
    fn acquire<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Attempt, LeaseError>> {
        Box::pin(async move {
            let Request { resource, owner, ttl, origin } = request;
            let step = || {
                sqlx::query(include_str!("acquire.sql"))
                    .bind(resource.as_str())
                    .bind(owner.get())
                    .bind(ttl.signed_millis())
                    .bind(without_nul(&origin.host))
                    .bind(i64::from(origin.process))
                    .bind(without_nul(&origin.label))
            };
            let row = self.ask(resource, step).await?;
            let row = row.ok_or_else(|| failure(resource, sqlx::Error::RowNotFound))?;
            read_attempt(&row).map_err(|error| failure(resource, error))
        })
    }

    fn seed<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        token: FencingToken,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(self.step(resource, move || {
            sqlx::query(include_str!("seed.sql")).bind(resource.as_str()).bind(owner.get()).bind(token.get())
        }))
    }

    fn renew<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        ttl: Ttl,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(self.step(resource, move || {
            let query = sqlx::query(include_str!("renew.sql"));
            query.bind(resource.as_str()).bind(owner.get()).bind(ttl.signed_millis())
        }))
    }

    fn release<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(self.step(resource, move || {
            sqlx::query(include_str!("release.sql")).bind(resource.as_str()).bind(owner.get())
        }))
    }

    fn disown<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(self.step(resource, move || {
            sqlx::query(include_str!("disown.sql")).bind(resource.as_str()).bind(owner.get())
        }))
    }

    fn holder<'a>(&'a self, resource: &'a Resource) -> BoxFuture<'a, Result<Option<Holder>, LeaseError>> {
        Box::pin(async move {
            let step = || sqlx::query(include_str!("holder.sql")).bind(resource.as_str());
            let Some(row) = self.ask(resource, step).await? else { return Ok(None) };
            read_holder(&row).map(Some).map_err(|error| failure(resource, error))
        })
    }
}

impl fmt::Debug for PgLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgLocks").finish_non_exhaustive()
    }
}

/// Labels are for people; the one character that Postgres does not take is not worth a refusal.
fn without_nul(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

fn read_attempt(row: &PgRow) -> Result<Attempt, sqlx::Error> {
    let number = |token: Option<i64>| token.map(FencingToken::new).transpose();
    let token = number(row.try_get("token")?).map_err(decode)?;
    Ok(match (row.try_get("outcome")?, token) {
        ("granted", Some(token)) => Attempt::Granted(token),
        ("unnumbered", counter) => Attempt::Unnumbered { counter },
        _ => Attempt::Held { remaining: millis(row.try_get("remaining_ms")?) },
    })
}

fn read_holder(row: &PgRow) -> Result<Holder, sqlx::Error> {
    let owner: Uuid = row.try_get("owner")?;
    let token: Option<i64> = row.try_get("token")?;
    let token = token.map(FencingToken::new).transpose().map_err(decode)?;
    let since = SystemTime::UNIX_EPOCH + millis(row.try_get("since_ms")?).unwrap_or_default();
    let origin = Origin {
        host: row.try_get::<Option<_>, _>("host")?.unwrap_or_default(),
        process: row.try_get::<Option<i64>, _>("process")?.unwrap_or_default().try_into().map_err(decode)?,
        label: row.try_get::<Option<_>, _>("label")?.unwrap_or_default(),
    };
    Ok(Holder::new(owner.into(), token, since, millis(row.try_get("remaining_ms")?), origin))
}

fn millis(millis: Option<i64>) -> Option<Duration> {
    millis.map(|millis| Duration::from_millis(u64::try_from(millis).unwrap_or_default()))
}

fn decode(error: impl std::error::Error + Send + Sync + 'static) -> sqlx::Error {
    sqlx::Error::Decode(error.into())
}

/// Tells a database that will not (ever) from one that cannot (now).
fn failure(resource: &Resource, error: sqlx::Error) -> LeaseError {
    let will_not = match &error {
        // A missing table, function, right or schema; a counter at its end; a broken constraint;
        // arguments that our functions refuse.
        sqlx::Error::Database(error) => error
            .code()
            .is_some_and(|code| ["42", "3F", "22", "23", "ZF"].iter().any(|class| code.starts_with(class))),
        sqlx::Error::Decode(_)
        | sqlx::Error::Encode(_)
        | sqlx::Error::ColumnDecode { .. }
        | sqlx::Error::ColumnNotFound(_)
        | sqlx::Error::TypeNotFound { .. }
        | sqlx::Error::RowNotFound => true,
        _ => false,
    };
    if will_not {
        LeaseError::Refused { resource: resource.clone(), source: error.into() }
    } else {
        LeaseError::Unavailable(error.into())
    }
}
