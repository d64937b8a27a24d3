//! The connection, and its replacement when it is of no more use.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::sync::Mutex;

use super::super::ttl::Ttl;
use super::script::Script;
use crate::clock::{Clock, Moment};

/// How long opening a connection may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);
/// How long an answer may take; the crate's own limit of half a second is shorter than many a
/// pause of a busy server.
const RESPONSE_LIMIT: Duration = Duration::from_secs(3);
/// A server that is silent for less than this is waited for, however short the lease: connecting
/// anew takes its time as well.
const SHORTEST_PATIENCE: Duration = Duration::from_millis(200);

/// One connection for everybody, opened when it is needed.
///
/// A connection that is closed, or that stays silent for too long, is replaced: behind a balancer
/// or a firewall a dead server keeps its connections open and takes everything.
pub(super) struct Link {
    client: Client,
    config: AsyncConnectionConfig,
    clock: Clock,
    current: Mutex<Current>,
    failures: AtomicU64,
}

#[derive(Default)]
struct Current {
    open: Option<Arc<Open>>,
    failure: Option<RedisError>,
}

struct Open {
    connection: MultiplexedConnection,
    /// Since when a request has waited with no answer to any. Requests are dropped before their
    /// time by holders whose deadlines are shorter, so their own limits would not tell.
    waiting: std::sync::Mutex<Option<Moment>>,
}

impl Link {
    pub(super) fn new(client: Client) -> Self {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_LIMIT))
            .set_response_timeout(Some(RESPONSE_LIMIT));
        Self { client, config, clock: Clock::boot(), current: Mutex::default(), failures: AtomicU64::new(0) }
    }

    /// Connects, if there is no connection.
    pub(super) async fn connect(&self) -> Result<(), RedisError> {
        self.open(RESPONSE_LIMIT).await.map(drop)
    }

    /// Runs a script: its answer, or an error where there is no connection. For a lease of `ttl` a
    /// connection that has been silent for a quarter of that is not used again: the second of two
    /// requests still finds a better one in time.
    pub(super) async fn run(
        &self,
        ttl: Option<Ttl>,
        script: &Script,
        keys: &[&str],
        arguments: &[&str],
    ) -> Result<Result<Value, RedisError>, RedisError> {
        let patience = ttl.map_or(RESPONSE_LIMIT, |ttl| ttl.get() / 4);
        let open = self.open(patience.clamp(SHORTEST_PATIENCE, RESPONSE_LIMIT)).await?;
        let mut connection = open.connection.clone();
        open.set_waiting(|since| since.or(Some(self.clock.now())));
        let mut answer = script.by_hash(keys, arguments).query_async(&mut connection).await;
        if matches!(&answer, Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)) {
            answer = script.by_text(keys, arguments).query_async(&mut connection).await;
        }
        match &answer {
            Err(error) if is_useless_after(error) => {
                let mut current = self.current.lock().await;
                if current.open.as_ref().is_some_and(|now| Arc::ptr_eq(now, &open)) {
                    current.open = None;
                }
            }
            _ => open.set_waiting(|_| None),
        }
        Ok(answer)
    }

    async fn open(&self, patience: Duration) -> Result<Arc<Open>, RedisError> {
        let failures = self.failures.load(Ordering::Acquire);
        let mut current = self.current.lock().await;
        if let Some(open) = current.open.as_ref().filter(|open| !open.is_silent(patience, self.clock.now())) {
            return Ok(open.clone());
        }
        // Whoever waited while somebody else tried in vain does not try again one after the other.
        if let Some(failure) = &current.failure
            && self.failures.load(Ordering::Acquire) != failures
        {
            return Err(failure.clone());
        }
        current.open = None;
        match self.client.get_multiplexed_async_connection_with_config(&self.config).await {
            Ok(connection) => {
                let open = Arc::new(Open { connection, waiting: std::sync::Mutex::default() });
                current.open = Some(open.clone());
                Ok(open)
            }
            Err(error) => {
                current.failure = Some(error.clone());
                self.failures.fetch_add(1, Ordering::Release);
                Err(error)
            }
        }
    }
}

impl Open {
    fn set_waiting(&self, since: impl FnOnce(Option<Moment>) -> Option<Moment>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        *waiting = since(*waiting);
    }

    fn is_silent(&self, patience: Duration, now: Moment) -> bool {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.is_some_and(|since| now.since(since) > patience)
    }
}

/// Whether another connection would do better: this one is broken or silent, or leads to a server
/// that was demoted, where the name may mean another one by now.
fn is_useless_after(error: &RedisError) -> bool {
    error.is_io_error()
        || error.is_unrecoverable_error()
        || error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
}
