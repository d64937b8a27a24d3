//! Rows that carry the token of their last writer.
//!
//! A table with a column `last_token bigint` (nullable, or `not null default 0`) can be written
//! through an admitted transaction in two forms, told apart by the table's type:
//!
//! - [`Once`] writes `… where last_token < $token`: each row at most once a term. Writing it again
//!   in the same term does nothing and answers [`OnceOutcome::AlreadyWritten`].
//! - [`Many`] writes `… where last_token <= $token`: for rows that one holder changes repeatedly,
//!   such as balances.
//!
//! Neither tells whether a piece of *work* was done: two payouts on one account are two pieces of
//! work under one token. That is what the idempotency key says.
//!
//! # What a row's token is worth
//!
//! It is a second line, inside the fence. **On its own it would be no protection:** a sleeper could
//! write every row that its successor has not touched yet. That is why nothing here works outside
//! an admitted transaction.
//!
//! **A row's token only compares under one resource.** Tokens of different resources are counted
//! apart; a table (or a row, where the resource is `tenant/42`) must be written under one resource
//! for ever. Written under two, it refuses one of them, or lets a stale one pass.
//!
//! # Zero rows
//!
//! A write that changes nothing is explained in the same round trip, by reading the row again under
//! a lock: stale with both tokens ([`FenceError::Stale`]), already written, there already, or
//! missing, as the row stood when the statement began. A key must match one row at most, and not be
//! null.

use std::future::IntoFuture;
use std::marker::PhantomData;

use futures_util::future::BoxFuture;
use sqlx::{Arguments, Database, Encode, Type};

use super::connection::Admitted;
use super::dialect::{FenceDatabase, Seen};
use super::error::FenceError;
use crate::error::Invalid;
use crate::token::FencingToken;

/// How often a statement is run again whose row changed between its write and its explanation.
const ATTEMPTS: u32 = 5;

/// A table whose rows carry the token of their last writer, and the form in which it is written.
///
/// # Examples
///
/// ```
/// use fencerow::fence::{Many, Once, Table};
///
/// const PAYOUT: Table<Once> = Table::once("payout");
/// const ACCOUNT: Table<Many> = Table::many("account").in_schema("ledger");
/// # let _ = (PAYOUT, ACCOUNT);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Table<F> {
    schema: Option<&'static str>,
    name: &'static str,
    form: PhantomData<F>,
}

impl Table<Once> {
    /// A table whose rows are written at most once a term.
    #[must_use]
    pub const fn once(name: &'static str) -> Self {
        Self { schema: None, name, form: PhantomData }
    }
}

impl Table<Many> {
    /// A table whose rows one holder writes repeatedly.
    #[must_use]
    pub const fn many(name: &'static str) -> Self {
        Self { schema: None, name, form: PhantomData }
    }
}

impl<F> Table<F> {
    /// The same table, in a schema.
    #[must_use]
    pub const fn in_schema(self, schema: &'static str) -> Self {
        Self { schema: Some(schema), ..self }
    }
}

/// Rows written at most once a term: `last_token < $token`.
#[derive(Debug, Clone, Copy)]
pub enum Once {}

/// Rows written as often as the holder likes: `last_token <= $token`.
#[derive(Debug, Clone, Copy)]
pub enum Many {}

/// What became of a row written [`Once`] a term.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a row may not have been written"]
pub enum OnceOutcome {
    /// It was written.
    Written,
    /// It had been written in this term already; nothing was changed.
    AlreadyWritten,
    /// There is no such row to update or delete.
    Missing,
    /// There was such a row already, of an earlier term; nothing was inserted.
    Exists,
}

/// What became of a row written [`Many`] times a term.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a row may not have been written"]
pub enum ManyOutcome {
    /// It was written.
    Written,
    /// There is no such row to update or delete.
    Missing,
    /// There was such a row already; nothing was inserted.
    Exists,
}

/// A form of writing rows with a token: [`Once`] or [`Many`].
pub trait Form: sealed::Form {}

impl Form for Once {}
impl Form for Many {}

