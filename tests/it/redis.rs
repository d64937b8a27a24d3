//! What only Redis can do to a lease.

use std::time::Duration;

use fencerow::lease::{
    Attempt, LeaseError, Leases, LockService as _, Lost, Origin, RedisLocks, Request, Standing,
};
use fencerow::{FencingToken, Group, Invalid, OwnerId, Resource};
use redis::aio::MultiplexedConnection;

use crate::support::proxy::Proxy;
use crate::support::{TestRedis, eventually, own_redis, redis};

const TTL: Duration = Duration::from_secs(60);

fn request(name: &str) -> Request {
    let resource = Resource::new(name).unwrap();
    Request::new(resource, OwnerId::random(), TTL.try_into().unwrap(), Origin::here("test"))
}

async fn ask<T: redis::FromRedisValue>(connection: &mut MultiplexedConnection, command: &[&str]) -> T {
    let mut built = redis::cmd(command[0]);
    built.arg(&command[1..]).query_async(connection).await.unwrap()
}

/// The counter as the server stores it.
async fn counter(connection: &mut MultiplexedConnection, redis: &TestRedis, name: &str) -> Option<String> {
    ask(connection, &["GET", &format!("{}{{{name}}}:token", redis.prefix)]).await
}

/// The run that the server is in, as a counter's companion says it.
async fn run(connection: &mut MultiplexedConnection) -> String {
    let mut field = async |section: &str, name: &str| {
        let info: String = ask(connection, &["INFO", section]).await;
        info.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned()
    };
    let run_id = field("server", "run_id:").await;
    format!("{run_id}:{}", field("replication", "master_replid:").await)
}

/// A counter that this run of the server remembers.
async fn remember(connection: &mut MultiplexedConnection, redis: &TestRedis, name: &str, value: &str) {
    let key = format!("{}{{{name}}}", redis.prefix);
    let run = run(connection).await;
    let _: () = ask(connection, &["MSET", &format!("{key}:token"), value, &format!("{key}:run"), &run]).await;
}

fn granted(attempt: Attempt) -> FencingToken {
    match attempt {
        Attempt::Granted(token) => token,
        other => panic!("not granted: {other:?}"),
    }
}

/// A04
#[tokio::test]
async fn tokens_go_on_one_by_one_above_2_to_the_53() {
    let redis = redis().await;
    let (locks, mut connection) = (redis.locks().await, redis.connection().await);
    remember(&mut connection, &redis, "a", "9007199254740991").await;
    for expected in [9_007_199_254_740_992, 9_007_199_254_740_993, 9_007_199_254_740_994] {
        let request = request("a");
        let token = granted(locks.acquire(&request).await.unwrap());
        assert_eq!(token.get(), expected);
        assert_eq!(counter(&mut connection, &redis, "a").await, Some(expected.to_string()));
        assert_eq!(locks.release(&request.resource, request.owner).await.unwrap(), Standing::Ours);
    }
}

#[tokio::test]
async fn a_counter_is_seeded_by_its_digits_and_never_lowered() {
    let redis = redis().await;
    let (locks, mut connection) = (redis.locks().await, redis.connection().await);
    // Each pair is one number as a double.
    for (stands, seeded, then) in [
        ("9007199254740993", "9007199254740992", "9007199254740993"),
        ("9007199254740992", "9007199254740993", "9007199254740993"),
        ("9", "10", "10"),
        ("10", "9", "10"),
    ] {
        let request = request(&format!("{stands}/{seeded}"));
        let key = format!("{}{{{stands}/{seeded}}}:token", redis.prefix);
        let _: () = ask(&mut connection, &["SET", &key, stands]).await;
        let counter = stands.parse().unwrap();
        assert_eq!(locks.acquire(&request).await.unwrap(), Attempt::Unnumbered { counter: Some(counter) });
        let token = seeded.parse().unwrap();
        assert_eq!(locks.seed(&request.resource, request.owner, token).await.unwrap(), Standing::Ours);
        assert_eq!(ask::<String>(&mut connection, &["GET", &key]).await, then);
        assert_eq!(granted(locks.acquire(&request).await.unwrap()), token);
        assert!(ask::<i64>(&mut connection, &["PTTL", &key.replace(":token", ":lock")]).await > 0);
    }
}

