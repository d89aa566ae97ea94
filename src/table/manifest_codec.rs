//! Manifests decoded and encoded, always off the async runtime: one may have thousands of entries. The usual ones go
//! through our own reader and writer ([`super::avro`]), the others through the crate's.
//!
//! A decoded manifest keeps the crate's `DataFile` of each entry, for writing it again, beside the facts
//! that decisions use. Sequence numbers and snapshot ids are resolved when decoding (table spec,
//! "Sequence Number Inheritance"), so nothing above needs the manifest list again.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use iceberg::io::FileIO;
use iceberg::metadata_columns::RESERVED_FIELD_ID_DELETE_FILE_PATH;
use iceberg::spec::{
    DataContentType, DataFile, DataFileFormat, Datum, FormatVersion, Manifest, ManifestContentType,
    ManifestFile, ManifestStatus, ManifestWriterBuilder, PartitionSpec, PartitionSpecRef, PrimitiveLiteral,
    SchemaRef, Struct, StructType, TableMetadata, UNASSIGNED_SEQUENCE_NUMBER,
};
use mergeberg_kernel::change::{DeleteKey, FileContent, FileFact};
use mergeberg_kernel::ids::{SnapshotId, SpecId};
use mergeberg_kernel::partition::Partition;
use tokio::runtime::Handle;

use super::avro::encode::{HeaderOf, Templates, WrittenEntry, encode_manifest};
use super::avro::header_cache::HeaderCache;
use super::avro::{self, DecodedEntries, RawEntry, Unusual};
use super::error::TableError;
use super::guard::guarded;
use super::manifests::on_blocking_thread;
use super::partition_form::{FixedForm, Special, StandIns, has_fixed, holds_fixed};
use super::partition_values::{PartitionInterner, fits};

/// Memory of an entry beside its path and its statistics, in bytes; an estimate that errs upwards.
const ENTRY_BYTES: usize = 900;
/// Memory of one column statistic (a map slot), in bytes.
const STATISTIC_BYTES: usize = 24;
/// Memory of one column bound (a map slot with a typed value), in bytes.
const BOUND_BYTES: usize = 96;
/// The crate's sign for "inherited": written as null.
const INHERIT: i64 = -1;
/// Where a manifest is written in memory first.
const SCRATCH: &str = "memory:///manifest.avro";

/// One manifest entry, with everything inherited filled in.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub status: ManifestStatus,
    /// The snapshot that added the file, or removed it when the status is DELETED.
    pub snapshot: SnapshotId,
    pub sequence_number: i64,
    pub file_sequence_number: i64,
    pub fact: FileFact,
    pub file: Arc<DataFile>,
}

impl Entry {
    pub fn is_live(&self) -> bool {
        match self.status {
            ManifestStatus::Added | ManifestStatus::Existing => true,
            ManifestStatus::Deleted => false,
        }
    }
}

/// A manifest in memory. Immutable, as the file is.
#[derive(Debug)]
pub(super) struct DecodedManifest {
    pub spec_id: SpecId,
    pub content: ManifestContentType,
    /// The schema in the file's header: its partition values and bounds are of these types.
    pub schema: SchemaRef,
    pub entries: Vec<Entry>,
    /// Each partition of the manifest once.
    pub partitions: Vec<Arc<Partition>>,
    live: HashSet<DeleteKey>,
    /// How partition values of type `fixed` are written, if it has any.
    pub fixed: Option<FixedForm>,
    /// Estimate of the memory held, in bytes.
    pub bytes: usize,
}

