//! What checks end with, and a program that is nothing but checks.

use std::process::ExitCode;

/// What a check ends with.
pub type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// An error unless `condition` holds.
pub fn ensure(condition: bool, otherwise: impl Into<Box<dyn std::error::Error>>) -> Outcome {
    if condition {
        Ok(())
    } else {
        Err(otherwise.into())
    }
}

/// The exit status of a program, which says what failed.
pub fn exit(program: &str, outcome: Outcome) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{program}: {error}");
            ExitCode::FAILURE
        }
    }
}