#[tokio::test]
async fn a_counter_that_cannot_count_is_refused_and_leaves_no_lock() {
    let redis = redis().await;
    let (locks, mut connection) = (redis.locks().await, redis.connection().await);
    for value in [
        "9223372036854775807",
        "9223372036854775808",
        "99999999999999999999",
        "0",
        "-1",
        "1.5",
        "x",
        "",
        "01",
        " 1",
    ] {
        remember(&mut connection, &redis, "a", value).await;
        let error = locks.acquire(&request("a")).await.unwrap_err();
        assert!(matches!(error, LeaseError::Refused { .. }), "{value:?}: {error:?}");
        assert_eq!(error.group(), Group::Misuse);
        let lock: bool = ask(&mut connection, &["EXISTS", &format!("{}{{a}}:lock", redis.prefix)]).await;
        assert!(!lock, "{value:?} left a lock");
        assert_eq!(counter(&mut connection, &redis, "a").await.as_deref(), Some(value));
    }
}

/// A24
#[tokio::test]
async fn a_key_of_another_type_is_refused_and_left_alone() {
    let redis = redis().await;
    let (locks, mut connection) = (redis.locks().await, redis.connection().await);
    for suffix in ["lock", "token", "run"] {
        let request = request(suffix);
        let key = |suffix: &str| format!("{}{{{}}}:{suffix}", redis.prefix, request.resource);
        remember(&mut connection, &redis, suffix, "5").await;
        let _: () = ask(&mut connection, &["DEL", &key(suffix)]).await;
        let _: () = ask(&mut connection, &["RPUSH", &key(suffix), "somebody's"]).await;
        let error = locks.acquire(&request).await.unwrap_err();
        assert!(matches!(error, LeaseError::Refused { .. }), "{suffix}: {error:?}");
        assert_eq!(ask::<i64>(&mut connection, &["LLEN", &key(suffix)]).await, 1);
        if suffix != "lock" {
            assert!(!ask::<bool>(&mut connection, &["EXISTS", &key("lock")]).await, "{suffix} left a lock");
        }
    }
}

/// A22
#[tokio::test]
async fn emptying_the_script_cache_between_all_calls_goes_unnoticed() {
    // A server of its own: elsewhere a lost answer may not be that the script is unknown.
    let own = own_redis().await;
    let (locks, mut connection) = (own.redis.locks().await, own.redis.connection().await);
    let mut flush = async || ask::<()>(&mut connection, &["SCRIPT", "FLUSH"]).await;
    let mut last = None;
    for _ in 0..3 {
        let request = request("a");
        let (resource, owner) = (&request.resource, request.owner);
        flush().await;
        match locks.acquire(&request).await.unwrap() {
            Attempt::Unnumbered { counter: None } if last.is_none() => {
                flush().await;
                assert_eq!(locks.seed(resource, owner, FencingToken::FIRST).await.unwrap(), Standing::Ours);
                last = Some(1);
            }
            attempt => {
                let token = granted(attempt).get();
                assert_eq!(Some(token), last.map(|last| last + 1));
                last = Some(token);
            }
        }
        flush().await;
        assert_eq!(locks.holder(resource).await.unwrap().map(|holder| holder.owner), Some(owner));
        flush().await;
        assert_eq!(locks.renew(resource, owner, request.ttl).await.unwrap(), Standing::Ours);
        flush().await;
        assert_eq!(locks.release(resource, owner).await.unwrap(), Standing::Ours);
    }
    let request = request("a");
    locks.acquire(&request).await.unwrap();
    flush().await;
    assert_eq!(locks.disown(&request.resource, request.owner).await.unwrap(), Standing::Ours);
}

/// A22
#[tokio::test]
async fn a_keep_alive_does_not_notice_an_emptied_script_cache() {
    // A server of its own: elsewhere a lost answer may not be that the script is unknown.
    let own = own_redis().await;
    let (locks, mut connection) = (own.redis.locks().await, own.redis.connection().await);
    let lease = Leases::without_fence(locks.clone()).acquire("a", Duration::from_secs(3)).await.unwrap();
    for _ in 0..2 {
        let _: () = ask(&mut connection, &["SCRIPT", "FLUSH"]).await;
        let mut last = Duration::MAX;
        eventually("it is renewed", async || {
            let left = locks.holder(lease.resource()).await.unwrap().expect("it ran out").remaining.unwrap();
            let renewed = left > last;
            last = left;
            renewed.then_some(())
        })
        .await;
    }
    assert!(!lease.cancellation().is_cancelled());
    lease.release().await.unwrap();
}

