//! What happens around the queue: tables renamed, dropped, replaced, rewound; files missing or damaged; a
//! catalog, ledger or warehouse that cannot be used. Nobody's request is refused for what is not its own
//! fault: it is held with the reason, and lands when the world is right again.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use mergeberg::table::catalog::{Catalog, CommitOutcome};
use mergeberg::table::create::TableDefinition;
use mergeberg::table::loaded::LoadedTable;
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::facts::RefFact;
use mergeberg_kernel::ids::{RequestId, SnapshotId, TableName};

use crate::binary::{Shop, TABLE};
use crate::support::{branch, order};

fn orders() -> TableDefinition {
    TableDefinition::default()
        .column("order_id", "long", true)
        .column("order_date", "date", true)
        .column("status", "string", false)
        .column("amount", "decimal(12, 2)", false)
        .partitioned_by("order_date", "identity")
}

fn name(text: &str) -> TableName {
    text.parse().unwrap()
}

/// An open request of a sound branch.
async fn waiting(shop: &Shop) -> RequestId {
    shop.house.append_on_new("ingest/waiting", &[order(50, 25)]).await;
    shop.enqueue("ingest/waiting")
}

fn local(location: &str) -> PathBuf {
    PathBuf::from(location.strip_prefix("file://").unwrap_or(location))
}

/// The manifest list of a branch's head.
async fn manifest_list(shop: &Shop, of: &str) -> PathBuf {
    let table = shop.house.loaded().await;
    let head = table.facts.head(&branch(of)).unwrap();
    local(&table.facts.snapshots.get(head).unwrap().manifest_list)
}

