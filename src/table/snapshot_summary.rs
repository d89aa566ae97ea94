//! The figures in a snapshot's summary, with Java's keys and Java's care: a total is carried on only from
//! a parent that states it, and never becomes negative. They are for people; no decision reads them.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use mergeberg_kernel::change::{FileContent, FileFact};
use mergeberg_kernel::partition::Partition;

/// Total, what adds to it and what is taken off it, as keys of the summary.
const TOTALS: [(&str, &str, &str); 6] = [
    ("total-records", "added-records", "deleted-records"),
    ("total-files-size", "added-files-size", "removed-files-size"),
    ("total-data-files", "added-data-files", "deleted-data-files"),
    ("total-delete-files", "added-delete-files", "removed-delete-files"),
    ("total-position-deletes", "added-position-deletes", "removed-position-deletes"),
    ("total-equality-deletes", "added-equality-deletes", "removed-equality-deletes"),
];

/// Other figures that writers compute. A caller's value for one of these would be that of another snapshot.
const OTHER_FIGURES: [&str; 14] = [
    "operation",
    "changed-partition-count",
    "partition-summaries-included",
    "added-equality-delete-files",
    "removed-equality-delete-files",
    "added-position-delete-files",
    "removed-position-delete-files",
    "added-dvs",
    "removed-dvs",
    "deleted-duplicate-files",
    "manifests-created",
    "manifests-replaced",
    "manifests-kept",
    "entries-processed",
];

/// Prefix of the figures of single partitions.
const PARTITION_PREFIX: &str = "partitions.";

/// Counts over the files that a snapshot added, or those that it removed (Java: `SnapshotSummary`).
#[derive(Default)]
struct Figures {
    data_files: i64,
    records: i64,
    /// Of data and delete files; of a deletion vector its own bytes.
    bytes: i64,
    delete_files: i64,
    position_delete_files: i64,
    vectors: i64,
    equality_delete_files: i64,
    /// Rows in position-delete files and deletion vectors.
    position_deletes: i64,
    equality_deletes: i64,
}

impl Figures {
    fn of(files: &[FileFact]) -> Self {
        let mut figures = Self::default();
        for file in files {
            figures.bytes += file.bytes;
            match file.content {
                FileContent::Data => {
                    figures.data_files += 1;
                    figures.records += file.records;
                    continue;
                }
                FileContent::PositionDeletes { .. } => {
                    figures.position_delete_files += 1;
                    figures.position_deletes += file.records;
                }
                FileContent::DeletionVector { .. } => {
                    figures.vectors += 1;
                    figures.position_deletes += file.records;
                }
                FileContent::EqualityDeletes { .. } => {
                    figures.equality_delete_files += 1;
                    figures.equality_deletes += file.records;
                }
            }
            figures.delete_files += 1;
        }
        figures
    }
}

/// The summary of a snapshot that adds and removes data and delete files. `parent` is the parent's summary, `None`
/// for a first snapshot. Of `own`, the caller's keys, those that are figures are left out.
pub(super) fn summary(
    own: &BTreeMap<String, String>,
    added: &[FileFact],
    removed: &[FileFact],
    parent: Option<&BTreeMap<String, String>>,
) -> BTreeMap<String, String> {
    let mut summary: BTreeMap<String, String> =
        own.iter().filter(|(key, _)| !is_figure(key)).map(|(k, v)| (k.clone(), v.clone())).collect();
    let (added_of, removed_of) = (Figures::of(added), Figures::of(removed));
    let figures = [
        ("added-data-files", added_of.data_files),
        ("added-records", added_of.records),
        ("added-files-size", added_of.bytes),
        ("added-delete-files", added_of.delete_files),
        ("added-position-delete-files", added_of.position_delete_files),
        ("added-dvs", added_of.vectors),
        ("added-equality-delete-files", added_of.equality_delete_files),
        ("added-position-deletes", added_of.position_deletes),
        ("added-equality-deletes", added_of.equality_deletes),
        ("deleted-data-files", removed_of.data_files),
        ("deleted-records", removed_of.records),
        ("removed-files-size", removed_of.bytes),
        ("removed-delete-files", removed_of.delete_files),
        ("removed-position-delete-files", removed_of.position_delete_files),
        ("removed-dvs", removed_of.vectors),
        ("removed-equality-delete-files", removed_of.equality_delete_files),
        ("removed-position-deletes", removed_of.position_deletes),
        ("removed-equality-deletes", removed_of.equality_deletes),
    ];
    for (key, value) in figures {
        if value > 0 {
            summary.insert(key.to_owned(), value.to_string());
        }
    }
    let changed: HashSet<&Arc<Partition>> = added.iter().chain(removed).map(|f| &f.partition).collect();
    summary.insert("changed-partition-count".to_owned(), changed.len().to_string());
    for (total, plus, minus) in TOTALS {
        let figure = |key: &str| summary.get(key).and_then(|v| v.parse::<i64>().ok()).unwrap_or(0);
        let change = figure(plus) - figure(minus);
        let before = match parent {
            None => Some(0),
            Some(parent) => parent.get(total).and_then(|v| v.parse::<i64>().ok()),
        };
        if let Some(after) = before.and_then(|before| before.checked_add(change))
            && after >= 0
        {
            summary.insert(total.to_owned(), after.to_string());
        }
    }
    summary
}

