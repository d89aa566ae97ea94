//! What a check found, and how keys are written for people.

use datafusion::arrow::array::{Array, RecordBatch};
use datafusion::arrow::util::display::{ArrayFormatter, FormatOptions};
use mergeberg_kernel::evidence::{CheckResult, PinnedInput, Violation};
use mergeberg_kernel::reason::ReasonCode;

use super::CheckError;

/// Keys that evidence names, in all and for each group of requests.
pub const SAMPLE_KEYS: usize = 20;
/// Characters of one value in a sample.
pub const SAMPLE_VALUE_CHARS: usize = 120;

/// Evidence without its identity and cost.
#[derive(Debug, Clone)]
pub struct Finding {
    pub result: CheckResult,
    pub scope: String,
    pub measured: Vec<(String, String)>,
    pub sample: Vec<String>,
    pub inputs: Vec<PinnedInput>,
    pub violations: Vec<Violation>,
}

impl Finding {
    /// Failed with `code` when there is a violation, else passed. The sample is taken from the violations.
    pub fn of(
        code: ReasonCode,
        scope: String,
        measured: Vec<(String, String)>,
        violations: Vec<Violation>,
    ) -> Self {
        let result = if violations.is_empty() { CheckResult::Passed } else { CheckResult::Failed { code } };
        let sample = violations.iter().flat_map(|v| v.sample.iter().cloned()).take(SAMPLE_KEYS).collect();
        Self { result, scope, measured, sample, inputs: Vec::new(), violations }
    }

    /// The same with the tables that were read beside the own one.
    pub fn with_inputs(mut self, inputs: Vec<PinnedInput>) -> Self {
        self.inputs = inputs;
        self
    }
}

/// `column=value` for the first `names` columns of one row, joined by spaces.
pub fn key_text(names: &[String], batch: &RecordBatch, row: usize) -> Result<String, CheckError> {
    let mut parts = Vec::with_capacity(names.len());
    for (name, column) in names.iter().zip(batch.columns()) {
        parts.push(format!("{name}={}", value_text(column.as_ref(), row)?));
    }
    Ok(parts.join(" "))
}

/// One value, cut to a bounded length.
pub fn value_text(column: &dyn Array, row: usize) -> Result<String, CheckError> {
    let options = FormatOptions::default().with_null("null");
    let text = ArrayFormatter::try_new(column, &options)?.value(row).try_to_string()?;
    match text.char_indices().nth(SAMPLE_VALUE_CHARS) {
        None => Ok(text),
        Some((end, _)) => Ok(format!("{}...", text.get(..end).unwrap_or_default())),
    }
}
