//! Points in the code at which a test lets the process die.
//!
//! A killed process leaves behind the effects of its last store: to its state memory, to a ring of
//! the guest's, to a socket, to a device. Between such stores stand crash points,
//! `crash::point!("controller.record.written")`, each with its own name. With the feature `points`
//! a test chooses one of them, and the number of times to pass it first; then the thread stops
//! there. Within the test's process the stop is a panic that the test catches (`Crashed`), after
//! which the test continues with the memory as it is. In a separate process (environment variable
//! [`VARIABLE`]) the stop is an unhandled signal.
//!
//! Without the feature a point generates no code. Released programs are built without it.
#![forbid(unsafe_code)]

/// Environment variable that chooses a point of a whole process: `name:count` kills the process at
/// the point's `count`th passing, from 1 on, and reports the point on standard error. A value that
/// is the path of a file with such lines makes each process that [begins](begin) take the first
/// line out.
pub const VARIABLE: &str = "VNVME_CRASH";

/// Text on standard error before the name of the point at which the process dies.
pub const SAID: &str = "crash point ";

/// A point at which a test may let the process die. Its name is a string literal that no other
/// point has, and begins with the crate's.
#[macro_export]
#[cfg(feature = "points")]
macro_rules! point {
    ($name:literal) => {
        $crate::reached($name)
    };
}

/// A point at which a test may let the process die.
#[macro_export]
#[cfg(not(feature = "points"))]
macro_rules! point {
    ($name:literal) => {};
}

#[cfg(feature = "points")]
mod points;
#[cfg(feature = "points")]
pub use points::{Crashed, arm, begin, disarm, passed, reached, then};

/// The process begins: points that [`VARIABLE`] chooses count from now on.
#[cfg(not(feature = "points"))]
pub fn begin() {}
