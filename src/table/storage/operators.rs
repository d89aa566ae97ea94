//! From settings to a client of one bucket, with its time-outs and repetitions.

use std::net::IpAddr;
use std::time::Duration;

use opendal::layers::{RetryEvent, RetryLayer, TimeoutLayer};
use opendal::services::{AzblobConfig, AzdlsConfig, GcsConfig, S3Config};
use opendal::{Error, ErrorKind, HttpTransporter, OperationContext, Operator};
use reqsign_core::hash::base64_encode;
use reqwest::Url;

use super::place::{Kind, Place};
use super::properties::*;

/// How long a store is waited for.
struct Bounds {
    /// Times that one exchange is repeated after a failure that may pass.
    repetitions: usize,
    /// Before a repetition; it doubles, and chance is added.
    first_pause: Duration,
    longest_pause: Duration,
    /// One request that moves no content: looking for an object, deleting one.
    request: Duration,
    /// One piece of content on its way, the connection included.
    piece: Duration,
}

const BOUNDS: Bounds = Bounds {
    repetitions: 3,
    first_pause: Duration::from_millis(100),
    longest_pause: Duration::from_secs(5),
    request: Duration::from_secs(30),
    piece: Duration::from_secs(60),
};

/// For stores at an address of their own, which have no regions, and sign with one all the same.
const NO_REGION: &str = "us-east-1";
/// As the AWS programs read them.
const ENDPOINT_VARIABLES: [&str; 2] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"];
const REGION_VARIABLES: [&str; 2] = ["AWS_REGION", "AWS_DEFAULT_REGION"];

/// A client of the bucket that `place` is in. `signing`: requests to S3 leave unsigned and are signed by this.
pub(super) fn operator(
    place: &Place<'_>,
    settings: &StorageProperties,
    signing: Option<HttpTransporter>,
) -> opendal::Result<Operator> {
    operator_within(&BOUNDS, place, settings, signing)
}

fn operator_within(
    bounds: &Bounds,
    place: &Place<'_>,
    settings: &StorageProperties,
    signing: Option<HttpTransporter>,
) -> opendal::Result<Operator> {
    let repeated = RetryLayer::new()
        .with_max_times(bounds.repetitions)
        .with_min_delay(bounds.first_pause)
        .with_max_delay(bounds.longest_pause)
        .with_jitter()
        .with_notify(|event: RetryEvent<'_>| {
            tracing::debug!(operation = ?event.op, attempt = event.attempt, "a store is asked again: {}", event.err);
        });
    let bounded = TimeoutLayer::new().with_timeout(bounds.request).with_io_timeout(bounds.piece);
    let client = match place.kind {
        Kind::S3 => {
            let mut config = s3(place.authority, settings, |name| std::env::var(name).ok())?;
            config.skip_signature |= signing.is_some();
            Operator::from_config(config)?
        }
        Kind::Gcs => Operator::from_config(gcs(place.authority, settings))?,
        Kind::Azure => match azure(place, settings)? {
            Azure::Files(config) => Operator::from_config(config)?,
            Azure::Blobs(config) => Operator::from_config(config)?,
        },
        Kind::Local => return Err(Error::new(ErrorKind::Unsupported, "a local file has no store")),
    };
    let client = match signing {
        Some(signing) => client.with_context(OperationContext::new().with_http_transport(signing)),
        None => client,
    };
    // Inside, so that each attempt has its own time.
    Ok(client.layer(bounded).layer(repeated))
}

fn s3(
    bucket: &str,
    settings: &StorageProperties,
    environment: impl Fn(&str) -> Option<String>,
) -> opendal::Result<S3Config> {
    let endpoint =
        settings.owned(S3_ENDPOINT).or_else(|| ENDPOINT_VARIABLES.into_iter().find_map(&environment));
    let region = settings
        .owned(S3_REGION)
        .or_else(|| settings.owned(CLIENT_REGION))
        .or_else(|| REGION_VARIABLES.into_iter().find_map(&environment))
        .or_else(|| endpoint.is_some().then(|| NO_REGION.to_owned()))
        .ok_or_else(|| wrong("no region is known; set s3.region or AWS_REGION"))?;
    // Java's default is the bucket in the host's name, which neither an IP address nor a bucket with dots can have.
    let path_style = settings.is_true(S3_PATH_STYLE_ACCESS)
        || bucket.contains('.')
        || endpoint.as_deref().is_some_and(is_ip_address);
    let mut config = S3Config::default();
    config.bucket = bucket.to_owned();
    config.endpoint = endpoint;
    config.region = Some(region);
    config.access_key_id = settings.owned(S3_ACCESS_KEY_ID);
    config.secret_access_key = settings.owned(S3_SECRET_ACCESS_KEY);
    config.session_token = settings.owned(S3_SESSION_TOKEN);
    config.enable_virtual_host_style = !path_style;
    config.skip_signature = settings.is_true(S3_ANONYMOUS);
    config.role_arn = settings.owned(ASSUME_ROLE_ARN);
    config.external_id = settings.owned(ASSUME_ROLE_EXTERNAL_ID);
    config.role_session_name = settings.owned(ASSUME_ROLE_SESSION_NAME);
    match settings.get(S3_SSE_TYPE) {
        None | Some("none") => {}
        Some("s3") => config.server_side_encryption = Some("AES256".to_owned()),
        Some("kms") => {
            config.server_side_encryption = Some("aws:kms".to_owned());
            config.server_side_encryption_aws_kms_key_id = settings.owned(S3_SSE_KEY);
        }
        Some("custom") => {
            config.server_side_encryption_customer_algorithm = Some("AES256".to_owned());
            config.server_side_encryption_customer_key = settings.owned(S3_SSE_KEY);
            config.server_side_encryption_customer_key_md5 = settings.owned(S3_SSE_MD5);
        }
        Some(_) => return Err(wrong("s3.sse.type is none of none, s3, kms, custom")),
    }
    Ok(config)
}

