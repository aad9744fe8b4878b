//! Why a worker ends other than by being asked to.

use rustix::io::Errno;
use std::time::Duration;

/// Why a worker could not be made, or ended; `E` is its front-ends' error.
#[derive(Debug, thiserror::Error)]
pub enum Error<E: std::error::Error + 'static> {
    /// The kernel refused what the loop cannot do without.
    #[error("{call}")]
    System {
        /// The system call.
        call: &'static str,
        /// Its error.
        #[source]
        errno: Errno,
    },
    /// The volumes did not make everything durable in time at the end.
    #[error("the volumes did not become durable within {0:?}")]
    NotDurable(Duration),
    /// Volumes that may hang (FUSE, network file systems) did not answer in time at the end: these.
    /// What was written to them and not flushed may not be durable; all else is.
    #[error(
        "given up, as nothing of it was answered: {0}; what was not flushed may not be durable"
    )]
    GivenUp(String),
    /// A front-end could not end as it should.
    #[error(transparent)]
    Frontend(E),
}

impl<E: std::error::Error + 'static> Error<E> {
    pub(crate) fn system(call: &'static str) -> impl Fn(Errno) -> Self {
        move |errno| Error::System { call, errno }
    }
}
