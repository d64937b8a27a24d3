//! A connection inside an admitted transaction, and what is known of its health.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use futures_util::{Stream, stream};
use sqlx::pool::PoolConnection;
use sqlx::{Database, Either, Error, Execute, Executor, SqlStr};

use super::dialect::FenceDatabase;
use super::error::FenceError;
use super::idempotency::Key;
use crate::grant::Grant;
use crate::token::FencingToken;

/// A connection inside a transaction that was admitted under a grant.
///
/// Every sqlx query runs in it: `query.execute(&mut *tx)`. Idempotency keys and the repository
/// need it, so neither can be used outside an admitted transaction.
///
/// It watches each statement. sqlx itself commits a transaction that has failed without a word,
/// and would not notice a COMMIT sent as raw SQL; this type knows when either may have happened,
/// and then [`FencedTransaction::commit`](super::FencedTransaction::commit) asks the database
/// before it commits. What ends a transaction is refused here before it is sent.
pub struct Admitted<'c, DB: FenceDatabase> {
    link: Link<'c, DB>,
    pub(super) grant: Grant,
    pub(super) health: Health,
}

enum Link<'c, DB: Database> {
    Pooled(PoolConnection<DB>),
    Borrowed(&'c mut DB::Connection),
}

/// What is known of an admitted transaction without asking the database.
#[derive(Debug, Clone, Default)]
pub(super) struct Health {
    /// A statement was begun and its end not seen: set before each, cleared after it, so that a
    /// dropped future or stream leaves it set.
    pub(super) in_flight: bool,
    /// Something happened after which the database has to be asked.
    pub(super) suspect: bool,
    /// The raw connection was lent out: a statement may have been dropped there.
    pub(super) lent: bool,
    /// A key was claimed and no response recorded yet.
    pub(super) unrecorded: Vec<Key>,
    /// The transaction wrote what it should not have, and must not be committed.
    pub(super) doomed: Option<&'static str>,
}

impl Health {
    /// Whether the database has to be asked before a commit.
    pub(super) fn is_suspect(&self) -> bool {
        self.suspect || self.in_flight
    }

    fn begin_statement(&mut self) {
        self.suspect |= self.in_flight;
        self.in_flight = true;
    }

    fn end_statement(&mut self, failed: bool) {
        self.suspect |= failed;
        self.in_flight = false;
    }
}

impl<DB: FenceDatabase> Admitted<'static, DB> {
    pub(super) fn pooled(conn: PoolConnection<DB>, grant: Grant) -> Self {
        Self { link: Link::Pooled(conn), grant, health: Health::default() }
    }

    pub(super) fn pooled_mut(&mut self) -> Option<&mut PoolConnection<DB>> {
        match &mut self.link {
            Link::Pooled(conn) => Some(conn),
            Link::Borrowed(_) => None,
        }
    }
}

impl<'c, DB: FenceDatabase> Admitted<'c, DB> {
    pub(super) fn borrowed(conn: &'c mut DB::Connection, grant: Grant) -> Self {
        Self { link: Link::Borrowed(conn), grant, health: Health::default() }
    }

    /// The grant that the transaction was admitted under.
    #[must_use]
    pub fn grant(&self) -> &Grant {
        &self.grant
    }

    /// The token that the transaction was admitted under.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.grant.token()
    }

    /// Lends out the raw connection, for COPY and for functions that want `&mut PgConnection`.
    ///
    /// What happens on it is not watched, so the commit asks the database first whether this is
    /// still the admitted transaction, unharmed: one round trip more. Without a commit the
    /// connection is closed. Do not end the transaction there; a write after that is not fenced,
    /// and only found out at the commit.
    pub fn lend(&mut self) -> &mut DB::Connection {
        self.health.suspect = true;
        self.health.lent = true;
        self.link.conn()
    }

    pub(super) fn conn(&mut self) -> &mut DB::Connection {
        self.link.conn()
    }

    /// The connection, for one of the crate's own statements: watched like any other, and to be
    /// followed by [`Admitted::end_statement`].
    pub(super) fn begin_statement(&mut self) -> &mut DB::Connection {
        self.health.begin_statement();
        self.link.conn()
    }

    pub(super) fn end_statement<T, E>(&mut self, outcome: Result<T, E>) -> Result<T, E> {
        self.health.end_statement(outcome.is_err());
        outcome
    }

    /// The connection and the watch over it, for one statement.
    fn split(&mut self) -> (&mut DB::Connection, &mut Health) {
        (self.link.conn(), &mut self.health)
    }
}