mod sealed {
    use super::{FencingToken, ManyOutcome, Once, OnceOutcome, Seen, Verb};

    /// What a zero-row answer turned out to be.
    pub enum Verdict<O> {
        Outcome(O),
        Stale,
        /// The row changed between the write and its explanation.
        Again,
    }

    pub trait Form: Send {
        type Outcome: Send;
        /// How a row's token has to stand to the grant's for it to be written.
        const WRITES_IF: &'static str;
        fn judge(verb: Verb, seen: Seen, token: FencingToken) -> Verdict<Self::Outcome>;
    }

    impl Form for Once {
        type Outcome = OnceOutcome;
        const WRITES_IF: &'static str = "<";

        fn judge(verb: Verb, seen: Seen, token: FencingToken) -> Verdict<OnceOutcome> {
            let last = seen.last_token.unwrap_or(0);
            match verb {
                _ if seen.written > 0 => Verdict::Outcome(OnceOutcome::Written),
                Verb::Update | Verb::Delete if !seen.exists => Verdict::Outcome(OnceOutcome::Missing),
                _ if !seen.exists => Verdict::Again,
                _ if last > token.get() => Verdict::Stale,
                _ if last == token.get() => Verdict::Outcome(OnceOutcome::AlreadyWritten),
                Verb::Insert => Verdict::Outcome(OnceOutcome::Exists),
                _ => Verdict::Again,
            }
        }
    }

    impl Form for super::Many {
        type Outcome = ManyOutcome;
        const WRITES_IF: &'static str = "<=";

        fn judge(verb: Verb, seen: Seen, token: FencingToken) -> Verdict<ManyOutcome> {
            match verb {
                _ if seen.written > 0 => Verdict::Outcome(ManyOutcome::Written),
                Verb::Update | Verb::Delete if !seen.exists => Verdict::Outcome(ManyOutcome::Missing),
                _ if !seen.exists => Verdict::Again,
                _ if seen.last_token.unwrap_or(0) > token.get() => Verdict::Stale,
                Verb::Insert => Verdict::Outcome(ManyOutcome::Exists),
                _ => Verdict::Again,
            }
        }
    }
}

use sealed::Verdict;

/// What is to be done with a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    Insert,
    Update,
    Upsert,
    Delete,
}

/// One repository statement, ready for a dialect to put into words. `$1` is the token.
pub struct Statement<DB: Database> {
    pub verb: Verb,
    /// Quoted, with its schema.
    pub table: String,
    pub writes_if: &'static str,
    /// Quoted columns and their parameters.
    pub keys: Vec<(String, usize)>,
    pub sets: Vec<Assignment>,
    pub arguments: DB::Arguments,
    /// The keys alone, for a database that asks again by a statement of its own.
    pub key_arguments: DB::Arguments,
}

/// One column that a statement writes.
pub struct Assignment {
    /// Quoted.
    pub column: String,
    pub parameter: usize,
    /// Whether the value is added to what is there.
    pub adds: bool,
}

/// A row to be written, from [`Admitted::insert`] and its like: say which row by
/// [`key`](Write::key), which values by [`set`](Write::set) and [`add`](Write::add), and await it.
#[must_use = "nothing is written until this is awaited"]
pub struct Write<'t, 'c, DB: FenceDatabase, F> {
    tx: &'t mut Admitted<'c, DB>,
    statement: Result<Statement<DB>, FenceError>,
    form: PhantomData<F>,
}

impl<'c, DB: FenceDatabase> Admitted<'c, DB> {
    /// Inserts a row, and does nothing if one with its key is there. The key's columns need a
    /// unique index.
    ///
    /// # Errors
    ///
    /// When awaited: [`FenceError::Stale`] if the row has a higher token, [`FenceError::Invalid`] for
    /// an identifier, no key or one that matches several rows, and the database's.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, roll the transaction back; a commit asks the database first.
    pub fn insert<F: Form>(&mut self, table: &Table<F>) -> Write<'_, 'c, DB, F>
    where
        i64: for<'q> Encode<'q, DB> + Type<DB>,
    {
        Write::new(self, Verb::Insert, table)
    }

