//! Errors of a state memory.

use dma::{MapError, MemoryError};

/// Reason why a state memory cannot be created, read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// The file cannot be created or mapped, or no memory is left for its pages.
    #[error("the state has no memory")]
    Memory(#[from] MapError),
    /// The file is not a state memory.
    #[error("not a state memory")]
    Foreign,
    /// A newer version wrote the state, and marked it as unreadable for this version.
    #[error(
        "the state memory has version {version}, to be read by version {reader} or later: this one \
         reads {VERSION} at most",
        VERSION = crate::VERSION
    )]
    TooNew {
        /// Version of the state memory's layout.
        version: u32,
        /// Oldest layout version of programs that can read this layout.
        reader: u32,
    },
    /// The state was written by a version that is no longer supported.
    #[error(
        "the state memory has version {version}: this one reads {OLDEST_READ} at least",
        OLDEST_READ = crate::OLDEST_READ
    )]
    TooOld {
        /// Version of the state memory's layout.
        version: u32,
    },
    /// The content of the state memory is inconsistent.
    #[error("the state memory is damaged: {0}")]
    Damaged(&'static str),
    /// The table with this name is full.
    #[error("the state memory has no room for another {0}")]
    Full(&'static str),
    /// The byte range lies outside its section.
    #[error("out of the section's range")]
    OutOfRange,
}

impl From<MemoryError> for StateError {
    fn from(_: MemoryError) -> Self {
        // Sealed and mapped for writing: nothing else can be wrong.
        StateError::OutOfRange
    }
}
