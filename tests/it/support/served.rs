//! An engine as a process of its own: `tests/python/<script> serve`, a job a line, an answer a line.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;

pub struct Served {
    child: Child,
    jobs: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Served {
    /// `None`, said so, where the environment names no interpreter that has the engine.
    pub fn start(interpreter: &str, script: &str) -> Option<Self> {
        let Some(found) = std::env::var_os(interpreter) else {
            eprintln!("skipped: {interpreter} is unset, so {script} has no engine (scripts/test sets it)");
            return None;
        };
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/python").join(script);
        let mut child = Command::new(found)
            .arg(path)
            .arg("serve")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let jobs = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Some(Self { child, jobs, answers })
    }

    pub fn ask(&mut self, job: &Value) -> Value {
        let jobs = self.jobs.as_mut().expect("it runs");
        writeln!(jobs, "{job}").unwrap();
        jobs.flush().unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{job} answered {line:?}: {e}"))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Its loop ends with its input.
        drop(self.jobs.take());
        let _ = self.child.wait();
    }
}
