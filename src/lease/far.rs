//! A lock service on a bad network, for unit tests.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use futures_util::future::BoxFuture;
use tokio::sync::Semaphore;

use super::error::LeaseError;
use super::service::{Attempt, Holder, LockService, Request, Standing};
use super::ttl::Ttl;
use super::{Leases, MemoryLocks};
use crate::clock::ManualClock;
use crate::owner::OwnerId;
use crate::resource::Resource;
use crate::token::FencingToken;

/// Memory far away: requests arrive when there is a permit for them, and the first answers to
/// acquisitions are lost.
#[derive(Clone)]
pub(super) struct Far {
    pub(super) locks: MemoryLocks,
    pub(super) hand: Arc<ManualClock>,
    pub(super) lose: Arc<AtomicU32>,
    pub(super) acquire: Arc<Semaphore>,
    pub(super) renew: Arc<Semaphore>,
    pub(super) release: Arc<Semaphore>,
    /// If set, the renewals of all other resources hang for good.
    pub(super) only: Arc<Mutex<Option<Resource>>>,
}

impl Far {
    /// Loses so many answers; nothing arrives yet.
    pub(super) fn losing(answers: u32) -> Self {
        let hand = ManualClock::new();
        Self {
            locks: MemoryLocks::with_clock(hand.clock()),
            hand: Arc::new(hand),
            lose: Arc::new(answers.into()),
            acquire: Arc::new(Semaphore::new(0)),
            renew: Arc::new(Semaphore::new(0)),
            release: Arc::new(Semaphore::new(0)),
            only: Arc::default(),
        }
    }

    pub(super) fn leases(&self) -> Leases {
        Leases::without_fence(self.clone()).with_clock(self.hand.clock())
    }
}

impl LockService for Far {
    fn acquire<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Attempt, LeaseError>> {
        Box::pin(async move {
            arrive(&self.acquire).await;
            let answer = self.locks.acquire(request).await;
            let lose = |left: u32| left.checked_sub(1);
            match self.lose.fetch_update(Ordering::SeqCst, Ordering::SeqCst, lose) {
                Ok(_) => Err(LeaseError::Unavailable("lost".into())),
                Err(_) => answer,
            }
        })
    }

    fn seed<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        token: FencingToken,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        self.locks.seed(resource, owner, token)
    }

    fn renew<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        ttl: Ttl,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(async move {
            arrive(&self.renew).await;
            if self.only.lock().unwrap().as_ref().is_some_and(|only| only != resource) {
                std::future::pending::<()>().await;
            }
            self.locks.renew(resource, owner, ttl).await
        })
    }

    fn release<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(async move {
            arrive(&self.release).await;
            self.locks.release(resource, owner).await
        })
    }

    fn disown<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        self.locks.disown(resource, owner)
    }

    fn holder<'a>(&'a self, resource: &'a Resource) -> BoxFuture<'a, Result<Option<Holder>, LeaseError>> {
        self.locks.holder(resource)
    }
}

async fn arrive(permits: &Semaphore) {
    permits.acquire().await.unwrap().forget();
}
