//! How often something is tried again, and with what pauses: as a table's properties say, within bounds of the
//! queue's own.
//!
//! The properties and what they mean are Java's (`TableProperties`, `commit.retry.*` and `commit.status-check.*`).
//! Their defaults are not: a queue that commits all day does not pause as an engine does that commits once an hour. So
//! what a table does not set is the queue's, and what it sets is taken as far as the queue's bounds allow: while a train
//! waits, its whole table waits.

use std::collections::BTreeMap;

/// Most retries, whatever a table says.
pub const MOST_RETRIES: u32 = 100;
/// Longest pause, in milliseconds, whatever a table says.
pub const LONGEST_WAIT_MS: u64 = 10_000;
/// Longest time for all tries, in milliseconds, whatever a table says.
pub const LONGEST_TOTAL_MS: u64 = 5 * 60_000;

/// Properties of commits that came too late.
pub const COMMIT: Keys = Keys {
    retries: "commit.retry.num-retries",
    min_wait: "commit.retry.min-wait-ms",
    max_wait: "commit.retry.max-wait-ms",
    total: "commit.retry.total-timeout-ms",
};
/// Properties of looking what became of a commit without a known outcome.
pub const STATUS_CHECK: Keys = Keys {
    retries: "commit.status-check.num-retries",
    min_wait: "commit.status-check.min-wait-ms",
    max_wait: "commit.status-check.max-wait-ms",
    total: "commit.status-check.total-timeout-ms",
};

/// Names of four properties that belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keys {
    pub retries: &'static str,
    pub min_wait: &'static str,
    pub max_wait: &'static str,
    pub total: &'static str,
}

/// How often, and how long. `retries` counts what comes after the first try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retries {
    pub retries: u32,
    pub min_wait_ms: u64,
    pub max_wait_ms: u64,
    pub total_ms: u64,
}

/// A property of a table that is not taken as it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotAsSet {
    pub key: &'static str,
    pub value: String,
    pub how: How,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// It is no whole number of at least zero; the queue's own is taken.
    NoNumber,
    /// It is beyond the queue's bound, which is taken.
    Beyond(u64),
}

impl Retries {
    /// With what the table sets instead of our own.
    #[must_use]
    pub fn of(properties: &BTreeMap<String, String>, keys: Keys, own: Self) -> Self {
        let read = |key: &str, most: u64| number(properties.get(key)?).map(|value| value.min(most));
        let waits = (read(keys.min_wait, LONGEST_WAIT_MS), read(keys.max_wait, LONGEST_WAIT_MS));
        // One of them alone takes the other along.
        let (min_wait_ms, max_wait_ms) = match waits {
            (None, None) => (own.min_wait_ms, own.max_wait_ms),
            (Some(min), None) => (min, own.max_wait_ms.max(min)),
            (None, Some(max)) => (own.min_wait_ms.min(max), max),
            // As Java has it: the longest pause wins.
            (Some(min), Some(max)) => (min.min(max), max),
        };
        let retries = read(keys.retries, u64::from(MOST_RETRIES)).and_then(|read| u32::try_from(read).ok());
        Self {
            retries: retries.unwrap_or(own.retries),
            min_wait_ms,
            max_wait_ms,
            total_ms: read(keys.total, LONGEST_TOTAL_MS).unwrap_or(own.total_ms),
        }
    }

    /// Of several tables that are committed together: as often as the one that allows least, with the longest pauses.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            retries: self.retries.min(other.retries),
            min_wait_ms: self.min_wait_ms.max(other.min_wait_ms),
            max_wait_ms: self.max_wait_ms.max(other.max_wait_ms),
            total_ms: self.total_ms.min(other.total_ms),
        }
    }

    /// The pause before the next try, in milliseconds: doubled from try to try, with jitter, between the shortest and
    /// the longest. `None`: enough has been tried. `failed` counts tries, from 1; `since_ms` is the time since the first.
    #[must_use]
    pub fn pause_ms(&self, failed: u32, since_ms: u64, random: u64) -> Option<u64> {
        if failed > self.retries || since_ms > self.total_ms {
            return None;
        }
        let doubled = self.min_wait_ms.saturating_mul(1 << failed.saturating_sub(1).min(20));
        let base = doubled.min(self.max_wait_ms);
        // Half of it is chance, so that two who lost to each other do not meet again.
        let wait = base.saturating_sub(base / 4).saturating_add(random % (base / 2 + 1));
        Some(wait.clamp(self.min_wait_ms.min(self.max_wait_ms), self.max_wait_ms))
    }
}

/// What of a table's properties is not taken as it stands.
#[must_use]
pub fn not_as_set(properties: &BTreeMap<String, String>) -> Vec<NotAsSet> {
    let mut found = Vec::new();
    for keys in [COMMIT, STATUS_CHECK] {
        let bounds = [
            (keys.retries, u64::from(MOST_RETRIES)),
            (keys.min_wait, LONGEST_WAIT_MS),
            (keys.max_wait, LONGEST_WAIT_MS),
            (keys.total, LONGEST_TOTAL_MS),
        ];
        for (key, most) in bounds {
            let Some(value) = properties.get(key) else { continue };
            let how = match number(value) {
                None => How::NoNumber,
                Some(number) if number > most => How::Beyond(most),
                Some(_) => continue,
            };
            found.push(NotAsSet { key, value: value.clone(), how });
        }
    }
    found
}