fn is_figure(key: &str) -> bool {
    OTHER_FIGURES.contains(&key)
        || key.starts_with(PARTITION_PREFIX)
        || TOTALS.iter().any(|(total, plus, minus)| [*total, *plus, *minus].contains(&key))
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::SpecId;

    use super::*;

    fn file(path: &str, records: i64) -> FileFact {
        let partition = Arc::new(Partition { spec_id: SpecId(0), fields: vec![] });
        let content = FileContent::Data;
        FileFact { path: Arc::from(path), partition, records, bytes: records * 10, content }
    }

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn first_snapshot_starts_at_zero() {
        let summary = summary(&map(&[("source-snapshot-id", "7")]), &[file("a", 3)], &[], None);
        let expected = map(&[
            ("source-snapshot-id", "7"),
            ("added-data-files", "1"),
            ("added-records", "3"),
            ("added-files-size", "30"),
            ("changed-partition-count", "1"),
            ("total-records", "3"),
            ("total-files-size", "30"),
            ("total-data-files", "1"),
            ("total-delete-files", "0"),
            ("total-position-deletes", "0"),
            ("total-equality-deletes", "0"),
        ]);
        assert_eq!(summary, expected);
    }

    #[test]
    fn totals_follow_the_parent_and_only_what_it_states() {
        let parent = map(&[("total-records", "10"), ("total-delete-files", "2"), ("total-files-size", "x")]);
        let summary = summary(&BTreeMap::new(), &[file("a", 3)], &[file("b", 4)], Some(&parent));
        assert_eq!(summary.get("total-records").map(String::as_str), Some("9"));
        assert_eq!(summary.get("total-delete-files").map(String::as_str), Some("2"));
        assert_eq!(summary.get("total-data-files"), None);
        assert_eq!(summary.get("total-files-size"), None);
        assert_eq!(summary.get("removed-files-size").map(String::as_str), Some("40"));
    }

    #[test]
    fn delete_files_are_counted_by_kind_as_java_does() {
        let delete = |content: FileContent, records| FileFact { content, ..file("d", records) };
        let vector = |offset| FileContent::DeletionVector { of: Arc::from("a"), offset };
        let added = [
            file("a", 3),
            delete(vector(4), 2),
            delete(vector(50), 1),
            delete(FileContent::EqualityDeletes { field_ids: vec![1] }, 7),
        ];
        let removed = [delete(FileContent::PositionDeletes { of: None }, 4)];
        let parent = map(&[("total-delete-files", "1"), ("total-position-deletes", "4")]);
        let summary = summary(&BTreeMap::new(), &added, &removed, Some(&parent));
        let expected = map(&[
            ("added-data-files", "1"),
            ("added-records", "3"),
            ("added-files-size", "130"),
            ("added-delete-files", "3"),
            ("added-dvs", "2"),
            ("added-equality-delete-files", "1"),
            ("added-position-deletes", "3"),
            ("added-equality-deletes", "7"),
            ("removed-delete-files", "1"),
            ("removed-position-delete-files", "1"),
            ("removed-position-deletes", "4"),
            ("removed-files-size", "40"),
            ("changed-partition-count", "1"),
            ("total-delete-files", "3"),
            ("total-position-deletes", "3"),
        ]);
        assert_eq!(summary, expected);
    }

    #[test]
    fn totals_are_never_negative() {
        let parent = map(&[("total-records", "1")]);
        let summary = summary(&BTreeMap::new(), &[], &[file("b", 4)], Some(&parent));
        assert_eq!(summary.get("total-records"), None);
    }

    #[test]
    fn figures_of_the_source_snapshot_are_not_taken_over() {
        let own =
            map(&[("total-records", "999"), ("partitions.a=1", "x"), ("wap.id", "w"), ("operation", "o")]);
        let summary = summary(&own, &[file("a", 1)], &[], None);
        assert_eq!(summary.get("total-records").map(String::as_str), Some("1"));
        assert_eq!(summary.get("wap.id").map(String::as_str), Some("w"));
        assert!(!summary.contains_key("partitions.a=1") && !summary.contains_key("operation"));
    }
}
