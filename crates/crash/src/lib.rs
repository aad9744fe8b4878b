//! Points in the code at which a test lets the process die.
//!
//! What a process leaves behind when it is killed is decided between two of its stores: to its
//! state memory, to a ring of the guest's, to a socket, to a device. Between them stand crash
//! points, `crash::point!("controller.record.written")`, each with a name of its own. With the
//! feature `points` a test chooses one of them, and how often it is passed before: then the thread
//! stops there. In process that is a panic which the test catches (`Crashed`), and it goes on
//! with what the memory holds; in a process of its own (the environment variable [`VARIABLE`]) it
//! is a signal that nobody handles.
//!
//! Without the feature a point is no code at all. No program that is given away has it.
#![forbid(unsafe_code)]

/// The environment variable that chooses a point of a whole process: `name:count`, dies at the
/// point's `count`th passing, from 1 on, and says so on standard error. Or the path of a file with
/// such lines: each process that [begins](begin) takes the first of them out.
pub const VARIABLE: &str = "VNVME_CRASH";

/// What stands on standard error before the name of the point at which the process dies.
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
