use datafusion::arrow::array::{
    Decimal128Array, Float32Array, Float64Array, Int32Array, Int64Array, StringArray,
};

use super::super::test_files::parquet;
use super::*;

const PARQUET: DataFileFormat = DataFileFormat::Parquet;

fn set_of(columns: &[(i32, DataType)]) -> KeySet {
    let columns = columns.iter().map(|(id, data_type)| KeyColumn { id: *id, data_type: data_type.clone() });
    KeySet::new(columns.collect(), MAX_KEYS_BYTES).unwrap()
}

/// Which of the rows are deleted, for a data file that is older than the delete file.
fn deleted(set: &KeySet, columns: &[ArrayRef]) -> Vec<bool> {
    let mut marks = vec![false; columns[0].len()];
    set.mark(columns, 0, &mut marks).unwrap();
    marks
}

fn ids(values: &[Option<i64>]) -> ArrayRef {
    Arc::new(values.iter().copied().collect::<Int64Array>())
}

/// One file of one double column.
fn doubles(values: Vec<Option<f64>>) -> KeySet {
    let mut set = set_of(&[(4, DataType::Float64)]);
    let rows = values.len() as u64;
    let column: ArrayRef = Arc::new(Float64Array::from(values));
    set.add_file("d", parquet(vec![(Some(4), "amount", column)]).into(), PARQUET, rows, 1).unwrap();
    set
}

#[test]
fn null_equals_null_and_nothing_else() {
    let mut set = set_of(&[(1, DataType::Int64)]);
    set.add_file("d", parquet(vec![(Some(1), "id", ids(&[None, Some(7)]))]).into(), PARQUET, 2, 1).unwrap();
    assert_eq!(deleted(&set, &[ids(&[None, Some(0), Some(7), None])]), [true, false, true, true]);
    // Without a null among the keys no null is deleted.
    let mut set = set_of(&[(1, DataType::Int64)]);
    set.add_file("d", parquet(vec![(Some(1), "id", ids(&[Some(0)]))]).into(), PARQUET, 1, 1).unwrap();
    assert_eq!(deleted(&set, &[ids(&[None, Some(0)])]), [false, true]);
}

#[test]
fn nan_equals_nan_and_minus_zero_is_not_zero() {
    let other_nan = f64::from_bits(f64::NAN.to_bits() | 1);
    assert!(other_nan.is_nan() && other_nan.to_bits() != f64::NAN.to_bits());
    let rows: ArrayRef = Arc::new(Float64Array::from(vec![
        Some(f64::NAN),
        Some(-f64::NAN),
        Some(other_nan),
        Some(0.0),
        Some(-0.0),
        None,
    ]));
    let rows = [rows];
    assert_eq!(deleted(&doubles(vec![Some(f64::NAN)]), &rows), [true, true, true, false, false, false]);
    assert_eq!(deleted(&doubles(vec![Some(0.0)]), &rows), [false, false, false, true, false, false]);
    assert_eq!(deleted(&doubles(vec![Some(-0.0)]), &rows), [false, false, false, false, true, false]);
    assert_eq!(deleted(&doubles(vec![None]), &rows), [false, false, false, false, false, true]);
}

#[test]
fn several_columns_are_one_key() {
    let mut set = set_of(&[(1, DataType::Int64), (2, DataType::Utf8)]);
    let text =
        |values: &[Option<&str>]| -> ArrayRef { Arc::new(values.iter().copied().collect::<StringArray>()) };
    let file =
        parquet(vec![(Some(2), "r", text(&[Some("eu"), None])), (Some(1), "i", ids(&[Some(1), Some(2)]))]);
    set.add_file("d", file.into(), PARQUET, 2, 1).unwrap();
    let rows = [
        ids(&[Some(1), Some(1), Some(2), Some(2), None]),
        text(&[Some("eu"), None, None, Some(""), Some("eu")]),
    ];
    assert_eq!(deleted(&set, &rows), [true, false, true, false, false]);
}

#[test]
fn the_newest_file_with_a_key_decides() {
    let mut set = set_of(&[(1, DataType::Int64)]);
    let file = |values: &[Option<i64>]| Bytes::from(parquet(vec![(Some(1), "id", ids(values))]));
    set.add_file("a", file(&[Some(1), Some(2)]), PARQUET, 2, 5).unwrap();
    set.add_file("b", file(&[Some(2), Some(3)]), PARQUET, 2, 9).unwrap();
    set.add_file("c", file(&[Some(2)]), PARQUET, 1, 7).unwrap();
    assert_eq!(set.len(), 3);
    let rows = [ids(&[Some(1), Some(2), Some(3)])];
    for (data_sequence, expected) in
        [(4, [true, true, true]), (5, [false, true, true]), (8, [false, true, true]), (9, [false; 3])]
    {
        let mut marks = vec![false; 3];
        set.mark(&rows, data_sequence, &mut marks).unwrap();
        assert_eq!(marks, expected, "data sequence {data_sequence}");
    }
}

