//! The trace of a run, and counts of its events.

use std::collections::BTreeMap;
use std::fmt::Write;

/// Lines that describe a run, if they are wanted, and the number of events of each kind.
#[derive(Debug, Default)]
pub struct Trace {
    text: Option<String>,
    /// Number of events by name.
    pub counts: BTreeMap<&'static str, u64>,
    prefix: String,
}

impl Trace {
    /// Creates a trace that keeps its lines if `keeps_text`.
    pub fn new(keeps_text: bool) -> Self {
        Self {
            text: keeps_text.then(String::new),
            ..Self::default()
        }
    }

    /// Sets the text with which the next lines begin.
    pub fn set_prefix(&mut self, prefix: impl FnOnce() -> String) {
        if self.text.is_some() {
            self.prefix = prefix();
        }
    }

    /// Adds a line. `line` is called only when lines are kept.
    pub fn say(&mut self, line: impl FnOnce() -> String) {
        if let Some(text) = &mut self.text {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{} {}", self.prefix, line());
        }
    }

    /// Counts an event.
    pub fn count(&mut self, name: &'static str) {
        *self.counts.entry(name).or_default() += 1;
    }

    /// Returns the lines.
    pub fn into_text(self) -> String {
        self.text.unwrap_or_default()
    }
}
