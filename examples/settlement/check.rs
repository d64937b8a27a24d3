//! What a person wants to know in the end, and whether it is so.

use std::collections::HashMap;

use indicatif::HumanCount;

use crate::ledger::{CLEARING, Entry};
use crate::payouts::Payout;
use crate::settle::Settled;
use crate::timeline::Timeline;

/// A list of findings; one that is wrong spoils them all.
#[derive(Debug)]
pub(crate) struct Check {
    holds: bool,
}

impl Check {
    pub(crate) fn begin() -> Self {
        Self { holds: true }
    }

    pub(crate) fn holds(&self) -> bool {
        self.holds
    }

    fn find(&mut self, holds: bool, what: &str, found: String) {
        self.holds &= holds;
        println!("  {}  {what:<34}  {found}", if holds { "ok    " } else { "FAILED" });
    }

    /// Every payout has exactly one pair of entries, and there are no others.
    pub(crate) fn settled_once(&mut self, payouts: &[Payout], entries: &[Entry]) {
        let mut by_payout: HashMap<&str, Vec<(&str, i64)>> = HashMap::new();
        for entry in entries {
            by_payout.entry(&entry.payout).or_default().push((&entry.account, entry.amount));
        }
        let once = payouts.iter().filter(|payout| {
            let mut pair = by_payout.remove(payout.id.as_str()).unwrap_or_default();
            pair.sort_unstable();
            let mut expected = [(payout.account.as_str(), payout.amount), (CLEARING, -payout.amount)];
            expected.sort_unstable();
            pair == expected
        });
        let once = once.count();
        let found = format!("{} of {}", count(once), count(payouts.len()));
        self.find(once == payouts.len() && by_payout.is_empty(), "payouts settled exactly once", found);
    }

    pub(crate) fn sums_to_zero(&mut self, entries: &[Entry]) {
        let sum: i64 = entries.iter().map(|entry| entry.amount).sum();
        let found = format!("{} entries, sum {sum}", count(entries.len()));
        self.find(sum == 0 && !entries.is_empty(), "the ledger sums to zero", found);
    }

    /// Balances agree with the entries, and both with the file.
    pub(crate) fn balanced(&mut self, payouts: &[Payout], entries: &[Entry], balances: &[(String, i64)]) {
        let mut by_entries: HashMap<&str, i64> = HashMap::new();
        for entry in entries {
            *by_entries.entry(&entry.account).or_default() += entry.amount;
        }
        let mut by_file: HashMap<&str, i64> = HashMap::new();
        for payout in payouts {
            *by_file.entry(&payout.account).or_default() += payout.amount;
            *by_file.entry(CLEARING).or_default() -= payout.amount;
        }
        let of = |sums: &HashMap<&str, i64>, account: &str| sums.get(account).copied().unwrap_or(0);
        let right = balances.iter().filter(|(account, balance)| {
            *balance == of(&by_entries, account) && *balance == of(&by_file, account)
        });
        let right = right.count();
        let holds = right == balances.len() && by_file.len() <= balances.len();
        let found = format!("{right} of {} accounts", balances.len());
        self.find(holds, "balances equal entries and file", found);
    }

    /// The whole file was handed in a second time.
    pub(crate) fn replayed(&mut self, payouts: &[Payout], again: &Settled) {
        let found = format!("{} replayed, {} settled", count(again.replayed), count(again.fresh));
        self.find(again.fresh == 0 && again.replayed == payouts.len(), "the file handed in again", found);
    }

    /// At least `expected` stale writes were refused, each because of a newer token.
    pub(crate) fn refused(&mut self, timeline: &Timeline, expected: usize) {
        let refusals = &timeline.refusals;
        let tokens: Vec<String> = refusals
            .iter()
            .map(|refusal| format!("offered {}, seen {}", refusal.offered, refusal.seen))
            .collect();
        let holds = refusals.len() >= expected && refusals.iter().all(|one| one.offered < one.seen);
        self.find(holds, "stale writes refused", format!("{} ({})", refusals.len(), tokens.join("; ")));
    }

    /// At least `expected` transactions of sleepers were ended by the database.
    pub(crate) fn ended(&mut self, timeline: &Timeline, expected: usize) {
        let holds = timeline.ended >= expected;
        self.find(holds, "sleeping transactions ended", timeline.ended.to_string());
    }
}

fn count(number: usize) -> String {
    HumanCount(number as u64).to_string()
}
