//! Errors of restoring a controller from the state of another process.

use crate::config::ConfigError;
use state_memory::StateError;

/// Reason why the controller of a process that has ended cannot be restored: its client has to be
/// disconnected, and the controller created anew.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// No state was committed, or it was withdrawn because it could not be written.
    #[error("the previous process has left no state")]
    Nothing,
    /// The state memory cannot be read.
    #[error(transparent)]
    State(#[from] StateError),
    /// The control state cannot be read.
    #[error("the previous process's state cannot be read: {0}")]
    Form(String),
    /// A newer version wrote the state.
    #[error(
        "the previous process's state has version {version}, this program reads {newest} at most",
        newest = crate::STATE_VERSION
    )]
    TooNew {
        /// Version of the control state.
        version: u32,
    },
    /// The configured disk differs from the one that the host knows.
    #[error("the guest was shown a disk with {what} {before}, but {now} is configured")]
    Differs {
        /// The property that differs.
        what: &'static str,
        /// Value that the host knows.
        before: String,
        /// Configured value.
        now: String,
    },
    /// A namespace that the host knows is not configured.
    #[error("the host knows namespace {0}, which is not configured")]
    NoNamespace(u32),
    /// A descriptor was not kept, or is lost.
    #[error("restart state: {what} is missing")]
    NotKept {
        /// Name of the descriptor.
        what: &'static str,
    },
    /// A window of guest memory cannot be mapped again.
    #[error("guest memory at {iova:#x} cannot be mapped again: {error}")]
    Window {
        /// First address of the window.
        iova: u64,
        /// Cause of the failure.
        error: dma::MapError,
    },
    /// The state contradicts itself.
    #[error("the previous process's state contradicts itself: {0}")]
    Contradiction(&'static str),
    /// The configured controller cannot be created.
    #[error(transparent)]
    Config(#[from] ConfigError),
}
