//! All policies of a folder, read again between ticks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use mergeberg_kernel::ids::{Digest, TableName};
use mergeberg_kernel::policy::TablePolicy;

use super::{ConfigError, toml_text};

/// Every policy of the folder at one moment.
#[derive(Clone, Debug)]
pub struct PolicySet {
    by_table: BTreeMap<TableName, Loaded>,
    digest: Digest,
}

#[derive(Clone, Debug)]
struct Loaded {
    file: PathBuf,
    policy: Arc<TablePolicy>,
}

impl PolicySet {
    /// No file at all: every table has the shipped default.
    pub fn empty() -> Self {
        Self { by_table: BTreeMap::new(), digest: Digest::of([]) }
    }

    /// The table's policy, or the shipped default when no file names it.
    pub fn for_table(&self, table: &TableName) -> Arc<TablePolicy> {
        match self.by_table.get(table) {
            Some(loaded) => loaded.policy.clone(),
            None => Arc::new(TablePolicy::shipped_default(table.clone())),
        }
    }

    /// Hash of every file's name and text.
    pub fn digest(&self) -> &Digest {
        &self.digest
    }

    /// The policies that files hold, with their file, by table.
    pub fn iter(&self) -> impl Iterator<Item = (&Path, &Arc<TablePolicy>)> {
        self.by_table.values().map(|loaded| (loaded.file.as_path(), &loaded.policy))
    }

    pub fn is_shipped_default(&self, table: &TableName) -> bool {
        !self.by_table.contains_key(table)
    }

    /// Parses `texts`, each with the path of its file.
    pub fn parse(texts: &[(PathBuf, String)]) -> Result<Self, ConfigError> {
        let mut by_table: BTreeMap<TableName, Loaded> = BTreeMap::new();
        for (file, text) in texts {
            let policy = parse_policy(file, text)?;
            if let Some(first) = by_table.get(&policy.table) {
                return Err(ConfigError::Wrong {
                    location: file.display().to_string(),
                    message: format!(
                        "table {} has a policy already, in {}",
                        policy.table,
                        first.file.display()
                    ),
                    next: "keep one file for each table".to_owned(),
                });
            }
            let table = policy.table.clone();
            by_table.insert(table, Loaded { file: file.clone(), policy: Arc::new(policy) });
        }
        Ok(Self { by_table, digest: digest_of(texts) })
    }
}

fn digest_of(texts: &[(PathBuf, String)]) -> Digest {
    let names: Vec<String> = texts
        .iter()
        .map(|(file, _)| file.file_name().unwrap_or_default().to_string_lossy().into_owned())
        .collect();
    Digest::of(names.iter().zip(texts).flat_map(|(name, (_, text))| [name.as_str(), text.as_str()]))
}

fn parse_policy(file: &Path, text: &str) -> Result<TablePolicy, ConfigError> {
    let shown = file.display().to_string();
    TablePolicy::parse(&shown, text).map_err(|error| match toml::from_str::<TablePolicy>(text) {
        // A problem of the text has a line; one of the policy as a whole names class or check.
        Err(toml_error) => toml_text::describe(&shown, text, &toml_error),
        Ok(_) => ConfigError::Wrong {
            location: shown.clone(),
            message: error.message,
            next: "correct the file; docs/policies.md describes every key".to_owned(),
        },
    })
}

/// A folder of policies. Files are read at each call and parsed again only when one changed.
#[derive(Debug)]
pub struct PolicyFolder {
    path: PathBuf,
    last: Mutex<Option<Arc<PolicySet>>>,
}

