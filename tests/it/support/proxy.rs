//! A bad network between a client and its server.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::BACKGROUND;

/// What happens to the bytes of one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// They arrive.
    Pass,
    /// They arrive this much later, in order.
    Delay(Duration),
    /// They wait until this changes.
    Hang,
    /// They are lost, without the sender being told. A connection that lost some ends when this
    /// changes: no network goes on in the middle of a stream.
    Lose,
}

#[derive(Debug, Clone, Copy)]
struct Ways {
    to_server: Way,
    to_client: Way,
}

/// Forwards to a server until told otherwise. It works on while the test's own runtime is busy,
/// and ends, with all its connections, when it is dropped.
pub(crate) struct Proxy {
    address: SocketAddr,
    upstream: Arc<str>,
    ways: watch::Sender<Ways>,
    /// What the next connection will listen to.
    next: Arc<Mutex<watch::Receiver<Ways>>>,
    /// The hands that nobody moves any more, of connections that were stranded.
    stranded: Vec<watch::Sender<Ways>>,
    turns: Arc<Turns>,
    /// Each change ends the connections there are, and so does dropping it.
    cuts: watch::Sender<()>,
    listener: Option<Listener>,
}

/// Counts how often the client spoke after the server had: the round trips, where there is one
/// connection and each waits for the other.
#[derive(Default)]
struct Turns {
    server_spoke: AtomicBool,
    count: AtomicUsize,
}

