//! Settings of object stores under Iceberg's own names, as Java, PyIceberg and REST catalogs write them.

use std::collections::BTreeMap;
use std::fmt;

use crate::secret::Secret;

/// Every name that is understood in `mergeberg.toml`. Each has its environment variable
/// (`config::catalog_variable`). What a server sends may hold more, which is left alone.
pub const STORAGE_KEYS: &[&str] = &[
    S3_ENDPOINT,
    S3_REGION,
    CLIENT_REGION,
    S3_ACCESS_KEY_ID,
    S3_SECRET_ACCESS_KEY,
    S3_SESSION_TOKEN,
    S3_PATH_STYLE_ACCESS,
    S3_ANONYMOUS,
    S3_SSE_TYPE,
    S3_SSE_KEY,
    S3_SSE_MD5,
    ASSUME_ROLE_ARN,
    ASSUME_ROLE_EXTERNAL_ID,
    ASSUME_ROLE_SESSION_NAME,
    GCS_SERVICE_HOST,
    GCS_TOKEN,
    GCS_CREDENTIALS_JSON,
    GCS_NO_AUTH,
    ADLS_ACCOUNT_NAME,
    ADLS_ACCOUNT_KEY,
    ADLS_ENDPOINT,
    ADLS_SAS_TOKEN,
    ADLS_TENANT_ID,
    ADLS_CLIENT_ID,
    ADLS_CLIENT_SECRET,
    ADLS_AUTHORITY_HOST,
];

pub(super) const S3_ENDPOINT: &str = "s3.endpoint";
pub(super) const S3_REGION: &str = "s3.region";
pub(super) const CLIENT_REGION: &str = "client.region";
pub(super) const S3_ACCESS_KEY_ID: &str = "s3.access-key-id";
pub(super) const S3_SECRET_ACCESS_KEY: &str = "s3.secret-access-key";
pub(super) const S3_SESSION_TOKEN: &str = "s3.session-token";
pub(super) const S3_PATH_STYLE_ACCESS: &str = "s3.path-style-access";
pub(super) const S3_ANONYMOUS: &str = "s3.anonymous";
pub(super) const S3_SSE_TYPE: &str = "s3.sse.type";
pub(super) const S3_SSE_KEY: &str = "s3.sse.key";
pub(super) const S3_SSE_MD5: &str = "s3.sse.md5";
pub(super) const ASSUME_ROLE_ARN: &str = "client.assume-role.arn";
pub(super) const ASSUME_ROLE_EXTERNAL_ID: &str = "client.assume-role.external-id";
pub(super) const ASSUME_ROLE_SESSION_NAME: &str = "client.assume-role.session-name";
pub(super) const GCS_SERVICE_HOST: &str = "gcs.service.host";
pub(super) const GCS_TOKEN: &str = "gcs.oauth2.token";
pub(super) const GCS_CREDENTIALS_JSON: &str = "gcs.credentials-json";
pub(super) const GCS_NO_AUTH: &str = "gcs.no-auth";
pub(super) const ADLS_ACCOUNT_NAME: &str = "adls.account-name";
pub(super) const ADLS_ACCOUNT_KEY: &str = "adls.account-key";
pub(super) const ADLS_ENDPOINT: &str = "adls.endpoint";
/// Alone, or with `.ACCOUNT` or `.ACCOUNT.dfs.SUFFIX` behind it as servers send it.
pub(super) const ADLS_SAS_TOKEN: &str = "adls.sas-token";
pub(super) const ADLS_TENANT_ID: &str = "adls.tenant-id";
pub(super) const ADLS_CLIENT_ID: &str = "adls.client-id";
pub(super) const ADLS_CLIENT_SECRET: &str = "adls.client-secret";
pub(super) const ADLS_AUTHORITY_HOST: &str = "adls.authority-host";

/// Settings by name. Values are not shown: some are secret.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct StorageProperties(BTreeMap<String, Secret>);

impl StorageProperties {
    pub fn new(pairs: impl IntoIterator<Item = (String, Secret)>) -> Self {
        Self(pairs.into_iter().collect())
    }

    /// Those of `later` win.
    #[must_use]
    pub fn overlaid(&self, later: impl IntoIterator<Item = (String, Secret)>) -> Self {
        let mut all = self.0.clone();
        all.extend(later);
        Self(all)
    }

    /// An empty value is none.
    pub(in crate::table) fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(Secret::reveal).filter(|value| !value.is_empty())
    }

    pub(super) fn owned(&self, key: &str) -> Option<String> {
        self.get(key).map(str::to_owned)
    }

    pub(in crate::table) fn is_true(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| value.eq_ignore_ascii_case("true"))
    }

    pub(in crate::table) fn has_any(&self, keys: &[&str]) -> bool {
        keys.iter().any(|key| self.get(key).is_some())
    }

    pub(in crate::table) fn pairs(&self) -> impl Iterator<Item = (String, Secret)> {
        self.0.iter().map(|(key, value)| (key.clone(), value.clone()))
    }

    /// Pairs whose key starts with `prefix`, without it.
    pub(super) fn below<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.0.iter().filter_map(move |(key, value)| Some((key.strip_prefix(prefix)?, value.reveal())))
    }
}

impl fmt::Debug for StorageProperties {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

#[cfg(test)]
pub(super) fn properties(pairs: &[(&str, &str)]) -> StorageProperties {
    StorageProperties::new(pairs.iter().map(|(k, v)| ((*k).to_owned(), Secret::new(*v))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_settings_win_and_no_value_is_shown() {
        let own = properties(&[(S3_REGION, "a"), (S3_SECRET_ACCESS_KEY, "hunter2")]);
        let all = own.overlaid([(S3_REGION.to_owned(), Secret::new("b"))]);
        assert_eq!(all.get(S3_REGION), Some("b"));
        assert_eq!(all.get(S3_SECRET_ACCESS_KEY), Some("hunter2"));
        assert_eq!(format!("{all:?}"), r#"{"s3.region", "s3.secret-access-key"}"#);
    }
}
