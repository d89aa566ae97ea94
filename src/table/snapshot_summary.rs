//! The figures in a snapshot's summary, with Java's keys and Java's care: a total is carried on only from
//! a parent that states it, and never becomes negative. They are for people; no decision reads them.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use mergeberg_kernel::change::FileFact;
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

/// The summary of a snapshot that adds and removes data files. `parent` is the parent's summary, `None`
/// for a first snapshot. Of `own`, the caller's keys, those that are figures are left out.
pub(super) fn summary(
    own: &BTreeMap<String, String>,
    added: &[FileFact],
    removed: &[FileFact],
    parent: Option<&BTreeMap<String, String>>,
) -> BTreeMap<String, String> {
    let mut summary: BTreeMap<String, String> =
        own.iter().filter(|(key, _)| !is_figure(key)).map(|(k, v)| (k.clone(), v.clone())).collect();
    let sum = |files: &[FileFact], of: fn(&FileFact) -> i64| files.iter().map(of).sum::<i64>();
    let figures = [
        ("added-data-files", sum(added, |_| 1)),
        ("added-records", sum(added, |f| f.records)),
        ("added-files-size", sum(added, |f| f.bytes)),
        ("deleted-data-files", sum(removed, |_| 1)),
        ("deleted-records", sum(removed, |f| f.records)),
        ("removed-files-size", sum(removed, |f| f.bytes)),
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
    use mergeberg_kernel::change::FileContent;
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
