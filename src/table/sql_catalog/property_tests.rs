//! Properties of a table that say where its metadata goes, in which form, and how much of it is named.

use std::collections::BTreeMap;

use super::tests::{World, first_landing, flights};
use super::*;

#[tokio::test]
async fn gzip_and_the_metadata_path_are_honoured() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meta").display().to_string();
    let world = World::with_properties(&[
        ("write.metadata.compression-codec", "gzip"),
        ("write.metadata.path", &path),
    ])
    .await;

    let table = first_landing(&world.catalog).await;

    assert!(table.metadata_location.starts_with(&format!("{path}/00001-")));
    assert!(table.metadata_location.ends_with(".gz.metadata.json"));
    assert_eq!(std::fs::read(&table.metadata_location).unwrap()[..2], [0x1f, 0x8b]);
    assert_eq!(world.other().await.load(&flights()).await.unwrap().facts, table.facts);
}

/// Rule R8: the log is cut as the table says, and no file is deleted, whatever it says: who wrote one cannot be told.
#[tokio::test]
async fn older_metadata_files_are_named_no_more_and_stay() {
    for delete in ["true", "false"] {
        let world = World::with_properties(&[
            ("write.metadata.previous-versions-max", "2"),
            ("write.metadata.delete-after-commit.enabled", delete),
        ])
        .await;
        let mut table = first_landing(&world.catalog).await;
        for number in 0..4 {
            let update = Update::SetProperties(BTreeMap::from([("n".to_owned(), number.to_string())]));
            let outcome = world.catalog.commit(&table, &[], vec![update]).await;
            let CommitOutcome::Landed(now) = outcome else { panic!("{outcome:?}") };
            table = now;
        }
        let document: serde_json::Value = serde_json::from_slice(&table.document.to_bytes()).unwrap();
        assert_eq!(document["metadata-log"].as_array().unwrap().len(), 2);
        assert_eq!(world.metadata_files().len(), 6, "the first, the landing and four more");
    }
}
