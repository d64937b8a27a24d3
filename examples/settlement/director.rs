//! The director: loads the file, puts two workers on, freezes and wakes them, checks the result.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use fencerow::fence::Fence;
use fencerow::lease::Leases;
use indicatif::HumanCount;
use tokio::signal::unix::{SignalKind, signal};

use crate::check::Check;
use crate::cue::{Event, Part};
use crate::ledger::{CLEARING, Ledger};
use crate::payouts::{self, PayoutFile};
use crate::place::{self, Place};
use crate::settle::{Settled, settle};
use crate::stage::{Stage, Who};
use crate::timeline::Timeline;
use crate::worker::TTL;

/// The whole play has to be over by then.
const DEADLINE: Duration = Duration::from_secs(28);
/// How long somebody may still hold a lease that the director wants.
const WAIT: Duration = Duration::from_secs(5);

/// Plays in `place`, and leaves nothing behind there. Says whether everything was as it must be.
pub(crate) async fn run(place: &Place, resource: &str) -> Result<bool, Box<dyn Error>> {
    let file = read_file()?;
    place.make().await?;
    let mut stage = Stage::new(Timeline::new(file.payouts.len()));
    let play = async {
        match place {
            Place::Embedded { file: path } => {
                let (leases, fence) = place::embedded(path).await?;
                Play { place, resource, file: &file, leases, fence }.perform(&mut stage).await
            }
            Place::Servers { postgres, redis, schema } => {
                let (leases, fence) = place::servers(postgres, redis, schema).await?;
                Play { place, resource, file: &file, leases, fence }.perform(&mut stage).await
            }
        }
    };
    let outcome = tokio::select! {
        outcome = play => outcome,
        () = tokio::time::sleep(DEADLINE) => Err(format!("it was not over after {DEADLINE:?}").into()),
        signal = interrupted() => Err(signal.map_or_else(Into::into, Into::into)),
    };
    stage.timeline.end();
    stage.end().await;
    place.clear().await?;
    outcome
}

/// Reads the payout file, and reports what it leaves out.
fn read_file() -> Result<PayoutFile, Box<dyn Error>> {
    let file = payouts::read(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/payouts.csv")))?;
    println!(
        "{} payouts to {} accounts; {} malformed lines are left out:",
        HumanCount(file.payouts.len() as u64),
        payouts::accounts().count(),
        file.malformed.len(),
    );
    for (line, reason) in &file.malformed {
        println!("  line {line:>4}: {reason}");
    }
    println!();
    Ok(file)
}

/// Waits until somebody wants this to end.
async fn interrupted() -> Result<&'static str, std::io::Error> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    Ok(tokio::select! {
        _ = interrupt.recv() => "interrupted",
        _ = terminate.recv() => "terminated",
        _ = hangup.recv() => "the terminal is gone",
    })
}

/// One run, and what the director himself needs for it.
pub(crate) struct Play<'a, DB: Ledger> {
    pub(crate) place: &'a Place,
    pub(crate) resource: &'a str,
    pub(crate) leases: Leases,
    file: &'a PayoutFile,
    fence: Fence<DB>,
}

impl<DB: Ledger> Play<'_, DB> {
    async fn perform(&self, stage: &mut Stage) -> Result<bool, Box<dyn Error>> {
        self.load(stage).await?;
        for who in [Who::A, Who::B] {
            let (name, resource) = (who.to_string(), self.resource.to_owned());
            stage.enter(who, &Part { name, resource, place: self.place.clone() }).await?;
            stage.until(who, |event| *event == Event::Ready).await?;
        }
        self.freeze_before_transaction(stage).await?;
        // SQLite has one writer a file, and nobody can end it: a process that is frozen inside its
        // transaction keeps all others out until it is woken. On Postgres it must not.
        let inside = matches!(self.place, Place::Servers { .. });
        if inside {
            self.freeze_inside_transaction(stage).await?;
        }
        stage.until_the_end().await?;
        let again = self.hand_in_again(stage).await?;
        stage.timeline.end();

        let payouts = &self.file.payouts;
        let entries = DB::entries(self.fence.pool()).await?;
        let balances = DB::balances(self.fence.pool()).await?;
        println!();
        let mut check = Check::begin();
        check.settled_once(payouts, &entries);
        check.sums_to_zero(&entries);
        check.balanced(payouts, &entries, &balances);
        check.replayed(payouts, &again);
        check.refused(&stage.timeline, 1 + usize::from(inside));
        if inside {
            check.ended(&stage.timeline, 1);
        }
        Ok(check.holds())
    }

    /// Enters the payouts as pending, under a lease like everything else that is written here.
    async fn load(&self, stage: &mut Stage) -> Result<(), Box<dyn Error>> {
        self.fence.migrate().await?;
        DB::create_tables(self.fence.pool()).await?;
        let lease = self.leases.acquire(self.resource, TTL).label("director").await?;
        let mut tx = self.fence.begin(&lease).await?;
        for account in payouts::accounts().chain([CLEARING.to_owned()]) {
            DB::open_account(&mut tx, &account).await?;
        }
        for payout in &self.file.payouts {
            DB::enter(&mut tx, payout).await?;
        }
        tx.commit().await?;
        let what = format!("entered {} payouts as pending", HumanCount(self.file.payouts.len() as u64));
        stage.timeline.tell("director", Some(lease.token().get()), what);
        Ok(lease.release().await?)
    }

    /// Hands the whole file in a second time: every payout is answered from its key.
    async fn hand_in_again(&self, stage: &mut Stage) -> Result<Settled, Box<dyn Error>> {
        let lease = self.leases.acquire(self.resource, TTL).wait(WAIT).label("director").await?;
        let again = settle(&self.fence, &lease, &self.file.payouts, "director", async || ()).await?;
        let what = format!("handed the file in again: {} replayed", HumanCount(again.replayed as u64));
        stage.timeline.tell("director", Some(lease.token().get()), what);
        lease.release().await?;
        Ok(again)
    }
}
