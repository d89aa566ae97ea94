//! A server that is farther away than it is: a proxy for TCP that holds back what a client says, so that each round trip
//! takes longer by that much, and counts round trips.
//!
//! What the server says goes through at once. The making of a connection is not held back: who counts on connections that
//! are kept pays for it once.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Bytes that are passed on at once.
const CHUNK_BYTES: usize = 64 * 1024;

pub struct Delayed {
    address: SocketAddr,
    trips: Arc<AtomicU64>,
    listening: JoinHandle<()>,
}

impl Delayed {
    /// In front of `server`, `latency` farther away.
    pub async fn before(server: SocketAddr, latency: Duration) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let trips = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&trips);
        let listening = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let counted = Arc::clone(&counted);
                // A connection that breaks is the client's to notice.
                tokio::spawn(async move { pass(client, server, latency, counted).await });
            }
        });
        Ok(Self { address, trips, listening })
    }

    /// Where clients go instead of to the server.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Times so far that a client said something and then waited: its next words came after the server's.
    pub fn trips(&self) -> u64 {
        self.trips.load(Ordering::SeqCst)
    }
}

impl Drop for Delayed {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

async fn pass(
    client: TcpStream,
    server: SocketAddr,
    latency: Duration,
    trips: Arc<AtomicU64>,
) -> io::Result<()> {
    let server = TcpStream::connect(server).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let ((from_client, mut to_client), (mut from_server, to_server)) =
        (client.into_split(), server.into_split());
    // Whoever speaks first begins a round trip.
    let server_spoke = Arc::new(AtomicBool::new(true));
    let (held, due) = mpsc::unbounded_channel();
    let asks = tokio::spawn(hear(from_client, held, latency, Arc::clone(&server_spoke), trips));
    let hands_on = tokio::spawn(hand_on(due, to_server));
    let mut chunk = vec![0; CHUNK_BYTES];
    while let Ok(read) = from_server.read(&mut chunk).await {
        let Some(said) = chunk.get(..read).filter(|said| !said.is_empty()) else { break };
        server_spoke.store(true, Ordering::SeqCst);
        to_client.write_all(said).await?;
    }
    asks.abort();
    hands_on.abort();
    Ok(())
}

async fn hear(
    mut client: OwnedReadHalf,
    held: mpsc::UnboundedSender<(Instant, Vec<u8>)>,
    latency: Duration,
    server_spoke: Arc<AtomicBool>,
    trips: Arc<AtomicU64>,
) {
    let mut chunk = vec![0; CHUNK_BYTES];
    while let Ok(read) = client.read(&mut chunk).await {
        let Some(said) = chunk.get(..read).filter(|said| !said.is_empty()) else { break };
        if server_spoke.swap(false, Ordering::SeqCst) {
            trips.fetch_add(1, Ordering::SeqCst);
        }
        if held.send((Instant::now() + latency, said.to_vec())).is_err() {
            break;
        }
    }
}

async fn hand_on(mut due: mpsc::UnboundedReceiver<(Instant, Vec<u8>)>, mut server: OwnedWriteHalf) {
    while let Some((at, said)) = due.recv().await {
        tokio::time::sleep_until(at).await;
        if server.write_all(&said).await.is_err() {
            return;
        }
    }
    // The client has closed its side.
    let _ = server.shutdown().await;
}
