//! Log of the guest pages that a device writes, for the live migration of its guest.
//!
//! While the log is on, translations for writes take the slow path of [`DmaMap`](crate::DmaMap),
//! which marks the page and returns no more than the rest of it. Without a log nothing is paid.
//!
//! A translation precedes the write, and the reader of the log copies a page after it has taken the
//! page out of the log. A mark is therefore shown only when every command has ended that may have
//! been outstanding when it was made:
//!
//! ```text
//! marked --(fence)--> ending --(all commands from before the fence are over)--> settled --> reader
//! ```

use crate::PAGE;
use std::collections::BTreeMap;

/// Number of 64-bit words in a chunk of a page set.
const WORDS: usize = 64;
/// Number of pages in a chunk.
const PAGES: u64 = WORDS as u64 * 64;
/// Maximum number of chunks of a log: those of 1 TiB, which take 32 MiB. A client may map the same
/// memory at many addresses, so the size of its memory does not bound the log.
const MAX_CHUNKS: usize = 1 << 16;

type Chunk = [u64; WORDS];

/// Set of page numbers.
#[derive(Default)]
struct PageSet(BTreeMap<u64, Box<Chunk>>);

impl PageSet {
    fn insert(&mut self, page: u64) {
        let chunk = self.0.entry(page / PAGES);
        let chunk = chunk.or_insert_with(|| Box::new([0; WORDS]));
        if let Some(word) = chunk.get_mut((page % PAGES / 64) as usize) {
            *word |= 1 << (page % 64);
        }
    }

    /// Adds all pages of another set.
    fn merge(&mut self, other: PageSet) {
        for (at, from) in other.0 {
            let chunk = self.0.entry(at);
            let chunk = chunk.or_insert_with(|| Box::new([0; WORDS]));
            for (word, from) in chunk.iter_mut().zip(*from) {
                *word |= from;
            }
        }
    }

