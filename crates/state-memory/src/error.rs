//! What can go wrong with a state memory.

use dma::{MapError, MemoryError};

/// A state memory cannot be made, read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// Its file cannot be made or mapped, or there is no memory left for its pages.
    #[error("the state has no memory")]
    Memory(#[from] MapError),
    /// The file is no state memory.
    #[error("the file is no state memory")]
    Foreign,
    /// A newer version wrote it, which says that this one cannot read it.
    #[error(
        "the state memory has version {version}, to be read by version {reader} or later: this one \
         reads {VERSION} at most",
        VERSION = crate::VERSION
    )]
    TooNew {
        /// Version of the layout.
        version: u32,
        /// The oldest version that can read it.
        reader: u32,
    },
    /// A version wrote it that is not read any more.
    #[error(
        "the state memory has version {version}: this one reads {OLDEST_READ} at least",
        OLDEST_READ = crate::OLDEST_READ
    )]
    TooOld {
        /// Version of the layout.
        version: u32,
    },
    /// It contradicts itself.
    #[error("the state memory is damaged: {0}")]
    Damaged(&'static str),
    /// There is no room left.
    #[error("the state memory has no room for another {0}")]
    Full(&'static str),
    /// An offset or a length is outside its section.
    #[error("out of the section's range")]
    OutOfRange,
}

impl From<MemoryError> for StateError {
    fn from(_: MemoryError) -> Self {
        // Sealed and mapped for writing: nothing else can be wrong.
        StateError::OutOfRange
    }
}
