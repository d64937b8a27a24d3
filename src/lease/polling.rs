//! How an acquisition waits: for how long, how often it asks, and how many times.

use std::time::Duration;

use crate::error::Invalid;

/// The first pause between two attempts; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// Short enough that a freed lock is found within half a second.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// What is asked for beyond this is as good as never, and would overflow.
const LONGEST_DELAY: Duration = Duration::from_secs(1 << 32);

/// Three numbers that have nothing to do with each other, nor with a time to live.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Polling {
    pub(super) limit: Option<Duration>,
    pub(super) delay: Option<Duration>,
    pub(super) attempts: Option<u32>,
}

impl Polling {
    pub(super) fn check(&self) -> Result<(), Invalid> {
        if self.delay.is_some_and(|delay| delay < Duration::from_millis(1)) {
            return Err(Invalid::Option { what: "retry delay", reason: "it is shorter than a millisecond" });
        }
        if self.attempts == Some(0) {
            return Err(Invalid::Option { what: "attempts", reason: "none would be made" });
        }
        Ok(())
    }

    /// How long to wait. Who counts attempts and says nothing else does not look at the clock.
    pub(super) fn limit(&self) -> Duration {
        let unsaid = if self.attempts.is_some() { Duration::MAX } else { Duration::ZERO };
        self.limit.unwrap_or(unsaid)
    }

    /// Whether one attempt is all there is.
    pub(super) fn tries_once(&self) -> bool {
        self.limit().is_zero() || self.attempts == Some(1)
    }

    /// Whether so many attempts are all there are.
    pub(super) fn is_over_after(&self, attempts: u32) -> bool {
        self.attempts.is_some_and(|most| attempts >= most)
    }

    /// The pause after so many attempts, jittered so that those who wait do not come in step.
    pub(super) fn pause(&self, attempts: u32) -> Duration {
        let pause = self.delay.unwrap_or_else(|| {
            let doubled = 2_u32.saturating_pow(attempts.saturating_sub(1));
            FIRST_PAUSE.saturating_mul(doubled).min(LONGEST_PAUSE)
        });
        pause.min(LONGEST_DELAY).mul_f64(0.5 + fastrand::f64() / 2.0).max(Duration::from_millis(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_or_stay_as_they_were_asked_for() {
        let growing = Polling::default();
        for (attempts, most) in [(1, 20), (2, 40), (5, 320), (6, 500), (100, 500), (u32::MAX, 500)] {
            let most = Duration::from_millis(most);
            let pause = growing.pause(attempts);
            assert!(pause >= most / 2 && pause <= most, "{attempts}: {pause:?}");
        }
        for delay in [Duration::from_millis(1), Duration::from_secs(10), LONGEST_DELAY, Duration::MAX] {
            let pause = Polling { delay: Some(delay), ..growing }.pause(9);
            let delay = delay.min(LONGEST_DELAY);
            assert!(pause >= delay / 2 && pause <= delay.max(Duration::from_millis(1)), "{pause:?}");
        }
    }

    #[test]
    fn what_is_not_said_is_one_try() {
        let some = Some(Duration::from_secs(1));
        assert!(Polling::default().tries_once());
        assert!(
            Polling { limit: Some(Duration::ZERO), attempts: Some(9), ..Polling::default() }.tries_once()
        );
        assert!(Polling { limit: some, attempts: Some(1), ..Polling::default() }.tries_once());
        assert!(!Polling { limit: some, ..Polling::default() }.tries_once());
        let counted = Polling { attempts: Some(3), ..Polling::default() };
        assert_eq!((counted.tries_once(), counted.limit()), (false, Duration::MAX));
        assert_eq!((counted.is_over_after(2), counted.is_over_after(3)), (false, true));
    }
}
