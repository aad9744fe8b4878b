//! Dirty log: a bitmap in the front-end's memory, in which this process marks the guest pages that
//! it has written ("Vhost-user Protocol", Migration). The front-end copies marked pages to the
//! destination of a live migration.
//!
//! A page is marked after it was written. The other order would lose a write: the front-end clears
//! a bit and then copies the page. The bit is not tested before it is set, since that would need a
//! full fence of its own.
//!
//! The inflight region (`inflight`) is not guest memory: the front-end moves it by itself, and its
//! pages have no place in the log.

use crate::error::RequestRefusal;
use crate::eventfd::Signal;
use crate::stats::Stats;
use crate::wire::LogDescription;
use dma::Memory;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Size in bytes of the pages that a bit of the log stands for (VHOST_LOG_PAGE).
const PAGE: u64 = 4096;
/// Pages of one 64-bit word of the log.
const PAGES_PER_WORD: u64 = u64::BITS as u64;
const WORD: u64 = 8;

/// Bitmap of dirty guest pages, shared by the queues of a connection.
pub(crate) struct DirtyLog {
    memory: Memory,
    /// Byte offset of the bitmap in the memory file.
    offset: u64,
    /// Number of guest pages that the bitmap has bits for.
    pages: u64,
    stats: Arc<Stats>,
}

impl DirtyLog {
    /// Returns the required length of the log's file. Whole words are accessed. `None` when the
    /// numbers overflow.
    pub(crate) fn file_end(given: &LogDescription) -> Option<u64> {
        let size = given.mmap_size.checked_next_multiple_of(WORD)?;
        given.mmap_offset.checked_add(size)
    }

    /// Creates the log in the memory of a file, which has [`DirtyLog::file_end`] bytes at least.
    pub(crate) fn new(
        memory: Memory,
        given: &LogDescription,
        stats: &Arc<Stats>,
    ) -> Result<DirtyLog, RequestRefusal> {
        if !given.mmap_offset.is_multiple_of(WORD) {
            return Err(RequestRefusal::Value("unaligned offset of the log"));
        }
        Ok(DirtyLog {
            memory,
            offset: given.mmap_offset,
            pages: given.mmap_size.saturating_mul(8),
            stats: stats.clone(),
        })
    }

    /// Returns whether the log has a bit for the last byte before this guest address.
    pub(crate) fn covers(&self, end: u64) -> bool {
        end.div_ceil(PAGE) <= self.pages
    }

    /// Returns whether the log's file was cut short, so that marks are lost.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.memory.is_poisoned()
    }

    /// Marks the pages of `len` bytes from a guest-physical address on, which have been written.
    pub(crate) fn mark(&self, addr: u64, len: u64) {
        let Some(before_end) = len.checked_sub(1) else {
            return;
        };
        let mut page = addr / PAGE;
        let last = addr.saturating_add(before_end) / PAGE;
        if last >= self.pages {
            self.stats.line("dirty log", |left_out| {
                tracing::warn!(
                    addr,
                    left_out,
                    "a written page is outside of the front-end's dirty log, and the migration \
                     loses it"
                );
            });
        }
        let last = last.min(self.pages.saturating_sub(1));
        while page <= last {
            let end = last.min(page | (PAGES_PER_WORD - 1));
            let mask = u64::MAX >> (PAGES_PER_WORD - 1 - (end - page)) << (page % PAGES_PER_WORD);
            let at = self.offset + page / PAGES_PER_WORD * WORD;
            let word = usize::try_from(at).ok();
            if let Some(word) = word.and_then(|at| self.memory.atomic_u64(at)) {
                // Bit `page % 8` of byte `page / 8`.
                word.fetch_or(mask.to_le(), Ordering::SeqCst);
            }
            page = end + 1;
        }
    }
}

/// Log of a queue's used ring (flag VHOST_VRING_F_LOG of SET_VRING_ADDR).
pub(crate) struct UsedRingLog {
    pub(crate) log: Rc<DirtyLog>,
    /// Guest-physical address under which writes to the used ring are logged.
    pub(crate) at: u64,
    /// Eventfd that is signalled after pages were marked (SET_LOG_FD).
    pub(crate) signal: Option<Rc<Signal>>,
}

impl UsedRingLog {
    /// Marks `len` bytes from byte `offset` of the used ring on.
    pub(crate) fn mark(&self, offset: u64, len: u64) {
        self.log.mark(self.at.saturating_add(offset), len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use worker::AcceptStats;

    fn log(size: u64, offset: u64) -> (Memory, DirtyLog) {
        let memory = Memory::anonymous(4096).unwrap();
        let given = LogDescription {
            mmap_size: size,
            mmap_offset: offset,
        };
        let stats = Stats::new(1, tracing::Span::none(), Arc::new(AcceptStats::default()));
        let log = DirtyLog::new(memory.clone(), &given, &Arc::new(stats)).unwrap();
        (memory, log)
    }

    fn marked(memory: &Memory, offset: usize) -> Vec<u64> {
        let mut bytes = vec![0; memory.len() - offset];
        memory.read(offset, &mut bytes).unwrap();
        let pages = (0..).zip(bytes);
        let pages = pages.flat_map(|(at, byte)| (0..8).map(move |bit| (at * 8 + bit, byte >> bit)));
        pages
            .filter(|(_, bit)| bit & 1 != 0)
            .map(|(page, _)| page)
            .collect()
    }

    #[test]
    fn written_pages_and_no_others_are_marked() {
        for (addr, len, pages) in [
            (0, 0, vec![]),
            (0, 1, vec![0]),
            (4095, 1, vec![0]),
            (4095, 2, vec![0, 1]),
            (8192, 4096, vec![2]),
            (63 * 4096, 8192, vec![63, 64]),
            (1000, 4096 * 130, (0..=130).collect()),
            (64 * 4096, 64 * 4096, (64..128).collect()),
        ] {
            let (memory, log) = log(64, 8);
            log.mark(addr, len);
            assert_eq!(marked(&memory, 8), pages, "{len} bytes at {addr}");
        }
    }

    #[test]
    fn pages_outside_of_log_are_not_marked() {
        let (memory, log) = log(9, 64);
        assert!(log.covers(72 * 4096) && !log.covers(72 * 4096 + 1));
        log.mark(70 * 4096, 100 << 20);
        log.mark(u64::MAX - 5, 100);
        log.mark(1 << 40, 1);
        assert_eq!(marked(&memory, 64), [70, 71]);
        assert_eq!(marked(&memory, 0), [64 * 8 + 70, 64 * 8 + 71]);
    }

    #[test]
    fn log_of_any_size_is_within_its_file() {
        let end = |mmap_size, mmap_offset| {
            DirtyLog::file_end(&LogDescription {
                mmap_size,
                mmap_offset,
            })
        };
        assert_eq!(end(9, 8), Some(24));
        assert_eq!(end(u64::MAX, 0), None);
        assert_eq!(end(8, u64::MAX - 7), None);
    }
}
