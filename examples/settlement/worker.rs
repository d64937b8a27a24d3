//! A worker: one of two processes that compete for the lease and settle what is pending.

use std::error::Error;
use std::time::Duration;

use fencerow::Group;
use fencerow::fence::{Fence, FenceError};
use fencerow::lease::{Lease, LeaseError, Leases};

use crate::cue::{Cue, Event};
use crate::ledger::{Ledger, LedgerError};
use crate::place::{self, Place};
use crate::settle::settle;

/// How long a lease lasts unless it is renewed. Short, so that nobody has to wait for long here.
pub(crate) const TTL: Duration = Duration::from_secs(2);
/// How long a worker waits for the other's turn to end.
const WAIT: Duration = Duration::from_secs(30);
/// Payouts in one transaction.
const BATCH: usize = 100;
/// Batches in one turn; then the other worker gets its chance.
const TURN: usize = 5;
/// Who waits for a lease looks at least twice a second; so this long, it is left to the other.
const MANNERS: Duration = Duration::from_millis(600);

/// Plays the part that the director hands out.
pub(crate) async fn run() -> Result<(), Box<dyn Error>> {
    // A worker that is frozen would not notice that its director was killed, and sleep for ever.
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let (part, mut cue) = Cue::part().await?;
    match &part.place {
        Place::Embedded { file } => {
            let (leases, fence) = place::embedded(file).await?;
            work(&part.name, &part.resource, &leases, &fence, &mut cue).await
        }
        Place::Servers { postgres, redis, schema } => {
            let (leases, fence) = place::servers(postgres, redis, schema).await?;
            work(&part.name, &part.resource, &leases, &fence, &mut cue).await
        }
    }
}

/// Takes the lease for one turn after another, until nothing is pending.
async fn work<DB: Ledger>(
    name: &str,
    resource: &str,
    leases: &Leases,
    fence: &Fence<DB>,
    cue: &mut Cue,
) -> Result<(), Box<dyn Error>> {
    loop {
        cue.pause(Event::Ready).await;
        let lease = leases.acquire(resource, TTL).wait(WAIT).label(name).await?;
        cue.say(Event::Leased { token: lease.token().get() });
        match take_turn(name, &lease, fence, cue).await? {
            // Somebody else has the resource now; there is nothing to give back.
            Turn::Refused { offered, seen } => {
                drop(lease);
                cue.say(Event::Refused { offered, seen });
            }
            Turn::Over => {
                release(lease).await?;
                cue.say(Event::Released);
                tokio::time::sleep(MANNERS).await;
            }
            Turn::NothingLeft => {
                release(lease).await?;
                cue.say(Event::Finished);
                return Ok(());
            }
        }
    }
}

enum Turn {
    Over,
    NothingLeft,
    Refused { offered: i64, seen: i64 },
}

/// Settles batches under one lease.
///
/// A careful worker would also stop when `lease.lost()` says so, to save itself the trouble. This
/// one does not look: a process that was frozen had no chance to, and safety does not rest on it.
async fn take_turn<DB: Ledger>(
    name: &str,
    lease: &Lease,
    fence: &Fence<DB>,
    cue: &mut Cue,
) -> Result<Turn, Box<dyn Error>> {
    for _ in 0..TURN {
        // Read outside the transaction, so it is no more than a plan. Whether it may still be
        // carried out is for the fence to say, and whether it has been, for the keys.
        let batch = DB::pending(fence.pool(), BATCH).await?;
        if batch.is_empty() {
            return Ok(Turn::NothingLeft);
        }
        cue.pause(Event::Planned).await;
        match settle(fence, lease, &batch, name, async || cue.pause(Event::Halfway).await).await {
            Ok(settled) => cue.say(Event::Settled { payouts: settled.fresh }),
            Err(LedgerError::Fence(FenceError::Stale { offered, seen, .. })) => {
                return Ok(Turn::Refused { offered: offered.get(), seen: seen.get() });
            }
            Err(LedgerError::Fence(error)) if is_worth_another_try(&error) => {
                cue.say(Event::Ended { why: crate::in_full(&error) });
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Turn::Over)
}

/// Whether the same batch may be handed in again under the same lease. If a transaction was
/// stored although its commit seemed to fail, its payouts are not pending any more, and their
/// keys would be replayed.
fn is_worth_another_try(error: &FenceError) -> bool {
    matches!(error.group(), Group::Contended | Group::Unavailable | Group::UnknownOutcome)
}

/// Gives the lease back. Where it ran out a moment ago, there is nothing to give back, and what was
/// committed stays committed.
async fn release(lease: Lease) -> Result<(), LeaseError> {
    match lease.release().await {
        Err(LeaseError::Lost { .. }) => Ok(()),
        outcome => outcome,
    }
}
