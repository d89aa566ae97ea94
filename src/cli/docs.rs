//! Pages that are generated, so that they cannot say other things than the program: the reason codes and
//! the exit codes. `MERGEBERG_BLESS=1 cargo test --lib docs` writes them; without it the tests compare.

use mergeberg_kernel::reason::ReasonCode;

use super::exit::Exit;

/// `docs/reason-codes.md`.
pub fn reason_codes() -> String {
    let mut text = String::from(
        "\
# Reason codes

Why a request waits, was refused or ended, and why a command failed. Codes are stable: a release may add some, it
never renames one. Shown by `request explain`, in lists as `held(code)` and `refused(code)`, in JSON as `reason` or
`code`.

This page is generated from `kernel/src/reason.rs`; `MERGEBERG_BLESS=1 cargo test --lib docs` writes it.

| code | meaning | what to do |
|---|---|---|
",
    );
    for reason in ReasonCode::ALL {
        text.push_str(&format!("| `{reason}` | {} | {} |\n", reason.meaning(), reason.next_action()));
    }
    text
}

/// The table of `docs/cli.md`.
pub fn exit_codes() -> String {
    let mut text = String::from("| code | meaning |\n|---:|---|\n");
    for exit in Exit::ALL {
        text.push_str(&format!("| {} | {} |\n", exit.number(), exit.meaning()));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use mergeberg_kernel::policy::TablePolicy;
    use mergeberg_kernel::record::Record;

    use super::*;

    const BEGIN: &str = "<!-- exit codes: generated -->\n";
    const END: &str = "<!-- end -->\n";

    fn path(relative: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(relative)
    }

    fn read(relative: &str) -> String {
        std::fs::read_to_string(path(relative)).unwrap()
    }

    fn compare_or_bless(relative: &str, expected: &str) {
        if std::env::var_os("MERGEBERG_BLESS").is_some() {
            std::fs::write(path(relative), expected).unwrap();
        }
        let found = std::fs::read_to_string(path(relative)).unwrap_or_default();
        assert!(found == expected, "{relative} is stale: run MERGEBERG_BLESS=1 cargo test --lib docs");
    }

    #[test]
    fn the_page_of_reason_codes_is_current() {
        compare_or_bless("docs/reason-codes.md", &reason_codes());
    }

    #[test]
    fn the_table_of_exit_codes_is_current() {
        let page = read("docs/cli.md");
        let (before, rest) = page.split_once(BEGIN).unwrap();
        let (_, after) = rest.split_once(END).unwrap();
        compare_or_bless("docs/cli.md", &format!("{before}{BEGIN}{}{END}{after}", exit_codes()));
    }

    #[test]
    fn reason_codes_are_unique_words_with_sentences() {
        let mut codes = std::collections::BTreeSet::new();
        for reason in ReasonCode::ALL {
            assert!(codes.insert(reason.code()), "{reason} twice");
            assert!(reason.code().chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'));
            assert!(reason.meaning().ends_with('.') && reason.next_action().ends_with('.'), "{reason}");
            assert!(!reason.meaning().contains('|') && !reason.next_action().contains('|'), "{reason}");
        }
    }

    #[test]
    fn every_shipped_policy_is_parsed() {
        let mut count = 0;
        for entry in std::fs::read_dir(path("policies")).unwrap() {
            let file = entry.unwrap().path();
            let text = std::fs::read_to_string(&file).unwrap();
            TablePolicy::parse(&file.display().to_string(), &text).unwrap();
            count += 1;
        }
        assert!(count >= 2);
    }

    /// Fenced blocks of a language.
    fn blocks(page: &str, language: &str) -> Vec<String> {
        let fence = format!("```{language}\n");
        page.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
    }

    #[test]
    fn every_example_of_the_policies_page_is_parsed() {
        let page = read("docs/policies.md");
        let examples = blocks(&page, "toml");
        assert!(examples.len() > 8);
        for example in &examples {
            let text = if example.starts_with("[[check]]") {
                format!("table = \"sales.orders\"\n{example}")
            } else {
                example.clone()
            };
            TablePolicy::parse("docs/policies.md", &text).unwrap();
        }
        for kind in [
            "duplicate-key",
            "not-null",
            "row-count",
            "referential",
            "accepted-values",
            "reconciliation",
            "sql",
        ] {
            let line = format!("type = \"{kind}\"");
            assert!(examples.iter().any(|example| example.contains(&line)), "no example of {kind}");
        }
    }

    #[test]
    fn every_record_of_the_records_page_is_parsed() {
        let records = blocks(&read("docs/operation-records.md"), "json");
        let mut operations = std::collections::BTreeSet::new();
        for record in &records {
            let record = Record::parse(record, &"shop.orders".parse().unwrap()).unwrap();
            operations.insert(record.operation.name());
        }
        assert_eq!((records.len(), operations.len()), (7, 6), "{operations:?}");
    }

    #[test]
    fn the_configuration_of_the_pages_is_read() {
        for (page, names) in [
            ("docs/cli.md", &["local"][..]),
            ("docs/catalogs/sqlite.md", &["local"]),
            ("docs/catalogs/postgresql.md", &["lake"]),
            ("docs/catalogs/rest.md", &["lake", "glue"]),
            ("docs/catalogs/storage.md", &["store"]),
            ("docs/catalogs/polaris.md", &["lake"]),
            ("docs/catalogs/lakekeeper.md", &["lake"]),
        ] {
            let examples = blocks(&read(page), "toml");
            let found: Vec<String> = examples
                .iter()
                .map(|text| crate::config::Config::parse(Path::new("/q/mergeberg.toml"), text, |_| None))
                .map(|config| config.unwrap().catalog(None).unwrap().name.clone())
                .collect();
            assert_eq!(found, names, "{page}");
        }
    }

    #[test]
    fn every_command_has_its_place_in_the_page() {
        use clap::CommandFactory as _;
        let page = read("docs/cli.md");
        // A hidden command is between two processes of one release and may change with any.
        for noun in super::super::Cli::command().get_subcommands().filter(|noun| !noun.is_hide_set()) {
            let verbs: Vec<&str> = noun.get_subcommands().map(|verb| verb.get_name()).collect();
            let mut names = vec![noun.get_name().to_owned()];
            if !verbs.is_empty() {
                names = verbs.iter().map(|verb| format!("{} {verb}", noun.get_name())).collect();
            }
            for name in names {
                assert!(page.contains(&format!("mergeberg {name}")), "docs/cli.md lacks `mergeberg {name}`");
            }
        }
    }
}
