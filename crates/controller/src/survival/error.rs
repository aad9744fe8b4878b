//! Why a controller cannot go on where another process has ended.

use crate::config::ConfigError;
use state_memory::StateError;

/// The controller of a process that has ended cannot be served: its client is to be disconnected,
/// and the controller made anew.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// Nothing was committed, or it was withdrawn because the state could not be written.
    #[error("the previous process has left no state")]
    Nothing,
    /// The state memory cannot be read.
    #[error(transparent)]
    State(#[from] StateError),
    /// The control state cannot be read.
    #[error("the previous process's state cannot be read: {0}")]
    Form(String),
    /// A newer version wrote it.
    #[error(
        "the previous process's state has version {version}, this program reads {newest} at most",
        newest = crate::STATE_VERSION
    )]
    TooNew {
        /// Version of the control state.
        version: u32,
    },
    /// The disk that is configured is another one than the host knows.
    #[error("the host knows a disk with {what} {before}, configured is {now}")]
    Differs {
        /// What differs.
        what: &'static str,
        /// What the host knows.
        before: String,
        /// What is configured.
        now: String,
    },
    /// A namespace that the host knows is not configured.
    #[error("the host knows namespace {0}, which is not configured")]
    NoNamespace(u32),
    /// A descriptor was not kept, or is gone.
    #[error("{what} was not kept")]
    NotKept {
        /// What it was.
        what: &'static str,
    },
    /// A window of guest memory cannot be mapped again.
    #[error("guest memory at {iova:#x} cannot be mapped again: {error}")]
    Window {
        /// Its first address.
        iova: u64,
        /// Why.
        error: dma::MapError,
    },
    /// The state contradicts itself.
    #[error("the previous process's state contradicts itself: {0}")]
    Contradiction(&'static str),
    /// What is configured cannot be made.
    #[error(transparent)]
    Config(#[from] ConfigError),
}
