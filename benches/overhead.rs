//! What the fence and the lease cost, each against its plain counterpart in the same run.
//!
//! The variants take turns, transaction by transaction, and medians are compared, so that what
//! else the machine does falls on all of them. Only the ratios mean anything elsewhere.
//!
//! It starts its own servers, as the tests do: `cargo bench --bench overhead`.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on has failed")]

#[path = "../tests/it/support/mod.rs"]
#[allow(dead_code, unused_imports, reason = "the tests use more of it")]
mod support;

use std::time::{Duration, Instant};

use fencerow::fence::{Claim, Fence, Many, Table};
use fencerow::lease::Leases;
use fencerow::{CounterOnly, FencingToken, Grant, OwnerId, Resource};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

/// How often each variant takes its turn.
const ROUNDS: usize = 2_000;
/// How many of the first turns are not counted.
const WARM_UP: usize = 100;

const UPDATE: &str = "update account set balance = balance + 1 where id = 1";
const ACCOUNT: Table<Many> = Table::many("account");

#[tokio::main]
async fn main() {
    let database = support::postgres().await;
    let pool = PgPoolOptions::new().max_connections(1).connect(&database.url).await.unwrap();
    let fence = Fence::new(pool.clone());
    fence.migrate().await.unwrap();
    sqlx::raw_sql(
        "create table account (id bigint primary key, balance bigint not null, last_token bigint);
         insert into account (id, balance) values (1, 0);",
    )
    .execute(&pool)
    .await
    .unwrap();
    // Round trips and work on the server are compared, not the disk.
    sqlx::query("set synchronous_commit = off").execute(&pool).await.unwrap();
    transactions(&pool, &fence).await;
    leases().await;
}

fn grant(token: usize) -> Grant {
    let token = FencingToken::new(i64::try_from(token).unwrap()).unwrap();
    Grant::new(Resource::new("bench").unwrap(), token, OwnerId::random(), Duration::from_secs(60))
}

async fn transactions(pool: &PgPool, fence: &Fence<sqlx::Postgres>) {
    let mut times = Times::new([
        "begin, update, commit",
        "under one lease",
        "  and by the repository",
        "  and with a key",
        "under a new lease each",
    ]);
    for round in 0..ROUNDS {
        times
            .turn(0, async || {
                let mut tx = pool.begin().await.unwrap();
                sqlx::query(UPDATE).execute(&mut *tx).await.unwrap();
                tx.commit().await.unwrap();
            })
            .await;
        let fresh = grant(round + 1);
        times
            .turn(4, async || {
                let mut tx = fence.begin(&fresh).await.unwrap();
                sqlx::query(UPDATE).execute(&mut *tx).await.unwrap();
                tx.commit().await.unwrap();
            })
            .await;
        // From here on the fence stands at this grant.
        times
            .turn(1, async || {
                let mut tx = fence.begin(&fresh).await.unwrap();
                sqlx::query(UPDATE).execute(&mut *tx).await.unwrap();
                tx.commit().await.unwrap();
            })
            .await;
        times
            .turn(2, async || {
                let mut tx = fence.begin(&fresh).await.unwrap();
                let _ = tx.update(&ACCOUNT).key("id", 1_i64).add("balance", 1_i64).await.unwrap();
                tx.commit().await.unwrap();
            })
            .await;
        times
            .turn(3, async || {
                let mut tx = fence.begin(&fresh).await.unwrap();
                if let Claim::Fresh(claim) = tx.claim(format!("key-{round}"), &round).await.unwrap() {
                    sqlx::query(UPDATE).execute(&mut *tx).await.unwrap();
                    claim.record(&mut tx, ()).await.unwrap();
                }
                tx.commit().await.unwrap();
            })
            .await;
    }
    times.print("a transaction on Postgres");
}

async fn leases() {
    let server = support::redis().await;
    let mut connection = server.connection().await;
    let leases = Leases::new(server.locks().await, CounterOnly);
    let release = redis::Script::new(
        "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0",
    );
    let key = format!("{}bare", server.prefix);
    let mut times = Times::new(["SET NX PX, compare and delete", "acquire with a token, release"]);
    for _ in 0..ROUNDS {
        times
            .turn(0, async || {
                let owner = OwnerId::random().to_string();
                let mut set = redis::cmd("SET");
                set.arg(&key).arg(&owner).arg("NX").arg("PX").arg(10_000);
                let () = set.query_async(&mut connection).await.unwrap();
                let () = release.key(&key).arg(&owner).invoke_async(&mut connection).await.unwrap();
            })
            .await;
        times
            .turn(1, async || {
                let lease = leases.acquire("bench", Duration::from_secs(10)).await.unwrap();
                lease.release().await.unwrap();
            })
            .await;
    }
    times.print("a lease on Redis");
}

/// How long each turn of each variant took.
struct Times<const N: usize> {
    names: [&'static str; N],
    turns: [Vec<Duration>; N],
}

impl<const N: usize> Times<N> {
    fn new(names: [&'static str; N]) -> Self {
        Self { names, turns: [const { Vec::new() }; N] }
    }

    async fn turn(&mut self, variant: usize, work: impl AsyncFnOnce()) {
        let began = Instant::now();
        work().await;
        self.turns[variant].push(began.elapsed());
    }

    /// The medians, and their ratios to the first.
    fn print(mut self, what: &str) {
        println!("\n{what}, median of {}", ROUNDS - WARM_UP);
        let medians = self.turns.each_mut().map(|turns| {
            let counted = &mut turns[WARM_UP..];
            counted.sort_unstable();
            counted[counted.len() / 2].as_secs_f64()
        });
        for (name, median) in self.names.iter().zip(medians) {
            println!("  {name:<32} {:>7.0} µs  {:>5.2}", median * 1e6, median / medians[0]);
        }
    }
}
