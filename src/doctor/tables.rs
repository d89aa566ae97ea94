//! What a table is set to, beside what its policy asks for. Pure.

use mergeberg_kernel::facts::{RefKind, TableFacts};
use mergeberg_kernel::ids::{QueueId, RefName};
use mergeberg_kernel::policy::TablePolicy;
use mergeberg_kernel::retry::{How, NotAsSet, not_as_set};

use super::{Remark, Standing};

const MANIFEST_MERGE: &str = "commit.manifest-merge.enabled";
const MIN_SNAPSHOTS: &str = "history.expire.min-snapshots-to-keep";
const MAX_SNAPSHOT_AGE: &str = "history.expire.max-snapshot-age-ms";
const GC_ENABLED: &str = "gc.enabled";

/// Above this many snapshots each commit costs noticeably more: the metadata file holds them all.
const MANY_SNAPSHOTS: usize = 1_000;
/// A shorter life of snapshots, in ms, is used up while requests wait.
const SHORT_LIFE_MS: i64 = 3_600_000;

/// What to say of a table that can be read.
pub fn remarks(facts: &TableFacts, policy: &TablePolicy, queue: Option<&QueueId>) -> Vec<Remark> {
    let mut remarks = Vec::new();
    let mut warn = |text: String, next: &str| remarks.push(Remark::new(Standing::Warning, text, next));
    if let Some(other) = queue.and_then(|queue| facts.foreign_claim(queue)) {
        warn(
            format!("queue {other} has claimed it"),
            "enqueue there; if that queue is gone for good, run `mergeberg target claim`",
        );
    }
    let batch = policy.classes.iter().map(|class| class.batch_size).max().unwrap_or(1);
    if let Some(kept) =
        kept_snapshots(facts).filter(|kept| usize::try_from(*kept).is_ok_and(|kept| kept < batch))
    {
        // Rule R9.
        warn(
            format!(
                "'main' keeps its last {kept} snapshots, and a train may bring {batch}: what was there before \
                     could be expired right after it"
            ),
            "raise min-snapshots-to-keep of the branch above the largest batch-size",
        );
    }
    let life_ms = facts.property_i64(MAX_SNAPSHOT_AGE, i64::MAX);
    if life_ms < SHORT_LIFE_MS {
        warn(
            format!("snapshots live {} s only ({MAX_SNAPSHOT_AGE})", life_ms / 1_000),
            "raise it: the snapshots that branches were made from go while their requests wait",
        );
    }
    if !facts.property_bool(MANIFEST_MERGE, true) {
        // Rule L9.
        warn(
            format!(
                "manifests are never merged ({MANIFEST_MERGE} = false): every landed request leaves one for good"
            ),
            "set it to true, or run rewrite_manifests regularly",
        );
    }
    if facts.snapshots.len() > MANY_SNAPSHOTS {
        warn(
            format!("it has {} snapshots, and each commit writes them all", facts.snapshots.len()),
            "expire old snapshots",
        );
    }
    if !facts.property_bool(GC_ENABLED, true) {
        // Rule R8.
        warn(
            format!("nothing may be deleted ({GC_ENABLED} = false): files of dropped candidates stay"),
            "nothing, if that is meant",
        );
    }
    for NotAsSet { key, value, how } in not_as_set(&facts.properties) {
        remarks.push(match how {
            How::NoNumber => Remark::new(
                Standing::Warning,
                format!("{key} is '{value}', which is no number: it is not followed"),
                "set it to a whole number, or remove it",
            ),
            How::Beyond(most) => Remark::new(
                Standing::Ok,
                format!("{key} is {value}; the queue goes to {most} at most"),
                "nothing: engines follow it as it stands",
            ),
        });
    }
    remarks
}

/// How many snapshots `main` keeps whatever their age, where that is said.
fn kept_snapshots(facts: &TableFacts) -> Option<i64> {
    let own = facts.refs.get(&RefName::main()).and_then(|main| match main.kind {
        RefKind::Branch { min_snapshots_to_keep, .. } => min_snapshots_to_keep.map(i64::from),
        RefKind::Tag => None,
    });
    own.or_else(|| facts.properties.get(MIN_SNAPSHOTS).and_then(|kept| kept.parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::testing::facts;

    fn said(edit: impl FnOnce(&mut TableFacts)) -> Vec<String> {
        let mut facts = facts();
        edit(&mut facts);
        let policy = "table = \"nyc.flights\"\n[[class]]\nname = \"a\"\nprefix = \"a/\"\nbatch-size = 20\n";
        let policy = TablePolicy::parse("p.toml", policy).unwrap();
        remarks(&facts, &policy, Some(&QueueId::new("q-1"))).into_iter().map(|r| r.text).collect()
    }

    fn property(facts: &mut TableFacts, key: &str, value: &str) {
        facts.properties.insert(key.to_owned(), value.to_owned());
    }

    #[test]
    fn a_table_with_the_defaults_needs_no_remark() {
        assert_eq!(said(|_| {}), Vec::<String>::new());
        assert_eq!(said(|facts| property(facts, "mergeberg.queue", "q-1")), Vec::<String>::new());
    }

    #[test]
    fn r9_a_train_longer_than_what_the_target_keeps_is_told() {
        let kept = |count| {
            said(move |facts| {
                let main = facts.refs.get_mut(&RefName::main()).unwrap();
                main.kind = RefKind::Branch { min_snapshots_to_keep: Some(count), max_snapshot_age_ms: None };
            })
        };
        assert!(kept(19)[0].contains("keeps its last 19 snapshots, and a train may bring 20"));
        assert!(kept(20).is_empty());
        assert_eq!(said(|facts| property(facts, MIN_SNAPSHOTS, "5")).len(), 1);
    }

    #[test]
    fn retries_that_are_no_number_or_out_of_bounds_are_told() {
        let set = |value| said(move |facts| property(facts, "commit.retry.max-wait-ms", value));
        assert_eq!(set("500"), Vec::<String>::new());
        assert_eq!(
            set("soon"),
            ["commit.retry.max-wait-ms is 'soon', which is no number: it is not followed"]
        );
        assert_eq!(set("60000"), ["commit.retry.max-wait-ms is 60000; the queue goes to 10000 at most"]);
    }

    #[test]
    fn what_slows_or_shortens_is_told() {
        assert!(said(|facts| property(facts, MANIFEST_MERGE, "false"))[0].contains("never merged"));
        assert!(
            said(|facts| property(facts, GC_ENABLED, "false"))[0].contains("files of dropped candidates")
        );
        assert!(said(|facts| property(facts, MAX_SNAPSHOT_AGE, "60000"))[0].contains("live 60 s only"));
        assert!(said(|facts| property(facts, "mergeberg.queue", "q-2"))[0].contains("queue q-2"));
    }
}
