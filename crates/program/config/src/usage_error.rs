//! Errors in the meaning of a command line, for which the program exits with status 2, as for
//! syntax errors.

use std::fmt;

/// Error in the meaning of a command line, such as contradictory options.
#[derive(Debug)]
pub struct UsageError(String);

impl UsageError {
    /// Creates an error for a wrong command line.
    pub fn error(text: impl Into<String>) -> anyhow::Error {
        anyhow::Error::new(UsageError(text.into()))
    }
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}