impl DecodedManifest {
    fn new(
        spec_id: SpecId,
        content: ManifestContentType,
        schema: SchemaRef,
        mut entries: Vec<Entry>,
    ) -> Self {
        // Entries of one partition share one `Arc`, wherever they came from: it stands for the partition.
        let mut partitions: HashSet<Arc<Partition>> = HashSet::new();
        for entry in &mut entries {
            match partitions.get(&entry.fact.partition) {
                Some(known) => entry.fact.partition = known.clone(),
                None => {
                    partitions.insert(entry.fact.partition.clone());
                }
            }
        }
        let partitions = partitions.into_iter().collect();
        let live = entries.iter().filter(|entry| entry.is_live()).map(|entry| entry.fact.key()).collect();
        let bytes = entries.iter().map(|entry| entry_bytes(&entry.file)).sum::<usize>() + ENTRY_BYTES;
        Self { spec_id, content, schema, entries, partitions, live, fixed: None, bytes }
    }

    pub fn holds_live(&self, file: &DeleteKey) -> bool {
        self.live.contains(file)
    }
}

fn entry_bytes(file: &DataFile) -> usize {
    let statistics = file.column_sizes().len()
        + file.value_counts().len()
        + file.null_value_counts().len()
        + file.nan_value_counts().len();
    let bounds = file.lower_bounds().len() + file.upper_bounds().len();
    ENTRY_BYTES + 2 * file.file_path().len() + statistics * STATISTIC_BYTES + bounds * BOUND_BYTES
}

/// Decodes the bytes of the manifest that `file` (an entry of a manifest list) names.
pub(super) fn decode(
    file: &ManifestFile,
    bytes: &[u8],
    spec: &PartitionSpec,
    headers: &HeaderCache,
) -> Result<DecodedManifest, TableError> {
    let path = file.manifest_path.as_str();
    // The tuples are read with the types of the manifest's own header, not of the current schema.
    let Parsed { entries: parsed, schema, types, fixed } =
        parse(path, bytes, file.partition_spec_id, headers)?;
    let mut interner = PartitionInterner::new(spec, &types);
    let mut entries = Vec::with_capacity(parsed.len());
    for entry in parsed {
        let corrupt = |message: String| TableError::corrupt(path, message);
        let partition = interner.intern(entry.file.partition()).map_err(corrupt)?;
        let (sequence_number, file_sequence_number) = resolve_sequence_numbers(
            entry.status,
            entry.sequence_number,
            entry.file_sequence_number,
            file.sequence_number,
        )
        .ok_or_else(|| corrupt(format!("{} has no sequence number", entry.file.file_path())))?;
        entries.push(Entry {
            status: entry.status,
            snapshot: SnapshotId(entry.snapshot_id.unwrap_or(file.added_snapshot_id)),
            sequence_number,
            file_sequence_number,
            fact: file_fact(&entry.file, partition).map_err(corrupt)?,
            file: Arc::new(entry.file),
        });
    }
    let spec_id = SpecId(file.partition_spec_id);
    let decoded = DecodedManifest::new(spec_id, file.content, schema, entries);
    Ok(DecodedManifest { fixed, ..decoded })
}

/// A manifest as it is written, with the types that its header has.
struct Parsed {
    entries: Vec<RawEntry>,
    schema: SchemaRef,
    types: Arc<StructType>,
    fixed: Option<FixedForm>,
}

fn parse(path: &str, bytes: &[u8], spec_id: i32, headers: &HeaderCache) -> Result<Parsed, TableError> {
    match avro::decode_manifest(bytes, headers) {
        Ok(DecodedEntries { header, entries }) => Ok(Parsed {
            entries,
            schema: Arc::clone(&header.schema),
            types: Arc::clone(&header.types),
            fixed: None,
        }),
        Err(Unusual) => parse_unusual(path, bytes, spec_id),
    }
}

