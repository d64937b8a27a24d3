//! The fence in Postgres: a thin face of the SQL functions in `migrations/postgres`.

use std::fmt::Write as _;
use std::time::Duration;

use sqlx::postgres::{PgArguments, PgConnection, PgDatabaseError, PgSeverity};
use sqlx::{AssertSqlSafe, Executor, Postgres, Row, SqlSafeStr, SqlStr};
use sqlx_core::transaction::TransactionManager;

use super::dialect::{
    ClaimRow, Dialect, FenceDatabase, Isolation, NOT_RAISED, Opening, Patience, Seen, SeenRow,
};
use super::error::FenceError;
use super::limits::millis;
use super::migrate::{self, Step, step};
use super::repository::{Statement, Verb};
use crate::grant::Grant;
use crate::owner::OwnerId;
use crate::resource::Resource;
use crate::token::FencingToken;

const MIGRATIONS: &[Step] =
    &[step!("postgres", 1, "fence"), step!("postgres", 2, "idempotency"), step!("postgres", 3, "lease")];
/// A table of our own, which cannot collide with the application's migrations.
const MIGRATIONS_TABLE: &str = "fencerow.migrations";
/// Keeps two processes from migrating at once, until the end of the transaction. Creating the
/// schema is inside it: `if not exists` is no protection against another session's creating it.
const PREPARE: &str = "
    begin isolation level read committed read write;
    select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('fencerow migrations', 20051));
    create schema if not exists fencerow;";

type Transactions = <Postgres as sqlx::Database>::TransactionManager;

impl FenceDatabase for Postgres {}

impl Dialect for Postgres {
    const ROLLBACK_MENDS: bool = true;

    async fn open(conn: &mut PgConnection, grant: &Grant, opening: Opening) -> Result<(), FenceError> {
        let admission = admission(conn, grant, &opening)?;
        if opening.raised {
            match Transactions::begin(conn, Some(AssertSqlSafe(admission.as_str()).into_sql_str())).await {
                // The database remembers less than we do: it was restored, say. Raise it again.
                Err(error) if code(&error).as_deref() == Some("ZF002") => {
                    conn.execute("rollback").await.map_err(|error| Self::explain(error, grant))?;
                }
                outcome => return outcome.map_err(|error| Self::explain(error, grant)),
            }
        }
        let message = raise(conn, grant, opening.patience)? + &admission;
        Transactions::begin(conn, Some(AssertSqlSafe(message).into_sql_str()))
            .await
            .map_err(|error| Self::explain(error, grant))
    }

    async fn raise(conn: &mut PgConnection, grant: &Grant, patience: Patience) -> Result<(), FenceError> {
        let message = raise(conn, grant, patience)?;
        conn.execute(AssertSqlSafe(message)).await.map_err(|error| Self::explain(error, grant))?;
        Ok(())
    }

    async fn admit(conn: &mut PgConnection, grant: &Grant) -> Result<(), FenceError> {
        sqlx::query(include_str!("sql/postgres/admit.sql"))
            .bind(grant.resource().as_str())
            .bind(grant.token().get())
            .bind(grant.owner().get())
            .execute(conn)
            .await
            .map_err(|error| Self::explain(error, grant))?;
        Ok(())
    }

    async fn renumber(
        conn: &mut PgConnection,
        resource: &Resource,
        owner: OwnerId,
        counter: Option<FencingToken>,
        within: Duration,
        patience: Patience,
    ) -> Result<FencingToken, FenceError> {
        let counter = counter.map_or("null".to_owned(), |counter| counter.to_string());
        let statement_limit = i32::try_from(within.as_millis()).unwrap_or(i32::MAX).max(1);
        let message = format!(
            "{} set local statement_timeout = {statement_limit}; \
             select fencerow.renumber({}, '{owner}', {counter}, {}, {}); \
             commit",
            begin_raise(conn, patience)?,
            literal(resource.as_str()),
            millis("patience", patience.limit)?,
            patience.end_blockers,
        );
        let explain = |error| explain(error, resource, FencingToken::FIRST);
        let row = conn.fetch_one(AssertSqlSafe(message)).await.map_err(explain)?;
        let token: i64 = row.try_get(0).map_err(explain)?;
        Ok(FencingToken::new(token)?)
    }

