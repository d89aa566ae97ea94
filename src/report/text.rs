//! Words and columns that lists, views and reports share.

use chrono::{SecondsFormat, TimeZone as _, Utc};
use comfy_table::{Cell, CellAlignment, ContentArrangement, presets};

/// Blanks between two columns.
const GUTTER: u16 = 2;

/// Shown where there is no value.
pub const NONE: &str = "-";

/// A length of time in the two largest units that matter: `350 ms`, `12.3 s`, `4 min 05 s`, `2 h 03 min`.
pub fn duration(ms: i64) -> String {
    let ms = ms.max(0);
    let seconds = ms / 1_000;
    if ms < 1_000 {
        format!("{ms} ms")
    } else if ms < 60_000 {
        format!("{seconds}.{} s", ms % 1_000 / 100)
    } else if seconds < 3_600 {
        format!("{} min {:02} s", seconds / 60, seconds % 60)
    } else if seconds < 86_400 {
        format!("{} h {:02} min", seconds / 3_600, seconds % 3_600 / 60)
    } else {
        format!("{} d {:02} h", seconds / 86_400, seconds % 86_400 / 3_600)
    }
}

pub fn opt_duration(ms: Option<i64>) -> String {
    ms.map_or_else(|| NONE.to_owned(), duration)
}

/// A moment in UTC to the second.
pub fn moment(ms: i64) -> String {
    match Utc.timestamp_millis_opt(ms).single() {
        Some(time) => time.to_rfc3339_opts(SecondsFormat::Secs, true),
        None => format!("{ms} ms"),
    }
}

/// `1 row`, `2 rows`.
pub fn count(number: u64, one: &str) -> String {
    if number == 1 { format!("1 {one}") } else { format!("{number} {one}s") }
}

/// Columns without borders. Cells whose header ends in `>` are aligned to the right.
#[derive(Debug)]
pub struct Columns {
    headers: Vec<String>,
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Columns {
    pub fn new<S: AsRef<str>>(headers: &[S]) -> Self {
        let right = headers.iter().map(|header| header.as_ref().ends_with('>')).collect();
        let headers = headers.iter().map(|header| header.as_ref().trim_end_matches('>').to_owned()).collect();
        Self { headers, right, rows: Vec::new() }
    }

    pub fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    /// Lines without trailing blanks, each ended. `paint` may colour a cell; it must not change its width.
    pub fn render(&self) -> String {
        let mut table = comfy_table::Table::new();
        table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(self.headers.iter().enumerate().map(|(at, text)| self.cell(at, text)));
        for row in &self.rows {
            table.add_row(row.iter().enumerate().map(|(at, text)| self.cell(at, text)));
        }
        for column in table.column_iter_mut() {
            column.set_padding((0, GUTTER));
        }
        let mut text = String::new();
        for line in table.lines() {
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }

    /// The same as a Markdown table.
    pub fn markdown(&self) -> String {
        let line = |cells: &[String]| {
            let cells: Vec<String> = cells.iter().map(|cell| escape_markdown(cell)).collect();
            format!("| {} |\n", cells.join(" | "))
        };
        let rule: Vec<&str> = self.right.iter().map(|right| if *right { "---:" } else { "---" }).collect();
        let mut text = line(&self.headers);
        text.push_str(&format!("|{}|\n", rule.join("|")));
        for row in &self.rows {
            text.push_str(&line(row));
        }
        text
    }

    fn cell(&self, at: usize, text: &str) -> Cell {
        let right = self.right.get(at).copied().unwrap_or(false);
        let alignment = if right { CellAlignment::Right } else { CellAlignment::Left };
        Cell::new(one_line(text)).set_alignment(alignment)
    }
}

/// Names come from others and may hold anything: no control character reaches a terminal.
pub fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

fn escape_markdown(text: &str) -> String {
    one_line(text).replace('\\', "\\\\").replace('|', "\\|")
}

/// `key   value` lines with the values in one column.
pub fn key_values(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(key, _)| key.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for (key, value) in pairs {
        text.push_str(format!("{key:<width$}  {}", one_line(value)).trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_well_at_every_size() {
        for (ms, text) in [
            (-5, "0 ms"),
            (350, "350 ms"),
            (1_000, "1.0 s"),
            (12_399, "12.3 s"),
            (245_000, "4 min 05 s"),
            (7_380_000, "2 h 03 min"),
            (277_200_000, "3 d 05 h"),
        ] {
            assert_eq!(duration(ms), text);
        }
    }

    #[test]
    fn columns_align_numbers_right_and_end_without_blanks() {
        let mut columns = Columns::new(&["id>", "branch", "state"]);
        columns.push(vec!["7".into(), "ingest/ü".into(), "queued".into()]);
        columns.push(vec!["12".into(), "x".into(), String::new()]);
        assert_eq!(columns.render(), "id  branch    state\n 7  ingest/ü  queued\n12  x\n");
        assert_eq!(
            columns.markdown(),
            "| id | branch | state |\n|---:|---|---|\n| 7 | ingest/ü | queued |\n| 12 | x |  |\n"
        );
    }

    #[test]
    fn hostile_names_cannot_reach_the_terminal_or_break_a_table() {
        let mut columns = Columns::new(&["branch"]);
        columns.push(vec!["a\u{1b}[31m|b\nc".into()]);
        assert_eq!(columns.render(), "branch\na\u{fffd}[31m|b\u{fffd}c\n");
        assert!(columns.markdown().ends_with("| a\u{fffd}[31m\\|b\u{fffd}c |\n"));
    }

    #[test]
    fn moments_are_utc() {
        assert_eq!(moment(1_376_971_200_000), "2013-08-20T04:00:00Z");
    }
}
