//! Result type of checks, and exit status of a program that consists of checks.

use std::process::ExitCode;

/// Result of a check.
pub type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// An error unless `condition` holds.
pub fn ensure(condition: bool, otherwise: impl Into<Box<dyn std::error::Error>>) -> Outcome {
    if condition {
        Ok(())
    } else {
        Err(otherwise.into())
    }
}

/// Returns the exit status of a program, after printing its error.
pub fn exit(program: &str, outcome: Outcome) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{program}: {error}");
            ExitCode::FAILURE
        }
    }
}
