//! Where things are on the server: names become one path segment each, whatever letters they hold.

use mergeberg_kernel::ids::TableName;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use reqwest::Url;

/// Everything but RFC 3986's unreserved characters. A blank becomes `%20`, which decoders of paths and of
/// forms both read; `+` is none of ours, since decoders of forms read it as a blank.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Between the levels of a namespace when the server names no other: the unit separator, encoded.
const DEFAULT_SEPARATOR: &str = "%1F";

/// Below `{uri}/v1`.
#[derive(Clone, Debug)]
pub(super) struct Paths {
    base: String,
    /// As the server gave it, URL-encoded: servers split the encoded path by it.
    separator: String,
}

impl Paths {
    /// `uri` without `/v1`; `prefix` and `separator` as the configuration gave them.
    pub fn new(uri: &str, prefix: Option<&str>, separator: Option<&str>) -> Self {
        let mut base = format!("{}/v1", uri.trim_end_matches('/'));
        if let Some(prefix) = prefix.map(|p| p.trim_matches('/')).filter(|p| !p.is_empty()) {
            base.push('/');
            base.push_str(prefix);
        }
        let separator = match separator.filter(|given| !given.is_empty()) {
            Some(encoded) if encoded.contains('%') => encoded.to_owned(),
            Some(plain) => encode(plain),
            None => DEFAULT_SEPARATOR.to_owned(),
        };
        Self { base, separator }
    }

    pub fn table(&self, table: &TableName) -> Result<Url, String> {
        self.url(&format!("namespaces/{}/tables/{}", self.namespace(&table.namespace), encode(&table.name)))
    }

    /// Of the table's credentials.
    pub fn credentials(&self, table: &TableName) -> Result<Url, String> {
        let namespace = self.namespace(&table.namespace);
        self.url(&format!("namespaces/{namespace}/tables/{}/credentials", encode(&table.name)))
    }

    /// Where several tables are committed to at once.
    pub fn transaction(&self) -> Result<Url, String> {
        self.url("transactions/commit")
    }

    pub fn tables(&self, namespace: &[String]) -> Result<Url, String> {
        self.url(&format!("namespaces/{}/tables", self.namespace(namespace)))
    }

    /// The namespaces below `parent`; the top ones when it has no level.
    pub fn namespaces(&self, parent: &[String]) -> Result<Url, String> {
        let mut url = self.url("namespaces")?;
        if !parent.is_empty() {
            let separator = percent_decode_str(&self.separator).decode_utf8_lossy().into_owned();
            url.query_pairs_mut().append_pair("parent", &parent.join(&separator));
        }
        Ok(url)
    }

    fn namespace(&self, levels: &[String]) -> String {
        levels.iter().map(|level| encode(level)).collect::<Vec<_>>().join(&self.separator)
    }

    fn url(&self, path: &str) -> Result<Url, String> {
        let text = format!("{}/{path}", self.base);
        Url::parse(&text).map_err(|error| format!("'{text}' is no address: {error}"))
    }
}

fn encode(text: &str) -> String {
    utf8_percent_encode(text, SEGMENT).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(namespace: &[&str], name: &str) -> TableName {
        TableName {
            namespace: namespace.iter().map(|level| (*level).to_owned()).collect(),
            name: name.to_owned(),
        }
    }

    fn path(paths: &Paths, namespace: &[&str], name: &str) -> String {
        paths.table(&table(namespace, name)).unwrap().path().to_owned()
    }

    #[test]
    fn every_name_is_one_segment() {
        let paths = Paths::new("http://h/", None, None);
        assert_eq!(path(&paths, &["nyc"], "flights"), "/v1/namespaces/nyc/tables/flights");
        assert_eq!(path(&paths, &["a", "b"], "t"), "/v1/namespaces/a%1Fb/tables/t");
        assert_eq!(path(&paths, &["a/b"], "c d+e?f#g"), "/v1/namespaces/a%2Fb/tables/c%20d%2Be%3Ff%23g");
        assert_eq!(path(&paths, &["été"], "表"), "/v1/namespaces/%C3%A9t%C3%A9/tables/%E8%A1%A8");
        assert_eq!(path(&paths, &["a%2Fb"], "t"), "/v1/namespaces/a%252Fb/tables/t");
    }

    #[test]
    fn the_server_says_prefix_and_separator() {
        let paths = Paths::new("https://h/api/catalog", Some("ws/lake"), Some("%2E"));
        assert_eq!(path(&paths, &["a", "b"], "t"), "/api/catalog/v1/ws/lake/namespaces/a%2Eb/tables/t");
        let plain = Paths::new("https://h", Some(""), Some("$"));
        assert_eq!(path(&plain, &["a", "b"], "t"), "/v1/namespaces/a%24b/tables/t");
    }

    #[test]
    fn a_parent_is_a_parameter_with_the_plain_separator() {
        let top = Paths::new("http://h", None, None).namespaces(&[]).unwrap();
        assert_eq!(top.as_str(), "http://h/v1/namespaces");
        let below = Paths::new("http://h", None, None).namespaces(&["a b".into(), "c".into()]).unwrap();
        assert_eq!(below.query(), Some("parent=a+b%1Fc"));
        let dotted = Paths::new("http://h", None, Some("%2E")).namespaces(&["a".into(), "b".into()]).unwrap();
        assert_eq!(dotted.query(), Some("parent=a.b"));
    }
}
