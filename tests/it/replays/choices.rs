//! Random rows and operations.

use super::model::{Action, Clause, Condition, Operation, Row, Side, Term, Value, When};
use crate::oracle::random::Random;

pub fn rows(random: &mut Random, most: usize) -> Vec<Row> {
    (0..random.below(most + 1)).map(|_| row(random)).collect()
}

pub fn row(random: &mut Random) -> Row {
    [0, 1, 2, 3].map(|at| value(random, at))
}

fn value(random: &mut Random, column: usize) -> Value {
    if random.chance(12) {
        return Value::Null;
    }
    match column {
        0 => Value::Int(small(random, 12)),
        1 => Value::Int(20 + small(random, 3)),
        2 => Value::Text((*random.pick(&["new", "paid", "void"])).to_owned()),
        _ => Value::Int(small(random, 50) - 10),
    }
}

fn small(random: &mut Random, below: usize) -> i64 {
    i64::try_from(random.below(below)).unwrap()
}

/// Of the kind of the column: a number or a text.
fn term(random: &mut Random, column: usize, sides: &[Side]) -> Term {
    let column_of = |random: &mut Random| {
        let at = if column == 2 { 2 } else { *random.pick(&[0, 1, 3]) };
        Term::Column(*random.pick(sides), at)
    };
    match random.below(4) {
        0 => Term::Literal(value(random, column)),
        1 if column != 2 => Term::Plus(Box::new(column_of(random)), small(random, 5) - 2),
        _ => column_of(random),
    }
}

pub fn condition(random: &mut Random, sides: &[Side], feed: bool, depth: usize) -> Condition {
    let at = random.below(4);
    let column = Term::Column(*random.pick(sides), at);
    match random.below(if depth == 0 { 6 } else { 9 }) {
        0..3 => {
            let op = *random.pick(&["=", "<>", "<", "<=", ">", ">=", "="]);
            Condition::Compare(column, op, term(random, at, sides))
        }
        3 => Condition::IsNull(column),
        4 => {
            let count = 1 + random.below(3);
            Condition::In(column, (0..count).map(|_| value(random, at)).collect())
        }
        5 if feed => Condition::InFeed(column, at),
        5 => Condition::Compare(column, "<=>", term(random, at, sides)),
        6 => Condition::And(
            Box::new(condition(random, sides, feed, depth - 1)),
            Box::new(condition(random, sides, feed, depth - 1)),
        ),
        7 => Condition::Or(
            Box::new(condition(random, sides, feed, depth - 1)),
            Box::new(condition(random, sides, feed, depth - 1)),
        ),
        _ => Condition::Not(Box::new(condition(random, sides, feed, depth - 1))),
    }
}

fn set(random: &mut Random, sides: &[Side]) -> Vec<(usize, Term)> {
    let mut columns: Vec<usize> = (0..4).filter(|_| random.chance(40)).collect();
    if columns.is_empty() {
        columns.push(random.below(4));
    }
    columns.into_iter().map(|at| (at, term(random, at, sides))).collect()
}

pub fn operation(random: &mut Random) -> Operation {
    let own = [Side::Target];
    match random.below(10) {
        0..2 => Operation::Delete(condition(random, &own, true, 2)),
        2..5 => {
            let filter = (!random.chance(10)).then(|| condition(random, &own, true, 2));
            Operation::Update(set(random, &own), filter)
        }
        5 => {
            let mut days = vec![20 + small(random, 3)];
            if random.chance(40) {
                days.push(20 + small(random, 3));
            }
            Operation::Overwrite(days)
        }
        _ => merge(random),
    }
}

fn merge(random: &mut Random) -> Operation {
    let both = [Side::Target, Side::Source];
    let key = Condition::Compare(
        Term::Column(Side::Target, 0),
        if random.chance(20) { "<=>" } else { "=" },
        Term::Column(Side::Source, 0),
    );
    let on = match random.below(4) {
        0 => {
            let day = Condition::Compare(
                Term::Column(Side::Target, 1),
                "=",
                if random.chance(50) {
                    Term::Column(Side::Source, 1)
                } else {
                    term(random, 1, &[Side::Source])
                },
            );
            Condition::And(Box::new(key), Box::new(day))
        }
        1 => Condition::And(Box::new(key), Box::new(condition(random, &both, false, 1))),
        _ => key,
    };
    let mut clauses = Vec::new();
    for when in [When::Matched, When::NotMatched, When::NotMatchedBySource] {
        let most = if when == When::NotMatchedBySource { 2 } else { 3 };
        for _ in 0..random.below(most + 1) {
            let sides: &[Side] = match when {
                When::Matched => &both,
                When::NotMatched => &[Side::Source],
                When::NotMatchedBySource => &[Side::Target],
            };
            let condition = random.chance(60).then(|| condition(random, sides, false, 1));
            let last = condition.is_none();
            let action = match (when, random.below(3)) {
                (When::Matched | When::NotMatchedBySource, 0) => Action::Delete,
                (When::Matched, 1) => Action::UpdateAll,
                (When::Matched | When::NotMatchedBySource, _) => Action::Update(set(random, sides)),
                (When::NotMatched, 0) => Action::Insert(set(random, sides)),
                (When::NotMatched, _) => Action::InsertAll,
            };
            clauses.push(Clause { when, condition, action });
            // Spark takes a clause without condition as the last of its kind only.
            if last {
                break;
            }
        }
    }
    if clauses.is_empty() {
        clauses.push(Clause { when: When::NotMatched, condition: None, action: Action::InsertAll });
    }
    Operation::Merge { on, clauses }
}
