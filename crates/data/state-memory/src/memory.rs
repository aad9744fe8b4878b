//! State memory file: creation, opening, and allocation of pages before they are used.

use crate::layout::{self, CONTROL_BUFFER, KINDS, Kind, MARKS_BUFFER, PAGE, Section, Sections};
use crate::{Area, Control, DescriptorTable, Layout, StateError, WindowTable};
use dma::{Memory, ROW, Rows, SharedPages};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Memory file in which a disk's state outlives the process. Clones refer to the same memory.
#[derive(Clone, Debug)]
pub struct StateMemory(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    pages: SharedPages,
    sections: Sections,
    /// Number of bytes with allocated pages in each section, from its start.
    allocated: [AtomicUsize; KINDS],
}

impl StateMemory {
    /// Creates a state memory without a committed control state.
    ///
    /// # Errors
    /// [`StateError::OutOfRange`] when the file would be too large; [`StateError::Memory`] when it
    /// cannot be created.
    pub fn create(layout: Layout) -> Result<StateMemory, StateError> {
        let (sections, len) = layout.sections()?;
        let pages = SharedPages::named("vnvme-state", len)?;
        pages.allocate(0, PAGE)?;
        layout::write_header(pages.memory(), &sections)?;
        Ok(Self::of(pages, sections))
    }

    /// Opens the state memory of an earlier process.
    ///
    /// # Errors
    /// [`StateError::Foreign`] when the file is not a state memory, [`StateError::TooNew`] or
    /// [`StateError::TooOld`] for an unsupported version, [`StateError::Damaged`] when its header
    /// is inconsistent, [`StateError::Memory`] when it cannot be mapped.
    pub fn open(fd: OwnedFd) -> Result<StateMemory, StateError> {
        let pages = SharedPages::open(fd, PAGE)?;
        let sections = layout::read_header(pages.memory())?;
        Ok(Self::of(pages, sections))
    }

    fn of(pages: SharedPages, sections: Sections) -> StateMemory {
        StateMemory(Arc::new(Inner {
            pages,
            sections,
            allocated: Default::default(),
        }))
    }