/// A22
#[tokio::test]
async fn a_restarted_server_has_its_counters_numbered_anew() {
    let own = own_redis().await;
    let leases = Leases::without_fence(own.redis.locks().await);
    let lease = leases.acquire("a", TTL).await.unwrap();
    let next = leases.acquire("b", TTL).await.unwrap();
    assert_eq!((lease.token(), next.token()), (FencingToken::FIRST, FencingToken::FIRST));
    next.release().await.unwrap();
    let next = leases.acquire("b", TTL).await.unwrap();
    assert_eq!(next.token().get(), 2);
    next.release().await.unwrap();

    own.restart().await;
    // What was held is held on: the server kept it. Its counter is no longer trusted.
    assert!(leases.try_acquire("a", TTL).await.unwrap().is_none());
    lease.release().await.unwrap();
    for name in ["a", "b"] {
        let token = leases.acquire(name, TTL).await.unwrap().token();
        assert_eq!((token.epoch(), token.sequence()), (1, 0));
    }
    let locks = own.redis.locks().await;
    let request = request("b");
    let renumbered = eventually("b is free again", async || match locks.acquire(&request).await.unwrap() {
        Attempt::Held { .. } => None,
        attempt => Some(granted(attempt)),
    });
    let token = renumbered.await;
    assert_eq!((token.epoch(), token.sequence()), (1, 1));
}

#[tokio::test]
async fn a_flushed_server_grants_without_a_number() {
    let own = own_redis().await;
    let (locks, mut connection) = (own.redis.locks().await, own.redis.connection().await);
    let leases = Leases::without_fence(locks.clone());
    let lease = leases.acquire("a", TTL).await.unwrap();
    let _: () = ask(&mut connection, &["FLUSHALL"]).await;
    assert!(matches!(lease.release().await, Err(LeaseError::Lost { reason: Lost::Taken, .. })));
    assert_eq!(locks.acquire(&request("a")).await.unwrap(), Attempt::Unnumbered { counter: None });

    // The counter alone, and its companion alone.
    for (name, forgotten) in [("b", "token"), ("c", "run")] {
        leases.acquire(name, TTL).await.unwrap().release().await.unwrap();
        let _: () =
            ask(&mut connection, &["DEL", &format!("{}{{{name}}}:{forgotten}", own.redis.prefix)]).await;
        let counter = (forgotten == "run").then_some(FencingToken::FIRST);
        assert_eq!(locks.acquire(&request(name)).await.unwrap(), Attempt::Unnumbered { counter });
    }
}

#[tokio::test]
async fn a_server_that_cannot_write_now_is_unavailable_and_not_to_blame() {
    let own = own_redis().await;
    let (locks, mut connection) = (own.redis.locks().await, own.redis.connection().await);
    Leases::without_fence(locks.clone()).acquire("a", TTL).await.unwrap().release().await.unwrap();
    let mut unavailable = async |set: &[&str], unset: &[&str]| {
        let _: () = ask(&mut connection, set).await;
        let error = locks.acquire(&request("a")).await.unwrap_err();
        assert!(matches!(error, LeaseError::Unavailable(_)), "{set:?}: {error:?}");
        assert_eq!(error.group(), Group::Unavailable);
        let _: () = ask(&mut connection, unset).await;
        let lock: bool = ask(&mut connection, &["EXISTS", &format!("{}{{a}}:lock", own.redis.prefix)]).await;
        assert!(!lock, "{set:?} left a lock");
    };
    unavailable(&["CONFIG", "SET", "maxmemory", "1"], &["CONFIG", "SET", "maxmemory", "0"]).await;
    unavailable(&["REPLICAOF", "127.0.0.1", "1"], &["REPLICAOF", "NO", "ONE"]).await;
    unavailable(
        &["CONFIG", "SET", "min-replicas-to-write", "1"],
        &["CONFIG", "SET", "min-replicas-to-write", "0"],
    )
    .await;
}

#[tokio::test]
async fn keys_carry_the_prefix_and_one_hash_tag() {
    let redis = redis().await;
    let (locks, mut connection) = (redis.locks().await, redis.connection().await);
    let lease = Leases::without_fence(locks).acquire("{tenant}/ 42 }{", TTL).await.unwrap();
    let mut keys: Vec<String> = ask(&mut connection, &["KEYS", &format!("{}*", redis.prefix)]).await;
    keys.sort();
    let tag = format!("{}{{%7Btenant%7D/%2042%20%7D%7B}}", redis.prefix);
    assert_eq!(keys, ["lock", "run", "token"].map(|suffix| format!("{tag}:{suffix}")));
    lease.release().await.unwrap();
}

