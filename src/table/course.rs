//! A long write and whoever looks after it.
//!
//! A write that takes hours tells each file before it begins it, so that it is found whatever happens then; hands over
//! from time to time what it has finished, so that the catalog can name it (rule R10); and may be ended between two
//! batches. The write has a [`Course`], whoever looks after it the [`Attendant`]. They may be in different runtimes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use mergeberg_kernel::ids::RequestId;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::data_files::NewDataFile;
use super::error::TableError;
use super::scan::ScanCounters;

/// After a write was told to end, the time that it may take to do so; then it is cut off.
const END_GRACE: Duration = Duration::from_secs(5 * 60);

/// Why a write is ended before it is finished.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Ending {
    #[error("the worker was told to stop")]
    WorkerStops,
    #[error("request {0} was cancelled")]
    Cancelled(RequestId),
    #[error("it took longer than {}", humane(*.0))]
    TooLong(Duration),
    /// Whoever looks after it cannot go on; what it met, it knows.
    #[error("the queue could not look after it")]
    Unattended,
}

fn humane(bound: Duration) -> String {
    let ms = i64::try_from(bound.as_millis()).unwrap_or(i64::MAX);
    String::from(mergeberg_kernel::policy::Duration { ms })
}

/// What a file is, for whoever deletes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// Data or deletes.
    Rows,
    Manifest,
    ManifestList,
}

/// Told of files before they are written. An error keeps them from being written.
pub type FileNotes =
    Arc<dyn Fn(FileKind, Vec<Arc<str>>) -> BoxFuture<'static, Result<(), TableError>> + Send + Sync>;

/// The answer to what a write has told.
type Answer = Box<dyn FnOnce(Result<(), Ending>) + Send>;

/// What a write tells.
pub enum Told {
    /// This file is about to be written.
    Begins(Arc<str>),
    /// These are whole, and nothing names them.
    Whole(Vec<NewDataFile>),
}

/// Something told, and the way to answer. The write waits until it is answered.
pub struct Telling {
    pub told: Told,
    answer: Answer,
}

impl Telling {
    pub fn answer(self, answer: Result<(), Ending>) {
        (self.answer)(answer);
    }
}

/// How far a write has got.
#[derive(Debug, Default)]
pub struct Counts {
    pub rows_to_read: AtomicU64,
    pub read: Arc<ScanCounters>,
    pub rows_written: AtomicU64,
    pub files: AtomicU64,
}

/// The write's side.
#[derive(Clone, Debug)]
pub struct Course {
    // Unbounded, and yet bounded: whoever tells waits for the answer.
    tell: mpsc::UnboundedSender<Telling>,
    end: watch::Receiver<Option<Ending>>,
    /// Longest time from its begin.
    bound: Duration,
    deadline: Instant,
    /// Longest time that a finished file goes unnamed.
    hand_over_every: Duration,
    counts: Arc<Counts>,
}

impl std::fmt::Debug for Telling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Telling")
    }
}

/// The side of whoever looks after one write or several.
#[derive(Debug)]
pub struct Attendant {
    told: mpsc::UnboundedReceiver<Telling>,
}

impl Attendant {
    /// With the one who starts what it looks after.
    pub fn new() -> (Self, CourseStarter) {
        let (tell, told) = mpsc::unbounded_channel();
        (Self { told }, CourseStarter { tell, end: watch::Sender::new(None) })
    }

    /// What is told next. Waits for ever when nobody writes.
    pub async fn next(&mut self) -> Telling {
        match self.told.recv().await {
            Some(telling) => telling,
            None => std::future::pending().await,
        }
    }
}

/// Starts writes under one attendant, and ends them.
#[derive(Debug)]
pub struct CourseStarter {
    tell: mpsc::UnboundedSender<Telling>,
    end: watch::Sender<Option<Ending>>,
}

impl CourseStarter {
    /// Ends every write; the first word stands.
    pub fn end(&self, ending: Ending) {
        self.end.send_if_modified(|end| {
            let first = end.is_none();
            end.get_or_insert(ending);
            first
        });
    }

    /// Why they were ended.
    pub fn ending(&self) -> Option<Ending> {
        self.end.borrow().clone()
    }

    /// A write that begins now, may take `bound`, and hands over what is whole every so often.
    pub fn start(&self, bound: Duration, hand_over_every: Duration) -> Course {
        Course {
            tell: self.tell.clone(),
            end: self.end.subscribe(),
            bound,
            deadline: Instant::now() + bound,
            hand_over_every,
            counts: Arc::default(),
        }
    }
}

impl Course {
    pub fn counts(&self) -> &Arc<Counts> {
        &self.counts
    }

    pub fn hand_over_every(&self) -> Duration {
        self.hand_over_every
    }

    /// Longest time that the write may take, its ending included.
    pub fn hard_bound(&self) -> Duration {
        self.bound.saturating_add(END_GRACE)
    }

    /// Resolves when the write is to end.
    pub async fn ended(&self) -> Ending {
        let mut end = self.end.clone();
        let told = async {
            match end.wait_for(Option::is_some).await {
                Ok(ending) => ending.clone().unwrap_or(Ending::Unattended),
                Err(_) => Ending::Unattended,
            }
        };
        tokio::select! {
            biased;
            ending = told => ending,
            () = at(self.deadline) => Ending::TooLong(self.bound),
        }
    }

    /// Does `work`, or ends before it is done.
    pub async fn unless_ended<T>(&self, work: impl Future<Output = T>) -> Result<T, Ending> {
        tokio::select! {
            biased;
            ending = self.ended() => Err(ending),
            done = work => Ok(done),
        }
    }

    /// Before a file is written. Blocks its thread, which must be one where that is allowed.
    pub fn begins_blocking(&self, path: &str) -> Result<(), Ending> {
        let (answer, answered) = std::sync::mpsc::sync_channel(1);
        self.tell(
            Told::Begins(Arc::from(path)),
            Box::new(move |result| {
                // Nobody listens any more when the write was cut off.
                let _ = answer.send(result);
            }),
        )?;
        answered.recv().unwrap_or(Err(Ending::Unattended))
    }

    /// Before a file is written.
    pub async fn begins(&self, path: &str) -> Result<(), Ending> {
        self.tell_and_wait(Told::Begins(Arc::from(path))).await
    }

    /// Files that are whole.
    pub async fn hands_over(&self, files: Vec<NewDataFile>) -> Result<(), Ending> {
        self.tell_and_wait(Told::Whole(files)).await
    }

    async fn tell_and_wait(&self, told: Told) -> Result<(), Ending> {
        let (answer, answered) = tokio::sync::oneshot::channel();
        self.tell(
            told,
            Box::new(move |result| {
                let _ = answer.send(result);
            }),
        )?;
        answered.await.unwrap_or(Err(Ending::Unattended))
    }

    fn tell(&self, told: Told, answer: Answer) -> Result<(), Ending> {
        if let Told::Begins(_) = &told {
            self.counts.files.fetch_add(1, Ordering::Relaxed);
        }
        self.tell.send(Telling { told, answer }).map_err(|_| Ending::Unattended)
    }
}

/// Resolves at once when that time is over: a timer only fires when somebody has looked at the clock.
pub(super) async fn at(time: Instant) {
    if Instant::now() < time {
        tokio::time::sleep_until(time).await;
    }
}

impl Ending {
    /// As what comes out of a writer.
    pub(super) fn of_write(self) -> TableError {
        TableError::Producer(Box::new(self))
    }
}
