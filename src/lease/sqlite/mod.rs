//! Locks in an SQLite file.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;
use sqlx::query::Query;
use sqlx::sqlite::{
    SqliteArguments, SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteRow,
    SqliteSynchronous,
};
use sqlx::{Row as _, Sqlite, SqliteConnection, Transaction};
use uuid::Uuid;

use super::error::LeaseError;
use super::service::{Attempt, Holder, LockService, Origin, Request, Standing};
use super::ttl::Ttl;
use crate::clock::Clock;
use crate::error::Invalid;
use crate::owner::OwnerId;
use crate::resource::Resource;
use crate::token::FencingToken;

/// A file has one writer at a time; a second connection lets a reader or a cancelled step go on.
const CONNECTIONS: u32 = 2;
/// How long a step waits for other processes' steps, each of which takes milliseconds.
const BUSY_LIMIT: Duration = Duration::from_secs(3);
/// How often setting the file up is tried again while other processes do the same.
const SET_UP_PAUSE: Duration = Duration::from_millis(20);

/// Keeps leases and token counters in a file beside an SQLite database, for the processes of one
/// machine; clones share the connections.
///
/// The file is `<database>-leases`, apart from the database since SQLite has one writer a file: a
/// long transaction must not keep a lease from being renewed. It must lie on a local disk. A process
/// that is stopped in the middle of a step, which takes milliseconds, keeps the file locked: until
/// it goes on or dies, every other step is [unavailable](LeaseError::Unavailable).
///
/// A lease's end is kept as a time since boot, with the boot's own id, and judged by the clock that
/// counts suspended time: setting the wall clock changes nothing, and a lease from before a reboot
/// has run out. Where the system has no `/proc/sys/kernel/random/boot_id`, a lease that has more
/// left than it was ever given is taken for one from before; at worst it is held on for as
/// long as it was given.
///
/// # Examples
///
/// ```
/// use fencerow::lease::{Leases, SqliteLocks};
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let database = directory.path().join("bank.db");
/// let leases = Leases::without_fence(SqliteLocks::beside(&database).await?);
/// let lease = leases.acquire("settlement:2026-11-30", Duration::from_secs(10)).await?;
/// // Another process, or another part of this one.
/// let others = Leases::without_fence(SqliteLocks::beside(&database).await?);
/// assert!(others.try_acquire("settlement:2026-11-30", Duration::from_secs(10)).await?.is_none());
/// lease.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct SqliteLocks {
    pool: SqlitePool,
    clock: Clock,
    boot: Arc<str>,
}

impl SqliteLocks {
    /// Opens the file of leases beside the database at `path`, and makes it if it is not there.
    /// The database itself is not touched.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Invalid`] for a URL or a database in memory, which has no place beside it;
    /// [`LeaseError::Unavailable`] if the file cannot be opened.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future may leave the file set up or empty; either is fine.
    pub async fn beside(path: impl AsRef<Path>) -> Result<Self, LeaseError> {
        let options = SqliteConnectOptions::new()
            .filename(sibling(path.as_ref())?)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            // What a power cut makes the counter forget could be issued again.
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(BUSY_LIMIT);
        let clock = Clock::boot();
        let end = clock.now().plus(BUSY_LIMIT);
        let pool = loop {
            match set_up(options.clone()).await {
                Ok(pool) => break pool,
                // Not every lock that setting up takes is waited for.
                Err(error) if is_busy(&error) && clock.now() < end => tokio::time::sleep(SET_UP_PAUSE).await,
                Err(error) => return Err(LeaseError::Unavailable(error.into())),
            }
        };
        Ok(Self { pool, clock, boot: boot_id().into() })
    }

    /// Begins a step that writes, and says what time it is: after the wait for other writers, so
    /// that no later step sets an earlier end.
    async fn begin(&self) -> Result<(Transaction<'static, Sqlite>, i64), sqlx::Error> {
        let transaction = self.pool.begin_with("begin immediate").await?;
        Ok((transaction, self.now()))
    }

    /// Milliseconds since boot.
    fn now(&self) -> i64 {
        i64::try_from(self.clock.now().since_start().as_millis()).unwrap_or(i64::MAX)
    }

    fn is_held(&self, row: &Slot, now: i64) -> bool {
        let boot = row.boot.as_deref();
        boot == Some(&*self.boot) && row.ends_ms > now && row.ends_ms - now <= row.ttl_ms
    }