/// A whole number of at least zero. Larger ones than fit are as large as fits: the bounds cut them anyway.
fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OWN: Retries = Retries { retries: 30, min_wait_ms: 2, max_wait_ms: 200, total_ms: 60_000 };

    fn properties(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn of(pairs: &[(&str, &str)]) -> Retries {
        Retries::of(&properties(pairs), COMMIT, OWN)
    }

    #[test]
    fn what_a_table_sets_is_taken_and_the_rest_is_our_own() {
        assert_eq!(of(&[]), OWN);
        assert_eq!(of(&[("commit.retry.num-retries", "4")]), Retries { retries: 4, ..OWN });
        assert_eq!(of(&[("commit.retry.total-timeout-ms", "900")]), Retries { total_ms: 900, ..OWN });
        // Java's own defaults, written out.
        let java = [
            ("commit.retry.num-retries", "4"),
            ("commit.retry.min-wait-ms", "100"),
            ("commit.retry.max-wait-ms", "60000"),
            ("commit.retry.total-timeout-ms", "1800000"),
        ];
        let wanted = Retries {
            retries: 4,
            min_wait_ms: 100,
            max_wait_ms: LONGEST_WAIT_MS,
            total_ms: LONGEST_TOTAL_MS,
        };
        assert_eq!(of(&java), wanted);
        // The other four are others.
        assert_eq!(Retries::of(&properties(&java), STATUS_CHECK, OWN), OWN);
    }

    #[test]
    fn one_wait_alone_takes_the_other_along() {
        let waits = |pairs: &[(&str, &str)]| (of(pairs).min_wait_ms, of(pairs).max_wait_ms);
        assert_eq!(waits(&[("commit.retry.min-wait-ms", "500")]), (500, 500));
        assert_eq!(waits(&[("commit.retry.max-wait-ms", "1")]), (1, 1));
        assert_eq!(waits(&[("commit.retry.min-wait-ms", "9"), ("commit.retry.max-wait-ms", "5")]), (5, 5));
    }

    #[test]
    fn what_cannot_be_taken_is_told_and_harms_nothing() {
        for value in ["", " ", "many", "-1", "1.5", "0x4", "4s"] {
            let set = [("commit.retry.num-retries", value)];
            assert_eq!(of(&set), OWN, "{value}");
            let told = not_as_set(&properties(&set));
            assert_eq!((told[0].key, told[0].how), ("commit.retry.num-retries", How::NoNumber), "{value}");
        }
        let far = "99999999999999999999999999";
        assert_eq!(of(&[("commit.retry.num-retries", far)]).retries, MOST_RETRIES);
        let told = not_as_set(&properties(&[("commit.status-check.max-wait-ms", "60000")]));
        assert_eq!((told.len(), told[0].how), (1, How::Beyond(LONGEST_WAIT_MS)));
        assert_eq!(not_as_set(&properties(&[("commit.retry.num-retries", " 7 "), ("other", "x")])), []);
    }

    #[test]
    fn tries_end_by_count_or_by_time() {
        let none = Retries { retries: 0, ..OWN };
        assert_eq!(none.pause_ms(1, 0, 7), None);
        assert!(OWN.pause_ms(30, 0, 7).is_some());
        assert_eq!(OWN.pause_ms(31, 0, 7), None);
        assert!(OWN.pause_ms(1, 60_000, 7).is_some());
        assert_eq!(OWN.pause_ms(1, 60_001, 7), None);
        let quick = Retries { min_wait_ms: 0, max_wait_ms: 0, ..OWN };
        assert_eq!(quick.pause_ms(5, 0, u64::MAX), Some(0));
    }

    #[test]
    fn tables_that_go_together_are_tried_as_the_strictest_of_them() {
        let slow = Retries { retries: 3, min_wait_ms: 100, max_wait_ms: 150, total_ms: 90_000 };
        let both = Retries { retries: 3, min_wait_ms: 100, max_wait_ms: 200, total_ms: 60_000 };
        assert_eq!((OWN.and(slow), slow.and(OWN)), (both, both));
    }

    proptest! {
        #[test]
        fn a_pause_is_between_the_shortest_and_the_longest(
            min in 0_u64..20_000, max in 0_u64..20_000, failed in 1_u32..200, random in any::<u64>(),
        ) {
            let set = [("commit.retry.min-wait-ms", min.to_string()), ("commit.retry.max-wait-ms", max.to_string())];
            let set: Vec<(&str, &str)> = set.iter().map(|(key, value)| (*key, value.as_str())).collect();
            let retries = Retries { retries: 200, ..of(&set) };
            let pause = retries.pause_ms(failed, 0, random).unwrap();
            prop_assert!(pause <= max.min(LONGEST_WAIT_MS));
            prop_assert!(pause >= min.min(max).min(LONGEST_WAIT_MS));
        }
    }
}
