//! Requests that take back landed ones, as the kernel is to see them.
//!
//! An inverse names files, and depends on these and on nothing else (`mergeberg_kernel::inverse`). So what the target
//! did to other files is left out before it is classified; by what is left it is refused.

use std::collections::BTreeSet;
use std::sync::Arc;

use mergeberg_kernel::classify::TargetSide;
use mergeberg_kernel::inverse::{Inverse, obstacles};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::unit::{Unit, UnitKind, UnitScope};

use crate::ledger::{RequestRow, TakenBack};

/// Nothing is run again for an inverse, whatever it looks like: run again it would take along what came since.
pub(super) fn only_its_files(unit: &mut Unit) {
    unit.kind = UnitKind::Opaque;
    unit.scope = UnitScope::Partitions(unit.partitions());
}

/// The changes of the target that concern files which the inverse names.
pub(super) fn concerning(units: &[Unit], side: &TargetSide) -> TargetSide {
    let inverse = Inverse::written_as(units);
    let own: BTreeSet<&Arc<str>> = units.iter().flat_map(Unit::added).map(|file| &file.path).collect();
    let changes = side.changes().iter().filter(|target| {
        let published = target.change.added.iter().any(|file| own.contains(&file.path));
        published || !obstacles(&inverse, [target.change.as_ref()]).is_empty()
    });
    TargetSide::new(changes.cloned().collect())
}

/// What this very head published was taken back: that it was published once must not be told as if it still were.
pub(super) fn reverted(taken_back: &[TakenBack], row: &RequestRow) -> Option<(ReasonCode, String)> {
    let TakenBack { request, pinned: _, by } = taken_back.iter().find(|known| known.pinned == row.pinned)?;
    let text = format!("request {request} published this snapshot, and request {by} took it back");
    Some((ReasonCode::RolledBack, text))
}
