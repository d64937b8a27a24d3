//! Locks in Redis.

mod keys;
mod link;
mod replicated;
mod script;
mod sentinel;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;
use redis::cluster::ClusterClient;
use redis::io::tcp::TcpSettings;
use redis::{Client, ConnectionInfo, FromRedisValue, IntoConnectionInfo as _, RedisError, Value};

use self::keys::{Keys, check_prefix};
use self::link::{CONNECT_LIMIT, Cluster, Link, RESPONSE_LIMIT, Target};
use self::replicated::Replicated;
use self::script::Script;
use self::sentinel::Sentinels;
use super::error::LeaseError;
use super::service::{Attempt, Holder, LockService, Origin, Request, Standing};
use super::ttl::Ttl;
use crate::error::Invalid;
use crate::owner::OwnerId;
use crate::resource::Resource;
use crate::token::FencingToken;

/// How long replicas may be waited for: less than a connection waits for an answer.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// Keeps locks and token counters in Redis, 6.0 or newer: in one server, in the primary that Sentinel
/// names, or in a Cluster. Clones share the connection.
///
/// Each step is one script in one round trip; a lock's time is judged by the server. A request
/// waits at most three seconds for its answer, and as long for a connection. A server that does
/// not answer is connected to anew, for short leases sooner.
///
/// # What is kept
///
/// For each resource, `<prefix>{<name>}:lock` while it is held, and `:token` and `:run`, two small
/// keys that stay: the counter, and the run that it was last seeded in, which is the server's `run_id`
/// and replication id. When the server was restarted, or another was promoted, or it was demoted and
/// promoted again, that run is over, and the next grant is numbered anew by the database. The server must not evict keys (`maxmemory-policy noeviction`): a lock
/// that is evicted is lost by its holder, and a counter is numbered anew.
///
#[doc = include_str!("rights.md")]
///
/// # Examples
///
/// ```no_run
/// use fencerow::lease::{Leases, RedisLocks};
/// use std::time::Duration;
///
/// # async fn example(fence: impl fencerow::Renumber) -> Result<(), fencerow::lease::LeaseError> {
/// let leases = Leases::new(RedisLocks::connect("redis://127.0.0.1/").await?, fence);
/// let lease = leases.acquire("settlement:2026-11-30", Duration::from_secs(10)).await?;
/// println!("token {}", lease.token());
/// lease.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RedisLocks {
    link: Arc<Link>,
    prefix: Arc<str>,
    /// How long an unused counter is kept, in milliseconds; empty for ever.
    idle: Arc<str>,
    replicated: Option<Arc<Replicated>>,
}

impl RedisLocks {
    /// What every key begins with unless [`RedisLocks::with_prefix`] says otherwise.
    pub const PREFIX: &'static str = "fencerow:";

    /// Connects to the server of a `redis://` or `unix://` URL, as the user that it names, if any:
    /// `redis://user:password@host/`.
    ///
    /// With the feature `redis-tls` also of a `rediss://` URL: the server's certificate must be valid
    /// for its host and come from an authority that the machine trusts, or that the file named by
    /// `SSL_CERT_FILE` holds. The process gets `ring` for its rustls crypto provider unless it has
    /// installed one before.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Invalid`] if that is no such URL, [`LeaseError::Unavailable`] if the server
    /// cannot be reached or does not let us in.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect.
    pub async fn connect(url: &str) -> Result<Self, LeaseError> {
        let client = Client::open(parse_url(url)?).map_err(malformed)?;
        Self::from_client(client).connected().await
    }

