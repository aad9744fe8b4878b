//! Guest memory pinned by the kernel, in its table of fixed buffers.
//!
//! Invariant: an entry of the kernel's table refers to addresses only while
//! [`FixedTable`](super::FixedTable) keeps the memory mapped there.

use super::{MAX_FAILURES, RingCore};
use crate::io::fixed;
use dma::Memory;
use std::io;

impl RingCore {
    /// Pins `len` bytes of a memory from `offset` on, at most [`fixed::MAX_BUFFER_LEN`]. Returns
    /// the index in the kernel's table, for [`RingCore::unpin`].
    pub(in crate::io) fn pin(
        &mut self,
        memory: &Memory,
        offset: usize,
        len: usize,
    ) -> io::Result<u16> {
        if !self.has_table {
            let submitter = self.uring.submitter();
            submitter.register_buffers_sparse(fixed::PLACES.into())?;
            self.has_table = true;
        }
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let segment = memory.segment(offset, len).ok_or_else(invalid)?;
        let place = self
            .fixed
            .take()
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSPC))?;
        if let Err(error) = self.set_fixed(place, segment.as_ptr(), len) {
            self.fixed.give(place);
            return Err(error);
        }
        let address = segment.as_ptr().addr();
        self.fixed.enter(address, len, place, memory.clone());
        Ok(place)
    }

    /// Logs once why `len` bytes of memory could not be pinned. Requests still work, but slower.
    pub(in crate::io) fn say_not_pinned(&mut self, len: usize, error: &io::Error) {
        if !std::mem::replace(&mut self.said_not_pinned, true) {
            tracing::warn!(
                len,
                "guest memory is not pinned; requests are slower: {}",
                why_not_pinned(error)
            );
        }
    }

    /// Removes pinned memory from the kernel's table. Operations in flight keep their pages until
    /// they have completed; later ones use ordinary memory.
    pub(in crate::io) fn unpin(&mut self, places: &[u16]) {
        if places.is_empty() {
            return;
        }
        // Unsent entries of the ring still name the places.
        let mut tries = 0;
        while !self.send() && tries < MAX_FAILURES {
            tries += 1;
        }
        for &place in places {
            let Some(memory) = self.fixed.remove(place) else {
                continue;
            };
            match self.set_fixed(place, std::ptr::null_mut(), 0) {
                Ok(()) => self.fixed.give(place),
                Err(error) => {
                    // The kernel holds the pages still. No entry names the place again, and no
                    // other memory gets its addresses.
                    tracing::error!("io_uring: memory stays pinned: {error}");
                    std::mem::forget(memory);
                }
            }
        }
    }

    /// Changes an entry of the kernel's table of fixed buffers; a length of 0 empties it.
    fn set_fixed(&mut self, place: u16, at: *mut u8, len: usize) -> io::Result<()> {
        let vector = libc::iovec {
            iov_base: at.cast(),
            iov_len: len,
        };
        let submitter = self.uring.submitter();
        // SAFETY: the bytes are those of a memory that stays mapped until the place is emptied:
        // `fixed` keeps it, or (when that fails) it is never unmapped.
        unsafe { submitter.register_buffers_update(place.into(), &[vector], None) }
    }

    /// Returns the number of buffers that the kernel has pinned for the ring.
    pub(in crate::io) fn pinned(&self) -> usize {
        self.fixed.count()
    }
}

/// Returns the reason why memory could not be pinned, with a remedy, for the log.
pub(in crate::io) fn why_not_pinned(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            let limit = limit.map_or("none".into(), |bytes| format!("{} KiB", bytes >> 10));
            format!(
                "the memory exceeds the limit of locked memory ({limit}) or the machine's; raise \
                 the limit with: ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)"
            )
        }
        Some(libc::EFAULT | libc::EOPNOTSUPP | libc::EINVAL) => format!(
            "the kernel does not pin memory of this kind; take a memfd or huge pages ({error})"
        ),
        Some(libc::ENOSPC) => {
            "the memory has more windows than the kernel's table has entries".into()
        }
        _ => error.to_string(),
    }
}
