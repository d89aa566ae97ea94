//! Policies from TOML: what parses, and what each wrong line is told.

use mergeberg_kernel::ids::RefName;
use mergeberg_kernel::policy::{
    AfterLanding, Appends, CheckKind, Compare, Duration, Isolation, NullRule, OnSourceMoved, Overlap, Scope,
    TablePolicy, Upstream,
};

const FULL: &str = r#"
table = "nyc.flights"
trusted-rewriters = ["spark-maintenance"]
protected = ["release"]

[[check]]
id = "keys"
type = "duplicate-key"
columns = ["carrier", "flight"]
nulls = "violation"
scope = "table"
compare = "strict"

[[check]]
id = "rows"
type = "row-count"
min = 1
max-growth = 1.5
min-added = 1

[[check]]
id = "carriers"
type = "referential"
columns = ["carrier"]
references = { table = "nyc.airlines", columns = ["carrier"] }

[[check]]
id = "origins"
type = "accepted-values"
column = "origin"
values = ["EWR", "JFK"]

[[check]]
id = "filled"
type = "not-null"
columns = ["time_hour"]

[[check]]
id = "totals"
type = "reconciliation"
mode = "at-most"
upstream = { file = "upstream.csv" }
by = ["year", "month"]
count = "flights"
sums = { air_time = "air_time" }
absolute = 0.01

[[check]]
id = "open"
type = "sql"
query = "SELECT 1 FROM touched WHERE air_time < 0"

[[class]]
name = "ingest"
prefix = "ingest/"
overlap = "allow-with-duplicate-check"
checks = ["keys", "rows"]
batch-size = 20
age-bound = "2m"
after-landing = "drop"
branch-lifetime = "7d"

[[class]]
name = "upsert"
prefix = "ingest/upsert/"
appends = "derived"
isolation = "snapshot"
checks = ["keys"]
on-source-moved = "repin"
tag = "done/{request}"
"#;

fn error_of(text: &str) -> String {
    match TablePolicy::parse("flights.toml", text) {
        Ok(policy) => panic!("parsed: {policy:?}\nfrom {text}"),
        Err(error) => error.to_string(),
    }
}

fn with_check(lines: &str) -> String {
    format!("table = \"nyc.flights\"\n[[check]]\nid = \"keys\"\n{lines}\n")
}

fn with_class(lines: &str) -> String {
    format!("table = \"nyc.flights\"\n[[class]]\nname = \"ingest\"\nprefix = \"ingest/\"\n{lines}\n")
}

#[test]
fn a_full_policy_reads_as_written() {
    let policy = TablePolicy::parse("flights.toml", FULL).unwrap();
    assert_eq!(policy.table.to_string(), "nyc.flights");
    assert_eq!(policy.protected, [RefName::new("release")]);
    let keys = &policy.checks[0];
    assert_eq!(keys.compare, Compare::Strict);
    assert_eq!(
        keys.kind,
        CheckKind::DuplicateKey {
            columns: vec!["carrier".to_owned(), "flight".to_owned()],
            nulls: NullRule::Violation,
            scope: Scope::Table
        }
    );
    let names: Vec<&str> = policy.checks.iter().map(|c| c.kind.name()).collect();
    assert_eq!(
        names,
        ["duplicate-key", "row-count", "referential", "accepted-values", "not-null", "reconciliation", "sql"]
    );
    let monotone: Vec<bool> = policy.checks.iter().map(|c| c.kind.is_monotone()).collect();
    assert_eq!(monotone, [true, false, true, true, true, false, false]);
    let ingest = policy.class_named("ingest").unwrap();
    assert_eq!((ingest.batch_size, ingest.age_bound.ms), (20, 120_000));
    assert_eq!(
        (ingest.overlap, ingest.after_landing),
        (Overlap::AllowWithDuplicateCheck, AfterLanding::Drop)
    );
    assert_eq!(ingest.branch_lifetime, Some(Duration { ms: 7 * 86_400_000 }));
    assert_eq!(policy.checks_of(ingest).map(|c| c.id.as_str()).collect::<Vec<_>>(), ["keys", "rows"]);
    let upsert = policy.class_named("upsert").unwrap();
    assert_eq!((upsert.appends, upsert.isolation), (Appends::Derived, Isolation::Snapshot));
    assert_eq!(upsert.on_source_moved, OnSourceMoved::Repin);
}

#[test]
fn the_shipped_default_is_the_strictest() {
    let policy = TablePolicy::parse("x.toml", &with_class("")).unwrap();
    let class = &policy.classes[0];
    assert_eq!((class.overlap, class.isolation, class.appends), Default::default());
    assert_eq!(class.overlap, Overlap::Refuse);
    assert_eq!(class.isolation, Isolation::Serializable);
    assert_eq!(class.on_source_moved, OnSourceMoved::LandPin);
    assert_eq!(class.after_landing, AfterLanding::Keep);
    let shipped = TablePolicy::shipped_default("a.b".parse().unwrap());
    assert_eq!(shipped.class_of(&RefName::new("anything")).unwrap().name, "default");
}