fn gcs(bucket: &str, settings: &StorageProperties) -> GcsConfig {
    let mut config = GcsConfig::default();
    config.bucket = bucket.to_owned();
    config.endpoint = settings.get(GCS_SERVICE_HOST).map(|host| host.trim_end_matches('/').to_owned());
    config.token = settings.owned(GCS_TOKEN);
    // As the file is, or encoded as the storage layer takes it.
    config.credential =
        settings.get(GCS_CREDENTIALS_JSON).map(|json| match json.trim_start().starts_with('{') {
            true => base64_encode(json.as_bytes()),
            false => json.to_owned(),
        });
    if settings.is_true(GCS_NO_AUTH) {
        config.skip_signature = true;
        config.disable_config_load = true;
        config.disable_vm_metadata = true;
    }
    config
}

/// The two ways to an account's objects.
enum Azure {
    /// Data Lake Storage: has real folders, and writes a file in three requests.
    Files(AzdlsConfig),
    /// Blob Storage: writes a file in one.
    Blobs(AzblobConfig),
}

fn azure(place: &Place<'_>, settings: &StorageProperties) -> opendal::Result<Azure> {
    let form = "an Azure location has the form abfss://FILESYSTEM@ACCOUNT.dfs.SUFFIX/PATH";
    let (filesystem, host) = place
        .authority
        .split_once('@')
        .filter(|(f, h)| !f.is_empty() && !h.is_empty())
        .ok_or_else(|| wrong(form))?;
    let (account, rest) = host.split_once('.').ok_or_else(|| wrong(form))?;
    let (service, suffix) = match rest.split_once('.') {
        Some((service @ ("dfs" | "blob"), suffix)) => (service, Some(suffix)),
        _ => ("dfs", None),
    };
    // Both names of an account lead to the same objects. A principal signs in at the first only: the client of the other
    // takes one from nowhere but the environment.
    let at_dfs = settings.get(ADLS_ENDPOINT).is_some_and(|endpoint| endpoint.contains(".dfs."));
    let service = if at_dfs || settings.get(ADLS_CLIENT_ID).is_some() { "dfs" } else { service };
    let protocol = if place.scheme.ends_with('s') { "https" } else { "http" };
    let endpoint = match (settings.get(ADLS_ENDPOINT), suffix) {
        (Some(endpoint), _) => endpoint.trim_end_matches('/').to_owned(),
        (None, Some(suffix)) => format!("{protocol}://{account}.{service}.{suffix}"),
        (None, None) => return Err(wrong(form)),
    };
    let account_name = Some(settings.owned(ADLS_ACCOUNT_NAME).unwrap_or_else(|| account.to_owned()));
    let sas_token = sas_token(settings, account, host).map(str::to_owned);
    if service == "blob" {
        return Ok(Azure::Blobs(AzblobConfig {
            container: filesystem.to_owned(),
            endpoint: Some(endpoint),
            account_name,
            account_key: settings.owned(ADLS_ACCOUNT_KEY),
            sas_token,
            ..AzblobConfig::default()
        }));
    }
    Ok(Azure::Files(AzdlsConfig {
        filesystem: filesystem.to_owned(),
        endpoint: Some(endpoint),
        account_name,
        account_key: settings.owned(ADLS_ACCOUNT_KEY),
        sas_token,
        tenant_id: settings.owned(ADLS_TENANT_ID),
        client_id: settings.owned(ADLS_CLIENT_ID),
        client_secret: settings.owned(ADLS_CLIENT_SECRET),
        authority_host: settings.owned(ADLS_AUTHORITY_HOST),
        ..AzdlsConfig::default()
    }))
}

