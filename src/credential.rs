//! What is shown to a fence.

use futures_util::future::BoxFuture;

use crate::grant::Grant;
use crate::token::FencingToken;

/// Something to be admitted by: a [`Grant`], or a [`Lease`](crate::lease::Lease), which can also
/// ask its lock service.
///
/// Leases and fences do not know each other. When a fence refuses a token as stale, only the lock
/// service can tell the two causes apart: the everyday one, that somebody else was granted the
/// resource meanwhile; and the alarming one, that the lock is still held and the counter went back.
pub trait Credential: Send + Sync {
    /// The grant as it stands now.
    fn grant(&self) -> Grant;

    /// Hears that a fence which has seen `seen` refused the grant. Answers whether the counter
    /// regressed, that is, whether the lock service still holds the resource for this owner; if so
    /// the term is over, and the next grant is numbered anew.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future may or may not have ended the term.
    fn refused(&self, seen: FencingToken) -> BoxFuture<'_, bool>;
}

impl Credential for Grant {
    fn grant(&self) -> Grant {
        self.clone()
    }

    /// A bare grant has nobody to ask: the refusal is taken as the everyday one.
    fn refused(&self, _: FencingToken) -> BoxFuture<'_, bool> {
        Box::pin(std::future::ready(false))
    }
}
