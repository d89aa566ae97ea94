//! Policies from TOML: what parses, and what each wrong line is told.

use mergeberg_kernel::ids::RefName;
use mergeberg_kernel::policy::{
    AfterLanding, Appends, CheckKind, Compare, DEFAULT_ATTEMPTS, Duration, Isolation, NullRule,
    OnSourceMoved, Overlap, Scope, TablePolicy, Upstream,
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
fn every_wrong_check_is_named_with_what_is_wrong() {
    let reconciliation = "type = \"reconciliation\"\nmode = \"at-most\"\nupstream = { file = \"f.csv\" }\n";
    let cases: Vec<(String, &str)> = vec![
        ("type = \"duplicate-keys\"".into(), "duplicate-keys"),
        ("columns = [\"a\"]".into(), "type"),
        ("type = \"duplicate-key\"".into(), "columns"),
        ("type = \"duplicate-key\"\ncolumns = []".into(), "'columns' is empty"),
        ("type = \"duplicate-key\"\ncolumns = \"a\"".into(), "sequence"),
        ("type = \"duplicate-key\"\ncolumns = [\"a\", \"\"]".into(), "without a name"),
        ("type = \"duplicate-key\"\ncolumns = [\"a\", \"a\"]".into(), "'a' twice"),
        ("type = \"duplicate-key\"\ncolumns = [\"a\"]\nnulls = \"same\"".into(), "same"),
        ("type = \"duplicate-key\"\ncolumns = [\"a\"]\nscope = \"all\"".into(), "all"),
        ("type = \"duplicate-key\"\ncolumns = [\"a\"]\ncompare = \"loose\"".into(), "loose"),
        ("type = \"not-null\"\ncolumns = []".into(), "'columns' is empty"),
        ("type = \"row-count\"".into(), "at least one bound"),
        ("type = \"row-count\"\nmin = -1".into(), "-1"),
        ("type = \"row-count\"\nmin = 1.5".into(), "1.5"),
        ("type = \"row-count\"\nmin = \"1\"".into(), "string"),
        ("type = \"row-count\"\nmin = 5\nmax = 4".into(), "'min' is above 'max'"),
        ("type = \"row-count\"\nmin-added = 5\nmax-added = 4".into(), "'min-added' is above 'max-added'"),
        ("type = \"row-count\"\nmin-growth = 1.5\nmax-growth = 1".into(), "'min-growth' is above 'max-growth'"),
        ("type = \"row-count\"\nmin-growth = -1.0".into(), "negative"),
        ("type = \"row-count\"\nmin = 1\nmax-growth = nan".into(), "max-growth"),
        ("type = \"row-count\"\nmin = 1\nmax-growth = inf".into(), "max-growth"),
        ("type = \"referential\"\ncolumns = [\"a\"]".into(), "references"),
        (
            "type = \"referential\"\ncolumns = []\nreferences = { table = \"a.b\", columns = [] }".into(),
            "equally many",
        ),
        (
            "type = \"referential\"\ncolumns = [\"a\"]\nreferences = { table = \"a.b\", columns = [\"a\", \"b\"] }"
                .into(),
            "equally many",
        ),
        (
            "type = \"referential\"\ncolumns = [\"a\"]\nreferences = { table = \"airlines\", columns = [\"a\"] }"
                .into(),
            "airlines",
        ),
        ("type = \"accepted-values\"\nvalues = [\"x\"]".into(), "column"),
        ("type = \"accepted-values\"\ncolumn = \"a\"\nvalues = []".into(), "'values' is empty"),
        ("type = \"accepted-values\"\ncolumn = \" \"\nvalues = [\"x\"]".into(), "'column' is empty"),
        ("type = \"accepted-values\"\ncolumn = \"a\"\nvalues = [1]".into(), "1"),
        (format!("{reconciliation}by = []\ncount = \"n\""), "'by' is empty"),
        (format!("{reconciliation}by = [\"a\"]"), "'count', 'sums' or both"),
        (format!("{reconciliation}by = [\"a\"]\ncount = \"n\"\nabsolute = -0.1"), "negative"),
        (format!("{reconciliation}by = [\"a\"]\ncount = \"n\"\nrelative = -0.1"), "negative"),
        (format!("{reconciliation}by = [\"a\"]\ncount = \"n\"\nabsolute = nan"), "absolute"),
        (format!("{reconciliation}by = [\"a\"]\ncount = \"n\"\nrelative = inf"), "relative"),
        (
            "type = \"reconciliation\"\nmode = \"sometimes\"\nby = [\"a\"]\ncount = \"n\"\nupstream = { file = \"f\" }"
                .into(),
            "sometimes",
        ),
        (
            "type = \"reconciliation\"\nmode = \"at-most\"\nby = [\"a\"]\ncount = \"n\"\nupstream = { url = \"f\" }"
                .into(),
            "Upstream",
        ),
        ("type = \"sql\"".into(), "query"),
        ("type = \"sql\"\nquery = \" \"".into(), "'query' is empty"),
    ];
    for (lines, expected) in cases {
        let message = error_of(&with_check(&lines));
        assert!(message.starts_with("flights.toml: "), "{message}");
        assert!(message.contains("check 'keys'"), "names the check: {lines}\n{message}");
        assert!(message.contains(expected), "says '{expected}': {lines}\n{message}");
    }
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
fn every_wrong_class_is_named_with_what_is_wrong() {
    let keys = "[[check]]\nid = \"keys\"\ntype = \"duplicate-key\"\ncolumns = [\"a\"]\n";
    for (text, expected) in [
        (with_class("batch-size = 0"), "batch-size is 0"),
        (with_class("batch-size = 501"), "between 1 and 500"),
        (with_class("checks = [\"nokeys\"]"), "names check 'nokeys'"),
        (with_class(&format!("checks = [\"keys\", \"keys\"]\n{keys}")), "names check 'keys' twice"),
        (with_class("overlap = \"allow-with-duplicate-check\""), "duplicate-key check"),
        (with_class("isolation = \"snapshot\""), "scope = \"table\""),
        (with_class(&format!("isolation = \"snapshot\"\nchecks = [\"keys\"]\n{keys}")), "scope = \"table\""),
        (with_class("kind = \"compaction\"\nappends = \"derived\""), "'appends' says nothing"),
        (with_class("kind = \"compaction\"\noverlap = \"allow\""), "'overlap' says nothing"),
        (with_class("kind = \"compaction\"\nisolation = \"snapshot\""), "'isolation' says nothing"),
        (
            with_class("kind = \"compaction\"\nequality-deletes = \"rebase\""),
            "'equality-deletes' says nothing",
        ),
        (with_class("kind = \"compaction\"\nreads = []"), "'reads' says nothing"),
        (with_class("[[class]]\nname = \"ingest\"\nprefix = \"other/\""), "class 'ingest' is defined twice"),
        (with_class("[[class]]\nname = \"other\"\nprefix = \"ingest/\""), "the prefix 'ingest/'"),
    ] {
        let message = error_of(&text);
        assert!(message.contains("ingest"), "names the class: {message}");
        assert!(message.contains(expected), "says '{expected}': {message}");
    }
    let unknown = error_of(&with_class("kind = \"compact\""));
    assert!(unknown.contains("expected `changes` or `compaction`"), "{unknown}");
    for fits in ["batch-size = 1", "batch-size = 500", "kind = \"compaction\""] {
        assert!(TablePolicy::parse("x", &with_class(fits)).is_ok(), "{fits}");
    }
    let nameless = error_of("table = \"nyc.flights\"\n[[class]]\nname = \" \"\nprefix = \"ingest/\"");
    assert!(nameless.contains("ingest/") && nameless.contains("name"), "{nameless}");
}

#[test]
fn wrong_words_are_shown_with_their_line() {
    for (lines, expected) in [
        ("overlap = \"maybe\"", "maybe"),
        ("appends = \"blindly\"", "blindly"),
        ("isolation = \"none\"", "none"),
        ("equality-deletes = \"sometimes\"", "sometimes"),
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
fn durations_read_and_write() {
    for (text, ms) in [
        ("1ms", 1),
        ("250ms", 250),
        ("2s", 2000),
        ("90s", 90_000),
        ("10m", 600_000),
        ("1h", 3_600_000),
        ("7d", 604_800_000),
    ] {
        assert_eq!(Duration::try_from(text.to_owned()), Ok(Duration { ms }), "{text}");
        assert_eq!(String::from(Duration { ms }), text);
    }
    assert_eq!(String::from(Duration { ms: 120_000 }), "2m", "the largest unit that divides it");
    for wrong in [
        "",
        "s",
        "10",
        "0s",
        "-1s",
        "+1s",
        "1.5h",
        " 1s",
        "1s ",
        "1 s",
        "1S",
        "1w",
        "99999999999999999d",
        "ms",
    ] {
        let error = Duration::try_from(wrong.to_owned()).unwrap_err();
        assert!(error.contains("write 250ms, 2s"), "'{wrong}': {error}");
    }
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

#[test]
fn keys_of_row_merges_need_the_rule() {
    let of = |lines: &str| {
        TablePolicy::parse(
            "p.toml",
            &format!("table = \"a.b\"\n[[class]]\nname = \"x\"\nprefix = \"\"\n{lines}"),
        )
    };
    let policy =
        of("on-conflict = \"row-merge\"\nkey = [\"a\", \"b\"]\nrow-conflicts = \"keep-target\"").unwrap();
    assert!(policy.classes[0].merges_rows());
    assert!(of("on-conflict = \"row-merge\"").is_ok(), "by the table's identifier fields");
    for (lines, told) in [
        ("key = [\"a\"]", "needs on-conflict"),
        ("row-conflicts = \"take-source\"", "needs on-conflict"),
        ("on-conflict = \"row-merge\"\nkey = [\"a\", \"a\"]", "twice"),
        ("on-conflict = \"row-merge\"\nkey = [\" \"]", "without a name"),
        ("kind = \"compaction\"\non-conflict = \"row-merge\"", "says nothing"),
    ] {
        let error = of(lines).unwrap_err().to_string();
        assert!(error.contains(told), "{lines}: {error}");
    }
}

#[test]
fn a_class_names_the_command_that_makes_its_branches_again() {
    let of = |lines: &str| {
        let text = format!("table = \"a.b\"\n[[class]]\nname = \"t\"\nprefix = \"t/\"\n{lines}\n");
        TablePolicy::parse("p.toml", &text).map(|policy| policy.classes[0].clone()).map_err(|e| e.message)
    };
    let external = |lines: &str| of(&format!("on-conflict = \"external\"\n[class.external]\n{lines}"));
    let class = external("command = [\"python\", \"rebuild.py\"]\ntimeout = \"30m\"\nattempts = 2").unwrap();
    let found = class.runs_again_outside().unwrap();
    assert_eq!(
        (found.shown().as_str(), found.timeout.ms, found.attempts),
        ("python rebuild.py", 1_800_000, 2)
    );
    let url = external("url = \"https://jobs.example/rebuild\"\ntoken-env = \"JOBS_TOKEN\"").unwrap();
    assert_eq!(url.runs_again_outside().unwrap().attempts, DEFAULT_ATTEMPTS);
    assert!(
        of("kind = \"compaction\"\non-conflict = \"external\"\n[class.external]\ncommand = [\"c\"]").is_ok()
    );

    let wrong = [
        (of("on-conflict = \"external\""), "no [class.external]"),
        (of("[class.external]\ncommand = [\"c\"]"), "needs on-conflict = \"external\""),
        (external(""), "needs 'command' or 'url'"),
        (external("command = [\"c\"]\nurl = \"https://h\""), "keep one of them"),
        (external("command = [\" \"]"), "name the program"),
        (external("command = \"rebuild.sh --all\""), "command"),
        (external("command = [\"c\", \"a\\u0000b\"]"), "zero byte"),
        (external("url = \"jobs.example\""), "begins with https:// or http://"),
        (external("url = \"https://\""), "begins with https:// or http://"),
        (external("url = \"https://user:hunter2@jobs.example\""), "token-env"),
        (external("command = [\"c\"]\ntoken-env = \"T\""), "is sent to a 'url'"),
        (external("url = \"https://h\"\ntoken-env = \"my token\""), "environment variable"),
        (external("command = [\"c\"]\ntimeout = \"2d\""), "it must be 1d at most"),
        (external("command = [\"c\"]\nattempts = 0"), "between 1 and 10"),
        (external("command = [\"c\"]\nretries = 3"), "retries"),
    ];
    for (answer, says) in wrong {
        let message = answer.unwrap_err();
        assert!(message.contains(says), "{says}: {message}");
    }
}
