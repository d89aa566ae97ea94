//! `row-count`: rows of the touched partitions, their growth, and rows that the request adds.
//!
//! Rows are the record counts of live data files in the manifests, never summary totals (case O16), less what
//! delete files take away. Bounds are absolute: `no-worse` has
//! no meaning for them, growth compares with the base where that is wanted.

use mergeberg_kernel::evidence::Violation;
use mergeberg_kernel::reason::ReasonCode;

use super::CheckError;
use super::finding::Finding;
use super::subject::{ADDED, KEPT, Origins, REMOVED, Subject};

pub struct Bounds {
    pub min: Option<u64>,
    pub max: Option<u64>,
    pub min_growth: Option<f64>,
    pub max_growth: Option<f64>,
    pub min_added: Option<u64>,
    pub max_added: Option<u64>,
}

/// Row counts that bounds are held against.
struct Counts {
    rows: u64,
    base: u64,
    added: u64,
}

pub async fn run(subject: Subject, bounds: Bounds, parallelism: usize) -> Result<Finding, CheckError> {
    let live = subject.live_counts(parallelism).await?;
    let of = |origin: i32| live.get(&origin).copied().unwrap_or_default();
    let counts = Counts { rows: of(KEPT) + of(ADDED), base: of(KEPT) + of(REMOVED), added: of(ADDED) };
    let broken = broken(&counts, &bounds);
    let requests = match &subject.origins {
        Origins::Change { request } => vec![*request],
        Origins::Cars { requests, .. } => requests.clone(),
    };
    let mut measured = vec![
        ("rows".to_owned(), counts.rows.to_string()),
        ("base rows".to_owned(), counts.base.to_string()),
        ("added rows".to_owned(), counts.added.to_string()),
    ];
    if let Some(growth) = growth(&counts) {
        measured.push(("growth".to_owned(), format!("{growth:.4}")));
    }
    // An empty scope is told apart from zero rows in a scope that has some (rule E5).
    let scope = if counts.rows == 0 { "no rows".to_owned() } else { subject.scope.clone() };
    let violations = if broken.is_empty() {
        Vec::new()
    } else {
        vec![Violation { requests, with_base: false, count: broken.len() as u64, sample: broken }]
    };
    Ok(Finding::of(ReasonCode::RowCount, scope, measured, violations))
}

/// Candidate rows divided by base rows; `None` where the base has none.
fn growth(counts: &Counts) -> Option<f64> {
    (counts.base > 0).then(|| counts.rows as f64 / counts.base as f64)
}

/// The bounds that do not hold, in words. A minimum holds against zero rows as against any other number:
/// it is what guards an empty publish (rule E5).
fn broken(counts: &Counts, bounds: &Bounds) -> Vec<String> {
    let Bounds { min, max, min_growth, max_growth, min_added, max_added } = bounds;
    let Counts { rows, base, added } = counts;
    let mut broken = Vec::new();
    if let Some(min) = min.filter(|min| rows < min) {
        broken.push(format!("rows={rows} min={min}"));
    }
    if let Some(max) = max.filter(|max| rows > max) {
        broken.push(format!("rows={rows} max={max}"));
    }
    if let Some(min) = min_added.filter(|min| added < min) {
        broken.push(format!("added={added} min-added={min}"));
    }
    if let Some(max) = max_added.filter(|max| added > max) {
        broken.push(format!("added={added} max-added={max}"));
    }
    match growth(counts) {
        Some(growth) => {
            if let Some(min) = min_growth.filter(|min| growth < *min) {
                broken.push(format!("rows={rows} base={base} min-growth={min}"));
            }
            if let Some(max) = max_growth.filter(|max| growth > *max) {
                broken.push(format!("rows={rows} base={base} max-growth={max}"));
            }
        }
        // A new partition has no growth to bound; an empty one is no growth at all.
        None => {
            if let Some(min) = min_growth.filter(|min| *min > 0.0 && *rows == 0) {
                broken.push(format!("rows={rows} base={base} min-growth={min}"));
            }
        }
    }
    broken
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Bounds =
        Bounds { min: None, max: None, min_growth: None, max_growth: None, min_added: None, max_added: None };

    fn held(rows: u64, base: u64, added: u64, bounds: Bounds) -> bool {
        broken(&Counts { rows, base, added }, &bounds).is_empty()
    }

    #[test]
    fn e5_every_minimum_guards_an_empty_publish() {
        assert!(!held(0, 0, 0, Bounds { min: Some(1), ..NONE }));
        assert!(!held(0, 0, 0, Bounds { min_added: Some(1), ..NONE }));
        assert!(!held(0, 0, 0, Bounds { min_growth: Some(0.5), ..NONE }));
        assert!(held(0, 0, 0, Bounds { max: Some(10), max_growth: Some(2.0), ..NONE }));
        assert!(held(0, 0, 0, Bounds { min: Some(0), ..NONE }));
    }

    #[test]
    fn growth_is_bounded_where_there_was_something_to_grow() {
        let bounds = || Bounds { min_growth: Some(0.9), max_growth: Some(1.5), ..NONE };
        assert!(held(100, 100, 10, bounds()));
        assert!(!held(151, 100, 51, bounds()));
        assert!(!held(89, 100, 0, bounds()));
        assert!(held(7, 0, 7, bounds()));
    }

    #[test]
    fn bounds_are_inclusive() {
        let bounds = || Bounds { min: Some(5), max: Some(5), min_added: Some(1), max_added: Some(1), ..NONE };
        assert!(held(5, 4, 1, bounds()));
        assert!(!held(5, 4, 2, bounds()));
        assert!(!held(6, 4, 1, bounds()));
    }
}
