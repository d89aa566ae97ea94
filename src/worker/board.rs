//! Which tables are under way, what is due, and what rests after a failure: the one place that hands out lanes.
//!
//! A set is given all of its tables at once, when none of them is under way: no set ever holds one table while it waits for
//! another.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mergeberg_kernel::ids::TableUuid;
use tokio::time::Instant;

use super::error::{Disposition, WorkerError};
use super::protocol::Progress;
use super::run::RunOptions;
use super::tick::Job;

/// Ticks in a row that may fail before `--drain` gives a table up.
const MAX_DRAIN_FAILURES: u32 = 8;
/// Failed ticks in a row that are tried again at once; most troubles are over by then.
const QUICK_RETRIES: u32 = 8;
/// Longest rest after failed ticks: a broken table must not fill log and ledger over a weekend.
const MAX_FAILURE_REST: Duration = Duration::from_secs(60);

/// What there is to do when nothing is under way.
pub(super) enum Rest {
    LookAgain,
    Wait,
    Drained,
    GiveUp(WorkerError),
}

/// Which tables are under way, what is due, and what rests after a failure.
pub(super) struct Board {
    options: RunOptions,
    busy: BTreeSet<TableUuid>,
    /// To be looked at as soon as there is room and its tables are free; `everything` says all of them.
    due: BTreeSet<Job>,
    everything: bool,
    next_look: Instant,
    failures: BTreeMap<Job, Failing>,
    /// Sets that were open at the last look.
    sets: Vec<Job>,
    /// Failed looks at ledger and policies, which concern every table.
    failed_looks: Failing,
    /// `--drain`: why a table was given up.
    given_up: Option<WorkerError>,
}

#[derive(Clone, Copy)]
struct Failing {
    times: u32,
    until: Instant,
}

impl Failing {
    fn none() -> Self {
        Self { times: 0, until: Instant::now() }
    }

    fn is_over(&self, now: Instant) -> bool {
        self.times == 0 || now >= self.until
    }

    fn again(&mut self, options: RunOptions) {
        self.times = self.times.saturating_add(1);
        let rest = if options.drain { quick_rest(self.times) } else { rest_for(self.times, options.poll) };
        self.until = Instant::now() + rest;
    }
}

impl Board {
    pub fn new(options: RunOptions) -> Self {
        Self {
            options,
            busy: BTreeSet::new(),
            due: BTreeSet::new(),
            everything: true,
            next_look: Instant::now(),
            failures: BTreeMap::new(),
            sets: Vec::new(),
            failed_looks: Failing::none(),
            given_up: None,
        }
    }

    /// Something was enqueued, decided or adopted: nobody rests any longer.
    pub fn wake(&mut self) {
        self.everything = true;
        let now = Instant::now();
        self.failed_looks.until = now;
        self.failures.values_mut().for_each(|failing| failing.until = now);
    }

    fn is_free(&self, job: &Job) -> bool {
        job.tables().iter().all(|table| !self.busy.contains(table))
    }

    pub fn is_due(&self, now: Instant) -> bool {
        self.failed_looks.is_over(now)
            && (self.everything
                || self.is_poll(now)
                || self.due.iter().any(|job| self.is_free(job))
                || self.failures.iter().any(|(job, f)| f.is_over(now) && self.is_free(job)))
    }

    /// A drain ends instead of looking once more.
    fn is_poll(&self, now: Instant) -> bool {
        !self.options.drain && now >= self.next_look
    }

    /// How long nothing is due by itself; at most a poll.
    pub fn rest(&self, now: Instant) -> Duration {
        let failing = self.failures.iter().filter(|(job, _)| self.is_free(job));
        let poll = (!self.options.drain).then_some(self.next_look);
        let next = match self.failed_looks.times {
            0 => failing.map(|(_, f)| f.until).chain(poll).min(),
            _ => Some(self.failed_looks.until),
        };
        // Never nothing: what is due was started before anybody rests.
        let left = next.map_or(self.options.poll, |at| at.saturating_duration_since(now));
        left.clamp(SHORTEST_REST, self.options.poll.max(SHORTEST_REST))
    }

