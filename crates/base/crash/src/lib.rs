//! Crash points: places in the code where a test makes the process die.
//!
//! The state that a killed process leaves depends on which of its stores were made: to its state
//! memory, to a ring of the guest, to a socket, to a device. Crash points stand between those
//! stores, `crash::point!("controller.record.written")`, each with a unique name. With the feature
//! `points` a test selects a point and a count of passes, at which the thread stops. Inside the
//! test's process the point panics (`Crashed`); the test catches the panic and continues with the
//! contents of the memory. In a separate process (environment variable [`VARIABLE`]) the point
//! kills the process by a signal.
//!
//! Without the feature a point compiles to nothing. Released programs are built without it.
#![forbid(unsafe_code)]

/// Environment variable that selects a point for a whole process. `name:count` kills the process at
/// the `count`th pass of the point, counted from 1, after a message on standard error. A path names
/// a file of such lines, from which each process that [begins](begin) removes and uses the first.
pub const VARIABLE: &str = "VNVME_CRASH";

/// Text on standard error before the name of the point at which the process dies.
pub const SAID: &str = "crash point ";

/// Defines a point at which a test may make the process die. The name is a unique string literal
/// that begins with the name of the crate.
#[macro_export]
#[cfg(feature = "points")]
macro_rules! point {
    ($name:literal) => {
        $crate::reached($name)
    };
}

/// Defines a point at which a test may make the process die.
#[macro_export]
#[cfg(not(feature = "points"))]
macro_rules! point {
    ($name:literal) => {};
}

#[cfg(feature = "points")]
mod points;
#[cfg(feature = "points")]
pub use points::{Crashed, arm, begin, disarm, passed, reached, then};

/// Starts counting passes of the point that [`VARIABLE`] selects. Called when the process begins.
#[cfg(not(feature = "points"))]
pub fn begin() {}
