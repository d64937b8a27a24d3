//! The connection, and its replacement when it is of no more use.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use redis::aio::MultiplexedConnection;
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, ErrorKind, RedisError, ServerErrorKind, Value};

use super::super::ttl::Ttl;
use super::script::Script;
use super::sentinel::{Sentinels, Watch};
use crate::clock::{Clock, Moment};

/// How long opening a connection may take.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(3);
/// How long an answer may take; the crate's own limit of half a second is shorter than many a
/// pause of a busy server.
pub(super) const RESPONSE_LIMIT: Duration = Duration::from_secs(3);
/// A server that is silent for less than this is waited for, however short the lease: connecting
/// anew takes its time as well.
const SHORTEST_PATIENCE: Duration = Duration::from_millis(200);

/// Where a connection leads to.
#[derive(Clone)]
pub(super) enum Target {
    /// One server.
    Single(Client),
    /// The primary that the sentinels name.
    Sentinel(Arc<Sentinels>),
    /// All primaries of a cluster, each for its slots.
    Cluster(Box<ClusterClient>),
}

/// One connection for everybody, opened when it is needed.
///
/// A connection that is closed, or that stays silent for too long, is replaced: behind a balancer
/// or a firewall a dead server keeps its connections open and takes everything.
pub(super) struct Link {
    target: Target,
    clock: Clock,
    current: Mutex<Current>,
}

#[derive(Default)]
struct Current {
    open: Option<Arc<Open>>,
    connecting: Option<Connecting>,
}

/// An attempt to connect that everybody who needs it can wait for.
type Connecting = Shared<BoxFuture<'static, Result<Arc<Open>, RedisError>>>;

#[derive(Clone)]
enum Connection {
    One(MultiplexedConnection),
    Cluster(ClusterConnection),
}

struct Open {
    connection: Connection,
    watch: Option<Arc<Watch>>,
    /// Since when a request has waited with no answer to any. Requests are dropped before their
    /// time by holders whose deadlines are shorter, so their own limits would not tell.
    waiting: Mutex<Option<Moment>>,
}

impl Link {
    pub(super) fn new(target: Target) -> Self {
        Self { target, clock: Clock::boot(), current: Mutex::default() }
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
        let mut answer = connection.send(&script.by_hash(keys, arguments)).await;
        if matches!(&answer, Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)) {
            answer = connection.send(&script.by_text(keys, arguments)).await;
        }
        match &answer {
            Err(error) if is_useless_after(error) => {
                let mut current = self.current();
                if current.open.as_ref().is_some_and(|now| Arc::ptr_eq(now, &open)) {
                    current.open = None;
                }
            }
            _ => open.set_waiting(|_| None),
        }
        Ok(answer)
    }

    async fn open(&self, patience: Duration) -> Result<Arc<Open>, RedisError> {
        let connecting = {
            let mut current = self.current();
            if let Some(open) = &current.open
                && !open.is_silent(patience, self.clock.now())
                && open.watch.as_ref().is_none_or(Watch::is_trusted)
            {
                return Ok(open.clone());
            }
            current.open = None;
            match &current.connecting {
                // Whoever comes while somebody else tries waits for the same attempt, also where
                // it is in vain. One that nobody waited for to the end may have succeeded.
                Some(connecting) if !matches!(connecting.peek(), Some(Err(_))) => connecting.clone(),
                _ => {
                    let connecting = self.connecting();
                    current.connecting = Some(connecting.clone());
                    connecting
                }
            }
        };
        let outcome = connecting.clone().await;
        let mut current = self.current();
        if current.connecting.as_ref().is_some_and(|now| now.ptr_eq(&connecting)) {
            current.connecting = None;
            current.open = outcome.as_ref().ok().cloned();
        }
        outcome
    }

    /// Begins to connect. It goes on when those who wait for it give up: a holder whose lease is
    /// short must not keep all others from ever getting a connection.
    fn connecting(&self) -> Connecting {
        let (target, clock) = (self.target.clone(), self.clock.clone());
        let task = tokio::spawn(async move {
            let (connection, watch) = target.connect(&clock).await?;
            Ok(Arc::new(Open { connection, watch, waiting: Mutex::default() }))
        });
        let ended = |_| RedisError::from((ErrorKind::Client, "the runtime that connected has ended"));
        task.map(move |outcome| outcome.unwrap_or_else(|error| Err(ended(error)))).boxed().shared()
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Target {
    async fn connect(&self, clock: &Clock) -> Result<(Connection, Option<Arc<Watch>>), RedisError> {
        match self {
            Self::Single(client) => {
                let config = AsyncConnectionConfig::new()
                    .set_connection_timeout(Some(CONNECT_LIMIT))
                    .set_response_timeout(Some(RESPONSE_LIMIT));
                let connection = client.get_multiplexed_async_connection_with_config(&config).await?;
                Ok((Connection::One(connection), None))
            }
            Self::Sentinel(sentinels) => {
                let (connection, watch) = sentinels.connect(clock).await?;
                Ok((Connection::One(connection), Some(watch)))
            }
            Self::Cluster(client) => {
                // The crate limits each of its steps, and there are several nodes to ask.
                let opening = tokio::time::timeout(CONNECT_LIMIT, client.get_async_connection());
                let too_long = |_| Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
                Ok((Connection::Cluster(opening.await.unwrap_or_else(too_long)?), None))
            }
        }
    }
}

impl Connection {
    async fn send(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        match self {
            Self::One(connection) => command.query_async(connection).await,
            Self::Cluster(connection) => command.query_async(connection).await,
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