impl<DB: Database> Link<'_, DB> {
    fn conn(&mut self) -> &mut DB::Connection {
        match self {
            Self::Pooled(conn) => conn,
            Self::Borrowed(conn) => conn,
        }
    }
}

impl<DB: FenceDatabase> fmt::Debug for Admitted<'_, DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admitted")
            .field("resource", &self.grant.resource().as_str())
            .field("token", &self.grant.token())
            .finish_non_exhaustive()
    }
}

/// A caller's statement, taken apart to be looked at before it is sent.
struct Watched<DB: Database> {
    sql: SqlStr,
    statement: Option<DB::Statement>,
    arguments: Option<DB::Arguments>,
    persistent: bool,
}

impl<DB: Database<Statement: Clone>> Watched<DB> {
    /// Takes the statement apart; refuses it if it would end the transaction.
    fn new<'q>(mut query: impl Execute<'q, DB>) -> Result<Self, Error> {
        let arguments = query.take_arguments().map_err(Error::Encode)?;
        let statement = query.statement().cloned();
        let persistent = query.persistent();
        let sql = query.sql();
        if ends_transaction(sql.as_str()) {
            let reason = "a statement that would end it: use commit() or rollback() of the guard";
            return Err(Error::Configuration(Box::new(FenceError::Unfenced { reason })));
        }
        Ok(Self { sql, statement, arguments, persistent })
    }

    /// Whether it may be several statements, any of which could end the transaction.
    fn is_raw(&self) -> bool {
        self.arguments.is_none()
    }
}

impl<'q, DB: Database<Statement: Sync, Arguments: Send>> Execute<'q, DB> for Watched<DB> {
    fn sql(self) -> SqlStr {
        self.sql
    }

    fn statement(&self) -> Option<&DB::Statement> {
        self.statement.as_ref()
    }

    fn take_arguments(&mut self) -> Result<Option<DB::Arguments>, sqlx::error::BoxDynError> {
        Ok(self.arguments.take())
    }

    fn persistent(&self) -> bool {
        self.persistent
    }
}

/// Whether a statement, by its first word, ends the transaction or begins another.
///
/// ROLLBACK TO a savepoint does not: every savepoint is younger than the admission.
fn ends_transaction(sql: &str) -> bool {
    let mut words = Words(sql).map(str::to_ascii_lowercase);
    match words.next().as_deref() {
        Some("commit" | "end" | "abort" | "begin" | "start") => true,
        Some("rollback") => !words.take(3).any(|word| word == "to"),
        Some("prepare") => words.next().as_deref() == Some("transaction"),
        _ => false,
    }
}

/// The words at the beginning of a statement, without blanks and comments.
struct Words<'a>(&'a str);

impl<'a> Iterator for Words<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        loop {
            self.0 = self.0.trim_start_matches(|c: char| c.is_whitespace() || c == ';');
            if let Some(comment) = self.0.strip_prefix("--") {
                self.0 = comment.split_once('\n').map_or("", |(_, rest)| rest);
            } else if let Some(comment) = self.0.strip_prefix("/*") {
                self.0 = after_comment(comment);
            } else {
                break;
            }
        }
        let end = self.0.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(self.0.len());
        let (word, rest) = self.0.split_at(end);
        self.0 = rest;
        (!word.is_empty()).then_some(word)
    }
}

/// What follows a block comment whose opening has been read; block comments nest.
fn after_comment(mut text: &str) -> &str {
    let mut depth = 1_u32;
    while depth > 0 {
        let (open, close) = (text.find("/*"), text.find("*/"));
        match (open, close) {
            (Some(open), Some(close)) if open < close => {
                depth += 1;
                text = &text[open + 2..];
            }
            (_, Some(close)) => {
                depth -= 1;
                text = &text[close + 2..];
            }
            _ => return "",
        }
    }
    text
}