#[test]
fn the_longest_prefix_wins_and_names_are_exact() {
    let policy = TablePolicy::parse("flights.toml", FULL).unwrap();
    let class = |name: &str| policy.class_of(&RefName::new(name)).map(|c| c.name.as_str());
    assert_eq!(class("ingest/s1"), Some("ingest"));
    assert_eq!(class("ingest/upsert/s1"), Some("upsert"));
    assert_eq!(class("ingest/upsert"), Some("ingest"));
    assert_eq!(class("INGEST/s1"), None);
    assert_eq!(class("'ingest/s1'"), None);
}

#[test]
fn the_digest_knows_every_setting() {
    let digest = |text: &str| TablePolicy::parse("x", text).unwrap().digest();
    let plain = digest(FULL);
    assert_eq!(plain, digest(&FULL.replace("\n\n", "\n")), "layout is no setting");
    for (from, to) in [
        ("max-growth = 1.5", "max-growth = 1.6"),
        ("scope = \"table\"\ncompare = \"strict\"", "scope = \"table\""),
        ("batch-size = 20", "batch-size = 21"),
        ("protected = [\"release\"]", "protected = []"),
        ("after-landing = \"drop\"", "after-landing = \"keep\""),
    ] {
        assert_ne!(plain, digest(&FULL.replace(from, to)), "{to}");
    }
    let policy = TablePolicy::parse("x", FULL).unwrap();
    let stored = serde_json::to_string(&policy).unwrap();
    assert_eq!(serde_json::from_str::<TablePolicy>(&stored).unwrap(), policy, "a stored policy reads back");
}

#[test]
fn unknown_keys_are_errors_wherever_they_stand() {
    let key = "colour = 1";
    for text in [
        format!("{key}\ntable = \"nyc.flights\""),
        with_class(key),
        with_check(&format!("type = \"not-null\"\ncolumns = [\"a\"]\n{key}")),
        with_check(&format!("type = \"sql\"\nquery = \"SELECT 1\"\n{key}")),
        with_check(
            "type = \"referential\"\ncolumns = [\"a\"]\nreferences = { table = \"a.b\", columns = [\"a\"], colour = 1 }",
        ),
        with_check(
            "type = \"reconciliation\"\nmode = \"at-most\"\nby = [\"a\"]\ncount = \"n\"\nupstream = { file = \"f\", colour = 1 }",
        ),
    ] {
        let message = error_of(&text);
        assert!(message.starts_with("flights.toml: "), "{message}");
        assert!(message.contains("colour") || message.contains("keys"), "{message}");
    }
    let message = error_of(&with_check("type = \"not-null\"\ncolumns = [\"a\"]\nscoop = \"table\""));
    assert!(message.contains("'keys'") && message.contains("scoop"), "{message}");
}

#[test]
fn checks_need_an_id_of_their_own() {
    let head = "table = \"nyc.flights\"\n";
    let check = "type = \"not-null\"\ncolumns = [\"a\"]\n";
    for id in ["", "id = \"\"\n", "id = \" \"\n", "id = 7\n"] {
        let message = error_of(&format!("{head}[[check]]\n{id}{check}"));
        assert!(message.contains("needs an 'id'"), "{message}");
    }
    let twice = format!("[[check]]\nid = \"keys\"\n{check}").repeat(2);
    let message = error_of(&format!("{head}{twice}"));
    assert!(message.contains("check 'keys' is defined twice"), "{message}");
}

#[test]
fn wrong_words_are_shown_with_their_line() {
    for (lines, expected) in [
        ("overlap = \"maybe\"", "maybe"),
        ("appends = \"blindly\"", "blindly"),
        ("isolation = \"none\"", "none"),
        ("equality-deletes = \"serial-upsert\"", "serial-upsert"),
        ("on-source-moved = \"force\"", "force"),
        ("after-landing = \"delete\"", "delete"),
        ("age-bound = \"soon\"", "soon"),
        ("age-bound = 10", "age-bound"),
        ("age-bound = \"0s\"", "0s"),
        ("branch-lifetime = \"-1d\"", "-1d"),
        ("batch-size = -1", "batch-size"),
        ("batch_size = 5", "batch_size"),
    ] {
        let message = error_of(&with_class(lines));
        assert!(message.contains(expected) && message.contains("line 5"), "{message}");
    }
    assert!(error_of("table = \"flights\"").contains("write namespace and table"));
    assert!(error_of("").contains("table"));
    assert!(error_of("table = ").contains("line 1"));
}

#[test]
fn an_upstream_is_a_file_or_a_table() {
    let upstream = |text: &str| {
        let policy = TablePolicy::parse("x", &FULL.replace("{ file = \"upstream.csv\" }", text)).unwrap();
        let CheckKind::Reconciliation { upstream, .. } = policy.checks[5].kind.clone() else { panic!("5") };
        upstream
    };
    assert_eq!(upstream("{ file = \"a.parquet\" }"), Upstream::File { file: "a.parquet".to_owned() });
    assert_eq!(upstream("{ table = \"a.b\" }"), Upstream::Table { table: "a.b".parse().unwrap() });
    let both = FULL.replace("{ file = \"upstream.csv\" }", "{ file = \"a\", table = \"a.b\" }");
    assert!(error_of(&both).contains("check 'totals'"));
}
