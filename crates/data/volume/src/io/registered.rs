//! System calls on a ring by its registered descriptor, where the kernel supports it.
//!
//! A thread may register the descriptors of its rings (`IORING_REGISTER_RING_FDS`, Linux 5.18; 16
//! per thread): a call then names a place in the thread's own table, and the kernel need not take a
//! reference to the ring's file and give it back.
#![allow(unsafe_code)]

use io_uring::IoUring;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, RawFd};

// From `linux/io_uring.h`.
const IORING_REGISTER_RING_FDS: u32 = 20;
const IORING_UNREGISTER_RING_FDS: u32 = 21;
const IORING_ENTER_GETEVENTS: u32 = 1 << 0;
const IORING_ENTER_REGISTERED_RING: u32 = 1 << 4;

/// Argument of `io_uring_register(2)`: the kernel's `struct io_uring_rsrc_update`.
#[repr(C)]
struct RsrcUpdate {
    offset: u32,
    resv: u32,
    data: u64,
}

/// Registration of a ring with its thread, by which the ring is entered. Must be dropped before the
/// ring. Must stay on its thread: in another thread's table, the index may refer to another ring.
#[derive(Debug)]
pub(super) struct RegisteredRing {
    /// Descriptor of the io_uring.
    ring: RawFd,
    /// Index of the ring in the thread's table of registered rings, if it is registered.
    place: Option<u32>,
    /// Marker that makes the type not `Send`.
    here: PhantomData<*const ()>,
}

impl RegisteredRing {
    /// Registers a ring of the calling thread.
    pub(super) fn new(uring: &IoUring) -> Self {
        let ring = uring.as_raw_fd();
        let mut update = RsrcUpdate {
            // Anywhere.
            offset: u32::MAX,
            resv: 0,
            data: ring as u64,
        };
        let place = match register(ring, IORING_REGISTER_RING_FDS, &mut update) {
            Ok(()) => Some(update.offset),
            Err(error) => {
                tracing::debug!("io_uring: ring not registered ({error}), using its descriptor");
                None
            }
        };
        Self {
            ring,
            place,
            here: PhantomData,
        }
    }

    /// Returns whether the ring is entered by its index in the thread's table.
    #[cfg(test)]
    pub(super) fn is_registered(&self) -> bool {
        self.place.is_some()
    }

    /// Submits up to `count` entries; with `events`, the kernel also posts deferred completions.
    /// Does not wait for completions.
    #[inline]
    pub(super) fn enter(&self, count: u32, events: bool) -> io::Result<()> {
        let (ring, flags) = match self.place {
            Some(place) => (place, IORING_ENTER_REGISTERED_RING),
            None => (self.ring as u32, 0),
        };
        let flags = flags | if events { IORING_ENTER_GETEVENTS } else { 0 };
        // SAFETY: the kernel reads or writes no memory through the arguments; the writer of each
        // entry is responsible for the memory to which it points.
        let result = unsafe {
            libc::syscall(
                libc::SYS_io_uring_enter,
                ring,
                count,
                0u32,
                flags,
                std::ptr::null::<libc::c_void>(),
                0usize,
            )
        };
        done(result)
    }
}

impl Drop for RegisteredRing {
    fn drop(&mut self) {
        let Some(place) = self.place else { return };
        let mut update = RsrcUpdate {
            offset: place,
            resv: 0,
            data: 0,
        };
        if let Err(error) = register(self.ring, IORING_UNREGISTER_RING_FDS, &mut update) {
            // The thread's end does it then.
            tracing::debug!("io_uring: ring not unregistered: {error}");
        }
    }
}

/// Calls `io_uring_register(2)` with the operation `what` and one update.
fn register(ring: RawFd, what: u32, update: &mut RsrcUpdate) -> io::Result<()> {
    // SAFETY: the kernel reads and writes one structure, which both operations expect.
    let result = unsafe {
        libc::syscall(
            libc::SYS_io_uring_register,
            ring,
            what,
            std::ptr::from_mut(update),
            1u32,
        )
    };
    done(result)
}

fn done(result: libc::c_long) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use io_uring::opcode;

    /// Kernel limit for registered rings per thread (`IO_RINGFD_REG_MAX`).
    const PLACES: usize = 16;

    fn nop(uring: &mut IoUring, registered: &RegisteredRing) {
        let entry = opcode::Nop::new().build().user_data(7);
        // SAFETY: it points to nothing.
        unsafe { uring.submission().push(&entry) }.unwrap();
        registered.enter(1, true).unwrap();
        assert_eq!(uring.completion().next().unwrap().user_data(), 7);
    }

    #[test]
    fn ring_beyond_thread_table_is_entered_by_descriptor() {
        let mut rings = Vec::new();
        for _ in 0..PLACES + 4 {
            let uring = IoUring::new(8).unwrap();
            rings.push((RegisteredRing::new(&uring), uring));
        }
        let registered = rings.iter().filter(|(e, _)| e.is_registered()).count();
        assert_eq!(registered, PLACES, "needs Linux 5.18");
        for (registered, uring) in &mut rings {
            nop(uring, registered);
        }
    }

    #[test]
    fn ring_slot_is_reused_after_drop() {
        for _ in 0..4 * PLACES {
            let mut uring = IoUring::new(8).unwrap();
            let registered = RegisteredRing::new(&uring);
            assert!(registered.is_registered());
            nop(&mut uring, &registered);
        }
    }

    #[test]
    fn ring_error_is_returned() {
        let uring = IoUring::new(8).unwrap();
        let mut registered = RegisteredRing::new(&uring);
        registered.place = None;
        registered.ring = -1;
        let error = registered.enter(0, false).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    }
}
