//! The file of `--set`: which branch of which table makes a set.

use std::path::Path;

use mergeberg_kernel::ids::{RefName, SnapshotId, TableName};
use mergeberg_kernel::reason::ReasonCode;
use serde::Deserialize;

use super::enqueue_set::PartArgs;
use crate::config::toml_text;
use crate::error::UserError;

/// A set as its file says it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct SetFile {
    /// Idempotency key; `--key` goes before it.
    pub key: Option<String>,
    /// The branch that every part is merged into, unless the part says another.
    #[serde(default = "RefName::main")]
    target: RefName,
    #[serde(default)]
    part: Vec<PartText>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct PartText {
    table: TableName,
    source: RefName,
    target: Option<RefName>,
    snapshot: Option<i64>,
    class: Option<String>,
}

impl SetFile {
    pub fn read(path: &Path) -> Result<Self, UserError> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            UserError::new(ReasonCode::SetInvalid, format!("{} cannot be read: {error}", path.display()))
                .with_next("name a file that says which branch of which table makes the set")
        })?;
        Self::parse(&path.display().to_string(), &text)
    }

    /// `file` is named in messages.
    fn parse(file: &str, text: &str) -> Result<Self, UserError> {
        toml::from_str(text).map_err(|error| {
            let error = toml_text::describe(file, text, &error);
            UserError::new(ReasonCode::SetInvalid, error.to_string()).with_next(error.next())
        })
    }

    pub fn parts(self) -> Vec<PartArgs> {
        let Self { key: _, target: common, part } = self;
        let parts = part.into_iter().map(|PartText { table, source, target, snapshot, class }| PartArgs {
            table,
            source,
            target: target.unwrap_or_else(|| common.clone()),
            snapshot: snapshot.map(SnapshotId),
            class,
        });
        parts.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_the_files_target_unless_it_says_its_own() {
        let text = "key = \"r1\"\ntarget = \"staging\"\n\n[[part]]\ntable = \"shop.orders\"\nsource = \"r/1\"\n\n\
                    [[part]]\ntable = \"shop.items\"\nsource = \"r/2\"\ntarget = \"dev\"\nsnapshot = 7\nclass = \"c\"\n";
        let set = SetFile::parse("r.toml", text).unwrap();
        assert_eq!(set.key.as_deref(), Some("r1"));
        let parts = set.parts();
        let targets: Vec<&str> = parts.iter().map(|part| part.target.as_str()).collect();
        assert_eq!(targets, ["staging", "dev"]);
        assert_eq!((parts[0].snapshot, parts[1].snapshot), (None, Some(SnapshotId(7))));
        let plain = "[[part]]\ntable = \"shop.orders\"\nsource = \"r/1\"\n";
        assert_eq!(SetFile::parse("r.toml", plain).unwrap().parts()[0].target, RefName::main());
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line_and_what_was_meant() {
        let wrong = |text: &str| SetFile::parse("r.toml", text).unwrap_err();
        let error = wrong("[[part]]\ntable = \"shop.orders\"\nsorce = \"r/1\"\n");
        assert_eq!(error.code, ReasonCode::SetInvalid);
        assert_eq!(error.message, "r.toml:3: unknown key 'sorce' in [[part]]");
        assert!(error.next.starts_with("did you mean 'source'?"), "{}", error.next);
        assert!(wrong("[[part]]\ntable = \"orders\"\nsource = \"x\"\n").message.starts_with("r.toml:"));
        assert!(wrong("[[part]\n").message.starts_with("r.toml:1"));
    }
}