    /// Removes the pages of a range, and calls `each` with every one of them, in order.
    fn take(&mut self, first: u64, last: u64, each: &mut dyn FnMut(u64)) {
        let range = first / PAGES..=last / PAGES;
        let mut emptied = Vec::new();
        for (&at, chunk) in self.0.range_mut(range) {
            for (index, word) in (0..).zip(chunk.iter_mut()) {
                let base = at * PAGES + index * 64;
                let mut rest = *word;
                while rest != 0 {
                    let bit = rest.trailing_zeros();
                    rest &= rest - 1;
                    let page = base + u64::from(bit);
                    if (first..=last).contains(&page) {
                        *word &= !(1 << bit);
                        each(page);
                    }
                }
            }
            if chunk.iter().all(|word| *word == 0) {
                emptied.push(at);
            }
        }
        for at in emptied {
            self.0.remove(&at);
        }
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Log of written pages, see the module.
#[derive(Default)]
pub(crate) struct DirtyLog {
    /// Pages that commands may be writing, since the last fence.
    marked: PageSet,
    /// Pages that commands from before the last fence may be writing.
    ending: PageSet,
    /// Pages that no command writes any more.
    settled: PageSet,
    /// Whether the log had no room, so that every page counts as written.
    is_full: bool,
}

impl DirtyLog {
    /// Marks the page of an address that is about to be written.
    pub(crate) fn mark(&mut self, iova: u64) {
        if self.is_full {
            return;
        }
        self.marked.insert(iova / PAGE);
        self.bound();
    }

    /// Marks pages that were written, and are written by no command.
    pub(crate) fn mark_written(&mut self, iova: u64, len: u64) {
        let Some(before_end) = len.checked_sub(1).filter(|_| !self.is_full) else {
            return;
        };
        let last = iova.saturating_add(before_end) / PAGE;
        for page in iova / PAGE..=last {
            self.settled.insert(page);
        }
        self.bound();
    }

    fn bound(&mut self) {
        let sets = [&self.marked, &self.ending, &self.settled];
        if sets.map(|set| set.0.len()).iter().sum::<usize>() > MAX_CHUNKS {
            *self = DirtyLog {
                is_full: true,
                ..DirtyLog::default()
            };
        }
    }

    /// Settles the marks of commands that are over. `quiesced` returns whether every command from
    /// before the last call of `fence` is.
    pub(crate) fn settle(&mut self, quiesced: impl Fn() -> bool, fence: impl FnOnce()) {
        if !quiesced() {
            return;
        }
        self.settled.merge(std::mem::take(&mut self.ending));
        if self.marked.is_empty() {
            return;
        }
        self.ending = std::mem::take(&mut self.marked);
        fence();
        if quiesced() {
            self.settled.merge(std::mem::take(&mut self.ending));
        }
        self.bound();
    }

    /// Removes settled pages of an address range, and calls `each` with the address of every one.
    pub(crate) fn take(&mut self, iova: u64, last: u64, each: &mut dyn FnMut(u64)) {
        self.settled
            .take(iova / PAGE, last / PAGE, &mut |page| each(page * PAGE));
    }

    /// Returns whether the log had no room. Then it has no pages, and every mapped one counts as
    /// written.
    pub(crate) fn is_full(&self) -> bool {
        self.is_full
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, DmaMap, Memory, Prot, SegmentList};

    const BASE: u64 = 0x4000_0000;

    fn map() -> DmaMap {
        let mut map = DmaMap::new();
        let memory = Memory::anonymous(1 << 20).unwrap();
        map.map(BASE, 1 << 20, Some((memory, 0)), Prot::RW).unwrap();
        map
    }

    fn dirty(map: &mut DmaMap) -> Vec<u64> {
        let mut pages = Vec::new();
        map.take_dirty(BASE, 1 << 20, &mut |iova| pages.push((iova - BASE) / PAGE));
        pages
    }

    #[test]
    fn written_pages_and_no_others_are_reported_once() {
        let mut map = map();
        map.write(BASE, &[1]).unwrap();
        map.start_dirty_log();
        assert!(dirty(&mut map).is_empty());
        map.write(BASE + 2 * PAGE - 1, &[1, 2]).unwrap();
        map.read(BASE + 7 * PAGE, &mut [0; 16]).unwrap();
        map.write(BASE + 200 * PAGE, &[0; 3 * PAGE as usize])
            .unwrap();
        assert_eq!(dirty(&mut map), [1, 2, 200, 201, 202]);
        assert!(dirty(&mut map).is_empty());
        map.stop_dirty_log();
        map.write(BASE, &[1]).unwrap();
        assert!(dirty(&mut map).is_empty());
    }

    #[test]
    fn page_is_reported_after_its_command_has_ended() {
        let mut map = map();
        map.start_dirty_log();
        let (mut first, mut second) = (SegmentList::new(), SegmentList::new());
        assert!(first.begin_piece(&map, BASE + PAGE, PAGE, Access::Write));
        assert!(dirty(&mut map).is_empty());
        // Later commands do not delay the report.
        assert!(second.begin_piece(&map, BASE + 5 * PAGE, 512, Access::Write));
        assert!(dirty(&mut map).is_empty());
        first.clear();
        assert_eq!(dirty(&mut map), [1]);
        second.clear();
        assert_eq!(dirty(&mut map), [5]);
        assert!(dirty(&mut map).is_empty());
    }

    #[test]
    fn log_is_complete_when_earlier_commands_have_ended() {
        let mut map = map();
        let mut early = SegmentList::new();
        assert!(early.begin_piece(&map, BASE + PAGE, PAGE, Access::Write));
        map.start_dirty_log();
        assert!(!map.quiesced());
        map.write(BASE + 9 * PAGE, &[1]).unwrap();
        early.clear();
        assert!(map.quiesced());
        assert_eq!(dirty(&mut map), [9]);
    }

    #[test]
    fn long_transfer_is_one_segment_and_marks_all_its_pages() {
        let mut map = map();
        map.start_dirty_log();
        let mut list = SegmentList::new();
        list.begin(&map);
        map.segments(BASE, 4 * PAGE, Access::Write, &mut list)
            .unwrap();
        assert_eq!(list.count(), 1);
        list.clear();
        assert_eq!(dirty(&mut map), [0, 1, 2, 3]);
    }

    #[test]
    fn ranges_are_reported_by_themselves() {
        let mut map = map();
        map.start_dirty_log();
        map.note_written(BASE + 3 * PAGE, 2 * PAGE);
        let mut pages = Vec::new();
        map.take_dirty(BASE, 4 * PAGE, &mut |iova| pages.push(iova));
        assert_eq!(pages, [BASE + 3 * PAGE]);
        assert_eq!(dirty(&mut map), [4]);
    }

    #[test]
    fn full_log_reports_all_mapped_pages() {
        let mut map = map();
        map.start_dirty_log();
        for chunk in 0..=MAX_CHUNKS as u64 {
            map.note_written(chunk * PAGES * PAGE, 1);
        }
        for _ in 0..2 {
            assert_eq!(dirty(&mut map), Vec::from_iter(0..256));
            // Only mapped pages are visited, so that the largest range takes no longer.
            let mut pages = Vec::new();
            map.take_dirty(0, u64::MAX, &mut |iova| pages.push(iova));
            assert_eq!((pages.len(), pages.first()), (256, Some(&BASE)));
            pages.clear();
            map.take_dirty(BASE - PAGE, 3 * PAGE, &mut |iova| pages.push(iova));
            assert_eq!(pages, [BASE, BASE + PAGE]);
            map.note_written(BASE, PAGE);
        }
    }

    #[test]
    fn sets_of_log_share_its_room() {
        let mut log = DirtyLog::default();
        for chunk in 0..MAX_CHUNKS as u64 / 2 {
            log.mark(chunk * PAGES * PAGE);
        }
        log.settle(|| false, || ());
        for chunk in MAX_CHUNKS as u64 / 2..MAX_CHUNKS as u64 {
            log.mark_written(chunk * PAGES * PAGE, PAGE);
        }
        assert!(!log.is_full());
        log.mark_written(u64::MAX - PAGE, PAGE);
        assert!(log.is_full() && log.marked.is_empty() && log.settled.is_empty());
    }
}