#[test]
fn older_types_are_widened_and_others_refused() {
    let wide = [(1, DataType::Int64)];
    let narrow: ArrayRef = Arc::new(Int32Array::from(vec![Some(7), None]));
    let mut set = set_of(&wide);
    set.add_file("d", parquet(vec![(Some(1), "id", narrow)]).into(), PARQUET, 2, 1).unwrap();
    assert_eq!(deleted(&set, &[ids(&[Some(7), None, Some(8)])]), [true, true, false]);

    let mut set = set_of(&[(4, DataType::Float64)]);
    let narrow: ArrayRef = Arc::new(Float32Array::from(vec![0.5]));
    set.add_file("d", parquet(vec![(Some(4), "amount", narrow)]).into(), PARQUET, 1, 1).unwrap();
    assert_eq!(deleted(&set, &[Arc::new(Float64Array::from(vec![0.5, 0.25]))]), [true, false]);

    let decimal = |precision, scale| -> ArrayRef {
        Arc::new(Decimal128Array::from(vec![Some(150)]).with_precision_and_scale(precision, scale).unwrap())
    };
    let mut set = set_of(&[(5, DataType::Decimal128(38, 2))]);
    set.add_file("d", parquet(vec![(Some(5), "p", decimal(10, 2))]).into(), PARQUET, 1, 1).unwrap();
    assert_eq!(deleted(&set, &[decimal(38, 2)]), [true]);
    let error =
        set.add_file("d", parquet(vec![(Some(5), "p", decimal(10, 1))]).into(), PARQUET, 1, 1).unwrap_err();
    assert!(
        matches!(&error, TableError::Corrupt { .. }) && error.to_string().contains("field id 5"),
        "{error}"
    );

    let text: ArrayRef = Arc::new(StringArray::from(vec!["7"]));
    let error =
        set_of(&wide).add_file("d", parquet(vec![(Some(1), "id", text)]).into(), PARQUET, 1, 1).unwrap_err();
    assert!(error.to_string().contains("Utf8"), "{error}");
}

#[test]
fn a_file_without_its_columns_or_rows_is_an_error() {
    let add = |file: Vec<u8>, rows| {
        set_of(&[(1, DataType::Int64)])
            .add_file("d.parquet", file.into(), PARQUET, rows, 1)
            .unwrap_err()
            .to_string()
    };
    let error = add(parquet(vec![(Some(2), "id", ids(&[Some(1)]))]), 1);
    assert!(error.contains("no column with field id 1"), "{error}");
    let error = add(parquet(vec![(None, "id", ids(&[Some(1)]))]), 1);
    assert!(error.contains("no column with field id 1"), "{error}");
    let whole = parquet(vec![(Some(1), "id", ids(&[Some(1)]))]);
    let error = add(whole.clone(), 2);
    assert!(error.contains("1 rows, but its manifest entry says 2"), "{error}");
    let error = add(whole[..whole.len() / 2].to_vec(), 1);
    assert!(error.contains("d.parquet") && error.contains("no Parquet file"), "{error}");
}

#[test]
fn many_keys_take_bounded_memory() {
    let many: Vec<Option<i64>> = (0..200_000).map(Some).collect();
    let file = Bytes::from(parquet(vec![(Some(1), "id", ids(&many))]));
    let mut set = set_of(&[(1, DataType::Int64)]);
    set.add_file("d", file.clone(), PARQUET, 200_000, 1).unwrap();
    // Nine bytes a key in row format.
    assert!(set.bytes() <= 200_000 * (9 + KEY_BYTES), "{}", set.bytes());
    let before = set.bytes();
    set.add_file("d", file.clone(), PARQUET, 200_000, 2).unwrap();
    assert_eq!(set.bytes(), before, "a key is held once");
    assert_eq!(deleted(&set, &[ids(&[Some(199_999), Some(200_000)])]), [true, false]);

    let columns = vec![KeyColumn { id: 1, data_type: DataType::Int64 }];
    let mut small = KeySet::new(columns, 1_000_000).unwrap();
    let error = small.add_file("d", file, PARQUET, 200_000, 1).unwrap_err();
    assert!(matches!(&error, TableError::Unsupported(text) if text.contains("compact")), "{error}");
}