/// The newest file below the table's folder with this ending.
fn newest(shop: &Shop, folder: &str, ending: &str) -> PathBuf {
    fn below(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                below(&path, ending, found);
            } else if path.display().to_string().ends_with(ending) {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    below(&shop.path("warehouse/shop/orders").join(folder), ending, &mut found);
    let modified = |path: &PathBuf| std::fs::metadata(path).unwrap().modified().unwrap();
    found.into_iter().max_by_key(modified).unwrap()
}

/// Takes a file away and puts it back.
struct Away {
    at: PathBuf,
    kept: PathBuf,
}

impl Away {
    fn take(at: PathBuf) -> Self {
        let kept = at.with_extension("kept");
        std::fs::rename(&at, &kept).unwrap();
        Self { at, kept }
    }

    fn replace(at: PathBuf, by: &[u8]) -> Self {
        let away = Self::take(at);
        std::fs::write(&away.at, by).unwrap();
        away
    }

    fn put_back(self) {
        let _ = std::fs::remove_file(&self.at);
        std::fs::rename(&self.kept, &self.at).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c11_a_renamed_table_holds_and_goes_on_under_its_name() {
    let shop = Shop::open().await;
    let id = waiting(&shop).await;
    shop.house.catalog.rename_table(&name(TABLE), &name("shop.bills")).await.unwrap();
    shop.ends(id, "held(table-renamed)", "shop.orders is now shop.bills").await;
    shop.refused(&["plan", "--table", TABLE], 3, "table-not-found");
    shop.house.catalog.rename_table(&name("shop.bills"), &name(TABLE)).await.unwrap();
    shop.ends(id, "landed", "landed as").await;
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o36_a_dropped_table_refuses_its_requests_which_can_be_enqueued_again() {
    let shop = Shop::open().await;
    let id = waiting(&shop).await;
    let location = shop.house.loaded().await.metadata_location.clone();
    shop.house.catalog.drop_table(&name(TABLE)).await.unwrap();
    shop.ends(id, "refused(table-not-found)", "is not in the catalog any more").await;
    shop.house.catalog.register_table(&name(TABLE), &location).await.unwrap();
    let again = shop.enqueue("ingest/waiting");
    assert_ne!(id, again);
    shop.ends(again, "landed", "landed as").await;
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o31_a_table_dropped_and_made_again_is_another_table() {
    let shop = Shop::open().await;
    let id = waiting(&shop).await;
    shop.house.catalog.drop_table(&name(TABLE)).await.unwrap();
    shop.house.catalog.define_table(&name(TABLE), &orders()).await.unwrap();
    shop.ends(id, "refused(table-replaced)", "Write the branch again on the new table").await;
    assert_eq!(shop.house.head("main").await, None, "nothing of the old table's got into the new one");
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o31_another_table_under_the_name_takes_nothing_over() {
    let shop = Shop::open().await;
    let id = waiting(&shop).await;
    let other = name("shop.orders_ext");
    shop.house.catalog.define_table(&other, &orders()).await.unwrap();
    shop.house.catalog.rename_table(&name(TABLE), &name("shop.orders_old")).await.unwrap();
    shop.house.catalog.rename_table(&other, &name(TABLE)).await.unwrap();
    // The table itself lives on under another name: its requests wait for it.
    shop.ends(id, "held(table-renamed)", "shop.orders is now shop.orders_old").await;
    shop.house.catalog.drop_table(&name("shop.orders_old")).await.unwrap();
    shop.ends(id, "refused(table-replaced)", "another table now").await;
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_target_holds_until_it_is_back() {
    let shop = Shop::open().await;
    let head = shop.house.head("main").await.unwrap();
    shop.house.writer.create_branch(&name(TABLE), &branch("staging"), head).await.unwrap();
    shop.house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let args =
        ["request", "enqueue", "--table", TABLE, "--source", "ingest/a", "--target", "staging", "--json"];
    let id = RequestId(shop.run(&args).json()["request"]["id"].as_i64().unwrap());
    commit(&shop, vec![Update::RemoveRef(branch("staging"))]).await;
    shop.ends(id, "held(target-not-found)", "there is no branch 'staging'").await;
    shop.house.writer.create_branch(&name(TABLE), &branch("staging"), head).await.unwrap();
    shop.ends(id, "landed", "landed as").await;
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_s3_a_rewound_target_goes_on_when_an_operator_adopts_it() {
    let shop = Shop::open().await;
    let adopt = ["target", "adopt", "--table", TABLE, "--reason", "a bad load was taken back"];
    shop.refused(&adopt, 3, "wrong-state");
    shop.lands_another().await;
    let landed = shop.house.head("main").await.unwrap();
    shop.refused(&adopt, 3, "wrong-state");
    shop.refused(
        &["target", "adopt", "--table", TABLE, "--target", "mian", "--reason", "x"],
        3,
        "target-not-found",
    );
    let id = waiting(&shop).await;
    let old = shop.house.loaded().await.facts.snapshots.get(landed).unwrap().parent.unwrap();
    set_main(&shop, old).await;
    shop.ends(id, "held(target-rewound)", "mergeberg target adopt").await;
    let said = shop.ok(&adopt);
    assert!(said.contains(&format!("ann adopted snapshot {old} as head of 'main'")), "{said}");
    // Its base is the head that was taken back, so it would bring those rows again.
    shop.drain();
    let state = shop.state(id).await;
    assert!(!state.contains("target-rewound"), "{state}");
    let report = shop.run(&["report", "daily"]);
    assert_eq!(report.code, 0, "{report:?}");
    shop.lands_another().await;
}

async fn commit(shop: &Shop, updates: Vec<Update>) {
    let table = shop.house.loaded().await;
    let outcome = shop.house.catalog.commit(&table, &[], updates).await;
    assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
}

async fn set_main(shop: &Shop, to: SnapshotId) {
    let table: Arc<LoadedTable> = shop.house.loaded().await;
    let main = RefFact { snapshot_id: to, ..table.facts.refs.get(&branch("main")).unwrap().clone() };
    commit(shop, vec![Update::SetRef(main)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_data_file_is_its_requests_own_trouble() {
    let shop = Shop::open().await;
    let id = waiting(&shop).await;
    std::fs::remove_file(newest(&shop, "data", ".parquet")).unwrap();
    shop.ends(id, "refused(data-file-missing)", "does not exist").await;
    // The branch still names the file; it goes, and all is sound.
    commit(&shop, vec![Update::RemoveRef(branch("ingest/waiting"))]).await;
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_or_damaged_manifest_of_a_branch_is_its_requests_own_trouble() {
    let shop = Shop::open().await;
    let id = waiting(&shop).await;
    let away = Away::take(manifest_list(&shop, "ingest/waiting").await);
    shop.ends(id, "refused(data-file-missing)", "does not exist").await;
    away.put_back();

    shop.house.append_on_new("ingest/damaged", &[order(51, 26)]).await;
    let id = shop.enqueue("ingest/damaged");
    let away = Away::replace(manifest_list(&shop, "ingest/damaged").await, b"no avro");
    shop.ends(id, "refused(table-unreadable)", "cannot be read").await;
    away.put_back();
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_or_damaged_manifest_of_the_target_holds_everybody() {
    for damage in [None, Some(b"no avro".as_slice())] {
        let shop = Shop::open().await;
        shop.house.append_on_new("ingest/waiting", &[order(50, 25)]).await;
        // So that the target's own history has to be read.
        shop.house.append("main", &[order(4, 23)]).await;
        let id = shop.enqueue("ingest/waiting");
        let list = manifest_list(&shop, "main").await;
        let away = match damage {
            None => Away::take(list),
            Some(bytes) => Away::replace(list, bytes),
        };
        shop.run(&["worker", "--drain"]);
        shop.is(id, "held(table-unreadable)", ".avro").await;
        away.put_back();
        shop.ends(id, "landed", "cherry-pick").await;
        shop.lands_another().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn metadata_that_cannot_be_read_holds_and_is_named() {
    for damage in [None, Some(b"{\"format-version\": 2".as_slice()), Some(b"".as_slice())] {
        let shop = Shop::open().await;
        let id = waiting(&shop).await;
        let at = local(&shop.house.loaded().await.metadata_location);
        let away = match damage {
            None => Away::take(at),
            Some(bytes) => Away::replace(at, bytes),
        };
        shop.ends(id, "held(table-unreadable)", ".metadata.json").await;
        let said = shop.refused(&["plan", "--table", TABLE], 3, "table-unreadable");
        assert!(said.contains(".metadata.json"), "{said}");
        shop.ok(&["policy", "check"]);
        away.put_back();
        shop.ends(id, "landed", "landed as").await;
        shop.lands_another().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_a_later_format_version_holds() {
    let shop = Shop::open().await;
    let id = waiting(&shop).await;
    let at = local(&shop.house.loaded().await.metadata_location);
    let text = std::fs::read_to_string(&at).unwrap();
    let away = Away::replace(at, text.replace("\"format-version\":2", "\"format-version\":9").as_bytes());
    shop.ends(id, "held(format-unsupported)", "format version 9").await;
    shop.refused(&["branch", "list", "--table", TABLE], 3, "format-unsupported");
    away.put_back();
    shop.ends(id, "landed", "landed as").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_catalog_file_that_cannot_be_used_is_told_and_loses_nothing() {
    let shop = Shop::open().await;
    let id = waiting(&shop).await;
    let garbage = "this is no database ".repeat(500);
    for damage in [None, Some(garbage.as_bytes()), Some(b"".as_slice())] {
        let away = match damage {
            None => Away::take(shop.path("catalog.db")),
            Some(bytes) => Away::replace(shop.path("catalog.db"), bytes),
        };
        for args in
            [&["worker", "--drain"][..], &["plan", "--table", TABLE], &["branch", "list", "--table", TABLE]]
        {
            let said = shop.refused(args, 7, "catalog-unavailable");
            assert!(said.contains("catalog.db"), "{said}");
        }
        shop.ok(&["request", "list"]);
        assert!(shop.ok(&["policy", "check"]).contains("not compared"));
        away.put_back();
    }
    assert_eq!(shop.state(id).await, "queued");
    shop.ends(id, "landed", "landed as").await;
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ledger_file_that_cannot_be_used_is_told_and_kept() {
    let shop = Shop::open().await;
    let id = waiting(&shop).await;
    shop.house.ledger.close().await;
    let garbage = "this is no database ".repeat(500);
    for (damage, says) in [
        (None, "mergeberg migrate"),
        (Some(garbage.as_bytes()), "restore the file from a backup"),
        (Some(b"".as_slice()), "mergeberg migrate"),
    ] {
        let away = match damage {
            None => Away::take(shop.path("ledger.db")),
            Some(bytes) => Away::replace(shop.path("ledger.db"), bytes),
        };
        for args in
            [&["worker", "--drain"][..], &["request", "list"], &["review", "list"], &["report", "daily"]]
        {
            let said = shop.refused(args, 7, "ledger-unusable");
            assert!(said.contains("ledger.db") && said.contains(says), "{said}");
        }
        if let Some(bytes) = damage {
            assert_eq!(std::fs::read(shop.path("ledger.db")).unwrap(), bytes, "it is left as it is");
        }
        away.put_back();
    }
    std::fs::copy(shop.path("catalog.db"), shop.path("other.db")).unwrap();
    let text = std::fs::read_to_string(shop.path("mergeberg.toml")).unwrap();
    std::fs::write(shop.path("mergeberg.toml"), text.replace("ledger.db", "other.db")).unwrap();
    for args in [&["request", "list"][..], &["migrate"]] {
        let said = shop.refused(args, 7, "ledger-unusable");
        assert!(said.contains("another application's database"), "{said}");
    }
    shop.configure("");
    let listed = shop.ok(&["request", "show", &id.to_string()]);
    assert!(listed.contains("queued"), "{listed}");
    shop.drain();
    let listed = shop.ok(&["request", "show", &id.to_string()]);
    assert!(listed.contains("landed"), "{listed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_catalog_opened_read_only_holds_the_requests() {
    let shop = Shop::open().await;
    let id = waiting(&shop).await;
    shop.configure("?mode=ro");
    shop.refused(&["worker", "--drain"], 7, "warehouse-read-only");
    shop.is(id, "held(warehouse-read-only)", "write access").await;
    shop.refused(&["branch", "create", "--table", TABLE, "--name", "x"], 7, "warehouse-read-only");
    shop.configure("");
    shop.ends(id, "landed", "landed as").await;
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_where_the_metadata_folder_should_be_holds_the_requests() {
    let shop = Shop::open().await;
    let id = waiting(&shop).await;
    std::fs::write(shop.path("no-folder"), b"a file").unwrap();
    let elsewhere = format!("file://{}", shop.path("no-folder/metadata").display());
    // By hand: with this property in force nobody can commit, the one that takes it back included.
    let at = local(&shop.house.loaded().await.metadata_location);
    let text = std::fs::read_to_string(&at).unwrap();
    let mut metadata: serde_json::Value = serde_json::from_str(&text).unwrap();
    metadata["properties"]["write.metadata.path"] = elsewhere.into();
    let away = Away::replace(at, metadata.to_string().as_bytes());
    shop.refused(&["worker", "--drain"], 7, "catalog-unavailable");
    shop.is(id, "held(catalog-unavailable)", "no-folder").await;
    away.put_back();
    shop.ends(id, "landed", "landed as").await;
    shop.lands_another().await;
}