/// The token of the account: under its host's name, its own name, or none.
fn sas_token<'a>(settings: &'a StorageProperties, account: &str, host: &str) -> Option<&'a str> {
    let named = settings.below(ADLS_SAS_TOKEN).filter(|(_, value)| !value.is_empty());
    let rank = |rest: &str| match rest.strip_prefix('.') {
        Some(name) if name == host => Some(0),
        Some(name) if name == account => Some(1),
        // The same account by its other service.
        Some(name) if name.split('.').next() == Some(account) => Some(2),
        None if rest.is_empty() => Some(3),
        _ => None,
    };
    named.filter_map(|(rest, value)| Some((rank(rest)?, value))).min_by_key(|(rank, _)| *rank).map(|(_, v)| v)
}

fn is_ip_address(endpoint: &str) -> bool {
    let host = Url::parse(endpoint).ok().and_then(|url| url.host_str().map(str::to_owned));
    host.is_some_and(|host| host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok())
}

fn wrong(message: &str) -> Error {
    Error::new(ErrorKind::ConfigInvalid, message)
}

#[cfg(test)]
mod tests {
    use super::super::properties::properties;
    use super::*;

    fn s3_of(bucket: &str, pairs: &[(&str, &str)]) -> opendal::Result<S3Config> {
        s3(bucket, &properties(pairs), |_| None)
    }

    fn azure_of(location: &str, pairs: &[(&str, &str)]) -> opendal::Result<AzdlsConfig> {
        match azure(&Place::of(location).unwrap().unwrap(), &properties(pairs))? {
            Azure::Files(config) => Ok(config),
            Azure::Blobs(config) => panic!("{location} is asked as {config:?}"),
        }
    }

    #[test]
    fn s3_settings_have_icebergs_names() {
        let config = s3_of(
            "lake",
            &[
                (S3_ENDPOINT, "https://s3.example"),
                (S3_REGION, "eu-west-1"),
                (S3_ACCESS_KEY_ID, "k"),
                (S3_SECRET_ACCESS_KEY, "s"),
                (S3_SESSION_TOKEN, "t"),
                (ASSUME_ROLE_ARN, "arn:x"),
                (S3_SSE_TYPE, "kms"),
                (S3_SSE_KEY, "key-1"),
            ],
        )
        .unwrap();
        assert_eq!(config.bucket, "lake");
        assert_eq!(config.endpoint.as_deref(), Some("https://s3.example"));
        assert_eq!(config.region.as_deref(), Some("eu-west-1"));
        assert_eq!(config.access_key_id.as_deref(), Some("k"));
        assert_eq!(config.secret_access_key.as_deref(), Some("s"));
        assert_eq!(config.session_token.as_deref(), Some("t"));
        assert_eq!(config.role_arn.as_deref(), Some("arn:x"));
        assert_eq!(config.server_side_encryption_aws_kms_key_id.as_deref(), Some("key-1"));
        assert!(config.enable_virtual_host_style && !config.skip_signature);
    }

    #[test]
    fn a_bucket_stands_in_the_path_where_it_cannot_stand_in_the_hosts_name() {
        let in_host =
            |bucket: &str, pairs: &[(&str, &str)]| s3_of(bucket, pairs).unwrap().enable_virtual_host_style;
        assert!(in_host("b", &[(S3_REGION, "r")]));
        assert!(!in_host("b", &[(S3_REGION, "r"), (S3_PATH_STYLE_ACCESS, "true")]));
        assert!(!in_host("b.c", &[(S3_REGION, "r")]));
        assert!(!in_host("b", &[(S3_ENDPOINT, "http://127.0.0.1:9000")]));
        assert!(!in_host("b", &[(S3_ENDPOINT, "http://[::1]:9000")]));
        assert!(in_host("b", &[(S3_ENDPOINT, "http://minio:9000")]));
    }

    /// A store that takes connections and says nothing is given up.
    #[tokio::test]
    async fn a_silent_store_is_given_up() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", silent.local_addr().unwrap());
        let settings =
            properties(&[(S3_ENDPOINT, &endpoint), (S3_ACCESS_KEY_ID, "k"), (S3_SECRET_ACCESS_KEY, "s")]);
        let soon = Duration::from_millis(20);
        let bounds =
            Bounds { repetitions: 2, first_pause: soon, longest_pause: soon, request: soon, piece: soon };
        let place = Place::of("s3://b/k").unwrap().unwrap();
        let client = operator_within(&bounds, &place, &settings, None).unwrap();

