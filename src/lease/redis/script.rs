//! The scripts, one file each, and how they are sent.

use std::sync::LazyLock;

use redis::Cmd;

/// A script, run by its hash; by its text where the server does not know it (any more).
pub(super) struct Script {
    text: &'static str,
    hash: String,
}

macro_rules! script {
    ($name:ident, $file:literal) => {
        pub(super) static $name: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!($file)));
    };
}

script!(ACQUIRE, "acquire.lua");
script!(SEED, "seed.lua");
script!(RENEW, "renew.lua");
script!(RELEASE, "release.lua");
script!(DISOWN, "disown.lua");
script!(HOLDER, "holder.lua");

impl Script {
    fn new(text: &'static str) -> Self {
        Self { text, hash: redis::Script::new(text).get_hash().to_owned() }
    }

    pub(super) fn by_hash(&self, keys: &[&str], arguments: &[&str]) -> Cmd {
        Self::command("EVALSHA", &self.hash, keys, arguments)
    }

    /// The text itself goes to the node that did not know it, where loading it apart would be one
    /// more request, and in a cluster one to every node. The server remembers it as well.
    pub(super) fn by_text(&self, keys: &[&str], arguments: &[&str]) -> Cmd {
        Self::command("EVAL", self.text, keys, arguments)
    }

    fn command(name: &str, script: &str, keys: &[&str], arguments: &[&str]) -> Cmd {
        let mut command = redis::cmd(name);
        command.arg(script).arg(keys.len()).arg(keys).arg(arguments);
        command
    }
}
