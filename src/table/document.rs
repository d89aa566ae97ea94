//! The metadata JSON as a document.

/// Placeholder until the catalog lands.
#[derive(Debug)]
pub struct Document {}
