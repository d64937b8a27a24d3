//! A settlement that survives a worker falling asleep at the worst moment.
//!
//! Payouts from a file are settled into a double-entry ledger by two worker processes, which
//! compete for the lease of one resource. One of them is stopped in mid-batch (SIGSTOP) for longer
//! than its lease lasts, the other takes over, and the first is woken (SIGCONT). It goes on with
//! the lease it believes to hold, and the database refuses it.
//!
//! ```sh
//! cargo run --release --example settlement
//! cargo run --release --example settlement -- --postgres postgres://… --redis redis://…
//! ```
//!
//! To see how the library is used, read `settle.rs` (a fenced, idempotent batch), then `worker.rs`
//! (leases) and `ledger.rs` (rows with a token). The rest is the play around it: `scenes.rs` is the plot.

mod args;
mod check;
mod cue;
mod director;
mod ledger;
mod payouts;
mod place;
mod scenes;
mod settle;
mod stage;
mod timeline;
mod worker;

use std::error::Error;
use std::process::ExitCode;

use args::Command;
use place::Place;

/// For arguments that make no sense.
const USAGE: u8 = 2;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let outcome = if args.first().is_some_and(|arg| arg == stage::WORKER) {
        worker::run().await.map(|()| true)
    } else {
        match args::parse(args.into_iter()) {
            Ok(command) => run(command).await,
            Err(sentence) => {
                eprintln!("settlement: {sentence}; --help says what there is");
                return ExitCode::from(USAGE);
            }
        }
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("settlement: {}", in_full(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

async fn run(command: Command) -> Result<bool, Box<dyn Error>> {
    // New for each run, so that it meets neither tokens nor keys of another.
    let run = uuid::Uuid::new_v4().simple();
    let resource = format!("settlement:{run}");
    match command {
        Command::Help => {
            print!("{}", args::HELP);
            Ok(true)
        }
        Command::Embedded => {
            // Removed with everything in it when it is dropped.
            let directory = tempfile::Builder::new().prefix("settlement-").tempdir()?;
            let file = directory.path().join("ledger.db");
            director::run(&Place::Embedded { file }, &resource).await
        }
        Command::Servers { postgres, redis } => {
            let schema = format!("settlement_{run}");
            director::run(&Place::Servers { postgres, redis, schema }, &resource).await
        }
    }
}

/// An error with its causes, as far as it does not tell them itself.
fn in_full(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let words = error.to_string();
        if !text.contains(&words) {
            text += &format!(": {words}");
        }
        cause = error.source();
    }
    text
}
