//! Operations of the model as records: typed, or the statement that Spark would have run.

use serde_json::{Map, Value as Json, json};

use super::model::{Action, COLUMNS, Clause, Condition, Operation, Side, Term, Value, When};

/// Names of tables and rows in a text.
pub struct Words {
    pub target: &'static str,
    pub source: &'static str,
    pub feed: &'static str,
    /// Column names in another case than the table's.
    pub shouts: bool,
}

/// Names of the typed form.
pub const TYPED: Words = Words { target: "target", source: "source", feed: "feed", shouts: false };
/// Names of a statement.
pub const STATEMENT: Words = Words { target: "t", source: "S", feed: "raw.feed", shouts: true };

impl Words {
    fn column(&self, at: usize) -> String {
        if self.shouts && at.is_multiple_of(2) { COLUMNS[at].to_uppercase() } else { COLUMNS[at].to_owned() }
    }

    fn value(&self, value: &Value) -> String {
        match value {
            Value::Null => "NULL".to_owned(),
            Value::Int(number) => number.to_string(),
            Value::Text(text) => format!("'{text}'"),
        }
    }

    pub fn term(&self, term: &Term) -> String {
        match term {
            Term::Column(Side::Target, at) => format!("{}.{}", self.target, self.column(*at)),
            Term::Column(Side::Source, at) => format!("{}.{}", self.source, self.column(*at)),
            Term::Literal(value) => self.value(value),
            Term::Plus(term, number) => format!("{} + {number}", self.term(term)),
        }
    }

    pub fn condition(&self, condition: &Condition) -> String {
        match condition {
            Condition::Compare(left, "<=>", right) if !self.shouts => {
                format!("({} IS NOT DISTINCT FROM {})", self.term(left), self.term(right))
            }
            Condition::Compare(left, op, right) => format!("{} {op} {}", self.term(left), self.term(right)),
            Condition::IsNull(term) => format!("{} IS NULL", self.term(term)),
            Condition::In(term, values) => {
                let values: Vec<String> = values.iter().map(|value| self.value(value)).collect();
                format!("{} IN ({})", self.term(term), values.join(", "))
            }
            Condition::InFeed(term, at) => {
                format!("{} IN (SELECT {} FROM {})", self.term(term), self.column(*at), self.feed)
            }
            Condition::And(left, right) => {
                format!("({} AND {})", self.condition(left), self.condition(right))
            }
            Condition::Or(left, right) => format!("({} OR {})", self.condition(left), self.condition(right)),
            Condition::Not(inner) => format!("NOT ({})", self.condition(inner)),
        }
    }

    fn set(&self, set: &[(usize, Term)]) -> String {
        let one = |(at, term): &(usize, Term)| format!("{} = {}", self.column(*at), self.term(term));
        set.iter().map(one).collect::<Vec<_>>().join(", ")
    }
}

fn days(days: &[i64]) -> String {
    days.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")
}

/// The statement that writes to `table`; `feed` is how it calls its input.
pub fn statement(operation: &Operation, table: &str, words: &Words) -> String {
    let (target, source, feed) = (words.target, words.source, words.feed);
    match operation {
        Operation::Delete(condition) => {
            format!("DELETE FROM {table} AS {target} WHERE {}", words.condition(condition))
        }
        Operation::Update(set, condition) => {
            let filter = condition.as_ref().map(|c| format!(" WHERE {}", words.condition(c)));
            format!("UPDATE {table} AS {target} SET {}{}", words.set(set), filter.unwrap_or_default())
        }
        Operation::Merge { on, clauses } => {
            let mut text =
                format!("MERGE INTO {table} {target} USING {feed} {source} ON {}", words.condition(on));
            for Clause { when, condition, action } in clauses {
                text.push_str(match when {
                    When::Matched => " WHEN MATCHED",
                    When::NotMatched => " WHEN NOT MATCHED",
                    When::NotMatchedBySource => " WHEN NOT MATCHED BY SOURCE",
                });
                if let Some(condition) = condition {
                    text.push_str(&format!(" AND {}", words.condition(condition)));
                }
                text.push_str(" THEN ");
                text.push_str(&match action {
                    Action::Delete => "DELETE".to_owned(),
                    Action::UpdateAll => "UPDATE SET *".to_owned(),
                    Action::InsertAll => "INSERT *".to_owned(),
                    Action::Update(set) => format!("UPDATE SET {}", words.set(set)),
                    Action::Insert(set) => {
                        let names: Vec<String> = set.iter().map(|(at, _)| words.column(*at)).collect();
                        let values: Vec<String> = set.iter().map(|(_, term)| words.term(term)).collect();
                        format!("INSERT ({}) VALUES ({})", names.join(", "), values.join(", "))
                    }
                });
            }
            text
        }
        // Static mode takes one value a column, so several days are several days of an overwrite by day.
        Operation::Overwrite(_) => panic!("no statement of Spark does this to any days"),
    }
}

fn assignments(set: &[(usize, Term)]) -> Json {
    let one = |(at, term): &(usize, Term)| (COLUMNS[*at].to_owned(), json!(TYPED.term(term)));
    Json::Object(set.iter().map(one).collect())
}

/// The typed form, without version, id and inputs.
pub fn typed(operation: &Operation) -> Map<String, Json> {
    let record = match operation {
        Operation::Delete(condition) => json!({"op": "delete-where", "where": TYPED.condition(condition)}),
        Operation::Update(set, condition) => {
            let filter = condition.as_ref().map_or("true".to_owned(), |c| TYPED.condition(c));
            json!({"op": "update-where", "where": filter, "set": assignments(set)})
        }
        Operation::Overwrite(all) => {
            let inside = format!("day IN ({})", days(all));
            json!({"op": "overwrite-where", "where": inside, "query": format!("SELECT * FROM feed WHERE {inside}")})
        }
        Operation::Merge { on, clauses } => {
            let of = |when: When| -> Json {
                let clauses = clauses.iter().filter(|clause| clause.when == when).map(|clause| {
                    let mut one = match &clause.action {
                        Action::Delete => json!({"delete": true}),
                        Action::UpdateAll => json!({"update": "*"}),
                        Action::InsertAll => json!({"insert": "*"}),
                        Action::Update(set) => json!({"update": assignments(set)}),
                        Action::Insert(set) => json!({"insert": assignments(set)}),
                    };
                    if let Some(condition) = &clause.condition {
                        one["and"] = json!(TYPED.condition(condition));
                    }
                    one
                });
                clauses.collect()
            };
            json!({
                "op": "merge-into", "source": "SELECT * FROM feed", "on": TYPED.condition(on),
                "when-matched": of(When::Matched), "when-not-matched": of(When::NotMatched),
                "when-not-matched-by-source": of(When::NotMatchedBySource),
            })
        }
    };
    let Json::Object(record) = record else { panic!("an object") };
    record
}
