//! Random histories of appends, row-level deletes of every kind, and compactions, against a model that knows rows
//! only: which row stands where, and which delete file killed it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use datafusion::arrow::array::AsArray;
use datafusion::arrow::datatypes::Int64Type;
use futures::TryStreamExt;
use iceberg::spec::DataFile;
use mergeberg_kernel::change::DeleteKey;
use mergeberg_kernel::ids::SnapshotId;

use super::super::scan::{RowReader, ScanCounters, ScanFile, row_difference};
use super::super::test_orders::{OrdersLab, orders};
use super::test_files::{by_order_id, positions_of_many};
use super::*;

const HISTORIES: u64 = 25;
const STEPS: u64 = 9;
const DAYS: u64 = 2;

/// Well mixed numbers from a seed: the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    fn some<T: Clone>(&mut self, of: &[T]) -> Vec<T> {
        of.iter().filter(|_| self.below(3) == 0).cloned().collect()
    }
}

/// A row: order ids are never used twice.
type Row = i64;

#[derive(Clone, Debug)]
struct Killed {
    rows: BTreeSet<Row>,
    /// The data file that a deletion vector is for.
    vector_of: Option<Arc<str>>,
    by_position: bool,
}

/// One snapshot as the model sees it.
#[derive(Clone, Debug, Default)]
struct Model {
    /// Rows of each live data file by position, with its day.
    files: BTreeMap<Arc<str>, (i32, Vec<Row>)>,
    deletes: BTreeMap<DeleteKey, Killed>,
}

impl Model {
    fn live(&self) -> BTreeSet<Row> {
        let mut live = BTreeSet::new();
        for (path, (_, rows)) in &self.files {
            let has_vector = self.deletes.values().any(|d| d.vector_of.as_ref() == Some(path));
            for row in rows {
                let dead = self.deletes.values().any(|delete| {
                    let hidden = has_vector && delete.by_position && delete.vector_of.is_none();
                    delete.rows.contains(row) && !hidden
                });
                if !dead {
                    live.insert(*row);
                }
            }
        }
        live
    }
}

struct History {
    lab: OrdersLab,
    random: Random,
    model: Model,
    head: SnapshotId,
    next_row: Row,
}

fn id_of(file: &DataFile) -> DeleteKey {
    DeleteKey { path: Arc::from(file.file_path()), content_offset: file.content_offset() }
}

impl History {
    async fn new(seed: u64) -> Self {
        let mut lab = OrdersLab::new().await;
        lab.add_unpartitioned_spec();
        let head = lab.snapshot(None, &[], &[]).await;
        let mut history = Self { lab, random: Random(seed), model: Model::default(), head, next_row: 0 };
        history.append().await;
        history
    }

    /// Rows of several days, a file each.
    async fn append(&mut self) {
        let mut rows = Vec::new();
        for day in 1..=DAYS {
            let count = i64::try_from(1 + self.random.below(6)).unwrap();
            let ids: Vec<Row> = (self.next_row..self.next_row + count).collect();
            self.next_row += count;
            rows.extend(orders(i32::try_from(day).unwrap(), &ids));
        }
        self.head = self.lab.snapshot(Some(self.head), &rows, &[]).await;
        self.take_files().await;
    }

    /// The model learns which rows new files hold.
    async fn take_files(&mut self) {
        let reader = RowReader::new(&self.lab.table, self.lab.table.facts.current_schema_id).unwrap();
        let live = self.lab.live(self.head).await;
        let paths: BTreeSet<Arc<str>> = live.iter().map(|f| Arc::clone(&f.fact.path)).collect();
        self.model.files.retain(|path, _| paths.contains(path));
        for file in live {
            if !self.model.files.contains_key(&file.fact.path) {
                let day = file.fact.partition.fields[0].value.as_ref().unwrap().parse().unwrap();
                let path = Arc::clone(&file.fact.path);
                let rows = read(&reader, &[ScanFile::whole(file)]).await;
                self.model.files.insert(path, (day, rows));
            }
        }
    }

    async fn live_file(&self, path: &str) -> LiveFile {
        let live = self.lab.live(self.head).await;
        live.into_iter().find(|file| *file.fact.path == *path).unwrap()
    }

    async fn step(&mut self) {
        match self.random.below(8) {
            0 => self.append().await,
            1 => self.delete_positions(true).await,
            2 => self.delete_positions(false).await,
            3 | 4 => self.write_vector().await,
            5 | 6 => self.delete_keys().await,
            _ if self.random.below(2) == 0 => self.compact().await,
            _ => self.drop_deletes().await,
        }
    }

