//! Errors of entering the sandbox.

use std::io;

/// Part of the sandbox that the kernel supports, and did not enforce.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("sandbox: {what}")]
    System {
        /// Failed part.
        what: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
    /// Landlock could not be enforced.
    #[error("sandbox: files (Landlock)")]
    Files(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// seccomp could not be enforced.
    #[error("sandbox: system calls (seccomp)")]
    Calls(#[source] seccompiler::Error),
}

impl Error {
    pub(crate) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::System {
            what,
            source: source.into(),
        }
    }
}

impl From<seccompiler::Error> for Error {
    fn from(error: seccompiler::Error) -> Self {
        Self::Calls(error)
    }
}

impl From<seccompiler::BackendError> for Error {
    fn from(error: seccompiler::BackendError) -> Self {
        Self::Calls(error.into())
    }
}