    async fn probe(conn: &mut PgConnection, grant: &Grant) -> Result<(), FenceError> {
        let admitted: bool = sqlx::query_scalar(include_str!("sql/postgres/probe.sql"))
            .bind(grant.resource().as_str())
            .bind(grant.token().get())
            .bind(grant.owner().get())
            .fetch_one(conn)
            .await
            .map_err(|error| Self::explain(error, grant))?;
        if admitted {
            return Ok(());
        }
        Err(FenceError::Unfenced { reason: "it was ended from within, by raw SQL or on the lent connection" })
    }

    async fn commit(conn: &mut PgConnection, grant: &Grant) -> Result<(), FenceError> {
        Transactions::commit(conn).await.map_err(|error| {
            if is_known_not_committed(&error) {
                Self::explain(error, grant)
            } else {
                FenceError::CommitUnknown(error)
            }
        })
    }

    async fn rollback(conn: &mut PgConnection) -> Result<(), sqlx::Error> {
        match Transactions::get_transaction_depth(conn) {
            // sqlx counts a transaction only once its begin has succeeded; this one has not.
            0 => conn.execute("rollback").await.map(drop),
            1 => Transactions::rollback(conn).await,
            // A nested one was leaked: sqlx would go on counting it.
            _ => Err(sqlx::Error::InvalidSavePointStatement),
        }
    }

    async fn claim(conn: &mut PgConnection, claim: &ClaimRow<'_>) -> Result<Option<SeenRow>, sqlx::Error> {
        let row = sqlx::query(include_str!("sql/postgres/claim.sql"))
            .bind(claim.scope)
            .bind(claim.key)
            .bind(claim.fingerprint)
            .bind(claim.resource)
            .bind(claim.token)
            .bind(claim.owner)
            .fetch_one(conn)
            .await?;
        if row.try_get("fresh")? {
            return Ok(None);
        }
        Ok(Some(SeenRow {
            fingerprint: row.try_get("seen_fingerprint")?,
            resource: row.try_get("seen_resource")?,
            response: row.try_get("response")?,
        }))
    }

    async fn record(
        conn: &mut PgConnection,
        claim: &ClaimRow<'_>,
        response: &str,
    ) -> Result<bool, sqlx::Error> {
        sqlx::query_scalar(include_str!("sql/postgres/record.sql"))
            .bind(claim.scope)
            .bind(claim.key)
            .bind(claim.token)
            .bind(claim.owner)
            .bind(response)
            .fetch_one(conn)
            .await
    }

    async fn run(conn: &mut PgConnection, sql: String) -> Result<(), sqlx::Error> {
        conn.execute(AssertSqlSafe(sql)).await?;
        Ok(())
    }

    async fn write(conn: &mut PgConnection, statement: &Statement<Self>) -> Result<Seen, sqlx::Error> {
        let arguments: PgArguments = statement.arguments.clone();
        let row = sqlx::query_with(AssertSqlSafe(write_sql(statement)), arguments).fetch_one(conn).await?;
        Ok(Seen { written: row.try_get(0)?, exists: row.try_get(1)?, last_token: row.try_get(2)? })
    }

    async fn migrate(conn: &mut PgConnection) -> Result<(), FenceError> {
        Transactions::begin(conn, Some(SqlStr::from_static(PREPARE))).await?;
        migrate::up(conn, MIGRATIONS_TABLE, MIGRATIONS).await.map_err(FenceError::Migration)?;
        Ok(Transactions::commit(conn).await?)
    }

    async fn unmigrate(conn: &mut PgConnection) -> Result<(), FenceError> {
        Transactions::begin(conn, Some(SqlStr::from_static(PREPARE))).await?;
        migrate::down(conn, MIGRATIONS_TABLE, MIGRATIONS).await.map_err(FenceError::Migration)?;
        Ok(Transactions::commit(conn).await?)
    }

    fn explain(error: sqlx::Error, grant: &Grant) -> FenceError {
        explain(error, grant.resource(), grant.token())
    }
}