    /// Connects to the primary that Redis Sentinel names, and follows it through failovers. The
    /// second URL is the one of the primary, with the name that the sentinels know it by for its
    /// host, and with the user, password and database of the servers themselves.
    ///
    /// A server counts as the primary when more than half of the sentinels answer, the newest
    /// configuration among their answers names it, and it says on that very connection that it is
    /// one. While the connection is used the sentinels are asked anew each second; the connection
    /// is left at the first answer that names another server, or when their last word is five
    /// seconds old. So also a primary that is cut off from the rest, and does not know that it was
    /// deposed, is left within seconds; what it granted until then the fence refuses as soon as
    /// the new primary's next grant is numbered, since that one belongs to another run.
    ///
    /// While there is no primary a request waits for one for three seconds, and then fails; the
    /// next one tries again. The servers' users need `ROLE` as well, those of the sentinels
    /// `SENTINEL`.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Invalid`] if there is no sentinel or one of the URLs is malformed,
    /// [`LeaseError::Unavailable`] if too few sentinels answer or no primary can be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use fencerow::lease::RedisLocks;
    ///
    /// # async fn example() -> Result<(), fencerow::lease::LeaseError> {
    /// let sentinels = ["redis://10.0.0.1:26379", "redis://10.0.0.2:26379", "redis://10.0.0.3:26379"];
    /// let locks = RedisLocks::sentinel(sentinels, "redis://worker:secret@mymaster/").await?;
    /// # Ok(()) }
    /// ```
    pub async fn sentinel<'a>(
        sentinels: impl IntoIterator<Item = &'a str>,
        primary: &str,
    ) -> Result<Self, LeaseError> {
        let open = |url| Client::open(parse_url(url)?).map_err(malformed);
        let sentinels: Vec<_> = sentinels.into_iter().map(open).collect::<Result<_, _>>()?;
        if sentinels.is_empty() {
            return Err(Invalid::Option { what: "sentinels", reason: "there is none" }.into());
        }
        let unnamed = Invalid::Option { what: "Redis URL", reason: "it does not name a primary" };
        let sentinels = Sentinels::new(sentinels, parse_url(primary)?).ok_or(unnamed)?;
        Self::over(Target::Sentinel(Arc::new(sentinels))).connected().await
    }

    /// Connects to a Redis Cluster by some of its nodes, with the user and password of their URLs,
    /// which all nodes must share.
    ///
    /// All keys of a resource are in one slot. Each step is sent to the primary of that slot, and
    /// sent again where the cluster redirects it; all that takes three seconds at most. While a slot
    /// is moved from one node to another, acquiring in it may fail until its keys have all arrived;
    /// locks move with their time. The new node is another run: the next grant is numbered anew by
    /// the database.
    ///
    /// A primary of a cluster that is cut off with some of its clients takes writes until
    /// `cluster-node-timeout` has passed. What it granted meanwhile the fence refuses as soon as the
    /// promoted node's next grant is numbered.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Invalid`] if there is no node, a URL is malformed, or they differ in user or
    /// password; [`LeaseError::Unavailable`] if none can be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use fencerow::lease::RedisLocks;
    ///
    /// # async fn example() -> Result<(), fencerow::lease::LeaseError> {
    /// let locks = RedisLocks::cluster(["redis://10.0.0.1/", "redis://10.0.0.2/"]).await?;
    /// # Ok(()) }
    /// ```
    pub async fn cluster<'a>(nodes: impl IntoIterator<Item = &'a str>) -> Result<Self, LeaseError> {
        let nodes: Vec<_> = nodes.into_iter().map(parse_url).collect::<Result<_, _>>()?;
        let useless = Invalid::Option {
            what: "cluster nodes",
            reason: "there is none, or they differ in user or password",
        };
        // The crate takes those of the first node for all, and only looks at the others' if it has any.
        let user = |node: &ConnectionInfo| {
            let settings = node.redis_settings();
            (settings.username().map(str::to_owned), settings.password().map(str::to_owned))
        };
        if nodes.windows(2).any(|pair| user(&pair[0]) != user(&pair[1])) {
            return Err(useless.into());
        }
        let client = ClusterClient::builder(nodes.clone())
            .tcp_settings(TcpSettings::default().set_nodelay(true))
            .connection_timeout(CONNECT_LIMIT / 3)
            .response_timeout(RESPONSE_LIMIT)
            // With all that is sent again: the crate would try sixteen times.
            .overall_response_timeout(Some(RESPONSE_LIMIT))
            .retries(5)
            .min_retry_wait(20)
            .max_retry_wait(500)
            .build();
        let client = client.map_err(|_| useless)?;
        Self::over(Target::Cluster(Arc::new(Cluster { client, nodes }))).connected().await
    }

    /// Uses a client with settings of its own, such as certificates; the process must have a rustls
    /// crypto provider then. Nothing is connected yet.
    #[must_use]
    pub fn from_client(client: Client) -> Self {
        Self::over(Target::Single(client.into()))
    }

    fn over(target: Target) -> Self {
        Self {
            link: Arc::new(Link::new(target)),
            prefix: Self::PREFIX.into(),
            idle: "".into(),
            replicated: None,
        }
    }

    async fn connected(self) -> Result<Self, LeaseError> {
        self.link.connect().await.map_err(unavailable)?;
        Ok(self)
    }

    /// Begins every key with `prefix` instead. Locks under different prefixes have nothing to do
    /// with each other.
    ///
    /// # Errors
    ///
    /// [`Invalid::Option`] if it is empty or contains braces, blanks or control characters.
    pub fn with_prefix(mut self, prefix: &str) -> Result<Self, Invalid> {
        check_prefix(prefix)?;
        self.prefix = prefix.into();
        Ok(self)
    }

    /// Lets the counter of a resource go when nobody has acquired it for `idle`, for millions of
    /// resources that are used once: otherwise two small keys of each stay for ever.
    ///
    /// A counter that is gone has forgotten, and the next grant is numbered anew by the database. So
    /// this is for [`Leases::new`](super::Leases::new) only: without a fence tokens would begin at 1
    /// again, and every acquisition is refused as [`Invalid::Option`]. Set it in all programs that
    /// share the prefix; one without it keeps what it uses.
    ///
    /// # Errors
    ///
    /// [`Invalid::Ttl`] below a millisecond or beyond 2^53 - 1 of them.
    pub fn with_idle_expiry(mut self, idle: Duration) -> Result<Self, Invalid> {
        self.idle = Ttl::try_from(idle)?.millis().to_string().into();
        Ok(self)
    }

    /// Counts a grant only when `replicas` replicas have confirmed that they have it, which they are
    /// given `within` to do (`WAIT`). A failover to one of them keeps the lock. It does not make
    /// Redis consistent: a replica without the grant may be promoted all the same, so the fence is
    /// what decides.
    ///
    /// A grant that too few replicas confirm is an error, and its lock is released in the
    /// background. Each grant has a connection to itself, from its script to the replicas' answer,
    /// since `WAIT` only speaks for the connection that wrote: where that broke in between, nobody
    /// has confirmed. In a Cluster it leads to the primary of the resource's slot, often at the cost
    /// of one redirection. Renewals and releases are not waited for. A user with limited rights needs
    /// `WAIT` as well.
    ///
    /// # Errors
    ///
    /// [`Invalid::Option`] if `replicas` is zero, or `within` is shorter than a millisecond or longer
    /// than two seconds: an acquisition would not wait for its answer any more.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use fencerow::lease::RedisLocks;
    /// use std::time::Duration;
    ///
    /// # async fn example() -> Result<(), fencerow::lease::LeaseError> {
    /// let locks = RedisLocks::connect("redis://127.0.0.1/").await?;
    /// let locks = locks.with_replicas(1, Duration::from_millis(500))?;
    /// # Ok(()) }
    /// ```
    pub fn with_replicas(mut self, replicas: u32, within: Duration) -> Result<Self, Invalid> {
        if replicas == 0 {
            return Err(Invalid::Option { what: "replicas", reason: "at least one must have a grant" });
        }
        if within < Duration::from_millis(1) || within > LONGEST_WAIT {
            let reason = "replicas are given a millisecond to two seconds";
            return Err(Invalid::Option { what: "time for replicas", reason });
        }
        self.replicated = Some(Arc::new(Replicated::new(replicas, within)));
        Ok(self)
    }

    fn keys(&self, resource: &Resource) -> Keys {
        Keys::new(&self.prefix, resource)
    }

    async fn run<T: FromRedisValue>(
        &self,
        resource: &Resource,
        ttl: Option<Ttl>,
        script: &Script,
        keys: &[&str],
        arguments: &[&str],
    ) -> Result<T, LeaseError> {
        let answer = self.link.run(ttl, script, keys, arguments).await.map_err(unavailable)?;
        let answer = answer.map_err(|error| failure(resource, error))?;
        T::from_redis_value(answer).map_err(|error| refused(resource, error))
    }

    /// Runs a script whose answer says whether it `wrote`; that counts once the replicas have it.
    async fn write<T: FromRedisValue>(
        &self,
        resource: &Resource,
        ttl: Option<Ttl>,
        script: &Script,
        keys: &[&str],
        arguments: &[&str],
        wrote: fn(&Value) -> bool,
    ) -> Result<T, LeaseError> {
        let Some(replicated) = &self.replicated else {
            return self.run(resource, ttl, script, keys, arguments).await;
        };
        let answer = replicated.run(self.link.target(), script, keys, arguments, wrote).await;
        let (answer, confirmed) = answer.map_err(|error| failure(resource, error))?;
        let wanted = replicated.replicas;
        if confirmed < wanted {
            return Err(LeaseError::DurabilityUncertain { resource: resource.clone(), confirmed, wanted });
        }
        T::from_redis_value(answer).map_err(|error| refused(resource, error))
    }

    async fn step(
        &self,
        resource: &Resource,
        ttl: Option<Ttl>,
        script: &Script,
        keys: &[&str],
        arguments: &[&str],
    ) -> Result<Standing, LeaseError> {
        let done: bool = self.run(resource, ttl, script, keys, arguments).await?;
        Ok(if done { Standing::Ours } else { Standing::NotOurs })
    }
}