    /// Updates a row.
    ///
    /// # Errors
    ///
    /// When awaited: [`FenceError::Stale`] if the row has a higher token, [`FenceError::Invalid`] for
    /// an identifier, no key or one that matches several rows, and the database's.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, roll the transaction back; a commit asks the database first.
    pub fn update<F: Form>(&mut self, table: &Table<F>) -> Write<'_, 'c, DB, F>
    where
        i64: for<'q> Encode<'q, DB> + Type<DB>,
    {
        Write::new(self, Verb::Update, table)
    }

    /// Updates a row, or inserts it if there is none. The key's columns need a unique index.
    ///
    /// # Errors
    ///
    /// When awaited: [`FenceError::Stale`] if the row has a higher token, [`FenceError::Invalid`] for
    /// an identifier, no key or one that matches several rows, and the database's.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, roll the transaction back; a commit asks the database first.
    pub fn upsert<F: Form>(&mut self, table: &Table<F>) -> Write<'_, 'c, DB, F>
    where
        i64: for<'q> Encode<'q, DB> + Type<DB>,
    {
        Write::new(self, Verb::Upsert, table)
    }

    /// Deletes a row. Its token goes with it: what is inserted under the key later knows of none.
    ///
    /// # Errors
    ///
    /// When awaited: [`FenceError::Stale`] if the row has a higher token, [`FenceError::Invalid`] for
    /// an identifier, no key or one that matches several rows, and the database's.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, roll the transaction back; a commit asks the database first.
    pub fn delete<F: Form>(&mut self, table: &Table<F>) -> Write<'_, 'c, DB, F>
    where
        i64: for<'q> Encode<'q, DB> + Type<DB>,
    {
        Write::new(self, Verb::Delete, table)
    }
}

impl<'t, 'c, DB: FenceDatabase, F: Form> Write<'t, 'c, DB, F> {
    fn new(tx: &'t mut Admitted<'c, DB>, verb: Verb, table: &Table<F>) -> Self
    where
        i64: for<'q> Encode<'q, DB> + Type<DB>,
    {
        let token = tx.token().get();
        let statement = qualified(table).map_err(FenceError::Invalid).and_then(|table| {
            let mut arguments = DB::Arguments::default();
            arguments.add(token).map_err(encode_error)?;
            Ok(Statement {
                verb,
                table,
                writes_if: F::WRITES_IF,
                keys: Vec::new(),
                sets: Vec::new(),
                arguments,
                key_arguments: DB::Arguments::default(),
            })
        });
        Self { tx, statement, form: PhantomData }
    }

    /// Says which row: the one whose `column` is `value`. Several calls make a compound key, which
    /// must match one row at most.
    pub fn key<'q, T>(mut self, column: &str, value: T) -> Self
    where
        T: Encode<'q, DB> + Type<DB> + Clone,
    {
        self.change(|statement| {
            let column = quoted(column)?;
            statement.key_arguments.add(value.clone()).map_err(encode_error)?;
            statement.arguments.add(value).map_err(encode_error)?;
            statement.keys.push((column, statement.arguments.len()));
            Ok(())
        });
        self
    }

    /// Writes `value` into `column`.
    pub fn set<'q, T>(self, column: &str, value: T) -> Self
    where
        T: Encode<'q, DB> + Type<DB>,
    {
        self.assign(column, value, false)
    }

    /// Adds `value` to what is in `column`. An inserted row begins with `value` itself.
    pub fn add<'q, T>(self, column: &str, value: T) -> Self
    where
        T: Encode<'q, DB> + Type<DB>,
    {
        self.assign(column, value, true)
    }

    fn assign<'q, T>(mut self, column: &str, value: T, adds: bool) -> Self
    where
        T: Encode<'q, DB> + Type<DB>,
    {
        self.change(|statement| {
            let column = quoted(column)?;
            statement.arguments.add(value).map_err(encode_error)?;
            let parameter = statement.arguments.len();
            statement.sets.push(Assignment { column, parameter, adds });
            Ok(())
        });
        self
    }

