//! Comparing schemas by field id (design, section 8).

use mergeberg_kernel::ids::SchemaId;
use mergeberg_kernel::structure::{
    FieldFact, SchemaFact, StructureChangeKind as Kind, compare_schemas, is_promotion, unreadable_as,
};

/// `3 status string?` is optional, `1 id long` required, `5 note string =` has an initial default.
fn schema(fields: &str) -> SchemaFact {
    let fields = fields.split(',').map(str::trim).filter(|f| !f.is_empty());
    SchemaFact {
        id: SchemaId(0),
        fields: fields
            .map(|text| {
                let words: Vec<&str> = text.split(' ').collect();
                FieldFact {
                    id: words[0].parse().unwrap(),
                    name: words[1].to_owned(),
                    required: !words[2].ends_with('?'),
                    type_name: words[2].trim_end_matches('?').replace(';', ", "),
                    has_initial_default: words.get(3) == Some(&"="),
                }
            })
            .collect(),
        identifier_field_ids: Vec::new(),
    }
}

const ORD: &str = "1 order_id long, 2 order_date date, 3 status string?, 4 amount decimal(12;2)?";

fn kinds(old: &str, new: &str) -> Vec<Kind> {
    compare_schemas(&schema(old), &schema(new)).into_iter().map(|c| c.kind).collect()
}

fn unreadable(written: &str, current: &str) -> Vec<Kind> {
    unreadable_as(&schema(written), &schema(current)).into_iter().map(|c| c.kind).collect()
}

#[test]
fn the_same_schema_has_no_differences_in_any_order() {
    assert_eq!(kinds(ORD, ORD), []);
    assert_eq!(kinds("1 a int, 2 b int", "2 b int, 1 a int"), []);
    // Names that differ by case alone were there before: nothing changed.
    assert_eq!(kinds("1 a int, 2 A int", "1 a int, 2 A int"), []);
}

#[test]
fn case_o18_written_before_a_column_was_dropped_and_another_added() {
    let current = "1 order_id long, 2 order_date date, 4 amount decimal(12;2)?, 5 note string?";
    assert_eq!(kinds(ORD, current), [Kind::ColumnAdded, Kind::ColumnDropped]);
    assert_eq!(unreadable(ORD, current), [], "old rows read: note is null, status is not shown");
}

#[test]
fn case_o19_a_column_that_differs_by_letter_case_only() {
    let changes = compare_schemas(&schema(ORD), &schema(&format!("{ORD}, 5 STATUS string?")));
    let twin = changes.iter().find(|c| c.kind == Kind::CaseTwin).unwrap();
    assert_eq!(twin.field_ids, [3, 5], "both field ids are named");
    // Once it is there, adding more does not report it again.
    let with_twin = format!("{ORD}, 5 STATUS string?");
    assert_eq!(kinds(&with_twin, &format!("{with_twin}, 6 note string?")), [Kind::ColumnAdded]);
    assert!(kinds("1 a int, 2 b int", "1 a int, 2 A int").contains(&Kind::CaseTwin), "by a rename");
}

#[test]
fn case_o19_a_name_that_means_another_column_now() {
    // Renamed away, and a new column took the name.
    let changes = compare_schemas(&schema("3 status string?"), &schema("3 state string?, 5 status string?"));
    let clash = changes.iter().find(|c| c.kind == Kind::NameClash).unwrap();
    assert_eq!(clash.field_ids, [3, 5]);
    // Renamed onto the name of another column, which has gone or taken another name.
    assert!(kinds("3 status string?, 5 state string?", "3 state string?").contains(&Kind::NameClash));
    assert!(kinds("1 a int, 2 b int", "1 b int, 2 a int").contains(&Kind::NameClash), "swapped");
    // The same without case: engines that fold names read one for the other.
    assert!(kinds("3 status string?", "5 STATUS string?").contains(&Kind::NameClash));
    assert!(!kinds("3 status string?", "3 state string?").contains(&Kind::NameClash));
    assert!(!unreadable("1 a int, 2 b int", "1 b int, 2 a int").is_empty());
}

#[test]
fn types_promote_only_as_the_spec_allows() {
    for (from, to) in [("int", "long"), ("float", "double"), ("decimal(9, 2)", "decimal(12, 2)")] {
        assert!(is_promotion(from, to), "{from} -> {to}");
        assert!(!is_promotion(to, from), "{to} -> {from}");
    }
    for (from, to) in [
        ("int", "string"),
        ("string", "int"),
        ("int", "double"),
        ("long", "decimal(12, 2)"),
        ("decimal(9, 2)", "decimal(12, 3)"),
        ("timestamp", "timestamptz"),
        // A promotion of format v3 only.
        ("date", "timestamp"),
        ("date", "timestamptz"),
        ("decimal(x, 2)", "decimal(12, 2)"),
    ] {
        assert!(!is_promotion(from, to), "{from} -> {to}");
    }
}

#[test]
fn what_is_readable_is_decided_by_field_id() {
    assert_eq!(unreadable("1 a int", "1 a long"), []);
    assert_eq!(unreadable("1 a long", "1 a int"), [Kind::TypeNarrowed]);
    assert_eq!(unreadable("1 a int", "1 renamed int"), []);
    assert_eq!(unreadable("1 a int?", "1 a int"), [Kind::MadeRequired]);
    assert_eq!(unreadable("1 a int", "1 a int?"), []);
    assert_eq!(unreadable("1 a int", "1 a int, 2 b int"), [Kind::ColumnAdded], "required without a default");
    assert_eq!(unreadable("1 a int", "1 a int, 2 b int ="), []);
    assert_eq!(unreadable("1 a int", "1 a int, 2 b int?"), []);
    assert!(Kind::TypeNarrowed.is_unsafe());
}

#[test]
fn identifier_columns_compare_as_a_set() {
    let with = |ids: &[i32]| SchemaFact { identifier_field_ids: ids.to_vec(), ..schema(ORD) };
    assert_eq!(compare_schemas(&with(&[1, 2]), &with(&[2, 1])), []);
    let changes = compare_schemas(&with(&[1]), &with(&[2, 1]));
    assert_eq!(changes[0].kind, Kind::IdentifierChanged);
    assert_eq!(changes[0].field_ids, [1, 2]);
}

#[test]
fn changes_are_said_in_a_sentence() {
    let texts: Vec<String> =
        compare_schemas(&schema(ORD), &schema("1 order_id long, 2 day date, 3 status string"))
            .into_iter()
            .map(|c| c.text)
            .collect();
    assert_eq!(
        texts,
        [
            "column 2 renamed: 'order_date' -> 'day'",
            "column 3 'status' is now required",
            "column 4 'amount' dropped"
        ]
    );
}
