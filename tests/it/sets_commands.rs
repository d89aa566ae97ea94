//! Sets on the command line: enqueued by tables or by a file, shown once with their parts, cancelled and awaited as one,
//! counted once; and what cannot be a set is refused with what to do.

use serde_json::Value;

use crate::support::child::LONG_LEASE;
use crate::support::mall::{CUSTOMERS, ITEMS, Mall, RELEASES, policy};
use crate::support::{House, ORDERS, order};

async fn mall() -> Mall {
    let orders = House::in_real_time(&policy(ORDERS, RELEASES), LONG_LEASE).await;
    let mall = Mall::around(orders, RELEASES, RELEASES).await;
    for house in mall.all() {
        house.append_on_new("release/1", &[order(50, 22)]).await;
    }
    mall
}

impl Mall {
    /// Runs a command; its output, and whether it succeeded.
    fn run(&self, arguments: &[&str]) -> (bool, String, String) {
        let output = self.orders.command(arguments).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.success(), text(output.stdout), text(output.stderr))
    }

    pub fn ok(&self, arguments: &[&str]) -> String {
        let (ok, text, error) = self.run(arguments);
        assert!(ok, "{arguments:?}: {text}{error}");
        text
    }

    pub fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[&["--json"], arguments].concat())).unwrap()
    }

    /// The code and the text of a refusal.
    pub fn refused(&self, arguments: &[&str]) -> (String, String) {
        let (ok, text, error) = self.run(arguments);
        assert!(!ok, "{arguments:?}: {text}");
        let code =
            error.lines().next().unwrap().rsplit_once("  [").unwrap().1.trim_end_matches(']').to_owned();
        (code, error)
    }

    fn file(&self, text: &str) -> &'static str {
        std::fs::write(self.orders.dir.path().join("release.toml"), text).unwrap();
        "release.toml"
    }
}

const TABLES: [&str; 4] = ["--table", ORDERS, "--table", ITEMS];

