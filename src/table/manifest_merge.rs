//! Which manifests to merge (rule L9): the decision, without IO.
//!
//! Follows Java's `ManifestMergeManager` and its bin packing, at the table's own thresholds: manifests of
//! one spec are packed, from the oldest on, into consecutive bins of the target size; order is kept. The
//! newest bin, the one that holds the newest manifest, waits until it has the minimum count; every other
//! bin of two or more is merged at once. Data and delete manifests are planned apart, each by itself.
//!
//! Other than Java's, a bin is full with [`MAX_MERGED_FILES`] as well: a merge holds what it merges, and a size in
//! bytes says little of that.

use std::collections::BTreeMap;

use iceberg::spec::{ManifestFile, ManifestStatus};
use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::SnapshotId;

use super::manifest_codec::Entry;

const MERGE_ENABLED: &str = "commit.manifest-merge.enabled";
const MIN_COUNT: &str = "commit.manifest.min-count-to-merge";
const TARGET_SIZE: &str = "commit.manifest.target-size-bytes";
/// Java's default of `commit.manifest.min-count-to-merge`.
const DEFAULT_MIN_COUNT: i64 = 100;
/// Java's default of `commit.manifest.target-size-bytes`, in bytes.
const DEFAULT_TARGET_SIZE_BYTES: i64 = 8 * 1024 * 1024;

/// A merged manifest has at most this many files.
const MAX_MERGED_FILES: u64 = 20_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MergeSettings {
    pub enabled: bool,
    pub min_count: usize,
    pub target_size_bytes: i64,
}

impl MergeSettings {
    pub fn of(facts: &TableFacts) -> Self {
        let min_count = facts.property_i64(MIN_COUNT, DEFAULT_MIN_COUNT);
        Self {
            enabled: facts.property_bool(MERGE_ENABLED, true),
            min_count: usize::try_from(min_count).unwrap_or(0),
            target_size_bytes: facts.property_i64(TARGET_SIZE, DEFAULT_TARGET_SIZE_BYTES),
        }
    }
}

/// What becomes of the manifests of a list; positions refer to the list that was given.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum MergeStep {
    Keep(usize),
    /// Two or more manifests of one spec become one.
    Merge(Vec<usize>),
}

/// Plans the merge of manifests of one content, newest first. The result lists every position once.
pub(super) fn plan<M: AsRef<ManifestFile>>(manifests: &[M], settings: &MergeSettings) -> Vec<MergeStep> {
    if !settings.enabled {
        return (0..manifests.len()).map(MergeStep::Keep).collect();
    }
    let mut by_spec: BTreeMap<i32, Vec<usize>> = BTreeMap::new();
    for (at, manifest) in manifests.iter().enumerate() {
        by_spec.entry(manifest.as_ref().partition_spec_id).or_default().push(at);
    }
    let mut steps = Vec::with_capacity(manifests.len());
    for (_, group) in by_spec.into_iter().rev() {
        let size = |at: usize| {
            let manifest = manifests[at].as_ref();
            Size { bytes: manifest.manifest_length, files: file_count(manifest) }
        };
        let full = Size { bytes: settings.target_size_bytes, files: MAX_MERGED_FILES };
        for bin in pack_from_end(&group, size, full) {
            // Position 0 is the newest manifest of all.
            let waits = bin.contains(&0) && bin.len() < settings.min_count;
            if bin.len() == 1 || waits {
                steps.extend(bin.into_iter().map(MergeStep::Keep));
            } else {
                steps.push(MergeStep::Merge(bin));
            }
        }
    }
    steps
}

/// Live and removed files of a manifest, as its list says; 0 where it does not.
pub(super) fn file_count(manifest: &ManifestFile) -> u64 {
    let counts = [manifest.added_files_count, manifest.existing_files_count, manifest.deleted_files_count];
    counts.into_iter().flatten().map(u64::from).sum()
}

#[derive(Clone, Copy, Default)]
struct Size {
    bytes: i64,
    files: u64,
}

impl Size {
    fn and(self, other: Self) -> Self {
        Self { bytes: self.bytes.saturating_add(other.bytes), files: self.files.saturating_add(other.files) }
    }

    fn fits_in(self, full: Self) -> bool {
        self.bytes <= full.bytes && self.files <= full.files
    }
}

/// Consecutive bins that are at most full, filled from the end, so that the first bin is the one that
/// is left under-filled and is merged later. An item larger than that has a bin of its own.
fn pack_from_end(items: &[usize], size: impl Fn(usize) -> Size, full: Size) -> Vec<Vec<usize>> {
    let mut bins: Vec<Vec<usize>> = Vec::new();
    let mut bin: Vec<usize> = Vec::new();
    let mut packed = Size::default();
    for item in items.iter().rev() {
        let own = size(*item);
        if !bin.is_empty() && !packed.and(own).fits_in(full) {
            bin.reverse();
            bins.push(std::mem::take(&mut bin));
            packed = Size::default();
        }
        bin.push(*item);
        packed = packed.and(own);
    }
    if !bin.is_empty() {
        bin.reverse();
        bins.push(bin);
    }
    bins.reverse();
    bins
}

