//! Decoded delete files of one scan: each is read once, whoever asks for it and however many at a time.
//!
//! Bounded by bytes: what was not used for longest goes, and is read again should it be asked for. What a
//! reader holds at that moment stays with that reader.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::OnceCell;

use super::super::error::TableError;

#[derive(Debug)]
struct Slot<V> {
    cell: Arc<OnceCell<Arc<V>>>,
    /// 0 until it is decoded.
    bytes: usize,
    last_used: u64,
}

#[derive(Debug)]
struct Slots<K, V> {
    by_key: HashMap<K, Slot<V>>,
    bytes: usize,
    clock: u64,
}

#[derive(Debug)]
pub(super) struct DecodedFiles<K, V> {
    max_bytes: usize,
    slots: Mutex<Slots<K, V>>,
}

impl<K: Eq + Hash + Clone, V> DecodedFiles<K, V> {
    pub fn new(max_bytes: usize) -> Self {
        Self { max_bytes, slots: Mutex::new(Slots { by_key: HashMap::new(), bytes: 0, clock: 0 }) }
    }

    /// The map is consistent after every statement, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, Slots<K, V>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What `decode` gives with its memory in bytes, run by the first who asks. An error is not kept.
    pub async fn get(
        &self,
        key: &K,
        decode: impl Future<Output = Result<(V, usize), TableError>>,
    ) -> Result<Arc<V>, TableError> {
        let cell = {
            let mut slots = self.lock();
            slots.clock += 1;
            let now = slots.clock;
            let slot = slots.by_key.entry(key.clone()).or_insert_with(|| Slot {
                cell: Arc::default(),
                bytes: 0,
                last_used: now,
            });
            slot.last_used = now;
            Arc::clone(&slot.cell)
        };
        let mut decoded_bytes = None;
        let value = cell
            .get_or_try_init(|| async {
                let (value, bytes) = decode.await?;
                decoded_bytes = Some(bytes);
                Ok::<_, TableError>(Arc::new(value))
            })
            .await?;
        let value = Arc::clone(value);
        if let Some(bytes) = decoded_bytes {
            self.account(key, &cell, bytes);
        }
        Ok(value)
    }

    fn account(&self, key: &K, cell: &Arc<OnceCell<Arc<V>>>, bytes: usize) {
        let mut slots = self.lock();
        // It may have been evicted and asked for again meanwhile.
        let Some(slot) = slots.by_key.get_mut(key).filter(|slot| Arc::ptr_eq(&slot.cell, cell)) else {
            return;
        };
        slot.bytes = bytes;
        slots.bytes += bytes;
        while slots.bytes > self.max_bytes {
            let oldest = slots
                .by_key
                .iter()
                .filter(|(other, slot)| *other != key && slot.bytes > 0)
                .min_by_key(|(_, slot)| slot.last_used)
                .map(|(other, _)| other.clone());
            let Some(oldest) = oldest else { return };
            if let Some(gone) = slots.by_key.remove(&oldest) {
                slots.bytes -= gone.bytes;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[tokio::test]
    async fn each_is_decoded_once_however_many_ask_at_once() {
        let cache = DecodedFiles::<u8, u8>::new(100);
        let decoded = AtomicUsize::new(0);
        let ask = || {
            cache.get(&1, async {
                decoded.fetch_add(1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                Ok((7, 10))
            })
        };
        let (a, b, c) = tokio::join!(ask(), ask(), ask());
        assert_eq!((*a.unwrap(), *b.unwrap(), *c.unwrap()), (7, 7, 7));
        assert_eq!(decoded.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn the_bound_holds_and_an_error_is_not_kept() {
        let cache = DecodedFiles::<u8, u8>::new(100);
        for key in 0..5 {
            cache.get(&key, async { Ok((key, 40)) }).await.unwrap();
            assert!(cache.lock().bytes <= 100);
        }
        assert!(cache.lock().by_key.contains_key(&4));
        assert!(!cache.lock().by_key.contains_key(&0));
        let failed = cache.get(&9, async { Err(TableError::Unsupported("no".to_owned())) }).await;
        assert!(failed.is_err());
        assert_eq!(*cache.get(&9, async { Ok((3, 1)) }).await.unwrap(), 3);
        // Larger than the bound: kept while it is the newest, and alone.
        cache.get(&10, async { Ok((1, 500)) }).await.unwrap();
        assert_eq!(cache.lock().by_key.len(), 1);
    }
}
