//! Live progress: lines that stay, and on a terminal one line at the bottom that changes.

use std::io::{IsTerminal as _, Write as _};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Columns that the changing line may take: a longer one would wrap and could not be taken back.
const STATUS_COLUMNS: usize = 78;
/// Column in which what happened begins.
const WHAT_COLUMN: usize = 22;
/// Takes the changing line back.
const CLEAR_LINE: &str = "\r\x1b[2K";

/// Where progress goes.
#[derive(Clone, Copy, Debug)]
enum Sink {
    Stdout,
    /// stdout is for the one JSON value.
    Stderr,
}

pub struct Progress {
    sink: Sink,
    terminal: bool,
    start: Instant,
    /// The changing line as it stands; empty when there is none.
    status: Mutex<String>,
}

impl Progress {
    pub fn new(json: bool) -> Self {
        let sink = if json { Sink::Stderr } else { Sink::Stdout };
        let terminal = match sink {
            Sink::Stdout => std::io::stdout().is_terminal(),
            Sink::Stderr => std::io::stderr().is_terminal(),
        };
        Self { sink, terminal, start: Instant::now(), status: Mutex::default() }
    }

    /// A line that stays: when, who, what. Further lines of `what` stand below it.
    pub fn say(&self, who: &str, what: &str) {
        let seconds = self.start.elapsed().as_secs_f64();
        let what = what.replace('\n', &format!("\n{:<WHAT_COLUMN$}", ""));
        self.line(&format!("{seconds:5.1} s  {who:<11}  {what}"));
    }

    /// A line that stays, as it is.
    pub fn line(&self, text: &str) {
        let status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        let clear = if status.is_empty() { "" } else { CLEAR_LINE };
        self.write(&format!("{clear}{text}\n{status}"));
    }

    /// The line that changes; only a terminal has one.
    pub fn status(&self, text: &str) {
        if !self.terminal {
            return;
        }
        let cut: String = text.chars().take(STATUS_COLUMNS).collect();
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        if *status != cut {
            self.write(&format!("{CLEAR_LINE}{cut}"));
            *status = cut;
        }
    }

    fn write(&self, text: &str) {
        // A reader that went away is no fault of the demo.
        let _ = match self.sink {
            Sink::Stdout => {
                let mut out = std::io::stdout().lock();
                out.write_all(text.as_bytes()).and_then(|()| out.flush())
            }
            Sink::Stderr => std::io::stderr().write_all(text.as_bytes()),
        };
    }
}

impl Drop for Progress {
    /// What is printed next begins on a line of its own, also after an error.
    fn drop(&mut self) {
        self.status("");
    }
}
