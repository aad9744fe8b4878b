//! What is printed: to standard output, whose reader may go away (`vnvme-bench --report | head`).
//! The standard library's `println!` panics then; [`outln!`](crate::outln) returns an error
//! instead.

use std::io::{self, Write};

/// Standard output could not be written.
#[derive(Debug)]
pub struct OutputError(io::Error);

impl std::fmt::Display for OutputError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "standard output: {}", self.0)
    }
}

impl std::error::Error for OutputError {}

impl OutputError {
    /// Its reader has gone.
    pub fn is_closed(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Prints a line.
pub fn line(text: std::fmt::Arguments<'_>) -> Result<(), OutputError> {
    let mut stdout = io::stdout().lock();
    let written = stdout
        .write_fmt(text)
        .and_then(|()| stdout.write_all(b"\n"));
    // No line is left in the buffer for the end of the process, which says nothing of errors.
    written.and_then(|()| stdout.flush()).map_err(OutputError)
}

/// As `println!`, in a function that returns the error.
#[macro_export]
macro_rules! outln {
    ($($text:tt)*) => {
        $crate::output::line(format_args!($($text)*))?
    };
}
