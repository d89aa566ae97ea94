//! A table of 200,000 files in a real process: what it costs in memory is bounded, whatever the table's size.
//!
//! The worst shape of such a table: every manifest holds files of every partition, so that no summary leaves one
//! out, and statistics of many columns, which are most of what an entry takes.

use std::collections::BTreeMap;

use iceberg::spec::{
    DataContentType, DataFileBuilder, DataFileFormat, Datum, Literal, ManifestFile, ManifestListWriter,
    ManifestWriterBuilder, Struct,
};
use mergeberg::table::catalog::{Catalog, CommitOutcome};
use mergeberg::table::manifests::{FileScope, ManifestStore};
use mergeberg::worker::context::MANIFEST_CACHE_BYTES;
use mergeberg_kernel::commit::{NewSnapshot, Requirement, Update};
use mergeberg_kernel::facts::RefFact;
use mergeberg_kernel::ids::SnapshotId;

use crate::support::child::{LONG_LEASE, real_now, until};
use crate::support::{House, main_branch, order};

const MANIFESTS: usize = 200;
const FILES_EACH: usize = 1_000;
/// Days that each manifest has files of.
const DAYS: i32 = 50;
/// The 20th of August 2026, in days since 1970.
const FIRST_DAY: i32 = 20_685;
/// Columns beside those of ORD, with statistics.
const MORE_COLUMNS: i32 = 12;
/// Most memory that the worker may ever have taken, in KiB: program and engine, the cache of manifests, and what is
/// decoded at the same time. All entries held at once would be more than twice that.
const BOUND_KIB: u64 = 512 * 1024;

const POLICY: &str = r#"
table = "shop.orders"

[[check]]
id = "filled"
type = "not-null"
columns = ["order_id"]

[[class]]
name = "ingest"
prefix = "ingest/"
overlap = "allow"
checks = ["filled"]
"#;

/// One snapshot on main with all manifests. One is encoded; the others are copies with other names of files in
/// them, as long as the first. The data files do not exist: whoever reads one fails.
async fn grow(house: &House) -> i64 {
    let table = house.loaded().await;
    let (facts, metadata) = (&table.facts, &table.metadata);
    let parent = facts.head(&main_branch());
    let id = SnapshotId(777_000_777);
    let sequence_number = facts.last_sequence_number + 1;
    let folder = format!("{}/metadata", facts.location);
    let ids: Vec<i32> = (1..=4 + MORE_COLUMNS).collect();
    let counts = |count: u64| ids.iter().map(|id| (*id, count)).collect::<std::collections::HashMap<_, _>>();
    let bounds = |value: i64| {
        let more = ids.iter().skip(4).map(|id| (*id, Datum::long(value)));
        more.chain([(1, Datum::long(value)), (3, Datum::string("new"))])
            .collect::<std::collections::HashMap<_, _>>()
    };
    let template = format!("{folder}/large-000.avro");
    let output = table.file_io.new_output(&template).unwrap();
    let spec = metadata.default_partition_spec().as_ref().clone();
    let mut writer = ManifestWriterBuilder::new(output, Some(id.0), metadata.current_schema().clone(), spec)
        .build_v2_data();
    for n in 0..FILES_EACH {
        let day = FIRST_DAY + i32::try_from(n).unwrap() % DAYS;
        let file = DataFileBuilder::default()
            .content(DataContentType::Data)
            .file_path(format!("{}/data/large-000-{n}.parquet", facts.location))
            .file_format(DataFileFormat::Parquet)
            .partition(Struct::from_iter([Some(Literal::date(day))]))
            .partition_spec_id(facts.default_spec_id.0)
            .record_count(1000)
            .file_size_in_bytes(100_000)
            .column_sizes(counts(9_000))
            .value_counts(counts(1_000))
            .null_value_counts(counts(1))
            .nan_value_counts(counts(0))
            .lower_bounds(bounds(1))
            .upper_bounds(bounds(1_000_000))
            .build()
            .unwrap();
        writer.add_file(file, sequence_number).unwrap();
    }
    let first = writer.write_manifest_file().await.unwrap();
    let bytes = std::fs::read(plain(&template)).unwrap();
    let mut manifests = vec![first.clone()];
    for n in 1..MANIFESTS {
        let manifest_path = format!("{folder}/large-{n:03}.avro");
        std::fs::write(
            plain(&manifest_path),
            renamed(&bytes, b"/large-000-", format!("/large-{n:03}-").as_bytes()),
        )
        .unwrap();
        manifests.push(ManifestFile { manifest_path, ..first.clone() });
    }
    let list = format!("{folder}/large-list.avro");
    let output = table.file_io.new_output(&list).unwrap().writer().await.unwrap();
    let mut writer = ManifestListWriter::v2(output, id.0, parent.map(|id| id.0), sequence_number);
    writer.add_manifests(manifests.into_iter()).unwrap();
    writer.close().await.unwrap();
    let snapshot = NewSnapshot {
        id,
        parent,
        sequence_number,
        timestamp_ms: house.now().max(facts.last_updated_ms + 1),
        manifest_list: list,
        schema_id: facts.current_schema_id,
        label: "append".to_owned(),
        summary: BTreeMap::new(),
        row_range: None,
    };
    let updates = match facts.refs.get(&main_branch()) {
        Some(main) => {
            vec![Update::AddSnapshot(snapshot), Update::SetRef(RefFact { snapshot_id: id, ..main.clone() })]
        }
        None => panic!("main has a snapshot"),
    };
    let uuid = Requirement::TableUuid(facts.uuid.clone());
    let outcome = house.catalog.commit(&table, &[uuid], updates).await;
    assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
    first.manifest_length
}

