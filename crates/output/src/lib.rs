//! Output of commands to standard output, whose reader may go away (`vnvme stats ... | head`).
//!
//! The standard library's `println!` panics then. [`outln!`] returns an error instead, which `main`
//! turns into the end that shells expect: by SIGPIPE, without a message ([`end_quietly`]).
//!
//! *Out of scope.* Logs, tables, progress. There is no unsafe code.
//!
//! ```
//! use output::{OutputError, outln};
//!
//! fn hello(name: &str) -> Result<(), OutputError> {
//!     outln!("hello, {name}");
//!     Ok(())
//! }
//! # hello("world").unwrap();
//! ```
#![forbid(unsafe_code)]

use signal_hook::consts::SIGPIPE;
use std::io::{self, Write};
use std::process::ExitCode;

/// Error: standard output could not be written.
#[derive(Debug)]
pub struct OutputError(io::Error);

impl std::fmt::Display for OutputError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "standard output: {}", self.0)
    }
}

impl std::error::Error for OutputError {}

impl OutputError {
    /// Returns whether the reader of standard output has gone away.
    pub fn is_closed(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Prints a line to standard output; called by [`outln!`].
///
/// # Errors
/// [`OutputError`] when standard output cannot be written, for example because its reader has gone
/// away.
pub fn line(text: std::fmt::Arguments<'_>) -> Result<(), OutputError> {
    let mut stdout = io::stdout().lock();
    let written = stdout
        .write_fmt(text)
        .and_then(|()| stdout.write_all(b"\n"));
    // No line is left in the buffer for the end of the process, which says nothing of errors.
    written.and_then(|()| stdout.flush()).map_err(OutputError)
}

/// Prints a line like `println!`, in a function that returns the error.
#[macro_export]
macro_rules! outln {
    ($($text:tt)*) => {
        $crate::line(format_args!($($text)*))?
    };
}

/// Ends the process in the way that is usual after writing to a closed pipe: by SIGPIPE, which a
/// shell reports as status 141.
pub fn end_quietly() -> ExitCode {
    // The runtime ignores the signal; this restores what it does by default, and raises it.
    let _ = signal_hook::low_level::emulate_default_handler(SIGPIPE);
    ExitCode::from(128 + SIGPIPE as u8)
}
