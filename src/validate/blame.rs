//! From violating keys to the requests that they come from (rule E3).
//!
//! Every violating key is counted, not only the sample. A key that one car alone makes wrong is that car's,
//! whoever else brings it: otherwise the car behind would be evicted in its place.

use std::collections::BTreeMap;

use mergeberg_kernel::evidence::Violation;
use mergeberg_kernel::ids::RequestId;
use mergeberg_kernel::policy::Compare;

use super::CheckError;
use super::finding::SAMPLE_KEYS;
use super::origins::OriginSet;

/// Different groups of requests in one evidence. Beyond it keys are left to the next scan: the train is
/// checked again once the cars that are known to be wrong are gone.
pub const MAX_GROUPS: usize = 4096;

/// Keys of one group that are compared for the sample, which is the smallest of them: rows come in another
/// order on every run, and a reason should read alike. Beyond it the sample stays as it is.
const MAX_COMPARED_KEYS: u64 = 100_000;

/// Cars by origin (1 is the first), and whether base rows take part.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Culprits {
    pub cars: Vec<usize>,
    pub with_base: bool,
}

impl Culprits {
    pub fn one(car: usize) -> Self {
        Self { cars: vec![car], with_base: false }
    }

    /// Wrong in the base already, found by a strict check.
    pub fn base() -> Self {
        Self { cars: Vec::new(), with_base: true }
    }
}

/// Keys by culprits.
#[derive(Debug, Default)]
pub struct Blame {
    groups: BTreeMap<Culprits, Group>,
}

#[derive(Debug, Default)]
struct Group {
    count: u64,
    compared: u64,
    /// In order.
    sample: Vec<String>,
}

impl Group {
    fn compare(&mut self, key: String) {
        let at = self.sample.partition_point(|other| *other <= key);
        if at < SAMPLE_KEYS {
            self.sample.insert(at, key);
            self.sample.truncate(SAMPLE_KEYS);
        }
    }
}

impl Blame {
    /// `count` more keys of these culprits. `key` is asked for while keys are compared.
    pub fn add(
        &mut self,
        culprits: Culprits,
        count: u64,
        key: impl FnOnce() -> Result<String, CheckError>,
    ) -> Result<(), CheckError> {
        if self.groups.len() >= MAX_GROUPS && !self.groups.contains_key(&culprits) {
            return Ok(());
        }
        let group = self.groups.entry(culprits).or_default();
        group.count += count;
        if group.compared < MAX_COMPARED_KEYS {
            group.compared += 1;
            group.compare(key()?);
        }
        Ok(())
    }

    /// The same with the sample at hand.
    pub fn add_counted(&mut self, culprits: Culprits, count: u64, sample: Vec<String>) {
        if self.groups.len() >= MAX_GROUPS && !self.groups.contains_key(&culprits) {
            return;
        }
        let group = self.groups.entry(culprits).or_default();
        group.count += count;
        sample.into_iter().for_each(|key| group.compare(key));
    }

    /// Car i of the culprits is `requests[i - 1]`.
    pub fn violations(self, requests: &[RequestId]) -> Vec<Violation> {
        self.groups
            .into_iter()
            .map(|(culprits, group)| Violation {
                requests: culprits
                    .cars
                    .iter()
                    .filter_map(|car| requests.get(car.checked_sub(1)?).copied())
                    .collect(),
                with_base: culprits.with_base,
                count: group.count,
                sample: group.sample,
            })
            .collect()
    }
}

/// Who makes a key a duplicate, in a train whose cars only add. Empty: nobody whom the check concerns.
///
/// `selected[i]` says whether the check is asked for by car i + 1.
pub fn culprits_of_duplicate(set: &OriginSet, selected: &[bool], compare: Compare) -> Vec<Culprits> {
    let cars: Vec<usize> = (1..=selected.len()).filter(|car| set.contains(*car)).collect();
    let concerns = |car: &usize| selected.get(*car - 1).copied().unwrap_or(false);
    if set.contains(0) {
        // Each of them adds to what the base has, so each is wrong by itself.
        let guilty: Vec<usize> = cars.iter().copied().filter(|car| concerns(car)).collect();
        return match (guilty.is_empty(), compare) {
            (false, _) => vec![Culprits { cars: guilty, with_base: true }],
            (true, Compare::Strict) if set.repeats(0) => vec![Culprits::base()],
            (true, _) => Vec::new(),
        };
    }
    let (repeating, once): (Vec<usize>, Vec<usize>) = cars.into_iter().partition(|car| set.repeats(*car));
    let mut culprits: Vec<Culprits> =
        repeating.into_iter().filter(|car| concerns(car)).map(Culprits::one).collect();
    if once.len() > 1 && once.iter().any(concerns) {
        culprits.push(Culprits { cars: once, with_base: false });
    }
    culprits
}

