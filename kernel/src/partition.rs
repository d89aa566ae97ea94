//! Identity and overlap of partitions.
//!
//! Inside one spec two files share a partition when their tuples are equal. Across specs the comparison
//! is conservative: two partitions are disjoint only when a (source column, transform) that both have
//! carries different values. An unpartitioned file therefore overlaps everything.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::SpecId;

/// One field of a partition tuple.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PartitionField {
    /// Field id of the source column.
    pub source_id: i32,
    /// Name of the partition field, for people (`order_date`, `time_hour_day`).
    pub name: String,
    /// The transform as the table spec writes it: `identity`, `day`, `bucket[16]`, `truncate[4]`, `void`.
    pub transform: String,
    /// The value as Iceberg's JSON single-value serialization writes it; `None` is null.
    pub value: Option<String>,
}

/// A partition: the spec it was written under and its tuple.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Partition {
    pub spec_id: SpecId,
    pub fields: Vec<PartitionField>,
}

impl Partition {
    pub fn is_unpartitioned(&self) -> bool {
        self.fields.iter().all(|f| f.transform == "void")
    }

    /// Could a row be in both? Symmetric; never false when a row could.
    pub fn overlaps(&self, other: &Self) -> bool {
        if self.spec_id == other.spec_id {
            return self.fields.iter().map(|f| &f.value).eq(other.fields.iter().map(|f| &f.value));
        }
        for mine in &self.fields {
            for theirs in &other.fields {
                let comparable = mine.source_id == theirs.source_id
                    && mine.transform == theirs.transform
                    && mine.transform != "void";
                if comparable && mine.value != theirs.value {
                    return false;
                }
            }
        }
        true
    }
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.fields.is_empty() {
            return f.pad("(unpartitioned)");
        }
        let text: Vec<String> = self
            .fields
            .iter()
            .map(|field| format!("{}={}", field.name, field.value.as_deref().unwrap_or("null")))
            .collect();
        f.pad(&text.join("/"))
    }
}