    /// Takes out of `work` what is to be started now, at most `free` jobs; the rest stays due. Sets come first,
    /// so that a table which is never at rest does not keep one waiting.
    pub fn take<W>(&mut self, mut work: BTreeMap<Job, W>, free: usize, now: Instant) -> Vec<(Job, W)> {
        self.failed_looks = Failing::none();
        self.sets = work.keys().filter(|job| matches!(job, Job::Set { .. })).cloned().collect();
        if self.everything || self.is_poll(now) {
            self.everything = false;
            self.next_look = now + self.options.poll;
            self.due.extend(work.keys().cloned());
        }
        self.failures.retain(|job, _| work.contains_key(job));
        self.due.extend(self.failures.iter().filter(|(_, f)| f.is_over(now)).map(|(job, _)| job.clone()));
        self.due.retain(|job| work.contains_key(job));
        let mut starting = Vec::new();
        for job in self.due.clone() {
            let rests = self.failures.get(&job).is_some_and(|f| !f.is_over(now));
            if starting.len() < free && !rests && self.is_free(&job) {
                self.busy.extend(job.tables().iter().cloned());
                starting.push(job);
            }
        }
        // What rests after a failure comes back by its own time.
        self.due.retain(|job| !starting.contains(job) && !self.failures.contains_key(job));
        starting.into_iter().filter_map(|job| work.remove(&job).map(|work| (job, work))).collect()
    }

    pub fn ended(&mut self, job: Job, result: Result<Progress, WorkerError>) -> Result<(), WorkerError> {
        for table in job.tables() {
            self.busy.remove(table);
        }
        match result {
            Ok(progress) => {
                self.failures.remove(&job);
                if progress.changed {
                    self.changed(job);
                }
            }
            Err(error) if error.disposition() != Disposition::RetryNextTick => return Err(error),
            Err(error) => {
                let options = self.options;
                let failing = self.failures.entry(job).or_insert_with(Failing::none);
                failing.again(options);
                tracing::warn!(failures = failing.times, "a tick failed, the next one tries again: {error}");
                if options.drain && failing.times >= MAX_DRAIN_FAILURES {
                    failing.until = Instant::now() + FOREVER;
                    self.given_up.get_or_insert(error);
                }
            }
        }
        Ok(())
    }

    /// Looked at again, with everybody whose tables these are.
    pub fn changed(&mut self, job: Job) {
        if matches!(job, Job::Set { .. }) {
            self.due.extend(job.tables().iter().cloned().map(Job::Table));
        }
        let concerned = |set: &&Job| set.tables().iter().any(|table| job.tables().contains(table));
        self.due.extend(self.sets.iter().filter(concerned).cloned());
        self.due.insert(job);
    }

    /// Ledger or policies could not be read.
    pub fn look_failed(&mut self, error: WorkerError) -> Result<(), WorkerError> {
        if error.disposition() != Disposition::RetryNextTick {
            return Err(error);
        }
        self.failed_looks.again(self.options);
        tracing::warn!(
            failures = self.failed_looks.times,
            "this look failed, the next one tries again: {error}"
        );
        if self.options.drain && self.failed_looks.times >= MAX_DRAIN_FAILURES {
            return Err(error);
        }
        Ok(())
    }

    pub fn at_rest(&mut self) -> Rest {
        let waiting = self.failures.values().any(|failing| failing.times < MAX_DRAIN_FAILURES);
        if !self.options.drain || waiting || self.failed_looks.times > 0 {
            return Rest::Wait;
        }
        if self.everything || !self.due.is_empty() {
            return Rest::LookAgain;
        }
        match self.given_up.take() {
            Some(error) => Rest::GiveUp(error),
            None => Rest::Drained,
        }
    }
}

