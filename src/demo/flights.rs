//! The fixtures as record batches. They are part of the binary, so that the demo runs from any folder.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use datafusion::arrow::array::{Array, ArrayRef, AsArray, BooleanArray, RecordBatch, StringArray};
use datafusion::arrow::compute::{concat_batches, filter_record_batch, nullif};
use datafusion::arrow::datatypes::{DataType, Field, Int32Type, Schema};
use datafusion::arrow::error::ArrowError;
use datafusion::parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::failed;
use crate::error::UserError;

/// The column that the fixtures do not have: the carrier's name, which the backfill fills in.
pub const CARRIER_NAME: &str = "carrier_name";

/// First and last day of August 2013 in the fixtures.
pub const FIRST_DAY: u32 = 13;
pub const LAST_DAY: u32 = 26;

macro_rules! fixture {
    ($name:literal) => {
        include_bytes!(concat!("../../fixtures/flights/", $name, ".parquet"))
    };
}

/// One file a day, from [`FIRST_DAY`] on.
const DAYS: [&[u8]; 14] = [
    fixture!("flights-2013-08-13"),
    fixture!("flights-2013-08-14"),
    fixture!("flights-2013-08-15"),
    fixture!("flights-2013-08-16"),
    fixture!("flights-2013-08-17"),
    fixture!("flights-2013-08-18"),
    fixture!("flights-2013-08-19"),
    fixture!("flights-2013-08-20"),
    fixture!("flights-2013-08-21"),
    fixture!("flights-2013-08-22"),
    fixture!("flights-2013-08-23"),
    fixture!("flights-2013-08-24"),
    fixture!("flights-2013-08-25"),
    fixture!("flights-2013-08-26"),
];
const AIRLINES: &[u8] = fixture!("airlines");
const AIRPORTS: &[u8] = fixture!("airports");
const DAILY_TOTALS: &[u8] = fixture!("daily_totals");

/// The day as the table's partition and as SQL writes it: `2013-08-20`.
pub fn date(day: u32) -> String {
    format!("2013-08-{day:02}")
}

/// The flights of a day of August 2013, in the order in which they were planned to leave.
pub fn day(day: u32) -> Result<RecordBatch, UserError> {
    let file = day.checked_sub(FIRST_DAY).and_then(|at| DAYS.get(usize::try_from(at).ok()?));
    read(file.ok_or_else(|| failed(format!("there are no flights of {}", date(day))))?)
}

/// `carrier` and `name`.
pub fn airlines() -> Result<RecordBatch, UserError> {
    read(AIRLINES)
}

/// `faa`, `name` and more.
pub fn airports() -> Result<RecordBatch, UserError> {
    read(AIRPORTS)
}

/// Flights, sum of distance and of air_time by day and origin.
pub fn daily_totals() -> Result<RecordBatch, UserError> {
    read(DAILY_TOTALS)
}

fn read(file: &'static [u8]) -> Result<RecordBatch, UserError> {
    let reader = ParquetRecordBatchReaderBuilder::try_new(Bytes::from_static(file))
        .and_then(ParquetRecordBatchReaderBuilder::build)
        .map_err(failed)?;
    let schema = datafusion::arrow::array::RecordBatchReader::schema(&reader);
    let batches = reader.collect::<Result<Vec<_>, ArrowError>>().map_err(failed)?;
    concat_batches(&schema, &batches).map_err(failed)
}

/// What steps choose flights by.
#[derive(Clone, Copy, Debug)]
pub struct Flight<'a> {
    pub carrier: &'a str,
    pub flight: i32,
    pub origin: &'a str,
    pub dest: &'a str,
    /// It never left.
    pub cancelled: bool,
}

