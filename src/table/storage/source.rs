//! Where the settings of a store come from: the configuration once, or a catalog that grants them for a time.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;

use super::fault::StorageFault;
use super::properties::StorageProperties;
use super::signing::RequestSigner;

/// The settings for one location, as they are now.
#[derive(Clone, Debug)]
pub(in crate::table) struct Grant {
    /// Other settings have another id; one id is never used for two.
    pub id: u64,
    pub settings: Arc<StorageProperties>,
    /// The requests to S3 are signed by the catalog.
    pub signing: Option<Arc<RequestSigner>>,
}

/// A catalog that grants access to a table's files.
#[async_trait]
pub(in crate::table) trait Grants: Debug + Send + Sync {
    /// What holds for `location` now. An error is told in words.
    async fn grant(&self, location: &str) -> Result<Grant, String>;

    /// A store refused access under the grant with this id: it may be over before its time.
    fn doubt(&self, id: u64);
}

#[derive(Clone, Debug)]
pub(in crate::table) enum Source {
    Fixed(Arc<StorageProperties>),
    Granted(Arc<dyn Grants>),
}

impl Source {
    pub(super) async fn grant(&self, location: &str) -> Result<Grant, StorageFault> {
        match self {
            Self::Fixed(settings) => Ok(Grant { id: 0, settings: Arc::clone(settings), signing: None }),
            Self::Granted(grants) => grants.grant(location).await.map_err(StorageFault::trouble),
        }
    }

    pub(super) fn doubt(&self, id: u64) {
        match self {
            Self::Fixed(_) => {}
            Self::Granted(grants) => grants.doubt(id),
        }
    }
}
