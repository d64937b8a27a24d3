//! How a lock service gets a token when its own counter may have forgotten some.

use std::error::Error;
use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::error::Group;
use crate::owner::OwnerId;
use crate::resource::Resource;
use crate::token::FencingToken;

/// Issues the first token of a resource's next epoch. A fence does it from the database's memory.
///
/// A fence knows the tokens that were raised, not those that were issued and never used; so a
/// counter that may have forgotten cannot simply go on above the fence. Only a whole new epoch is
/// above everything that was ever issued.
pub trait Renumber: Send + Sync + 'static {
    /// Issues `owner` the first token of the next epoch, and has it refuse every older one.
    ///
    /// Once this has returned, the token is above all that were ever issued for the resource, and
    /// no write under an older one is accepted any more. Asked again by the same owner, as after a
    /// lost answer, it gives the same token. A resource never seen begins at [`FencingToken::FIRST`].
    ///
    /// `counter` is what the lock service's counter holds, if anything: the token is above that, too.
    /// `within` is how long the lock still lasts: later than that it must not happen.
    ///
    /// Only the holder of the lock may ask, while it holds it: a holder of an earlier number is fenced
    /// out, and its open transaction is waited for and then ended, as by a newer holder.
    ///
    /// # Errors
    ///
    /// Whatever kept the database from doing it; the lock is then given back.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future may or may not renumber. If it did, the number is used up, and whoever
    /// had one before is fenced out.
    fn renumber<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        counter: Option<FencingToken>,
        within: Duration,
    ) -> BoxFuture<'a, Result<FencingToken, RenumberError>>;

    /// Whether it remembers what it issued. Without a memory, a counter that is gone cannot be
    /// numbered above what it gave.
    fn remembers(&self) -> bool {
        true
    }
}

/// Why no token could be issued, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[error("the database could not issue one")]
pub struct RenumberError {
    group: Group,
    source: Box<dyn Error + Send + Sync>,
}

impl RenumberError {
    /// Describes a failure; for implementations of [`Renumber`].
    pub fn new(group: Group, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { group, source: source.into() }
    }

    /// What to do about it.
    #[must_use]
    pub fn group(&self) -> Group {
        self.group
    }
}

/// Numbers from the lock service's own counter alone, where no database remembers.
///
/// **What that costs:** when the lock service forgets its counter (a flush, a failover to a replica
/// that was behind), numbering begins again at 1, and a token from before is larger than one from
/// after. Tokens of such a service order grants only as long as the counter is kept.
#[derive(Debug, Clone, Copy, Default)]
pub struct CounterOnly;

impl Renumber for CounterOnly {
    fn remembers(&self) -> bool {
        false
    }

    fn renumber<'a>(
        &'a self,
        _: &'a Resource,
        _: OwnerId,
        counter: Option<FencingToken>,
        _: Duration,
    ) -> BoxFuture<'a, Result<FencingToken, RenumberError>> {
        let first = match counter {
            None => Some(FencingToken::FIRST),
            Some(counter) => counter.first_of_next_epoch(),
        };
        let exhausted = || RenumberError::new(Group::Misuse, "the last epoch is used up");
        Box::pin(async move { first.ok_or_else(exhausted) })
    }
}
