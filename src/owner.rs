//! Whose lease it is.

use std::fmt;
use std::str::FromStr;

use uuid::Uuid;

use crate::error::Invalid;

/// A UUID made anew for each acquisition; it proves whose lease it is on renewal and release.
///
/// It is never a host or pod name: two acquisitions by one process are two owners, so that a
/// delayed call of an old term cannot touch a newer one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OwnerId(Uuid);

impl OwnerId {
    /// Makes a new owner, unlike every other.
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }

    /// The UUID itself, as it stands in a `uuid` column.
    #[must_use]
    pub const fn get(self) -> Uuid {
        self.0
    }
}

impl From<Uuid> for OwnerId {
    fn from(id: Uuid) -> Self {
        Self(id)
    }
}

impl fmt::Display for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.hyphenated().fmt(f)
    }
}

impl FromStr for OwnerId {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        Uuid::try_parse(text)
            .map(Self)
            .map_err(|_| Invalid::Text { what: "owner", text: text.chars().take(40).collect() })
    }
}
