//! Policies: per table and class, from TOML text. Unknown keys are errors.

mod external;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::{Digest, RefName, TableName};

pub use external::{DEFAULT_ATTEMPTS, DEFAULT_TIMEOUT_MS, ExternalReplay, MAX_ATTEMPTS, MAX_TIMEOUT_MS};

/// Most requests that one train carries unless the class says otherwise.
pub const DEFAULT_BATCH_SIZE: usize = 50;
/// Upper bound of `batch-size`: a long train can flush `min-snapshots-to-keep` (rule R9).
pub const MAX_BATCH_SIZE: usize = 500;
/// Age at which a request goes ahead, unless the class says otherwise.
pub const DEFAULT_AGE_BOUND_MS: i64 = 10 * 60 * 1000;

/// Longest time that an operation may take that is run again, unless the class says otherwise.
pub const DEFAULT_REPLAY_TIME_BOUND_MS: i64 = 60 * 60 * 1000;

/// The policy of one table, one file in `policies/`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct TablePolicy {
    pub table: TableName,
    /// Principals whose `replace` snapshots count as maintenance without a content proof (rule C5).
    #[serde(default)]
    pub trusted_rewriters: Vec<String>,
    /// Branch names that are never dropped, besides every target.
    #[serde(default)]
    pub protected: Vec<RefName>,
    #[serde(default, rename = "class")]
    pub classes: Vec<ClassPolicy>,
    #[serde(default, rename = "check")]
    pub checks: Vec<CheckDefinition>,
}

/// A named group of sources and its rules.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ClassPolicy {
    pub name: String,
    /// Sources whose branch name starts with this belong to the class; the longest prefix wins.
    pub prefix: String,
    #[serde(default)]
    pub kind: ClassKind,
    #[serde(default)]
    pub appends: Appends,
    #[serde(default)]
    pub overlap: Overlap,
    #[serde(default)]
    pub isolation: Isolation,
    #[serde(default)]
    pub equality_deletes: EqualityDeletes,
    #[serde(default)]
    pub on_conflict: OnConflict,
    /// Columns that name a row, for `on-conflict = "row-merge"`; without them the table's identifier fields.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub key: Vec<String>,
    #[serde(default)]
    pub row_conflicts: RowConflicts,
    /// For `on-conflict = "external"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub external: Option<ExternalReplay>,
    /// Tables that recorded operations of the class may read: `sales.customers`, or `sales.*` for all of a
    /// namespace. Without the key, every table of the catalog at a pin (rule S1).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads: Option<Vec<String>>,
    /// Ids of the checks of this policy that candidates of the class must pass.
    #[serde(default)]
    pub checks: Vec<String>,
    #[serde(default = "default_batch_size")]
    pub batch_size: usize,
    /// Such as `2s`, `10m`, `1h`.
    #[serde(default = "default_age_bound")]
    pub age_bound: Duration,
    /// Longest time that an operation may take that is run again; a longer one is refused.
    #[serde(default = "default_replay_time_bound")]
    pub replay_time_bound: Duration,
    #[serde(default)]
    pub on_source_moved: OnSourceMoved,
    #[serde(default)]
    pub after_landing: AfterLanding,
    /// `max-ref-age-ms` given at `branch create`, counted from now (rule R3).
    #[serde(default)]
    pub branch_lifetime: Option<Duration>,
    /// Tag to set on the candidate; `{request}` and `{date}` are filled in.
    #[serde(default)]
    pub tag: Option<String>,
}

fn default_batch_size() -> usize {
    DEFAULT_BATCH_SIZE
}

fn default_replay_time_bound() -> Duration {
    Duration { ms: DEFAULT_REPLAY_TIME_BOUND_MS }
}

fn default_age_bound() -> Duration {
    Duration { ms: DEFAULT_AGE_BOUND_MS }
}

/// What the sources of a class hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClassKind {
    /// Rows, changed in whatever way.
    #[default]
    Changes,
    /// The rows that are there, in other files (rule C5). Anything else is refused. They ride in trains of their
    /// own, behind all others.
    Compaction,
}

/// Is an append of this class independent of what the target holds?
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Appends {
    #[default]
    Blind,
    /// Inserted because the target did not have it (MERGE, insert-if-absent): counts as an overwrite.
    Derived,
}