    /// Keeps the first error for when the write is awaited.
    fn change(&mut self, change: impl FnOnce(&mut Statement<DB>) -> Result<(), FenceError>) {
        if let Ok(statement) = &mut self.statement
            && let Err(error) = change(statement)
        {
            self.statement = Err(error);
        }
    }

    async fn run(self) -> Result<F::Outcome, FenceError> {
        let statement = self.statement?;
        if statement.keys.is_empty() {
            let reason = "a row is written by its key";
            return Err(Invalid::Option { what: "key", reason }.into());
        }
        let grant = self.tx.grant.clone();
        let token = grant.token();
        let mut before = None;
        for _ in 0..ATTEMPTS {
            let seen = DB::write(self.tx.begin_statement(), &statement).await;
            let seen = self.tx.end_statement(seen).map_err(|error| DB::explain(error, &grant))?;
            if seen.written > 1 {
                let reason = "the key of a write matched several rows";
                self.tx.health.doomed = Some(reason);
                return Err(Invalid::Option { what: "key", reason }.into());
            }
            match F::judge(statement.verb, seen, token) {
                Verdict::Outcome(outcome) => return Ok(outcome),
                // Twice the same, and nothing that explains it: something in the database keeps the
                // write from happening.
                Verdict::Again if before == Some(seen) => {
                    let reason = "the database suppressed it without an error, by a trigger or a row policy";
                    return Err(Invalid::Option { what: "write", reason }.into());
                }
                Verdict::Again => before = Some(seen),
                Verdict::Stale => {
                    let seen = FencingToken::new(seen.last_token.unwrap_or(0))?;
                    tracing::warn!(resource = %grant.resource(), %token, %seen, "stale write refused by a row");
                    return Err(FenceError::Stale {
                        resource: grant.resource().clone(),
                        offered: token,
                        seen,
                    });
                }
            }
        }
        let source = sqlx::Error::Protocol("the row kept changing while it was being written".into());
        Err(FenceError::Busy { resource: grant.resource().clone(), source })
    }
}

impl<'t, DB: FenceDatabase, F: Form + 't> IntoFuture for Write<'t, '_, DB, F>
where
    DB::Arguments: Sync,
{
    type Output = Result<F::Outcome, FenceError>;
    type IntoFuture = BoxFuture<'t, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

fn encode_error(error: sqlx::error::BoxDynError) -> FenceError {
    FenceError::Database(sqlx::Error::Encode(error))
}

fn qualified<F>(table: &Table<F>) -> Result<String, Invalid> {
    let name = quoted_name(table.name)?;
    match table.schema {
        Some(schema) => Ok(format!("{}.{name}", quoted_name(schema)?)),
        None => Ok(name),
    }
}

fn quoted(column: &str) -> Result<String, FenceError> {
    if column.eq_ignore_ascii_case("last_token") {
        let reason = "the column is written by the fence alone";
        return Err(Invalid::Identifier { name: column.to_owned(), reason }.into());
    }
    Ok(quoted_name(column)?)
}

/// The longest identifier that Postgres does not silently cut off.
const MAX_IDENTIFIER: usize = 63;

/// Quotes an identifier as it stands: upper case and quotes in it count.
fn quoted_name(name: &str) -> Result<String, Invalid> {
    let reason = if name.is_empty() {
        "it is empty"
    } else if name.len() > MAX_IDENTIFIER {
        "it is longer than 63 bytes"
    } else if name.contains('\0') {
        "it contains a NUL"
    } else {
        return Ok(format!("\"{}\"", name.replace('"', "\"\"")));
    };
    Err(Invalid::Identifier { name: name.to_owned(), reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_is_quoted_or_refused() {
        assert_eq!(quoted_name("payout").as_deref(), Ok("\"payout\""));
        assert_eq!(quoted_name("a\" = 1; --").as_deref(), Ok("\"a\"\" = 1; --\""));
        let longest = "x".repeat(63);
        assert!(quoted_name(&longest).is_ok());
        for name in ["", "a\0", &"x".repeat(64)] {
            assert!(matches!(quoted_name(name), Err(Invalid::Identifier { .. })));
        }
    }
}
