//! The README's own-table steps are run as they stand: shell lines with the binary, files as files. The
//! Python steps run with PyIceberg where MERGEBERG_PYTHON names an interpreter; without one the same rows are
//! written through the library, so that the commands are always tried.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use datafusion::arrow::array::{Date32Array, Int64Array, RecordBatch, StringArray};
use datafusion::arrow::datatypes::{DataType, Field, Schema};
use mergeberg::cli::system_clock;
use mergeberg::table::branch_writer::{BranchWrite, BranchWriter, Removal};
use mergeberg::table::create::TableDefinition;
use mergeberg::table::manifests::ManifestStore;
use mergeberg::table::sql_catalog::SqlCatalog;
use mergeberg_kernel::filter::parse_date;
use mergeberg_kernel::ids::{RefName, TableName};

use crate::binary::{Ran, run_in};

const MARK: &str = "<!-- run: ";

/// What stands after a mark: the mark's word and the fenced block.
fn steps(page: &str) -> Vec<(&str, &str)> {
    page.split(MARK)
        .skip(1)
        .map(|rest| {
            let (word, rest) = rest.split_once(" -->\n```").unwrap();
            let (_, rest) = rest.split_once('\n').unwrap();
            (word, rest.split_once("\n```").unwrap().0)
        })
        .collect()
}

/// One line of a shell block.
fn shell(folder: &Path, line: &str) -> Option<Ran> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words.as_slice() {
        // The test's folder is that folder.
        ["mkdir", "shop", "&&", "cd", "shop"] => None,
        ["mergeberg", args @ ..] => {
            let ran = run_in(folder, args);
            assert_eq!(ran.code, 0, "{line}: {ran:?}");
            Some(ran)
        }
        _ => panic!("the README has a shell line that this test does not know: {line}"),
    }
}

