//! SQL's meaning of DELETE, UPDATE and MERGE over rows in a vector: the judge of replays. It shares no code with
//! them: values, three-valued logic and the text of statements are its own.

use std::cmp::Ordering;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Value {
    Null,
    Int(i64),
    Text(String),
}

pub const COLUMNS: [&str; 4] = ["id", "day", "status", "amount"];

/// `id`, `day`, `status`, `amount`.
pub type Row = [Value; 4];

/// How a row is told: `4|20|new|-`.
pub fn told(row: &Row) -> String {
    let text = |value: &Value| match value {
        Value::Null => "-".to_owned(),
        Value::Int(number) => number.to_string(),
        Value::Text(text) => text.clone(),
    };
    row.iter().map(text).collect::<Vec<_>>().join("|")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Target,
    Source,
}

/// A value of one row, or of a pair.
#[derive(Clone, Debug)]
pub enum Term {
    Column(Side, usize),
    Literal(Value),
    Plus(Box<Term>, i64),
}

#[derive(Clone, Debug)]
pub enum Condition {
    Compare(Term, &'static str, Term),
    IsNull(Term),
    In(Term, Vec<Value>),
    /// The value of this column is among those of the feed's rows.
    InFeed(Term, usize),
    And(Box<Condition>, Box<Condition>),
    Or(Box<Condition>, Box<Condition>),
    Not(Box<Condition>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    Matched,
    NotMatched,
    NotMatchedBySource,
}

#[derive(Clone, Debug)]
pub enum Action {
    Delete,
    Update(Vec<(usize, Term)>),
    UpdateAll,
    Insert(Vec<(usize, Term)>),
    InsertAll,
}

#[derive(Clone, Debug)]
pub struct Clause {
    pub when: When,
    pub condition: Option<Condition>,
    pub action: Action,
}

#[derive(Clone, Debug)]
pub enum Operation {
    Delete(Condition),
    Update(Vec<(usize, Term)>, Option<Condition>),
    Merge {
        on: Condition,
        clauses: Vec<Clause>,
    },
    /// The rows of these days become the feed's.
    Overwrite(Vec<i64>),
}

/// More than one source row matches a target row.
#[derive(Debug, PartialEq, Eq)]
pub struct Ambiguous;

/// What an expression sees.
struct Pair<'a> {
    target: Option<&'a Row>,
    source: Option<&'a Row>,
    feed: &'a [Row],
}

impl Term {
    fn value(&self, pair: &Pair<'_>) -> Value {
        match self {
            Self::Column(side, at) => {
                let row = match side {
                    Side::Target => pair.target,
                    Side::Source => pair.source,
                };
                row.map_or(Value::Null, |row| row[*at].clone())
            }
            Self::Literal(value) => value.clone(),
            Self::Plus(term, number) => match term.value(pair) {
                Value::Int(value) => Value::Int(value + number),
                _ => Value::Null,
            },
        }
    }
}

fn compare(left: &Value, op: &str, right: &Value) -> Option<bool> {
    if *left == Value::Null || *right == Value::Null {
        return (op == "<=>").then(|| left == right);
    }
    let order = left.cmp(right);
    Some(match op {
        "=" | "<=>" => order == Ordering::Equal,
        "<>" => order != Ordering::Equal,
        "<" => order == Ordering::Less,
        "<=" => order != Ordering::Greater,
        ">" => order == Ordering::Greater,
        ">=" => order != Ordering::Less,
        other => panic!("{other}"),
    })
}

fn any_equal<'a>(value: &Value, among: impl Iterator<Item = &'a Value>) -> Option<bool> {
    let mut unknown = false;
    let mut any = false;
    for one in among {
        any = true;
        match compare(value, "=", one) {
            Some(true) => return Some(true),
            Some(false) => {}
            None => unknown = true,
        }
    }
    if unknown && any { None } else { Some(false) }
}