        for error in [
            client.stat("k").await.map(drop).unwrap_err(),
            client.read("k").await.map(drop).unwrap_err(),
            client.write("k", "text").await.map(drop).unwrap_err(),
        ] {
            assert!(error.to_string().contains("timeout"), "{error}");
        }
    }

    #[test]
    fn a_region_is_asked_for_where_one_is_needed() {
        let region = |pairs: &[(&str, &str)]| s3_of("b", pairs).map(|c| c.region.unwrap_or_default());
        assert_eq!(region(&[(CLIENT_REGION, "c")]).unwrap(), "c");
        assert_eq!(region(&[(S3_ENDPOINT, "http://h")]).unwrap(), NO_REGION);
        assert!(region(&[]).unwrap_err().to_string().contains("set s3.region or AWS_REGION"));
        let from_environment =
            s3("b", &properties(&[]), |name| (name == "AWS_REGION").then(|| "e".to_owned()));
        assert_eq!(from_environment.unwrap().region.as_deref(), Some("e"));
        let at = |name: &str| (name == "AWS_ENDPOINT_URL").then(|| "http://127.0.0.1:9".to_owned());
        let config = s3("b", &properties(&[]), at).unwrap();
        assert_eq!(
            (config.endpoint.as_deref(), config.enable_virtual_host_style),
            (Some("http://127.0.0.1:9"), false)
        );
    }

    #[test]
    fn azure_locations_name_their_account() {
        let config = azure_of("abfss://f@acc.dfs.core.windows.net/t", &[(ADLS_ACCOUNT_KEY, "k")]).unwrap();
        assert_eq!(config.filesystem, "f");
        assert_eq!(config.endpoint.as_deref(), Some("https://acc.dfs.core.windows.net"));
        assert_eq!(config.account_name.as_deref(), Some("acc"));
        let by_principal =
            azure_of("wasb://c@acc.blob.core.windows.net/t", &[(ADLS_CLIENT_ID, "id")]).unwrap();
        assert_eq!(by_principal.endpoint.as_deref(), Some("http://acc.dfs.core.windows.net"));
        let by_endpoint =
            azure_of("wasbs://c@acc.blob.x.net/t", &[(ADLS_ENDPOINT, "https://acc.dfs.x.net/")]).unwrap();
        assert_eq!(by_endpoint.endpoint.as_deref(), Some("https://acc.dfs.x.net"));
        let place = Place::of("wasbs://c@acc.blob.core.windows.net/t").unwrap().unwrap();
        let Azure::Blobs(blobs) = azure(&place, &properties(&[(ADLS_ACCOUNT_KEY, "k")])).unwrap() else {
            panic!("the name of the blob service is another service's")
        };
        assert_eq!(blobs.endpoint.as_deref(), Some("https://acc.blob.core.windows.net"));
        assert_eq!((blobs.container.as_str(), blobs.account_key.as_deref()), ("c", Some("k")));
        for location in ["abfss://f/t", "abfss://f@acc/t", "abfss://f@acc.other.net/t", "abfss://@a.dfs.x/t"]
        {
            let error = azure_of(location, &[]).unwrap_err();
            assert!(error.to_string().contains("ACCOUNT.dfs.SUFFIX"), "{error}");
        }
    }

    #[test]
    fn an_azure_token_is_the_accounts_own() {
        let token = |pairs: &[(&str, &str)]| azure_of("abfss://f@acc.dfs.x.net/t", pairs).unwrap().sas_token;
        assert_eq!(token(&[(ADLS_SAS_TOKEN, "all")]).as_deref(), Some("all"));
        assert_eq!(token(&[("adls.sas-token.acc", "own"), (ADLS_SAS_TOKEN, "all")]).as_deref(), Some("own"));
        assert_eq!(
            token(&[("adls.sas-token.acc.dfs.x.net", "host"), ("adls.sas-token.acc", "own")]).as_deref(),
            Some("host")
        );
        assert_eq!(token(&[("adls.sas-token.acc.blob.x.net", "blob")]).as_deref(), Some("blob"));
        assert_eq!(token(&[("adls.sas-token.other", "no")]), None);
        assert_eq!(token(&[("adls.sas-token-expires-at-ms.acc", "7")]), None);
    }

    #[test]
    fn gcs_settings_have_icebergs_names() {
        let config = gcs(
            "b",
            &properties(&[(GCS_SERVICE_HOST, "http://h:1/"), (GCS_TOKEN, "t"), (GCS_NO_AUTH, "true")]),
        );
        assert_eq!((config.endpoint.as_deref(), config.token.as_deref()), (Some("http://h:1"), Some("t")));
        assert!(config.skip_signature && config.disable_vm_metadata);
        let account = |text: &str| gcs("b", &properties(&[(GCS_CREDENTIALS_JSON, text)])).credential;
        assert_eq!(account("{}").as_deref(), Some("e30="));
        assert_eq!(account("e30=").as_deref(), Some("e30="));
    }
}