impl LockService for RedisLocks {
    fn acquire<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Attempt, LeaseError>> {
        Box::pin(async move {
            let resource = &request.resource;
            let Keys { lock, token, run } = self.keys(resource);
            let owner = request.owner.to_string();
            let ttl = request.ttl.millis().to_string();
            let origin = serde_json::to_string(&request.origin).map_err(|error| refused(resource, error))?;
            let (outcome, number): (String, String) = self
                .write(
                    resource,
                    Some(request.ttl),
                    &script::ACQUIRE,
                    &[&lock, &token, &run],
                    &[&owner, &ttl, &origin, &self.idle],
                    is_no_refusal,
                )
                .await?;
            match outcome.as_str() {
                "granted" => Ok(Attempt::Granted(parse(resource, &number)?)),
                "unnumbered" if number.is_empty() => Ok(Attempt::Unnumbered { counter: None }),
                "unnumbered" => Ok(Attempt::Unnumbered { counter: Some(parse(resource, &number)?) }),
                _ => Ok(Attempt::Held { remaining: remaining(parse(resource, &number)?) }),
            }
        })
    }

    fn seed<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        token: FencingToken,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(async move {
            let keys = self.keys(resource);
            let keys = [keys.lock.as_str(), &keys.token, &keys.run];
            let arguments = [&owner.to_string(), &token.to_string(), &*self.idle];
            let is_done = |answer: &Value| *answer == Value::Int(1);
            let done: bool = self.write(resource, None, &script::SEED, &keys, &arguments, is_done).await?;
            Ok(if done { Standing::Ours } else { Standing::NotOurs })
        })
    }

    fn renew<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
        ttl: Ttl,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(async move {
            let lock = self.keys(resource).lock;
            let arguments = [owner.to_string(), ttl.millis().to_string()];
            self.step(resource, Some(ttl), &script::RENEW, &[&lock], &[&arguments[0], &arguments[1]]).await
        })
    }

    fn release<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(async move {
            let lock = self.keys(resource).lock;
            self.step(resource, None, &script::RELEASE, &[&lock], &[&owner.to_string()]).await
        })
    }

    fn disown<'a>(
        &'a self,
        resource: &'a Resource,
        owner: OwnerId,
    ) -> BoxFuture<'a, Result<Standing, LeaseError>> {
        Box::pin(async move {
            let keys = self.keys(resource);
            self.step(resource, None, &script::DISOWN, &[&keys.lock, &keys.run], &[&owner.to_string()]).await
        })
    }

    fn needs_fence(&self) -> bool {
        !self.idle.is_empty()
    }

    fn holder<'a>(&'a self, resource: &'a Resource) -> BoxFuture<'a, Result<Option<Holder>, LeaseError>> {
        Box::pin(async move {
            let lock = self.keys(resource).lock;
            let held: Option<(String, i64)> =
                self.run(resource, None, &script::HOLDER, &[&lock], &[]).await?;
            let Some((value, left)) = held else { return Ok(None) };
            let holder = read_holder(&value, remaining(left));
            holder.map(Some).ok_or_else(|| refused(resource, "the key holds something else than a lock"))
        })
    }
}