fn explain(error: sqlx::Error, resource: &Resource, offered: FencingToken) -> FenceError {
    let resource = resource.clone();
    match (&error, code(&error).as_deref()) {
        (sqlx::Error::Database(refusal), Some("ZF001")) => {
            let seen = refusal.try_downcast_ref::<PgDatabaseError>().and_then(PgDatabaseError::detail);
            match seen.and_then(|seen| seen.parse().ok()) {
                Some(seen) => FenceError::Stale { resource, offered, seen },
                None => FenceError::Database(error),
            }
        }
        (_, Some("ZF002")) => FenceError::Unfenced { reason: NOT_RAISED },
        (sqlx::Error::Database(refusal), Some("ZF006")) => {
            let key = refusal.try_downcast_ref::<PgDatabaseError>().and_then(PgDatabaseError::detail);
            FenceError::Unrecorded { key: key.unwrap_or_default().to_owned() }
        }
        (_, Some("25001")) => {
            FenceError::Unfenced { reason: "a savepoint's rollback would lift the admission" }
        }
        (_, Some("ZF003")) => FenceError::Unfenced { reason: "it was never admitted" },
        // No schema, function, table; or no right to the schema.
        (sqlx::Error::Database(refusal), Some("3F000" | "42883" | "42P01" | "42501"))
            if refusal.message().contains("fencerow") =>
        {
            FenceError::NotMigrated(error)
        }
        (_, Some("55P03")) => FenceError::Busy { resource, source: error },
        (_, Some("40001" | "40P01")) => FenceError::Retry { resource, source: error },
        (_, Some("25P02")) => FenceError::Aborted,
        // Ended by an administrator or a newer holder; idle, statement or transaction for too long.
        (_, Some("57P01" | "25P03" | "57014" | "25P04")) => FenceError::Ended(error),
        // No connection to be had: too many, starting up or shutting down, connection failure.
        (_, Some(code)) if code.starts_with("08") || matches!(code, "53300" | "57P02" | "57P03") => {
            FenceError::Unavailable(error)
        }
        // A standby, as after a failover that this client has not followed yet.
        (_, Some("25006")) => FenceError::Unavailable(error),
        (sqlx::Error::Database(refusal), Some("0A000")) if refusal.message().contains("recovery") => {
            FenceError::Unavailable(error)
        }
        (
            sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed,
            _,
        ) => FenceError::Unavailable(error),
        _ => FenceError::Database(error),
    }
}

/// Whether an error in answer to COMMIT says that nothing was stored.
///
/// An ordinary error does. So do the deaths that a backend dies only between statements. Any other
/// end of the connection, also one that a pooler tells of, may have come after the commit.
fn is_known_not_committed(error: &sqlx::Error) -> bool {
    let sqlx::Error::Database(error) = error else { return false };
    let Some(error) = error.try_downcast_ref::<PgDatabaseError>() else { return false };
    match error.severity() {
        PgSeverity::Fatal | PgSeverity::Panic => matches!(error.code(), "57P01" | "25P03" | "25P04"),
        // 40003 is "statement completion unknown".
        _ => !error.code().starts_with("08") && error.code() != "40003",
    }
}

fn code(error: &sqlx::Error) -> Option<String> {
    error.as_database_error().and_then(|error| error.code()).map(std::borrow::Cow::into_owned)
}

/// A text as an SQL expression, whatever it contains.
fn literal(text: &str) -> String {
    let mut literal = String::from("convert_from(decode('");
    for byte in text.bytes() {
        // Writing to a String cannot fail.
        let _ = write!(literal, "{byte:02x}");
    }
    literal + "', 'hex'), 'UTF8')"
}

/// The beginning of a transaction that raises the fence. Its wait is bounded by the patience, and
/// must not be cut short by a limit of the session's, or nobody would ever end a sleeper. Nor must
/// it go on for one who has given up: the server looks whether its client is still there.
fn begin_raise(conn: &PgConnection, patience: Patience) -> Result<String, FenceError> {
    let patience = millis("patience", patience.limit)?;
    let mut message = format!(
        "begin isolation level read committed read write; \
         set local lock_timeout = {patience}; \
         set local client_connection_check_interval = 250; "
    );
    if has_transaction_timeout(conn) {
        message += "set local transaction_timeout = 0; ";
    }
    Ok(message)
}

/// A transaction of its own that raises the fence. It has no parameters, since it travels in one
/// message of the simple protocol with what follows: text goes in as hex, the rest is numbers.
fn raise(conn: &PgConnection, grant: &Grant, patience: Patience) -> Result<String, FenceError> {
    Ok(format!(
        "{} set local statement_timeout = 0; \
         select fencerow.raise({}, {}, '{}', {}, {}); \
         commit; ",
        begin_raise(conn, patience)?,
        literal(grant.resource().as_str()),
        grant.token(),
        grant.owner(),
        millis("patience", patience.limit)?,
        patience.end_blockers,
    ))
}

fn has_transaction_timeout(conn: &PgConnection) -> bool {
    conn.server_version_num().is_some_and(|version| version >= 170_000)
}

