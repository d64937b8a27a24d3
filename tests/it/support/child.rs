//! A second process: this same test binary, run again in a role.

use std::future::Future;
use std::io::{BufRead as _, Write as _};
use std::pin::Pin;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout, Command};

use super::PATIENCE;

const ROLE: &str = "FENCEROW_TEST_ROLE";
/// Marks what a child says to its test among what the test harness prints.
const SAID: &str = "said: ";

/// What a child does. It reads its instructions with [`hear`] and answers with [`say`].
pub(crate) type Role = Pin<Box<dyn Future<Output = ()>>>;

/// Where a child begins; only [`Child::start`] runs it.
#[test]
#[ignore = "the beginning of a second process, not a test"]
fn entry() {
    let Ok(name) = std::env::var(ROLE) else { return };
    tokio::runtime::Runtime::new().unwrap().block_on(crate::role(&name));
}

/// In a child: tells the test one line.
pub(crate) fn say(line: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    // On a line of its own: the harness may have begun one.
    writeln!(out, "\n{SAID}{line}").unwrap();
    out.flush().unwrap();
}

/// In a child: waits for one line from the test. The process ends when the test is gone.
pub(crate) async fn hear() -> String {
    let line = tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line).unwrap();
        line
    });
    match line.await.unwrap().strip_suffix('\n') {
        Some(line) => line.to_owned(),
        None => std::process::exit(0),
    }
}

/// In a test: the other process. Dropping it kills it.
pub(crate) struct Child {
    process: tokio::process::Child,
    pid: Pid,
    ears: ChildStdin,
    mouth: Lines<BufReader<ChildStdout>>,
}

impl Child {
    /// Starts a process in a role, with further environment variables to tell it what it needs.
    pub(crate) fn start<'a>(role: &str, variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "support::child::entry", "--ignored", "--nocapture"])
            .env(ROLE, role)
            .envs(variables)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let pid = Pid::from_raw(process.id().unwrap().cast_signed()).unwrap();
        let ears = process.stdin.take().unwrap();
        let mouth = BufReader::new(process.stdout.take().unwrap()).lines();
        Self { process, pid, ears, mouth }
    }

    /// Tells the process one line.
    pub(crate) async fn tell(&mut self, line: impl std::fmt::Display) {
        self.ears.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    /// Waits for the next line that the process says.
    pub(crate) async fn hear(&mut self) -> String {
        let said = async {
            loop {
                let line = self.mouth.next_line().await.unwrap().expect("the process has ended");
                if let Some(said) = line.strip_prefix(SAID) {
                    return said.to_owned();
                }
            }
        };
        tokio::time::timeout(PATIENCE, said).await.expect("the process says nothing")
    }

    /// Stops the process where it stands (SIGSTOP). It has stopped, with all its threads, when
    /// this returns.
    pub(crate) fn freeze(&self) {
        kill_process(self.pid, Signal::STOP).unwrap();
        let began = Instant::now();
        // Left for others to see (NOWAIT): the runtime waits for the same process to end.
        let stopped = WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        while waitid(WaitId::Pid(self.pid), stopped).unwrap().is_none() {
            assert!(began.elapsed() < PATIENCE, "the process does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Lets a stopped process go on (SIGCONT).
    pub(crate) fn wake(&self) {
        kill_process(self.pid, Signal::CONT).unwrap();
    }

    /// Kills the process (SIGKILL). It is gone when this returns.
    pub(crate) async fn kill(&mut self) {
        self.process.kill().await.unwrap();
    }
}

/// Says what it hears.
pub(crate) async fn echo() {
    loop {
        say(hear().await);
    }
}

#[tokio::test]
async fn a_frozen_process_answers_only_once_it_is_woken() {
    let mut child = Child::start("echo", []);
    child.tell("one").await;
    assert_eq!(child.hear().await, "one");

    child.freeze();
    child.tell("two").await;
    let silence = tokio::time::timeout(Duration::from_millis(50), child.hear()).await;
    assert!(silence.is_err());

    child.wake();
    assert_eq!(child.hear().await, "two");
    child.kill().await;
}
