//! A command line that is wrong in a way that only its meaning shows: the exit status is 2, as for
//! one that cannot be read.

use std::fmt;

/// Error of the command line.
#[derive(Debug)]
pub struct Usage(String);

impl Usage {
    /// Makes an error of the command line.
    pub fn error(text: impl Into<String>) -> anyhow::Error {
        anyhow::Error::new(Usage(text.into()))
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}
