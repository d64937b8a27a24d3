//! The fence in SQLite: the same rules, enforced here, inside `begin immediate`.
//!
//! A file has one writer at a time, so an admitted transaction is alone in it and no raise can come
//! in between. What SQLite cannot do is end a client: one that is stopped inside its transaction
//! keeps every other writer out until it goes on or is killed. Keep the transactions short.

use std::time::Duration;

use sqlx::sqlite::SqliteConnection;
use sqlx::{AssertSqlSafe, Executor, Row, SqlStr, Sqlite};
use sqlx_core::transaction::TransactionManager;
use uuid::Uuid;

use super::dialect::{ClaimRow, Dialect, FenceDatabase, NOT_RAISED, Opening, Patience, Seen, SeenRow};
use super::error::FenceError;
use super::migrate::{self, Step, step};
use super::repository::{Statement, Verb};
use crate::grant::Grant;
use crate::owner::OwnerId;
use crate::resource::Resource;
use crate::token::FencingToken;

const MIGRATIONS: &[Step] = &[step!("sqlite", 1, "fence"), step!("sqlite", 2, "idempotency")];
/// A table of our own, which cannot collide with the application's migrations.
const MIGRATIONS_TABLE: &str = "fencerow_migrations";
/// Takes the write lock at once: a transaction that began as a reader can be refused at its first write.
const BEGIN: &str = "begin immediate";

type Transactions = <Sqlite as sqlx::Database>::TransactionManager;

impl FenceDatabase for Sqlite {}

impl Dialect for Sqlite {
    /// SQLite ends a transaction by itself on some errors, and fails the rollback of one that is
    /// not there; sqlx then goes on counting it as open.
    const ROLLBACK_MENDS: bool = false;

    async fn open(conn: &mut SqliteConnection, grant: &Grant, opening: Opening) -> Result<(), FenceError> {
        if !opening.raised {
            Self::raise(conn, grant, opening.patience).await?;
        }
        begin(conn, grant).await?;
        match check(conn, grant).await {
            // The database remembers less than we do: it was restored, say. Raise it again.
            Err(FenceError::Unfenced { .. }) if opening.raised => {
                Transactions::rollback(conn).await.map_err(|error| Self::explain(error, grant))?;
                Self::raise(conn, grant, opening.patience).await?;
                begin(conn, grant).await?;
                check(conn, grant).await
            }
            outcome => outcome,
        }
    }

    async fn raise(conn: &mut SqliteConnection, grant: &Grant, _: Patience) -> Result<(), FenceError> {
        let explain = |error| Self::explain(error, grant);
        begin(conn, grant).await?;
        if !stands_at(conn, grant).await? {
            lift(conn, grant.resource(), grant.token(), grant.owner()).await.map_err(explain)?;
        }
        Transactions::commit(conn).await.map_err(explain)
    }

    async fn admit(conn: &mut SqliteConnection, grant: &Grant) -> Result<(), FenceError> {
        // The transaction may have begun as a reader; from here on nobody else writes. One whose
        // snapshot is older than the raise is refused this.
        sqlx::query(include_str!("sql/sqlite/lock.sql"))
            .bind(grant.resource().as_str())
            .execute(&mut *conn)
            .await
            .map_err(|error| Self::explain(error, grant))?;
        check(conn, grant).await
    }

    async fn renumber(
        conn: &mut SqliteConnection,
        resource: &Resource,
        owner: OwnerId,
        counter: Option<FencingToken>,
        _: Duration,
        _: Patience,
    ) -> Result<FencingToken, FenceError> {
        let explain = |error| explain(error, resource);
        Transactions::begin(conn, Some(SqlStr::from_static(BEGIN))).await.map_err(explain)?;
        let standing = standing(conn, resource).await.map_err(explain)?;
        let token = match standing {
            // Asked again after a lost answer.
            Some((last, first)) if first == owner.get() && Some(last) > counter => last,
            standing => match standing.map(|(last, _)| last).max(counter) {
                None => FencingToken::FIRST,
                Some(last) => last
                    .first_of_next_epoch()
                    .ok_or_else(|| FenceError::Database(sqlx::Error::Protocol("no epoch is left".into())))?,
            },
        };
        lift(conn, resource, token, owner).await.map_err(explain)?;
        Transactions::commit(conn).await.map_err(explain)?;
        Ok(token)
    }

    async fn probe(conn: &mut SqliteConnection, grant: &Grant) -> Result<(), FenceError> {
        // SQLite refuses to begin inside a transaction, so success means that there is none.
        if conn.execute("begin").await.is_ok() {
            conn.execute("rollback").await.map_err(|error| Self::explain(error, grant))?;
            return Err(FenceError::Unfenced {
                reason: "it was ended from within, by raw SQL, a failure or on the lent connection",
            });
        }
        // Another transaction in its place is as good only if nobody has been here in between.
        check(conn, grant).await?;
        // The record of a response may have been rolled back to a savepoint.
        let unrecorded: Option<String> = sqlx::query_scalar(include_str!("sql/sqlite/unrecorded.sql"))
            .bind(grant.resource().as_str())
            .bind(grant.token().get())
            .bind(grant.owner().get())
            .fetch_optional(conn)
            .await
            .map_err(|error| Self::explain(error, grant))?;
        unrecorded.map_or(Ok(()), |key| Err(FenceError::Unrecorded { key }))
    }

