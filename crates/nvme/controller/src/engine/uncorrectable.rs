//! Write Uncorrectable ("NVM Command Set 1.1", 3.3.7): commands that make blocks unreadable, and
//! writes that make them readable again. Module [`marks`](crate::marks) describes the whole.
//!
//! The control half changes the marks and commits the change. A command that changes marks waits
//! for the commit ([`RemainingWork::Marking`]); a write does so after its volume request. The next
//! process therefore finds each block's mark as the host has seen it, or as an unfinished command
//! sets it, which is then executed again.

use super::namespaces::NamespaceTable;
use super::slots::{Kind, RemainingWork};
use super::{Event, Execution};
use nvme::cmd::io::RwCdw12;
use nvme::{Command, Status};

/// Request to the control half to change marks on behalf of a command.
pub(crate) struct Marking {
    /// Tag of the command in the engine.
    pub tag: u64,
    /// Index of the namespace.
    pub ns: usize,
    pub change: Change,
}

/// Change of marks that a command causes.
pub(crate) enum Change {
    /// Marks a range: first block and number of blocks.
    Mark(u64, u64),
    /// Removes the marks of ranges that were written: first block and number of blocks.
    Written(Vec<(u64, u64)>),
}

impl NamespaceTable {
    /// Looks up the marks of the namespace at this index by its NSID.
    pub(super) fn find_marks(&mut self, index: usize) {
        if let Some(ns) = self.list.get_mut(index)
            && !ns.is_vacant()
        {
            ns.marks = self.marks.of(ns.config.nsid);
            ns.watched = ns.marks.any();
        }
    }

    /// Checks whether a namespace has any marks, after its first block was marked or its last mark
    /// removed. Returns `false` when there is no namespace at this index.
    #[must_use]
    pub fn look_at_marks(&mut self, index: usize) -> bool {
        let Some(ns) = self.get_mut(index) else {
            return false;
        };
        let any = ns.marks.any();
        if std::mem::replace(&mut ns.watched, any) != any {
            self.index_namespaces();
        }
        true
    }

    /// Returns the first marked block of a range in the namespace at this index.
    pub(super) fn marked(&self, ns: usize, slba: u64, blocks: u64) -> Option<u64> {
        let ns = self.get(ns).filter(|ns| ns.watched)?;
        ns.marks.first(slba, blocks)
    }

    /// Returns the first marked block of a failed read command, or the command's first block
    /// without marks.
    pub(super) fn first_unreadable(&self, command: &Command, status: Status) -> u64 {
        let slba = command.slba();
        if !status.is(Status::UNRECOVERED_READ_ERROR) {
            return slba;
        }
        let blocks = RwCdw12::from_bits(command.cdw12.get()).nlb();
        let index = self.index_of(command.nsid.get()).ok();
        let marked = index.and_then(|index| self.marked(index, slba, blocks.into()));
        marked.unwrap_or(slba)
    }

    /// Returns whether a command ended with this status because this block is marked.
    pub(super) fn is_marked(&self, status: Status, nsid: u32, lba: u64) -> bool {
        status.is(Status::UNRECOVERED_READ_ERROR)
            && self
                .index_of(nsid)
                .is_ok_and(|index| self.marked(index, lba, 1).is_some())
    }
}

impl Execution<'_> {
    /// Starts Write Uncorrectable, which marks blocks as unreadable.
    pub(super) fn write_uncorrectable(
        &mut self,
        sqid: u16,
        command: &Command,
    ) -> Result<(), Status> {
        let blocks = u64::from(RwCdw12::from_bits(command.cdw12.get()).nlb());
        let extent = self.extent(command, blocks, true)?;
        let index = self.slot_for(sqid, command, extent.ns)?;
        if let Some(slot) = self.slots.get(index) {
            slot.kind = Kind::Other;
            slot.slba = extent.slba;
        }
        crash::point!("controller.mark.recorded");
        self.change_marks(index, Change::Mark(extent.slba, blocks), 0);
        Ok(())
    }

    /// Requests a change of marks from the control half. Afterwards the command ends with `result`
    /// as completion dword 0.
    fn change_marks(&mut self, index: u16, change: Change, result: u32) {
        let tag = self.slots.tag(index);
        let Some(slot) = self.slots.get(index) else {
            return self.broken("a command changes marks without its slot");
        };
        slot.work = RemainingWork::Marking(result);
        let ns = slot.ns;
        self.events
            .push_back(Event::Marking(Box::new(Marking { tag, ns, change })));
    }

    /// Ends a command after the control half has changed its marks, if the command is still
    /// outstanding. The status is `status` or else the command's own.
    pub fn end_marking(&mut self, tag: u64, status: Option<Status>) {
        let Some((index, slot)) = self.slots.tagged(tag) else {
            return;
        };
        let RemainingWork::Marking(result) = slot.work else {
            return;
        };
        slot.status = status.unwrap_or(slot.status);
        self.end_with(index, result);
    }

    /// Begins a write. On a namespace with marks, the write may have to remove some when it ends.
    pub(super) fn watch_write(&mut self, index: u16) {
        if let Some(slot) = self.slots.get(index)
            && self.namespaces.get(slot.ns).is_some_and(|ns| ns.watched)
        {
            slot.work = RemainingWork::Write;
        }
    }

    /// Returns the block size, as a power of two, and the NSID of a command's namespace. A missing
    /// namespace is reported as a violated invariant, and fails the command.
    pub(super) fn namespace_of(&mut self, index: u16) -> Option<(u32, u32)> {
        let slot = self.slots.get(index);
        let ns = slot.and_then(|slot| self.namespaces.get(slot.ns));
        let found = ns.map(|ns| (ns.shift, ns.config.nsid));
        if found.is_none() {
            self.broken("a command ends without its namespace");
            if let Some(slot) = self.slots.get(index) {
                slot.status = Status::INTERNAL_ERROR;
            }
        }
        found
    }

    /// Ends a write command and, unless it failed, removes the marks of its blocks.
    pub(super) fn end_write(&mut self, index: u16) {
        let Some(slot) = self.slots.get(index) else {
            return self.broken("a write ends without its slot");
        };
        let (slba, mut bytes) = (slot.slba, slot.bytes);
        if let RemainingWork::Zeroes(zeroed) = slot.work {
            bytes = zeroed;
        }
        let failed = !slot.status.is_success();
        match self.namespace_of(index) {
            Some((shift, _)) if !failed => self.end_written(index, &[(slba, bytes >> shift)], 0),
            _ => self.end(index),
        }
    }

    /// Ends a command that has written these block ranges, with completion dword 0.
    pub(super) fn end_written(&mut self, index: u16, written: &[(u64, u64)], result: u32) {
        let ns = self.slots.get(index).map(|slot| slot.ns);
        let ns = ns.and_then(|ns| self.namespaces.get(ns));
        let any_marked = ns.is_some_and(|ns| {
            let mut written = written.iter();
            written.any(|(slba, blocks)| ns.marks.first(*slba, *blocks).is_some())
        });
        if any_marked {
            self.change_marks(index, Change::Written(written.to_vec()), result)
        } else {
            self.end_with(index, result)
        }
    }
}
