//! Leases over a network that is cut, refuses and hangs.

use std::time::Duration;

use fencerow::Group;
use fencerow::lease::{LeaseError, Lost};

use super::services::Networked;
use super::{LONG, number, remaining};
use crate::support::{PATIENCE, eventually};

laws! { [redis Redis] [postgres Postgres] => {
    a_server_that_refuses_is_unavailable_and_not_held
    a_server_that_hangs_is_unavailable_and_not_held
    a_hanging_server_hides_no_loss_and_late_renewals_touch_no_successor
    a_cut_connection_does_not_end_a_lease
    an_acquisition_dropped_while_the_server_hangs_leaves_nothing_behind
    a_release_dropped_while_the_server_hangs_goes_on
} }

/// How long a request may take here: the time to live that is asked for bounds it.
const IMPATIENT: Duration = Duration::from_millis(200);

async fn a_server_that_refuses_is_unavailable_and_not_held(bench: impl Networked) {
    let (far, mut proxy) = bench.far().await;
    let leases = far.leases();
    leases.acquire("a", LONG).await.unwrap().release().await.unwrap();
    proxy.refuse().await;
    let error = leases.try_acquire("a", IMPATIENT).await.unwrap_err();
    assert!(matches!(error, LeaseError::Unavailable(_)), "{error:?}");
    assert_eq!(error.group(), Group::Unavailable);
    assert!(!error.is_contended());

    // Whoever waits, waits for the server as well.
    let waiting = {
        let leases = leases.clone();
        tokio::spawn(async move { leases.acquire("a", LONG).wait(PATIENCE).await })
    };
    far.pass(Duration::from_millis(100)).await;
    assert!(!waiting.is_finished());
    proxy.accept().await;
    waiting.await.unwrap().unwrap().release().await.unwrap();
}

async fn a_server_that_hangs_is_unavailable_and_not_held(bench: impl Networked) {
    let (far, proxy) = bench.far().await;
    let leases = far.leases();
    leases.acquire("a", LONG).await.unwrap().release().await.unwrap();
    proxy.hang();
    let error = leases.try_acquire("a", IMPATIENT).await.unwrap_err();
    assert!(matches!(error, LeaseError::Unavailable(_)), "{error:?}");
    proxy.pass();
    let waiting = leases.acquire("a", LONG).wait(PATIENCE);
    waiting.await.unwrap().release().await.unwrap();
}

async fn a_hanging_server_hides_no_loss_and_late_renewals_touch_no_successor(bench: impl Networked) {
    let (far, proxy) = bench.far().await;
    number(&bench.locks(), "a").await;
    let cut_off = far.leases().acquire("a", IMPATIENT).wait(PATIENCE).await.unwrap();
    proxy.hang();
    let lost = tokio::time::timeout(PATIENCE, cut_off.lost()).await.expect("it is announced");
    // Taken, if it had run out on a slow machine before the server hung.
    assert!(matches!(lost, Lost::Expired | Lost::Taken), "{lost:?}");
    assert_eq!(cut_off.remaining(), Duration::ZERO);

    let successor = bench.leases().acquire("a", LONG).without_keep_alive().wait(PATIENCE).await.unwrap();
    assert!(successor.token() > cut_off.token());
    let before = remaining(&bench.locks(), successor.resource()).await;
    // Now all that was held up arrives, and the release after it.
    proxy.pass();
    let error = cut_off.release().await.unwrap_err();
    assert!(matches!(error, LeaseError::Lost { .. } | LeaseError::Unavailable(_)), "{error:?}");
    assert!(remaining(&bench.locks(), successor.resource()).await <= before);
    successor.release().await.unwrap();
}

async fn a_cut_connection_does_not_end_a_lease(bench: impl Networked) {
    let (far, proxy) = bench.far().await;
    let lease = far.leases().acquire("a", Duration::from_secs(3)).await.unwrap();
    proxy.cut();
    let mut last = Duration::MAX;
    eventually("it is renewed", async || {
        let now = remaining(&bench.locks(), lease.resource()).await;
        let renewed = now > last;
        last = now;
        renewed.then_some(())
    })
    .await;
    assert!(!lease.cancellation().is_cancelled());
    lease.release().await.unwrap();
}

async fn an_acquisition_dropped_while_the_server_hangs_leaves_nothing_behind(bench: impl Networked) {
    let (far, proxy) = bench.far().await;
    let leases = far.leases();
    leases.acquire("a", LONG).await.unwrap().release().await.unwrap();
    proxy.hang();
    let dropped = tokio::time::timeout(IMPATIENT / 2, leases.acquire("a", LONG)).await;
    assert!(dropped.is_err());
    proxy.pass();
    let next = bench.leases().acquire("a", LONG).wait(PATIENCE).await.unwrap();
    next.release().await.unwrap();
}

/// A02
async fn a_release_dropped_while_the_server_hangs_goes_on(bench: impl Networked) {
    let (far, proxy) = bench.far().await;
    let lease = far.leases().acquire("a", LONG).await.unwrap();
    proxy.hang();
    assert!(tokio::time::timeout(IMPATIENT / 2, lease.release()).await.is_err());
    proxy.pass();
    let next = bench.leases().acquire("a", LONG).wait(PATIENCE).await.unwrap();
    next.release().await.unwrap();
}