    async fn commit(conn: &mut SqliteConnection, grant: &Grant) -> Result<(), FenceError> {
        Transactions::commit(conn).await.map_err(|error| match code(&error) {
            // The disk failed while the commit was being written; the journal will tell at the next opening.
            Some(code) if primary(code) == IOERR => FenceError::CommitUnknown(error),
            Some(_) => Self::explain(error, grant),
            None => FenceError::CommitUnknown(error),
        })
    }

    async fn rollback(conn: &mut SqliteConnection) -> Result<(), sqlx::Error> {
        match Transactions::get_transaction_depth(conn) {
            0 => Ok(()),
            1 => Transactions::rollback(conn).await,
            // A nested one was leaked: only that would be rolled back.
            _ => Err(sqlx::Error::InvalidSavePointStatement),
        }
    }

    async fn claim(
        conn: &mut SqliteConnection,
        claim: &ClaimRow<'_>,
    ) -> Result<Option<SeenRow>, sqlx::Error> {
        let inserted = sqlx::query(include_str!("sql/sqlite/claim.sql"))
            .bind(claim.scope)
            .bind(claim.key)
            .bind(claim.fingerprint)
            .bind(claim.resource)
            .bind(claim.token)
            .bind(claim.owner)
            .execute(&mut *conn)
            .await?;
        if inserted.rows_affected() == 1 {
            return Ok(None);
        }
        let row = sqlx::query(include_str!("sql/sqlite/claimed.sql"))
            .bind(claim.scope)
            .bind(claim.key)
            .fetch_one(conn)
            .await?;
        Ok(Some(SeenRow {
            fingerprint: row.try_get(0)?,
            resource: row.try_get(1)?,
            response: row.try_get(2)?,
        }))
    }

    async fn record(
        conn: &mut SqliteConnection,
        claim: &ClaimRow<'_>,
        response: &str,
    ) -> Result<bool, sqlx::Error> {
        let updated = sqlx::query(include_str!("sql/sqlite/record.sql"))
            .bind(claim.scope)
            .bind(claim.key)
            .bind(claim.token)
            .bind(claim.owner)
            .bind(response)
            .execute(conn)
            .await?;
        Ok(updated.rows_affected() == 1)
    }

    async fn run(conn: &mut SqliteConnection, sql: String) -> Result<(), sqlx::Error> {
        conn.execute(AssertSqlSafe(sql)).await?;
        Ok(())
    }

    async fn write(conn: &mut SqliteConnection, statement: &Statement<Self>) -> Result<Seen, sqlx::Error> {
        let sql = AssertSqlSafe(write_sql(statement));
        let written =
            sqlx::query_with(sql, statement.arguments.clone()).execute(&mut *conn).await?.rows_affected();
        if written > 0 {
            return Ok(Seen { written: i64::try_from(written).unwrap_or(i64::MAX), ..Seen::default() });
        }
        // The file is ours alone until the transaction ends: nothing has changed in between.
        let sql = AssertSqlSafe(seen_sql(statement));
        let row = sqlx::query_with(sql, statement.key_arguments.clone()).fetch_optional(conn).await?;
        Ok(match row {
            Some(row) => Seen { written: 0, exists: true, last_token: row.try_get(0)? },
            None => Seen::default(),
        })
    }

    async fn migrate(conn: &mut SqliteConnection) -> Result<(), FenceError> {
        Transactions::begin(conn, Some(SqlStr::from_static(BEGIN))).await?;
        migrate::up(conn, MIGRATIONS_TABLE, MIGRATIONS).await.map_err(FenceError::Migration)?;
        Ok(Transactions::commit(conn).await?)
    }

    async fn unmigrate(conn: &mut SqliteConnection) -> Result<(), FenceError> {
        Transactions::begin(conn, Some(SqlStr::from_static(BEGIN))).await?;
        migrate::down(conn, MIGRATIONS_TABLE, MIGRATIONS).await.map_err(FenceError::Migration)?;
        Ok(Transactions::commit(conn).await?)
    }

    fn explain(error: sqlx::Error, grant: &Grant) -> FenceError {
        explain(error, grant.resource())
    }
}

async fn begin(conn: &mut SqliteConnection, grant: &Grant) -> Result<(), FenceError> {
    Transactions::begin(conn, Some(SqlStr::from_static(BEGIN)))
        .await
        .map_err(|error| Sqlite::explain(error, grant))
}

