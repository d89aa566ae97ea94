//! Operations that are run again for a train, looked after while they run.
//!
//! A replay may take hours. Every file of it stands in the ledger before it is written, so that a successor of a worker
//! that died deletes what is left (the train has no row yet). What is whole is named in the catalog from time to time
//! (`checkpoints`). It ends soon when its request is cancelled or the worker is told to stop; the files go then. It is not
//! taken up again where it ended: the target has moved by then, and rows that were read before it did say nothing.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mergeberg_kernel::admission::{Car, CarAction};
use mergeberg_kernel::ids::{Epoch, RequestId, TrainId};
use mergeberg_kernel::state::RequestState;
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior};

use super::context::{Worker, lock};
use super::error::WorkerError;
use super::gather::Gathered;
use super::stage::{Candidates, Staging};
use super::step::{Step, reached};
use crate::ledger::{NotedFile, NotedKind, ReplayRow, UnrecordedTrain};
use crate::replay::{ReplayError, Replayed};
use crate::table::cleanup::{Checkpoint, WrittenFiles, missing_files};
use crate::table::course::{Attendant, Counts, Course, CourseStarter, Ending, FileKind, FileNotes, Told};
use crate::table::error::TableError;
use crate::table::snapshot_writer::AddedFile;

/// Operations of one train that are run at the same time. Each writes through one writer; what they hold in memory to be
/// joined or sorted comes from one pool.
pub(super) const REPLAYS_AT_ONCE: usize = 4;

/// How often it is looked whether a request was cancelled.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often it is told how far a replay has got.
const TELL_EVERY: Duration = Duration::from_secs(5);

/// A train whose operations are run again.
pub(super) struct Writing {
    pub epoch: Epoch,
    pub train: UnrecordedTrain,
    pub requests: Vec<RequestId>,
    starter: CourseStarter,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    running: BTreeMap<RequestId, Running>,
    files: Files,
    /// What its attendant met; the replays were ended for it.
    trouble: Option<WorkerError>,
}

/// A replay under way.
struct Running {
    started_at_ms: i64,
    counts: Arc<Counts>,
}

/// The files of a train, as far as the catalog is concerned.
#[derive(Default)]
pub(super) struct Files {
    /// Whole, and named by nothing.
    pub unnamed: Vec<AddedFile>,
    /// Since when there are any.
    unnamed_since: Option<Instant>,
    /// Every file that was whole once.
    seen: HashSet<Arc<str>>,
    pub checkpoint: Option<Checkpoint>,
    pub checkpointed_at_ms: Option<i64>,
}

impl Files {
    pub fn add(&mut self, files: impl IntoIterator<Item = AddedFile>) {
        let new: Vec<AddedFile> = files.into_iter().collect();
        // Many vectors share one file, and all of them come at once.
        let before = self.seen.clone();
        self.seen.extend(new.iter().map(|file| Arc::clone(&file.fact.path)));
        self.unnamed.extend(new.into_iter().filter(|file| !before.contains(&file.fact.path)));
        if !self.unnamed.is_empty() {
            self.unnamed_since.get_or_insert_with(Instant::now);
        }
    }

    /// To be named now; given back when that cannot be done.
    pub fn take_unnamed(&mut self) -> Vec<AddedFile> {
        self.unnamed_since = None;
        std::mem::take(&mut self.unnamed)
    }

    pub fn give_back(&mut self, files: Vec<AddedFile>) {
        self.unnamed.extend(files);
        self.unnamed_since = Some(Instant::now());
    }
}

impl Writing {
    /// Ends every replay of the train; the first word stands.
    pub fn end(&self, ending: Ending) {
        self.starter.end(ending);
    }

    fn trouble(&self, error: WorkerError) {
        lock(&self.state).trouble.get_or_insert(error);
        self.end(Ending::Unattended);
    }

    pub fn files<T>(&self, act: impl FnOnce(&mut Files) -> T) -> T {
        act(&mut lock(&self.state).files)
    }

    fn train_id(&self) -> &TrainId {
        &self.train.train
    }

    fn running(&self) -> Vec<RequestId> {
        lock(&self.state).running.keys().copied().collect()
    }

    fn row(&self, request: RequestId, now_ms: i64) -> Option<ReplayRow> {
        use std::sync::atomic::Ordering::Relaxed;
        let state = lock(&self.state);
        let Running { started_at_ms, counts } = state.running.get(&request)?;
        let checkpoints = state.files.checkpoint.as_ref().map_or(0, |made| made.snapshots.len());
        let of = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        Some(ReplayRow {
            request,
            train: self.train_id().clone(),
            started_at_ms: *started_at_ms,
            at_ms: now_ms,
            rows_to_read: of(counts.rows_to_read.load(Relaxed)),
            rows_read: of(counts.read.rows()),
            rows_written: of(counts.rows_written.load(Relaxed)),
            files_written: of(counts.files.load(Relaxed)),
            checkpoints: i64::try_from(checkpoints).unwrap_or(i64::MAX),
            last_checkpoint_ms: state.files.checkpointed_at_ms,
        })
    }
}