#[tokio::test]
async fn an_acquisition_whose_answer_was_lost_gets_the_same_token_and_counts_once() {
    let redis = redis().await;
    let proxy = Proxy::to(redis.address()).await;
    let (leases, mut connection) =
        (Leases::without_fence(redis.locks_at(proxy.address()).await), redis.connection().await);
    leases.acquire("a", TTL).await.unwrap().release().await.unwrap();

    proxy.lose_replies();
    let lock = format!("{}{{a}}:lock", redis.prefix);
    let executed = async {
        eventually("the script runs", async || {
            ask::<bool>(&mut connection, &["EXISTS", &lock]).await.then_some(())
        })
        .await;
        proxy.pass();
    };
    let (lease, ()) = tokio::join!(leases.acquire("a", TTL), executed);
    assert_eq!(lease.unwrap().token().get(), 2);
    assert_eq!(counter(&mut connection, &redis, "a").await.as_deref(), Some("2"));
}

#[tokio::test]
async fn a_release_whose_answer_was_lost_is_a_release() {
    let redis = redis().await;
    let proxy = Proxy::to(redis.address()).await;
    let (leases, mut connection) =
        (Leases::without_fence(redis.locks_at(proxy.address()).await), redis.connection().await);
    let lease = leases.acquire("a", TTL).await.unwrap();

    proxy.lose_replies();
    let lock = format!("{}{{a}}:lock", redis.prefix);
    let executed = async {
        let free = async || (!ask::<bool>(&mut connection, &["EXISTS", &lock]).await).then_some(());
        eventually("the script runs", free).await;
        proxy.pass();
    };
    let (released, ()) = tokio::join!(lease.release(), executed);
    released.unwrap();
}

#[tokio::test]
async fn a_silent_server_is_connected_to_anew() {
    let redis = redis().await;
    let mut proxy = Proxy::to(redis.address()).await;
    let leases = Leases::without_fence(redis.locks_at(proxy.address()).await);
    leases.acquire("a", TTL).await.unwrap().release().await.unwrap();
    proxy.strand();
    let lease = leases.acquire("a", TTL).await.unwrap();
    assert_eq!(lease.token().get(), 2);

    // Where requests are given up before their own limits, the next one finds it silent.
    let kept = leases.acquire("b", Duration::from_secs(3)).await.unwrap();
    proxy.strand();
    let near = redis.locks().await;
    let mut last = Duration::MAX;
    eventually("it is renewed", async || {
        let holder = near.holder(kept.resource()).await.unwrap().expect("it ran out");
        let renewed = holder.remaining > Some(last);
        last = holder.remaining.unwrap();
        renewed.then_some(())
    })
    .await;
    assert!(!kept.cancellation().is_cancelled());
    proxy.strand();
    let lease = leases.acquire("c", Duration::from_secs(1)).await.unwrap();
    lease.release().await.unwrap();
}

/// A06
#[tokio::test]
async fn a_holder_that_was_cut_off_renews_nothing_of_its_successor() {
    let redis = redis().await;
    let mut proxy = Proxy::to(redis.address()).await;
    let far = Leases::without_fence(redis.locks_at(proxy.address()).await);
    let near = Leases::without_fence(redis.locks().await);
    let mut connection = redis.connection().await;
    let lock = format!("{}{{a}}:lock", redis.prefix);

    let cut_off = far.acquire("a", Duration::from_secs(1)).wait(TTL).await.unwrap();
    let owner = cut_off.owner();
    proxy.refuse().await;
    let successor = near.acquire("a", TTL).without_keep_alive().wait(TTL).await.unwrap();
    assert!(successor.token() > cut_off.token());
    let before: i64 = ask(&mut connection, &["PTTL", &lock]).await;
    proxy.accept().await;
    assert_eq!(cut_off.lost().await, Lost::Expired);
    // A renewal of the old owner's that was under way all the time.
    let (resource, ttl) = (Resource::new("a").unwrap(), (TTL * 2).try_into().unwrap());
    let late = redis.locks_at(proxy.address()).await.renew(&resource, owner, ttl).await.unwrap();
    assert_eq!(late, Standing::NotOurs);
    assert!(matches!(cut_off.release().await, Err(LeaseError::Lost { .. })));
    assert!(ask::<i64>(&mut connection, &["PTTL", &lock]).await <= before);
    successor.release().await.unwrap();
}