impl fmt::Debug for RedisLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisLocks").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

/// Whether `acquire.lua` granted the lock.
fn is_no_refusal(answer: &Value) -> bool {
    let held = |value: &Value| matches!(value, Value::BulkString(outcome) if outcome == b"held");
    !matches!(answer, Value::Array(parts) if parts.first().is_some_and(held))
}

fn parse_url(url: &str) -> Result<ConnectionInfo, Invalid> {
    // The crate leaves the choice to the process, and panics where there is none to make.
    #[cfg(feature = "redis-tls")]
    let _ = rustls::crypto::ring::default_provider().install_default();
    let info = url.into_connection_info().map_err(malformed)?;
    // Small requests must not wait for each other's acknowledgements.
    Ok(info.set_tcp_settings(TcpSettings::default().set_nodelay(true)))
}

/// The crate's own error may quote the URL, and with it a password.
fn malformed(_: RedisError) -> Invalid {
    Invalid::Option {
        what: "Redis URL",
        reason: "it does not begin with redis:// or unix://, is malformed, or needs TLS without the feature redis-tls",
    }
}

/// What PTTL says: negative for a key without an end.
fn remaining(millis: i64) -> Option<Duration> {
    u64::try_from(millis).ok().map(Duration::from_millis)
}

/// Reads a lock's value; `acquire.lua` tells what is in it.
fn read_holder(value: &str, remaining: Option<Duration>) -> Option<Holder> {
    let mut parts = value.splitn(4, ' ');
    let owner = parts.next()?.parse().ok()?;
    let token = match parts.next()? {
        "-" => None,
        token => Some(token.parse().ok()?),
    };
    let since = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(parts.next()?.parse().ok()?))?;
    let origin: Origin = serde_json::from_str(parts.next()?).ok()?;
    Some(Holder::new(owner, token, since, remaining, origin))
}

