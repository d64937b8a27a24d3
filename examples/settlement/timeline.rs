//! What happened when: told line by line while it happens, and counted for the check.

use std::fmt::Display;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{HumanCount, ProgressBar, ProgressStyle};

use crate::cue::Event;
use crate::stage::Who;

/// A write that the database refused as stale.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Refusal {
    pub(crate) offered: i64,
    pub(crate) seen: i64,
}

pub(crate) struct Timeline {
    began: Instant,
    bar: ProgressBar,
    /// What each worker holds, A and B.
    tokens: [Option<i64>; 2],
    /// Payouts that each has settled under its lease.
    settled: [usize; 2],
    pub(crate) refusals: Vec<Refusal>,
    /// Transactions that the database ended.
    pub(crate) ended: usize,
}

impl Timeline {
    /// Begins now. The bar is drawn where a person looks at it: on a terminal.
    pub(crate) fn new(payouts: usize) -> Self {
        let bar = if std::io::stdout().is_terminal() && std::io::stderr().is_terminal() {
            ProgressBar::new(payouts as u64)
        } else {
            ProgressBar::hidden()
        };
        if let Ok(style) = ProgressStyle::with_template("{bar:50} {human_pos} of {human_len} payouts") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        Self {
            began: Instant::now(),
            bar,
            tokens: [None; 2],
            settled: [0; 2],
            refusals: Vec::new(),
            ended: 0,
        }
    }

    /// Writes one line.
    pub(crate) fn tell(&self, who: impl Display, token: Option<i64>, what: impl Display) {
        let seconds = self.began.elapsed().as_secs_f64();
        let token = token.map_or_else(String::new, |token| format!("token {token}"));
        self.bar.suspend(|| println!("{seconds:6.2} s  {who:<8}  {token:<8}  {what}"));
    }

    /// Writes one line about a worker.
    pub(crate) fn tell_of(&self, who: Who, what: impl Display) {
        self.tell(who, self.tokens[who as usize], what);
    }

    /// Takes note of what a worker says, and tells it where it matters.
    pub(crate) fn note(&mut self, who: Who, event: &Event) {
        let settled = &mut self.settled[who as usize];
        match event {
            Event::Ready | Event::Planned | Event::Halfway => {}
            Event::Settled { payouts } => {
                *settled += payouts;
                self.bar.inc(*payouts as u64);
            }
            Event::Leased { token } => {
                *settled = 0;
                self.tokens[who as usize] = Some(*token);
                self.tell_of(who, "took the lease");
            }
            Event::Ended { why } => {
                self.ended += 1;
                self.tell_of(who, format_args!("its transaction is lost: {why}"));
            }
            Event::Refused { offered, seen } => {
                self.refusals.push(Refusal { offered: *offered, seen: *seen });
                let what = format!("REFUSED by the database: token {offered} is stale, {seen} has been seen");
                self.tell_of(who, what);
            }
            Event::Released => {
                let what = format!("settled {}, and gave the lease back", HumanCount(*settled as u64));
                self.tell_of(who, what);
            }
            Event::Finished => {
                let what = match *settled {
                    0 => "found nothing left".to_owned(),
                    settled => format!("settled {}, the last", HumanCount(settled as u64)),
                };
                self.tell_of(who, what);
            }
        }
    }

    /// Takes the bar away.
    pub(crate) fn end(&self) {
        self.bar.finish_and_clear();
    }
}
