//! Runs of a class's own command, as `request explain` shows them.

use super::explain::indent;
use crate::ledger::ExternalRunRow;
use crate::report::text::{Columns, NONE, count, duration, moment, one_line};

/// Runs that are shown, the newest; JSON has all.
const MAX_RUNS: usize = 10;
/// Lines of the newest run's output that are shown, the last ones; JSON has all that was kept.
const MAX_OUTPUT_LINES: usize = 20;

/// Nothing for a request without runs.
pub fn render(runs: &[ExternalRunRow]) -> String {
    let Some(last) = runs.last() else { return String::new() };
    let mut columns =
        Columns::new(&["run>", "started", "took>", "outcome", "status>", "base", "left", "what"]);
    let earlier = runs.len().saturating_sub(MAX_RUNS);
    let or_none = |text: Option<String>| text.unwrap_or_else(|| NONE.to_owned());
    for run in &runs[earlier..] {
        let took = run.ended_at_ms.zip(run.started_at_ms).map(|(end, start)| duration((end - start).max(0)));
        columns.push(vec![
            run.run.to_string(),
            or_none(run.started_at_ms.map(moment)),
            or_none(took),
            run.outcome.map_or("under way", |outcome| outcome.word()).to_owned(),
            or_none(run.status.map(|status| status.to_string())),
            or_none(run.base.map(|id| id.to_string())),
            or_none(run.head.map(|id| id.to_string())),
            or_none(run.text.as_deref().map(one_line)),
        ]);
    }
    let mut text = "\nruns of the class's own command\n".to_owned();
    if earlier > 0 {
        text.push_str(&format!("  {} before these with --json\n", count(earlier as u64, "run")));
    }
    text.push_str(&indent(&columns.render()));
    if let Some(output) = &last.output {
        let lines: Vec<&str> = output.lines().collect();
        text.push_str(&format!("\n  the end of what run {} printed\n", last.run));
        for line in lines.iter().skip(lines.len().saturating_sub(MAX_OUTPUT_LINES)) {
            text.push_str(&format!("    {}\n", one_line(line)));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::{Epoch, RefName, RequestId, SnapshotId, TableUuid};

    use super::*;
    use crate::ledger::ExternalOutcome;

    #[test]
    fn runs_are_shown_with_the_end_of_the_newest_ones_output() {
        assert_eq!(render(&[]), "");
        let run = |number: u32, outcome: Option<ExternalOutcome>, output: Option<String>| ExternalRunRow {
            request: RequestId(4),
            run: number,
            table_uuid: TableUuid::new("u"),
            pinned: SnapshotId(7),
            branch: RefName(format!("mergeberg/tmp/q/external/4-{number}")),
            epoch: Epoch(1),
            base: Some(SnapshotId(5)),
            head: (outcome == Some(ExternalOutcome::Done)).then_some(SnapshotId(9)),
            outcome,
            status: outcome.map(|_| 3),
            text: outcome.map(|_| "it ended with exit code 3".to_owned()),
            output,
            ordered_at_ms: 0,
            started_at_ms: Some(1_000),
            ended_at_ms: outcome.map(|_| 3_500),
        };
        let long: String = (0..40).map(|n| format!("line {n}\n")).collect();
        let text = render(&[
            run(1, Some(ExternalOutcome::Failed), Some("old".to_owned())),
            run(2, None, Some(long)),
        ]);
        assert!(text.contains("2.5 s") && text.contains("it ended with exit code 3"), "{text}");
        assert!(text.contains("under way") && !text.contains("old"), "{text}");
        assert!(
            text.contains("line 39") && text.contains("line 20") && !text.contains("line 19\n"),
            "{text}"
        );
        let many: Vec<ExternalRunRow> = (1..=12).map(|n| run(n, Some(ExternalOutcome::Done), None)).collect();
        assert!(render(&many).contains("2 runs before these with --json"), "{}", render(&many));
    }
}