fn parse<T>(resource: &Resource, number: &str) -> Result<T, LeaseError>
where
    T: FromStr<Err: std::error::Error + Send + Sync + 'static>,
{
    number.parse().map_err(|error| refused(resource, error))
}

fn unavailable(error: RedisError) -> LeaseError {
    LeaseError::Unavailable(error.into())
}

fn refused(resource: &Resource, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> LeaseError {
    LeaseError::Refused { resource: resource.clone(), source: source.into() }
}

/// Tells a server that will not (ever) from one that cannot (now).
fn failure(resource: &Resource, error: RedisError) -> LeaseError {
    /// A script or its keys; our own errors are among them.
    const WILL_NOT: [&str; 5] = ["FENCEROW", "WRONGTYPE", "NOPERM", "CROSSSLOT", "ERR"];
    /// Servers before 7.0 wrap what a command inside a script answered into an `ERR`.
    const CANNOT: [&str; 9] = [
        "OOM ",
        "READONLY ",
        "MASTERDOWN ",
        "MISCONF ",
        "NOREPLICAS ",
        "LOADING ",
        "BUSY ",
        "CLUSTERDOWN ",
        "TRYAGAIN ",
    ];
    let code = error.code().unwrap_or_default();
    let wrapped =
        code == "ERR" && error.detail().is_some_and(|text| CANNOT.iter().any(|cannot| text.contains(cannot)));
    if WILL_NOT.contains(&code) && !wrapped { refused(resource, error) } else { unavailable(error) }
}
