//! What a worker and its director say to each other: one JSON value a line, over the worker's
//! standard input and output.

use std::fmt;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines, Stdin};

use crate::place::Place;

/// The first line that a worker hears.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) resource: String,
    pub(crate) place: Place,
}

/// What a worker tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Event {
    /// About to compete for the lease. Waits for the director's word.
    Ready,
    /// Has the lease.
    Leased { token: i64 },
    /// Has read which payouts are next, and has not begun their transaction. Waits for the
    /// director's word.
    Planned,
    /// Stands in the middle of an open transaction. Waits for the director's word.
    Halfway,
    /// Has committed a batch.
    Settled { payouts: usize },
    /// Has lost a transaction, through no fault of its own, and goes on with the same lease.
    Ended { why: String },
    /// Was refused by the database as stale, and has dropped its lease.
    Refused { offered: i64, seen: i64 },
    /// Has given its lease back, after its turn.
    Released,
    /// Has found nothing left to do, and ends.
    Finished,
}

impl Event {
    /// Whether the worker waits for a word before it goes on.
    pub(crate) fn is_pause(&self) -> bool {
        matches!(self, Self::Ready | Self::Planned | Self::Halfway)
    }
}

/// The word to go on.
pub(crate) const GO: &str = "go";

/// A worker's end of the line.
pub(crate) struct Cue(Lines<BufReader<Stdin>>);

impl Cue {
    /// Waits for the part to play.
    pub(crate) async fn part() -> Result<(Part, Self), Box<dyn std::error::Error>> {
        let mut lines = BufReader::new(tokio::io::stdin()).lines();
        let part = lines.next_line().await?.ok_or("nobody says what to do")?;
        Ok((serde_json::from_str(&part)?, Self(lines)))
    }

    pub(crate) fn say(&self, event: Event) {
        println!("{event}");
    }

    /// Says where the worker is, and stays there until it is told to go on. The lease is kept
    /// alive meanwhile, unless the whole process is frozen.
    pub(crate) async fn pause(&mut self, at: Event) {
        self.say(at);
        match self.0.next_line().await {
            Ok(Some(word)) if word == GO => {}
            // The director is gone: there is nobody to work for.
            _ => std::process::exit(1),
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}
