use chrono::TimeZone;
use reqwest::Method;

use super::*;

/// The keys of AWS's own examples.
fn keys(session: Option<&str>) -> AwsKeys {
    AwsKeys {
        id: "AKIDEXAMPLE".to_owned(),
        secret: Secret::new("wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"),
        session: session.map(Secret::new),
    }
}

fn signed(name: &str, region: &str, session: Option<&str>, request: &mut Request) -> String {
    let settings =
        AwsSettings { name: name.to_owned(), region: Some(region.to_owned()), keys: Some(keys(session)) };
    let signer = AwsSigner::new(&settings, |_| None).unwrap();
    let Keys::Given(credential) = &signer.keys else { panic!("keys were given") };
    let now = Utc.with_ymd_and_hms(2026, 11, 30, 12, 34, 56).unwrap();
    signer.sign_at(request, credential, now).unwrap();
    request.headers()[AUTHORIZATION].to_str().unwrap().to_owned()
}

/// What botocore 1.44.8 (`SigV4Auth`) signs for the same requests at the same second.
#[test]
fn signatures_are_those_of_botocore() {
    let url = "https://glue.eu-west-1.amazonaws.com/iceberg/v1/catalogs/123/namespaces/a%1Fb/tables/caf%C3%A9%20t\
               ?pageToken=&pageSize=1000";
    let mut get = Request::new(Method::GET, url.parse().unwrap());
    assert_eq!(
        signed("glue", "eu-west-1", None, &mut get),
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20261130/eu-west-1/glue/aws4_request, \
         SignedHeaders=host;x-amz-content-sha256;x-amz-date, \
         Signature=8218127b57a85a3840f94d6fb83ff4ea8e1d8d873db347725f49d2ab114e0079"
    );

    let url =
        "https://s3tables.us-east-1.amazonaws.com:8443/iceberg/v1/arn%3Aaws%3As3tables/namespaces/n/tables/t";
    let mut post = Request::new(Method::POST, url.parse().unwrap());
    let given = [
        ("content-type", "application/json"),
        ("x-tenant", "a  b"),
        ("idempotency-key", "k-1"),
        ("authorization", "Bearer tok"),
    ];
    for (name, value) in given {
        post.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    *post.body_mut() = Some(r#"{"a":1}"#.into());
    assert_eq!(
        signed("s3tables", "us-east-1", Some("SESSION/TOKEN=="), &mut post),
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20261130/us-east-1/s3tables/aws4_request, \
         SignedHeaders=content-type;host;idempotency-key;original-authorization;x-amz-content-sha256;x-amz-date;\
         x-amz-security-token;x-tenant, \
         Signature=5069c1bd63ef10c1bf28313f03c20020c85987eb1688ee03bc044a4514951765"
    );
    assert_eq!(post.headers()[SECURITY_TOKEN], "SESSION/TOKEN==");
    assert_eq!(post.headers()[ORIGINAL_AUTHORIZATION], "Bearer tok", "the bearer token goes beside it");
}

#[test]
fn a_blank_in_a_parameter_is_sent_as_it_is_signed() {
    let mut url: Url = "https://h/v1/namespaces".parse().unwrap();
    url.query_pairs_mut().append_pair("parent", "a b+c~").append_pair("b", "");
    let mut get = Request::new(Method::GET, url);
    signed("execute-api", "r", None, &mut get);
    assert_eq!(get.url().query(), Some("parent=a%20b%2Bc%7E&b="));
    assert_eq!(canonical_query(get.url()), "b=&parent=a%20b%2Bc~");
}

#[test]
fn settings_have_javas_names() {
    let read = |pairs: &[(&str, &str)]| {
        AwsSettings::read(&pairs.iter().map(|(k, v)| ((*k).to_owned(), Secret::new(*v))).collect())
    };
    assert_eq!(read(&[]), Ok(None));
    assert_eq!(read(&[(ENABLED, "false")]), Ok(None));
    let bare = read(&[(ENABLED, "true")]).unwrap().unwrap();
    assert_eq!(bare, AwsSettings { name: "execute-api".to_owned(), region: None, keys: None });
    let (key, _) = read(&[(NAME, "glue")]).unwrap_err();
    assert_eq!(key, NAME);
    let (key, message) = read(&[(ENABLED, "true"), (ACCESS_KEY, "k")]).unwrap_err();
    assert_eq!((key, message.as_str()), (SECRET_KEY, "it is missing beside 'rest.access-key-id'"));
    let full =
        [(ENABLED, "true"), (NAME, "glue"), (REGION, "r"), (ACCESS_KEY, "AKIDEXAMPLE"), (SECRET_KEY, "s")];
    let full = read(&full).unwrap().unwrap();
    assert_eq!((full.name.as_str(), full.region.as_deref()), ("glue", Some("r")));
    assert!(!format!("{full:?}").contains("\"s\""));
}

#[test]
fn a_region_comes_from_the_environment_too() {
    let settings = AwsSettings { name: "glue".to_owned(), region: None, keys: Some(keys(None)) };
    let signer = AwsSigner::new(&settings, |name| (name == "AWS_DEFAULT_REGION").then(|| "eu".to_owned()));
    assert_eq!(signer.unwrap().region, "eu");
    assert!(AwsSigner::new(&settings, |_| None).unwrap_err().contains("no region"));
}