    async fn take(&self, request: &Request) -> Result<Result<Attempt, &'static str>, sqlx::Error> {
        let Request { resource, owner, ttl, origin } = request;
        let held_by_another = |row: &Slot, now| {
            let held = row.owner != Some(owner.get()) && self.is_held(row, now);
            held.then(|| Attempt::Held { remaining: Some(row.remaining(now)) })
        };
        // A plain read first: those who wait for a lease do not queue for the file.
        if let Some(row) = Slot::find(resource, &mut *self.pool.acquire().await?).await?
            && let Some(held) = held_by_another(&row, self.now())
        {
            return Ok(Ok(held));
        }
        let (mut transaction, now) = self.begin().await?;
        let row = Slot::find(resource, &mut transaction).await?.unwrap_or_default();
        if let Some(held) = held_by_another(&row, now) {
            return Ok(Ok(held));
        }
        if self.is_held(&row, now) {
            extend(resource, now, *ttl).execute(&mut *transaction).await?;
            transaction.commit().await?;
            return Ok(Ok(granted(row.token, row.counter)));
        }
        if row.counter.is_some_and(|counter| counter.get() == i64::MAX) {
            return Ok(Err("the token counter is at its end"));
        }
        let counter = row.counter.filter(|_| !row.forgotten);
        let token = counter.and_then(|counter| FencingToken::new(counter.get() + 1).ok());
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        sqlx::query(include_str!("take.sql"))
            .bind(resource.as_str())
            .bind(token.or(row.counter).map(FencingToken::get))
            .bind(owner.get())
            .bind(token.map(FencingToken::get))
            .bind(&*self.boot)
            .bind(now.saturating_add(ttl.signed_millis()))
            .bind(ttl.signed_millis())
            .bind(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
            .bind(&origin.host)
            .bind(origin.process)
            .bind(&origin.label)
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(Ok(granted(token, row.counter)))
    }

    /// Does one step of `owner`'s on its lease, if it has it. The step is told what time it is.
    async fn step<'q>(
        &self,
        resource: &Resource,
        owner: OwnerId,
        step: impl FnOnce(i64) -> Query<'q, Sqlite, SqliteArguments>,
    ) -> Result<Standing, LeaseError> {
        let done = async {
            let (mut transaction, now) = self.begin().await?;
            let row = Slot::find(resource, &mut transaction).await?;
            if !row.is_some_and(|row| row.owner == Some(owner.get()) && self.is_held(&row, now)) {
                return Ok(Standing::NotOurs);
            }
            step(now).execute(&mut *transaction).await?;
            transaction.commit().await?;
            Ok(Standing::Ours)
        };
        done.await.map_err(|error| failure(resource, error))
    }
}

impl LockService for SqliteLocks {
    fn acquire<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Attempt, LeaseError>> {
        Box::pin(async move {
            let resource = &request.resource;
            match self.take(request).await {
                Ok(Ok(attempt)) => Ok(attempt),
                Ok(Err(refusal)) => {
                    Err(LeaseError::Refused { resource: resource.clone(), source: refusal.into() })
                }
                Err(error) => Err(failure(resource, error)),
            }
        })
    }

    fn seed<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        token: FencingToken,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(self.step(resource, owner, move |_| {
            sqlx::query(include_str!("seed.sql")).bind(resource.as_str()).bind(token.get())
        }))
    }

    fn renew<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        ttl: Ttl,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(self.step(resource, owner, move |now| extend(resource, now, ttl)))
    }

    fn release<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(self.step(resource, owner, move |_| free(resource, false)))
    }

    fn disown<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(self.step(resource, owner, move |_| free(resource, true)))
    }

    fn holder<'a>(&'a self, resource: &'a Resource) -> BoxFuture<'a, Result<Option<Holder>, LeaseError>> {
        let found = async {
            let row = Slot::find(resource, &mut *self.pool.acquire().await?).await?;
            let now = self.now();
            Ok(row.filter(|row| self.is_held(row, now)).and_then(|row| row.into_holder(now)))
        };
        Box::pin(async move { found.await.map_err(|error| failure(resource, error)) })
    }
}

impl fmt::Debug for SqliteLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteLocks").finish_non_exhaustive()
    }
}

/// A resource's row; what `schema.sql` says of it.
#[derive(Default)]
struct Slot {
    counter: Option<FencingToken>,
    forgotten: bool,
    owner: Option<Uuid>,
    token: Option<FencingToken>,
    boot: Option<String>,
    ends_ms: i64,
    ttl_ms: i64,
    since_ms: i64,
    origin: Option<Origin>,
}

impl Slot {
    async fn find(
        resource: &Resource,
        connection: &mut SqliteConnection,
    ) -> Result<Option<Self>, sqlx::Error> {
        let query = sqlx::query(include_str!("find.sql")).bind(resource.as_str());
        query.fetch_optional(connection).await?.as_ref().map(Self::read).transpose()
    }

