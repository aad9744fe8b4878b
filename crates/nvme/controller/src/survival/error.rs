//! Errors of restoring a controller from the state of another process.

use crate::config::ConfigError;
use state_memory::StateError;

/// Reason why a controller of the previous process cannot be restored. Its client has to be
/// disconnected, and the controller created anew.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The previous process committed no state, or withdrew it because it could not be written.
    #[error("the previous process has left no state")]
    Nothing,
    /// The state memory of the previous process is invalid.
    #[error(transparent)]
    State(#[from] StateError),
    /// The control state of the previous process cannot be parsed.
    #[error("the previous process's state cannot be read: {0}")]
    Form(String),
    /// A newer version of the program wrote the control state.
    #[error(
        "the previous process's state has version {version}, this program reads {newest} at most",
        newest = crate::STATE_VERSION
    )]
    TooNew {
        /// Version of the format in which the control state was written.
        version: u32,
    },
    /// The configured disk differs from the one that the host uses.
    #[error("the guest was shown a disk with {what} {before}, but {now} is configured")]
    Differs {
        /// Name of the property that differs, for the error message.
        what: &'static str,
        /// Value of the property that the host has seen.
        before: String,
        /// Value of the property in the configuration of this process.
        now: String,
    },
    /// A file descriptor of the previous process was not kept or is lost.
    #[error("restart state: {what} is missing")]
    NotKept {
        /// Name of the file descriptor that is missing.
        what: &'static str,
    },
    /// A window of guest memory cannot be mapped again.
    #[error("guest memory at {iova:#x} cannot be mapped again: {error}")]
    Window {
        /// First guest address (IOVA) of the window.
        iova: u64,
        /// Reason why the window cannot be mapped.
        error: dma::MapError,
    },
    /// Parts of the saved state contradict each other.
    #[error("the previous process's state contradicts itself: {0}")]
    Contradiction(&'static str),
    /// The configured controller cannot be created.
    #[error(transparent)]
    Config(#[from] ConfigError),
}