/// A14
#[tokio::test]
async fn an_attempt_is_one_request() {
    let redis = redis().await;
    let proxy = Proxy::to(redis.address()).await;
    let leases = Leases::without_fence(redis.locks_at(proxy.address()).await);
    let holder = Leases::without_fence(redis.locks().await).acquire("a", TTL).await.unwrap();
    assert!(leases.try_acquire("a", TTL).await.unwrap().is_none());
    for attempts in [1, 3, 10] {
        let before = proxy.round_trips();
        let acquire = leases.acquire("a", TTL).attempts(attempts).retry_delay(Duration::from_millis(2));
        assert!(acquire.await.unwrap_err().is_contended());
        assert_eq!(proxy.round_trips() - before, attempts as usize);
    }
    holder.release().await.unwrap();
}

/// A01
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_thousand_releases_at_the_very_end_none_frees_the_successor() {
    let redis = redis().await;
    let locks = redis.locks().await;
    let mut keys = tokio::task::JoinSet::new();
    for key in 0..20_u64 {
        let (locks, leases) = (locks.clone(), Leases::without_fence(locks.clone()));
        keys.spawn(async move {
            let name = key.to_string();
            let ttl = Duration::from_millis(20);
            leases.acquire(&name, TTL).await.unwrap().release().await.unwrap();
            for round in 0..50_u64 {
                let resource = Resource::new(&name).unwrap();
                let late = Request::new(
                    resource.clone(),
                    OwnerId::random(),
                    ttl.try_into().unwrap(),
                    Origin::here("late"),
                );
                let old = granted(locks.acquire(&late).await.unwrap());
                let release = async {
                    // From two milliseconds before the end to two after it.
                    tokio::time::sleep(Duration::from_micros(18_000 + (round * 20 + key) * 4)).await;
                    locks.release(&late.resource, late.owner).await.unwrap();
                };
                let succeed = async { leases.acquire(&name, TTL).wait(TTL).await.unwrap() };
                let (successor, ()) = tokio::join!(succeed, release);
                assert!(successor.token() > old);
                let holder = locks.holder(&resource).await.unwrap();
                assert_eq!(holder.map(|holder| holder.owner), Some(successor.owner()), "round {round}");
                successor.release().await.unwrap();
            }
        });
    }
    while let Some(ended) = keys.join_next().await {
        ended.unwrap();
    }
}

/// A07
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_renewal_outlives_a_release() {
    let redis = redis().await;
    let leases = Leases::without_fence(redis.locks().await);
    let mut connection = redis.connection().await;
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    // Both connections have been opened.
    let before = tasks();
    let ttl = Duration::from_millis(300);
    let mut workers = tokio::task::JoinSet::new();
    for worker in 0..10 {
        let leases = leases.clone();
        workers.spawn(async move {
            for round in 0..500 {
                let name = format!("{worker}/{}", round % 5);
                // On a slow machine it may have run out before it could be handed out.
                let lease = leases.acquire(name, ttl).wait(TTL).await.unwrap();
                match round % 3 {
                    0 => drop(lease.release().await),
                    1 => drop(lease),
                    _ => {
                        let holder = tokio::spawn(async move {
                            let _lease = lease;
                            std::future::pending::<()>().await;
                        });
                        holder.abort();
                    }
                }
            }
        });
    }
    while let Some(ended) = workers.join_next().await {
        ended.unwrap();
    }
    // Renewals are sent by a lease's own task; when it has ended, none can come.
    eventually("all keep-alives end", async || (tasks() <= before).then_some(())).await;
    let locks: Vec<String> = ask(&mut connection, &["KEYS", &format!("{}*:lock", redis.prefix)]).await;
    assert!(locks.is_empty(), "{locks:?}");
}

#[tokio::test]
async fn a_url_that_leads_nowhere_is_told_from_one_that_is_none() {
    for url in ["", "localhost", "http://localhost/", "http://:secret@localhost/", "redis://"] {
        let error = RedisLocks::connect(url).await.unwrap_err();
        assert!(matches!(error, LeaseError::Invalid(Invalid::Option { .. })), "{url:?}: {error:?}");
        assert!(!format!("{error} {error:?}").contains("secret"));
    }
    let mut proxy = Proxy::to("127.0.0.1:1").await;
    let url = format!("redis://{}/", proxy.address());
    proxy.refuse().await;
    let error = RedisLocks::connect(&url).await.unwrap_err();
    assert!(matches!(error, LeaseError::Unavailable(_)), "{error:?}");
}

