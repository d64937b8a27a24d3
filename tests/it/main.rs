//! Everything that needs servers or processes, in one binary, so that containers start once.
//!
//! `FENCEROW_POSTGRES_IMAGE` and `FENCEROW_REDIS_IMAGE` name the images; a Docker engine must be
//! there. Run it with `cargo test --test it`: a runner with a process for each test would start
//! the containers for each test, too.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod conformance;
mod fence;
mod redis;
mod support;