/// Is an operation of this car run again, so that files are written that may take long?
fn runs_again(car: &Car) -> bool {
    car.action == CarAction::Replay || car.classification.row_merge
}

impl Worker {
    /// Writes the candidates of a train. Where operations are run again, they are looked after; when that comes to
    /// nothing, no file is left.
    pub(super) async fn write_train(
        &self,
        epoch: Epoch,
        id: &TrainId,
        gathered: &Gathered,
        cars: Vec<Car>,
    ) -> Result<Staging, WorkerError> {
        if !cars.iter().any(runs_again) {
            return self.write_candidates(gathered, cars, None).await;
        }
        let (attendant, starter) = Attendant::new();
        let facts = &gathered.table.facts;
        let train = UnrecordedTrain {
            train: id.clone(),
            table_uuid: gathered.lane.uuid.clone(),
            target: gathered.lane.target.clone(),
            first_sequence_number: facts.last_sequence_number.saturating_add(1),
            at_ms: self.now_ms(),
        };
        self.ledger.begin_files(epoch, &train).await?;
        let requests = cars.iter().map(|car| car.request).collect();
        let writing = Writing { epoch, train, requests, starter, state: Mutex::default() };
        let (done, written) = oneshot::channel();
        let work = async {
            let outcome = self.write_candidates(gathered, cars.clone(), Some(&writing)).await;
            // A checkpoint that is being committed is finished first.
            let _ = done.send(());
            outcome
        };
        let (outcome, ()) = tokio::join!(work, self.attend(gathered, &writing, attendant, written));
        let trouble = lock(&writing.state).trouble.take();
        let outcome = match (trouble, outcome) {
            (Some(error), _) => Err(error),
            (None, Ok(Staging::Ready(mut candidates))) => {
                candidates.written.checkpoint = writing.files(|files| files.checkpoint.take());
                self.delete_left_over(gathered, &writing, &mut candidates).await?;
                match self.all_there(gathered, &cars, &candidates).await {
                    Ok(()) => return Ok(Staging::Ready(candidates)),
                    Err(error) => Err(error),
                }
            }
            (None, other) => other,
        };
        if let Err(error) = self.discard_files(epoch, &gathered.lane, &writing.train).await {
            // They are noted: the next look at the table tries again.
            tracing::warn!(train = %id, "files of a replay are left for now: {error}");
        }
        outcome
    }

    /// Files that a try wrote which ran out of memory: at once, or when nothing names them any more.
    async fn delete_left_over(
        &self,
        gathered: &Gathered,
        writing: &Writing,
        candidates: &mut Candidates,
    ) -> Result<(), WorkerError> {
        let own: HashSet<&Arc<str>> = candidates.written.data_files.iter().collect();
        let noted = self.ledger.noted_files(writing.train_id()).await?.into_iter();
        let left: Vec<Arc<str>> = noted
            .filter(|file| file.kind == NotedKind::Rows && !own.contains(&file.path))
            .map(|file| file.path)
            .collect();
        match &mut candidates.written.checkpoint {
            Some(checkpoint) => checkpoint.left_over = left,
            None if left.is_empty() => {}
            None => {
                let first_sequence_number = writing.train.first_sequence_number;
                let left =
                    WrittenFiles { first_sequence_number, data_files: left, ..WrittenFiles::default() };
                self.delete_superseded(&gathered.table, &left).await;
            }
        }
        Ok(())
    }

    /// Rule R10: everything that is published again was looked for when the replays began, and they took their time.
    async fn all_there(
        &self,
        gathered: &Gathered,
        cars: &[Car],
        candidates: &Candidates,
    ) -> Result<(), WorkerError> {
        let own = missing_files(&gathered.table, candidates.written.data_files.clone()).await?;
        let again = self.missing_of(gathered, cars).await?.into_values();
        match own.into_iter().chain(again).next() {
            None => Ok(()),
            Some(path) => Err(TableError::Io {
                path: path.to_string(),
                message:
                    "it was there while an operation was run again, and is gone; keep removals of orphan \
                          files away from files that are younger than a day"
                        .to_owned(),
            }
            .into()),
        }
    }