/// A stream of results that tells the health when it ended, and how.
struct Watching<'e, T> {
    results: BoxStream<'e, Result<T, Error>>,
    health: &'e mut Health,
}

impl<T> Stream for Watching<'_, T> {
    type Item = Result<T, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = self.results.as_mut().poll_next(cx);
        match &next {
            Poll::Ready(None) => self.health.end_statement(false),
            Poll::Ready(Some(Err(_))) => self.health.end_statement(true),
            Poll::Ready(Some(Ok(_))) | Poll::Pending => {}
        }
        next
    }
}

/// sqlx cannot express one implementation for every database, so each has its own, of one text.
macro_rules! impl_executor {
    ($database:ty) => {
        impl<'c> Executor<'c> for &'c mut Admitted<'_, $database> {
            type Database = $database;

            fn fetch_many<'e, 'q: 'e, E>(
                self,
                query: E,
            ) -> BoxStream<
                'e,
                Result<Either<<$database as Database>::QueryResult, <$database as Database>::Row>, Error>,
            >
            where
                'c: 'e,
                E: 'q + Execute<'q, $database>,
            {
                let watched = match Watched::new(query) {
                    Ok(watched) => watched,
                    Err(error) => return Box::pin(stream::iter([Err(error)])),
                };
                let (conn, health) = self.split();
                health.suspect |= watched.is_raw();
                health.begin_statement();
                Box::pin(Watching { results: conn.fetch_many(watched), health })
            }

            fn fetch_optional<'e, 'q: 'e, E>(
                self,
                query: E,
            ) -> BoxFuture<'e, Result<Option<<$database as Database>::Row>, Error>>
            where
                'c: 'e,
                E: 'q + Execute<'q, $database>,
            {
                let watched = Watched::new(query);
                let (conn, health) = self.split();
                Box::pin(async move {
                    let watched = watched?;
                    health.suspect |= watched.is_raw();
                    health.begin_statement();
                    let outcome = conn.fetch_optional(watched).await;
                    health.end_statement(outcome.is_err());
                    outcome
                })
            }

            fn prepare_with<'e>(
                self,
                sql: SqlStr,
                parameters: &'e [<$database as Database>::TypeInfo],
            ) -> BoxFuture<'e, Result<<$database as Database>::Statement, Error>>
            where
                'c: 'e,
            {
                let (conn, health) = self.split();
                Box::pin(async move {
                    health.begin_statement();
                    let outcome = conn.prepare_with(sql, parameters).await;
                    health.end_statement(outcome.is_err());
                    outcome
                })
            }

            fn describe<'e>(
                self,
                sql: SqlStr,
            ) -> BoxFuture<'e, Result<sqlx_core::describe::Describe<$database>, Error>>
            where
                'c: 'e,
            {
                let (conn, health) = self.split();
                Box::pin(async move {
                    health.begin_statement();
                    let outcome = conn.describe(sql).await;
                    health.end_statement(outcome.is_err());
                    outcome
                })
            }
        }
    };
}

#[cfg(feature = "postgres")]
impl_executor!(sqlx::Postgres);
#[cfg(feature = "sqlite")]
impl_executor!(sqlx::Sqlite);

#[cfg(test)]
mod tests {
    use super::ends_transaction;

    #[test]
    fn what_ends_a_transaction_is_told_by_its_first_word() {
        for sql in [
            "commit",
            "  COMMIT;",
            "end",
            "abort",
            "rollback",
            "ROLLBACK AND CHAIN",
            "-- done\ncommit",
            "/* a /* nested */ one */ commit and chain",
            ";; begin",
            "start transaction",
            "prepare transaction 'x'",
            "commit prepared 'x'",
        ] {
            assert!(ends_transaction(sql), "{sql:?}");
        }
        for sql in [
            "",
            "select 1",
            "savepoint commit",
            "rollback to savepoint s",
            "rollback transaction to s",
            "release s",
            "prepare q as select 1",
            "commits",
            "-- commit",
            "/* commit",
            "insert into t values ('commit')",
        ] {
            assert!(!ends_transaction(sql), "{sql:?}");
        }
    }
}
