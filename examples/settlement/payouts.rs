//! The payout file: a CSV of `id,account,amount`, amounts in whole minor units.

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::path::Path;

use serde::Serialize;
use sqlx::FromRow;

/// The largest amount of one payout. The sum of nine million of them is still an `i64`.
const MAX_AMOUNT: i64 = 1_000_000_000_000;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, FromRow)]
pub(crate) struct Payout {
    pub(crate) id: String,
    pub(crate) account: String,
    pub(crate) amount: i64,
}

/// A payout file as it was read.
#[derive(Debug, Default)]
pub(crate) struct PayoutFile {
    pub(crate) payouts: Vec<Payout>,
    /// What is wrong, by line number. These lines are reported and left out.
    pub(crate) malformed: BTreeMap<u64, String>,
}

/// The accounts that payouts may go to.
pub(crate) fn accounts() -> impl Iterator<Item = String> {
    (1..=40).map(|n| format!("acct-{n:02}"))
}

/// Reads a payout file.
///
/// A line that makes no sense is reported and left out; only a file that cannot be read, or has
/// other columns, is an error.
pub(crate) fn read(path: &Path) -> Result<PayoutFile, Box<dyn Error>> {
    let mut reader = csv::ReaderBuilder::new()
        .flexible(true)
        .trim(csv::Trim::All)
        .from_path(path)
        .map_err(|error| format!("{}: {error}", path.display()))?;
    if reader.headers()? != ["id", "account", "amount"].as_slice() {
        return Err(format!("{}: the columns must be id,account,amount", path.display()).into());
    }
    let known: Vec<String> = accounts().collect();
    let mut file = PayoutFile::default();
    let mut lines = HashMap::new();
    for record in reader.byte_records() {
        let record = record?;
        let line = record.position().map_or(0, csv::Position::line);
        match parse(&record, &known, &lines) {
            Ok(payout) => {
                lines.insert(payout.id.clone(), line);
                file.payouts.push(payout);
            }
            Err(reason) => {
                file.malformed.insert(line, reason);
            }
        }
    }
    Ok(file)
}

/// Reads one line; `lines` says where each id was before.
fn parse(record: &csv::ByteRecord, known: &[String], lines: &HashMap<String, u64>) -> Result<Payout, String> {
    let fields: Vec<&str> = record
        .iter()
        .map(std::str::from_utf8)
        .collect::<Result<_, _>>()
        .map_err(|_| "it is not UTF-8".to_owned())?;
    let &[id, account, amount] = fields.as_slice() else {
        return Err(format!("it has {} columns instead of 3", fields.len()));
    };
    if id.is_empty() {
        return Err("it has no id".to_owned());
    }
    if let Some(before) = lines.get(id) {
        return Err(format!("the id {id:?} is on line {before} already"));
    }
    if !known.iter().any(|name| name == account) {
        return Err(format!("there is no account {account:?}"));
    }
    let digits = amount.strip_prefix(['+', '-']).unwrap_or(amount);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("the amount {amount:?} is not a whole number"));
    }
    match amount.parse() {
        Ok(amount @ 1..=MAX_AMOUNT) => Ok(Payout { id: id.to_owned(), account: account.to_owned(), amount }),
        Ok(..=0) => Err(format!("the amount {amount} is not positive")),
        Err(_) if amount.starts_with('-') => Err(format!("the amount {amount} is not positive")),
        _ => Err(format!("the amount {amount} is more than one payout may have")),
    }
}
