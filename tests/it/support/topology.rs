//! Redis on several servers: a primary with replicas under three sentinels, and a cluster of six.

use fencerow::lease::RedisLocks;
use futures_util::future::join_all;
use redis::{Client, FromRedisValue};
use testcontainers::ImageExt as _;
use tokio::process::Command;
use tokio::sync::OnceCell;

use super::containers::{self, Server};
use super::eventually;
use super::redis::new_prefix;

/// What the sentinels call the primary.
const NAME: &str = "mymaster";

/// A server at an address that is the same for tests and for other servers.
pub(crate) struct Node {
    /// `host:port`.
    pub(crate) address: String,
    host: String,
    pub(crate) server: Server,
}

impl Node {
    async fn start(command: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let command: Vec<String> = command.into_iter().map(Into::into).collect();
        let server =
            containers::start("FENCEROW_REDIS_IMAGE", "redis:8", 6379, |request| request.with_cmd(command))
                .await;
        let host = containers::inner_address(&server).await;
        let node = Self { address: format!("{host}:6379"), host, server };
        eventually("Redis answers", async || node.try_ask::<String>(&["PING"]).await.ok()).await;
        node
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}/", self.address)
    }

    pub(crate) async fn ask<T: FromRedisValue>(&self, command: &[&str]) -> T {
        self.try_ask(command).await.unwrap()
    }

    pub(crate) async fn try_ask<T: FromRedisValue>(&self, command: &[&str]) -> redis::RedisResult<T> {
        let mut connection = Client::open(self.url())?.get_multiplexed_async_connection().await?;
        redis::cmd(command[0]).arg(&command[1..]).query_async(&mut connection).await
    }
}

/// A primary and its replica, and the three sentinels that watch them: for one test.
pub(crate) struct Sentinels {
    pub(crate) primary: Node,
    pub(crate) replica: Node,
    pub(crate) sentinels: Vec<Node>,
    pub(crate) prefix: String,
}

/// Starts two servers for one test, the second a replica of the first.
pub(crate) async fn primary_and_replica() -> (Node, Node) {
    let server = || Node::start(["redis-server"]);
    let (primary, replica) = tokio::join!(server(), server());
    let () = replica.ask(&["REPLICAOF", &primary.host, "6379"]).await;
    eventually("the replica is in sync", async || {
        let info: String = replica.ask(&["INFO", "replication"]).await;
        info.contains("master_link_status:up").then_some(())
    })
    .await;
    (primary, replica)
}

/// Starts servers under sentinels that give a primary up after a second.
pub(crate) async fn sentinels() -> Sentinels {
    let (primary, replica) = primary_and_replica().await;
    let script = format!(
        "printf '%s\n' 'port 6379' 'protected-mode no' 'sentinel monitor {NAME} {} 6379 2' \
             'sentinel down-after-milliseconds {NAME} 1000' 'sentinel failover-timeout {NAME} 3000' \
             > /tmp/sentinel.conf && exec redis-server /tmp/sentinel.conf --sentinel",
        primary.host
    );
    let sentinels = join_all((0..3).map(|_| Node::start(["sh", "-c", &script]))).await;
    for sentinel in &sentinels {
        eventually("the sentinels know each other and the replica", async || {
            let facts: std::collections::HashMap<String, String> =
                sentinel.ask(&["SENTINEL", "MASTER", NAME]).await;
            let known = |what| facts.get(what).map(String::as_str);
            (known("num-other-sentinels") == Some("2") && known("num-slaves") == Some("1")).then_some(())
        })
        .await;
    }
    Sentinels { primary, replica, sentinels, prefix: new_prefix() }
}

impl Sentinels {
    /// The lock service on whatever is the primary, with `user` (`name:password@`) or without.
    pub(crate) async fn locks(&self, user: &str) -> RedisLocks {
        let urls: Vec<_> = self.sentinels.iter().map(Node::url).collect();
        let primary = format!("redis://{user}{NAME}/");
        let locks = RedisLocks::sentinel(urls.iter().map(String::as_str), &primary).await.unwrap();
        locks.with_prefix(&self.prefix).unwrap()
    }

    /// Waits until the sentinels have promoted the replica.
    pub(crate) async fn promoted(&self) {
        eventually("the replica is promoted", async || {
            // Sentinel cuts all connections when it promotes a server.
            let info: String = self.replica.try_ask(&["INFO", "replication"]).await.ok()?;
            info.contains("role:master").then_some(())
        })
        .await;
    }
}

static CLUSTER: OnceCell<Vec<Node>> = OnceCell::const_new();

/// A cluster of three primaries with a replica each, shared by all tests, and a prefix of one's own.
pub(crate) struct TestCluster {
    pub(crate) nodes: &'static [Node],
    pub(crate) prefix: String,
}

/// The shared cluster. Only what one prefix is about may be done to it.
pub(crate) async fn cluster() -> TestCluster {
    let nodes = CLUSTER.get_or_init(start_cluster).await;
    TestCluster { nodes, prefix: new_prefix() }
}

async fn start_cluster() -> Vec<Node> {
    let start =
        || Node::start(["redis-server", "--cluster-enabled", "yes", "--cluster-node-timeout", "5000"]);
    let nodes = join_all((0..6).map(|_| start())).await;
    let mut create = Command::new("docker");
    create.args(["exec", nodes[0].server.container.id(), "redis-cli", "--cluster", "create"]);
    create.args(nodes.iter().map(|node| &node.address));
    create.args(["--cluster-replicas", "1", "--cluster-yes"]);
    let output = create.output().await.unwrap();
    assert!(output.status.success(), "{output:?}");
    for node in &nodes {
        eventually("the cluster is whole", async || {
            let info: String = node.ask(&["CLUSTER", "INFO"]).await;
            info.contains("cluster_state:ok").then_some(())
        })
        .await;
    }
    nodes
}

impl TestCluster {
    /// The lock service on it, with keys of its own.
    pub(crate) async fn locks(&self) -> RedisLocks {
        let urls: Vec<_> = self.nodes[..2].iter().map(Node::url).collect();
        let locks = RedisLocks::cluster(urls.iter().map(String::as_str)).await.unwrap();
        locks.with_prefix(&self.prefix).unwrap()
    }

    /// The three that own slots.
    pub(crate) async fn primaries(&self) -> Vec<&'static Node> {
        let roles =
            join_all(self.nodes.iter().map(|node| node.ask::<String>(&["INFO", "replication"]))).await;
        let is_primary = |role: &String| role.contains("role:master");
        self.nodes.iter().zip(&roles).filter(|(_, role)| is_primary(role)).map(|(node, _)| node).collect()
    }

    /// Who answers for a key, and who else could.
    pub(crate) async fn owner_and_another(&self, key: &str) -> (&'static Node, &'static Node) {
        let (mut owner, mut another) = (None, None);
        for node in self.primaries().await {
            match node.try_ask::<Option<String>>(&["GET", key]).await {
                Ok(_) => owner = Some(node),
                Err(_) => another = Some(node),
            }
        }
        (owner.unwrap(), another.unwrap())
    }
}