/// As the crate reads it.
fn parse_unusual(path: &str, bytes: &[u8], spec_id: i32) -> Result<Parsed, TableError> {
    let corrupt = |e: &dyn std::fmt::Display| TableError::corrupt(path, e);
    let crate_entries = |bytes: &[u8]| -> Result<_, TableError> {
        let (entries, header) = guarded(path, || Manifest::parse_avro(bytes))?.into_parts();
        let entries: Vec<RawEntry> =
            entries.into_iter().map(|entry| RawEntry::from(Arc::unwrap_or_clone(entry))).collect();
        Ok((entries, header))
    };
    let Some(special) = Special::of(bytes).map_err(|e| corrupt(&e))? else {
        let (entries, header) = crate_entries(bytes)?;
        let schema = header.schema().clone();
        let types = header.partition_spec().partition_type(&schema).map_err(|e| corrupt(&e))?;
        return Ok(Parsed { entries, schema, types: Arc::new(types), fixed: None });
    };
    let in_form = |form: FixedForm| -> Result<Vec<RawEntry>, TableError> {
        let Some((stand_ins, given)) = special.given(bytes, form).map_err(|e| corrupt(&e))? else {
            return Ok(crate_entries(bytes)?.0);
        };
        let (mut entries, _) = crate_entries(&given)?;
        for entry in &mut entries {
            entry.file = stand_ins.real(&entry.file, spec_id)?;
        }
        Ok(entries)
    };
    // Bytes in one form make no sense in the other: lengths, counts and unions do not fit.
    let (entries, form) = match in_form(FixedForm::Plain) {
        Ok(entries) => (entries, FixedForm::Plain),
        Err(_) if has_fixed(&special.types) => (in_form(FixedForm::WithLength)?, FixedForm::WithLength),
        Err(error) => return Err(error),
    };
    let values = || entries.iter().map(|entry| entry.file.partition());
    let fixed = holds_fixed(&special.types, values()).then_some(form);
    Ok(Parsed { entries, schema: special.schema, types: Arc::new(special.types), fixed })
}

/// ADDED entries inherit from the manifest list; files of format v1 have sequence number 0.
fn resolve_sequence_numbers(
    status: ManifestStatus,
    data: Option<i64>,
    file: Option<i64>,
    manifest: i64,
) -> Option<(i64, i64)> {
    let inherits = status == ManifestStatus::Added || manifest == 0;
    let inherited = inherits.then_some(manifest);
    Some((data.or(inherited)?, file.or(inherited)?))
}

pub(super) fn file_fact(file: &DataFile, partition: Arc<Partition>) -> Result<FileFact, String> {
    let number = |value: u64, what: &str| {
        i64::try_from(value).map_err(|_| format!("{} of {} is out of range", what, file.file_path()))
    };
    let content = content_of(file)?;
    let blob = match content {
        FileContent::DeletionVector { .. } => file.content_size_in_bytes(),
        FileContent::Data | FileContent::PositionDeletes { .. } | FileContent::EqualityDeletes { .. } => None,
    };
    let bytes = match blob {
        Some(bytes) => bytes,
        None => number(file.file_size_in_bytes(), "the size")?,
    };
    let records = number(file.record_count(), "the record count")?;
    Ok(FileFact { path: Arc::from(file.file_path()), partition, records, bytes, content })
}

/// What the file holds, as its entry says.
fn content_of(file: &DataFile) -> Result<FileContent, String> {
    let lacks = |what: &str| format!("the manifest entry of {} does not say {what}", file.file_path());
    match file.content_type() {
        DataContentType::Data => Ok(FileContent::Data),
        DataContentType::PositionDeletes if file.file_format() == DataFileFormat::Puffin => {
            let of = file.referenced_data_file().ok_or_else(|| lacks("which data file it is for"))?;
            let offset = file.content_offset().ok_or_else(|| lacks("where its deletion vector is"))?;
            Ok(FileContent::DeletionVector { of: Arc::from(of), offset })
        }
        DataContentType::PositionDeletes => Ok(FileContent::PositionDeletes { of: only_data_file(file) }),
        DataContentType::EqualityDeletes => {
            let mut field_ids = file.equality_ids().unwrap_or_default();
            field_ids.sort_unstable();
            field_ids.dedup();
            if field_ids.is_empty() {
                return Err(lacks("which columns are compared"));
            }
            Ok(FileContent::EqualityDeletes { field_ids })
        }
    }
}

