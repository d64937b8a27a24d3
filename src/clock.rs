//! The clock that leases are judged by.
//!
//! It counts the time a machine spends suspended, and nothing can set it: a lease that ran out
//! while the laptop lid was closed, or before somebody moved the wall clock, has run out. It may
//! only make a holder stop sooner; whether a write is accepted is never decided here.

use std::fmt;
use std::time::Duration;

use tokio::sync::watch;

/// The longest single sleep. Timers of the runtime stand still while the machine is suspended, so
/// the clock is looked at again this often.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A point in time on a [`Clock`]; comparable only with points of the same clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(Duration);

impl Moment {
    /// This moment, later by `duration`; the last moment there is if that is too far away.
    #[must_use]
    pub fn plus(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }

    /// The time from `earlier` to this moment, or zero.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// The time since the clock's own beginning; for the operating system's clock, the boot.
    #[must_use]
    pub fn since_start(self) -> Duration {
        self.0
    }
}

/// Where a lock service and its leases take the time from.
#[derive(Clone, Default)]
pub struct Clock(Source);

#[derive(Clone, Default)]
enum Source {
    #[default]
    Boot,
    Manual(watch::Receiver<Moment>),
}

impl Clock {
    /// The operating system's clock that counts suspended time too (`CLOCK_BOOTTIME` on Linux).
    #[must_use]
    pub fn boot() -> Self {
        Self(Source::Boot)
    }

    /// The time now.
    #[must_use]
    pub fn now(&self) -> Moment {
        match &self.0 {
            Source::Boot => boot_time(),
            Source::Manual(now) => *now.borrow(),
        }
    }

    /// Waits until the clock reads at least `moment`.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect.
    pub async fn sleep_until(&self, moment: Moment) {
        match &self.0 {
            Source::Boot => loop {
                let left = moment.since(boot_time());
                if left.is_zero() {
                    return;
                }
                tokio::time::sleep(left.min(LOOK_AGAIN)).await;
            },
            Source::Manual(now) => {
                if now.clone().wait_for(|now| *now >= moment).await.is_err() {
                    // The hand that moved this clock is gone: it stands still for ever.
                    std::future::pending::<()>().await;
                }
            }
        }
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = match self.0 {
            Source::Boot => "boot",
            Source::Manual(_) => "manual",
        };
        f.debug_tuple("Clock").field(&source).finish()
    }
}

#[cfg(any(target_os = "linux", target_os = "android", target_os = "fuchsia"))]
const BOOT: rustix::time::ClockId = rustix::time::ClockId::Boottime;
/// Apple's and OpenBSD's monotonic clocks go on during suspend; elsewhere there is none that does.
#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "fuchsia")))]
const BOOT: rustix::time::ClockId = rustix::time::ClockId::Monotonic;

fn boot_time() -> Moment {
    let now = rustix::time::clock_gettime(BOOT);
    let seconds = u64::try_from(now.tv_sec).unwrap_or_default();
    let nanos = u32::try_from(now.tv_nsec).unwrap_or_default();
    Moment(Duration::new(seconds, nanos))
}

/// A clock for tests, which moves only when it is told to.
///
/// # Examples
///
/// ```
/// use fencerow::clock::ManualClock;
/// use std::time::Duration;
///
/// let hand = ManualClock::new();
/// let clock = hand.clock();
/// let before = clock.now();
/// hand.advance(Duration::from_secs(30));
/// assert_eq!(clock.now().since(before), Duration::from_secs(30));
/// ```
#[derive(Debug)]
pub struct ManualClock(watch::Sender<Moment>);

impl ManualClock {
    /// Makes a clock that stands still.
    #[must_use]
    pub fn new() -> Self {
        // An hour after its beginning, so that a test can look back as well.
        Self(watch::Sender::new(Moment(Duration::from_secs(3600))))
    }

    /// The clock that this hand moves.
    #[must_use]
    pub fn clock(&self) -> Clock {
        Clock(Source::Manual(self.0.subscribe()))
    }

    /// Moves the clock forward and wakes whoever waits for the time now reached.
    pub fn advance(&self, duration: Duration) {
        self.0.send_modify(|now| *now = now.plus(duration));
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        Self::new()
    }
}
