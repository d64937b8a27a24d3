//! What a database has to do for the fence: the few steps that differ between them.

use std::future::Future;
use std::time::Duration;

use sqlx::Database;
use uuid::Uuid;

use super::error::FenceError;
use super::limits::Limits;
use super::repository::Statement;
use crate::grant::Grant;
use crate::owner::OwnerId;
use crate::resource::Resource;
use crate::token::FencingToken;

/// Why a transaction is not admitted whose grant the fence has yet to be raised to.
pub(super) const NOT_RAISED: &str = "the fence was not raised to the grant before";

/// A database that can keep a fence: Postgres, and SQLite. It cannot be implemented elsewhere.
pub trait FenceDatabase: Dialect {}

/// The steps of one database. They are atomic where they say so, and speak on one connection.
pub trait Dialect: Database {
    /// Whether a rollback leaves the connection fit for the next borrower, whatever happened in the
    /// transaction.
    const ROLLBACK_MENDS: bool;

    /// Raises the fence to the grant if it may not be there yet, commits that, opens a transaction
    /// and admits it. On an error the connection may be left inside a transaction.
    fn open(
        conn: &mut Self::Connection,
        grant: &Grant,
        opening: Opening,
    ) -> impl Future<Output = Result<(), FenceError>> + Send;

    /// Raises the fence in a committed transaction of its own.
    fn raise(
        conn: &mut Self::Connection,
        grant: &Grant,
        patience: Patience,
    ) -> impl Future<Output = Result<(), FenceError>> + Send;

    /// Admits the transaction that the connection is in.
    fn admit(
        conn: &mut Self::Connection,
        grant: &Grant,
    ) -> impl Future<Output = Result<(), FenceError>> + Send;

    /// Issues the owner the first token of the next epoch, in a committed transaction of its own;
    /// not later than `within` from now.
    fn renumber(
        conn: &mut Self::Connection,
        resource: &Resource,
        owner: OwnerId,
        counter: Option<FencingToken>,
        within: Duration,
        patience: Patience,
    ) -> impl Future<Output = Result<FencingToken, FenceError>> + Send;

    /// Fails unless the connection is still, unharmed, in the transaction that was admitted.
    fn probe(
        conn: &mut Self::Connection,
        grant: &Grant,
    ) -> impl Future<Output = Result<(), FenceError>> + Send;

    /// Commits, and says what is known of it.
    fn commit(
        conn: &mut Self::Connection,
        grant: &Grant,
    ) -> impl Future<Output = Result<(), FenceError>> + Send;

    /// Ends whatever transaction the connection is in.
    fn rollback(conn: &mut Self::Connection) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Writes the record of a key, or reads the one that is there.
    fn claim(
        conn: &mut Self::Connection,
        claim: &ClaimRow<'_>,
    ) -> impl Future<Output = Result<Option<SeenRow>, sqlx::Error>> + Send;

    /// Stores the response of a claimed key; false if there is no such claim.
    fn record(
        conn: &mut Self::Connection,
        claim: &ClaimRow<'_>,
        response: &str,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

    /// Runs a statement without parameters or results.
    fn run(conn: &mut Self::Connection, sql: String) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Runs one statement of the repository and says what became of its row.
    fn write(
        conn: &mut Self::Connection,
        statement: &Statement<Self>,
    ) -> impl Future<Output = Result<Seen, sqlx::Error>> + Send;

    /// Brings the fence's tables up to date, in a transaction of its own.
    fn migrate(conn: &mut Self::Connection) -> impl Future<Output = Result<(), FenceError>> + Send;

    /// Drops the fence's tables, in a transaction of its own.
    fn unmigrate(conn: &mut Self::Connection) -> impl Future<Output = Result<(), FenceError>> + Send;

    /// What an error of this database means.
    fn explain(error: sqlx::Error, grant: &Grant) -> FenceError;
}

/// How a fenced transaction is to be opened.
#[derive(Debug, Clone, Copy)]
pub struct Opening {
    pub isolation: Isolation,
    pub limits: Limits,
    pub patience: Patience,
    /// Whether this fence has already raised itself to the grant.
    pub raised: bool,
}

/// How long a raise waits for the transactions of older grants.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    pub limit: Duration,
    /// Whether it ends them then.
    pub end_blockers: bool,
}

/// The isolation level of a fenced transaction.
///
/// On SQLite every transaction is serializable, and this makes no difference.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Isolation {
    /// Each statement sees what was committed before it.
    #[default]
    ReadCommitted,
    /// The whole transaction sees what was committed before its admission.
    RepeatableRead,
    /// As if transactions ran one after another.
    Serializable,
}

/// The record of a key as it is to be written.
#[derive(Debug, Clone, Copy)]
pub struct ClaimRow<'a> {
    pub scope: &'a str,
    pub key: &'a str,
    pub fingerprint: &'a [u8],
    pub resource: &'a str,
    pub token: i64,
    pub owner: Uuid,
}

/// The record of a key as it was found.
#[derive(Debug)]
pub struct SeenRow {
    pub fingerprint: Vec<u8>,
    pub resource: String,
    pub response: Option<String>,
}

/// What one repository statement did, and what it found where it did nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Seen {
    pub written: i64,
    /// Whether the row is there.
    pub exists: bool,
    /// Its token, if it has one.
    pub last_token: Option<i64>,
}
