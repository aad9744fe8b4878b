//! Standard output of commands, for readers that may disappear (`vnvme stats ... | head`).
//!
//! The standard library's `println!` panics in that case. [`outln!`] returns an error instead, with
//! which `main` ends the process as shells expect: by SIGPIPE, without a message ([`end_quietly`]).
//!
//! *Limits.* Logs, tables and progress are elsewhere. There is no unsafe code.
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
    /// Returns whether the reader has closed standard output.
    pub fn is_closed(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Prints a line; called by [`outln!`].
///
/// # Errors
/// Standard output cannot be written, for example because its reader has closed it.
pub fn line(text: std::fmt::Arguments<'_>) -> Result<(), OutputError> {
    let mut stdout = io::stdout().lock();
    let written = stdout
        .write_fmt(text)
        .and_then(|()| stdout.write_all(b"\n"));
    // The line must not stay in the buffer until the end of the process, where errors would be
    // ignored.
    written.and_then(|()| stdout.flush()).map_err(OutputError)
}

/// Prints like `println!`, in a function that returns the error.
#[macro_export]
macro_rules! outln {
    ($($text:tt)*) => {
        $crate::line(format_args!($($text)*))?
    };
}

/// Ends the process like a write to a pipe without a reader: by SIGPIPE, status 141 in a shell.
pub fn end_quietly() -> ExitCode {
    // The runtime ignores the signal; this restores its default action, and raises it.
    let _ = signal_hook::low_level::emulate_default_handler(SIGPIPE);
    ExitCode::from(128 + SIGPIPE as u8)
}
