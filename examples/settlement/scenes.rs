//! What happens to the workers: each scene freezes one until the other has taken over.
//!
//! Nothing here is timed. A worker says where it is and waits for a word, and only how long a lease
//! lasts decides how long a scene takes.

use std::error::Error;
use std::time::Duration;

use crate::cue::Event;
use crate::director::Play;
use crate::ledger::Ledger;
use crate::place::Place;
use crate::stage::{Stage, Who};
use crate::worker::TTL;

/// Much longer than a file of SQLite's is locked by somebody who is awake.
const PROBE: Duration = Duration::from_millis(500);
/// Long enough to end what one was about to do.
const MOMENT: Duration = Duration::from_millis(50);

impl<DB: Ledger> Play<'_, DB> {
    /// A is frozen with a batch read and its transaction not begun. B takes over and settles that
    /// batch; A wakes up, and goes on with it.
    pub(crate) async fn freeze_before_transaction(&self, stage: &mut Stage) -> Result<(), Box<dyn Error>> {
        stage.go(Who::A).await?;
        stage.until(Who::A, is_leased).await?;
        // From here on B waits for the lease.
        stage.go(Who::B).await?;
        stage.until(Who::A, nth(4, |event| *event == Event::Planned)).await?;
        self.freeze(Who::A, stage).await?;
        stage.timeline.tell_of(Who::A, "frozen (SIGSTOP): has read its next batch, not begun to settle it");

        stage.until(Who::B, is_leased).await?;
        // Two batches are settled; before the third, in the middle of its turn, B waits.
        stage.until(Who::B, nth(3, |event| *event == Event::Planned)).await?;
        stage.wake(Who::A)?;
        stage.timeline.tell_of(Who::A, "woken (SIGCONT): goes on with its batch, which B has settled");
        stage.go(Who::A).await?;
        stage.until(Who::A, is_refused).await?;
        stage.go(Who::B).await
    }

    /// B is frozen inside its transaction, with half of the batch written. A takes over, for which
    /// the database has to end that transaction; B wakes up, and goes on with it.
    pub(crate) async fn freeze_inside_transaction(&self, stage: &mut Stage) -> Result<(), Box<dyn Error>> {
        stage.until(Who::B, |event| *event == Event::Halfway).await?;
        self.freeze(Who::B, stage).await?;
        stage.timeline.tell_of(Who::B, "frozen (SIGSTOP): inside its transaction, half a batch written");

        stage.until(Who::A, is_leased).await?;
        // One batch is settled, the same that B had begun; before the second, A waits.
        stage.until(Who::A, nth(2, |event| *event == Event::Planned)).await?;
        stage.timeline.tell_of(Who::A, "settled that batch, once the database had ended B's transaction");
        stage.wake(Who::B)?;
        stage.timeline.tell_of(Who::B, "woken (SIGCONT): goes on writing in its transaction");
        stage.go(Who::B).await?;
        stage.until(Who::B, is_refused).await?;
        stage.go(Who::A).await
    }

    /// Freezes a worker that waits for a word.
    ///
    /// It keeps its lease alive meanwhile, and may be stopped in the middle of that. With SQLite it
    /// could then sleep on the lock of a file, which nobody can take from it, and no other worker
    /// could take over. So it is tried whether somebody else can write; if not, the worker may
    /// run for another moment.
    async fn freeze(&self, who: Who, stage: &mut Stage) -> Result<(), Box<dyn Error>> {
        loop {
            stage.freeze(who)?;
            if matches!(self.place, Place::Servers { .. }) || self.can_write().await {
                return Ok(());
            }
            stage.wake(who)?;
            tokio::time::sleep(MOMENT).await;
        }
    }

    /// Whether a lease can be had, of a resource that nobody else wants.
    async fn can_write(&self) -> bool {
        let probe = format!("{}:probe", self.resource);
        tokio::time::timeout(PROBE, self.leases.try_acquire(probe, TTL)).await.is_ok_and(|it| it.is_ok())
    }
}

fn is_leased(event: &Event) -> bool {
    matches!(event, Event::Leased { .. })
}

fn is_refused(event: &Event) -> bool {
    matches!(event, Event::Refused { .. })
}

/// The `n`th time that something happens, from now on.
fn nth(n: usize, mut what: impl FnMut(&Event) -> bool) -> impl FnMut(&Event) -> bool {
    let mut times = 0;
    move |event| {
        times += usize::from(what(event));
        times == n
    }
}
