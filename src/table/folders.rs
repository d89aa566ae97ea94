//! Where a table's new files go, as its properties say.

use mergeberg_kernel::facts::TableFacts;

const METADATA_PATH: &str = "write.metadata.path";
/// The first that is set wins (Java: `LocationProviders.DefaultLocationProvider`). The layout of
/// `write.object-storage.enabled` is not ours: it spreads names, and no reader depends on it.
const DATA_PATHS: [&str; 3] = ["write.data.path", "write.object-storage.path", "write.folder-storage.path"];

/// Of metadata files, manifests and manifest lists; without a slash at its end.
pub(super) fn metadata_folder(facts: &TableFacts) -> String {
    folder(facts, &[METADATA_PATH], "metadata")
}

/// Of data and delete files; without a slash at its end.
pub(super) fn data_folder(facts: &TableFacts) -> String {
    folder(facts, &DATA_PATHS, "data")
}

fn folder(facts: &TableFacts, properties: &[&str], default: &str) -> String {
    let set = properties.iter().find_map(|key| facts.properties.get(*key)).filter(|path| !path.is_empty());
    match set {
        Some(path) => path.trim_end_matches('/').to_owned(),
        None => format!("{}/{default}", facts.location.trim_end_matches('/')),
    }
}