fn python(interpreter: &str, folder: &Path, file: &str, text: &str) {
    std::fs::write(folder.join(file), text).unwrap();
    let output = Command::new(interpreter).arg(file).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{file}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The same as the Python steps, through the library.
struct Writer {
    catalog: Arc<SqlCatalog>,
    branches: BranchWriter,
    table: TableName,
}

impl Writer {
    async fn open(folder: &Path) -> Self {
        let uri = folder.join("catalog.db").display().to_string();
        let warehouse = format!("file://{}", folder.join("warehouse").display());
        let catalog = Arc::new(SqlCatalog::create("local", &uri, &warehouse, system_clock()).await.unwrap());
        let next = AtomicU64::new(1_000);
        let branches = BranchWriter {
            catalog: catalog.clone(),
            store: ManifestStore::new(1 << 20),
            clock: system_clock(),
            random: Arc::new(move || next.fetch_add(7_919, Ordering::SeqCst) << 20),
        };
        Self { catalog, branches, table: "shop.orders".parse().unwrap() }
    }

    async fn create(&self) {
        self.catalog.create_namespace("shop").await.unwrap();
        let definition = TableDefinition::default()
            .column("order_id", "long", false)
            .column("order_date", "date", false)
            .column("status", "string", false)
            .partitioned_by("order_date", "identity");
        self.catalog.define_table(&self.table, &definition).await.unwrap();
        self.append("main", 1).await;
    }

    async fn append(&self, branch: &str, key: i64) {
        let schema = Schema::new(vec![
            Field::new("order_id", DataType::Int64, true),
            Field::new("order_date", DataType::Date32, true),
            Field::new("status", DataType::Utf8, true),
        ]);
        let day = i32::try_from(parse_date("2026-08-20").unwrap()).unwrap();
        let rows = RecordBatch::try_new(
            Arc::new(schema),
            vec![
                Arc::new(Int64Array::from(vec![key])),
                Arc::new(Date32Array::from(vec![day])),
                Arc::new(StringArray::from(vec!["paid"])),
            ],
        )
        .unwrap();
        let write = BranchWrite {
            branch: RefName::new(branch),
            label: "append".to_owned(),
            rows: vec![rows],
            remove: Removal::Nothing,
            summary: BTreeMap::new(),
        };
        self.branches.write(&self.table, write).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_own_table_steps_of_the_readme_end_as_it_says() {
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let folder = tempfile::Builder::new().prefix("own table ").tempdir().unwrap();
    let folder = folder.path();
    let interpreter = std::env::var("MERGEBERG_PYTHON").ok();
    let mut told: BTreeMap<String, String> = BTreeMap::new();
    for (word, text) in steps(&page) {
        match (word, &interpreter) {
            ("shell", _) => {
                for line in text.lines() {
                    if let Some(ran) = shell(folder, line) {
                        told.insert(line.to_owned(), ran.stdout);
                    }
                }
            }
            (file, Some(interpreter)) if file.ends_with(".py") => python(interpreter, folder, file, text),
            ("create.py", None) => Writer::open(folder).await.create().await,
            ("write.py", None) => {
                let writer = Writer::open(folder).await;
                writer.append("ingest/good", 2).await;
                writer.append("ingest/twice", 1).await;
            }
            (file, _) => std::fs::write(folder.join(file), text).unwrap(),
        }
    }
    let said = |line: &str| told.get(line).unwrap_or_else(|| panic!("the README lacks `{line}`"));
    let list = said("mergeberg request list");
    assert!(list.contains("refused(duplicate-key)"), "{list}");
    assert!(list.lines().any(|line| line.contains("ingest/good") && line.contains("landed")), "{list}");
    let explained = said("mergeberg request explain 2");
    assert!(explained.contains("order_id=1"), "{explained}");
    let report = said("mergeberg report daily");
    assert!(report.contains("adds up"), "{report}");
    let branches = run_in(folder, &["branch", "list", "--table", "shop.orders"]).stdout;
    assert!(!branches.contains("ingest/good") && branches.contains("ingest/twice"), "{branches}");
}

/// Links between the pages lead somewhere.
#[test]
fn every_link_between_the_pages_leads_to_a_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pages = vec![root.join("README.md"), root.join("ARCHITECTURE.md"), root.join("CONTRIBUTING.md")];
    for folder in ["docs", "docs/catalogs", "docs/decisions"] {
        for entry in std::fs::read_dir(root.join(folder)).unwrap() {
            pages.push(entry.unwrap().path());
        }
    }
    for page in pages.iter().filter(|page| page.extension().is_some_and(|e| e == "md")) {
        let text = std::fs::read_to_string(page).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = link.split('#').next().unwrap_or_default();
            // Written together with the demonstration.
            if file.is_empty() || link.contains("://") || file.ends_with("demo.md") {
                continue;
            }
            let at = page.parent().unwrap().join(file);
            assert!(at.exists(), "{} links to {link}, which is not there", page.display());
        }
    }
}

/// Tests and functions that the architecture and the decisions name are there.
#[test]
fn what_the_pages_name_is_in_the_code() {
    fn sources(folder: &Path, text: &mut String) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, text);
            } else if path.extension().is_some_and(|e| e == "rs") {
                text.push_str(&std::fs::read_to_string(&path).unwrap());
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut code = String::new();
    for folder in ["src", "kernel", "tests"] {
        sources(&root.join(folder), &mut code);
    }
    let mut pages = vec![root.join("ARCHITECTURE.md")];
    pages.extend(std::fs::read_dir(root.join("docs/decisions")).unwrap().map(|entry| entry.unwrap().path()));
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        // Every second piece between back-ticks is inside them; fenced blocks hold none.
        for word in text.split('`').skip(1).step_by(2) {
            let is_name = word.contains('_')
                && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
            let known = code.contains(&format!("fn {word}("))
                || code.contains(&format!("fn {word}<"))
                || word == "data_version";
            assert!(!is_name || known, "{} names {word}, which is not in the code", page.display());
            if word.ends_with(".rs") && word.contains('/') {
                let found = ["", "src/"].iter().any(|prefix| root.join(format!("{prefix}{word}")).exists());
                assert!(found, "{} names {word}, which is not there", page.display());
            }
        }
    }
}
