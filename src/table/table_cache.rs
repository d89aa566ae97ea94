//! Tables by name as last seen, least recently used first out.

use std::collections::HashMap;

use mergeberg_kernel::ids::TableName;

/// Tables kept in memory between commits. One of 5,000 snapshots takes some 20 MB.
const MAX_CACHED_TABLES: usize = 64;

/// What is kept of each table is the catalog's own.
pub(super) struct TableCache<T> {
    tables: HashMap<TableName, (T, u64)>,
    uses: u64,
}

impl<T> Default for TableCache<T> {
    fn default() -> Self {
        Self { tables: HashMap::new(), uses: 0 }
    }
}

impl<T: Clone> TableCache<T> {
    pub fn get(&mut self, table: &TableName) -> Option<T> {
        self.uses += 1;
        let (kept, last_use) = self.tables.get_mut(table)?;
        *last_use = self.uses;
        Some(kept.clone())
    }

    pub fn put(&mut self, table: TableName, kept: T) {
        self.uses += 1;
        self.tables.insert(table, (kept, self.uses));
        if self.tables.len() > MAX_CACHED_TABLES {
            let oldest =
                self.tables.iter().min_by_key(|(_, (_, last_use))| *last_use).map(|(name, _)| name.clone());
            if let Some(oldest) = oldest {
                self.tables.remove(&oldest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_that_was_used_longest_ago_goes_first() {
        let name = |n: usize| -> TableName { format!("ns.t{n}").parse().unwrap() };
        let mut cache = TableCache::default();
        for n in 0..MAX_CACHED_TABLES {
            cache.put(name(n), n);
        }
        assert_eq!(cache.get(&name(0)), Some(0));

        cache.put(name(MAX_CACHED_TABLES), MAX_CACHED_TABLES);

        assert_eq!(cache.get(&name(1)), None);
        assert_eq!(cache.get(&name(0)), Some(0));
        assert_eq!(cache.get(&name(MAX_CACHED_TABLES)), Some(MAX_CACHED_TABLES));
    }
}
