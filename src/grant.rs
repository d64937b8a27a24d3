//! What a lock service hands out and a fence admits.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use crate::clock::{Clock, Moment};
use crate::error::Invalid;
use crate::owner::OwnerId;
use crate::resource::Resource;
use crate::token::FencingToken;

/// A hold on a resource as a plain value: the resource, the fencing token, the owner, the deadline.
///
/// It is all that a fence needs, so it may come from a [`Lease`](crate::lease::Lease), from
/// another process, or from a lock service of your own. A grant proves nothing by itself: whether
/// it still counts is for the fence to say. The deadline is advice, good for limits; it decides nothing.
///
/// # Printable form
///
/// A grant prints as one word without blanks, fit for an environment variable, a job's payload or
/// a header, and parses back. The deadline travels as the milliseconds that are left; what passes
/// between printing and parsing is not subtracted.
///
/// ```
/// use fencerow::{FencingToken, Grant, OwnerId, Resource};
/// use std::time::Duration;
///
/// let grant = Grant::new(
///     Resource::new("settlement:2026-11-30")?,
///     FencingToken::new(33)?,
///     OwnerId::random(),
///     Duration::from_secs(10),
/// );
/// let there: Grant = grant.to_string().parse()?;
/// assert_eq!((there.resource(), there.token(), there.owner()), (grant.resource(), grant.token(), grant.owner()));
/// # Ok::<(), fencerow::Invalid>(())
/// ```
#[derive(Debug, Clone)]
pub struct Grant {
    resource: Resource,
    token: FencingToken,
    owner: OwnerId,
    deadline: Moment,
    clock: Clock,
}

impl Grant {
    /// Describes a hold that lasts for `remaining` from now on.
    #[must_use]
    pub fn new(resource: Resource, token: FencingToken, owner: OwnerId, remaining: Duration) -> Self {
        let clock = Clock::boot();
        let deadline = clock.now().plus(remaining);
        Self { resource, token, owner, deadline, clock }
    }

    pub(crate) fn until(
        resource: Resource,
        token: FencingToken,
        owner: OwnerId,
        deadline: Moment,
        clock: Clock,
    ) -> Self {
        Self { resource, token, owner, deadline, clock }
    }

    /// What is held.
    #[must_use]
    pub fn resource(&self) -> &Resource {
        &self.resource
    }

    /// The fencing token of this term; renewal keeps it.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// Whose it is.
    #[must_use]
    pub fn owner(&self) -> OwnerId {
        self.owner
    }

    /// What is left until the deadline, by this machine's clock; zero when it has passed. Advice
    /// for limits and progress reports, never a licence to write.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.deadline.since(self.clock.now())
    }
}

/// Marks the form, so that a later one can be told apart.
const FORM: &str = "fencerow1";

/// What needs no quotes in a shell, a header or a URL is kept; everything else is encoded.
const UNSAFE: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'/').remove(b':');

impl fmt::Display for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let resource = utf8_percent_encode(self.resource.as_str(), UNSAFE);
        let millis = u64::try_from(self.remaining().as_millis()).unwrap_or(u64::MAX);
        write!(f, "{FORM}:{}:{}:{millis}:{resource}", self.token, self.owner)
    }
}

impl FromStr for Grant {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let malformed = || Invalid::Text { what: "grant", text: text.chars().take(40).collect() };
        let mut parts = text.splitn(5, ':');
        let mut next = || parts.next().ok_or_else(malformed);
        if next()? != FORM {
            return Err(malformed());
        }
        let token = next()?.parse()?;
        let owner = next()?.parse()?;
        let millis = Some(next()?).filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
        let millis = millis.and_then(|text| text.parse().ok()).ok_or_else(malformed)?;
        let resource = percent_decode_str(next()?).decode_utf8().map_err(|_| malformed())?;
        Ok(Self::new(Resource::new(resource)?, token, owner, Duration::from_millis(millis)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(name: &str) -> Grant {
        let resource = Resource::new(name).unwrap();
        Grant::new(resource, FencingToken::FIRST, OwnerId::random(), Duration::from_secs(60))
    }

    #[test]
    fn every_name_survives_printing() {
        for name in ["a", "a:b:c", "{a}:b", "a b\n", "naïve/λ", "100%", "$(x)`y`;'\"\\"] {
            let printed = grant(name).to_string();
            assert!(printed.is_ascii() && !printed.contains(char::is_whitespace), "{printed}");
            let back: Grant = printed.parse().unwrap();
            assert_eq!(back.resource().as_str(), name);
            assert!(
                back.remaining() > Duration::from_secs(50) && back.remaining() <= Duration::from_secs(60)
            );
        }
    }

    #[test]
    fn a_shell_passes_a_grant_on_without_quotes() {
        let name: String = (1..=127_u8).map(char::from).filter(|c| *c != '\0').collect();
        let printed = grant(&name).to_string();
        let echoed =
            std::process::Command::new("sh").args(["-c", &format!("printf %s {printed}")]).output().unwrap();
        assert_eq!(String::from_utf8(echoed.stdout).unwrap(), printed);
        assert_eq!(printed.parse::<Grant>().unwrap().resource().as_str(), name);
    }

    #[test]
    fn a_grant_without_end_parses_back() {
        let endless =
            Grant::new(Resource::new("a").unwrap(), FencingToken::FIRST, OwnerId::random(), Duration::MAX);
        assert!(endless.to_string().parse::<Grant>().is_ok());
    }

    #[test]
    fn a_mangled_grant_is_refused() {
        let good = grant("a").to_string();
        let owner = OwnerId::random();
        let bad = [
            String::new(),
            good.replace("fencerow1", "fencerow2"),
            format!("fencerow1:0:{owner}:1000:a"),
            format!("fencerow1:1:{owner}:-1:a"),
            format!("fencerow1:1:{owner}:+1000:a"),
            format!("fencerow1:1:{owner}:99999999999999999999:a"),
            format!("fencerow1:1:{owner}:1000:"),
            format!("fencerow1:1:{owner}:1000:%FF"),
            format!("fencerow1:1:{owner}:1000"),
            "fencerow1:1:me:1000:a".to_owned(),
        ];
        for text in bad {
            assert!(text.parse::<Grant>().is_err(), "{text:?}");
        }
    }
}
