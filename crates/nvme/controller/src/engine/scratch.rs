//! Process memory for commands that need buffers of their own (Compare, Verify, Copy), with a limit
//! for all outstanding commands together.

use super::Execution;
use super::slots::{Kind, RemainingWork};
use dma::{Access, Buffer, SegmentList};
use nvme::cmd::io::RwCdw12;
use nvme::{Command, Status};
use volume::Op;

/// Maximum number of bytes of process memory for Compare, Verify and Copy, unless a single transfer
/// is larger.
const BYTES: u64 = 16 << 20;

/// Budget of process memory for buffers of guest commands.
///
/// A command for which no memory is left ends with Command Interrupted, without Do Not Retry, by
/// which the standard requests a retry ("NVMe Base 2.1", 4.2.3.1). The command does not wait,
/// because later commands in its queue may need no such memory.
pub(super) struct Budget {
    left: u64,
}

impl Budget {
    /// Creates a budget, large enough for at least one transfer of `max_transfer` bytes.
    pub fn new(max_transfer: u64) -> Self {
        Budget {
            left: BYTES.max(max_transfer),
        }
    }

    /// Allocates a buffer of `len` bytes, which [`Budget::release`] returns to the budget.
    pub fn take(&mut self, len: u64) -> Result<Buffer, Status> {
        let bytes = usize::try_from(len).map_err(|_| Status::INTERNAL_ERROR)?;
        self.reserve(len)?;
        Ok(Buffer::new(bytes))
    }

    /// Reserves `len` bytes for a buffer that is allocated later.
    pub fn reserve(&mut self, len: u64) -> Result<(), Status> {
        let left = self.left.checked_sub(len);
        self.left = left.ok_or(Status::COMMAND_INTERRUPTED)?;
        Ok(())
    }

    /// Returns the bytes of a dropped buffer to the budget.
    pub fn release(&mut self, len: u64) {
        self.left = self.left.saturating_add(len);
    }
}

impl Execution<'_> {
    /// Starts Compare, which reads into process memory and compares that with the guest's data.
    pub(super) fn compare(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        self.read_aside(sqid, command, true)
    }

    /// Starts Verify, which reads the data and drops it. The size is limited like that of a
    /// transfer (VSL), which bounds the memory.
    pub(super) fn verify(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        self.read_aside(sqid, command, false)
    }

    fn read_aside(&mut self, sqid: u16, command: &Command, compare: bool) -> Result<(), Status> {
        let blocks = RwCdw12::from_bits(command.cdw12.get()).nlb();
        let extent = self.extent(command, blocks.into(), false)?;
        if extent.len > self.settings.max_transfer {
            return Err(Status::INVALID_FIELD.with_dnr(true));
        }
        let index = self.slot_for(sqid, command, extent.ns)?;
        if compare {
            self.walk_into(index, command, extent.len, Access::Read)?;
        }
        let buffer = self.slots.scratch.take(extent.len)?;
        if let Some(slot) = self.slots.get(index) {
            if compare {
                slot.work = RemainingWork::Compare;
            }
            slot.kind = if compare { Kind::Read } else { Kind::Verify };
            slot.bytes = extent.len;
            slot.scratch = extent.len;
            slot.slba = extent.slba;
        }
        let data = SegmentList::owned(buffer);
        self.submit(index, extent.ns, Op::Read, extent.offset, extent.len, data);
        Ok(())
    }
}