/// What two blind appends to one partition mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Overlap {
    Allow,
    AllowWithDuplicateCheck,
    #[default]
    Refuse,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Isolation {
    #[default]
    Serializable,
    /// Needs a declared key and a table-scope duplicate check (rule C4).
    Snapshot,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EqualityDeletes {
    /// Where they meet what the target got since, the branch is refused.
    #[default]
    Refuse,
    /// There the recorded operation is run again.
    Rebase,
    /// There they delete from it too, as if the upsert had come after.
    SerialUpsert,
}

/// What becomes of a source that conflicts with the target and has no recorded operation for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnConflict {
    #[default]
    Refuse,
    /// The rows that both sides changed are compared by their key.
    RowMerge,
    /// The pipeline's own command makes the branch again on the target's head.
    External,
}

/// What becomes of a row that both sides changed, to different values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RowConflicts {
    #[default]
    Refuse,
    KeepTarget,
    TakeSource,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnSourceMoved {
    /// Publish the pinned snapshot and keep the branch.
    #[default]
    LandPin,
    /// Pin the branch's present head instead, and plan again.
    Repin,
    Refuse,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AfterLanding {
    Drop,
    #[default]
    Keep,
}

/// A length of time, written `250ms`, `2s`, `10m`, `1h`, `7d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Duration {
    pub ms: i64,
}

const UNITS: [(&str, i64); 5] = [("ms", 1), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)];

impl TryFrom<String> for Duration {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let wrong = || format!("'{text}' is no length of time: write 250ms, 2s, 10m, 1h or 7d");
        let (digits, unit_ms) = UNITS
            .iter()
            .find_map(|(unit, ms)| text.strip_suffix(unit).map(|digits| (digits, *ms)))
            .ok_or_else(wrong)?;
        if !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(wrong());
        }
        let count: i64 = digits.parse().map_err(|_| wrong())?;
        let ms = count.checked_mul(unit_ms).filter(|ms| *ms > 0).ok_or_else(wrong)?;
        Ok(Self { ms })
    }
}

impl From<Duration> for String {
    fn from(duration: Duration) -> Self {
        for (unit, ms) in [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)] {
            if duration.ms % ms == 0 {
                return format!("{}{unit}", duration.ms / ms);
            }
        }
        format!("{}ms", duration.ms)
    }
}

/// One check, referred to by its id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "serde_json::Map<String, serde_json::Value>")]
pub struct CheckDefinition {
    pub id: String,
    /// Compare with the base (`no-worse`) or demand the absolute (`strict`), rule E1.
    pub compare: Compare,
    #[serde(flatten)]
    pub kind: CheckKind,
}

/// By hand, since serde cannot both flatten and refuse unknown keys.
impl TryFrom<serde_json::Map<String, serde_json::Value>> for CheckDefinition {
    type Error = String;