/// Who brings a row that is wrong by itself.
pub fn culprits_of_row(origin: usize, selected: &[bool], compare: Compare) -> Option<Culprits> {
    match origin.checked_sub(1) {
        Some(car) => selected.get(car).copied().unwrap_or(false).then(|| Culprits::one(origin)),
        None => (compare == Compare::Strict).then(Culprits::base),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A set of `(origin, rows)`, below 64 origins.
    fn set(rows: &[(u32, u32)]) -> OriginSet {
        let mut words = [0u64; 2];
        for (origin, count) in rows {
            words[0] |= 1 << origin;
            if *count > 1 {
                words[1] |= 1 << origin;
            }
        }
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        OriginSet::of_bytes(&bytes).unwrap()
    }

    fn culprits(cars: &[usize], with_base: bool) -> Culprits {
        Culprits { cars: cars.to_vec(), with_base }
    }

    const ALL: &[bool] = &[true, true, true];

    #[test]
    fn two_cars_with_one_row_each_are_blamed_together() {
        let found = culprits_of_duplicate(&set(&[(1, 1), (3, 1)]), ALL, Compare::NoWorse);
        assert_eq!(found, [culprits(&[1, 3], false)]);
    }

    #[test]
    fn a_car_that_repeats_a_key_by_itself_is_not_an_excuse_to_evict_the_other() {
        let found = culprits_of_duplicate(&set(&[(1, 2), (2, 1)]), ALL, Compare::NoWorse);
        assert_eq!(found, [culprits(&[1], false)]);
    }

    #[test]
    fn against_the_base_every_car_is_wrong_by_itself() {
        let found = culprits_of_duplicate(&set(&[(0, 1), (2, 1), (3, 1)]), ALL, Compare::NoWorse);
        assert_eq!(found, [culprits(&[2, 3], true)]);
    }

    #[test]
    fn a_dirty_base_is_only_found_by_a_strict_check() {
        let dirty = set(&[(0, 2)]);
        assert_eq!(culprits_of_duplicate(&dirty, ALL, Compare::NoWorse), []);
        assert_eq!(culprits_of_duplicate(&dirty, ALL, Compare::Strict), [culprits(&[], true)]);
    }

    #[test]
    fn a_car_that_did_not_ask_for_the_check_is_not_failed_by_it() {
        let selected = &[false, true, false];
        assert_eq!(culprits_of_duplicate(&set(&[(1, 2)]), selected, Compare::NoWorse), []);
        assert_eq!(culprits_of_duplicate(&set(&[(0, 1), (1, 1)]), selected, Compare::NoWorse), []);
        // Together with one that did, it is named.
        assert_eq!(
            culprits_of_duplicate(&set(&[(1, 1), (2, 1)]), selected, Compare::NoWorse),
            [culprits(&[1, 2], false)]
        );
    }

    #[test]
    fn the_sample_does_not_depend_on_the_order_of_rows() {
        let sample = |keys: &[u32]| {
            let mut blame = Blame::default();
            for key in keys {
                blame.add(Culprits::one(1), 1, || Ok(format!("key={key:04}"))).unwrap();
            }
            blame.violations(&[RequestId(7)]).remove(0).sample
        };
        let up: Vec<u32> = (0..500).collect();
        let down: Vec<u32> = (0..500).rev().collect();
        assert_eq!(sample(&up).len(), SAMPLE_KEYS);
        assert_eq!(sample(&up)[0], "key=0000");
        assert_eq!(sample(&up), sample(&down));
    }

    #[test]
    fn groups_are_bounded_and_keep_counting_what_they_know() {
        let mut blame = Blame::default();
        for car in 1..=MAX_GROUPS + 5 {
            blame.add(Culprits::one(car), 1, || Ok(String::new())).unwrap();
        }
        blame.add(Culprits::one(1), 2, || Ok(String::new())).unwrap();
        let violations = blame.violations(&[RequestId(7)]);
        assert_eq!(violations.len(), MAX_GROUPS);
        assert_eq!((violations[0].count, violations[0].requests.clone()), (3, vec![RequestId(7)]));
    }
}
