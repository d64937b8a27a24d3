//! How long a lease lasts.

use std::time::Duration;

use crate::error::Invalid;

/// A lease's time to live: whole milliseconds, at least one.
///
/// A fraction of a millisecond beyond the first is cut off, so that no clock is asked for more
/// than it can count. Zero never reaches a server, where it would delete a lock or make one without end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ttl(u64);

impl Ttl {
    /// The longest: every server's arithmetic is still exact there.
    pub const MAX: Self = Self((1 << 53) - 1);

    /// The time to live in milliseconds.
    #[must_use]
    pub const fn millis(self) -> u64 {
        self.0
    }

    /// The time to live in milliseconds, as a database's signed integer.
    #[must_use]
    #[expect(clippy::cast_possible_wrap, reason = "at most 2^53 - 1")]
    pub const fn signed_millis(self) -> i64 {
        self.0 as i64
    }

    /// The time to live.
    #[must_use]
    pub const fn get(self) -> Duration {
        Duration::from_millis(self.0)
    }

    /// What a holder takes off its own deadline: a hundredth for clocks that run apart, and 2 ms
    /// for the resolution of the server's.
    #[must_use]
    pub(crate) const fn drift(self) -> Duration {
        Duration::from_millis(self.0 / 100 + 2)
    }
}

impl TryFrom<Duration> for Ttl {
    type Error = Invalid;

    fn try_from(ttl: Duration) -> Result<Self, Invalid> {
        match u64::try_from(ttl.as_millis()) {
            Ok(millis) if (1..=Self::MAX.0).contains(&millis) => Ok(Self(millis)),
            _ => Err(Invalid::Ttl(ttl)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_that_a_server_would_misread_is_refused() {
        for ttl in [Duration::ZERO, Duration::from_nanos(1), Duration::from_micros(999), Duration::MAX] {
            assert_eq!(Ttl::try_from(ttl), Err(Invalid::Ttl(ttl)));
        }
        assert_eq!(Ttl::try_from(Duration::from_millis(1)), Ok(Ttl(1)));
        assert_eq!(Ttl::try_from(Duration::from_micros(1500)), Ok(Ttl(1)));
        assert_eq!(Ttl::try_from(Ttl::MAX.get()), Ok(Ttl::MAX));
        assert!(Ttl::try_from(Ttl::MAX.get() + Duration::from_millis(1)).is_err());
    }
}
