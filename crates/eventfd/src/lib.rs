//! Eventfds of clients: checked for their kind, and signalled without ever blocking.
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
//! scope. `unsafe` is in `aio` alone.
//!
//! Each thread that signals has a context of its own, which [`prepare`] makes.
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

/// Reason why eventfds cannot be signalled.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub enum PrepareError {
    /// Other programs have used up the system's limit.
    #[error(
        "interrupts need asynchronous I/O (io_setup), of which the system has no more to give: \
         raise fs.aio-max-nr (sysctl)"
    )]
    UsedUp,
    /// The kernel was built without it, or a filter of system calls forbids it.
    #[error("interrupts need asynchronous I/O (io_setup), which is not there: {0}")]
    Missing(Errno),
}

/// Reason why a descriptor is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KindError {
    /// The descriptor is no eventfd: a write to it could block, or have side effects.
    #[error("descriptor of the wrong kind")]
    WrongKind,
    /// The kernel did not identify the descriptor.
    #[error("readlink: {0}")]
    System(Errno),
}

/// Creates the calling thread's context, if it has none. Call it where an error can still be
/// reported to the user. A thread that signals without a context creates one then.
///
/// # Errors
/// [`PrepareError`] when the system grants no context.
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

/// An eventfd that a client gave.
#[derive(Debug)]
pub struct ClientEventfd(OwnedFd);

impl ClientEventfd {
    /// Takes a descriptor that a client sent.
    ///
    /// # Errors
    /// [`KindError::WrongKind`] when it is no eventfd.
    pub fn new(fd: OwnedFd) -> Result<Self, KindError> {
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let target = rustix::fs::readlink(link, Vec::new()).map_err(KindError::System)?;
        // Paths of files begin with a slash: no client can name one so.
        if !target.to_bytes().starts_with(b"anon_inode:[eventfd") {
            return Err(KindError::WrongKind);
        }
        Ok(Self(fd))
    }

    /// Adds one to the counter, or leaves it full. Never blocks, regardless of the client.
    ///
    /// A thread without a context from the system signals nothing: see [`prepare`].
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
