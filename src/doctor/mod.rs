//! What can and cannot work here, found out before a request meets it (rule S4).
//!
//! `probe` tries a catalog out on a scratch table that is gone afterwards; `tables` reads what the tables of
//! the policies are set to. Nothing is ever written to a table of the user's.

mod keys;
pub mod probe;
mod several;
pub mod tables;

use serde::Serialize;

use crate::table::catalog::Capability;

/// How a thing stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    Ok,
    /// It works, and will not always, or not as well as it could.
    Warning,
    /// Nothing lands until it is mended.
    Broken,
}

/// One thing to say of a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Remark {
    pub standing: Standing,
    /// One sentence without a full stop, in lower case.
    pub text: String,
    pub next: String,
}

impl Remark {
    pub fn new(standing: Standing, text: impl Into<String>, next: impl Into<String>) -> Self {
        Self { standing, text: text.into(), next: next.into() }
    }
}

/// What is known of a capability.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Found {
    pub capability: Capability,
    /// `None`: it could not be found out.
    pub able: Option<bool>,
    pub how: How,
    /// What was seen, where it is not as it should be.
    pub seen: Option<String>,
}

/// How a capability is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// Tried on a scratch table.
    Tried,
    /// As the catalog says of itself.
    Declared,
}
