//! Grants that count once replicas have them.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::{RedisError, Value};

use super::link::{Address, Connection, Opened, Target, is_useless_after};
use super::script::Script;
use crate::clock::Clock;

/// How often a cluster may send a request on to another node.
const REDIRECTS: usize = 3;
/// How many connections are kept for the next grants.
const IDLE: usize = 4;

/// How many replicas must have a grant, and the connections that are asked for that.
///
/// `WAIT` speaks for the connection that wrote, and blocks it: so a grant has one to itself, from
/// its script to the replicas' answer, and nothing reconnects in between.
pub(super) struct Replicated {
    pub(super) replicas: u32,
    pub(super) within: Duration,
    clock: Clock,
    idle: Mutex<Vec<(Option<Address>, Opened)>>,
}

impl Replicated {
    pub(super) fn new(replicas: u32, within: Duration) -> Self {
        Self { replicas, within, clock: Clock::boot(), idle: Mutex::default() }
    }

    /// Runs a script, and says how many replicas have what it wrote; all of them if the answer says
    /// that it `wrote` nothing.
    pub(super) async fn run(
        &self,
        target: &Target,
        script: &Script,
        keys: &[&str],
        arguments: &[&str],
        wrote: fn(&Value) -> bool,
    ) -> Result<(Value, u32), RedisError> {
        let mut node: Option<Address> = None;
        let mut redirects = 0;
        loop {
            let mut own = match self.take(&node) {
                Some(own) => own,
                None => target.connect_to_one(node.as_ref(), &self.clock).await?,
            };
            let answer = match own.connection.run(script, keys, arguments).await {
                Ok(answer) => answer,
                Err(error) => {
                    if is_useless_after(&error) {
                        // The others are as old.
                        self.idle().clear();
                        return Err(error);
                    }
                    let moved = moved_to(&error).filter(|_| redirects < REDIRECTS);
                    self.put(node, own);
                    node = Some(moved.ok_or(error)?);
                    redirects += 1;
                    continue;
                }
            };
            if !wrote(&answer) {
                self.put(node, own);
                return Ok((answer, self.replicas));
            }
            let confirmed = self.wait(&mut own.connection).await;
            return match confirmed {
                Ok(confirmed) => {
                    self.put(node, own);
                    Ok((answer, confirmed))
                }
                // Another connection would count the replicas of what it wrote itself: nothing.
                Err(_) => Ok((answer, 0)),
            };
        }
    }

    async fn wait(&self, connection: &mut Connection) -> Result<u32, RedisError> {
        let within = u64::try_from(self.within.as_millis()).unwrap_or(u64::MAX);
        let mut wait = redis::cmd("WAIT");
        wait.arg(self.replicas).arg(within);
        redis::from_redis_value(connection.send(&wait).await?).map_err(RedisError::from)
    }

    fn take(&self, node: &Option<Address>) -> Option<Opened> {
        let mut idle = self.idle();
        idle.retain(|(_, own)| own.is_trusted());
        let at = idle.iter().rposition(|(leads_to, _)| leads_to == node)?;
        Some(idle.remove(at).1)
    }

    fn put(&self, node: Option<Address>, own: Opened) {
        let mut idle = self.idle();
        if idle.len() >= IDLE {
            idle.remove(0);
        }
        idle.push((node, own));
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(Option<Address>, Opened)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a node of a cluster says that the slot is. While it is on its way, nobody can vouch for it.
fn moved_to(error: &RedisError) -> Option<Address> {
    if error.code() != Some("MOVED") {
        return None;
    }
    let (host, port) = error.redirect_node()?.0.rsplit_once(':')?;
    Some((host.to_owned(), port.parse().ok()?))
}