impl Condition {
    /// `None`: unknown.
    fn truth(&self, pair: &Pair<'_>) -> Option<bool> {
        match self {
            Self::Compare(left, op, right) => compare(&left.value(pair), op, &right.value(pair)),
            Self::IsNull(term) => Some(term.value(pair) == Value::Null),
            Self::In(term, values) => any_equal(&term.value(pair), values.iter()),
            Self::InFeed(term, column) => {
                any_equal(&term.value(pair), pair.feed.iter().map(|row| &row[*column]))
            }
            Self::And(left, right) => match (left.truth(pair), right.truth(pair)) {
                (Some(false), _) | (_, Some(false)) => Some(false),
                (Some(true), Some(true)) => Some(true),
                _ => None,
            },
            Self::Or(left, right) => match (left.truth(pair), right.truth(pair)) {
                (Some(true), _) | (_, Some(true)) => Some(true),
                (Some(false), Some(false)) => Some(false),
                _ => None,
            },
            Self::Not(inner) => inner.truth(pair).map(|truth| !truth),
        }
    }

    fn holds(&self, pair: &Pair<'_>) -> bool {
        self.truth(pair) == Some(true)
    }
}

fn assigned(row: &Row, set: &[(usize, Term)], pair: &Pair<'_>) -> Row {
    let mut new = row.clone();
    for (at, term) in set {
        new[*at] = term.value(pair);
    }
    new
}

const NOTHING: Row = [Value::Null, Value::Null, Value::Null, Value::Null];

impl Operation {
    /// The rows after it. `feed` are those of its input.
    pub fn apply(&self, rows: &[Row], feed: &[Row]) -> Result<Vec<Row>, Ambiguous> {
        let alone = |row| Pair { target: Some(row), source: None, feed };
        match self {
            Self::Delete(condition) => {
                Ok(rows.iter().filter(|row| !condition.holds(&alone(row))).cloned().collect())
            }
            Self::Update(set, condition) => {
                let changes = |row| condition.as_ref().is_none_or(|c| c.holds(&alone(row)));
                let one = |row| if changes(row) { assigned(row, set, &alone(row)) } else { row.clone() };
                Ok(rows.iter().map(one).collect())
            }
            Self::Overwrite(days) => {
                let inside = |row: &&Row| matches!(row[1], Value::Int(day) if days.contains(&day));
                let kept = rows.iter().filter(|row| !inside(row)).cloned();
                Ok(kept.chain(feed.iter().filter(inside).cloned()).collect())
            }
            Self::Merge { on, clauses } => merge(rows, feed, on, clauses),
        }
    }
}

fn merge(rows: &[Row], feed: &[Row], on: &Condition, clauses: &[Clause]) -> Result<Vec<Row>, Ambiguous> {
    let of = |when: When| clauses.iter().filter(move |clause| clause.when == when);
    let matched: Vec<&Clause> = of(When::Matched).collect();
    let only_deletes = matches!(matched.as_slice(), [Clause { condition: None, action: Action::Delete, .. }]);
    let chosen = |when: When, pair: &Pair<'_>| {
        of(when).find(|clause| clause.condition.as_ref().is_none_or(|c| c.holds(pair)))
    };
    let mut result = Vec::new();
    let mut met = vec![false; feed.len()];
    for row in rows {
        let mut partners = Vec::new();
        for (at, source) in feed.iter().enumerate() {
            if on.holds(&Pair { target: Some(row), source: Some(source), feed }) {
                met[at] = true;
                partners.push(source);
            }
        }
        let pair = Pair { target: Some(row), source: partners.first().copied(), feed };
        let clause = if partners.is_empty() {
            chosen(When::NotMatchedBySource, &pair)
        } else {
            if partners.len() > 1 && !matched.is_empty() && !only_deletes {
                return Err(Ambiguous);
            }
            chosen(When::Matched, &pair)
        };
        match clause.map(|clause| &clause.action) {
            None => result.push(row.clone()),
            Some(Action::Delete) => {}
            Some(Action::Update(set)) => result.push(assigned(row, set, &pair)),
            Some(Action::UpdateAll) => result.push(partners[0].clone()),
            Some(other) => panic!("{other:?}"),
        }
    }
    for (source, met) in feed.iter().zip(met) {
        let pair = Pair { target: None, source: Some(source), feed };
        if met {
            continue;
        }
        match chosen(When::NotMatched, &pair).map(|clause| &clause.action) {
            None => {}
            Some(Action::InsertAll) => result.push(source.clone()),
            Some(Action::Insert(set)) => result.push(assigned(&NOTHING, set, &pair)),
            Some(other) => panic!("{other:?}"),
        }
    }
    Ok(result)
}
