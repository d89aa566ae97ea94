//! A cache bounded by bytes. What is cached is immutable (manifests, manifest lists and what was derived
//! from them), so an entry is never stale, only evicted.
//!
//! Absent on purpose: single flight. Two tasks that miss at the same moment both read; the second result
//! replaces the first, which is the same.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// After an eviction the cache is filled to this share, in percent, so that evictions are rare.
const FILL_AFTER_EVICTION_PERCENT: usize = 75;

/// What a path names: one file has one kind, and a change set is kept under its manifest list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    List,
    Manifest,
    ChangeSet,
}

type Value = Arc<dyn Any + Send + Sync>;

struct Slot {
    value: Value,
    bytes: usize,
    last_used: u64,
}

#[derive(Default)]
struct Slots {
    by_key: HashMap<(Kind, Arc<str>), Slot>,
    bytes: usize,
    clock: u64,
}

pub(super) struct BoundedCache {
    max_bytes: usize,
    slots: Mutex<Slots>,
}

impl BoundedCache {
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { max_bytes, slots: Mutex::default() }
    }

    /// The map is consistent after every statement, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get<T: Any + Send + Sync>(&self, kind: Kind, path: &str) -> Option<Arc<T>> {
        let mut slots = self.lock();
        slots.clock += 1;
        let now = slots.clock;
        let slot = slots.by_key.get_mut(&(kind, Arc::from(path)))?;
        slot.last_used = now;
        slot.value.clone().downcast().ok()
    }

    /// Keeps `value` unless it alone is larger than the cache.
    pub(super) fn put<T: Any + Send + Sync>(&self, kind: Kind, path: &str, value: Arc<T>, bytes: usize) {
        if bytes > self.max_bytes {
            return;
        }
        let mut slots = self.lock();
        slots.clock += 1;
        let slot = Slot { value, bytes, last_used: slots.clock };
        if let Some(old) = slots.by_key.insert((kind, Arc::from(path)), slot) {
            slots.bytes -= old.bytes;
        }
        slots.bytes += bytes;
        if slots.bytes > self.max_bytes {
            evict(&mut slots, self.max_bytes * FILL_AFTER_EVICTION_PERCENT / 100);
        }
    }

    pub(super) fn remove(&self, kind: Kind, path: &str) {
        let mut slots = self.lock();
        if let Some(old) = slots.by_key.remove(&(kind, Arc::from(path))) {
            slots.bytes -= old.bytes;
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.lock().bytes
    }
}

/// Drops the least recently used entries until `target` bytes are left. The newest one stays.
fn evict(slots: &mut Slots, target: usize) {
    let mut by_age: Vec<(u64, (Kind, Arc<str>))> =
        slots.by_key.iter().map(|(key, slot)| (slot.last_used, key.clone())).collect();
    by_age.sort_unstable_by_key(|(last_used, _)| *last_used);
    by_age.pop();
    for (_, key) in by_age {
        if slots.bytes <= target {
            return;
        }
        if let Some(slot) = slots.by_key.remove(&key) {
            slots.bytes -= slot.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_recently_used_goes_first_and_the_bound_holds() {
        let cache = BoundedCache::new(100);
        for name in ["a", "b", "c", "d"] {
            cache.put(Kind::Manifest, name, Arc::new(name.to_owned()), 25);
        }
        assert!(cache.get::<String>(Kind::Manifest, "a").is_some());
        cache.put(Kind::Manifest, "e", Arc::new("e".to_owned()), 25);
        assert!(cache.bytes() <= 75);
        assert!(cache.get::<String>(Kind::Manifest, "b").is_none());
        assert_eq!(cache.get::<String>(Kind::Manifest, "a").unwrap().as_str(), "a");
        assert_eq!(cache.get::<String>(Kind::Manifest, "e").unwrap().as_str(), "e");
    }

    #[test]
    fn what_is_larger_than_the_cache_is_not_kept() {
        let cache = BoundedCache::new(10);
        cache.put(Kind::List, "small", Arc::new(1_u8), 5);
        cache.put(Kind::List, "huge", Arc::new(1_u8), 11);
        assert!(cache.get::<u8>(Kind::List, "huge").is_none());
        assert!(cache.get::<u8>(Kind::List, "small").is_some());
        assert_eq!(cache.bytes(), 5);
    }

    #[test]
    fn replacing_and_removing_keep_the_count() {
        let cache = BoundedCache::new(100);
        cache.put(Kind::List, "x", Arc::new(1_u8), 40);
        cache.put(Kind::List, "x", Arc::new(2_u8), 10);
        assert_eq!(cache.bytes(), 10);
        assert_eq!(*cache.get::<u8>(Kind::List, "x").unwrap(), 2);
        cache.remove(Kind::List, "x");
        assert_eq!(cache.bytes(), 0);
    }
}
