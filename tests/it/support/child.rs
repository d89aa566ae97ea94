//! The shipped program as a process of its own, over a House's folder and on the real clock.

use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use mergeberg::ledger::LedgerPlace;
use mergeberg::table::catalog::Catalog;
use mergeberg::table::create::TableDefinition;
use serde_json::Value;

use super::{House, order, postgres};

/// A child that has not ended by then is stuck, whatever the machine.
pub const PATIENCE: Duration = Duration::from_secs(240);
/// Environment variable of debug builds (`worker::step::DIE_AT`).
pub const DIE_AT: &str = mergeberg::worker::step::DIE_AT;
/// The same (`worker::step::RUN_AT`).
pub const RUN_AT: &str = mergeberg::worker::step::RUN_AT;
/// The program that the tests are of.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_mergeberg");

/// How a House's processes are configured.
#[derive(Clone, Copy)]
pub struct Settings {
    pub poll: &'static str,
    pub lease: &'static str,
    pub checkpoint: &'static str,
}

/// A dead worker's lease is over at once.
pub const SHORT_LEASE: Settings = Settings { poll: "30ms", lease: "90ms", checkpoint: "1h" };
/// What a replay has written is named at once.
pub const CHECKPOINTS_AT_ONCE: Settings = Settings { checkpoint: "1ms", ..SHORT_LEASE };
/// The same of a worker that a test holds up: it says nothing meanwhile.
pub const HELD_UP: Settings = Settings { lease: "60s", ..CHECKPOINTS_AT_ONCE };
/// Nobody takes over while the holder lives, however slow the machine.
pub const LONG_LEASE: Settings = Settings { poll: "100ms", lease: "60s", checkpoint: "1h" };

impl House {
    /// ORD as [`House::orders`], on the real clock, with `mergeberg.toml`.
    pub async fn in_real_time(policy: &str, settings: Settings) -> Self {
        Self::in_real_time_with(Self::orders_definition(), policy, settings).await
    }

    /// The same, of another definition.
    pub async fn in_real_time_with(definition: TableDefinition, policy: &str, settings: Settings) -> Self {
        let house = Self::with_table(definition, policy).await;
        house.clock.store(real_now(), std::sync::atomic::Ordering::SeqCst);
        house.append("main", &[order(1, 20), order(2, 20)]).await;
        house.append("main", &[order(3, 21)]).await;
        house.configure(settings);
        house
    }

    /// Writes `mergeberg.toml` beside catalog, ledger and policies.
    pub fn configure(&self, settings: Settings) {
        let warehouse = self.dir.path().join("warehouse");
        let database = postgres::database_in(self.dir.path());
        let catalog =
            format!("type = \"sql\"\nuri = \"{database}\"\nwarehouse = \"file://{}\"", warehouse.display());
        self.configure_for(&catalog, settings);
    }
}

impl<C: Catalog + 'static> House<C> {
    /// Writes `mergeberg.toml` with these lines for its catalog.
    pub fn configure_for(&self, catalog: &str, settings: Settings) {
        let Settings { poll, lease, checkpoint } = settings;
        let ledger = match self.ledger.place() {
            LedgerPlace::File(_) => "path = \"ledger.db\"".to_owned(),
            LedgerPlace::Postgres(place) => format!("url = \"{place}\""),
        };
        let text = format!(
            "[catalog.test]\n{catalog}\n\n[ledger]\n{ledger}\n\n[policies]\npath = \"policies\"\n\n\
             [worker]\npoll = \"{poll}\"\nlease = \"{lease}\"\ncheckpoint = \"{checkpoint}\"\n",
        );
        std::fs::write(self.dir.path().join("mergeberg.toml"), text).unwrap();
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        program(self.dir.path(), arguments)
    }

    /// Starts a worker; the guard ends it with the test.
    pub fn start_worker(&self, arguments: &[&str]) -> Running {
        let child = self
            .command(&[&["worker"], arguments].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Running(Some(child))
    }

    /// `worker --drain`, to its end. True: it was killed at `step`.
    pub fn drain_in_child(&self, step: Option<&str>) -> bool {
        let mut command = self.command(&["worker", "--drain"]);
        if let Some(step) = step {
            command.env(DIE_AT, step);
        }
        let output = to_the_end(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
        let killed = was_killed(output.status);
        assert!(killed || output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(!killed || step.is_some(), "nobody asked it to die");
        killed
    }

    /// `worker --drain`, to its end, which runs a command of the shell at a step and waits for it.
    pub fn drain_and_run(&self, step: &str, command: &str) -> Output {
        let mut worker = self.command(&["worker", "--drain"]);
        worker.env(RUN_AT, format!("{step}={command}"));
        let output = to_the_end(worker.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
        assert!(output.status.success(), "at {step}: {}", String::from_utf8_lossy(&output.stderr));
        output
    }

    /// `report daily` of today; fails the test unless it adds up.
    pub fn balanced_report(&self) -> Value {
        let output = self.command(&["report", "daily", "--json"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(report["adds_up"], true, "{text}");
        report
    }
}

/// A process that does not outlive its test.
pub struct Running(Option<Child>);

impl Running {
    pub fn id(&self) -> u32 {
        self.0.as_ref().expect("it runs").id()
    }

    pub fn has_ended(&mut self) -> bool {
        self.0.as_mut().expect("it runs").try_wait().unwrap().is_some()
    }

    /// As Ctrl-C would, but by the signal of service managers.
    pub fn stop(mut self) -> Output {
        signal("-TERM", self.id());
        to_the_end(self.0.take().expect("it runs"))
    }

    pub fn kill(mut self) {
        let mut child = self.0.take().expect("it runs");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub fn wait(mut self) -> Output {
        to_the_end(self.0.take().expect("it runs"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn program(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.current_dir(folder).args(arguments).env_remove(DIE_AT).env_remove(RUN_AT);
    command
}

fn signal(name: &str, process: u32) {
    assert!(Command::new("kill").args([name, &process.to_string()]).status().unwrap().success());
}

/// Waits for the end with a bound. What it prints fits into a pipe.
fn to_the_end(mut child: Child) -> Output {
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > PATIENCE {
            child.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            panic!("it did not end: {}", String::from_utf8_lossy(&output.stderr));
        }
        std::thread::park_timeout(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

fn was_killed(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    status.signal() == Some(9)
}

/// Polls until `condition` holds, with a bound.
pub async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let begin = Instant::now();
    let mut look = tokio::time::interval(Duration::from_millis(20));
    while !condition().await {
        assert!(begin.elapsed() < PATIENCE, "waited in vain until {what}");
        look.tick().await;
    }
}

pub fn real_now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    i64::try_from(since.as_millis()).unwrap()
}
