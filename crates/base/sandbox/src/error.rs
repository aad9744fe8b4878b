//! Errors of entering the sandbox.

use std::io;

/// Reason why the sandbox could not be entered although the kernel supports it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("sandbox: {what}")]
    System {
        /// Part of the sandbox that has failed.
        what: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
    /// The Landlock rules for files could not be enforced.
    #[error("sandbox: files (Landlock)")]
    Files(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The seccomp filter of system calls could not be installed.
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
