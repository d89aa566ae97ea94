//! A location taken apart: which storage it is in, and what it is called there.
//!
//! Keys are taken as they are written, never decoded: what one engine wrote under a name with blanks or
//! percent signs, the others find under the same letters.

use std::path::PathBuf;

/// Kinds of storage, by the scheme of a location.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::table) enum Kind {
    /// `/p`, `file:/p`, `file:///p`.
    Local,
    /// `s3://bucket/key`; `s3a` and `s3n` are Hadoop's names for the same.
    S3,
    /// `gs://bucket/key`.
    Gcs,
    /// `abfs[s]://filesystem@account.dfs.suffix/key`, `wasb[s]://container@account.blob.suffix/key`.
    Azure,
}

/// A location that nothing here can read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{location}' {message}")]
pub struct WrongPlace {
    location: String,
    /// What is wrong, and what to do behind the semicolon.
    message: String,
}

/// A location on an object store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place<'a> {
    pub kind: Kind,
    /// As written, in small letters.
    pub scheme: &'a str,
    /// Bucket, or `filesystem@account.dfs.suffix`.
    pub authority: &'a str,
    pub key: &'a str,
}

impl Kind {
    pub fn of(location: &str) -> Result<Self, WrongPlace> {
        let scheme = match location.split_once(':') {
            Some((scheme, _)) if is_scheme(scheme) => scheme,
            _ if location.starts_with('/') => return Ok(Self::Local),
            _ => {
                return Err(wrong(
                    location,
                    "is no absolute path and no URI; give the table another location",
                ));
            }
        };
        match scheme {
            "file" if local_path(location).is_some() => Ok(Self::Local),
            "s3" | "s3a" | "s3n" => Ok(Self::S3),
            "gs" => Ok(Self::Gcs),
            "abfs" | "abfss" | "wasb" | "wasbs" => Ok(Self::Azure),
            "hdfs" | "viewfs" => Err(wrong(
                location,
                "is in HDFS, which this release does not read; keep the table on a disk, S3, GCS or Azure",
            )),
            _ => Err(wrong(
                location,
                "is in a storage that this release does not know; it knows paths, file, s3, gs, abfss and wasbs",
            )),
        }
    }
}

impl<'a> Place<'a> {
    /// `None`: it is on this machine.
    pub fn of(location: &'a str) -> Result<Option<Self>, WrongPlace> {
        let kind = Kind::of(location)?;
        if kind == Kind::Local {
            return Ok(None);
        }
        let taken_apart = location
            .split_once("://")
            .and_then(|(scheme, rest)| Some((scheme, rest.split_once('/')?)))
            .filter(|(_, (authority, key))| !authority.is_empty() && !key.is_empty());
        let Some((scheme, (authority, key))) = taken_apart else {
            return Err(wrong(location, "names no object; write SCHEME://BUCKET/KEY"));
        };
        // The storage layer would drop these and act on another object.
        if key.trim() != key || key.split('/').any(str::is_empty) {
            return Err(wrong(
                location,
                "has an empty part or a blank at its edge, which not all engines read alike; give the table a \
                 location without",
            ));
        }
        Ok(Some(Self { kind, scheme, authority, key }))
    }
}

/// The path behind a location on this machine: `file:///p`, `file:/p` or `/p`.
pub(in crate::table) fn local_path(location: &str) -> Option<PathBuf> {
    let path =
        location.strip_prefix("file://").or_else(|| location.strip_prefix("file:")).unwrap_or(location);
    path.starts_with('/').then(|| PathBuf::from(path))
}

/// Refuses a table location that nothing here can read.
pub fn require_known(location: &str) -> Result<(), WrongPlace> {
    Kind::of(location).map(drop)
}

fn is_scheme(text: &str) -> bool {
    !text.is_empty()
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "+-.".contains(c))
}

fn wrong(location: &str, message: &str) -> WrongPlace {
    WrongPlace { location: location.to_owned(), message: message.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheme_decides() {
        for (location, kind) in [
            ("/w/t", Kind::Local),
            ("/w/a:b", Kind::Local),
            ("file:/w/t", Kind::Local),
            ("file:///w/t", Kind::Local),
            ("s3://b/t", Kind::S3),
            ("s3a://b/t", Kind::S3),
            ("gs://b/t", Kind::Gcs),
            ("abfss://f@a.dfs.core.windows.net/t", Kind::Azure),
            ("wasbs://c@a.blob.core.windows.net/t", Kind::Azure),
        ] {
            assert_eq!(Kind::of(location), Ok(kind), "{location}");
        }
        for (location, told) in [
            ("hdfs://n/t", "HDFS"),
            ("oss://b/t", "does not know"),
            ("w/t", "no absolute path"),
            ("file:w", "does not know"),
            ("", "no absolute path"),
        ] {
            let error = require_known(location).unwrap_err().to_string();
            assert!(error.contains(told) && error.contains("; "), "{error}");
        }
    }

    #[test]
    fn keys_are_taken_as_they_are_written() {
        let place = Place::of("s3://b/ns/t/data/day=a%20b?c#d/f é.parquet").unwrap().unwrap();
        assert_eq!((place.authority, place.key), ("b", "ns/t/data/day=a%20b?c#d/f é.parquet"));
        let azure = Place::of("abfss://f@a.dfs.core.windows.net/t/x").unwrap().unwrap();
        assert_eq!((azure.authority, azure.key), ("f@a.dfs.core.windows.net", "t/x"));
        assert_eq!(Place::of("file:///w/x").unwrap(), None);
    }

    #[test]
    fn what_would_become_another_object_is_refused() {
        for location in ["s3://b", "s3://b/", "s3:///k", "s3:/b/k", "s3://b/a//c", "s3://b/a/ ", "s3://b/a/"]
        {
            assert!(Place::of(location).is_err(), "{location}");
        }
    }
}
