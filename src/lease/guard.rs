//! The guard value of a lease.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::error::{LeaseError, Lost};
use super::keepalive::{ReleaseRequest, Term, serve};
use super::service::Standing;
use crate::credential::Credential;
use crate::grant::Grant;
use crate::owner::OwnerId;
use crate::resource::Resource;
use crate::token::FencingToken;

/// How long a caller is kept waiting for the lock service's answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// A time-bounded exclusive hold on a resource; obtained from [`Leases`](super::Leases).
///
/// A task of its own renews it at a third of its time to live, for as long as this value lives
/// and the lock service says that it is still ours.
///
/// Dropping it frees the lock in the background, soon, and never blocks; [`Lease::release`] frees
/// it and waits for the answer. Dropping does *not* undo or stop anything that is being done under
/// the lease, and does not end an open transaction: the next holder waits for that one. Where the
/// runtime is gone already, the lock ends by its time to live.
///
/// Whether the lease still holds is not a question that can be answered safely from here. Show it
/// to a fence, which decides; use [`Lease::lost`] and [`Lease::remaining`] to stop early.
#[must_use = "a lease that is not kept is released at once"]
pub struct Lease {
    term: Arc<Term>,
    /// Taken by the release; dropped with the lease otherwise, which the keep-alive takes for one.
    release: Option<oneshot::Sender<ReleaseRequest>>,
}

impl Lease {
    pub(super) fn start(term: Term) -> Self {
        let term = Arc::new(term);
        let (release, asked) = oneshot::channel();
        tokio::spawn(serve(term.clone(), asked));
        Self { term, release: Some(release) }
    }

    /// What is held.
    #[must_use]
    pub fn resource(&self) -> &Resource {
        &self.term.resource
    }

    /// The fencing token of this term. Renewal keeps it.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.term.token
    }

    /// Whose it is: an identity made for this very acquisition.
    #[must_use]
    pub fn owner(&self) -> OwnerId {
        self.term.owner
    }

    /// The grant as it stands now: a plain value that can go to another task, or be printed and go
    /// to another process. It does not keep the lease alive.
    #[must_use]
    pub fn grant(&self) -> Grant {
        self.term.grant()
    }

    /// What is left until the deadline, by this machine's clock: advice, not safety.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        if self.term.cancellation().is_cancelled() {
            return Duration::ZERO;
        }
        self.term.deadline().since(self.term.clock.now())
    }

    /// Waits until the lease is lost, and says how. It does not borrow the lease.
    ///
    /// Select it against the work: after an orderly release it never resolves. It resolves by the
    /// deadline, and as soon as the lock service says so; after the machine was suspended, up to a
    /// second later, and not while blocking code keeps the runtime from running.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect.
    pub fn lost(&self) -> impl Future<Output = Lost> + Send + 'static {
        let term = self.term.clone();
        async move {
            term.cancellation().cancelled().await;
            term.lost().unwrap_or(Lost::Expired)
        }
    }

    /// A token that is cancelled when the lease is lost, for handing to whatever works under it.
    /// An orderly release does not cancel it.
    #[must_use]
    pub fn cancellation(&self) -> CancellationToken {
        // A child, so that a caller who cancels it does not end the term.
        self.term.cancellation().child_token()
    }

    /// Frees the lock and waits for the answer.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Lost`] if it was not ours any more; another holder's lock is never touched.
    /// What was committed under the lease stays committed. [`LeaseError::Unavailable`] if the
    /// service does not answer within five seconds; it goes on being asked in the background, until
    /// the lease runs out.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not stop the release, only the waiting for its answer.
    pub async fn release(mut self) -> Result<(), LeaseError> {
        let (answer_to, answer) = oneshot::channel();
        let asked = self.release.take().is_some_and(|release| release.send(answer_to).is_ok());
        let gone = || LeaseError::Unavailable("the runtime that kept the lease has ended".into());
        if !asked {
            return Err(gone());
        }
        match tokio::time::timeout(ANSWER_LIMIT, answer).await {
            Ok(answer) => answer.unwrap_or_else(|_| Err(gone())),
            Err(elapsed) => Err(LeaseError::Unavailable(elapsed.into())),
        }
    }
}

impl Credential for Lease {
    fn grant(&self) -> Grant {
        self.term.grant()
    }

    /// Gives the lock back, marked for numbering anew, if the service still holds it for this
    /// owner: a fence that knows better than a valid lease means that the counter went back.
    fn refused(&self, seen: FencingToken) -> BoxFuture<'_, bool> {
        Box::pin(async move {
            let Ok(Standing::Ours) = self.term.service.disown(&self.term.resource, self.term.owner).await
            else {
                return false;
            };
            tracing::error!(
                resource = %self.term.resource, token = %self.term.token, %seen,
                "the token counter went back; the next grant is numbered anew",
            );
            self.term.lose(Lost::Regressed);
            true
        })
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("resource", &self.term.resource.as_str())
            .field("token", &self.term.token)
            .field("owner", &self.term.owner)
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}
