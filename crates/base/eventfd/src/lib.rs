//! Eventfds received from clients: verified to be eventfds, and signalled without ever blocking.
//!
//! *Purpose.* An interrupt ends in an eventfd of the VMM. The VMM shares the file description: it
//! can clear O_NONBLOCK at any time and let the counter run full. A write(2) then blocks the
//! thread, which also serves other guests. Setting the flag again, or calling poll(2) first, only
//! shortens the time window. This crate therefore does not write: the kernel signals the eventfd
//! itself, as it does when asynchronous I/O has completed (IOCB_FLAG_RESFD, io_submit(2)). Its
//! `eventfd_signal` adds to the counter up to the maximum and returns; it checks no flag and waits
//! for nothing. docs/tuning.md lists the costs of this way and the alternatives.
//!
//! *Scope.* Eventfds, and the kernel's asynchronous I/O. Queues, protocols and guests are out of
//! scope. `unsafe` is confined to `aio`.
//!
//! Each thread that signals has a context of its own, created by [`prepare`].
//!
//! ```
//! use eventfd::ClientEventfd;
//! use rustix::event::{EventfdFlags, eventfd};
//!
//! eventfd::prepare()?;
//! // What the client sends. Its counter is full, and the descriptor would block.
//! let theirs = eventfd(0, EventfdFlags::CLOEXEC)?;
//! rustix::io::write(&theirs, &(u64::MAX - 1).to_ne_bytes())?;
//! ClientEventfd::new(theirs)?.signal();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

mod aio;

use rustix::io::Errno;
use std::cell::OnceCell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

thread_local! {
    static CONTEXT: OnceCell<aio::Context> = const { OnceCell::new() };
}

/// Reason why this thread cannot signal eventfds.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub enum PrepareError {
    /// The system's limit (`fs.aio-max-nr`) is reached.
    #[error(
        "interrupts need asynchronous I/O (io_setup), of which the system has no more to give: \
         raise fs.aio-max-nr (sysctl)"
    )]
    UsedUp,
    /// The kernel lacks asynchronous I/O, or a system call filter forbids it.
    #[error("interrupts need asynchronous I/O (io_setup), which is not there: {0}")]
    Missing(Errno),
}

/// Reason why a descriptor from a client is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KindError {
    /// The descriptor is not an eventfd: a write to it could block, or have side effects.
    #[error("descriptor of the wrong kind")]
    WrongKind,
    /// The kernel could not identify the descriptor.
    #[error("readlink: {0}")]
    System(Errno),
}

/// Creates the calling thread's context, unless it exists. Call it where an error can still be
/// reported to the user. Otherwise the first signal creates the context.
///
/// # Errors
/// [`PrepareError`] when the system provides no context.
pub fn prepare() -> Result<(), PrepareError> {
    with_context(|_| ())
}

fn with_context<R>(act: impl FnOnce(&aio::Context) -> R) -> Result<R, PrepareError> {
    let used = CONTEXT.try_with(|cell| {
        if let Some(context) = cell.get() {
            return Ok(act(context));
        }
        let made = aio::Context::new().map_err(|errno| match errno {
            Errno::AGAIN => PrepareError::UsedUp,
            errno => PrepareError::Missing(errno),
        })?;
        Ok(act(cell.get_or_init(|| made)))
    });
    // The thread is ending, and serves no guest any more.
    used.unwrap_or(Err(PrepareError::Missing(Errno::CANCELED)))
}

/// An eventfd that a client sent, verified to be one.
#[derive(Debug)]
pub struct ClientEventfd(OwnedFd);

impl ClientEventfd {
    /// Checks and wraps a descriptor that a client sent.
    ///
    /// # Errors
    /// [`KindError::WrongKind`] when it is not an eventfd; [`KindError::System`] when the kernel
    /// cannot identify it.
    pub fn new(fd: OwnedFd) -> Result<Self, KindError> {
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let target = rustix::fs::readlink(link, Vec::new()).map_err(KindError::System)?;
        // Paths of files begin with a slash, so no file can have such a name.
        if !target.to_bytes().starts_with(b"anon_inode:[eventfd") {
            return Err(KindError::WrongKind);
        }
        Ok(Self(fd))
    }

    /// Adds one to the counter, or leaves it at its maximum. Never blocks, whatever the client
    /// does. Does nothing in a thread that cannot create a context (see [`prepare`]).
    #[inline]
    pub fn signal(&self) {
        // The kernel accepts eventfds only, and the type guarantees one.
        let _ = with_context(|context| context.signal(self.0.as_fd()));
    }
}

impl AsFd for ClientEventfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
