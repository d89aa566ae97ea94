//! Case O40: a connection pooler in transaction mode in front of the server, as small as one can be.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::Ledger;
use super::error::LedgerFault;
use crate::database::PostgresPlace;
use crate::database::testing::TestServer;

const SSL_REQUEST: u32 = 80_877_103;

/// Sessions of the server that no transaction uses now.
#[derive(Clone, Default)]
struct Idle(Arc<Mutex<VecDeque<TcpStream>>>);

/// Hands each transaction the session that rested longest. The address that it listens on.
async fn start_pooler(server: String) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let idle = Idle::default();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (server, idle) = (server.clone(), idle.clone());
            // A client that leaves in the middle of something is not the test's matter.
            tokio::spawn(async move { serve(client, &server, idle).await.unwrap_or_default() });
        }
    });
    address
}

async fn serve(mut client: TcpStream, server: &str, idle: Idle) -> std::io::Result<()> {
    let startup = loop {
        let mut message = client.read_u32().await?.to_be_bytes().to_vec();
        let length = u32::from_be_bytes([message[0], message[1], message[2], message[3]]);
        message.resize(usize::try_from(length).unwrap(), 0);
        client.read_exact(&mut message[4..]).await?;
        if message[4..8] != SSL_REQUEST.to_be_bytes() {
            break message;
        }
        client.write_all(b"N").await?;
    };
    let mut session = TcpStream::connect(server).await?;
    session.write_all(&startup).await?;
    copy_until_idle(&mut session, &mut client).await?;
    idle.0.lock().unwrap().push_back(session);
    loop {
        let mut buffer = vec![0; 64 << 10];
        let read = client.read(&mut buffer).await?;
        // Closed, or a Terminate, which is the client's and not the session's.
        if read == 0 || buffer[0] == b'X' {
            return Ok(());
        }
        let mut session = idle.0.lock().unwrap().pop_front().expect("each client brings one");
        session.write_all(&buffer[..read]).await?;
        while !copy_until_idle(&mut session, &mut client).await? {
            let read = client.read(&mut buffer).await?;
            session.write_all(&buffer[..read]).await?;
        }
        idle.0.lock().unwrap().push_back(session);
    }
}

/// Answers of the server up to ReadyForQuery. True: no transaction is open.
async fn copy_until_idle(session: &mut TcpStream, client: &mut TcpStream) -> std::io::Result<bool> {
    loop {
        let kind = session.read_u8().await?;
        let length = session.read_u32().await?;
        let mut body = vec![0; usize::try_from(length - 4).unwrap()];
        session.read_exact(&mut body).await?;
        client.write_u8(kind).await?;
        client.write_u32(length).await?;
        client.write_all(&body).await?;
        if kind == b'Z' {
            return Ok(body == b"I");
        }
    }
}

#[tokio::test]
async fn case_o40_nobody_leads_behind_a_pooler() {
    let Some(server) = TestServer::find() else { return };
    let url = server.database_url().await;
    let direct = Ledger::open_or_create(PostgresPlace::parse(&url, None).unwrap()).await.unwrap();
    let (before, database) = url.rsplit_once('/').unwrap();
    let (user, host) = before.rsplit_once('@').unwrap();
    let pooler = start_pooler(host.to_owned()).await;
    let behind = PostgresPlace::parse(&format!("{user}@{pooler}/{database}"), None).unwrap();
    let ledger = Ledger::open(behind).await.unwrap();

    let error = ledger.lead("one", 60_000, 0).await.unwrap_err();

    assert_eq!(error.fault(), LedgerFault::Unusable);
    assert!(error.to_string().contains("give the address of the server itself"), "{error}");
    // And no lock is left on a session of the pooler.
    assert!(direct.lead("two", 60_000, 0).await.unwrap().is_some());
    ledger.close().await;
    server.end().await;
}
