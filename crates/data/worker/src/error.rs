//! Errors that end a worker.

use rustix::io::Errno;
use std::time::Duration;

/// Reason why a worker could not be created, or ended early; `E` is its front-ends' error.
#[derive(Debug, thiserror::Error)]
pub enum Error<E: std::error::Error + 'static> {
    /// The kernel refused a system call that the loop depends on.
    #[error("{call}")]
    System {
        /// Name of the system call that failed.
        call: &'static str,
        /// Error number of the system call.
        #[source]
        errno: Errno,
    },
    /// The volumes did not make all data durable within this time limit at the end.
    #[error("the volumes did not become durable within {0:?}")]
    NotDurable(Duration),
    /// Names of volumes that may hang (FUSE, network file systems) and did not answer within the
    /// limit at the end. Data written to them and not flushed may not be durable; all other data
    /// is.
    #[error("gave up after no request was answered: {0}; unflushed writes may not be durable")]
    GivenUp(String),
    /// A front-end could not be closed in an orderly way.
    #[error(transparent)]
    Frontend(E),
}

impl<E: std::error::Error + 'static> Error<E> {
    pub(crate) fn system(call: &'static str) -> impl Fn(Errno) -> Self {
        move |errno| Error::System { call, errno }
    }
}