    async fn commit(&mut self, file: Arc<DataFile>, killed: Killed, replaced: &[DeleteKey]) {
        self.head = self.lab.row_delta(self.head, std::slice::from_ref(&file), replaced).await;
        for id in replaced {
            self.model.deletes.remove(id);
        }
        self.model.deletes.insert(id_of(&file), killed);
    }

    async fn delete_positions(&mut self, named: bool) {
        let day = 1 + i32::try_from(self.random.below(DAYS)).unwrap();
        let files: Vec<(Arc<str>, Vec<Row>)> = self
            .model
            .files
            .iter()
            .filter(|(_, (of, _))| *of == day)
            .map(|(path, (_, rows))| (Arc::clone(path), rows.clone()))
            .collect();
        let mut killed = BTreeSet::new();
        let mut positions: Vec<(&str, i64)> = Vec::new();
        for (path, rows) in &files {
            let all: Vec<usize> = (0..rows.len()).collect();
            for at in self.random.some(&all) {
                killed.insert(rows[at]);
                positions.push((path, i64::try_from(at).unwrap()));
            }
        }
        if positions.is_empty() {
            return;
        }
        let mut rows = killed;
        let file = if named {
            let path = positions[0].0;
            let chosen: RoaringTreemap =
                positions.iter().filter(|(p, _)| *p == path).map(|(_, at)| *at as u64).collect();
            let (_, held) = &self.model.files[path];
            rows = chosen.iter().map(|at| held[at as usize]).collect();
            let data_file = self.live_file(path).await;
            let to_delete = RowsToDelete { data_file, positions: chosen };
            PositionDeleteWriter::write(&self.lab.table, &to_delete).await.unwrap().file
        } else {
            positions_of_many(&self.lab, day, &positions).await
        };
        self.commit(file, Killed { rows, vector_of: None, by_position: true }, &[]).await;
    }

    /// Sometimes with what was deleted before, sometimes a careless one that brings rows back.
    async fn write_vector(&mut self) {
        let paths: Vec<Arc<str>> = self.model.files.keys().cloned().collect();
        let Some(path) = paths.get(self.random.below(paths.len().max(1) as u64) as usize) else { return };
        let data_file = self.live_file(path).await;
        let rows = self.model.files[path].1.clone();
        let all: Vec<u64> = (0..rows.len() as u64).collect();
        let mut positions: RoaringTreemap = self.random.some(&all).into_iter().collect();
        if self.random.below(2) == 0 {
            let live = self.lab.live_files(self.head).await;
            let deletes = DeleteIndex::of(live.deletes).unwrap().for_file(&data_file).unwrap();
            let store = DeleteStore::new(self.lab.table.file_io.clone());
            let before = store.positions_of(&data_file, &deletes, &ScanCounters::default()).await.unwrap();
            // One position delete may speak of rows that the file does not have.
            positions |= before;
        }
        if positions.is_empty() {
            return;
        }
        let killed = positions.iter().map(|at| rows[at as usize]).collect();
        let replaced: Vec<DeleteKey> = self
            .model
            .deletes
            .iter()
            .filter(|(_, delete)| delete.vector_of.as_ref() == Some(path))
            .map(|(id, _)| id.clone())
            .collect();
        let file =
            VectorWriter::write(&self.lab.table, &[RowsToDelete { data_file, positions }]).await.unwrap();
        let killed = Killed { rows: killed, vector_of: Some(Arc::clone(path)), by_position: true };
        self.commit(Arc::clone(&file[0].file), killed, &replaced).await;
    }

    /// Of one day, or of all by the unpartitioned spec. Keys of rows that come later or were never there too.
    async fn delete_keys(&mut self) {
        let day = self.random.below(DAYS + 1);
        let day = (day > 0).then(|| i32::try_from(day).unwrap());
        let all: Vec<Row> = (0..self.next_row + 10).collect();
        let keys: BTreeSet<Row> = self.random.some(&all).into_iter().collect();
        if keys.is_empty() {
            return;
        }
        let reached = self.model.files.values().filter(|(of, _)| day.is_none_or(|day| day == *of));
        let rows = reached.flat_map(|(_, rows)| rows).filter(|row| keys.contains(row)).copied().collect();
        let ids: Vec<Option<i64>> = keys.into_iter().map(Some).collect();
        let file = by_order_id(&self.lab, day, &ids).await;
        self.commit(file, Killed { rows, vector_of: None, by_position: false }, &[]).await;
    }

