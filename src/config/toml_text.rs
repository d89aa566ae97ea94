//! Errors of the TOML reader in the words of the file: line, section, key, and what to write instead.

use super::ConfigError;
use crate::near::nearest;

/// `error` of reading `text`, which stands in `file`.
pub fn describe(file: &str, text: &str, error: &toml::de::Error) -> ConfigError {
    let at = error.span().map(|span| span.start).unwrap_or(0);
    let place = Place::of(text, at);
    let message = error.message().trim();
    let (message, next) = in_words(&place, message);
    ConfigError::Wrong { location: format!("{file}:{}", place.line), message, next }
}

/// The line of a section's header, from 1. `None`: it is written in another way.
pub fn line_of_section(text: &str, section: &str) -> Option<usize> {
    text.lines().position(|line| line.split('#').next().unwrap_or(line).trim() == section).map(|at| at + 1)
}

/// Where in the file something is.
struct Place<'a> {
    /// From 1.
    line: usize,
    /// `[worker]`, `[[check]]`; `None` before the first section.
    section: Option<&'a str>,
    /// The key of a `key = value` line.
    key: Option<&'a str>,
}

impl<'a> Place<'a> {
    fn of(text: &'a str, at: usize) -> Self {
        let mut line = 0;
        let mut section = None;
        let mut key = None;
        let mut start = 0;
        for content in text.split_inclusive('\n') {
            line += 1;
            let trimmed = content.trim();
            let header = trimmed.starts_with('[') && !trimmed.contains('=');
            if header {
                section = Some(trimmed.split('#').next().unwrap_or(trimmed).trim());
            }
            key = if header { None } else { trimmed.split_once('=').map(|(key, _)| key.trim()) };
            start += content.len();
            if at < start {
                break;
            }
        }
        Self { line: line.max(1), section, key }
    }

    fn in_section(&self) -> String {
        self.section.map(|section| format!(" in {section}")).unwrap_or_default()
    }
}

/// Message and next step. serde words the problem; its words are stable and are taken apart here alone.
/// What is not recognised is passed on as it is.
fn in_words(place: &Place<'_>, message: &str) -> (String, String) {
    // "check 'x': unknown field ..." keeps its beginning.
    let (head, core) = match message.find("unknown field `").or_else(|| message.find("unknown variant `")) {
        Some(at) => message.split_at(at),
        None => ("", message),
    };
    let names = quoted(core);
    if core.starts_with("unknown field `") {
        let (wanted, mut known) = match names.split_first() {
            Some((first, rest)) => (*first, rest.to_vec()),
            None => ("", Vec::new()),
        };
        known.sort_unstable();
        // serde's span for a mistyped section is its header, which is then no section.
        let section = match place.section {
            Some(section) if section.trim_matches(['[', ']']) == wanted => String::new(),
            _ => place.in_section(),
        };
        return (format!("{head}unknown key '{wanted}'{section}"), suggestion(wanted, &known));
    }
    if core.starts_with("unknown variant `") {
        let wanted = names.first().copied().unwrap_or_default();
        let known = names.get(1..).unwrap_or_default().to_vec();
        let key = place.key.map(|key| format!("'{key}'{}: ", place.in_section())).unwrap_or_default();
        let next = match nearest(wanted, known.iter().copied()) {
            Some(near) => format!("did you mean '{near}'? possible: {}", known.join(", ")),
            None => format!("write one of: {}", known.join(", ")),
        };
        return (format!("{key}{head}unknown value '{wanted}'"), next);
    }
    if let Some(key) = message.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
        let section = place.section.unwrap_or("the file");
        return (format!("{section} lacks the key '{key}'"), format!("add {key} = ..."));
    }
    match place.key {
        Some(key) => (
            format!("'{key}'{}: {message}", place.in_section()),
            format!("correct the value of '{key}' on line {}", place.line),
        ),
        None => (message.to_owned(), format!("correct line {}", place.line)),
    }
}

fn suggestion(wanted: &str, known: &[&str]) -> String {
    let list = known.join(", ");
    match nearest(wanted, known.iter().copied()) {
        Some(near) => format!("did you mean '{near}'? known here: {list}"),
        None if known.is_empty() => "remove it".to_owned(),
        None => format!("remove it; known here: {list}"),
    }
}

/// The words between back-ticks, in order.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}