async fn standing(
    conn: &mut SqliteConnection,
    resource: &Resource,
) -> Result<Option<(FencingToken, Uuid)>, sqlx::Error> {
    let row: Option<(i64, Uuid)> = sqlx::query_as(include_str!("sql/sqlite/standing.sql"))
        .bind(resource.as_str())
        .fetch_optional(conn)
        .await?;
    row.map(|(last, owner)| match FencingToken::new(last) {
        Ok(last) => Ok((last, owner)),
        Err(invalid) => Err(sqlx::Error::Decode(Box::new(invalid))),
    })
    .transpose()
}

/// Whether the fence stands at exactly the grant; false where it stands below; stale where above.
async fn stands_at(conn: &mut SqliteConnection, grant: &Grant) -> Result<bool, FenceError> {
    let standing = standing(conn, grant.resource()).await.map_err(|error| Sqlite::explain(error, grant))?;
    match standing {
        None => Ok(false),
        Some((seen, _)) if seen < grant.token() => Ok(false),
        Some((seen, owner)) if seen == grant.token() && owner == grant.owner().get() => Ok(true),
        Some((seen, _)) => {
            Err(FenceError::Stale { resource: grant.resource().clone(), offered: grant.token(), seen })
        }
    }
}

/// Admits the transaction, which has the write lock, or refuses it.
async fn check(conn: &mut SqliteConnection, grant: &Grant) -> Result<(), FenceError> {
    if stands_at(conn, grant).await? {
        return Ok(());
    }
    Err(FenceError::Unfenced { reason: NOT_RAISED })
}

async fn lift(
    conn: &mut SqliteConnection,
    resource: &Resource,
    token: FencingToken,
    owner: OwnerId,
) -> Result<(), sqlx::Error> {
    sqlx::query(include_str!("sql/sqlite/lift.sql"))
        .bind(resource.as_str())
        .bind(token.get())
        .bind(owner.get())
        .execute(conn)
        .await?;
    Ok(())
}

const BUSY: i32 = 5;
/// A transaction that has read what another has changed since cannot begin to write.
const BUSY_SNAPSHOT: i32 = 517;
const LOCKED: i32 = 6;
const IOERR: i32 = 10;
const CANTOPEN: i32 = 14;

/// SQLite's extended result code.
fn code(error: &sqlx::Error) -> Option<i32> {
    error.as_database_error().and_then(|error| error.code()).and_then(|code| code.parse().ok())
}

fn primary(code: i32) -> i32 {
    code & 0xff
}

fn explain(error: sqlx::Error, resource: &Resource) -> FenceError {
    if code(&error) == Some(BUSY_SNAPSHOT) {
        return FenceError::Retry { resource: resource.clone(), source: error };
    }
    if error.as_database_error().is_some_and(|error| error.message().contains("no such table: fencerow_")) {
        return FenceError::NotMigrated(error);
    }
    match (&error, code(&error).map(primary)) {
        (_, Some(BUSY | LOCKED)) => FenceError::Busy { resource: resource.clone(), source: error },
        (_, Some(CANTOPEN)) => FenceError::Unavailable(error),
        (sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed, _) => {
            FenceError::Unavailable(error)
        }
        _ => FenceError::Database(error),
    }
}

fn write_sql(statement: &Statement<Sqlite>) -> String {
    let Statement { verb, table, writes_if, keys, sets, .. } = statement;
    let key = keys.iter().map(|(column, n)| format!("t.{column} = ${n}")).collect::<Vec<_>>().join(" and ");
    let key_columns = keys.iter().map(|(column, _)| column.as_str()).collect::<Vec<_>>().join(", ");
    let mut changes = String::new();
    let (mut columns, mut values) = (key_columns.clone(), String::new());
    for (_, n) in keys {
        values += &format!("${n}, ");
    }
    for set in sets {
        let (column, n) = (&set.column, set.parameter);
        changes +=
            &if set.adds { format!("{column} = t.{column} + ${n}, ") } else { format!("{column} = ${n}, ") };
        columns += &format!(", {column}");
        values += &format!("${n}, ");
    }
    let older = format!("coalesce(t.last_token, 0) {writes_if} $1");
    let insert = format!(
        "insert into {table} as t ({columns}, last_token) values ({values}$1) on conflict ({key_columns}) do"
    );
    match verb {
        Verb::Update => format!("update {table} as t set {changes}last_token = $1 where {key} and {older}"),
        Verb::Delete => format!("delete from {table} as t where {key} and {older}"),
        Verb::Insert => format!("{insert} nothing"),
        Verb::Upsert => format!("{insert} update set {changes}last_token = $1 where {older}"),
    }
}

/// The row's token, asked for by its keys alone.
fn seen_sql(statement: &Statement<Sqlite>) -> String {
    let key =
        statement.keys.iter().enumerate().map(|(index, (column, _))| format!("t.{column} = ${}", index + 1));
    format!(
        "select t.last_token from {} as t where {}",
        statement.table,
        key.collect::<Vec<_>>().join(" and ")
    )
}
