//! The fencing token: the number that tells a newer grant from an older one.

use std::fmt;
use std::str::FromStr;

use crate::error::Invalid;

/// How many low bits of a token count within one epoch.
const SEQUENCE_BITS: u32 = 32;

/// A positive 64-bit number that grows with every grant on a resource.
///
/// A token is read as `epoch · 2^32 + sequence`. Within an epoch the lock service counts on;
/// whenever its counter may have forgotten something, the database opens the next epoch, whose
/// first token is larger than every token of every earlier one.
///
/// # Examples
///
/// ```
/// use fencerow::FencingToken;
///
/// let token = FencingToken::new(33)?;
/// assert_eq!((token.epoch(), token.sequence()), (0, 33));
/// assert!(token < token.first_of_next_epoch().unwrap());
/// assert!(FencingToken::new(0).is_err());
/// # Ok::<(), fencerow::Invalid>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(i64);

impl FencingToken {
    /// The token that a resource begins with when nobody has ever held it.
    pub const FIRST: Self = Self(1);

    /// Takes a number as a token.
    ///
    /// # Errors
    ///
    /// [`Invalid::Token`] if it is zero or negative.
    pub const fn new(value: i64) -> Result<Self, Invalid> {
        if value > 0 { Ok(Self(value)) } else { Err(Invalid::Token(value)) }
    }

    /// The number itself, as it stands in a `bigint` column.
    #[must_use]
    pub const fn get(self) -> i64 {
        self.0
    }

    /// The stretch of counting without a memory gap that this token belongs to.
    #[must_use]
    pub const fn epoch(self) -> i64 {
        self.0 >> SEQUENCE_BITS
    }

    /// The place of this token within its epoch.
    #[must_use]
    pub const fn sequence(self) -> i64 {
        self.0 & ((1 << SEQUENCE_BITS) - 1)
    }

    /// The smallest token that is larger than every token of this epoch; none after the last epoch.
    #[must_use]
    pub const fn first_of_next_epoch(self) -> Option<Self> {
        if self.epoch() == i64::MAX >> SEQUENCE_BITS {
            return None;
        }
        Some(Self((self.epoch() + 1) << SEQUENCE_BITS))
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl TryFrom<i64> for FencingToken {
    type Error = Invalid;

    fn try_from(value: i64) -> Result<Self, Invalid> {
        Self::new(value)
    }
}

impl FromStr for FencingToken {
    type Err = Invalid;

    /// Parses plain decimal digits: no sign, no blank.
    fn from_str(text: &str) -> Result<Self, Invalid> {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let value = if digits { text.parse().ok() } else { None };
        value.map_or_else(
            || Err(Invalid::Text { what: "fencing token", text: text.chars().take(40).collect() }),
            Self::new,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_positive_numbers_are_tokens() {
        for value in [0, -1, i64::MIN] {
            assert_eq!(FencingToken::new(value), Err(Invalid::Token(value)));
        }
        assert_eq!(FencingToken::new(i64::MAX).map(FencingToken::get), Ok(i64::MAX));
    }

    #[test]
    fn the_next_epoch_is_above_every_token_of_this_one() {
        let last_of_epoch_zero = FencingToken((1 << 32) - 1);
        assert_eq!(FencingToken::FIRST.first_of_next_epoch(), Some(FencingToken(1 << 32)));
        assert_eq!(last_of_epoch_zero.first_of_next_epoch(), Some(FencingToken(1 << 32)));
        assert_eq!(FencingToken(1 << 32).first_of_next_epoch(), Some(FencingToken(2 << 32)));
        assert_eq!(FencingToken(i64::MAX).first_of_next_epoch(), None);
    }

    #[test]
    fn text_that_is_not_plain_digits_is_refused() {
        assert_eq!("9007199254740993".parse(), Ok(FencingToken(9_007_199_254_740_993)));
        for text in ["", "+1", "-1", "0", " 1", "1.0", "1e3", "9223372036854775808"] {
            assert!(text.parse::<FencingToken>().is_err(), "{text:?}");
        }
    }
}