/// The entry as it stands in a manifest merged by `snapshot`; `None` when it is left out.
///
/// Removals of older snapshots are dropped (rule D8), what older snapshots added is EXISTING, and the work
/// of `snapshot` itself keeps its status.
pub(super) fn carried_over(entry: &Entry, snapshot: SnapshotId) -> Option<Entry> {
    let own = entry.snapshot == snapshot;
    let status = match entry.status {
        ManifestStatus::Deleted if own => ManifestStatus::Deleted,
        ManifestStatus::Deleted => return None,
        ManifestStatus::Added if own => ManifestStatus::Added,
        ManifestStatus::Added | ManifestStatus::Existing => ManifestStatus::Existing,
    };
    Some(Entry { status, ..entry.clone() })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use iceberg::spec::ManifestContentType;

    use super::*;

    fn manifest(spec_id: i32, length: i64) -> Arc<ManifestFile> {
        Arc::new(ManifestFile {
            manifest_path: String::new(),
            manifest_length: length,
            partition_spec_id: spec_id,
            content: ManifestContentType::Data,
            sequence_number: 1,
            min_sequence_number: 1,
            added_snapshot_id: 1,
            added_files_count: Some(1),
            existing_files_count: Some(0),
            deleted_files_count: Some(0),
            added_rows_count: Some(1),
            existing_rows_count: Some(0),
            deleted_rows_count: Some(0),
            partitions: None,
            key_metadata: None,
            first_row_id: None,
        })
    }

    fn settings(min_count: usize, target_size_bytes: i64) -> MergeSettings {
        MergeSettings { enabled: true, min_count, target_size_bytes }
    }

    fn keep(positions: impl IntoIterator<Item = usize>) -> Vec<MergeStep> {
        positions.into_iter().map(MergeStep::Keep).collect()
    }

    #[test]
    fn rule_l9_newest_bin_waits_for_the_minimum_count() {
        let four: Vec<_> = (0..4).map(|_| manifest(0, 10)).collect();
        assert_eq!(plan(&four, &settings(5, 1000)), keep(0..4));
        assert_eq!(plan(&four, &settings(4, 1000)), vec![MergeStep::Merge(vec![0, 1, 2, 3])]);
        let off = MergeSettings { enabled: false, ..settings(2, 1000) };
        assert_eq!(plan(&four, &off), keep(0..4));
    }

    #[test]
    fn rule_l9_older_bins_are_merged_whatever_the_count() {
        // From the end: 40 + 50 fill a bin, then 30 + 20 + 10.
        let list: Vec<_> = [10, 20, 30, 40, 50].map(|length| manifest(0, length)).into();
        let steps = plan(&list, &settings(100, 90));
        let mut expected = keep(0..3);
        expected.push(MergeStep::Merge(vec![3, 4]));
        assert_eq!(steps, expected);
    }

    #[test]
    fn rule_l9_a_manifest_of_target_size_stays_alone() {
        let list = vec![manifest(0, 5), manifest(0, 500), manifest(0, 5)];
        assert_eq!(plan(&list, &settings(2, 100)), keep(0..3));
    }

    #[test]
    fn rule_l9_specs_are_never_mixed() {
        let list = vec![manifest(1, 10), manifest(0, 10), manifest(1, 10), manifest(0, 10)];
        // The bin of spec 0 does not hold the newest manifest and is merged at once.
        let mut expected = keep([0, 2]);
        expected.push(MergeStep::Merge(vec![1, 3]));
        assert_eq!(plan(&list, &settings(3, 1000)), expected);
    }

    #[test]
    fn a_merge_holds_so_many_files_and_no_more_whatever_their_size() {
        let of = |files: u32| {
            let bare = manifest(0, 1).as_ref().clone();
            Arc::new(ManifestFile { added_files_count: Some(files), ..bare })
        };
        let list = vec![of(9_000), of(9_000), of(8_000), of(3_000), of(50_000), of(20_000)];
        let mut expected = keep(0..1);
        expected.push(MergeStep::Merge(vec![1, 2, 3]));
        expected.extend(keep([4, 5]));
        assert_eq!(plan(&list, &settings(100, i64::MAX)), expected);
    }

    #[test]
    fn every_manifest_is_planned_once() {
        let list: Vec<_> = (0..50).map(|at| manifest(at % 3, i64::from(at) * 7)).collect();
        let mut positions: Vec<usize> = plan(&list, &settings(4, 300))
            .into_iter()
            .flat_map(|step| match step {
                MergeStep::Keep(at) => vec![at],
                MergeStep::Merge(bin) => bin,
            })
            .collect();
        positions.sort_unstable();
        assert_eq!(positions, (0..50).collect::<Vec<_>>());
    }
}
