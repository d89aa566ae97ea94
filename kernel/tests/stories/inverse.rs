//! The inverse of a request: what goes, what comes back, and what stands in its way.

use mergeberg_kernel::change::{ChangeSet, FileContent, FileFact};
use mergeberg_kernel::ids::SnapshotId;
use mergeberg_kernel::inverse::{Inverse, obstacles};
use mergeberg_kernel::record::{Operation, RecordFinding};

use crate::story::{file, record};

fn change(id: i64, added: &[&FileFact], removed: &[&FileFact]) -> ChangeSet {
    let data = |files: &[&FileFact]| -> Vec<FileFact> {
        files.iter().filter(|f| f.content == FileContent::Data).map(|f| (*f).clone()).collect()
    };
    let deletes = |files: &[&FileFact]| -> Vec<FileFact> {
        files.iter().filter(|f| f.content != FileContent::Data).map(|f| (*f).clone()).collect()
    };
    ChangeSet {
        snapshot: SnapshotId(id),
        schema_id: None,
        label: "overwrite".to_owned(),
        record: RecordFinding::Absent,
        replaces_partitions: false,
        added: data(added),
        removed: data(removed),
        added_deletes: deletes(added),
        removed_deletes: deletes(removed),
    }
}

fn positions(text: &str, of: Option<&str>) -> FileFact {
    FileFact { content: FileContent::PositionDeletes { of: of.map(Into::into) }, ..file(text) }
}

fn values(text: &str) -> FileFact {
    FileFact { content: FileContent::EqualityDeletes { field_ids: vec![1] }, ..file(text) }
}

fn rules(inverse: &Inverse, later: &ChangeSet) -> Vec<String> {
    obstacles(inverse, [later]).into_iter().map(|found| found.rule).collect()
}

#[test]
fn what_a_request_added_and_removed_itself_leaves_no_trace() {
    let (a, b, c) = (file("A1@08-20"), file("B1@08-20"), file("C1@08-21"));
    let first = change(1, &[&b], &[&a]);
    let second = change(2, &[&c], &[&b]);
    let inverse = Inverse::of([&first, &second]);
    assert_eq!(
        (inverse.remove.as_slice(), inverse.restore.as_slice()),
        ([c].as_slice(), [a.clone()].as_slice())
    );
    assert!(Inverse::of([&change(1, &[&a], &[]), &change(2, &[], &[&a])]).is_empty());
}

#[test]
fn delete_files_are_kept_apart_from_data() {
    let (old, new) = (positions("D1@08-20", Some("A1")), positions("D2@08-20", Some("A1")));
    let inverse = Inverse::of([&change(1, &[&new], &[&old])]);
    assert!(inverse.remove.is_empty() && inverse.restore.is_empty());
    assert_eq!((inverse.remove_deletes, inverse.restore_deletes), (vec![new], vec![old]));
}

#[test]
fn only_a_change_of_the_same_files_stands_in_its_way() {
    let (a, b) = (file("A1@08-20"), file("B1@08-20"));
    let inverse = Inverse::of([&change(1, &[&b], &[&a])]);
    let none: [String; 0] = [];
    assert_eq!(rules(&inverse, &change(2, &[&file("C1@08-20")], &[&file("Z9@08-20")])), none);
    assert_eq!(rules(&inverse, &change(2, &[], &[&b])), ["a file that the request added is gone"]);
    assert_eq!(rules(&inverse, &change(2, &[&a], &[])), ["a file that the request removed was put back"]);
    let named = change(2, &[&positions("D1@08-20", Some("B1"))], &[]);
    assert_eq!(rules(&inverse, &named), ["rows of a file that the request added were deleted"]);
    assert_eq!(rules(&inverse, &change(2, &[&positions("D1@08-20", Some("C1"))], &[])), none);
}

#[test]
fn rule_c6_deletes_that_name_no_file_reach_every_file_of_their_partition() {
    let inverse = Inverse::of([&change(1, &[&file("B1@08-20")], &[])]);
    let hit = ["rows of a file that the request added were deleted"];
    assert_eq!(rules(&inverse, &change(2, &[&positions("D1@08-20", None)], &[])), hit);
    assert_eq!(rules(&inverse, &change(2, &[&values("E1@08-20")], &[])), hit);
    assert_eq!(rules(&inverse, &change(2, &[&values("E1@*")], &[])), hit, "unpartitioned: everything");
    assert!(rules(&inverse, &change(2, &[&values("E1@08-21")], &[])).is_empty());
}

#[test]
fn what_would_have_hit_the_files_that_come_back_stands_in_its_way() {
    let inverse = Inverse::of([&change(1, &[], &[&file("A1@08-20")])]);
    let by_value = change(2, &[&values("E1@08-20")], &[]);
    assert_eq!(rules(&inverse, &by_value), ["rows were deleted by value where files are to come back"]);
    let replaced = ChangeSet {
        record: RecordFinding::Found(Box::new(record("r", Operation::ReplacePartitions))),
        ..change(2, &[&file("B1@08-20")], &[])
    };
    let said = ChangeSet { replaces_partitions: true, ..change(2, &[&file("B1@08-20")], &[]) };
    for replaced in [replaced, said] {
        assert_eq!(rules(&inverse, &replaced), ["a partition to which files are to come back was replaced"]);
    }
    let vectors = Inverse::of([&change(1, &[], &[&positions("D1@08-20", Some("A1"))])]);
    let gone = ["a file whose deletes are to come back is gone"];
    assert_eq!(rules(&vectors, &change(2, &[], &[&file("A1@08-20")])), gone);
    let again = change(2, &[&positions("D2@08-20", Some("A1"))], &[]);
    assert_eq!(rules(&vectors, &again), ["rows of a file whose deletes are to come back were deleted"]);
}
