//! Redis behind TLS.

use std::time::Duration;

use fencerow::CounterOnly;
use fencerow::lease::{LeaseError, Leases, RedisLocks};
use testcontainers::ImageExt as _;

use crate::support::child::{self, Child};
use crate::support::{containers, eventually};

/// In a child, whose environment says which authority it trusts: acquires from the server that it
/// hears of, and says the token or the error.
pub(crate) async fn tls() {
    let url = child::hear().await;
    let outcome = async {
        let leases = Leases::new(RedisLocks::connect(&url).await?, CounterOnly);
        let lease = leases.acquire("a", Duration::from_secs(60)).await?;
        let token = lease.token();
        lease.release().await?;
        Ok::<_, LeaseError>(token)
    };
    match outcome.await {
        Ok(token) => child::say(format!("token {token}")),
        Err(error) => child::say(format!("{error:?}").replace('\n', " ")),
    }
    child::hear().await;
}

#[tokio::test]
async fn a_server_whose_certificate_is_trusted_is_talked_to_over_tls_and_no_other() {
    let certificates = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let authority = certificates.cert.pem();
    let key = certificates.signing_key.serialize_pem();
    let command = "redis-server --port 0 --tls-port 6379 --tls-auth-clients no \
                   --tls-cert-file /cert.pem --tls-key-file /key.pem --tls-ca-cert-file /cert.pem \
                   --user worker on >hush-hush ~* +@all";
    let cert = authority.clone().into_bytes();
    let server = containers::start("FENCEROW_REDIS_IMAGE", "redis:8", 6379, move |request| {
        request
            .with_copy_to("/cert.pem", cert)
            .with_copy_to("/key.pem", key.into_bytes())
            .with_cmd(command.split_whitespace())
    })
    .await;
    let trusted = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(trusted.path(), authority).unwrap();
    let url = |scheme| format!("{scheme}://worker:hush-hush@{}:{}/", server.host, server.port);
    let answer = async |authority: &str, scheme| {
        let mut child = Child::start("tls", [("SSL_CERT_FILE", authority)]);
        child.tell(url(scheme)).await;
        child.hear().await
    };

    let token = eventually("the server is up, and lets us in", async || {
        let said = answer(trusted.path().to_str().unwrap(), "rediss").await;
        assert!(!said.contains("hush"), "{said}");
        said.strip_prefix("token ").map(str::to_owned)
    })
    .await;
    assert_eq!(token, "1");
    // It is up: what follows is not for want of a server.
    for (authority, scheme) in [("/dev/null", "rediss"), (trusted.path().to_str().unwrap(), "redis")] {
        let said = answer(authority, scheme).await;
        assert!(said.starts_with("Unavailable") && !said.contains("hush"), "{said}");
    }
}