/// The beginning of the admitted transaction: its limits, then the admission, which is the
/// statement that takes the snapshot at every isolation level.
fn admission(conn: &PgConnection, grant: &Grant, opening: &Opening) -> Result<String, FenceError> {
    let level = match opening.isolation {
        Isolation::ReadCommitted => "read committed",
        Isolation::RepeatableRead => "repeatable read",
        Isolation::Serializable => "serializable",
    };
    let limits = opening.limits.resolve(grant.remaining())?;
    let mut message = format!(
        "begin isolation level {level} read write; \
         set local lock_timeout = {}; \
         set local idle_in_transaction_session_timeout = {}; \
         set local tcp_user_timeout = {}; \
         set local client_connection_check_interval = 1000; ",
        limits.lock, limits.idle, limits.idle,
    );
    if let Some(statement) = limits.statement {
        let _ = write!(message, "set local statement_timeout = {statement}; ");
    }
    if let Some(transaction) = limits.transaction
        && has_transaction_timeout(conn)
    {
        // A timer that runs already keeps its old limit, unless it is stopped first.
        let _ = write!(
            message,
            "set local transaction_timeout = 0; set local transaction_timeout = {transaction}; "
        );
    }
    let _ = write!(
        message,
        "select fencerow.admit_first({}, {}, '{}')",
        literal(grant.resource().as_str()),
        grant.token(),
        grant.owner(),
    );
    Ok(message)
}

/// The row's own token, as every statement compares it: a row that has none yet is older than any.
const TOKEN: &str = "coalesce(t.last_token, 0)";

/// Puts a repository statement into words: the write, and where it wrote nothing, a second look at
/// the row. The look takes a lock, so it reads the newest version of the row and not the snapshot
/// from before the write had waited for a rival.
fn write_sql(statement: &Statement<Postgres>) -> String {
    let Statement { verb, table, writes_if, keys, sets, .. } = statement;
    let list = |items: Vec<String>| items.join(", ");
    let key = keys.iter().map(|(column, n)| format!("t.{column} = ${n}")).collect::<Vec<_>>().join(" and ");
    let key_columns = list(keys.iter().map(|(column, _)| column.clone()).collect());
    let changes = list(
        sets.iter()
            .map(|set| match set.adds {
                true => format!("{0} = t.{0} + ${1}", set.column, set.parameter),
                false => format!("{} = ${}", set.column, set.parameter),
            })
            .chain(["last_token = $1".to_owned()])
            .collect(),
    );
    let columns = list(
        keys.iter()
            .map(|(column, _)| column.clone())
            .chain(sets.iter().map(|set| set.column.clone()))
            .chain(["last_token".to_owned()])
            .collect(),
    );
    let values = list(
        keys.iter()
            .map(|(_, n)| format!("${n}"))
            .chain(sets.iter().map(|set| format!("${}", set.parameter)))
            .chain(["$1".to_owned()])
            .collect(),
    );
    let update =
        format!("update {table} as t set {changes} where {key} and {TOKEN} {writes_if} $1 returning 1");
    let insert = |condition: &str| {
        format!(
            "insert into {table} as t ({columns}) select {values} {condition} \
             on conflict ({key_columns}) do nothing returning 1"
        )
    };
    let written = match verb {
        Verb::Update => format!("written as ({update})"),
        Verb::Delete => {
            format!(
                "written as (delete from {table} as t where {key} and {TOKEN} {writes_if} $1 returning 1)"
            )
        }
        Verb::Insert => format!("written as ({})", insert("")),
        // Updated first, and inserted only where there is no such row: a refused
        // `on conflict do update` would keep the row locked.
        Verb::Upsert => {
            let absent = format!(
                "where not exists (select from updated) \
                 and not exists (select from {table} as t where {key})"
            );
            format!(
                "updated as ({update}), inserted as ({}), \
                 written as (select from updated union all select from inserted)",
                insert(&absent)
            )
        }
    };
    // An insert changes no row that is there, so it does not take the right to.
    let lock = if *verb == Verb::Insert { "" } else { " for share" };
    format!(
        "with {written}, \
         seen as (select t.last_token from {table} as t \
                   where {key} and not exists (select from written){lock}) \
         select (select count(*) from written), \
                exists (select from seen), \
                (select last_token from seen limit 1)"
    )
}

#[cfg(test)]
mod tests {
    use super::literal;

    #[test]
    fn text_cannot_leave_its_literal() {
        assert_eq!(literal("a'"), "convert_from(decode('6127', 'hex'), 'UTF8')");
    }
}
