//! What every lock service must do. A service is supported when it passes.

/// Makes a test of each law for each service: `[name of a module, its bench] … => { laws }`.
macro_rules! laws {
    ($([$module:ident $bench:ident])+ => $laws:tt) => {
        $(laws! { @ $module $bench $laws })+
    };
    (@ $module:ident $bench:ident { $($law:ident)+ }) => {
        mod $module {
            use crate::conformance::services::{Bench as _, $bench};

            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $law() {
                    super::$law($bench::start().await).await;
                }
            )+
        }
    };
}

mod leases;
mod locks;
mod network;
mod services;

use std::time::Duration;

use fencerow::lease::{Attempt, LockService, Origin, Request, Standing};
use fencerow::{FencingToken, OwnerId, Resource};

use crate::support::eventually;
use services::Bench;

/// Long enough not to run out in a test that does not mean it to.
const LONG: Duration = Duration::from_secs(600);
/// Short enough to be waited for.
const SHORT: Duration = Duration::from_millis(40);

fn request(name: &str, ttl: Duration) -> Request {
    let resource = Resource::new(name).unwrap();
    Request::new(resource, OwnerId::random(), ttl.try_into().unwrap(), Origin::here(name))
}

/// Acquires, and numbers the grant from the counter alone if it must be.
async fn take(locks: &impl LockService, request: &Request) -> Option<FencingToken> {
    match locks.acquire(request).await.unwrap() {
        Attempt::Granted(token) => Some(token),
        Attempt::Held { .. } => None,
        Attempt::Unnumbered { counter } => {
            let token = match counter {
                None => FencingToken::FIRST,
                Some(counter) => counter.first_of_next_epoch().unwrap(),
            };
            let seeded = locks.seed(&request.resource, request.owner, token).await.unwrap();
            (seeded == Standing::Ours).then_some(token)
        }
    }
}

/// Has the counter of a resource begin, so that what is tested does not run out while it is seeded.
async fn number(locks: &impl LockService, name: &str) {
    let first = request(name, LONG);
    assert_eq!(take(locks, &first).await, Some(FencingToken::FIRST));
    assert_eq!(locks.release(&first.resource, first.owner).await.unwrap(), Standing::Ours);
}

async fn remaining(locks: &impl LockService, resource: &Resource) -> Duration {
    locks.holder(resource).await.unwrap().unwrap().remaining.unwrap()
}

/// Lets a task get on, whatever clock it waits for, until it has ended.
async fn finish<T>(bench: &impl Bench, task: tokio::task::JoinHandle<T>) -> T {
    let ended = eventually("the task ends", async || {
        bench.pass(Duration::from_millis(5)).await;
        task.is_finished().then_some(())
    });
    ended.await;
    task.await.unwrap()
}
