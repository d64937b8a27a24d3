//! How a term is kept: for how long at a time, for how long in all, and what comes after it.

use std::time::Duration;

use super::error::Lost;
use super::ttl::Ttl;
use crate::clock::Moment;
use crate::error::Invalid;

/// What a caller wants of a lease. The service knows only the times to live that come of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tenure {
    ttl: Ttl,
    /// What the service adds to each time to live: a lock that ran out stays closed for so long, one
    /// that was released does not.
    grace: Duration,
    /// Counted from the grant; no renewal reaches beyond it.
    longest: Option<Duration>,
    renewed: bool,
}

/// Until when a holder may believe in its lease, and what it is told then.
#[derive(Debug, Clone, Copy)]
pub(super) struct Due {
    pub(super) deadline: Moment,
    pub(super) reason: Lost,
}

impl Tenure {
    pub(super) fn new(
        ttl: Duration,
        grace: Duration,
        longest: Option<Duration>,
        renewed: bool,
    ) -> Result<Self, Invalid> {
        let ttl = Ttl::try_from(ttl)?;
        if Ttl::try_from(ttl.get().saturating_add(grace)).is_err() {
            let reason = "with the time to live it is longer than a server can count";
            return Err(Invalid::Option { what: "grace period", reason });
        }
        if longest.is_some_and(|longest| longest < Duration::from_millis(1)) {
            return Err(Invalid::Option { what: "longest hold", reason: "it is shorter than a millisecond" });
        }
        Ok(Self { ttl, grace, longest, renewed })
    }

    /// When a term granted to a request of `sent` ends for good, if ever.
    pub(super) fn end(&self, sent: Moment) -> Option<Moment> {
        self.longest.map(|longest| sent.plus(longest))
    }

    /// The time to live that a service is asked for at `now`, in a term that ends at `end`.
    pub(super) fn asked(&self, now: Moment, end: Option<Moment>) -> Ttl {
        let asked = self.hold(now, end).get().saturating_add(self.grace);
        Ttl::try_from(asked).unwrap_or(Ttl::MAX)
    }

    /// What is due where a request of `sent` was confirmed: counted from before it was sent, less
    /// what clocks may differ by.
    pub(super) fn due(&self, sent: Moment, end: Option<Moment>) -> Due {
        let hold = self.hold(sent, end);
        let reason = if hold < self.ttl { Lost::HeldTooLong } else { Lost::Expired };
        Due { deadline: sent.plus(hold.get().saturating_sub(hold.drift())), reason }
    }

    /// How long after a request the next one is due; none is after one that reaches to the end.
    pub(super) fn interval(&self) -> Duration {
        self.ttl.get() / 3
    }

    /// Whether the keep-alive renews at all.
    pub(super) fn is_renewed(&self) -> bool {
        self.renewed
    }

    fn hold(&self, now: Moment, end: Option<Moment>) -> Ttl {
        let left = end.map_or(Duration::MAX, |end| end.since(now)).max(Duration::from_millis(1));
        Ttl::try_from(left).map_or(self.ttl, |left| left.min(self.ttl))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;

    const TTL: Duration = Duration::from_secs(10);

    #[test]
    fn nonsense_is_refused() {
        let none = Duration::ZERO;
        assert!(Tenure::new(none, none, None, true).is_err());
        assert!(Tenure::new(TTL, Duration::MAX, None, true).is_err());
        assert!(Tenure::new(TTL, Ttl::MAX.get(), None, true).is_err());
        assert!(Tenure::new(TTL, none, Some(none), true).is_err());
        assert!(Tenure::new(TTL, none, Some(Duration::from_micros(999)), true).is_err());
        assert!(Tenure::new(TTL, none, Some(Duration::MAX), true).is_ok());
    }

    #[test]
    fn no_renewal_reaches_beyond_the_longest_hold_and_grace_comes_on_top() {
        let (hand, grace) = (ManualClock::new(), Duration::from_secs(3));
        let began = hand.clock().now();
        let tenure = Tenure::new(TTL, grace, Some(TTL * 2), true).unwrap();
        let end = tenure.end(began);
        assert_eq!(tenure.asked(began, end).get(), TTL + grace);
        let due = tenure.due(began, end);
        assert_eq!((due.reason, due.deadline < began.plus(TTL)), (Lost::Expired, true));

        let late = began.plus(TTL + TTL / 2);
        assert_eq!(tenure.asked(late, end).get(), TTL / 2 + grace);
        let due = tenure.due(late, end);
        assert_eq!((due.reason, due.deadline < began.plus(TTL * 2)), (Lost::HeldTooLong, true));
        assert_eq!(tenure.asked(began.plus(TTL * 3), end).get(), Duration::from_millis(1) + grace);
    }
}
