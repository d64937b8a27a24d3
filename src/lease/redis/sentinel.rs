//! Which server the sentinels name, and for how long that is believed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, Value};
use tokio::time::timeout;

use super::link::{Address, CONNECT_LIMIT, RESPONSE_LIMIT, at};
use crate::clock::{Clock, Moment};

/// How long a sentinel may take. The others are asked at the same time.
const ASK_LIMIT: Duration = Duration::from_millis(500);
/// How long the server that they name may take to answer. While a failover is under way that may be
/// the dead one, and five seconds after a promotion all must work again.
const SERVER_LIMIT: Duration = Duration::from_secs(1);
/// Before the sentinels, or a server that is just being promoted, are asked again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// How often the sentinels are asked anew while a connection is used.
const PACE: Duration = Duration::from_secs(1);
/// How long their word holds. It outlives the loss of some answers, and no failover by much.
const TRUST: Duration = Duration::from_secs(5);

/// The sentinels of one primary.
pub(super) struct Sentinels {
    sentinels: Vec<Client>,
    /// What they call the primary.
    name: String,
    /// How to connect to it, but for its address.
    server: ConnectionInfo,
}

impl Sentinels {
    /// `server` is what a primary is connected to with, and has the primary's name for its host.
    /// None where that names no host.
    pub(super) fn new(sentinels: Vec<Client>, server: ConnectionInfo) -> Option<Self> {
        let name = match server.addr() {
            ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host.clone(),
            _ => return None,
        };
        Some(Self { sentinels, name, server })
    }

    /// Connects to the primary, and waits for one while there is none.
    pub(super) async fn connect(
        self: &Arc<Self>,
        clock: &Clock,
    ) -> Result<(MultiplexedConnection, Arc<Watch>), RedisError> {
        let began = clock.now();
        loop {
            let asked = clock.now();
            let error = match self.try_to_connect().await {
                Ok((connection, address)) => {
                    let state = Mutex::new(State { confirmed: asked, asking: false, deposed: false });
                    let (sentinels, clock) = (self.clone(), clock.clone());
                    return Ok((connection, Arc::new(Watch { sentinels, address, clock, state })));
                }
                Err(error) => error,
            };
            if clock.now().since(began) + RETRY_PAUSE > CONNECT_LIMIT {
                return Err(error);
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    async fn try_to_connect(&self) -> Result<(MultiplexedConnection, Address), RedisError> {
        let address = self.primary().await?;
        let client = Client::open(at(&self.server, &address)?)?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(SERVER_LIMIT))
            .set_response_timeout(Some(RESPONSE_LIMIT));
        let opening = async {
            let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
            // On this very connection: what it leads to may be another server than a moment ago.
            let role: Vec<Value> = redis::cmd("ROLE").query_async(&mut connection).await?;
            let is_primary = role.first().is_some_and(|role| match role {
                Value::BulkString(role) => role == b"master",
                _ => false,
            });
            if is_primary { Ok(connection) } else { Err(failure("the server that is named is no primary")) }
        };
        let connection = timeout(SERVER_LIMIT, opening).await.unwrap_or_else(|_| Err(silent()))?;
        Ok((connection, address))
    }

    /// Asks all sentinels for the primary, and believes the newest configuration that more than
    /// half of them know between them: fewer may be cut off together with a deposed primary.
    async fn primary(&self) -> Result<Address, RedisError> {
        let mut asked: FuturesUnordered<_> =
            self.sentinels.iter().map(|sentinel| timeout(ASK_LIMIT, self.ask(sentinel))).collect();
        let (mut answers, mut newest, mut last_error) = (0, None, silent());
        while let Some(answer) = asked.next().await {
            match answer.unwrap_or_else(|_| Err(silent())) {
                Ok((epoch, address)) => {
                    answers += 1;
                    if newest.as_ref().is_none_or(|(known, _)| epoch > *known) {
                        newest = Some((epoch, address));
                    }
                }
                Err(error) => last_error = error,
            }
            if let Some((_, address)) = &newest
                && answers * 2 > self.sentinels.len()
            {
                return Ok(address.clone());
            }
        }
        Err(last_error)
    }

    /// The primary's address, and the epoch of the configuration that this sentinel has it from.
    async fn ask(&self, sentinel: &Client) -> Result<(u64, Address), RedisError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(ASK_LIMIT))
            .set_response_timeout(Some(ASK_LIMIT));
        let mut connection = sentinel.get_multiplexed_async_connection_with_config(&config).await?;
        let (address, facts): (Option<Address>, HashMap<String, String>) = redis::pipe()
            // The one that leads a failover names the new primary here first.
            .cmd("SENTINEL")
            .arg("GET-MASTER-ADDR-BY-NAME")
            .arg(&self.name)
            .cmd("SENTINEL")
            .arg("MASTER")
            .arg(&self.name)
            .query_async(&mut connection)
            .await?;
        let epoch = facts.get("config-epoch").and_then(|epoch| epoch.parse().ok());
        let known = epoch.zip(address);
        known.ok_or_else(|| failure("a sentinel does not say which server is the primary"))
    }
}

/// Whether the server of a connection is still the one that the sentinels name.
pub(super) struct Watch {
    sentinels: Arc<Sentinels>,
    address: Address,
    clock: Clock,
    state: Mutex<State>,
}

struct State {
    /// When they were asked and named it, at the latest.
    confirmed: Moment,
    asking: bool,
    deposed: bool,
}

impl Watch {
    /// Whether the connection may be used. Has the sentinels asked now and then meanwhile.
    pub(super) fn is_trusted(self: &Arc<Self>) -> bool {
        let mut state = self.state();
        let age = self.clock.now().since(state.confirmed);
        if state.deposed || age > TRUST {
            return false;
        }
        if age > PACE && !state.asking {
            state.asking = true;
            tokio::spawn(self.clone().ask_again());
        }
        true
    }

    async fn ask_again(self: Arc<Self>) {
        let asked = self.clock.now();
        let outcome = self.sentinels.primary().await;
        let mut state = self.state();
        state.asking = false;
        match outcome {
            Ok(address) if address == self.address => state.confirmed = asked,
            Ok(_) => state.deposed = true,
            // The sentinels' last word holds for a while.
            Err(_) => {}
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failure(what: &'static str) -> RedisError {
    RedisError::from((ErrorKind::Client, what))
}

fn silent() -> RedisError {
    RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut))
}