/// For each row: does `chosen` say yes?
fn mask(flights: &RecordBatch, chosen: impl Fn(Flight<'_>) -> bool) -> Result<BooleanArray, UserError> {
    let column = |name: &str| {
        flights.column_by_name(name).ok_or_else(|| failed(format!("the flights have no column {name}")))
    };
    let text = |name: &str| -> Result<&StringArray, UserError> {
        column(name)?.as_string_opt().ok_or_else(|| failed(format!("{name} is no text")))
    };
    let (carriers, origins, dests) = (text("carrier")?, text("origin")?, text("dest")?);
    let numbers =
        column("flight")?.as_primitive_opt::<Int32Type>().ok_or_else(|| failed("flight is no number"))?;
    let departures = column("dep_time")?;
    let values = (0..flights.num_rows()).map(|row| {
        Some(chosen(Flight {
            carrier: carriers.value(row),
            flight: numbers.value(row),
            origin: origins.value(row),
            dest: dests.value(row),
            cancelled: departures.is_null(row),
        }))
    });
    Ok(values.collect())
}

/// The flights for which `chosen` says yes.
pub fn choose(flights: &RecordBatch, chosen: impl Fn(Flight<'_>) -> bool) -> Result<RecordBatch, UserError> {
    filter_record_batch(flights, &mask(flights, chosen)?).map_err(failed)
}

/// The flights with `column` unknown where `chosen` says yes.
pub fn forget(
    flights: &RecordBatch,
    column: &str,
    chosen: impl Fn(Flight<'_>) -> bool,
) -> Result<RecordBatch, UserError> {
    let at = flights.schema().index_of(column).map_err(failed)?;
    let mut columns = flights.columns().to_vec();
    if let Some(values) = columns.get_mut(at) {
        *values = nullif(values, &mask(flights, chosen)?).map_err(failed)?;
    }
    RecordBatch::try_new(flights.schema(), columns).map_err(failed)
}

/// Names of the airlines by carrier.
pub fn airline_names() -> Result<BTreeMap<String, String>, UserError> {
    let airlines = airlines()?;
    let text = |name: &str| airlines.column_by_name(name).and_then(|column| column.as_string_opt::<i32>());
    let (Some(carriers), Some(names)) = (text("carrier"), text("name")) else {
        return Err(failed("the airlines have no names"));
    };
    Ok(carriers.iter().zip(names).filter_map(|(c, n)| Some((c?.to_owned(), n?.to_owned()))).collect())
}

/// The flights with their carriers' names, as every writer of today gives them.
pub fn with_names(flights: &RecordBatch) -> Result<RecordBatch, UserError> {
    let names = airline_names()?;
    let Some(carriers) = flights.column_by_name("carrier").and_then(|c| c.as_string_opt::<i32>()) else {
        return Err(failed("the flights have no carrier"));
    };
    let values: StringArray =
        carriers.iter().map(|carrier| carrier.and_then(|c| names.get(c)).map(String::as_str)).collect();
    let mut fields = flights.schema().fields().to_vec();
    fields.push(Arc::new(Field::new(CARRIER_NAME, DataType::Utf8, true)));
    let mut columns: Vec<ArrayRef> = flights.columns().to_vec();
    columns.push(Arc::new(values));
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_day_is_there_and_every_carrier_has_a_name() {
        let mut rows = 0;
        for day_of_august in FIRST_DAY..=LAST_DAY {
            let flights = with_names(&day(day_of_august).unwrap()).unwrap();
            assert_eq!(flights.column_by_name(CARRIER_NAME).unwrap().null_count(), 0);
            rows += flights.num_rows();
        }
        assert_eq!(rows, 13_294);
        assert!(day(FIRST_DAY - 1).is_err() && day(LAST_DAY + 1).is_err());
    }

    #[test]
    fn flights_are_chosen_and_forgotten_by_row() {
        let flights = day(23).unwrap();
        let hawaiian = choose(&flights, |f| f.carrier == "HA").unwrap();
        assert_eq!(hawaiian.num_rows(), 1);
        assert_eq!(hawaiian.column_by_name("tailnum").unwrap().null_count(), 0);
        let forgotten = forget(&flights, "tailnum", |f| f.carrier == "HA").unwrap();
        let more = forgotten.column_by_name("tailnum").unwrap().null_count();
        assert_eq!(more, flights.column_by_name("tailnum").unwrap().null_count() + 1);
    }
}
