//! Avro and ORC files: data files and delete files whose format is not Parquet (table spec, "Appendix A:
//! Format-specific Requirements").
//!
//! Both decoders are sequential and pure: bytes in, Arrow arrays in the file's own types out, with the field ids
//! of every column. [`super::column_adapter`] makes the table's columns of these, as it does for Parquet.
//! Damaged content is a [`fault::Fault`]; memory is bounded by what a file really has, never by what it claims.

mod avro;
mod codec;
mod fault;
mod memory;
mod named;
mod orc;
mod reader;
mod source;

#[cfg(test)]
mod damage_tests;
#[cfg(test)]
mod engine_tests;
#[cfg(test)]
mod test_files;

pub(super) use fault::{Decoded, Fault};
pub(super) use memory::{MemoryBatches, MemoryFile};
pub(super) use named::{NamedField, route_to};
pub(super) use reader::FormatReader;
pub(super) use source::Source;
