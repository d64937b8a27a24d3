//! Taking several leases: all of them, or none.

use std::future::IntoFuture;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::acquire::Leases;
use super::error::LeaseError;
use super::guard::Lease;
use crate::error::Invalid;
use crate::resource::Resource;

impl Leases {
    /// Acquires several resources for `ttl` each: all of them, or none.
    ///
    /// They are taken one after the other in the order of their names, whatever order they are
    /// given in, so that two callers who want the same ones cannot each hold what the other waits
    /// for. Those that are held already are kept alive meanwhile. The leases come in that order, each
    /// with its own token, and are released each by itself.
    ///
    /// As it stands it tries once; [`AcquireMany::wait`] waits.
    ///
    /// # Errors
    ///
    /// As [`Leases::acquire`], of the first resource that could not be had; and
    /// [`LeaseError::Invalid`] if one is named twice, before anything is sent. Those that had been
    /// acquired are released when this returns, or as soon as the service answers.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up: what was already granted is released in the background, or
    /// ends by its time to live.
    ///
    /// # Examples
    ///
    /// ```
    /// use fencerow::lease::{Leases, MemoryLocks};
    /// use std::time::Duration;
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let leases = Leases::without_fence(MemoryLocks::new());
    /// let both = leases.acquire_many(["acct/9", "acct/7"], Duration::from_secs(10)).await?;
    /// assert_eq!(both[0].resource().as_str(), "acct/7");
    /// assert!(leases.acquire_many(["acct/8", "acct/9"], Duration::from_secs(10)).await.is_err());
    /// # Ok(()) }
    /// ```
    pub fn acquire_many<R>(&self, resources: impl IntoIterator<Item = R>, ttl: Duration) -> AcquireMany<'_>
    where
        R: TryInto<Resource>,
        R::Error: Into<Invalid>,
    {
        let resources =
            resources.into_iter().map(|resource| resource.try_into().map_err(Into::into)).collect();
        AcquireMany { leases: self, resources, ttl, wait: Duration::ZERO, label: String::new() }
    }
}

/// An acquisition of several resources that has yet to be awaited, and its options.
#[derive(Debug)]
#[must_use = "nothing is acquired until this is awaited"]
pub struct AcquireMany<'a> {
    leases: &'a Leases,
    resources: Result<Vec<Resource>, Invalid>,
    ttl: Duration,
    wait: Duration,
    label: String,
}

impl AcquireMany<'_> {
    /// Waits up to `limit`, for all of them together, as [`Acquire::wait`](super::Acquire::wait).
    pub fn wait(mut self, limit: Duration) -> Self {
        self.wait = limit;
        self
    }

    /// Tells operators what the leases are for, as [`Acquire::label`](super::Acquire::label).
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self
    }

    async fn run(self) -> Result<Vec<Lease>, LeaseError> {
        let mut resources = self.resources?;
        resources.sort_unstable();
        if resources.windows(2).any(|pair| pair[0] == pair[1]) {
            let reason = "one of them is named twice";
            return Err(Invalid::Option { what: "resources", reason }.into());
        }
        let clock = &self.leases.clock;
        let end = clock.now().plus(self.wait);
        let mut held = Vec::with_capacity(resources.len());
        for resource in resources {
            let wait = end.since(clock.now());
            let acquire = self.leases.acquire(&resource, self.ttl).wait(wait).label(&self.label);
            match acquire.await {
                Ok(lease) => held.push(lease),
                Err(error) => {
                    for lease in held {
                        // The caller is told why there are none; a lock that could not be freed
                        // ends by itself.
                        let _ = lease.release().await;
                    }
                    return Err(error);
                }
            }
        }
        Ok(held)
    }
}

impl<'a> IntoFuture for AcquireMany<'a> {
    type Output = Result<Vec<Lease>, LeaseError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}
