//! The worker processes as their director sees them: started, told to go on, frozen, woken.

use std::error::Error;
use std::fmt;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::mpsc;

use crate::cue::{Event, GO, Part};
use crate::timeline::Timeline;

/// The hidden argument that makes this program a worker.
pub(crate) const WORKER: &str = "worker";

/// One of the two workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    A,
    B,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::A => "A",
            Self::B => "B",
        })
    }
}

struct Worker {
    who: Who,
    process: Child,
    pid: Pid,
    ears: ChildStdin,
}

/// What was heard of a worker: an event, something it should not have said, or its end.
type Heard = Result<Event, Option<String>>;

/// The workers that are on, and the timeline of what they do.
pub(crate) struct Stage {
    workers: Vec<Worker>,
    said: mpsc::UnboundedSender<(Who, Heard)>,
    heard: mpsc::UnboundedReceiver<(Who, Heard)>,
    pub(crate) timeline: Timeline,
}

impl Stage {
    pub(crate) fn new(timeline: Timeline) -> Self {
        let (said, heard) = mpsc::unbounded_channel();
        Self { workers: Vec::new(), said, heard, timeline }
    }

    /// Starts a worker. It connects, and says that it is ready.
    pub(crate) async fn enter(&mut self, who: Who, part: &Part) -> Result<(), Box<dyn Error>> {
        let mut process = Command::new(std::env::current_exe()?)
            .arg(WORKER)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C in a terminal goes to the director alone, who then ends the workers.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let id = process.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let (pid, Some(mut ears), Some(mouth)) =
            (id.ok_or("the worker is gone")?, process.stdin.take(), process.stdout.take())
        else {
            return Err("the worker can neither hear nor speak".into());
        };
        ears.write_all(format!("{}\n", serde_json::to_string(part)?).as_bytes()).await?;
        self.workers.push(Worker { who, process, pid, ears });

        let said = self.said.clone();
        tokio::spawn(async move {
            let mut lines = BufReader::new(mouth).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let event = serde_json::from_str(&line).map_err(|_| Some(line));
                if said.send((who, event)).is_err() {
                    return;
                }
            }
            let _ = said.send((who, Err(None)));
        });
        Ok(())
    }

    /// Lets the play go on until `who` does what is waited for. Where it waits for a word at that
    /// point, it goes on waiting; all others are told to go on.
    pub(crate) async fn until(
        &mut self,
        who: Who,
        mut what: impl FnMut(&Event) -> bool,
    ) -> Result<(), Box<dyn Error>> {
        loop {
            let (worker, event) = self.next().await?;
            if worker == who && what(&event) {
                return Ok(());
            }
            if event.is_pause() {
                self.go(worker).await?;
            }
            if worker == who && event == Event::Finished {
                return Err(format!("worker {who} had finished before it came to that").into());
            }
        }
    }

    /// Lets the play go on until every worker has finished and ended.
    pub(crate) async fn until_the_end(&mut self) -> Result<(), Box<dyn Error>> {
        let mut on = self.workers.len();
        while on > 0 {
            let (worker, event) = self.next().await?;
            if event.is_pause() {
                self.go(worker).await?;
            }
            on -= usize::from(event == Event::Finished);
        }
        for worker in &mut self.workers {
            let status = worker.process.wait().await?;
            if !status.success() {
                return Err(format!("worker {} failed at its end: {status}", worker.who).into());
            }
        }
        Ok(())
    }

    async fn next(&mut self) -> Result<(Who, Event), Box<dyn Error>> {
        loop {
            let (who, heard) = self.heard.recv().await.ok_or("all workers are gone")?;
            match heard {
                Ok(event) => {
                    self.timeline.note(who, &event);
                    return Ok((who, event));
                }
                Err(Some(line)) => return Err(format!("worker {who} says {line:?}").into()),
                Err(None) => {
                    let status = self.worker(who)?.process.wait().await?;
                    if !status.success() {
                        return Err(format!("worker {who} failed: {status}").into());
                    }
                }
            }
        }
    }

    /// Gives a worker that waits the word to go on.
    pub(crate) async fn go(&mut self, who: Who) -> Result<(), Box<dyn Error>> {
        Ok(self.worker(who)?.ears.write_all(format!("{GO}\n").as_bytes()).await?)
    }

    /// Stops a worker where it stands, with all its threads.
    pub(crate) fn freeze(&mut self, who: Who) -> Result<(), Box<dyn Error>> {
        Ok(kill_process(self.worker(who)?.pid, Signal::STOP)?)
    }

    /// Lets a stopped worker run again.
    pub(crate) fn wake(&mut self, who: Who) -> Result<(), Box<dyn Error>> {
        Ok(kill_process(self.worker(who)?.pid, Signal::CONT)?)
    }

    /// Ends what is still running, also what is frozen. No worker is left when this returns.
    pub(crate) async fn end(&mut self) {
        for worker in &mut self.workers {
            // It fails for those that have ended already.
            let _ = worker.process.kill().await;
        }
    }

    fn worker(&mut self, who: Who) -> Result<&mut Worker, Box<dyn Error>> {
        let worker = self.workers.iter_mut().find(|worker| worker.who == who);
        Ok(worker.ok_or_else(|| format!("worker {who} is not on"))?)
    }
}