impl PolicyFolder {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), last: Mutex::new(None) }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The policies as they are now. Files whose name does not end in `.toml` are left alone, and so are
    /// hidden ones (editors put their back-ups there).
    pub fn read(&self) -> Result<Arc<PolicySet>, ConfigError> {
        let texts = self.texts()?;
        let digest = digest_of(&texts);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(set) = last.as_ref()
            && set.digest == digest
        {
            return Ok(set.clone());
        }
        let set = Arc::new(PolicySet::parse(&texts)?);
        *last = Some(set.clone());
        Ok(set)
    }

    fn texts(&self) -> Result<Vec<(PathBuf, String)>, ConfigError> {
        let unreadable =
            |path: &Path, source: std::io::Error| ConfigError::Unreadable { path: path.to_owned(), source };
        let entries = match std::fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(ConfigError::NoPoliciesFolder(self.path.clone()));
            }
            Err(error) => return Err(unreadable(&self.path, error)),
        };
        let mut files = Vec::new();
        for entry in entries {
            let path = entry.map_err(|e| unreadable(&self.path, e))?.path();
            let hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
            if !hidden && path.extension().is_some_and(|extension| extension == "toml") {
                files.push(path);
            }
        }
        files.sort();
        let mut texts = Vec::with_capacity(files.len());
        for file in files {
            let text = std::fs::read_to_string(&file).map_err(|e| unreadable(&file, e))?;
            texts.push((file, text));
        }
        Ok(texts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(name: &str) -> TableName {
        name.parse().unwrap()
    }

    fn folder(files: &[(&str, &str)]) -> (tempfile::TempDir, PolicyFolder) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let folder = PolicyFolder::new(dir.path());
        (dir, folder)
    }

    #[test]
    fn a_table_without_a_file_has_the_shipped_default() {
        let (_dir, folder) = folder(&[("flights.toml", "table = \"nyc.flights\"\nprotected = [\"dev\"]")]);
        let set = folder.read().unwrap();
        assert_eq!(set.for_table(&table("nyc.flights")).protected.len(), 1);
        assert!(!set.is_shipped_default(&table("nyc.flights")));
        assert_eq!(*set.for_table(&table("nyc.other")), TablePolicy::shipped_default(table("nyc.other")));
    }

    #[test]
    fn two_files_for_one_table_are_an_error_that_names_both() {
        let (_dir, folder) =
            folder(&[("a.toml", "table = \"nyc.flights\""), ("b.toml", "table = \"nyc.flights\"")]);
        let error = folder.read().unwrap_err().to_string();
        assert!(
            error.contains("b.toml: table nyc.flights has a policy already, in ") && error.contains("a.toml")
        );
    }

    #[test]
    fn a_change_is_seen_at_the_next_read_and_an_unchanged_folder_is_not_parsed_again() {
        let (dir, folder) =
            folder(&[("a.toml", "table = \"nyc.flights\""), (".a.toml", "not toml ["), ("x.md", "")]);
        let first = folder.read().unwrap();
        assert!(Arc::ptr_eq(&first, &folder.read().unwrap()));
        std::fs::write(dir.path().join("a.toml"), "table = \"nyc.flights\"\nprotected = [\"dev\"]").unwrap();
        let second = folder.read().unwrap();
        assert_ne!(first.digest(), second.digest());
        assert_eq!(second.for_table(&table("nyc.flights")).protected.len(), 1);
    }

    #[test]
    fn a_mistyped_key_names_file_line_and_the_key_that_was_meant() {
        let text =
            "table = \"nyc.flights\"\n\n[[class]]\nname = \"ingest\"\nprefix = \"ingest/\"\nbatchsize = 5\n";
        let error = PolicySet::parse(&[("p.toml".into(), text.to_owned())]).unwrap_err();
        assert_eq!(error.to_string(), "p.toml:6: unknown key 'batchsize' in [[class]]");
        assert!(error.next().starts_with("did you mean 'batch-size'?"), "{}", error.next());
    }

    #[test]
    fn a_mistyped_key_of_a_check_names_the_check() {
        let text = "table = \"nyc.flights\"\n\n[[check]]\nid = \"key\"\ntype = \"duplicate-key\"\ncolumns = [\"a\"]\nscop = \"table\"\n";
        let error = PolicySet::parse(&[("p.toml".into(), text.to_owned())]).unwrap_err();
        assert!(error.to_string().contains("check 'key': unknown key 'scop'"), "{error}");
        assert!(error.next().starts_with("did you mean 'scope'?"), "{}", error.next());
    }

    #[test]
    fn a_missing_folder_is_an_error() {
        let folder = PolicyFolder::new("/nowhere/at/all");
        assert!(matches!(folder.read(), Err(ConfigError::NoPoliciesFolder(_))));
    }
}
