//! Everything that needs servers or processes, in one binary, so that containers start once.
//!
//! `FENCEROW_POSTGRES_IMAGE` and `FENCEROW_REDIS_IMAGE` name the images; a Docker engine must be
//! there. Run it with `cargo test --test it`: a runner with a process for each test would start
//! the containers for each test, too.
//!
//! An id like A13 at a test names one of 25 failures, collected from reports of other libraries'
//! users, that it is about.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod conformance;
mod fence;
mod floors;
mod postgres_leases;
mod redis;
mod redis_tls;
mod settlement;
mod sqlite_leases;
mod stories;
mod support;

/// What a second process of these tests can be.
fn role(name: &str) -> support::child::Role {
    match name {
        "contend" => Box::pin(sqlite_leases::contend()),
        "echo" => Box::pin(support::child::echo()),
        "hold" => Box::pin(sqlite_leases::hold()),
        "holder" => Box::pin(stories::holder::holder()),
        "redis" => Box::pin(support::run_a_server()),
        "sleeper" => Box::pin(fence::sleepers::sleeper()),
        "tls" => Box::pin(redis_tls::tls()),
        other => panic!("no such role: {other}"),
    }
}
