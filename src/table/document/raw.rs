//! A JSON object whose members keep their order and their text: what is not edited is written back as it
//! was read, whatever it means.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Members in the order of the text. Values are raw JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RawObject {
    members: Vec<(String, Arc<str>)>,
}

impl RawObject {
    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// The raw value of `key`. JSON null counts as absent, as every Iceberg reader takes it.
    pub fn get(&self, key: &str) -> Option<&Arc<str>> {
        self.members.iter().find(|(k, _)| k == key).map(|(_, value)| value).filter(|v| v.as_ref() != "null")
    }

    /// Replaces the value in its place, or appends the member.
    pub fn set(&mut self, key: &str, value: impl Into<Arc<str>>) {
        match self.members.iter_mut().find(|(k, _)| k == key) {
            Some((_, old)) => *old = value.into(),
            None => self.members.push((key.to_owned(), value.into())),
        }
    }

    pub fn remove(&mut self, key: &str) {
        self.members.retain(|(k, _)| k != key);
    }

    /// The members of these keys, in order.
    pub fn only(self, wanted: impl Fn(&str) -> bool) -> Self {
        Self { members: self.members.into_iter().filter(|(key, _)| wanted(key)).collect() }
    }

    /// Members in order.
    pub fn into_members(self) -> Vec<(String, Arc<str>)> {
        self.members
    }

    pub fn to_text(&self) -> String {
        let mut text = String::from("{");
        for (at, (key, value)) in self.members.iter().enumerate() {
            if at > 0 {
                text.push(',');
            }
            text.push_str(&quote(key));
            text.push(':');
            text.push_str(value);
        }
        text.push('}');
        text
    }
}

impl<'de> Deserialize<'de> for RawObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;

        impl<'de> Visitor<'de> for Members {
            type Value = RawObject;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawObject, A::Error> {
                let mut members: Vec<(String, Arc<str>)> = Vec::new();
                // A table may have thousands of refs.
                let mut seen: HashSet<String> = HashSet::new();
                while let Some((key, value)) = map.next_entry::<String, &'de RawValue>()? {
                    // Readers differ in which of the two counts, so neither can be edited.
                    if !seen.insert(key.clone()) {
                        return Err(A::Error::custom(format!("the key '{key}' stands there twice")));
                    }
                    members.push((key, Arc::from(value.get())));
                }
                Ok(RawObject { members })
            }
        }

        deserializer.deserialize_map(Members)
    }
}

/// The elements of a JSON array as raw text.
pub(super) fn elements(text: &str) -> Result<Vec<&str>, serde_json::Error> {
    let elements: Vec<&RawValue> = serde_json::from_str(text)?;
    Ok(elements.into_iter().map(RawValue::get).collect())
}

/// A JSON array of raw elements.
pub(super) fn array<'a>(elements: impl Iterator<Item = &'a str>) -> String {
    let mut text = String::new();
    push_array(&mut text, elements);
    text
}

pub(super) fn push_array<'a>(out: &mut String, elements: impl Iterator<Item = &'a str>) {
    out.push('[');
    for (at, element) in elements.enumerate() {
        if at > 0 {
            out.push(',');
        }
        out.push_str(element);
    }
    out.push(']');
}

/// A JSON string literal.
pub(super) fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
