//! Case O24 on PostgreSQL: the connection is cut while a commit is under way. Without a server
//! (`scripts/postgres`) these tests say so and do nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use mergeberg_kernel::commit::Update;
use mergeberg_kernel::ids::TableName;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::super::catalog::{Catalog as _, CommitOutcome};
use super::super::create::TableDefinition;
use super::{SqlCatalog, Swap};
use crate::database::PostgresPlace;
use crate::database::testing::TestServer;

/// When a line to the server breaks.
#[derive(Clone, Default)]
struct Cut(Arc<AtomicU8>);

const NEVER: u8 = 0;
const BEFORE_UPDATE: u8 = 1;
const BEFORE_COMMIT: u8 = 2;
const AFTER_COMMIT: u8 = 3;

/// A line to the server that breaks once, where it is told to.
async fn start_line(server: String, cut: Cut) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (server, cut) = (server.clone(), cut.clone());
            tokio::spawn(async move { carry(client, &server, &cut).await.unwrap_or_default() });
        }
    });
    address
}

async fn carry(mut client: TcpStream, server: &str, cut: &Cut) -> std::io::Result<()> {
    let mut session = TcpStream::connect(server).await?;
    let (mut sent, mut answered) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    loop {
        tokio::select! {
            read = client.read(&mut sent) => {
                let sent = &sent[..read?];
                if sent.is_empty() {
                    return Ok(());
                }
                let has = |words: &[u8]| sent.windows(words.len()).any(|window| window == words);
                match cut.0.load(Ordering::SeqCst) {
                    BEFORE_UPDATE if has(b"UPDATE iceberg_tables") => {}
                    BEFORE_COMMIT if has(b"COMMIT\0") => {}
                    AFTER_COMMIT if has(b"COMMIT\0") => {
                        session.write_all(sent).await?;
                        // Its answer stays here.
                        let _answer = session.read(&mut answered).await?;
                    }
                    _ => {
                        session.write_all(sent).await?;
                        continue;
                    }
                }
                cut.0.store(NEVER, Ordering::SeqCst);
                return Ok(());
            }
            read = session.read(&mut answered) => {
                let answer = &answered[..read?];
                if answer.is_empty() {
                    return Ok(());
                }
                client.write_all(answer).await?;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_o24_a_connection_lost_in_a_commit_is_unknown_and_settled_by_reading() {
    let Some(server) = TestServer::find() else { return };
    let url = server.database_url().await;
    let folder = TempDir::new().unwrap();
    let warehouse = format!("file://{}", folder.path().join("warehouse").display());
    let clock: super::Clock = Arc::new(|| 1_700_000_000_000);
    let direct = PostgresPlace::parse(&url, None).unwrap();
    let direct = SqlCatalog::create("lake", direct, &warehouse, clock.clone()).await.unwrap();
    direct.create_namespace("nyc").await.unwrap();
    let name: TableName = "nyc.flights".parse().unwrap();
    direct.define_table(&name, &TableDefinition::default().column("id", "long", true)).await.unwrap();

    let (before, database) = url.rsplit_once('/').unwrap();
    let (user, host) = before.rsplit_once('@').unwrap();
    let cut = Cut::default();
    let line = start_line(host.to_owned(), cut.clone()).await;
    let place = PostgresPlace::parse(&format!("{user}@{line}/{database}?sslmode=disable"), None).unwrap();
    let catalog = SqlCatalog::open("lake", place, &warehouse, clock).await.unwrap();

    let mut values = 0..;
    for (at, unknown, applied) in
        [(BEFORE_UPDATE, false, false), (BEFORE_COMMIT, true, false), (AFTER_COMMIT, true, true)]
    {
        let value = values.next().unwrap().to_string();
        // Loaded first: the line is to break in the commit's own transaction.
        let base = catalog.load(&name).await.unwrap();
        cut.0.store(at, Ordering::SeqCst);
        let updates = vec![Update::SetProperties([("n".to_owned(), value.clone())].into())];
        let outcome = catalog.commit(&base, &[], updates).await;

        assert_eq!(matches!(outcome, CommitOutcome::Unknown(_)), unknown, "{at}: {outcome:?}");
        assert!(unknown || matches!(outcome, CommitOutcome::Refused(_)), "{at}: {outcome:?}");
        let now = direct.load(&name).await.unwrap();
        assert_eq!(now.facts.properties.get("n") == Some(&value), applied, "{at}");
        assert_eq!(catalog.load(&name).await.unwrap().facts, now.facts, "{at}");
        // The file of a commit that may have been applied stays.
        let files = std::fs::read_dir(folder.path().join("warehouse/nyc/flights/metadata")).unwrap().count();
        assert_eq!(files, if at == BEFORE_UPDATE { 1 } else { usize::from(at) }, "{at}");
    }
    // And a swap that is known to have failed says so.
    let stale = catalog.database.swap(&name, "nowhere", "elsewhere").await;
    assert!(matches!(stale, Swap::Stale), "{stale:?}");
    server.end().await;
}