impl Turns {
    fn client_speaks(&self) {
        if self.server_spoke.swap(false, Ordering::SeqCst) {
            self.count.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn server_speaks(&self) {
        self.server_spoke.store(true, Ordering::SeqCst);
    }
}

/// A listener that is closed for certain when `gone` answers.
struct Listener {
    close: DropGuard,
    gone: oneshot::Receiver<()>,
}

impl Proxy {
    /// Listens in front of `upstream`, which is `host:port`.
    pub(crate) async fn to(upstream: &str) -> Self {
        let ways = watch::Sender::new(Ways { to_server: Way::Pass, to_client: Way::Pass });
        let mut proxy = Self {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            upstream: upstream.into(),
            next: Arc::new(Mutex::new(ways.subscribe())),
            ways,
            stranded: Vec::new(),
            turns: Arc::default(),
            cuts: watch::Sender::new(()),
            listener: None,
        };
        proxy.accept().await;
        proxy
    }

    /// Where clients connect to, `host:port`.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets what happens to the bytes of each direction from now on, in old and new connections.
    pub(crate) fn set(&self, to_server: Way, to_client: Way) {
        self.ways.send_replace(Ways { to_server, to_client });
    }

    /// Lets everything through again.
    pub(crate) fn pass(&self) {
        self.set(Way::Pass, Way::Pass);
    }

    /// Takes connections and bytes, and forwards nothing.
    pub(crate) fn hang(&self) {
        self.set(Way::Hang, Way::Hang);
    }

    /// Lets requests arrive and loses the answers.
    pub(crate) fn lose_replies(&self) {
        self.set(Way::Pass, Way::Lose);
    }

    /// Leaves the connections there are hanging for good; new ones are forwarded.
    pub(crate) fn strand(&mut self) {
        self.hang();
        let ways = watch::Sender::new(Ways { to_server: Way::Pass, to_client: Way::Pass });
        *self.next.lock().unwrap() = ways.subscribe();
        self.stranded.push(std::mem::replace(&mut self.ways, ways));
    }

    /// How many round trips there were so far, in all connections together.
    pub(crate) fn round_trips(&self) -> usize {
        self.turns.count.load(Ordering::SeqCst)
    }

    /// Ends all connections there are.
    pub(crate) fn cut(&self) {
        self.cuts.send_replace(());
    }

    /// Ends all connections, and has new ones refused by the operating system.
    pub(crate) async fn refuse(&mut self) {
        if let Some(listener) = self.listener.take() {
            drop(listener.close);
            let _ = listener.gone.await;
        }
        self.cut();
    }

    /// Takes connections again, at the same address.
    pub(crate) async fn accept(&mut self) {
        if self.listener.is_some() {
            return;
        }
        let address = self.address;
        let listener =
            BACKGROUND.spawn(async move { TcpListener::bind(address).await.unwrap() }).await.unwrap();
        self.address = listener.local_addr().unwrap();
        let closing = CancellationToken::new();
        let (closed, gone) = oneshot::channel();
        self.listener = Some(Listener { close: closing.clone().drop_guard(), gone });
        let (upstream, next, turns) = (self.upstream.clone(), self.next.clone(), self.turns.clone());
        let serve = accept_all(listener, upstream, next, turns, self.cuts.subscribe());
        BACKGROUND.spawn(async move {
            let _ = closing.run_until_cancelled(serve).await;
            let _ = closed.send(());
        });
    }
}

async fn accept_all(
    listener: TcpListener,
    upstream: Arc<str>,
    next: Arc<Mutex<watch::Receiver<Ways>>>,
    turns: Arc<Turns>,
    cuts: watch::Receiver<()>,
) {
    while let Ok((client, _)) = listener.accept().await {
        let (upstream, turns, mut cuts) = (upstream.clone(), turns.clone(), cuts.clone());
        let ways = next.lock().unwrap().clone();
        cuts.mark_unchanged();
        tokio::spawn(async move {
            tokio::select! {
                () = forward(client, &upstream, ways, &turns) => {}
                _ = cuts.changed() => {}
            }
        });
    }
}

async fn forward(client: TcpStream, upstream: &str, ways: watch::Receiver<Ways>, turns: &Turns) {
    let Ok(server) = TcpStream::connect(upstream).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // Either side closing ends both, once what was sent before has arrived.
    tokio::select! {
        () = one_way(from_client, to_server, ways.clone(), |ways| ways.to_server, || turns.client_speaks()) => {}
        () = one_way(from_server, to_client, ways, |ways| ways.to_client, || turns.server_speaks()) => {}
    }
}

async fn one_way(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut ways: watch::Receiver<Ways>,
    way: fn(&Ways) -> Way,
    speaks: impl Fn(),
) {
    let (queue, mut queued) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    let mut current = ways.clone();
    let read = async move {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(read @ 1..) = from.read(&mut buffer).await {
            speaks();
            let due = match way(&current.borrow_and_update()) {
                Way::Lose => None,
                Way::Delay(delay) => Some(Instant::now() + delay),
                Way::Pass | Way::Hang => Some(Instant::now()),
            };
            let Some(due) = due else {
                let _ = current.wait_for(|ways| way(ways) != Way::Lose).await;
                return;
            };
            let _ = queue.send((due, buffer[..read].to_vec()));
        }
    };
    let write = async move {
        while let Some((due, bytes)) = queued.recv().await {
            tokio::time::sleep_until(due).await;
            if ways.wait_for(|ways| way(ways) != Way::Hang).await.is_err()
                || to.write_all(&bytes).await.is_err()
            {
                return;
            }
        }
    };
    tokio::join!(read, write);
}

#[tokio::test]
async fn the_proxy_does_what_it_is_told() {
    let server = super::redis().await;
    let mut proxy = Proxy::to(server.address()).await;
    let address = proxy.address();
    let connect = async || TcpStream::connect(address).await.unwrap();
    let ping = async |connection: &mut TcpStream| {
        let mut answer = [0; 7];
        connection.write_all(b"PING\r\n").await?;
        connection.read_exact(&mut answer).await?;
        assert_eq!(&answer, b"+PONG\r\n");
        Ok::<_, std::io::Error>(())
    };
    let silent = async |connection: &mut TcpStream| {
        tokio::time::timeout(Duration::from_millis(50), connection.read_u8()).await.is_err()
    };

    let mut connection = connect().await;
    ping(&mut connection).await.unwrap();

    let began = Instant::now();
    proxy.set(Way::Delay(Duration::from_millis(20)), Way::Delay(Duration::from_millis(20)));
    ping(&mut connection).await.unwrap();
    assert!(began.elapsed() >= Duration::from_millis(40));

    proxy.hang();
    connection.write_all(b"PING\r\n").await.unwrap();
    assert!(silent(&mut connection).await);
    proxy.pass();
    assert_eq!(connection.read_exact(&mut [0; 7]).await.unwrap(), 7);

    proxy.lose_replies();
    connection.write_all(b"PING\r\n").await.unwrap();
    assert!(silent(&mut connection).await);
    proxy.pass();
    assert!(ping(&mut connection).await.is_err());

    let mut connection = connect().await;
    ping(&mut connection).await.unwrap();
    proxy.strand();
    connection.write_all(b"PING\r\n").await.unwrap();
    assert!(silent(&mut connection).await);
    ping(&mut connect().await).await.unwrap();

    proxy.cut();
    assert!(ping(&mut connection).await.is_err());
    ping(&mut connect().await).await.unwrap();

    proxy.refuse().await;
    let refused = TcpStream::connect(address).await.unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    proxy.accept().await;
    ping(&mut connect().await).await.unwrap();
}
