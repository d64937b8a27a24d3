//! The example `settlement`, as a user runs it.

use std::process::Output;

use tokio::process::Command;

use crate::support;

/// Runs the example to its end.
async fn run(arguments: &[&str]) -> Output {
    // Built by cargo where it is not up to date; it has no other way to name an example.
    Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["run", "--quiet", "--locked", "--example", "settlement", "--"])
        .args(arguments)
        .kill_on_drop(true)
        .output()
        .await
        .unwrap()
}

fn succeeded(output: &Output, refusals: usize) {
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{said}\n{errors}");
    assert!(said.matches("REFUSED by the database").count() >= refusals, "{said}");
    let malformed = said.lines().filter(|line| line.trim_start().starts_with("line "));
    assert_eq!(malformed.count(), 12, "{said}");
    let checks: Vec<&str> = said.lines().filter(|line| line.starts_with("  ok ")).collect();
    assert!(checks.len() >= 5 && !said.contains("FAILED"), "{said}");
}

#[tokio::test]
async fn the_settlement_refuses_its_sleeper_without_any_server() {
    succeeded(&run(&[]).await, 1);
}

#[tokio::test]
async fn the_settlement_refuses_its_sleepers_on_real_servers() {
    let (database, redis) = (support::postgres().await, support::redis().await);
    succeeded(&run(&["--postgres", &database.url, "--redis", &redis.url]).await, 2);
}

#[tokio::test]
async fn the_settlement_explains_itself_and_refuses_nonsense() {
    let help = run(&["--help"]).await;
    assert_eq!(help.status.code(), Some(0));
    assert!(String::from_utf8_lossy(&help.stdout).contains("--postgres"));
    for nonsense in [&["--postgres", "postgres://x/"][..], &["--mysql", "x"], &["now"]] {
        let output = run(nonsense).await;
        assert_eq!(output.status.code(), Some(2), "{nonsense:?}");
        assert!(!output.stderr.is_empty() && output.stdout.is_empty());
    }
}