/// The one data file that a position-delete file speaks of: by the field made for it, or by equal bounds of
/// its column `file_path` (Java: `ContentFileUtil.referencedDataFile`).
fn only_data_file(file: &DataFile) -> Option<Arc<str>> {
    if let Some(path) = file.referenced_data_file() {
        return Some(Arc::from(path));
    }
    let bound =
        |bounds: &HashMap<i32, Datum>| match bounds.get(&RESERVED_FIELD_ID_DELETE_FILE_PATH)?.literal() {
            PrimitiveLiteral::String(path) => Some(path.clone()),
            _ => None,
        };
    let (lower, upper) = (bound(file.lower_bounds())?, bound(file.upper_bounds())?);
    (lower == upper).then(|| Arc::from(lower))
}

/// A manifest to be written: all of one partition spec, either data files or delete files.
#[derive(Debug)]
pub(super) struct ManifestPlan {
    pub path: String,
    pub version: FormatVersion,
    pub content: ManifestContentType,
    pub snapshot: SnapshotId,
    /// Sequence number of the snapshot; ADDED entries that carry it are written as null (inherited).
    pub sequence_number: i64,
    pub spec: PartitionSpecRef,
    pub schema: SchemaRef,
    pub entries: Vec<Entry>,
    /// How partition values of type `fixed` are to be written.
    pub fixed: FixedForm,
}

/// A manifest as its list entry, with its sequence numbers assigned, and the decoded form that reading it would give.
pub(super) type Written = (ManifestFile, DecodedManifest);

/// Writes manifests of format v2 or v3, one after the other on one thread.
pub(super) async fn write(
    file_io: FileIO,
    templates: Option<Arc<Templates>>,
    plans: Vec<ManifestPlan>,
) -> Result<Vec<Written>, TableError> {
    let first = plans.first().map(|plan| plan.path.clone()).unwrap_or_default();
    let handle = Handle::current();
    on_blocking_thread(&first, move || {
        plans.into_iter().map(|plan| write_blocking(&handle, &file_io, templates.as_deref(), plan)).collect()
    })
    .await?
}

fn write_blocking(
    handle: &Handle,
    file_io: &FileIO,
    templates: Option<&Templates>,
    plan: ManifestPlan,
) -> Result<(ManifestFile, DecodedManifest), TableError> {
    let types = plan
        .spec
        .partition_type(&plan.schema)
        .map_err(|e| TableError::Internal(format!("{} has no partition type: {e}", plan.path)))?;
    let stand_ins = StandIns::of(&plan.spec, &types, plan.fixed).map_err(TableError::Unsupported)?;
    let ManifestPlan { path, version, content, snapshot, sequence_number, spec, schema, mut entries, fixed } =
        plan;
    // Readers of v3 differ in whether a removed file uses up row ids (the table spec does not say): at the
    // end it makes no difference.
    entries.sort_by_key(|entry| !entry.is_live());
    let spec_id = spec.spec_id();
    let encoder = Encoder { path: &path, version, content, snapshot, sequence_number };
    let mut list_entry = match &stand_ins {
        None => match encoder.write_usual(handle, file_io, templates, (&schema, &spec), &entries)? {
            Some(listed) => listed,
            None => encoder.write(handle, file_io, (&schema, &spec), entries.iter().map(Cow::Borrowed))?,
        },
        Some(stand_ins) => encoder.write_special(handle, file_io, (&schema, &spec), &entries, stand_ins)?,
    };
    list_entry.sequence_number = sequence_number;
    // Rule N4: the crate takes the minimum over live entries with a number; what is left without one
    // holds new files only, or nothing live.
    if list_entry.min_sequence_number == UNASSIGNED_SEQUENCE_NUMBER {
        list_entry.min_sequence_number = sequence_number;
    }
    let values = entries.iter().map(|entry| entry.file.partition());
    let fixed = holds_fixed(&types, values).then_some(fixed);
    let decoded = DecodedManifest::new(SpecId(spec_id), content, schema, entries);
    Ok((list_entry, DecodedManifest { fixed, ..decoded }))
}

