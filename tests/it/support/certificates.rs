//! Certificates for servers on loopback, and the file of the one root that signs them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

pub struct Certificates {
    root_file: PathBuf,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Certificates {
    /// A root of our own, and a certificate of it for `localhost`.
    pub fn make(folder: &Path) -> Self {
        Self::of_name(folder, "localhost")
    }

    pub fn of_name(folder: &Path, name: &str) -> Self {
        let mut root = CertificateParams::new(Vec::new()).unwrap();
        root.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root = CertifiedIssuer::self_signed(root, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate =
            CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &root).unwrap();
        let root_file = folder.join(format!("root-of-{name}.pem"));
        std::fs::write(&root_file, root.pem()).unwrap();
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        Self { root_file, chain: vec![certificate.der().clone()], key }
    }

    /// For `SSL_CERT_FILE`.
    pub fn root_file(&self) -> &Path {
        &self.root_file
    }

    pub fn acceptor(&self) -> TlsAcceptor {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(self.chain.clone(), self.key.clone_key())
            .unwrap();
        TlsAcceptor::from(Arc::new(config))
    }
}
