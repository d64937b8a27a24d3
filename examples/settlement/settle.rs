//! The heart of it: one batch, in one fenced transaction, each payout under its idempotency key.

use fencerow::Credential;
use fencerow::fence::{Claim, Fence, FenceError, Key};

use crate::ledger::{Ledger, LedgerError, Receipt};
use crate::payouts::Payout;

/// What became of a batch that was committed.
#[derive(Debug, Default)]
pub(crate) struct Settled {
    pub(crate) fresh: usize,
    /// Payouts that had been settled before; nothing was done for them.
    pub(crate) replayed: usize,
}

/// Settles a batch, or nothing of it.
///
/// The database admits the transaction under the newest lease only. The writes and the keys that
/// name them commit together, so after any failure the batch may simply be handed in again.
///
/// `halfway` is awaited in the middle, inside the open transaction.
pub(crate) async fn settle<DB: Ledger>(
    fence: &Fence<DB>,
    lease: &impl Credential,
    batch: &[Payout],
    worker: &str,
    mut halfway: impl AsyncFnMut(),
) -> Result<Settled, LedgerError> {
    let mut tx = fence.begin(lease).await?;
    // A key's scope is this run's resource: the same ids in another run are other payouts.
    let scope = tx.grant().resource().as_str().to_owned();
    let mut settled = Settled::default();
    for (number, payout) in batch.iter().enumerate() {
        if number == batch.len() / 2 {
            halfway().await;
        }
        let key = Key::scoped(&scope, &payout.id).map_err(FenceError::from)?;
        match tx.claim(key, payout).await? {
            Claim::Replayed(Receipt { .. }) => settled.replayed += 1,
            Claim::Fresh(claim) => {
                let receipt = DB::pay(&mut tx, payout, worker).await?;
                claim.record(&mut tx, receipt).await?;
                settled.fresh += 1;
            }
        }
    }
    tx.commit().await?;
    Ok(settled)
}