    fn read(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        let number = |column| {
            let number: Option<i64> = row.try_get(column)?;
            number.map(FencingToken::new).transpose().map_err(|error| sqlx::Error::Decode(error.into()))
        };
        let host: Option<String> = row.try_get("host")?;
        let origin = match host {
            Some(host) => {
                Some(Origin { host, process: row.try_get("process")?, label: row.try_get("label")? })
            }
            None => None,
        };
        Ok(Self {
            counter: number("counter")?,
            forgotten: row.try_get("forgotten")?,
            owner: row.try_get("owner")?,
            token: number("token")?,
            boot: row.try_get("boot")?,
            ends_ms: row.try_get::<Option<_>, _>("ends_ms")?.unwrap_or_default(),
            ttl_ms: row.try_get::<Option<_>, _>("ttl_ms")?.unwrap_or_default(),
            since_ms: row.try_get::<Option<_>, _>("since_ms")?.unwrap_or_default(),
            origin,
        })
    }

    fn remaining(&self, now: i64) -> Duration {
        Duration::from_millis(u64::try_from(self.ends_ms.saturating_sub(now)).unwrap_or_default())
    }

    fn into_holder(self, now: i64) -> Option<Holder> {
        let since = Duration::from_millis(u64::try_from(self.since_ms).unwrap_or_default());
        let since = SystemTime::UNIX_EPOCH.checked_add(since)?;
        let remaining = Some(self.remaining(now));
        Some(Holder::new(self.owner?.into(), self.token, since, remaining, self.origin?))
    }
}

fn granted(token: Option<FencingToken>, counter: Option<FencingToken>) -> Attempt {
    token.map_or(Attempt::Unnumbered { counter }, Attempt::Granted)
}

fn extend(resource: &Resource, now: i64, ttl: Ttl) -> Query<'_, Sqlite, SqliteArguments> {
    let ends = now.saturating_add(ttl.signed_millis());
    sqlx::query(include_str!("extend.sql")).bind(resource.as_str()).bind(ends).bind(ttl.signed_millis())
}

fn free(resource: &Resource, forgotten: bool) -> Query<'_, Sqlite, SqliteArguments> {
    sqlx::query(include_str!("free.sql")).bind(resource.as_str()).bind(forgotten)
}

/// The file of leases of a database. Processes that name the database differently, through a
/// symbolic link or relatively, must still meet in one file.
fn sibling(database: &Path) -> Result<PathBuf, Invalid> {
    let refused = |reason| Invalid::Option { what: "database path", reason };
    let text = database.to_string_lossy();
    if text.contains(":memory:") {
        return Err(refused("a database in memory has no place beside it; use MemoryLocks"));
    }
    if text.starts_with("sqlite:") || text.starts_with("file:") {
        return Err(refused("it is a URL; give the path of the file"));
    }
    let Some(name) = database.file_name() else {
        return Err(refused("it does not name a file"));
    };
    let directory = database.parent().filter(|parent| !parent.as_os_str().is_empty());
    let full = database.canonicalize().or_else(|_| {
        // The database has yet to be made.
        Ok::<_, std::io::Error>(directory.unwrap_or(Path::new(".")).canonicalize()?.join(name))
    });
    let mut path = full.unwrap_or_else(|_| database.to_owned()).into_os_string();
    path.push("-leases");
    Ok(path.into())
}

async fn set_up(options: SqliteConnectOptions) -> Result<SqlitePool, sqlx::Error> {
    let pool = SqlitePoolOptions::new().max_connections(CONNECTIONS).acquire_timeout(BUSY_LIMIT);
    let pool = pool.connect_with(options).await?;
    sqlx::query(include_str!("schema.sql")).execute(&pool).await?;
    Ok(pool)
}

fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.map_or_else(|_| "unknown".to_owned(), |id| id.trim().to_owned())
}

/// SQLite's result code, without what its extended form adds.
fn code(error: &sqlx::Error) -> Option<u32> {
    let code: u32 = error.as_database_error()?.code()?.parse().ok()?;
    Some(code & 0xff)
}

const BUSY: u32 = 5;
const LOCKED: u32 = 6;

fn is_busy(error: &sqlx::Error) -> bool {
    matches!(code(error), Some(BUSY | LOCKED))
}

/// Tells a file that will not (ever) from one that cannot (now).
fn failure(resource: &Resource, error: sqlx::Error) -> LeaseError {
    /// A missing table, no right, a file that may only be read, a broken file, a constraint, another type, no database.
    const WILL_NOT: [u32; 8] = [1, 3, 8, 11, 19, 20, 23, 26];
    let will_not = match &error {
        sqlx::Error::Decode(_) | sqlx::Error::ColumnDecode { .. } | sqlx::Error::ColumnNotFound(_) => true,
        error => code(error).is_some_and(|code| WILL_NOT.contains(&code)),
    };
    if will_not {
        LeaseError::Refused { resource: resource.clone(), source: error.into() }
    } else {
        LeaseError::Unavailable(error.into())
    }
}
