//! A shop whose queue is driven through the real binary, as a person at a terminal does.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use mergeberg_kernel::ids::RequestId;
use serde_json::Value;

use crate::support::{House, order};

pub const TABLE: &str = "shop.orders";

/// Texts that would mean that a fault of ours or of a library reached the terminal as it is.
const RAW: [&str; 6] = ["panicked", "RUST_BACKTRACE", "unwrap", "SqliteError", "DataInvalid", "Os {"];

/// What a command did.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    /// The JSON value on stdout.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
}

/// The binary with a folder and a fixed environment.
pub fn mergeberg(folder: &std::path::Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mergeberg"));
    command.current_dir(folder).env("MERGEBERG_PRINCIPAL", "ann").env("MERGEBERG_LOG", "off");
    for variable in ["MERGEBERG_LEDGER", "MERGEBERG_POLICIES"] {
        command.env_remove(variable);
    }
    command
}

pub fn run_in(folder: &std::path::Path, args: &[&str]) -> Ran {
    let output = mergeberg(folder).args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let ran = Ran {
        code: output.status.code().unwrap_or(-1),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    };
    assert!((0..=7).contains(&ran.code), "{args:?} ended with an undocumented exit code: {ran:?}");
    for raw in RAW {
        assert!(!ran.stderr.contains(raw) && !ran.stdout.contains(raw), "{args:?} shows '{raw}': {ran:?}");
    }
    ran
}

/// A refused command: exit code, code and a next step, as text and as JSON. Gives the text.
pub fn refused_in(folder: &std::path::Path, args: &[&str], exit: i32, code: &str) -> String {
    let ran = run_in(folder, args);
    assert_eq!(ran.code, exit, "{args:?}: {ran:?}");
    assert_eq!(ran.stdout, "", "{args:?}");
    if code != "usage" {
        assert!(ran.stderr.starts_with("error: "), "{args:?}: {ran:?}");
        assert!(ran.stderr.contains(&format!("[{code}]\n  next: ")), "{args:?} lacks [{code}]: {ran:?}");
    }
    let mut with_json = args.to_vec();
    with_json.push("--json");
    let as_json = run_in(folder, &with_json);
    assert_eq!((as_json.code, as_json.stdout.as_str()), (exit, ""), "{args:?} --json: {as_json:?}");
    let value: Value = serde_json::from_str(&as_json.stderr).unwrap_or_else(|e| panic!("{e}: {as_json:?}"));
    let expected = if code == "usage" { "invalid-argument" } else { code };
    assert_eq!(value["error"]["code"], expected, "{args:?} --json: {value}");
    for key in ["message", "next"] {
        assert!(value["error"][key].as_str().is_some_and(|t| !t.trim().is_empty()), "{args:?}: {value}");
    }
    ran.stderr
}

/// ORD with its queue in a folder: configuration, catalog, ledger, policies.
pub struct Shop {
    pub house: House,
    next: AtomicU32,
}

impl Shop {
    /// S1 on main: A1[20: 1, 2], A2[21: 3].
    pub async fn open() -> Self {
        let shop = Self::empty().await;
        shop.house.append("main", &[order(1, 20), order(2, 20)]).await;
        shop.house.append("main", &[order(3, 21)]).await;
        shop
    }

    /// The table without any snapshot.
    pub async fn empty() -> Self {
        let house = House::empty(crate::support::ORDERS_POLICY).await;
        // The binary has the real clock, and retention is counted with it.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
        house.clock.store(i64::try_from(now).unwrap(), Ordering::SeqCst);
        let shop = Self { house, next: AtomicU32::new(0) };
        shop.configure("");
        shop
    }

    /// Writes mergeberg.toml; `mode` goes behind the catalog's uri.
    pub fn configure(&self, mode: &str) {
        let text = format!(
            "[catalog.test]\ntype = \"sql\"\nuri = \"catalog.db{mode}\"\nwarehouse = \"warehouse\"\n\
             [ledger]\npath = \"ledger.db\"\n"
        );
        std::fs::write(self.path("mergeberg.toml"), text).unwrap();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.house.dir.path().join(name)
    }

    pub fn run(&self, args: &[&str]) -> Ran {
        run_in(self.house.dir.path(), args)
    }

    /// Runs what must succeed; gives stdout.
    pub fn ok(&self, args: &[&str]) -> String {
        let ran = self.run(args);
        assert_eq!(ran.code, 0, "{args:?}: {ran:?}");
        ran.stdout
    }

    pub fn refused(&self, args: &[&str], exit: i32, code: &str) -> String {
        refused_in(self.house.dir.path(), args, exit, code)
    }

    pub fn enqueue(&self, source: &str) -> RequestId {
        self.enqueue_of(TABLE, source)
    }

    pub fn enqueue_of(&self, table: &str, source: &str) -> RequestId {
        let source = format!("--source={source}");
        let ran = self.run(&["request", "enqueue", "--table", table, &source, "--json"]);
        assert_eq!(ran.code, 0, "{source}: {ran:?}");
        RequestId(ran.json()["request"]["id"].as_i64().unwrap())
    }

    pub fn drain(&self) {
        self.ok(&["worker", "--drain"]);
    }

    /// `landed`, `held(table-renamed)`, as lists show it.
    pub async fn state(&self, id: RequestId) -> String {
        self.house.state(id).await
    }

    /// What `request explain` says.
    pub fn explain(&self, id: RequestId) -> String {
        self.ok(&["request", "explain", &id.to_string()])
    }

    /// The queue is usable: a new branch is written, enqueued and lands.
    pub async fn lands_another(&self) {
        let at = self.next.fetch_add(1, Ordering::SeqCst);
        let (name, key) = (format!("ingest/good-{at}"), i64::from(1000 + at));
        if self.house.head("main").await.is_some() {
            self.house.branch(&name).await;
        }
        self.house.append(&name, &[order(key, 28)]).await;
        let id = self.enqueue(&name);
        self.drain();
        assert_eq!(self.state(id).await, "landed", "{}", self.explain(id));
        assert!(self.house.keys("main").await.contains(&key));
        self.house.assert_sound().await;
    }

    /// Drains, and asks for a state with what `explain` tells of it: meaning and next step.
    pub async fn ends(&self, id: RequestId, state: &str, says: &str) {
        self.drain();
        self.is(id, state, says).await;
    }

    pub async fn is(&self, id: RequestId, state: &str, says: &str) {
        let explained = self.explain(id);
        assert_eq!(self.state(id).await, state, "{explained}");
        assert!(explained.contains(says), "'{says}' is not in\n{explained}");
        if state.contains('(') {
            assert!(explained.contains("\n  reason ") && explained.contains("\n  next "), "{explained}");
        }
    }
}
