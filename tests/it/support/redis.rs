//! One Redis for all tests, with a key prefix of its own for each; or one for a single test.

use std::net::TcpListener;
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};

use fencerow::lease::RedisLocks;
use redis::Client;
use redis::aio::MultiplexedConnection;
use testcontainers::core::IntoContainerPort as _;
use testcontainers::{ContainerRequest, GenericImage, ImageExt as _};
use tokio::process::Command;
use tokio::sync::OnceCell;

use super::child::{self, Child};
use super::containers::{self, Server};
use super::eventually;

static SERVER: OnceCell<Server> = OnceCell::const_new();
static PREFIXES: AtomicU32 = AtomicU32::new(0);

/// A key prefix that no other test has.
pub(super) fn new_prefix() -> String {
    format!("test-{}:", PREFIXES.fetch_add(1, Ordering::Relaxed))
}

/// A Redis server, and a prefix that no other test's keys have.
pub(crate) struct TestRedis {
    pub(crate) url: String,
    pub(crate) prefix: String,
    address: String,
}

impl TestRedis {
    fn at(server: &Server) -> Self {
        let address = format!("{}:{}", server.host, server.port);
        Self { url: format!("redis://{address}/"), prefix: new_prefix(), address }
    }

    /// `host:port` of the server, for a proxy in front of it.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// The lock service on it, with keys of its own.
    pub(crate) async fn locks(&self) -> RedisLocks {
        self.locks_at(&self.address).await
    }

    /// The same, behind a proxy.
    pub(crate) async fn locks_at(&self, address: impl std::fmt::Display) -> RedisLocks {
        let locks = RedisLocks::connect(&format!("redis://{address}/")).await.unwrap();
        locks.with_prefix(&self.prefix).unwrap()
    }

    /// A connection of the test's own, to look behind the scenes.
    pub(crate) async fn connection(&self) -> MultiplexedConnection {
        connect(&self.url).await.unwrap()
    }
}

/// The shared server. Only what one prefix is about may be done to it.
pub(crate) async fn redis() -> TestRedis {
    TestRedis::at(SERVER.get_or_init(async || start(|request| request).await).await)
}

/// A server for one test, which may flush, stop and start it; what it has confirmed survives that.
pub(crate) struct OwnRedis {
    pub(crate) redis: TestRedis,
    server: Server,
}

impl OwnRedis {
    /// The server's address as another container sees it; its port is 6379.
    pub(crate) async fn inner_address(&self) -> String {
        containers::inner_address(&self.server).await
    }

    /// Stops the server in good order and starts it again on its data.
    pub(crate) async fn restart(&self) {
        self.server.container.stop().await.unwrap();
        self.server.container.start().await.unwrap();
        ready(&self.server).await;
    }
}

/// Starts a server for one test.
pub(crate) async fn own_redis() -> OwnRedis {
    // A port that is the same after a restart: one that was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let server = start(move |request| {
        request.with_mapped_port(port, 6379.tcp()).with_cmd(["redis-server", "--appendonly", "yes"])
    })
    .await;
    OwnRedis { redis: TestRedis::at(&server), server }
}

async fn start(
    options: impl FnOnce(ContainerRequest<GenericImage>) -> ContainerRequest<GenericImage> + Send + 'static,
) -> Server {
    let server = containers::start("FENCEROW_REDIS_IMAGE", "redis:8", 6379, options).await;
    ready(&server).await;
    server
}

async fn ready(server: &Server) {
    let url = format!("redis://{}:{}/", server.host, server.port);
    eventually("Redis answers", async || {
        let mut connection = connect(&url).await.ok()?;
        redis::cmd("PING").query_async::<String>(&mut connection).await.ok()
    })
    .await;
}

async fn connect(url: &str) -> redis::RedisResult<MultiplexedConnection> {
    Client::open(url)?.get_multiplexed_async_connection().await
}

/// In a child: starts a server and says which container that is.
pub(crate) async fn run_a_server() {
    let own = own_redis().await;
    child::say(own.server.container.id());
    child::hear().await;
}

#[tokio::test]
async fn killing_the_test_process_removes_its_containers() {
    let mut tests = Child::start("redis", []);
    let id = tests.hear().await;
    let exists = async || {
        let mut inspect = Command::new("docker");
        inspect.args(["inspect", &id]).stdout(Stdio::null()).stderr(Stdio::null());
        inspect.status().await.unwrap().success()
    };
    assert!(exists().await);
    tests.kill().await;
    eventually("the container is removed", async || (!exists().await).then_some(())).await;
}

#[tokio::test]
async fn a_restarted_server_keeps_its_data_and_is_another_run() {
    let own = own_redis().await;
    let mut connection = own.redis.connection().await;
    let run_id = async |connection: &mut MultiplexedConnection| {
        let info: String = redis::cmd("INFO").arg("server").query_async(connection).await.unwrap();
        info.lines().find_map(|line| line.strip_prefix("run_id:").map(str::to_owned)).unwrap()
    };
    let before = run_id(&mut connection).await;
    let _: () = redis::cmd("SET").arg("kept").arg("yes").query_async(&mut connection).await.unwrap();

    own.restart().await;
    let mut connection = own.redis.connection().await;
    let kept: String = redis::cmd("GET").arg("kept").query_async(&mut connection).await.unwrap();
    assert_eq!(kept, "yes");
    assert_ne!(run_id(&mut connection).await, before);
}
