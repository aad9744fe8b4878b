//! Eventfds that a client gave: checked for their kind, and signalled without ever blocking.
//!
//! *What this room is for.* An interrupt ends in an eventfd of the VMM's. The VMM shares the file
//! description: it can take O_NONBLOCK away at any time and let the counter run full, and then a
//! write(2) blocks the thread that serves other guests, too. Setting the flag again, or asking
//! poll(2) first, only makes the time shorter in which it can do so. So nothing is written here:
//! the kernel signals the eventfd itself, as it does when asynchronous I/O has completed
//! (IOCB_FLAG_RESFD, io_submit(2)). Its `eventfd_signal` adds to the counter up to the largest
//! value and returns; it looks at no flag and waits for nothing. docs/tuning.md has what this
//! costs, and what the other ways cost.
//!
//! *What may be touched here.* Eventfds, and the kernel's asynchronous I/O. *What may not.*
//! Queues, protocols, guests. `unsafe` is in `aio` alone.
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

/// Why eventfds cannot be signalled.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub enum PrepareError {
    /// Other programs have used up what the system grants.
    #[error(
        "interrupts need asynchronous I/O (io_setup), of which the system has no more to give: \
         raise fs.aio-max-nr (sysctl)"
    )]
    UsedUp,
    /// The kernel was built without it, or a filter of system calls forbids it.
    #[error("interrupts need asynchronous I/O (io_setup), which is not there: {0}")]
    Missing(Errno),
}

/// Why a descriptor is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KindError {
    /// It is no eventfd: a write to anything else could block, or do who knows what.
    #[error("descriptor of the wrong kind")]
    WrongKind,
    /// The kernel does not say what it is.
    #[error("readlink: {0}")]
    System(Errno),
}

/// Makes the calling thread's context, if it has none: to be called where an error can still be
/// told to the user. A thread that signals without it makes one then.
///
/// # Errors
/// [`PrepareError`]: the system has none to give.
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
    // The thread ends: it serves nobody any more.
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

    /// Adds one to the counter, or leaves it full. Never blocks, whatever the client does.
    ///
    /// A thread whose context the system does not grant signals nothing: see [`prepare`].
    #[inline]
    pub fn signal(&self) {
        // The kernel refuses what is no eventfd, and nothing else came through the door.
        let _ = with_context(|context| context.signal(self.0.as_fd()));
    }
}

impl AsFd for ClientEventfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
