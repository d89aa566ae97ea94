//! Settings whose names have dots, as Iceberg writes them (`s3.endpoint`): in TOML they are tables in tables.

use std::collections::BTreeMap;

use crate::near::nearest;
use crate::secret::Secret;

/// What cannot be read: message and next step.
pub(super) type Wrong = (String, String);

/// Settings of a section, each with its name in full. The environment wins over the file: `variable` gives the
/// value of a name's variable.
pub(super) fn settings(
    tables: impl IntoIterator<Item = (&'static str, Option<toml::Table>)>,
    known: &[&'static str],
    variable: impl Fn(&str) -> Option<String>,
) -> Result<BTreeMap<String, Secret>, Wrong> {
    let mut found = BTreeMap::new();
    for (name, table) in tables {
        gather(name, table.unwrap_or_default(), &mut found)?;
    }
    for key in found.keys() {
        let is_known = known.iter().any(|k| key == k || is_named_token(k, key));
        if !is_known {
            let next = match nearest(key, known.iter().copied()) {
                Some(near) => format!("did you mean '{near}'?"),
                None => format!("remove it; known here: {}", known.join(", ")),
            };
            return Err((format!("unknown key '{key}'"), next));
        }
    }
    for key in known {
        let name = key.to_ascii_uppercase().replace(['.', '-'], "_");
        if let Some(value) = variable(&name) {
            found.insert((*key).to_owned(), Secret::new(value));
        }
    }
    Ok(found)
}

/// A token of one account: `adls.sas-token.ACCOUNT`.
fn is_named_token(known: &str, key: &str) -> bool {
    known.ends_with("sas-token") && key.strip_prefix(known).is_some_and(|rest| rest.starts_with('.'))
}

fn gather(prefix: &str, table: toml::Table, into: &mut BTreeMap<String, Secret>) -> Result<(), Wrong> {
    for (key, value) in table {
        let name = format!("{prefix}.{key}");
        let text = match value {
            toml::Value::Table(inner) => {
                gather(&name, inner, into)?;
                continue;
            }
            toml::Value::String(text) => text,
            toml::Value::Boolean(yes) => yes.to_string(),
            toml::Value::Integer(number) => number.to_string(),
            toml::Value::Float(_) | toml::Value::Datetime(_) | toml::Value::Array(_) => {
                return Err((format!("'{name}' is no text"), format!("write {name} = \"...\"")));
            }
        };
        into.insert(name, Secret::new(text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &[&str] = &["s3.endpoint", "s3.sse.type", "s3.path-style-access", "adls.sas-token"];

    fn read(text: &str, set: &[(&str, &str)]) -> Result<BTreeMap<String, String>, Wrong> {
        let mut all: toml::Table = toml::from_str(text).unwrap();
        let mut table = |name: &'static str| {
            (name, all.remove(name).map(|value| value.as_table().expect("a table").clone()))
        };
        let tables = [table("s3"), table("adls")];
        let variable = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        let found = settings(tables, KNOWN, variable)?;
        Ok(found.into_iter().map(|(key, value)| (key, value.reveal().to_owned())).collect())
    }

    #[test]
    fn names_are_put_together_again() {
        let text = "s3.endpoint = \"http://h\"\ns3.path-style-access = true\ns3.sse.type = \"s3\"\n\
                    adls.sas-token.\"acc.dfs.x.net\" = \"t\"";
        let found = read(text, &[]).unwrap();
        let expected = [
            ("adls.sas-token.acc.dfs.x.net", "t"),
            ("s3.endpoint", "http://h"),
            ("s3.path-style-access", "true"),
            ("s3.sse.type", "s3"),
        ];
        assert_eq!(found, expected.map(|(k, v)| (k.to_owned(), v.to_owned())).into());
    }

    #[test]
    fn the_environment_wins() {
        let found =
            read("s3.endpoint = \"file\"", &[("S3_ENDPOINT", "env"), ("S3_SSE_TYPE", "kms")]).unwrap();
        assert_eq!((found["s3.endpoint"].as_str(), found["s3.sse.type"].as_str()), ("env", "kms"));
    }

    #[test]
    fn a_mistyped_name_is_an_error() {
        let (message, next) = read("s3.endpiont = \"h\"", &[]).unwrap_err();
        assert_eq!(
            (message.as_str(), next.as_str()),
            ("unknown key 's3.endpiont'", "did you mean 's3.endpoint'?")
        );
        let (message, next) = read("s3.endpoint = [1]", &[]).unwrap_err();
        assert_eq!(message, "'s3.endpoint' is no text");
        assert_eq!(next, "write s3.endpoint = \"...\"");
    }
}
