//! Host memory for commands that need their own (Compare, Verify, Copy), bounded over all
//! commands in flight.

use super::Engine;
use super::slots::{Kind, Work};
use dma::{Access, Buffer, SegmentList};
use nvme::cmd::io::RwCdw12;
use nvme::{Command, Status};
use volume::Op;

/// Maximum number of bytes in use at one time, unless one transfer is larger.
const BYTES: u64 = 16 << 20;

/// Budget of host memory for the guest's commands.
///
/// A command that finds no memory left ends with Command Interrupted, without Do Not Retry, by
/// which the standard requests a retry ("NVMe Base 2.1", 4.2.3.1). The command is not kept
/// waiting, because other commands behind it in its queue need no such memory.
pub(super) struct Budget {
    left: u64,
}

impl Budget {
    /// Creates a budget for at least one transfer of the largest size.
    pub fn new(max_transfer: u64) -> Self {
        Budget {
            left: BYTES.max(max_transfer),
        }
    }

    /// Takes a buffer of `len` bytes; they are returned by [`Budget::release`].
    pub fn take(&mut self, len: u64) -> Result<Buffer, Status> {
        let bytes = usize::try_from(len).map_err(|_| Status::INTERNAL_ERROR)?;
        self.reserve(len)?;
        Ok(Buffer::new(bytes))
    }

    /// Reserves `len` bytes for a buffer that is made later.
    pub fn reserve(&mut self, len: u64) -> Result<(), Status> {
        let left = self.left.checked_sub(len);
        self.left = left.ok_or(Status::COMMAND_INTERRUPTED)?;
        Ok(())
    }

    /// Returns the bytes of a dropped buffer.
    pub fn release(&mut self, len: u64) {
        self.left = self.left.saturating_add(len);
    }
}

impl Engine {
    /// Compare reads into host memory, and then compares that with the guest's data.
    pub(super) fn compare(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        self.read_aside(sqid, command, true)
    }

    /// Verify reads the data and drops it. Its size is limited like that of a transfer (VSL), to
    /// limit its memory.
    pub(super) fn verify(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        self.read_aside(sqid, command, false)
    }

    fn read_aside(&mut self, sqid: u16, command: &Command, compare: bool) -> Result<(), Status> {
        let blocks = RwCdw12::from_bits(command.cdw12.get()).nlb();
        let extent = self.extent(command, blocks.into(), false)?;
        if extent.len > self.max_transfer {
            return Err(Status::INVALID_FIELD.with_dnr(true));
        }
        let index = self.slot_for(sqid, command, extent.ns)?;
        if compare {
            self.walk_into(index, command, extent.len, Access::Read)?;
        }
        let buffer = self.scratch.take(extent.len)?;
        if let Some(slot) = self.slots.get(index) {
            if compare {
                slot.work = Work::Compare;
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