#[tokio::test(flavor = "multi_thread")]
async fn a_set_of_tables_with_one_branch_name_from_enqueue_to_report() {
    let mall = mall().await;
    let enqueue = [&["request", "enqueue"], &TABLES[..], &["--source", "release/1", "--key", "r1"]].concat();
    let told = mall.ok(&enqueue);
    assert!(told.starts_with("set 1 enqueued: 2 tables, which land together or not at all\n"), "{told}");
    assert!(
        told.contains("\n  request 2: 'release/1' at ")
            && told.contains("of shop.items (class release), queued"),
        "{told}"
    );
    // The same key is the same set, whoever asks again.
    assert!(mall.ok(&enqueue).starts_with("set 1 there already"));

    let list = mall.ok(&["request", "list"]);
    assert!(list.lines().next().unwrap().contains("set"), "{list}");
    let shown = mall.ok(&["request", "show", "2"]);
    assert!(shown.contains("\nset             1, 2 tables\n") && shown.contains("\nset 1\n"), "{shown}");
    assert_eq!(mall.json(&["request", "show", "2"])["parts"].as_array().unwrap().len(), 2);

    mall.ok(&["worker", "--drain"]);
    let waited = mall.ok(&["request", "wait", "1"]);
    assert_eq!(waited.matches(" landed as snapshot ").count(), 2, "{waited}");
    let explained = mall.ok(&["request", "explain", "2"]);
    assert!(explained.contains("shop.orders") && explained.contains("landed"), "{explained}");
    // Asked again when its branches are gone: it has landed.
    assert_eq!(mall.items.head("release/1").await, None);
    assert_eq!(mall.json(&enqueue)["new"], false);

    let report = mall.orders.balanced_report();
    assert_eq!(report["figures"]["all"]["landed"], 1, "a set counts once: {report}");
    let landed: i64 =
        report["balances"].as_array().unwrap().iter().map(|b| b["landed"].as_i64().unwrap()).sum();
    assert_eq!(landed, 2, "and its snapshots a table each: {report}");
    mall.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_by_a_file_is_planned_and_landed() {
    let mall = mall().await;
    mall.customers.append_on_new("load/7", &[order(51, 22)]).await;
    let file = mall.file(
        "key = \"release-1\"\n\n[[part]]\ntable = \"shop.orders\"\nsource = \"release/1\"\n\n[[part]]\n\
         table = \"shop.customers\"\nsource = \"load/7\"\nclass = \"ingest\"\n",
    );
    let planned = mall.ok(&["plan", "--set", file]);
    assert!(planned.contains("shop.customers  load/7") && planned.contains("fast-forward"), "{planned}");
    let told = mall.json(&["request", "enqueue", "--set", file]);
    assert_eq!(told["set"]["parts"][1]["class"], "ingest");
    assert_eq!(told["set"]["parts"][0]["idempotency_key"], "release-1");
    mall.ok(&["worker", "--drain"]);
    assert!(mall.customers.keys("main").await.contains(&51) && mall.orders.keys("main").await.contains(&50));
    mall.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_is_cancelled_as_a_whole() {
    let mall = mall().await;
    mall.ok(&[&["request", "enqueue"], &TABLES[..], &["--source", "release/1"]].concat());
    let told = mall.ok(&["request", "cancel", "2", "--principal", "ann"]);
    assert!(told.starts_with("set 1 is cancelled, all 2 parts"), "{told}");
    let states = mall.json(&["request", "show", "1"])["parts"].to_string();
    assert_eq!(states.matches("\"cancelled\"").count(), 2, "{states}");
    let (ok, text, _) = mall.run(&["request", "wait", "1"]);
    assert!(!ok && text.matches("was cancelled").count() == 2, "{text}");
    mall.ok(&["worker", "--drain"]);
    assert!(mall.orders.head("release/1").await.is_some());
}

/// A set whose second part is pinned at this snapshot.
fn one_part_at(snapshot: i64) -> String {
    format!(
        "[[part]]\ntable = \"shop.orders\"\nsource = \"release/1\"\n\n[[part]]\ntable = \"shop.items\"\n\
         source = \"release/1\"\nsnapshot = {snapshot}\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_input_is_refused_before_anything_is_written() {
    let mall = mall().await;
    let with = |extra: &[&str]| mall.refused(&[&["request", "enqueue"], extra].concat());
    let (code, text) = with(&["--table", ORDERS, "--table", ORDERS, "--source", "release/1"]);
    assert!(code == "set-invalid" && text.contains("shop.orders is named twice"), "{text}");
    let (code, text) = with(&["--table", ORDERS, "--table", "shop.itms", "--source", "release/1"]);
    assert!(code == "table-not-found" && text.contains("did you mean 'shop.items'?"), "{text}");
    let (code, text) = with(&["--table", ORDERS, "--table", ITEMS, "--source", "relase/1"]);
    assert!(code == "branch-not-found" && text.contains("did you mean 'release/1'?"), "{text}");
    mall.items.append_on_new("items/only", &[order(52, 22)]).await;
    let (code, text) = with(&["--table", ITEMS, "--table", ORDERS, "--source", "items/only"]);
    assert!(
        code == "branch-not-found"
            && text.starts_with("error: branch 'items/only' not found in shop.orders  ["),
        "{text}"
    );
    // What says no table by itself is told with it, once.
    let (code, text) = with(&["--set", mall.file(&one_part_at(7))]);
    assert!(
        code == "snapshot-not-found" && text.starts_with("error: shop.items: snapshot 7 is not in"),
        "{text}"
    );
    let (code, _) = with(&["--table", ORDERS, "--table", ITEMS, "--wap-id", "w"]);
    assert_eq!(code, "set-invalid");
    let (code, _) = with(&["--table", ORDERS, "--table", ITEMS, "--source", "release/1", "--class", "nope"]);
    assert_eq!(code, "unknown-class");
    for (file, wanted) in [
        ("[[part]]\ntable = \"shop.orders\"\nsource = \"release/1\"\n", "shop.orders alone is no set"),
        ("", "no table was named"),
        ("[[part]]\ntable = \"shop.orders\"\nbranch = \"release/1\"\n", "unknown key 'branch' in [[part]]"),
        ("[[part]]\ntable = \"shop.orders\"\n", "source"),
    ] {
        let (code, text) = with(&["--set", mall.file(file)]);
        assert!(code == "set-invalid" && text.contains(wanted), "{text}");
    }
    let (code, text) = with(&["--set", "not-there.toml"]);
    assert!(code == "set-invalid" && text.contains("not-there.toml cannot be read"), "{text}");

    mall.ok(&[&["request", "enqueue"], &TABLES[..], &["--source", "release/1", "--key", "r1"]].concat());
    let other = ["--table", ORDERS, "--table", CUSTOMERS, "--source", "release/1", "--key", "r1"];
    let (code, text) = with(&other);
    assert!(code == "idempotency-key-conflict" && text.contains("belongs to request 1"), "{text}");
    let single = ["--table", ORDERS, "--source", "release/1", "--key", "r1"];
    let (code, _) = with(&single);
    assert_eq!(code, "idempotency-key-conflict");
    // Without a key it is the part that waits already.
    let told = mall.ok(&[&["request", "enqueue"], &single[..4]].concat());
    assert!(told.contains("request 1 there already") && told.contains(", a part of set 1, queued"), "{told}");
    assert_eq!(mall.orders.ledger.requests(&Default::default()).await.unwrap().len(), 2);
}