    /// Live rows of a day in one new file.
    async fn compact(&mut self) {
        let day = 1 + i32::try_from(self.random.below(DAYS)).unwrap();
        let live = self.model.live();
        let of_day: Vec<Row> =
            self.model.files.values().filter(|(of, _)| *of == day).flat_map(|f| f.1.clone()).collect();
        let rows: Vec<Row> = of_day.into_iter().filter(|row| live.contains(row)).collect();
        let old = self.lab.files_of_day(self.head, day).await;
        self.head = self.lab.snapshot(Some(self.head), &orders(day, &rows), &old).await;
        // Equality deletes of before do not reach the new file, and positions are of other files.
        let moved: BTreeSet<Row> = rows.into_iter().collect();
        for delete in self.model.deletes.values_mut() {
            delete.rows.retain(|row| !moved.contains(row));
        }
        self.take_files().await;
    }

    async fn drop_deletes(&mut self) {
        let all: Vec<DeleteKey> = self.model.deletes.keys().cloned().collect();
        let dropped = self.random.some(&all);
        if dropped.is_empty() {
            return;
        }
        self.head = self.lab.row_delta(self.head, &[], &dropped).await;
        self.model.deletes.retain(|id, _| !dropped.contains(id));
    }

    async fn read_head(&self) -> Vec<Row> {
        let reader = RowReader::new(&self.lab.table, self.lab.table.facts.current_schema_id).unwrap();
        read(&reader, &live_rows(self.lab.live_files(self.head).await).unwrap()).await
    }
}

async fn read(reader: &RowReader, files: &[ScanFile]) -> Vec<Row> {
    let counters: Arc<ScanCounters> = Arc::default();
    let mut ids = Vec::new();
    for file in files {
        let before = ids.len();
        let batches = reader.read(file, &[0], &counters).unwrap();
        for batch in batches.try_collect::<Vec<_>>().await.unwrap() {
            ids.extend(batch.column(0).as_primitive::<Int64Type>().values());
        }
        assert_eq!(reader.count(file, &counters).await.unwrap(), (ids.len() - before) as u64);
    }
    ids
}

fn sorted(mut rows: Vec<Row>) -> Vec<Row> {
    rows.sort_unstable();
    rows
}

#[tokio::test]
async fn random_histories_are_read_and_compared_as_the_model_says() {
    for seed in 0..HISTORIES {
        let mut history = History::new(seed).await;
        let mut snapshots = vec![(history.head, history.model.live())];
        for _ in 0..STEPS {
            history.step().await;
            let expected = history.model.live();
            let read = sorted(history.read_head().await);
            assert_eq!(read, expected.iter().copied().collect::<Vec<_>>(), "seed {seed}");
            snapshots.push((history.head, expected));
        }
        let reader = RowReader::new(&history.lab.table, history.lab.table.facts.current_schema_id).unwrap();
        // Any two snapshots, in either direction: what is kept and what went were there, what is kept and what
        // came is there, and no row of a file that both have is on both lists.
        for _ in 0..6 {
            let [one, other] = [(); 2].map(|()| history.random.below(snapshots.len() as u64) as usize);
            let (before, was) = &snapshots[one];
            let (after, is) = &snapshots[other];
            let (live_before, live_after) =
                (history.lab.live_files(*before).await, history.lab.live_files(*after).await);
            let shared: BTreeSet<Arc<str>> = live_before
                .data
                .iter()
                .map(|file| Arc::clone(&file.fact.path))
                .filter(|path| live_after.data.iter().any(|file| file.fact.path == *path))
                .collect();
            let RowDifference { kept, added, removed } = row_difference(live_before, live_after).unwrap();
            let in_shared = |files: &[ScanFile]| -> Vec<ScanFile> {
                files.iter().filter(|file| shared.contains(&file.file.fact.path)).cloned().collect()
            };
            let came: BTreeSet<Row> = read(&reader, &in_shared(&added)).await.into_iter().collect();
            let went: BTreeSet<Row> = read(&reader, &in_shared(&removed)).await.into_iter().collect();
            assert!(came.is_disjoint(&went), "seed {seed}");
            let kept = read(&reader, &kept).await;
            let all = |rows: Vec<Row>| sorted(kept.iter().copied().chain(rows).collect());
            assert_eq!(
                all(read(&reader, &removed).await),
                was.iter().copied().collect::<Vec<_>>(),
                "seed {seed}"
            );
            assert_eq!(
                all(read(&reader, &added).await),
                is.iter().copied().collect::<Vec<_>>(),
                "seed {seed}"
            );
        }
    }
}
