//! Cases O16 and O23: figures that lie, and other engines' upkeep while a train is under way.

use std::sync::Arc;

use serde_json::json;

use crate::support::engine_table::Expected;
use crate::support::{House, Moment, ORDERS_POLICY, branch, drain, order};

/// Branch and main delete the two rows of one day, by position: none is left, though the files hold both.
const NONE_LEFT: &str = r#"
table = "engine.written"

[[check]]
id = "none-left"
type = "row-count"
max = 0

[[class]]
name = "default"
prefix = ""
checks = ["none-left"]
"#;

#[tokio::test(flavor = "multi_thread")]
async fn case_o16_totals_of_a_summary_are_no_row_counts() {
    let table = "delete-rows-identity-v2-mor-delete-same-file";
    for summary in ["as it is", "wrong", "negative", "gone"] {
        let house = House::engine_table(table, NONE_LEFT).await;
        let head = house.head("main").await.unwrap();
        house
            .edit_metadata(|metadata| {
                for snapshot in metadata["snapshots"].as_array_mut().unwrap() {
                    let operation = snapshot["summary"]["operation"].clone();
                    match summary {
                        "wrong" => snapshot["summary"]["total-records"] = json!("9000"),
                        "negative" => snapshot["summary"]["total-records"] = json!("-3"),
                        "gone" => snapshot["summary"] = json!({ "operation": operation }),
                        _ => {}
                    }
                }
            })
            .await;
        let before = house.lines_at(head).await.len();
        let request = house.enqueue("b").await;
        house.drain().await;
        assert_eq!(
            house.state(request).await,
            "landed",
            "{summary}: {:?}",
            house.request(request).await.detail
        );
        let landed = house.head("main").await.unwrap();
        assert_eq!(house.lines_at(landed).await.len(), before - 1, "{summary}");
        house.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o23_files_of_a_train_that_is_checked_for_hours_are_no_orphans() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    house.append("main", &[order(5, 23)]).await;
    let request = house.enqueue("ingest/a").await;
    // Of somebody else, and in nobody's way.
    let orphan = house.dir.path().join("warehouse/shop/orders/data/left-behind.parquet");
    std::fs::create_dir_all(orphan.parent().unwrap()).unwrap();
    std::fs::write(&orphan, b"of a job that died").unwrap();
    let (worker, script) = house.scripted().await;
    let upkeep = Arc::clone(&house);
    script.at(Moment::After(1), move || async move {
        upkeep.advance(2 * 3600 * 1000);
        let orphans = upkeep.orphans().await;
        assert_eq!(orphans.len(), 1, "{orphans:?}");
        for file in orphans {
            std::fs::remove_file(file).unwrap();
        }
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5]);
    assert_eq!(house.orphans().await, Vec::<std::path::PathBuf>::new());
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o23_statistics_and_gc_enabled_false_are_left_as_they_are() {
    for table in ["statistics-v2", "gc-disabled-v2"] {
        let policy =
            "table = \"engine.written\"\n[[class]]\nname = \"default\"\nprefix = \"\"\noverlap = \"allow\"\n";
        let house = House::engine_table(table, policy).await;
        let text = |house: &House| {
            let location = house.catalog.clone();
            let name = house.table.clone();
            async move {
                use mergeberg::table::catalog::Catalog;
                let loaded = location.load(&name).await.unwrap();
                let path = loaded.metadata_location.strip_prefix("file://").unwrap().to_owned();
                serde_json::from_str::<serde_json::Value>(&std::fs::read_to_string(path).unwrap()).unwrap()
            }
        };
        let before = text(&house).await;
        let request = house.enqueue("b").await;
        house.drain().await;
        assert_eq!(house.state(request).await, "landed");
        let after = text(&house).await;
        for key in ["statistics", "partition-statistics", "properties"] {
            let own = |value: &serde_json::Value| {
                let mut value = value[key].clone();
                // The queue's claim is the one thing that it adds.
                if let Some(members) = value.as_object_mut() {
                    members.remove("mergeberg.queue");
                }
                value
            };
            assert_eq!(own(&after), own(&before), "{table}: {key}");
        }
        if table == "statistics-v2" {
            assert!(after["statistics"].as_array().is_some_and(|files| !files.is_empty()));
        }
        assert!(house.loaded().await.facts.head(&branch("main")) != Expected::of(table).head("main"));
        house.assert_sound().await;
    }
}