/// What a manifest's writer is told beside the entries.
struct Encoder<'a> {
    path: &'a str,
    version: FormatVersion,
    content: ManifestContentType,
    snapshot: SnapshotId,
    sequence_number: i64,
}

impl Encoder<'_> {
    /// By our own encoder; `None`: it is to be left to the crate, and nothing was written.
    fn write_usual(
        &self,
        handle: &Handle,
        file_io: &FileIO,
        templates: Option<&Templates>,
        (schema, spec): (&SchemaRef, &PartitionSpec),
        entries: &[Entry],
    ) -> Result<Option<ManifestFile>, TableError> {
        let Some(templates) = templates else { return Ok(None) };
        let kind = HeaderOf {
            version: self.version,
            content: self.content,
            schema: Arc::clone(schema),
            spec: spec.clone(),
        };
        let template = templates.get(&kind, || {
            let scratch = FileIO::new_with_memory();
            let named = Encoder { path: SCRATCH, ..*self };
            named.write(handle, &scratch, (schema, spec), std::iter::empty())?;
            let empty = async { scratch.new_input(SCRATCH)?.read().await };
            let empty = handle.block_on(empty).map_err(|e| TableError::of_write(self.path, e))?;
            Ok::<_, TableError>(empty.to_vec())
        })?;
        let Ok(template) = template else { return Ok(None) };
        let written = entries.iter().map(|entry| self.written(entry));
        let Ok((bytes, listed)) = encode_manifest(&template, self.path, self.snapshot.0, written) else {
            return Ok(None);
        };
        let write = async { file_io.new_output(self.path)?.write(bytes.into()).await };
        handle.block_on(write).map_err(|e| TableError::of_write(self.path, e))?;
        Ok(Some(listed))
    }

    /// What stands in the file; the rest is inherited (table spec, "Sequence Number Inheritance").
    fn written<'e>(&self, entry: &'e Entry) -> WrittenEntry<'e> {
        let (sequence, file_sequence) = (Some(entry.sequence_number), Some(entry.file_sequence_number));
        let (snapshot, sequence_number, file_sequence_number) = match entry.status {
            ManifestStatus::Added if entry.sequence_number == self.sequence_number => {
                (self.snapshot, None, None)
            }
            ManifestStatus::Added => (self.snapshot, sequence, None),
            ManifestStatus::Existing => (entry.snapshot, sequence, file_sequence),
            ManifestStatus::Deleted => (self.snapshot, sequence, file_sequence),
        };
        WrittenEntry {
            status: entry.status,
            snapshot_id: snapshot.0,
            sequence_number,
            file_sequence_number,
            file: &entry.file,
        }
    }

    fn write<'e>(
        &self,
        handle: &Handle,
        file_io: &FileIO,
        (schema, spec): (&SchemaRef, &PartitionSpec),
        entries: impl Iterator<Item = Cow<'e, Entry>>,
    ) -> Result<ManifestFile, TableError> {
        let failed = |error: iceberg::Error| TableError::of_write(self.path, error);
        let output = file_io.new_output(self.path).map_err(failed)?;
        let builder = ManifestWriterBuilder::new(output, Some(self.snapshot.0), schema.clone(), spec.clone());
        let mut writer = match (self.version, self.content) {
            (FormatVersion::V3, ManifestContentType::Data) => builder.build_v3_data(),
            (FormatVersion::V3, ManifestContentType::Deletes) => builder.build_v3_deletes(),
            (FormatVersion::V1 | FormatVersion::V2, ManifestContentType::Data) => builder.build_v2_data(),
            (FormatVersion::V1 | FormatVersion::V2, ManifestContentType::Deletes) => {
                builder.build_v2_deletes()
            }
        };
        for entry in entries {
            let file = entry.file.as_ref().clone();
            let file_sequence = Some(entry.file_sequence_number);
            match entry.status {
                ManifestStatus::Added if entry.sequence_number == self.sequence_number => {
                    writer.add_file(file, INHERIT)
                }
                ManifestStatus::Added => writer.add_file(file, entry.sequence_number),
                ManifestStatus::Existing => {
                    writer.add_existing_file(file, entry.snapshot.0, entry.sequence_number, file_sequence)
                }
                ManifestStatus::Deleted => writer.add_delete_file(file, entry.sequence_number, file_sequence),
            }
            .map_err(|e| TableError::corrupt(&entry.fact.path, e))?;
        }
        handle.block_on(writer.write_manifest_file()).map_err(failed)
    }

    /// Written in memory with other types first, then with the header that it has to have.
    fn write_special(
        &self,
        handle: &Handle,
        file_io: &FileIO,
        (schema, spec): (&SchemaRef, &PartitionSpec),
        entries: &[Entry],
        stand_ins: &StandIns,
    ) -> Result<ManifestFile, TableError> {
        let internal =
            |e: &dyn std::fmt::Display| TableError::Internal(format!("{} was not written: {e}", self.path));
        let given_schema = stand_ins.schema(schema).map_err(|e| internal(&e))?;
        let given_spec = stand_ins.spec(spec, &given_schema).map_err(|e| internal(&e))?;
        let mut given = Vec::with_capacity(entries.len());
        for entry in entries {
            let file = Arc::new(stand_ins.given(&entry.file, spec.spec_id())?);
            given.push(Cow::Owned(Entry { file, ..entry.clone() }));
        }
        let scratch = FileIO::new_with_memory();
        let named = Encoder { path: SCRATCH, ..*self };
        let mut list_entry =
            named.write(handle, &scratch, (&given_schema, &given_spec), given.into_iter())?;
        if let Some(summaries) = &mut list_entry.partitions {
            let tuples = entries.iter().map(|entry| entry.file.partition());
            stand_ins.real_summaries(summaries, tuples).map_err(|e| internal(&e))?;
        }
        let written = scratch.new_input(SCRATCH).map_err(|e| internal(&e))?;
        let written = handle.block_on(written.read()).map_err(|e| internal(&e))?;
        let bytes = stand_ins.real_file(&written, schema, spec).map_err(|e| internal(&e))?;
        let manifest_length = i64::try_from(bytes.len()).map_err(|e| internal(&e))?;
        let failed = |error: iceberg::Error| TableError::of_write(self.path, error);
        let output = file_io.new_output(self.path).map_err(failed)?;
        handle.block_on(output.write(bytes.into())).map_err(failed)?;
        Ok(ManifestFile { manifest_path: self.path.to_owned(), manifest_length, ..list_entry })
    }
}

