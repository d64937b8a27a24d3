//! The double-entry ledger: its tables, and what is written into them.

use std::error::Error as StdError;
use std::fmt;

use fencerow::fence::{Admitted, FenceDatabase, FenceError, Many, ManyOutcome, Once, OnceOutcome, Table};
use serde::{Deserialize, Serialize};
use sqlx::{Decode, Encode, Executor, FromRow, IntoArguments, Pool, Type};

use crate::payouts::Payout;

/// Balances: one holder changes the same row for one payout after another.
const ACCOUNT: Table<Many> = Table::many("account");
/// Payouts: each row is written once when it is loaded, and once in a later term.
const PAYOUT: Table<Once> = Table::once("payout");

/// The account that all payouts are paid from. It owes in the end what the others have received.
pub(crate) const CLEARING: &str = "clearing";

/// What a payout's idempotency key answers with.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Receipt {
    pub(crate) token: i64,
}

/// One side of a payout.
#[derive(Debug, FromRow)]
pub(crate) struct Entry {
    pub(crate) payout: String,
    pub(crate) account: String,
    pub(crate) amount: i64,
}

/// The ledger's statements. What changes a row takes an admitted transaction.
pub(crate) trait Ledger: FenceDatabase {
    async fn create_tables(pool: &Pool<Self>) -> Result<(), sqlx::Error>;
    async fn open_account(tx: &mut Admitted<'static, Self>, account: &str) -> Result<(), LedgerError>;
    async fn enter(tx: &mut Admitted<'static, Self>, payout: &Payout) -> Result<(), LedgerError>;
    /// Payouts not settled yet, in the order of their ids. A plan only: what it says may be out of
    /// date when it arrives.
    async fn pending(pool: &Pool<Self>, limit: usize) -> Result<Vec<Payout>, sqlx::Error>;
    /// Pays one payout. The caller sees to it that this happens once.
    async fn pay(
        tx: &mut Admitted<'static, Self>,
        payout: &Payout,
        worker: &str,
    ) -> Result<Receipt, LedgerError>;
    async fn entries(pool: &Pool<Self>) -> Result<Vec<Entry>, sqlx::Error>;
    async fn balances(pool: &Pool<Self>) -> Result<Vec<(String, i64)>, sqlx::Error>;
}

// The bounds are what sqlx asks for where one text is to run on several databases. A program with
// one database writes `Admitted<'_, Postgres>` and none of them.
impl<DB> Ledger for DB
where
    DB: FenceDatabase<Arguments: Sync + IntoArguments<DB>>,
    for<'c> &'c mut Admitted<'static, DB>: Executor<'c, Database = DB>,
    for<'c> &'c Pool<DB>: Executor<'c, Database = DB>,
    for<'v> i64: Encode<'v, DB> + Decode<'v, DB> + Type<DB>,
    for<'v> String: Encode<'v, DB> + Decode<'v, DB> + Type<DB>,
    for<'v> &'v str: Encode<'v, DB> + Type<DB>,
    for<'r> Payout: FromRow<'r, DB::Row>,
    for<'r> Entry: FromRow<'r, DB::Row>,
    for<'r> (String, i64): FromRow<'r, DB::Row>,
{
    async fn create_tables(pool: &Pool<DB>) -> Result<(), sqlx::Error> {
        sqlx::raw_sql(include_str!("schema.sql")).execute(pool).await?;
        Ok(())
    }

    async fn open_account(tx: &mut Admitted<'static, DB>, account: &str) -> Result<(), LedgerError> {
        match tx.insert(&ACCOUNT).key("id", account).set("balance", 0_i64).await? {
            ManyOutcome::Written => Ok(()),
            _ => Err(LedgerError::row("account", account)),
        }
    }

    async fn enter(tx: &mut Admitted<'static, DB>, payout: &Payout) -> Result<(), LedgerError> {
        let row = tx.insert(&PAYOUT).key("id", payout.id.as_str());
        match row.set("account", payout.account.as_str()).set("amount", payout.amount).await? {
            OnceOutcome::Written => Ok(()),
            _ => Err(LedgerError::row("payout", &payout.id)),
        }
    }

    async fn pending(pool: &Pool<DB>, limit: usize) -> Result<Vec<Payout>, sqlx::Error> {
        let sql = "select id, account, amount from payout where settled_by is null order by id limit $1";
        sqlx::query_as(sql).bind(i64::try_from(limit).unwrap_or(i64::MAX)).fetch_all(pool).await
    }

    async fn pay(
        tx: &mut Admitted<'static, DB>,
        payout: &Payout,
        worker: &str,
    ) -> Result<Receipt, LedgerError> {
        let token = tx.token().get();
        let pair =
            "insert into entry (payout, account, amount, token) values ($1, $2, $3, $5), ($1, $4, -$3, $5)";
        sqlx::query(pair)
            .bind(payout.id.as_str())
            .bind(payout.account.as_str())
            .bind(payout.amount)
            .bind(CLEARING)
            .bind(token)
            .execute(&mut *tx)
            .await?;
        for (account, amount) in [(payout.account.as_str(), payout.amount), (CLEARING, -payout.amount)] {
            match tx.update(&ACCOUNT).key("id", account).add("balance", amount).await? {
                ManyOutcome::Written => {}
                _ => return Err(LedgerError::row("account", account)),
            }
        }
        match tx.update(&PAYOUT).key("id", payout.id.as_str()).set("settled_by", worker).await? {
            OnceOutcome::Written => Ok(Receipt { token }),
            _ => Err(LedgerError::row("payout", &payout.id)),
        }
    }

    async fn entries(pool: &Pool<DB>) -> Result<Vec<Entry>, sqlx::Error> {
        sqlx::query_as("select payout, account, amount from entry").fetch_all(pool).await
    }

    async fn balances(pool: &Pool<DB>) -> Result<Vec<(String, i64)>, sqlx::Error> {
        sqlx::query_as("select id, balance from account").fetch_all(pool).await
    }
}

/// Why something was not written into the ledger.
#[derive(Debug)]
pub(crate) enum LedgerError {
    Fence(FenceError),
    /// A row that must be there is not, or one that must not be is.
    Row {
        table: &'static str,
        id: String,
    },
}

impl LedgerError {
    fn row(table: &'static str, id: &str) -> Self {
        Self::Row { table, id: id.to_owned() }
    }
}

impl From<FenceError> for LedgerError {
    fn from(error: FenceError) -> Self {
        Self::Fence(error)
    }
}

impl From<sqlx::Error> for LedgerError {
    fn from(error: sqlx::Error) -> Self {
        Self::Fence(error.into())
    }
}

impl fmt::Display for LedgerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fence(error) => error.fmt(f),
            Self::Row { table, id } => write!(f, "the row {id:?} of table {table} is not as it must be"),
        }
    }
}

impl StdError for LedgerError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Fence(error) => error.source(),
            Self::Row { .. } => None,
        }
    }
}
