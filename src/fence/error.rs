//! What a fence answers when it does not admit, write or commit.

use sqlx::migrate::MigrateError;
use thiserror::Error;

use crate::error::{Group, Invalid};
use crate::renumber::RenumberError;
use crate::resource::Resource;
use crate::token::FencingToken;

/// Why a fenced transaction did not begin, write or commit.
///
/// Unless it says otherwise, nothing of the transaction is stored.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FenceError {
    /// The request makes no sense; nothing was sent.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// A newer holder has taken over, or another owner has the same token. Stop.
    #[error("stale fencing token {offered} for {resource:?}: {seen} has been seen")]
    Stale {
        /// What was to be written to.
        resource: Resource,
        /// The token of the refused grant.
        offered: FencingToken,
        /// The token that the fence, or the row, has seen.
        seen: FencingToken,
    },
    /// The lock service still holds the lease, and yet the fence has seen a higher token: the
    /// counter went back. The term is over; the next grant is numbered anew.
    #[error("the token counter of {resource:?} went back: it gave {offered}, but {seen} has been seen")]
    TokenRegressed {
        /// What was to be written to.
        resource: Resource,
        /// The token of the refused grant.
        offered: FencingToken,
        /// The token that the fence has seen.
        seen: FencingToken,
    },
    /// Others hold what is needed, and did not leave within the limit. Try again with the same lease.
    #[error("{resource:?} is busy")]
    Busy {
        /// What was to be written to.
        resource: Resource,
        /// The database's words; they name who is in the way, where it knows.
        #[source]
        source: sqlx::Error,
    },
    /// The database could not order this transaction among others (SQLSTATE 40001, 40P01; in SQLite a snapshot that is too old). Run the
    /// whole transaction again with the same lease.
    #[error("the transaction on {resource:?} has to be run again")]
    Retry {
        /// What was to be written to.
        resource: Resource,
        /// The database's words.
        #[source]
        source: sqlx::Error,
    },
    /// The idempotency key was used for something else: another input, or another resource.
    #[error("idempotency key {key:?} was used before for another {what}")]
    KeyReused {
        /// The key.
        key: String,
        /// What differs: `input` or `resource`.
        what: &'static str,
    },
    /// The key was claimed, and its response never recorded.
    #[error("idempotency key {key:?} was claimed, and no response was recorded for it")]
    Unrecorded {
        /// The key.
        key: String,
    },
    /// A payload or a response that JSON cannot hold, or a response stored by another program that
    /// does not read as the type asked for.
    #[error("not a value that can be kept with an idempotency key")]
    Payload(#[source] serde_json::Error),
    /// This is not the transaction that was admitted: it was ended from within, or is nested.
    #[error("not in the admitted transaction: {reason}")]
    Unfenced {
        /// What was found.
        reason: &'static str,
    },
    /// A statement had failed, and its error was passed over; the commit was refused.
    #[error("the transaction had failed before its commit")]
    Aborted,
    /// The database ended the transaction: a limit ran out, or a newer holder would not wait longer.
    #[error("the database ended the transaction")]
    Ended(#[source] sqlx::Error),
    /// The answer to COMMIT was lost: it may be stored or not. Run it again under the same
    /// idempotency key, which tells.
    #[error("the answer to the commit was lost")]
    CommitUnknown(#[source] sqlx::Error),
    /// The migrations could not be run.
    #[error("the fence's tables could not be set up")]
    Migration(#[source] MigrateError),
    /// The fence's tables or functions are not there, or not for this role.
    #[error("the fence is not set up in this database; `Fence::migrate` does it")]
    NotMigrated(#[source] sqlx::Error),
    /// The database could not be reached.
    #[error("the database could not be reached")]
    Unavailable(#[source] sqlx::Error),
    /// Any other answer of the database; also what a statement of the caller's own failed of, where
    /// it came here by `?`.
    #[error("the database refused")]
    Database(#[from] sqlx::Error),
}

impl FenceError {
    /// What to do about it.
    #[must_use]
    pub fn group(&self) -> Group {
        match self {
            Self::Stale { .. } => Group::Superseded,
            Self::TokenRegressed { .. } => Group::CounterRegressed,
            Self::Busy { .. } | Self::Retry { .. } => Group::Contended,
            Self::Unavailable(_) | Self::Ended(_) => Group::Unavailable,
            Self::CommitUnknown(_) => Group::UnknownOutcome,
            Self::Invalid(_)
            | Self::KeyReused { .. }
            | Self::Unrecorded { .. }
            | Self::Payload(_)
            | Self::Unfenced { .. }
            | Self::Aborted
            | Self::NotMigrated(_) => Group::Misuse,
            Self::Database(error) => group(error),
            Self::Migration(MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _)) => {
                group(error)
            }
            Self::Migration(_) => Group::Misuse,
        }
    }

    /// Whether a newer holder has taken over.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        matches!(self, Self::Stale { .. })
    }
}

/// What to do about a plain error of sqlx. A caller's own statement meets the same limits and the
/// same newer holders as the fence's.
fn group(error: &sqlx::Error) -> Group {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => Group::Unavailable,
        sqlx::Error::Database(error) => error.code().map_or(Group::Misuse, |code| group_of_code(&code)),
        _ => Group::Misuse,
    }
}

/// Postgres's codes have five characters; SQLite's are numbers, with more than one byte where they
/// say more than the last byte does.
fn group_of_code(code: &str) -> Group {
    match code {
        "40001" | "40P01" | "55P03" => Group::Contended,
        "57P01" | "57P02" | "57P03" | "57014" | "25P03" | "25P04" | "53300" => Group::Unavailable,
        _ if code.len() == 5 => match code.starts_with("08") {
            true => Group::Unavailable,
            false => Group::Misuse,
        },
        _ => match code.parse::<u32>().map(|code| code & 0xff) {
            Ok(5 | 6) => Group::Contended,
            Ok(14) => Group::Unavailable,
            _ => Group::Misuse,
        },
    }
}

/// A lock service is told what to do about it, and nothing of fences.
impl From<FenceError> for RenumberError {
    fn from(error: FenceError) -> Self {
        Self::new(error.group(), error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_callers_own_statement_says_what_to_do_about_it() {
        let io = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        assert_eq!(FenceError::from(sqlx::Error::Io(io)).group(), Group::Unavailable);
        assert_eq!(FenceError::from(sqlx::Error::RowNotFound).group(), Group::Misuse);
        for (code, group) in [
            ("57P01", Group::Unavailable),
            ("25P03", Group::Unavailable),
            ("08006", Group::Unavailable),
            ("40001", Group::Contended),
            ("55P03", Group::Contended),
            ("23505", Group::Misuse),
            ("25P02", Group::Misuse),
            ("5", Group::Contended),
            ("517", Group::Contended),
            ("14", Group::Unavailable),
            ("1555", Group::Misuse),
        ] {
            assert_eq!(group_of_code(code), group, "{code}");
        }
    }
}