impl House {
    async fn listed_manifests(&self) -> usize {
        let table = self.loaded().await;
        let head = table.facts.snapshots.get(self.head("main").await.unwrap()).unwrap();
        ManifestStore::new(1 << 20).manifest_paths(&table, head).await.unwrap().len()
    }
}

fn plain(path: &str) -> &str {
    path.strip_prefix("file://").unwrap()
}

/// `bytes` with every `from` as `to`, which is as long.
fn renamed(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut renamed = bytes.to_vec();
    let mut at = 0;
    let mut found = 0;
    while at + from.len() <= renamed.len() {
        if &renamed[at..at + from.len()] == from {
            renamed[at..at + from.len()].copy_from_slice(to);
            at += from.len();
            found += 1;
        } else {
            at += 1;
        }
    }
    assert_eq!(found, FILES_EACH);
    renamed
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_200_000_files_is_merged_within_bounded_memory() {
    let mut definition = House::orders_definition();
    for n in 0..MORE_COLUMNS {
        definition = definition.column(&format!("more_{n}"), "long", false);
    }
    let house = House::with_table(definition, POLICY).await;
    house.clock.store(real_now(), std::sync::atomic::Ordering::SeqCst);
    house.append("main", &[order(1, 20)]).await;
    let length = grow(&house).await;
    // Small manifests are merged as soon as there are three; the large ones are full already.
    house.set_property("commit.manifest.min-count-to-merge", "3").await;
    house.set_property("commit.manifest.target-size-bytes", &(length + length / 2).to_string()).await;
    house.append_on_new("ingest/a", &[order(10, 20)]).await;
    house.append("main", &[order(11, 20)]).await;
    let request = house.enqueue("ingest/a").await;
    let before = house.listed_manifests().await;

    house.configure(LONG_LEASE);
    let worker = house.start_worker(&[]);
    until("the request ends", async || house.request(request).await.state.is_final()).await;
    let status = std::fs::read_to_string(format!("/proc/{}/status", worker.id()));
    assert!(worker.stop().status.success());
    assert_eq!(house.state(request).await, "landed", "{}", house.detail(request).await);
    assert_eq!(house.classified(request).await, "cherry-pick");
    assert_eq!(house.listed_manifests().await, before - 1, "the three newest became one");
    // Elsewhere nobody tells.
    if let Ok(status) = status {
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        let peak: u64 = peak.trim().strip_suffix(" kB").unwrap().parse().unwrap();
        assert!(peak < BOUND_KIB, "the worker took {peak} KiB");
    }
}

/// The same by count, in a store that has room for two manifests.
#[tokio::test(flavor = "multi_thread")]
async fn so_many_manifests_are_decoded_at_the_same_time_and_no_more() {
    let house = House::empty(POLICY).await;
    house.append("main", &[order(1, 20)]).await;
    crate::counts::wide_table::append_manifests(&house, 300, FIRST_DAY).await;
    let table = house.loaded().await;
    let head = table.facts.snapshots.get(house.head("main").await.unwrap()).unwrap();
    let lengths: Vec<u64> = std::fs::read_dir(house.dir.path().join("warehouse/shop/orders/metadata"))
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name().to_str().unwrap().starts_with("wide-"))
        .map(|entry| entry.metadata().unwrap().len())
        .collect();
    let room = 2 * lengths.iter().max().unwrap();
    let store = ManifestStore::with_room(0, u32::try_from(room).unwrap());
    let live = store.live_files(&table, head, &FileScope::Table).await.unwrap();
    assert_eq!(live.data.len(), 300);
    assert!(store.most_decoding_bytes() <= room, "{} of {room}", store.most_decoding_bytes());
    assert!(store.cached_bytes() == 0 && store.cached_bytes() <= MANIFEST_CACHE_BYTES);
    assert_eq!(store.counts().manifests_read, 300);
}
