//! Reason codes: one enum, stable words. `docs/reason-codes.md` is generated from it.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! reasons {
    ($($(#[$attr:meta])* $variant:ident, $code:literal, $meaning:literal, $next:literal;)*) => {
        /// Why a request or table waits, was refused, or ended. The word of a code never changes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum ReasonCode {
            $($(#[$attr])* #[doc = $meaning] #[serde(rename = $code)] $variant,)*
        }

        impl ReasonCode {
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            pub fn code(self) -> &'static str {
                match self { $(Self::$variant => $code,)* }
            }

            /// What it says, in one sentence.
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $meaning,)* }
            }

            /// What the owner does next.
            pub fn next_action(self) -> &'static str {
                match self { $(Self::$variant => $next,)* }
            }
        }
    };
}

reasons! {
    // Waiting.
    OverlapsAhead, "overlaps-ahead",
        "The request touches what a request ahead of it is publishing.",
        "Nothing: it is taken up when the one ahead has ended.";
    AloneByAge, "alone-by-age",
        "An older request that overlaps everything has reached its age bound and runs alone.",
        "Nothing: the queue goes on when that request has ended.";
    SameSourceAhead, "same-source-ahead",
        "An earlier request from the same source has not ended yet.",
        "Nothing: it is taken up when the earlier one has ended.";
    BatchFull, "batch-full",
        "The train of this tick is full.",
        "Nothing: it is taken by the next train.";
    BehindChanges, "behind-changes",
        "A compaction waits while requests that change rows wait for the same target.",
        "Nothing: it is taken up when none of them can land, or when it reaches its class's age bound.";
    BehindBarrier, "behind-barrier",
        "A change of structure lands on its own first.",
        "Nothing: it is taken up when the structure has landed.";
    BehindSet, "behind-set",
        "A set of several tables is next on this one, and lands on its own.",
        "Nothing: the queue goes on when the set has landed.";
    WaitsForTables, "waits-for-tables",
        "The set is next on this table and waits until it is so on its other tables.",
        "Nothing: it is taken up when what came first on the other tables has ended.";
    SetPartHeld, "set-part-held",
        "Another table's part of the same set cannot go yet, and the parts land together.",
        "Look at the part that the message names; the set goes on by itself when that one can.";
    ExternalRunning, "external-running",
        "The pipeline's own command makes the branch again on the target's head.",
        "Nothing: it is taken up when the command has ended; `request explain` shows the runs.";
    ExternalRests, "external-rests",
        "Runs of the pipeline's own command came to nothing again and again, for nothing that the command did.",
        "Keep direct writers off the target while it runs, or the worker up; the next run starts by itself after a rest.";
    Paused, "paused",
        "An operator paused this table.",
        "Ask the operator, who resumes it.";
    CheckCouldNotRun, "check-could-not-run",
        "A check could not be run on the candidate, so nothing is known of the data.",
        "Read the attempt's error with `request explain`; it is tried again within a bound, then held for an operator.";
    TableHeld, "table-held",
        "A landing of this table has no known outcome yet.",
        "Read `request explain`; the worker settles it from the catalog before anything else lands.";
    TargetRewound, "target-rewound",
        "The target is no descendant of the head that the queue landed last.",
        "An operator finds out who moved it, then accepts the new head with `mergeberg target adopt`.";
    ClaimedElsewhere, "claimed-elsewhere",
        "Another queue has claimed this table.",
        "Enqueue there; if that queue is gone for good, an operator runs `mergeberg target claim`.";
    CatalogUnavailable, "catalog-unavailable",
        "The catalog or the storage did not answer.",
        "Bring it back; the queue goes on by itself.";
    HeadKeepsMoving, "head-keeps-moving",
        "Other writers moved the target again and again while this train was checked.",
        "Keep direct writers off the target for a moment, or let them enqueue.";
    StructureChanged, "structure-changed",
        "The table's schema, partition spec or sort order is not the accepted one.",
        "A reviewer looks at `review list` and approves or rejects the change.";

    // Refused at enqueue or later: the request itself.
    TableNotFound, "table-not-found",
        "There is no such table in the catalog.",
        "Check catalog, namespace and name; `mergeberg policy check` lists the tables that it sees.";
    TableRenamed, "table-renamed",
        "The table that was enqueued now has another name.",
        "Rename it back, or cancel the request and enqueue it under the new name.";
    TableReplaced, "table-replaced",
        "The name now belongs to another table: its uuid is not the one that was enqueued.",
        "Write the branch again on the new table and enqueue that.";
    TableUnreadable, "table-unreadable",
        "The table's metadata cannot be read.",
        "Repair or restore the metadata file that the message names.";
    FormatUnsupported, "format-unsupported",
        "This table format version or feature cannot be landed without losing something.",
        "Upgrade the table to format version 2 with the engine that owns it.";
    BranchNotFound, "branch-not-found",
        "There is no branch of this name in the table.",
        "Check the exact name, quotes and letter case included.";
    BranchGone, "branch-gone",
        "The source branch and its pinned head were removed or expired.",
        "Write the branch again and enqueue it.";
    NotABranch, "not-a-branch",
        "The name is a tag; only branches are merged.",
        "Create a branch at that snapshot and enqueue it.";
    SourceIsTarget, "source-is-target",
        "Source and target are the same branch.",
        "Name the branch that holds the work.";
    TargetNotFound, "target-not-found",
        "The target branch does not exist.",
        "Create it first; the queue never creates a target other than a first `main`.";
    EmptySource, "empty-source",
        "The branch changes nothing.",
        "Write to the branch first; look whether the write went to another table or branch.";
    SourceReset, "source-reset",
        "The branch no longer contains the snapshot that was pinned.",
        "Enqueue the branch again at its present head.";
    SourceMoved, "source-moved",
        "The branch grew after it was enqueued and its class refuses that.",
        "Enqueue the branch again at its present head.";
    AlreadyPublished, "already-published",
        "The target has this snapshot already, or another one with its WAP id.",
        "Nothing, if that is this work; other work is staged again under another WAP id.";
    NotStaged, "not-staged",
        "A branch holds the snapshot, so it is no bare staged one.",
        "Enqueue the branch (`--source`), up to the snapshot (`--snapshot`) where it went on.";
    WapIdAmbiguous, "wap-id-ambiguous",
        "Several staged snapshots carry this WAP id.",
        "Name the one that is meant by its id (`--staged-snapshot`).";
    KeyConflict, "idempotency-key-conflict",
        "The idempotency key was used for another source or target.",
        "Use one key for one publication.";
    SetInvalid, "set-invalid",
        "The tables that were named are no set.",
        "Name at least two tables, each once, with the branch that holds its part.";
    NoMultiTableCommits, "no-multi-table-commits",
        "The catalog cannot commit to several tables at once, which a set needs, and a check with `fence`.",
        "Keep the tables in a catalog that can; else enqueue each branch by itself, under checks without `fence`.";
    SetPartFailed, "set-part-failed",
        "Another table's part of the same set was refused or withdrawn; a set lands whole or not at all.",
        "Put right what the part that the message names is refused for, then enqueue the set again.";
    UnknownClass, "unknown-class",
        "No policy has a class of this name.",
        "See the classes with `policy check`.";

    // Refused by classification.
    BaseExpired, "base-expired",
        "The snapshot that the branch was made from was expired, so conflicts cannot be told.",
        "Create the branch again from the target's head and write again; keep base snapshots longer than branches live.";
    UnrelatedHistory, "unrelated-history",
        "Branch and target share no snapshot.",
        "Create the branch from the target and write again.";
    PartiallyPublished, "partially-published",
        "A part of this branch that is no prefix is on the target already.",
        "Write the rest on a new branch and enqueue that.";
    RolledBack, "rolled-back",
        "This was published once, and was rolled back or taken back on the target afterwards.",
        "If it is wanted again, write it on a new branch from the target's present head.";
    OverlappingAppend, "overlapping-append",
        "Rows were appended to a partition that the target appended to since the branch was made.",
        "Allow it in the class (`overlap`), with a duplicate check, or write the branch again from the target's head.";
    Conflict, "conflict",
        "Branch and target changed the same data, and nothing recorded says how to run the branch again.",
        "Record the operation, or write the branch again from the target's head.";
    NotACompaction, "not-a-compaction",
        "The class takes compactions, and the branch does not hold the same rows as before.",
        "Enqueue it under a class for changes (`--class`), or find out why the compaction changed rows.";
    RowConflict, "row-conflict",
        "Branch and target changed the same row to different values.",
        "Correct the rows that `request explain` names on a new branch, or let the class decide (`row-conflicts`).";
    StaleCompaction, "stale-compaction",
        "Files that the branch compacted are not live on the target any more.",
        "Run the compaction again.";
    RevertImpossible, "revert-impossible",
        "What the request changed was changed again since, so it cannot be taken back by itself.",
        "Correct the rows on a new branch, made from the target's head.";
    EqualityDeletes, "equality-deletes",
        "The branch deletes by value, and the target got rows since that these deletes could hit.",
        "Set `equality-deletes = \"serial-upsert\"` in the class if they may; else write the branch again from the target's head.";
    OverlappingSpecs, "overlapping-specs",
        "A partition to replace holds files of another partition spec.",
        "Rewrite the partition under the current spec first.";
    RecordInvalid, "record-invalid",
        "The recorded operation cannot be read.",
        "Write the record in the documented form (docs/operation-records.md).";
    RecordMismatch, "record-mismatch",
        "The record does not describe what the branch did.",
        "Correct the pipeline's record; it decides how the change is run again.";
    InputMissing, "input-missing",
        "A pinned input of the recorded operation cannot be read any more.",
        "Run the pipeline again on inputs that exist.";
    InputNotAllowed, "input-not-allowed",
        "The recorded operation reads a table that its class may not read.",
        "Name the table in the class's `reads`, or use another class.";
    ReplayFailed, "replay-failed",
        "The recorded operation could not be run again.",
        "Run its query against the named tables and correct it.";
    ReplayTooLarge, "replay-too-large",
        "Running the operation again needs more memory and temporary disk space than the worker has.",
        "Split the operation by partitions, or join by equal values, so that both sides can be sorted on disk.";
    ReplayMismatch, "replay-mismatch",
        "The operation gave another number of rows than was recorded.",
        "Find out why the query depends on the target, or record no count.";
    ExternalFailed, "external-failed",
        "The pipeline's own command, which was to make the branch again, failed.",
        "Read its output with `request explain`, correct it, and enqueue the branch again.";
    ExternalTimeout, "external-timeout",
        "The pipeline's own command took longer than its class allows, and was stopped.",
        "Make it faster or raise `timeout` in [class.external], then enqueue the branch again.";
    ExternalEmpty, "external-empty",
        "The pipeline's own command succeeded and left nothing on the branch that it was given.",
        "Let it write to the branch in MERGEBERG_BRANCH; if there is nothing to publish, nothing is to be done.";
    ExternalOffBase, "external-off-base",
        "What the pipeline's own command left does not descend from the snapshot that it was given.",
        "Let it write on top of the branch that it is given, and never reset or replace that branch.";
    DataFileMissing, "data-file-missing",
        "A data file or manifest that the branch refers to does not exist.",
        "Keep clean-up jobs off open branches; write the branch again.";

    // Refused by evidence.
    DuplicateKey, "duplicate-key",
        "The key would be there more than once.",
        "Remove the rows that `request explain` names, on a new branch.";
    NullInKey, "null-in-key",
        "A key column is null.",
        "Fill the key in the rows that `request explain` names.";
    NotNull, "not-null",
        "A column that must be filled is null.",
        "Fill the rows that `request explain` names.";
    RowCount, "row-count",
        "The number of rows is out of its bounds.",
        "Compare the branch with its upstream; look whether a part is missing.";
    Reconciliation, "reconciliation",
        "Totals differ from the upstream.",
        "Compare the days that `request explain` names with the upstream and load them again.";
    Referential, "referential",
        "Rows point to keys that the referenced table does not have.",
        "Publish the referenced rows first, or correct the rows that `request explain` names.";
    AcceptedValues, "accepted-values",
        "A column holds a value that is not on its list.",
        "Correct the rows that `request explain` names.";
    SqlCheck, "sql-check",
        "A query of the policy that must return no rows returned some.",
        "Correct the rows that `request explain` names.";
    SchemaCheck, "schema",
        "The candidate cannot be read as the table's current schema.",
        "Write the branch again under the current schema.";
    LineageCheck, "lineage",
        "The candidate does not descend from the target's head as planned.",
        "Report this: it is a fault of the queue, and nothing was published.";
    ReviewRejected, "review-rejected",
        "A reviewer rejected the change of structure that this branch was written under.",
        "Change the table back, and write the branch again.";
    UnsafeStructure, "unsafe-structure",
        "The change of structure cannot be made safe.",
        "Undo it with the engine that made it.";

    // The command: nothing was asked of the queue.
    RequestNotFound, "request-not-found",
        "The ledger has no such request.",
        "See the ids with `request list`.";
    ReviewNotFound, "review-not-found",
        "The ledger has no such review item.",
        "See the ids with `review list`.";
    SnapshotNotFound, "snapshot-not-found",
        "There is no such snapshot where it was looked for.",
        "Name a snapshot between the branch's head and the one that it was made from, or a staged one that the table has.";
    NameTaken, "name-taken",
        "A branch or tag of this name exists.",
        "Choose another name, or use the branch that is there.";
    InvalidArgument, "invalid-argument",
        "An argument cannot be used.",
        "Correct it as the message says; `--help` shows the form.";
    WrongState, "wrong-state",
        "What was named is not in a state in which this can be done.",
        "Look at it with `request show` or `review show`.";
    WaitTimedOut, "wait-timed-out",
        "The request had not ended when the time to wait was over.",
        "Wait again, or look at `request explain`; the request goes on by itself.";
    ReportUnbalanced, "report-unbalanced",
        "The target's snapshots are not all explained by landings, maintenance and bypasses.",
        "Run the worker once so that foreign commits are recorded; if it stays, look at the snapshots that the report names.";
    Internal, "internal",
        "Something happened that mergeberg does not expect.",
        "Report this with the message; the queue's data is not touched by it.";

    // The environment.
    CatalogRefused, "catalog-refused",
        "The catalog refused the commit for a reason that trying again does not cure.",
        "Read the message; it names what the catalog requires.";
    LedgerUnusable, "ledger-unusable",
        "The ledger database cannot be used.",
        "Restore the file from a backup, or name another in mergeberg.toml.";
    WarehouseReadOnly, "warehouse-read-only",
        "The warehouse cannot be written.",
        "Give the worker write access to the table's location.";
    ConfigInvalid, "config-invalid",
        "mergeberg.toml or a policy cannot be used.",
        "Correct the line that the message names, then run `policy check`.";
}

impl ReasonCode {
    pub fn from_code(code: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|reason| reason.code() == code)
    }
}

impl fmt::Display for ReasonCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.code())
    }
}
