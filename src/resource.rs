//! The name of what is protected.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::error::Invalid;

/// The thing protected, by name: `settlement:2026-11-30`, `tenant/42/ledger`.
///
/// A name is 1 to 512 bytes of UTF-8, not blank, without NUL. It is checked here, once, before
/// anything is sent anywhere; every lock service and every fence takes every such name, and
/// different names never share a lock or a fence. Names are compared byte by byte: case, blanks
/// and Unicode composition count.
///
/// # Examples
///
/// ```
/// use fencerow::Resource;
///
/// let ledger = Resource::new("tenant/42/ledger")?;
/// assert_eq!(ledger.as_str(), "tenant/42/ledger");
/// assert!(Resource::new("  ").is_err());
/// # Ok::<(), fencerow::Invalid>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Resource(Arc<str>);

impl Resource {
    /// The longest name, in bytes. It fits an index entry of every database, also when each byte
    /// is percent-encoded.
    pub const MAX_BYTES: usize = 512;

    /// Takes a text as a name.
    ///
    /// # Errors
    ///
    /// [`Invalid::Resource`] if it is empty, blank, longer than [`Resource::MAX_BYTES`], or holds a NUL.
    pub fn new(name: impl AsRef<str>) -> Result<Self, Invalid> {
        let name = name.as_ref();
        let reason = if name.trim().is_empty() {
            "it is empty or blank"
        } else if name.len() > Self::MAX_BYTES {
            "it is longer than 512 bytes"
        } else if name.contains('\0') {
            "it contains a NUL"
        } else {
            return Ok(Self(name.into()));
        };
        Err(Invalid::Resource { reason, bytes: name.len() })
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The name in quotes, as errors show it: blanks and control characters are seen.
impl fmt::Debug for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl AsRef<str> for Resource {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl FromStr for Resource {
    type Err = Invalid;

    fn from_str(name: &str) -> Result<Self, Invalid> {
        Self::new(name)
    }
}

impl TryFrom<&str> for Resource {
    type Error = Invalid;

    fn try_from(name: &str) -> Result<Self, Invalid> {
        Self::new(name)
    }
}

impl TryFrom<String> for Resource {
    type Error = Invalid;

    fn try_from(name: String) -> Result<Self, Invalid> {
        Self::new(name)
    }
}

impl TryFrom<&String> for Resource {
    type Error = Invalid;

    fn try_from(name: &String) -> Result<Self, Invalid> {
        Self::new(name)
    }
}

impl TryFrom<&Resource> for Resource {
    type Error = Invalid;

    fn try_from(name: &Resource) -> Result<Self, Invalid> {
        Ok(name.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_refused_before_it_reaches_a_server() {
        let long = "x".repeat(513);
        for name in ["", " ", "\t\n", "a\0b", "\u{2003}", long.as_str()] {
            assert!(matches!(Resource::new(name), Err(Invalid::Resource { .. })), "{name:?}");
        }
    }

    #[test]
    fn odd_names_are_names() {
        let longest = "x".repeat(512);
        for name in ["{a}:b", "a{b}c", "{}", "}{", "{{x}}", "a b", "naïve/λ", longest.as_str()] {
            assert_eq!(Resource::new(name).map(|r| r.to_string()), Ok(name.to_owned()));
        }
    }

    #[test]
    fn errors_show_a_name_in_quotes() {
        let resource = Resource::new("a \"b\"\n").unwrap();
        assert_eq!(format!("{resource:?}"), r#""a \"b\"\n""#);
    }
}
