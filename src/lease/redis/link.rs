//! The connection, and its replacement when it is of no more use.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use redis::aio::MultiplexedConnection;
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo as _,
    RedisError, ServerErrorKind, Value,
};

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
    Single(Box<Client>),
    /// The primary that the sentinels name.
    Sentinel(Arc<Sentinels>),
    /// All primaries of a cluster, each for its slots.
    Cluster(Arc<Cluster>),
}

/// A cluster, and the nodes that it was named by.
pub(super) struct Cluster {
    pub(super) client: ClusterClient,
    pub(super) nodes: Vec<ConnectionInfo>,
}

/// Host and port of a server that another server named.
pub(super) type Address = (String, u16);

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
pub(super) enum Connection {
    One(MultiplexedConnection),
    Cluster(ClusterConnection),
}

/// A connection, and whether the sentinels still name where it leads to.
pub(super) struct Opened {
    pub(super) connection: Connection,
    watch: Option<Arc<Watch>>,
}

struct Open {
    opened: Opened,
    /// Since when a request has waited with no answer to any. Requests are dropped before their
    /// time by holders whose deadlines are shorter, so their own limits would not tell.
    waiting: Mutex<Option<Moment>>,
}

impl Link {
    pub(super) fn new(target: Target) -> Self {
        Self { target, clock: Clock::boot(), current: Mutex::default() }
    }

    pub(super) fn target(&self) -> &Target {
        &self.target
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
        let mut connection = open.opened.connection.clone();
        open.set_waiting(|since| since.or(Some(self.clock.now())));
        let answer = connection.run(script, keys, arguments).await;
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
                && open.opened.is_trusted()
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
            let opened = target.connect(&clock).await?;
            Ok(Arc::new(Open { opened, waiting: Mutex::default() }))
        });
        let ended = |_| RedisError::from((ErrorKind::Client, "the runtime that connected has ended"));
        task.map(move |outcome| outcome.unwrap_or_else(|error| Err(ended(error)))).boxed().shared()
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Target {
    async fn connect(&self, clock: &Clock) -> Result<Opened, RedisError> {
        match self {
            Self::Single(client) => connect_to_one(client, CONNECT_LIMIT).await,
            Self::Sentinel(sentinels) => {
                let (connection, watch) = sentinels.connect(clock).await?;
                Ok(Opened { connection: Connection::One(connection), watch: Some(watch) })
            }
            Self::Cluster(cluster) => {
                // The crate limits each of its steps, and there are several nodes to ask.
                let opening = tokio::time::timeout(CONNECT_LIMIT, cluster.client.get_async_connection());
                let too_long = |_| Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
                let connection = opening.await.unwrap_or_else(too_long)?;
                Ok(Opened { connection: Connection::Cluster(connection), watch: None })
            }
        }
    }

    /// Connects to one server: in a cluster to the node that was named, or to any.
    pub(super) async fn connect_to_one(
        &self,
        node: Option<&Address>,
        clock: &Clock,
    ) -> Result<Opened, RedisError> {
        let Self::Cluster(cluster) = self else { return self.connect(clock).await };
        let limit = CONNECT_LIMIT / 3;
        if let (Some(node), Some(info)) = (node, cluster.nodes.first()) {
            return connect_to_one(&Client::open(at(info, node)?)?, limit).await;
        }
        let mut failure = RedisError::from((ErrorKind::Client, "the cluster has no nodes"));
        for info in &cluster.nodes {
            match connect_to_one(&Client::open(info.clone())?, limit).await {
                Ok(opened) => return Ok(opened),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }
}

async fn connect_to_one(client: &Client, limit: Duration) -> Result<Opened, RedisError> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(limit))
        .set_response_timeout(Some(RESPONSE_LIMIT));
    let connection = client.get_multiplexed_async_connection_with_config(&config).await?;
    Ok(Opened { connection: Connection::One(connection), watch: None })
}

/// How to connect to another server in the same way.
pub(super) fn at(info: &ConnectionInfo, (host, port): &Address) -> Result<ConnectionInfo, RedisError> {
    let address = match info.addr().clone() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
            ConnectionAddr::TcpTls { host: host.clone(), port: *port, insecure, tls_params }
        }
        _ => ConnectionAddr::Tcp(host.clone(), *port),
    };
    info.clone().set_addr(address).into_connection_info()
}

impl Opened {
    pub(super) fn is_trusted(&self) -> bool {
        self.watch.as_ref().is_none_or(Watch::is_trusted)
    }
}

impl Connection {
    /// Runs a script on this connection alone; its text goes where its hash went.
    pub(super) async fn run(
        &mut self,
        script: &Script,
        keys: &[&str],
        arguments: &[&str],
    ) -> Result<Value, RedisError> {
        let answer = self.send(&script.by_hash(keys, arguments)).await;
        match answer {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                self.send(&script.by_text(keys, arguments)).await
            }
            answer => answer,
        }
    }

    pub(super) async fn send(&mut self, command: &Cmd) -> Result<Value, RedisError> {
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
pub(super) fn is_useless_after(error: &RedisError) -> bool {
    error.is_io_error()
        || error.is_unrecoverable_error()
        || error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
}
