//! Statements whose values are a list.

use std::borrow::Cow;

use super::query::{Query, Value};

/// A statement whose number of values is known when it runs.
pub struct QueryBuilder {
    /// One more than there are values.
    pieces: Vec<String>,
    values: Vec<Value>,
}

impl QueryBuilder {
    pub fn new(sql: &'static str) -> Self {
        Self { pieces: vec![sql.to_owned()], values: Vec::new() }
    }

    pub fn push(&mut self, sql: impl Into<Cow<'static, str>>) -> &mut Self {
        if let Some(last) = self.pieces.last_mut() {
            last.push_str(&sql.into());
        }
        self
    }

    pub fn push_bind(&mut self, value: impl Into<Value>) -> &mut Self {
        self.values.push(value.into());
        self.pieces.push(String::new());
        self
    }

    /// Values with `separator` between them.
    pub fn separated(&mut self, separator: &'static str) -> Separated<'_> {
        Separated { builder: self, separator, is_first: true }
    }

    /// `VALUES (a, b), (c, d)`: a row for each item.
    pub fn push_values<T>(
        &mut self,
        items: impl IntoIterator<Item = T>,
        mut row: impl FnMut(Separated<'_>, T),
    ) -> &mut Self {
        self.push("VALUES ");
        for (at, item) in items.into_iter().enumerate() {
            self.push(if at > 0 { ", (" } else { "(" });
            row(self.separated(", "), item);
            self.push(")");
        }
        self
    }

    pub fn build(self) -> Query {
        Query::built(self.pieces, self.values)
    }
}

/// A list that grows.
pub struct Separated<'b> {
    builder: &'b mut QueryBuilder,
    separator: &'static str,
    is_first: bool,
}

impl Separated<'_> {
    pub fn push_bind(&mut self, value: impl Into<Value>) -> &mut Self {
        if !self.is_first {
            self.builder.push(self.separator);
        }
        self.is_first = false;
        self.builder.push_bind(value);
        self
    }
}