    /// Returns the memory file, which is passed to the keeper.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.pages.fd()
    }

    /// Returns the section with the disk's identity, in a format that the front-end defines.
    pub fn identity(&self) -> Area {
        Area::new(self.clone(), Kind::Identity)
    }

    /// Returns the section with the client's session, in a format that the front-end defines.
    pub fn session(&self) -> Area {
        Area::new(self.clone(), Kind::Session)
    }

    /// Returns the two buffers of the control state.
    pub fn control(&self) -> Control {
        Control::new(self.clone(), Kind::Control, CONTROL_BUFFER)
    }

    /// Returns the two buffers of marked ranges that have no room in the control state; `None` in a
    /// memory that a version without them has made.
    pub fn marks(&self) -> Option<Control> {
        let there = self.section(Kind::Marks).len > 0;
        there.then(|| Control::new(self.clone(), Kind::Marks, MARKS_BUFFER))
    }

    /// Returns the table of guest memory windows.
    ///
    /// # Errors
    /// [`StateError::Damaged`] when the table is inconsistent, [`StateError::Memory`] when no
    /// memory is left.
    pub fn windows(&self) -> Result<WindowTable, StateError> {
        WindowTable::open(self.clone())
    }

    /// Returns the table of descriptors that the keeper holds for the disk.
    ///
    /// # Errors
    /// [`StateError::Damaged`] when the table is inconsistent, [`StateError::Memory`] when no
    /// memory is left.
    pub fn descriptors(&self) -> Result<DescriptorTable, StateError> {
        DescriptorTable::open(self.clone())
    }

    /// Returns a row for each queue, which an engine updates once a batch.
    ///
    /// # Errors
    /// [`StateError::Memory`] when no memory is left.
    pub fn hot(&self) -> Result<Rows, StateError> {
        let len = self.section(Kind::Hot).len;
        self.prepare(Kind::Hot, len)?;
        self.rows(Kind::Hot, 0, len / ROW)
    }

    /// Returns the rows for recording a share's commands, and allocates them.
    ///
    /// # Errors
    /// [`StateError::OutOfRange`] when the share does not exist, [`StateError::Memory`] when no
    /// memory is left.
    pub fn records(&self, share: u16) -> Result<Rows, StateError> {
        let (start, count) = self.share(share).ok_or(StateError::OutOfRange)?;
        self.prepare_range(Kind::Records, start, (count + 1) * ROW)?;
        let rows = self.rows(Kind::Records, start, count + 1)?;
        let head = rows.get(0).and_then(|row| row.first());
        let head = head.ok_or(StateError::OutOfRange)?;
        head.store(1, Ordering::Release);
        self.rows(Kind::Records, start + ROW, count)
    }

    /// Returns the rows with a share's recorded commands; `None` when they were never written.
    pub fn recorded(&self, share: u16) -> Option<Rows> {
        let (start, count) = self.share(share)?;
        let rows = self.rows(Kind::Records, start, count + 1).ok()?;
        let used = rows.get(0)?.first()?.load(Ordering::Acquire) != 0;
        used.then(|| self.rows(Kind::Records, start + ROW, count).ok())?
    }

    /// Returns the number of shares with command records.
    pub fn shares(&self) -> u16 {
        let Section { len, stride, .. } = self.section(Kind::Records);
        let shares = len.checked_div(stride).unwrap_or(0);
        u16::try_from(shares).unwrap_or(u16::MAX)
    }

    /// Returns the maximum number of recorded commands in each share.
    pub fn commands(&self) -> u16 {
        let (_, count) = self.share(0).unwrap_or_default();
        u16::try_from(count).unwrap_or(u16::MAX)
    }

    /// Returns the offset of a share in its section, and its number of records.
    fn share(&self, share: u16) -> Option<(usize, usize)> {
        let Section { stride, .. } = self.section(Kind::Records);
        if share >= self.shares() {
            return None;
        }
        let count = (stride / ROW).checked_sub(1)?;
        Some((usize::from(share) * stride, count))
    }

    pub(crate) fn memory(&self) -> &Memory {
        self.0.pages.memory()
    }

    #[expect(clippy::indexing_slicing, reason = "there is one of each kind")]
    pub(crate) fn section(&self, kind: Kind) -> Section {
        self.0.sections[kind as usize]
    }

    /// Returns `count` rows of a section, from byte offset `from` on.
    pub(crate) fn rows(&self, kind: Kind, from: usize, count: usize) -> Result<Rows, StateError> {
        let section = self.section(kind);
        let bytes = count.checked_mul(ROW).and_then(|len| len.checked_add(from));
        if bytes.is_none_or(|end| end > section.len) {
            return Err(StateError::OutOfRange);
        }
        let rows = Rows::new(&self.0.pages, section.offset + from, count);
        rows.ok_or(StateError::OutOfRange)
    }

    /// Allocates the pages of a section up to byte `end`, before they are written.
    #[expect(clippy::indexing_slicing, reason = "there is one of each kind")]
    pub(crate) fn prepare(&self, kind: Kind, end: usize) -> Result<(), StateError> {
        let mark = &self.0.allocated[kind as usize];
        let done = mark.load(Ordering::Relaxed);
        if end <= done {
            return Ok(());
        }
        let len = self.section(kind).len;
        if end > len {
            return Err(StateError::OutOfRange);
        }
        let end = end.next_multiple_of(PAGE).min(len);
        self.prepare_range(kind, done, end - done)?;
        mark.store(end, Ordering::Relaxed);
        Ok(())
    }

    /// Allocates the pages of a byte range, whether or not they were allocated before.
    pub(crate) fn prepare_range(
        &self,
        kind: Kind,
        from: usize,
        len: usize,
    ) -> Result<(), StateError> {
        let section = self.section(kind);
        Ok(self.0.pages.allocate(section.offset + from, len)?)
    }
}
