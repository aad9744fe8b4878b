//! Log messages: their format, and standard error as their place.

pub mod format;
pub mod stderr;
