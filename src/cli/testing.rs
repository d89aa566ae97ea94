//! A small table for tests: `main` with two snapshots, a branch one ahead, a tag.
//!
//! ```text
//! main      10 <- 20
//! ingest/a         20 <- 30     (max-ref-age 10 h)
//! v1.0      tag at 10
//! ```

use std::collections::BTreeMap;

use mergeberg_kernel::facts::{LogEntry, RefFact, RefKind, TableFacts};
use mergeberg_kernel::ids::{RefName, SchemaId, SnapshotId, SortOrderId, SpecId, TableUuid};
use mergeberg_kernel::lineage::{SnapshotFact, SnapshotGraph};
use mergeberg_kernel::structure::{FieldFact, SchemaFact, SpecFact, SpecFieldFact};

pub const HOUR_MS: i64 = 3_600_000;
/// 2013-08-20T04:00:00Z, midnight in New York.
pub const START_MS: i64 = 1_376_971_200_000;

pub fn facts() -> TableFacts {
    let snapshot = |id, parent, hours| SnapshotFact {
        id: SnapshotId(id),
        parent: Option::map(parent, SnapshotId),
        sequence_number: id / 10,
        timestamp_ms: START_MS + hours * HOUR_MS,
        schema_id: Some(SchemaId(0)),
        manifest_list: format!("file:///w/{id}.avro"),
        label: "append".to_owned(),
        summary: BTreeMap::new(),
    };
    let reference = |name: &str, id, kind, max_ref_age_ms| {
        let name = RefName::new(name);
        (name.clone(), RefFact { name, snapshot_id: SnapshotId(id), kind, max_ref_age_ms })
    };
    let branch = || RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None };
    let field = |id, name: &str, type_name: &str| FieldFact {
        id,
        name: name.to_owned(),
        required: false,
        type_name: type_name.to_owned(),
        has_initial_default: false,
    };
    let schema = SchemaFact {
        id: SchemaId(0),
        fields: vec![
            field(1, "carrier", "string"),
            field(2, "flight", "int"),
            field(3, "origin", "string"),
            field(4, "flight_date", "date"),
            field(5, "air_time", "int"),
        ],
        identifier_field_ids: Vec::new(),
    };
    let spec = SpecFact {
        id: SpecId(0),
        fields: vec![SpecFieldFact {
            source_id: 4,
            field_id: 1000,
            name: "flight_date".to_owned(),
            transform: "identity".to_owned(),
        }],
    };
    TableFacts {
        name: "nyc.flights".parse().unwrap(),
        uuid: TableUuid::new("9c12d441-03fe-4693-9a96-a0705ddf69c1"),
        format_version: 2,
        location: "file:///w".to_owned(),
        last_sequence_number: 3,
        last_updated_ms: START_MS + HOUR_MS,
        next_row_id: None,
        current_schema_id: SchemaId(0),
        default_spec_id: SpecId(0),
        default_sort_order_id: SortOrderId(0),
        schemas: BTreeMap::from([(SchemaId(0), schema)]),
        specs: BTreeMap::from([(SpecId(0), spec)]),
        sort_orders: BTreeMap::new(),
        refs: BTreeMap::from([
            reference("main", 20, branch(), None),
            reference("ingest/a", 30, branch(), Some(10 * HOUR_MS)),
            reference("v1.0", 10, RefKind::Tag, None),
        ]),
        snapshots: SnapshotGraph::new([
            snapshot(10, None, 0),
            snapshot(20, Some(10), 0),
            snapshot(30, Some(20), 1),
        ]),
        snapshot_log: vec![
            LogEntry { snapshot_id: SnapshotId(10), timestamp_ms: START_MS },
            LogEntry { snapshot_id: SnapshotId(20), timestamp_ms: START_MS },
        ],
        properties: BTreeMap::new(),
    }
}
