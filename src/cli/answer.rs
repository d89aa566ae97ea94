//! What a command gives back: text for people, JSON for programs, an exit code. Commands print nothing
//! themselves, so each can be tested by its answer.

use std::io::{IsTerminal as _, Write as _};

use serde::Serialize;

use super::exit::Exit;
use crate::error::UserError;

#[derive(Debug, PartialEq)]
pub struct Answer {
    /// Whole lines.
    pub text: String,
    pub json: serde_json::Value,
    pub exit: Exit,
}

impl Answer {
    pub fn new(text: impl Into<String>, json: impl Serialize) -> Self {
        let json = serde_json::to_value(json).unwrap_or_default();
        Self { text: text.into(), json, exit: Exit::Ok }
    }

    #[must_use]
    pub fn with_exit(mut self, exit: Exit) -> Self {
        self.exit = exit;
        self
    }
}

/// Prints the answer on stdout, or the error on stderr.
pub fn print(outcome: &Result<Answer, UserError>, json: bool) -> Exit {
    match outcome {
        Ok(answer) => {
            let mut text = if json { answer.json.to_string() } else { answer.text.clone() };
            if !text.is_empty() && !text.ends_with('\n') {
                text.push('\n');
            }
            // A reader that went away (`| head`) is no fault of the command.
            let _ = std::io::stdout().write_all(text.as_bytes());
            let _ = std::io::stdout().flush();
            answer.exit
        }
        Err(error) => {
            print_error(error, json);
            Exit::of_error(error.code)
        }
    }
}

pub fn print_error(error: &UserError, json: bool) {
    let text = if json { error.to_json() } else { colour_errors(&error.render(), wants_colour()) };
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// A terminal, and nobody asked for none (no-color.org).
pub(super) fn wants_colour() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

fn colour_errors(text: &str, colour: bool) -> String {
    match text.strip_prefix("error:") {
        Some(rest) if colour => {
            let style = clap::builder::styling::AnsiColor::Red.on_default().bold();
            format!("{style}error:{style:#}{rest}")
        }
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_word_error_is_coloured_and_only_on_a_terminal() {
        assert_eq!(colour_errors("error: x\n  next: y", false), "error: x\n  next: y");
        assert_eq!(colour_errors("error: x", true), "\u{1b}[1m\u{1b}[31merror:\u{1b}[0m x");
    }
}
