//! The nearest known name to one that is not known, for messages. Only a hint: names are data and match
//! exactly everywhere (case O33).

/// Words this far apart, in edits, are not taken for a slip of the pen.
const MAX_EDITS: usize = 3;

/// The candidate that `wanted` was probably meant to be.
///
/// First one that differs only by quotes, letter case or blanks at its ends; then the one with the fewest
/// edits, if they are few for the length of the name.
pub fn nearest<'a>(wanted: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain_wanted = plain(wanted);
    let mut best: Option<(usize, &str)> = None;
    for candidate in candidates {
        let plain_candidate = plain(candidate);
        let edits =
            if plain_candidate == plain_wanted { 0 } else { distance(&plain_wanted, &plain_candidate) };
        let allowed = MAX_EDITS.min(1 + plain_wanted.chars().count() / 4);
        if edits <= allowed && best.is_none_or(|(least, name)| (edits, candidate) < (least, name)) {
            best = Some((edits, candidate));
        }
    }
    best.map(|(_, name)| name)
}

/// The name without what people and shells add to it.
fn plain(name: &str) -> String {
    name.trim().trim_matches(['\'', '"', '`']).trim().to_lowercase()
}

/// Edits (insert, delete, replace, swap of neighbours) from `a` to `b`: optimal string alignment.
fn distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().collect();
    let b: Vec<char> = b.chars().collect();
    // Row i, column j: edits from the first i characters of `a` to the first j of `b`. The first row and
    // column are right already; the others are overwritten.
    let mut rows: Vec<Vec<usize>> = (0..=a.len()).map(|i| (i..=i + b.len()).collect()).collect();
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = least;
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_pen_is_recognised() {
        let known = ["ingest/shard-07", "ingest/shard-12", "main"];
        assert_eq!(nearest("ingst/shard-07", known), Some("ingest/shard-07"));
        assert_eq!(nearest("ingest/shard-70", known), Some("ingest/shard-07"));
        assert_eq!(nearest("mian", known), Some("main"));
    }

    #[test]
    fn quotes_case_and_blanks_are_near() {
        let known = ["audit-branch", "other"];
        for wanted in ["'audit-branch'", "`audit-branch`", "Audit-Branch", "audit-branch "] {
            assert_eq!(nearest(wanted, known), Some("audit-branch"), "{wanted}");
        }
    }

    #[test]
    fn a_quoted_name_that_exists_is_offered_for_the_plain_one() {
        assert_eq!(nearest("audit-branch", ["'audit-branch'"]), Some("'audit-branch'"));
    }

    #[test]
    fn far_names_are_not_offered() {
        assert_eq!(nearest("feature/new", ["ingest/a", "main"]), None);
        assert_eq!(nearest("x", ["main", "yz"]), None);
        assert_eq!(nearest("anything", []), None);
    }
}