    /// Answers what replays tell, and ends them when there is a reason to, until everything is written.
    async fn attend(
        &self,
        gathered: &Gathered,
        writing: &Writing,
        mut attendant: Attendant,
        mut written: oneshot::Receiver<()>,
    ) {
        let stop = lock(&self.stop).clone();
        let mut stopping = stop.clone();
        let mut stopped = false;
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut told_at = Instant::now();
        loop {
            tokio::select! {
                biased;
                _ = &mut written => return,
                // An error: nobody can say so any more.
                said = stopping.wait_for(|stop| *stop), if !stopped => {
                    stopped = true;
                    if said.is_ok() {
                        writing.end(Ending::WorkerStops);
                    }
                }
                telling = attendant.next() => {
                    let done = match &telling.told {
                        Told::Begins(path) => self.note(writing, path).await,
                        Told::Whole(files) => {
                            writing.files(|all| all.add(files.iter().cloned().map(AddedFile::from)));
                            let made = self.checkpoint(gathered, writing).await;
                            if *stop.borrow() {
                                writing.end(Ending::WorkerStops);
                            }
                            match made {
                                Ok(()) => self.look_after_replays(gathered, writing, true).await,
                                Err(error) => Err(error),
                            }
                        }
                    };
                    let ended = writing.starter.ending().map_or(Ok(()), Err);
                    telling.answer(match done {
                        Ok(()) => ended,
                        Err(error) => {
                            writing.trouble(error);
                            Err(Ending::Unattended)
                        }
                    });
                }
                _ = look.tick() => {
                    let tell = told_at.elapsed() >= TELL_EVERY;
                    if tell {
                        told_at = Instant::now();
                    }
                    if let Err(error) = self.look_after_replays(gathered, writing, tell).await {
                        writing.trouble(error);
                    }
                }
            }
        }
    }

    async fn look_after_replays(
        &self,
        gathered: &Gathered,
        writing: &Writing,
        tell: bool,
    ) -> Result<(), WorkerError> {
        for request in &writing.requests {
            if self.ledger.request(*request).await?.state == RequestState::Cancelled {
                writing.end(Ending::Cancelled(*request));
            }
        }
        if tell {
            for request in writing.running() {
                self.tell_replay(writing, request).await?;
            }
        }
        let waits =
            writing.files(|files| files.unnamed_since.is_some_and(|t| t.elapsed() >= self.checkpoint_every));
        if waits {
            self.checkpoint(gathered, writing).await?;
        }
        Ok(())
    }

    async fn note(&self, writing: &Writing, path: &Arc<str>) -> Result<(), WorkerError> {
        let file = NotedFile { path: Arc::clone(path), kind: NotedKind::Rows };
        self.ledger.note_files(writing.epoch, writing.train_id(), &[file]).await?;
        reached(Step::FileNoted);
        Ok(())
    }

    /// For manifests and lists of the same train.
    pub(super) fn notes(&self, epoch: Epoch, train: &TrainId) -> FileNotes {
        let (ledger, train) = (self.ledger.clone(), train.clone());
        Arc::new(move |kind, paths| {
            let (ledger, train) = (ledger.clone(), train.clone());
            Box::pin(async move {
                let kind = match kind {
                    FileKind::Rows => NotedKind::Rows,
                    FileKind::Manifest => NotedKind::Manifest,
                    FileKind::ManifestList => NotedKind::ManifestList,
                };
                let files: Vec<NotedFile> = paths.into_iter().map(|path| NotedFile { path, kind }).collect();
                ledger.note_files(epoch, &train, &files).await.map_err(|error| TableError::Io {
                    path: "the ledger".to_owned(),
                    message: error.to_string(),
                })
            })
        })
    }

    /// Notes of the train of `writing`.
    pub(super) fn notes_of(&self, writing: &Writing) -> FileNotes {
        self.notes(writing.epoch, writing.train_id())
    }

    async fn tell_replay(&self, writing: &Writing, request: RequestId) -> Result<(), WorkerError> {
        let Some(row) = writing.row(request, self.now_ms()) else { return Ok(()) };
        tracing::debug!(
            request = %request, read = row.rows_read, of = row.rows_to_read, written = row.rows_written,
            files = row.files_written, "an operation is run again"
        );
        self.ledger.tell_replay(writing.epoch, &row).await?;
        Ok(())
    }

    /// An operation of a car is run again from here on.
    pub(super) async fn replay_begins(&self, writing: &Writing, car: &Car) -> Result<Course, WorkerError> {
        let bound = u64::try_from(car.class.replay_time_bound.ms).unwrap_or_default();
        let course = writing.starter.start(Duration::from_millis(bound), self.checkpoint_every);
        let running = Running { started_at_ms: self.now_ms(), counts: Arc::clone(course.counts()) };
        lock(&writing.state).running.insert(car.request, running);
        tracing::info!(request = %car.request, train = %writing.train_id(), "an operation is run again");
        self.tell_replay(writing, car.request).await?;
        reached(Step::ReplayBegun);
        Ok(course)
    }

    /// It has come to files that are whole, or to nothing.
    pub(super) async fn replay_ends(
        &self,
        writing: &Writing,
        car: &Car,
        outcome: &Result<Replayed, ReplayError>,
    ) -> Result<(), WorkerError> {
        self.tell_replay(writing, car.request).await?;
        lock(&writing.state).running.remove(&car.request);
        if let Ok(replayed) = outcome {
            let data = replayed.added.iter().cloned().map(AddedFile::from);
            let deletes = replayed.added_deletes.iter().cloned().map(AddedFile::from);
            writing.files(|files| files.add(data.chain(deletes)));
            reached(Step::Replayed);
        }
        Ok(())
    }
}