const SHORTEST_REST: Duration = Duration::from_millis(1);
/// Longer than any drain.
const FOREVER: Duration = Duration::from_secs(24 * 3600);

/// A short pause that grows: most troubles are over by then.
fn quick_rest(failures: u32) -> Duration {
    Duration::from_millis(2_u64.saturating_mul(1 << failures.min(7)))
}

/// Short at first; then a poll, doubled with every further failure up to the bound.
fn rest_for(failures: u32, poll: Duration) -> Duration {
    match failures.checked_sub(QUICK_RETRIES) {
        None | Some(0) => quick_rest(failures),
        Some(more) => poll.saturating_mul(1 << more.min(16)).min(MAX_FAILURE_REST).max(poll),
    }
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::RequestId;

    use super::*;

    const POLL: Duration = Duration::from_secs(2);

    fn board(drain: bool) -> Board {
        Board::new(RunOptions { drain, poll: POLL, lease_ms: 60_000 })
    }

    fn table(name: &str) -> Job {
        Job::Table(TableUuid::new(name))
    }

    /// `a`, or `a+b` for a set of both.
    fn job(name: &str) -> Job {
        match name.contains('+') {
            false => table(name),
            true => Job::Set { id: RequestId(1), tables: name.split('+').map(TableUuid::new).collect() },
        }
    }

    fn name(job: &Job) -> String {
        job.tables().iter().map(ToString::to_string).collect::<Vec<_>>().join("+")
    }

    fn work(names: &[&str]) -> BTreeMap<Job, ()> {
        names.iter().map(|name| (job(name), ())).collect()
    }

    fn started(board: &mut Board, names: &[&str], free: usize, now: Instant) -> Vec<String> {
        board.take(work(names), free, now).into_iter().map(|(job, ())| name(&job)).collect()
    }

    fn failed() -> Result<Progress, WorkerError> {
        Err(WorkerError::Bug("of a test".to_owned()))
    }

    fn changed(changed: bool) -> Result<Progress, WorkerError> {
        Ok(Progress { landed: 0, changed })
    }

    #[test]
    fn a_table_goes_on_as_long_as_something_changes_and_the_others_rest() {
        let mut board = board(true);
        let now = Instant::now();
        assert_eq!(started(&mut board, &["a", "b"], 8, now), ["a", "b"]);
        assert!(!board.is_due(now));
        board.ended(table("b"), changed(false)).unwrap();
        assert!(!board.is_due(now));
        board.ended(table("a"), changed(true)).unwrap();
        assert!(board.is_due(now));
        assert_eq!(started(&mut board, &["a", "b"], 8, now), ["a"]);
        board.ended(table("a"), changed(false)).unwrap();
        assert!(matches!(board.at_rest(), Rest::Drained));
    }

    #[test]
    fn nobody_spins_while_a_table_is_under_way() {
        for drain in [true, false] {
            let mut board = board(drain);
            let now = Instant::now();
            started(&mut board, &["a"], 8, now);
            assert_eq!(board.rest(now), POLL, "drain: {drain}");
            let later = now + POLL * 3;
            assert_eq!(board.is_due(later), !drain, "a poll looks for other tables, a drain does not");
            started(&mut board, &["a"], 8, later);
            assert_eq!(board.rest(later), POLL, "drain: {drain}");
            board.look_failed(WorkerError::Bug("of a test".to_owned())).unwrap();
            let until = board.failed_looks.until;
            assert!(board.rest(until - Duration::from_millis(2)) <= Duration::from_millis(2));
        }
    }

    #[test]
    fn no_more_tables_than_there_is_room_for_and_none_is_forgotten() {
        let mut board = board(false);
        let now = Instant::now();
        assert_eq!(started(&mut board, &["a", "b", "c"], 2, now), ["a", "b"]);
        board.ended(table("a"), changed(false)).unwrap();
        assert!(board.is_due(now));
        assert_eq!(started(&mut board, &["a", "b", "c"], 1, now), ["c"]);
        // One that went from the ledger meanwhile is nobody's business any more.
        board.ended(table("b"), changed(true)).unwrap();
        assert_eq!(started(&mut board, &["c"], 2, now), Vec::<String>::new());
    }

    #[test]
    fn a_failing_table_rests_ever_longer_and_is_woken_by_news() {
        let mut board = board(false);
        let mut now = Instant::now();
        for _ in 0..QUICK_RETRIES + 3 {
            assert_eq!(started(&mut board, &["a"], 8, now), ["a"]);
            board.ended(table("a"), failed()).unwrap();
            now = board.failures[&table("a")].until;
        }
        let rests: Vec<Duration> = (1..40).map(|times| rest_for(times, POLL)).collect();
        assert!(rests.is_sorted(), "{rests:?}");
        assert_eq!((rests[0], rests.last()), (Duration::from_millis(4), Some(&MAX_FAILURE_REST)));
        assert_eq!(started(&mut board, &["a"], 8, Instant::now()), Vec::<String>::new(), "it rests");
        board.wake();
        assert_eq!(started(&mut board, &["a"], 8, Instant::now()), ["a"]);
    }

    #[test]
    fn a_drain_gives_a_failing_table_up_and_ends_with_its_error() {
        let mut board = board(true);
        for _ in 0..MAX_DRAIN_FAILURES {
            assert!(matches!(board.at_rest(), Rest::LookAgain | Rest::Wait));
            let now = Instant::now() + Duration::from_secs(1);
            assert!(started(&mut board, &["a"], 8, now).contains(&"a".to_owned()));
            board.ended(table("a"), failed()).unwrap();
        }
        assert!(matches!(board.at_rest(), Rest::GiveUp(_)));
    }

    #[test]
    fn a_set_waits_for_all_of_its_tables_and_then_goes_first() {
        let mut board = board(true);
        let now = Instant::now();
        let all = ["a", "b", "c", "a+b"];
        assert_eq!(started(&mut board, &["a", "c"], 8, now), ["a", "c"]);
        board.wake();
        assert_eq!(started(&mut board, &all, 8, now), ["b"], "one of its tables is under way");
        board.ended(table("b"), changed(true)).unwrap();
        assert_eq!(started(&mut board, &all, 8, now), ["b"], "what is free goes on");
        board.ended(table("a"), changed(true)).unwrap();
        board.ended(table("b"), changed(true)).unwrap();
        assert_eq!(started(&mut board, &all, 8, now), ["a+b"]);
        assert!(!board.is_due(now), "its tables wait for it, however due they are");
        board.ended(table("c"), changed(false)).unwrap();
        board.ended(job("a+b"), changed(true)).unwrap();
        assert_eq!(started(&mut board, &all, 8, now), ["a+b", "c"], "again, as long as something changes");
        board.ended(job("a+b"), changed(false)).unwrap();
        assert_eq!(started(&mut board, &all, 8, now), ["a", "b"], "and they after it");
    }

    #[test]
    fn a_set_is_looked_at_when_one_of_its_tables_changed() {
        let mut board = board(true);
        let now = Instant::now();
        let all = ["a", "b", "c", "a+b"];
        assert_eq!(started(&mut board, &all, 8, now), ["a+b", "c"]);
        board.ended(job("a+b"), changed(false)).unwrap();
        assert_eq!(started(&mut board, &all, 8, now), ["a", "b"]);
        board.ended(table("a"), changed(false)).unwrap();
        board.ended(table("c"), changed(true)).unwrap();
        assert_eq!(started(&mut board, &all, 8, now), ["c"], "another table is no news to it");
        board.ended(table("b"), changed(true)).unwrap();
        assert_eq!(started(&mut board, &all, 8, now), ["a+b"]);
    }
}
