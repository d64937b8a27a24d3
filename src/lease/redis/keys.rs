//! Where a resource's lock and counter are kept.

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use crate::error::Invalid;
use crate::resource::Resource;

/// Braces would move the hash tag; blanks and controls are hard on whoever reads keys. Since the
/// percent sign is encoded too, different names stay different; so does all that is not ASCII.
const UNSAFE: &AsciiSet = &CONTROLS.add(b' ').add(b'%').add(b'{').add(b'}');

/// The keys of one resource: `<prefix>{<name>}:lock` and its companions. The name, percent-encoded
/// and never empty, is their hash tag, so that a cluster keeps them together.
pub(super) struct Keys {
    /// Who holds it; see `acquire.lua`.
    pub(super) lock: String,
    /// The last token that was counted.
    pub(super) token: String,
    /// In which run of the server the counter was last seeded.
    pub(super) run: String,
}

impl Keys {
    pub(super) fn new(prefix: &str, resource: &Resource) -> Self {
        let tag = format!("{prefix}{{{}}}", utf8_percent_encode(resource.as_str(), UNSAFE));
        Self { lock: format!("{tag}:lock"), token: format!("{tag}:token"), run: format!("{tag}:run") }
    }
}

/// Takes what may stand before every key.
pub(super) fn check_prefix(prefix: &str) -> Result<(), Invalid> {
    let reason = if prefix.is_empty() {
        "it is empty"
    } else if prefix.contains(['{', '}']) {
        "it contains a brace, which would change the hash tag"
    } else if prefix.contains(|c: char| c.is_whitespace() || c.is_control()) {
        "it contains a blank or a control character"
    } else {
        return Ok(());
    };
    Err(Invalid::Option { what: "key prefix", reason })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// What a cluster hashes of a key.
    fn hash_tag(key: &str) -> &str {
        let (_, rest) = key.split_once('{').unwrap();
        rest.split_once('}').unwrap().0
    }

    #[test]
    fn keys_of_a_resource_share_a_hash_tag_and_with_no_other_resource() {
        let longest = "x".repeat(512);
        let names = [
            "a",
            "{a}",
            "{a}:b",
            "a{b}c",
            "{}",
            "}{",
            "{{x}}",
            "a b",
            "a%20b",
            "a\nb",
            "naïve/λ",
            "%",
            "%25",
            "A",
            "a:lock",
            "a}:lock",
            longest.as_str(),
        ];
        let mut tags = HashSet::new();
        for name in names {
            let keys = Keys::new("fencerow:", &Resource::new(name).unwrap());
            let tag = hash_tag(&keys.lock);
            assert!(!tag.is_empty() && keys.lock.is_ascii(), "{name:?}");
            assert_eq!((hash_tag(&keys.token), hash_tag(&keys.run)), (tag, tag), "{name:?}");
            assert!(tags.insert(tag.to_owned()), "{name:?}");
        }
    }

    #[test]
    fn a_prefix_that_would_break_the_keys_is_refused() {
        for prefix in ["", "{a}", "a}", "a b", "a\0", "a\u{2003}"] {
            assert!(matches!(check_prefix(prefix), Err(Invalid::Option { .. })), "{prefix:?}");
        }
        assert_eq!(check_prefix("app:locks/"), Ok(()));
    }
}
