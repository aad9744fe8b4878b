//! Linux asynchronous I/O (io_setup(2), io_submit(2)), used only for a side effect: it signals an
//! eventfd when a request has completed.
//!
//! The request is an empty read, which completes within the system call. Its completion event in
//! the ring shared with the kernel is not needed, and consumed at once.
#![allow(unsafe_code)]

use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// Requested capacity of a context, which counts towards `fs.aio-max-nr`. The kernel raises it to
/// at least four per CPU.
const REQUESTS: libc::c_long = 32;

/// IOCB_CMD_PREAD (`linux/aio_abi.h`).
const PREAD: u16 = 0;
/// IOCB_FLAG_RESFD: the kernel signals `result_fd` when the request has completed.
const RESFD: u32 = 1;
/// AIO_RING_MAGIC (`fs/aio.c`).
const MAGIC: u32 = 0xa10a_10a1;

/// `struct iocb` (`linux/aio_abi.h`).
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    /// `aio_key` and `aio_rw_flags`, in the machine's byte order.
    key_and_flags: u64,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_fd: u32,
}

const _: () = assert!(size_of::<Iocb>() == 64);

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Event([u64; 4]);

/// Header of the ring of events (`struct aio_ring` of `fs/aio.c`). Its address is the context's
/// identifier. libaio has always relied on this layout.
#[repr(C)]
struct Ring {
    id: u32,
    events: u32,
    /// Index of the next event to consume; written by this process.
    head: AtomicU32,
    /// Index after the last event; written by the kernel.
    tail: AtomicU32,
    magic: u32,
    compatible: u32,
    /// Flags of features that a reader of the ring must know.
    incompatible: u32,
    header_bytes: u32,
}

/// Asynchronous I/O context of one thread.
#[derive(Debug)]
pub(crate) struct Context {
    ring: NonNull<Ring>,
    /// Events are consumed in the shared ring, without a system call.
    mapped: bool,
    /// Empty file from which the requests read.
    source: OwnedFd,
}

fn check(result: libc::c_long) -> Result<libc::c_long, Errno> {
    if result >= 0 {
        return Ok(result);
    }
    let error = std::io::Error::last_os_error();
    Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

impl Context {
    /// `EAGAIN` when `fs.aio-max-nr` is reached; `ENOSYS` or `EPERM` without asynchronous I/O.
    pub(crate) fn new() -> Result<Self, Errno> {
        let source = rustix::fs::memfd_create("vnvme-nothing", MemfdFlags::CLOEXEC)?;
        let mut name: libc::c_ulong = 0;
        // SAFETY: the kernel writes the context's name, and nothing else.
        check(unsafe { libc::syscall(libc::SYS_io_setup, REQUESTS, &raw mut name) })?;
        let ring = NonNull::new(std::ptr::with_exposed_provenance_mut::<Ring>(name as usize));
        let mut context = Self {
            ring: ring.ok_or(Errno::NOSYS)?,
            mapped: false,
            source,
        };
        context.mapped = context.is_known();
        Ok(context)
    }

    fn is_known(&self) -> bool {
        // SAFETY: the kernel has mapped the ring there, readable and writable, until io_destroy;
        // its header is at its beginning.
        let ring = unsafe { self.ring.as_ref() };
        ring.magic == MAGIC && ring.incompatible == 0
    }

    /// Makes the kernel signal an eventfd (`eventfd_signal` in `fs/eventfd.c`), which never blocks.
    #[inline]
    pub(crate) fn signal(&self, eventfd: BorrowedFd<'_>) -> Result<(), Errno> {
        let request = Iocb {
            opcode: PREAD,
            fd: self.source.as_raw_fd() as u32,
            flags: RESFD,
            result_fd: eventfd.as_raw_fd() as u32,
            ..Iocb::default()
        };
        let list = [&raw const request];
        // SAFETY: the list has one pointer, to a request that lives until the call has returned;
        // the kernel copies it. The read has no bytes, so nothing is written to its buffer.
        let submitted =
            unsafe { libc::syscall(libc::SYS_io_submit, self.ring.as_ptr(), 1, list.as_ptr()) };
        self.consume();
        check(submitted).map(|_| ())
    }

    /// Consumes the available events.
    #[inline]
    fn consume(&self) {
        if !self.mapped {
            return self.consume_by_call();
        }
        // SAFETY: as in `is_known`. Both indices are atomic, here and in the kernel.
        let ring = unsafe { self.ring.as_ref() };
        ring.head
            .store(ring.tail.load(Ordering::Acquire), Ordering::Release);
    }

    #[cold]
    fn consume_by_call(&self) {
        let mut events = [Event::default(); 8];
        let none = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the kernel writes as many events as there is room for, at most.
        let _ = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.ring.as_ptr(),
                0,
                events.len(),
                events.as_mut_ptr(),
                &raw const none,
            )
        };
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is this one's own, and is not used again.
        let _ = unsafe { libc::syscall(libc::SYS_io_destroy, self.ring.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::AsFd;

    fn count(fd: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(fd, &mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    /// Signals many times the ring's capacity, with both ways of consuming events.
    #[test]
    fn aio_ring_never_overflows() {
        for mapped in [true, false] {
            let mut context = Context::new().unwrap();
            assert!(context.mapped, "a ring of another kind");
            context.mapped = mapped;
            let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
            for _ in 0..100_000 {
                context.signal(fd.as_fd()).unwrap();
            }
            assert_eq!(count(&fd), 100_000, "mapped: {mapped}");
        }
    }

    #[test]
    fn non_eventfd_is_refused() {
        let context = Context::new().unwrap();
        let file = rustix::fs::memfd_create("no eventfd", MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(context.signal(file.as_fd()), Err(Errno::INVAL));
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        context.signal(fd.as_fd()).unwrap();
        assert_eq!(count(&fd), 1);
    }
}