/// Each kind of step once, and the scripts by their text as well as by their hash.
async fn all_steps(locks: &RedisLocks) -> Result<(), LeaseError> {
    let first = request("a");
    let (resource, owner) = (&first.resource, first.owner);
    let token = FencingToken::FIRST;
    assert_eq!(locks.acquire(&first).await?, Attempt::Unnumbered { counter: None });
    assert_eq!(locks.seed(resource, owner, token).await?, Standing::Ours);
    assert_eq!(granted(locks.acquire(&first).await?), token);
    assert!(matches!(locks.acquire(&request("a")).await?, Attempt::Held { remaining: Some(_) }));
    assert_eq!(locks.holder(resource).await?.unwrap().owner, owner);
    assert_eq!(locks.renew(resource, owner, TTL.try_into().unwrap()).await?, Standing::Ours);
    assert_eq!(locks.release(resource, owner).await?, Standing::Ours);
    let second = request("a");
    assert!(granted(locks.acquire(&second).await?) > token);
    assert_eq!(locks.disown(resource, second.owner).await?, Standing::Ours);
    Ok(())
}

#[tokio::test]
async fn a_user_needs_the_rights_that_the_docs_list_and_no_others() {
    const RIGHTS: &str = include_str!("../../src/lease/redis/rights.md");
    let own = own_redis().await;
    let (redis, mut connection) = (&own.redis, own.redis.connection().await);
    let listed: Vec<_> = RIGHTS.split('`').skip(1).step_by(2).map(|name| format!("+{name}")).collect();
    for left_out in std::iter::once(None).chain((0..listed.len()).map(Some)) {
        let _: () = ask(&mut connection, &["FLUSHALL"]).await;
        let _: () = ask(&mut connection, &["SCRIPT", "FLUSH"]).await;
        let keys = format!("~{}*", redis.prefix);
        let mut user = vec!["ACL", "SETUSER", "worker", "reset", "on", ">hush-hush", &keys];
        user.extend(
            listed.iter().enumerate().filter(|(at, _)| Some(*at) != left_out).map(|(_, name)| &**name),
        );
        let _: () = ask(&mut connection, &user).await;
        let url = format!("redis://worker:hush-hush@{}/", redis.address());
        let locks = RedisLocks::connect(&url).await.unwrap().with_prefix(&redis.prefix).unwrap();
        let outcome = all_steps(&locks).await;
        match left_out {
            None => outcome.unwrap(),
            Some(at) => {
                let refused = matches!(outcome, Err(LeaseError::Refused { .. }));
                assert!(refused, "without {}: {outcome:?}", listed[at]);
            }
        }
    }
}

#[tokio::test]
async fn a_wrong_password_is_an_error_that_does_not_quote_it() {
    let redis = redis().await;
    let url = format!("redis://nobody:hush-hush@{}/", redis.address());
    let error = RedisLocks::connect(&url).await.unwrap_err();
    assert!(matches!(error, LeaseError::Unavailable(_)), "{error:?}");
    let mut texts = vec![format!("{error:?}"), error.to_string()];
    let mut source = std::error::Error::source(&error);
    while let Some(error) = source {
        texts.push(error.to_string());
        source = error.source();
    }
    assert!(texts.iter().all(|text| !text.contains("hush")), "{texts:?}");
}

#[tokio::test]
async fn urls_that_make_no_sense_are_refused_before_anybody_is_asked() {
    let (good, bad) = ("redis://127.0.0.1:1/", "http://user:hush-hush@127.0.0.1/");
    for refused in [
        RedisLocks::sentinel([], "redis://mymaster/").await,
        RedisLocks::sentinel([bad], "redis://mymaster/").await,
        RedisLocks::sentinel([good], bad).await,
        RedisLocks::sentinel([good], "unix:///mymaster").await,
        RedisLocks::cluster([]).await,
        RedisLocks::cluster([good, bad]).await,
        RedisLocks::cluster([good, "redis://user:hush-hush@127.0.0.1/"]).await,
    ] {
        let error = refused.unwrap_err();
        assert!(matches!(error, LeaseError::Invalid(_)), "{error:?}");
        assert!(!format!("{error:?} {error}").contains("hush"), "{error:?}");
    }
}
