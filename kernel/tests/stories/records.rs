//! Records of operations: hostile input until parsed (rule S1).

use std::collections::BTreeMap;

use mergeberg_kernel::ids::{SnapshotId, TableName};
use mergeberg_kernel::record::{
    Columns, MAX_RECORD_BYTES, Operation, PinnedInput, RECORD_ID_KEY, RECORD_KEY, Record, RecordError,
    RecordFinding,
};

fn target() -> TableName {
    "shop.orders".parse().unwrap()
}

fn parse(text: &str) -> Result<Record, RecordError> {
    Record::parse(text, &target())
}

#[test]
fn the_documented_form_reads_back() {
    let text = r#"{"v":1,"id":"2024-01-05/carriers","op":"overwrite-where","where":"carrier = 'UA'",
        "query":"SELECT * FROM up","inputs":{"up":{"table":"raw.flights","snapshot-id":77}},"expect":{"rows":10}}"#;
    let record = parse(text).unwrap();
    assert_eq!(record.expected_rows, Some(10));
    let Operation::OverwriteWhere { filter, rows } = &record.operation else { panic!("{record:?}") };
    assert_eq!((filter.to_string().as_str(), &rows.columns), ("carrier = 'UA'", &Columns::ByName));
    let pin = PinnedInput { table: "raw.flights".parse().unwrap(), snapshot_id: SnapshotId(77), uuid: None };
    assert_eq!(record.inputs, BTreeMap::from([("up".to_owned(), pin)]));
    assert!(!record.reads_target);

    for op in ["append", "replace-partitions"] {
        let record = parse(&format!(r#"{{"v":1,"id":"x","op":"{op}"}}"#)).unwrap();
        assert_eq!(record.operation.name(), op);
    }
}

#[test]
fn hostile_records_are_typed_refusals() {
    let malformed = [
        "",
        "null",
        "1",
        "[]",
        "{}",
        "{",
        r#""v""#,
        r#"{"v":1}"#,
        r#"{"v":1,"id":"x"}"#,
        r#"{"v":1,"op":"append"}"#,
        r#"{"v":1,"id":"","op":"append"}"#,
        r#"{"v":1,"id":"  ","op":"append"}"#,
        r#"{"v":1,"id":7,"op":"append"}"#,
        r#"{"v":1,"id":"x","op":7}"#,
        r#"{"v":1,"id":"x","op":"append","extra":1}"#,
        r#"{"v":1,"id":"x","op":"append","where":"a = 1"}"#,
        r#"{"v":1,"id":"x","op":"append","query":"SELECT 1"}"#,
        r#"{"v":1,"id":"x","op":"replace-partitions","where":"a = 1"}"#,
        r#"{"v":1,"id":"x","op":"append","inputs":{"up":{"table":"raw.up","snapshot-id":1}}}"#,
        r#"{"v":1,"id":"x","op":"overwrite-where"}"#,
        r#"{"v":1,"id":"x","op":"overwrite-where","where":"a = 1"}"#,
        r#"{"v":1,"id":"x","op":"overwrite-where","query":"SELECT 1"}"#,
        r#"{"v":1,"id":"x","op":"overwrite-where","where":" ","query":"SELECT 1"}"#,
        r#"{"v":1,"id":"x","op":"overwrite-where","where":"a = 1","query":""}"#,
        r#"{"v":1,"id":"x","op":"append","expect":{"rows":"ten"}}"#,
        r#"{"v":1,"id":"x","op":"append","expect":{"rows":1,"sum":2}}"#,
        r#"{"v":1,"id":"x","op":"append","expect":{"rows":-1}}"#,
        r#"{"v":1,"id":"x","op":"delete-where"}"#,
        r#"{"v":1,"id":"x","op":"delete-where","where":"a = 1","set":{"b":"1"}}"#,
        r#"{"v":1,"id":"x","op":"update-where","where":"a = 1"}"#,
        r#"{"v":1,"id":"x","op":"update-where","where":"a = 1","set":{}}"#,
        r#"{"v":1,"id":"x","op":"update-where","where":"a = 1","set":{"b":1}}"#,
        r#"{"v":1,"id":"x","op":"delete-where","where":"a = 1","expect":{"rows":1}}"#,
        r#"{"v":1,"id":"x","op":"merge-into","source":"SELECT 1 AS a","on":"target.a = source.a"}"#,
        r#"{"v":1,"id":"x","op":"merge-into","source":"SELECT 1 AS a","on":"true","when-matched":[{"insert":"*"}]}"#,
        r#"{"v":1,"id":"x","op":"merge-into","source":"SELECT 1 AS a","on":"true","when-not-matched":[{"delete":true}]}"#,
        r#"{"v":1,"id":"x","op":"merge-into","source":"SELECT 1 AS a","on":"true","when-matched":[{"delete":true,"update":"*"}]}"#,
        r#"{"v":1,"id":"x","op":"sql"}"#,
        r#"{"v":1,"id":"x","op":"sql","sql":"DELETE FROM shop.orders","overwrite-mode":"sometimes"}"#,
        r#"{"v":1,"id":"x","op":"sql","sql":"DELETE FROM shop.orders","parameters":{"a":[1]}}"#,
        r#"{"v":1,"id":"x","op":"overwrite-where","where":"a","query":"b","inputs":{"up":{"table":"up","snapshot-id":1}}}"#,
        r#"{"v":1,"id":"x","op":"overwrite-where","where":"a","query":"b","inputs":{"up":{"table":"raw.up"}}}"#,
        r#"{"v":1,"id":"x","op":"overwrite-where","where":"a","query":"b","inputs":{"up":{"table":"raw.up","snapshot-id":1,"ref":"main"}}}"#,
    ];
    for text in malformed {
        assert!(matches!(parse(text), Err(RecordError::Malformed(_))), "{text}: {:?}", parse(text));
    }
    let deep = format!(r#"{{"v":1,"id":{}1{}}}"#, "[".repeat(5000), "]".repeat(5000));
    assert!(matches!(parse(&deep), Err(RecordError::Malformed(_))));
}

#[test]
fn unknown_versions_and_operations_say_so_before_anything_else() {
    for version in ["2", "0", "1.5", "-1", "\"1\"", "null", "[1]"] {
        let text = format!(r#"{{"v":{version},"anything":"else"}}"#);
        assert_eq!(parse(&text), Err(RecordError::UnknownVersion(version.to_owned())), "{text}");
    }
    for op in ["upsert", "Append", "", "append "] {
        let text = format!(r#"{{"v":1,"id":"x","op":"{op}","on":"a = b"}}"#);
        assert_eq!(parse(&text), Err(RecordError::UnknownOperation(op.to_owned())), "{text}");
    }
}

#[test]
fn a_pin_of_the_target_is_rejected_when_it_is_made() {
    let text = r#"{"v":1,"id":"x","op":"overwrite-where","where":"a","query":"b",
        "inputs":{"me":{"table":"shop.orders","snapshot-id":1}}}"#;
    assert_eq!(parse(text), Err(RecordError::PinsTarget { alias: "me".to_owned() }));
}

#[test]
fn no_input_hides_the_target_behind_its_alias() {
    // A query reads the target as `target`; another table of that name would be read in its place.
    for alias in ["target", "Target", "TARGET"] {
        let text = format!(
            r#"{{"v":1,"id":"x","op":"overwrite-where","where":"a","query":"b",
            "inputs":{{"{alias}":{{"table":"raw.up","snapshot-id":1}}}}}}"#
        );
        let Err(RecordError::Malformed(message)) = parse(&text) else { panic!("{:?}", parse(&text)) };
        assert!(message.contains("target"), "{message}");
    }
}

#[test]
fn a_long_record_is_refused_before_it_is_parsed() {
    let padded = |len: usize| {
        let body = r#"{"v":1,"id":"x","op":"append"}"#;
        format!("{body}{}", " ".repeat(len - body.len()))
    };
    assert!(parse(&padded(MAX_RECORD_BYTES)).is_ok());
    assert_eq!(parse(&padded(MAX_RECORD_BYTES + 1)), Err(RecordError::TooLong(MAX_RECORD_BYTES + 1)));
}

#[test]
fn a_summary_without_record_is_absent_and_a_bad_one_is_not() {
    let finding = |text: Option<&str>| {
        let summary = text.map(|t| (RECORD_KEY.to_owned(), t.to_owned())).into_iter().collect();
        RecordFinding::of_summary(&summary, &target())
    };
    assert_eq!(finding(None), RecordFinding::Absent);
    assert!(finding(Some(r#"{"v":1,"id":"x","op":"append"}"#)).found().is_some());
    assert!(matches!(finding(Some("")), RecordFinding::Invalid(RecordError::Malformed(_))));

    let named: BTreeMap<String, String> = [(RECORD_ID_KEY.to_owned(), "load-7".to_owned())].into();
    assert_eq!(
        RecordFinding::of_summary(&named, &target()),
        RecordFinding::Named { id: "load-7".to_owned(), digest: None }
    );
    let mut both = named;
    both.insert(RECORD_KEY.to_owned(), r#"{"v":1,"id":"load-7","op":"append"}"#.to_owned());
    assert!(matches!(RecordFinding::of_summary(&both, &target()), RecordFinding::Invalid(_)));
}

#[test]
fn messages_of_refused_records_help() {
    let message = |text: &str| parse(text).unwrap_err().to_string();
    assert!(message(r#"{"v":9}"#).contains("record version 9"));
    assert!(message(r#"{"v":1,"op":"upsert"}"#).contains("known: append, replace-partitions"));
    assert!(message(r#"{"v":1,"id":"x","op":"append","extra":1}"#).contains("extra"));
}

#[test]
fn table_names_are_namespace_and_name() {
    let name: TableName = "a.b.c".parse().unwrap();
    assert_eq!((name.namespace_text().as_str(), name.name.as_str()), ("a.b", "c"));
    assert_eq!(name.to_string(), "a.b.c");
    for wrong in ["", ".", "a", "a.", ".a", "a..b", " .a", "a. "] {
        assert!(wrong.parse::<TableName>().is_err(), "'{wrong}'");
    }
}