/// The schema to write a manifest of `spec` under: the current one where it can be, else the newest that
/// can. Partition values must be of the types that the header gives them, source columns may have been
/// dropped, and a later column may have taken a partition field's name; the header must stay readable.
pub(super) fn header_schema<'a>(
    metadata: &TableMetadata,
    spec: &PartitionSpec,
    own: Option<&SchemaRef>,
    tuples: impl Iterator<Item = &'a Struct> + Clone,
) -> Option<SchemaRef> {
    let mut others: Vec<&SchemaRef> = metadata.schemas_iter().collect();
    others.sort_by_key(|schema| std::cmp::Reverse(schema.schema_id()));
    std::iter::once(metadata.current_schema())
        .chain(others)
        .chain(own)
        .find(|schema| {
            partition_type(spec, schema).is_some_and(|types| tuples.clone().all(|t| fits(t, &types)))
        })
        .cloned()
}

/// Partition type of `spec` under `schema`, when a manifest with both in its header could be read again.
pub(super) fn partition_type(spec: &PartitionSpec, schema: &SchemaRef) -> Option<StructType> {
    bound(spec, schema).and_then(|bound| bound.partition_type(schema)).ok()
}

/// `spec` on another schema.
fn bound(spec: &PartitionSpec, schema: &SchemaRef) -> iceberg::Result<PartitionSpec> {
    let fields = spec.fields().iter().cloned().map(|field| field.into_unbound());
    PartitionSpec::builder(schema.clone()).with_spec_id(spec.spec_id()).add_unbound_fields(fields)?.build()
}