    fn try_from(mut map: serde_json::Map<String, serde_json::Value>) -> Result<Self, Self::Error> {
        let id = match map.remove("id") {
            Some(serde_json::Value::String(id)) if !id.trim().is_empty() => id,
            _ => return Err("a check needs an 'id', a text".to_owned()),
        };
        let in_check = |e: serde_json::Error| format!("check '{id}': {e}");
        let compare = match map.remove("compare") {
            Some(value) => serde_json::from_value(value).map_err(in_check)?,
            None => Compare::default(),
        };
        let kind = serde_json::from_value(map.into()).map_err(in_check)?;
        Ok(Self { id, compare, kind })
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Compare {
    #[default]
    NoWorse,
    Strict,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// Every partition in which the request added or removed a file.
    #[default]
    TouchedPartitions,
    Table,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NullRule {
    /// Two nulls are the same key (case O14).
    #[default]
    Equal,
    /// A null in a key column is itself a violation.
    Violation,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case", rename_all_fields = "kebab-case", deny_unknown_fields)]
pub enum CheckKind {
    DuplicateKey {
        columns: Vec<String>,
        #[serde(default)]
        nulls: NullRule,
        #[serde(default)]
        scope: Scope,
    },
    NotNull {
        columns: Vec<String>,
        #[serde(default)]
        scope: Scope,
    },
    RowCount {
        /// Bounds of the rows in the touched partitions.
        min: Option<u64>,
        max: Option<u64>,
        /// Bounds of candidate rows divided by base rows, in the same scope.
        min_growth: Option<f64>,
        max_growth: Option<f64>,
        /// Rows that one request may add, at least and at most.
        min_added: Option<u64>,
        max_added: Option<u64>,
    },
    /// Values of `columns` exist as `references.columns` in another table's head, which is pinned.
    Referential {
        columns: Vec<String>,
        references: Reference,
        #[serde(default)]
        scope: Scope,
    },
    AcceptedValues {
        column: String,
        values: Vec<String>,
        #[serde(default)]
        scope: Scope,
    },
    Reconciliation {
        mode: ReconciliationMode,
        upstream: Upstream,
        /// Columns by which both sides are grouped (`year`, `month`, `day`).
        by: Vec<String>,
        /// Upstream column that holds the expected count per group.
        count: Option<String>,
        /// Candidate column -> upstream column with the expected sum.
        #[serde(default)]
        sums: BTreeMap<String, String>,
        /// Largest absolute difference.
        #[serde(default)]
        absolute: f64,
        /// Largest difference relative to the sum of absolute values.
        #[serde(default)]
        relative: f64,
    },
    /// A query over `candidate`, `touched`, `base` and the other tables that it names, which must return no rows.
    Sql {
        query: String,
        /// Other tables by the name that the query calls them: each as it will be when the request has landed,
        /// which is its candidate where it is in the same set, and its head otherwise.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        tables: BTreeMap<String, TableName>,
        /// The other tables stay at the heads that were read until the request lands (rule E7).
        #[serde(default, skip_serializing_if = "is_false")]
        fence: bool,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Reference {
    pub table: TableName,
    pub columns: Vec<String>,
    /// The table stays at the head that was read until the request lands (rule E7).
    #[serde(default, skip_serializing_if = "is_false")]
    pub fence: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReconciliationMode {
    /// The rows that the request adds are the upstream's rows.
    PerRequest,
    /// The candidate never exceeds the upstream.
    AtMost,
    /// Groups that the request completes equal the upstream (overwrites; a last shard).
    WhenComplete,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", untagged)]
pub enum Upstream {
    /// A Parquet or CSV file; relative to the policy's folder.
    File { file: String },
    /// An Iceberg table at its head, which is pinned when the check runs.
    Table { table: TableName },
}

impl CheckKind {
    pub fn name(&self) -> &'static str {
        match self {
            Self::DuplicateKey { .. } => "duplicate-key",
            Self::NotNull { .. } => "not-null",
            Self::RowCount { .. } => "row-count",
            Self::Referential { .. } => "referential",
            Self::AcceptedValues { .. } => "accepted-values",
            Self::Reconciliation { .. } => "reconciliation",
            Self::Sql { .. } => "sql",
        }
    }

    /// Must what it read of other tables still be their heads when the request lands (rule E7)?
    pub fn is_fenced(&self) -> bool {
        match self {
            Self::Referential { references, .. } => references.fence,
            Self::Sql { fence, .. } => *fence,
            Self::DuplicateKey { .. }
            | Self::NotNull { .. }
            | Self::RowCount { .. }
            | Self::AcceptedValues { .. }
            | Self::Reconciliation { .. } => false,
        }
    }

    /// Does it read nothing but the snapshot that it looks at and the one before?
    pub fn reads_own_table_only(&self) -> bool {
        match self {
            Self::DuplicateKey { .. }
            | Self::NotNull { .. }
            | Self::RowCount { .. }
            | Self::AcceptedValues { .. } => true,
            Self::Referential { .. } | Self::Sql { .. } | Self::Reconciliation { .. } => false,
        }
    }

    /// Adding rows can only make it worse, and a violation is a fact about rows: one scan on the last
    /// candidate of a train of pure appends speaks for every car (rule E2).
    pub fn is_monotone(&self) -> bool {
        match self {
            Self::DuplicateKey { .. }
            | Self::NotNull { .. }
            | Self::Referential { .. }
            | Self::AcceptedValues { .. } => true,
            Self::RowCount { .. } | Self::Reconciliation { .. } | Self::Sql { .. } => false,
        }
    }
}

impl CheckDefinition {
    /// Hash of the definition: evidence of another definition is not reused.
    pub fn digest(&self) -> Digest {
        let text = serde_json::to_string(self).unwrap_or_default();
        Digest::of([text.as_str()])
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}: {message}")]
pub struct PolicyError {
    pub file: String,
    pub message: String,
}

/// TOML knows `nan` and `inf`. On the way into a check they would become "not given", and a bound that was
/// written down would not hold.
fn check_numbers(policy: &toml::Table) -> Result<(), String> {
    let Some(checks) = policy.get("check").and_then(toml::Value::as_array) else { return Ok(()) };
    for check in checks.iter().filter_map(toml::Value::as_table) {
        let id = check.get("id").and_then(toml::Value::as_str).unwrap_or_default();
        for (key, value) in check {
            if let Some(number) = value.as_float().filter(|number| !number.is_finite()) {
                return Err(format!("check '{id}': '{key}' is {number}, write a number"));
            }
        }
    }
    Ok(())
}

/// Relations of a `sql` check that are the request's own.
pub const OWN_RELATIONS: [&str; 3] = ["candidate", "touched", "base"];

/// May a query call another table so?
fn is_free_name(name: &str) -> bool {
    let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let starts = name.bytes().next().is_some_and(|b| !b.is_ascii_digit());
    plain && starts && !OWN_RELATIONS.contains(&name)
}

fn first_repeated(names: &[String]) -> Option<&String> {
    names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)).map(|(_, name)| name)
}

impl TablePolicy {
    /// Parses and checks one policy file. `file` is named in messages.
    pub fn parse(file: &str, text: &str) -> Result<Self, PolicyError> {
        let error = |message: String| PolicyError { file: file.to_owned(), message };
        let syntax = |e: toml::de::Error| error(e.to_string().trim_end().to_owned());
        let table: toml::Table = toml::from_str(text).map_err(syntax)?;
        check_numbers(&table).map_err(error)?;
        let policy: Self = toml::from_str(text).map_err(syntax)?;
        policy.check().map_err(error)?;
        Ok(policy)
    }

    /// The policy of a table that no file names: one class for everything, the strictest rules.
    pub fn shipped_default(table: TableName) -> Self {
        Self {
            table,
            trusted_rewriters: Vec::new(),
            protected: Vec::new(),
            classes: vec![ClassPolicy::shipped_default()],
            checks: Vec::new(),
        }
    }

    fn check(&self) -> Result<(), String> {
        let mut ids = std::collections::BTreeSet::new();
        for check in &self.checks {
            if !ids.insert(&check.id) {
                return Err(format!("check '{}' is defined twice", check.id));
            }
            check.check()?;
        }
        let mut names = std::collections::BTreeSet::new();
        let mut prefixes = std::collections::BTreeSet::new();
        for class in &self.classes {
            if !names.insert(&class.name) {
                return Err(format!("class '{}' is defined twice", class.name));
            }
            if !prefixes.insert(&class.prefix) {
                return Err(format!("two classes have the prefix '{}'", class.prefix));
            }
            if class.name.trim().is_empty() {
                return Err(format!("the class with prefix '{}' needs a name", class.prefix));
            }
            if class.batch_size == 0 || class.batch_size > MAX_BATCH_SIZE {
                return Err(format!(
                    "class '{}': batch-size is {}, it must be between 1 and {MAX_BATCH_SIZE}",
                    class.name, class.batch_size
                ));
            }
            if let Some(id) = first_repeated(&class.checks) {
                return Err(format!("class '{}' names check '{id}' twice", class.name));
            }
            for id in &class.checks {
                if !ids.contains(id) {
                    return Err(format!(
                        "class '{}' names check '{id}', which no [[check]] defines",
                        class.name
                    ));
                }
            }
            class.check_row_merge()?;
            class.check_external()?;
            if class.kind == ClassKind::Compaction
                && let Some(key) = class.says_what_changes()
            {
                return Err(format!(
                    "class '{}' is of kind \"compaction\", whose sources change no rows: '{key}' says nothing of \
                     them, leave it out",
                    class.name
                ));
            }
            let keys: Vec<&CheckDefinition> = self
                .checks_of(class)
                .filter(|check| matches!(check.kind, CheckKind::DuplicateKey { .. }))
                .collect();
            if class.overlap == Overlap::AllowWithDuplicateCheck && keys.is_empty() {
                return Err(format!(
                    "class '{}' has overlap = \"allow-with-duplicate-check\" but none of its checks is a \
                     duplicate-key check",
                    class.name
                ));
            }
            let table_wide = keys
                .iter()
                .any(|check| matches!(check.kind, CheckKind::DuplicateKey { scope: Scope::Table, .. }));
            if class.isolation == Isolation::Snapshot && !table_wide {
                return Err(format!(
                    "class '{}' has isolation = \"snapshot\", which needs a duplicate-key check with scope = \
                     \"table\"",
                    class.name
                ));
            }
        }
        Ok(())
    }

    /// The class of a branch: the longest prefix that it starts with. `None`: the shipped default applies.
    pub fn class_of(&self, source: &RefName) -> Option<&ClassPolicy> {
        self.classes
            .iter()
            .filter(|class| source.as_str().starts_with(&class.prefix))
            .max_by_key(|class| class.prefix.len())
    }

    pub fn class_named(&self, name: &str) -> Option<&ClassPolicy> {
        self.classes.iter().find(|class| class.name == name)
    }

    pub fn checks_of<'a>(&'a self, class: &'a ClassPolicy) -> impl Iterator<Item = &'a CheckDefinition> {
        class.checks.iter().filter_map(|id| self.checks.iter().find(|check| &check.id == id))
    }

    /// Hash of the whole policy; it goes into every decision.
    pub fn digest(&self) -> Digest {
        let text = serde_json::to_string(self).unwrap_or_default();
        Digest::of([text.as_str()])
    }
}

impl ClassPolicy {
    /// Serializable, overlapping appends refused, lineage and schema only, branch kept.
    pub fn shipped_default() -> Self {
        Self {
            name: "default".to_owned(),
            prefix: String::new(),
            kind: ClassKind::default(),
            appends: Appends::default(),
            overlap: Overlap::default(),
            isolation: Isolation::default(),
            equality_deletes: EqualityDeletes::default(),
            on_conflict: OnConflict::default(),
            key: Vec::new(),
            row_conflicts: RowConflicts::default(),
            external: None,
            reads: None,
            checks: Vec::new(),
            batch_size: DEFAULT_BATCH_SIZE,
            age_bound: default_age_bound(),
            replay_time_bound: default_replay_time_bound(),
            on_source_moved: OnSourceMoved::default(),
            after_landing: AfterLanding::default(),
            branch_lifetime: None,
            tag: None,
        }
    }

    pub fn merges_rows(&self) -> bool {
        self.on_conflict == OnConflict::RowMerge
    }

    /// What makes a source of the class again where it conflicts with the target.
    pub fn runs_again_outside(&self) -> Option<&ExternalReplay> {
        self.external.as_ref().filter(|_| self.on_conflict == OnConflict::External)
    }

    /// The section and the key that asks for it belong together.
    fn check_external(&self) -> Result<(), String> {
        match (&self.external, self.on_conflict == OnConflict::External) {
            (None, false) => Ok(()),
            (None, true) => Err(format!(
                "class '{}' has on-conflict = \"external\" and no [class.external] that names a command or url",
                self.name
            )),
            (Some(_), false) => Err(format!(
                "class '{}' has [class.external], which needs on-conflict = \"external\"",
                self.name
            )),
            (Some(external), true) => external
                .check()
                .map_err(|message| format!("class '{}': [class.external] {message}", self.name)),
        }
    }

    /// Keys of row merges that say nothing without it, or name a column twice.
    fn check_row_merge(&self) -> Result<(), String> {
        let given =
            [("key", !self.key.is_empty()), ("row-conflicts", self.row_conflicts != RowConflicts::default())];
        if !self.merges_rows()
            && let Some((key, _)) = given.into_iter().find(|(_, given)| *given)
        {
            return Err(format!(
                "class '{}' has '{key}', which needs on-conflict = \"row-merge\"",
                self.name
            ));
        }
        match first_repeated(&self.key) {
            Some(column) => Err(format!("class '{}' names key column '{column}' twice", self.name)),
            None if self.key.iter().any(|column| column.trim().is_empty()) => {
                Err(format!("class '{}' has a key column without a name", self.name))
            }
            None => Ok(()),
        }
    }

    pub fn is_compaction(&self) -> bool {
        self.kind == ClassKind::Compaction
    }

    /// A key that speaks of changed rows and was given a value of its own.
    fn says_what_changes(&self) -> Option<&'static str> {
        let keys = [
            ("appends", self.appends != Appends::default()),
            ("overlap", self.overlap != Overlap::default()),
            ("isolation", self.isolation != Isolation::default()),
            ("equality-deletes", self.equality_deletes != EqualityDeletes::default()),
            // A compaction that went stale may be made again.
            ("on-conflict", self.on_conflict == OnConflict::RowMerge),
            ("reads", self.reads.is_some()),
        ];
        keys.into_iter().find(|(_, given)| *given).map(|(key, _)| key)
    }

    /// May recorded operations of the class read this table?
    pub fn may_read(&self, table: &TableName) -> bool {
        let Some(reads) = &self.reads else { return true };
        let name = table.to_string();
        reads.iter().any(|allowed| match allowed.strip_suffix('*') {
            Some(prefix) => prefix.ends_with('.') && name.starts_with(prefix),
            None => *allowed == name,
        })
    }
}

impl CheckDefinition {
    fn check(&self) -> Result<(), String> {
        let wrong = |message: &str| Err(format!("check '{}': {message}", self.id));
        if let CheckKind::DuplicateKey { columns, .. }
        | CheckKind::NotNull { columns, .. }
        | CheckKind::Referential { columns, .. } = &self.kind
        {
            if columns.iter().any(|column| column.trim().is_empty()) {
                return wrong("'columns' has an entry without a name");
            }
            if let Some(column) = first_repeated(columns) {
                return wrong(&format!("'columns' has '{column}' twice"));
            }
        }
        match &self.kind {
            CheckKind::DuplicateKey { columns, .. } | CheckKind::NotNull { columns, .. }
                if columns.is_empty() =>
            {
                wrong("'columns' is empty")
            }
            CheckKind::AcceptedValues { column, .. } if column.trim().is_empty() => {
                wrong("'column' is empty")
            }
            CheckKind::AcceptedValues { values, .. } if values.is_empty() => wrong("'values' is empty"),
            CheckKind::Sql { query, .. } if query.trim().is_empty() => wrong("'query' is empty"),
            CheckKind::Sql { tables, fence: true, .. } if tables.is_empty() => {
                wrong("'fence' speaks of other tables, and 'tables' names none")
            }
            CheckKind::Sql { tables, .. } => match tables.keys().find(|name| !is_free_name(name)) {
                Some(name) => wrong(&format!(
                    "'{name}' names another table in 'tables'; take letters, digits and '_', and none of {}",
                    OWN_RELATIONS.join(", ")
                )),
                None => Ok(()),
            },
            CheckKind::Referential { columns, references, .. }
                if columns.is_empty() || columns.len() != references.columns.len() =>
            {
                wrong("'columns' and 'references.columns' must be equally many, at least one")
            }
            CheckKind::RowCount { min, max, min_growth, max_growth, min_added, max_added } => {
                let none = min.is_none()
                    && max.is_none()
                    && min_growth.is_none()
                    && max_growth.is_none()
                    && min_added.is_none()
                    && max_added.is_none();
                let above = |low: &Option<u64>, high: &Option<u64>| matches!((low, high), (Some(l), Some(h)) if l > h);
                if none {
                    wrong("a row-count needs at least one bound")
                } else if above(min, max) {
                    wrong("'min' is above 'max'")
                } else if above(min_added, max_added) {
                    wrong("'min-added' is above 'max-added'")
                } else if matches!((min_growth, max_growth), (Some(low), Some(high)) if low > high) {
                    wrong("'min-growth' is above 'max-growth'")
                } else if [min_growth, max_growth].into_iter().flatten().any(|growth| *growth < 0.0) {
                    wrong("a growth cannot be negative")
                } else {
                    Ok(())
                }
            }
            CheckKind::Reconciliation { by, count, sums, absolute, relative, .. } => {
                if by.is_empty() {
                    wrong("'by' is empty")
                } else if count.is_none() && sums.is_empty() {
                    wrong("a reconciliation compares 'count', 'sums' or both")
                } else if *absolute < 0.0 || *relative < 0.0 {
                    wrong("a tolerance cannot be negative")
                } else {
                    Ok(())
                }
            }
            _ => Ok(()),
        }
    }
}
