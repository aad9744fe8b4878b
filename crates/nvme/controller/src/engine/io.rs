//! I/O commands of the NVM command set ("NVM Command Set 1.1", 3.3): their checks, translation of
//! data addresses, and submission to the volume.

use super::Execution;
use super::execution::Extent;
use super::slots::{Kind, RemainingWork};
use dma::Access;
use nvme::cmd::NSID_BROADCAST;
use nvme::cmd::io::{RwCdw12, WriteZeroesCdw12};
use nvme::{Command, NvmOpcode, Status};
use placement::Writer;
use volume::{Op, Request};

impl Execution<'_> {
    pub(super) fn read_write(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        let cdw12 = RwCdw12::from_bits(command.cdw12.get());
        let write = command.nvm_opcode() == NvmOpcode::WRITE;
        let extent = self.extent(command, cdw12.nlb().into(), write)?;
        if extent.len > self.settings.max_transfer {
            return Err(Status::INVALID_FIELD.with_dnr(true));
        }
        let again = self.slots.is_reserved();
        let index = self.slot_for(sqid, command, extent.ns)?;
        let access = if write { Access::Read } else { Access::Write };
        self.walk_into(index, command, extent.len, access)?;
        if write {
            let (ns, dtype, blocks) = (extent.ns, cdw12.dtype(), cdw12.nlb().into());
            self.place(ns, command, dtype, blocks, Writer::Host, again)?;
        }
        let op = if write {
            self.watch_write(index);
            Op::Write {
                fua: cdw12.fua() || !self.settings.features.write_cache,
            }
        } else {
            Op::Read
        };
        self.start(index, extent, op, Kind::of_transfer(op));
        Ok(())
    }

    pub(super) fn flush(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        if command.nsid.get() == NSID_BROADCAST {
            let index = self.slot_for(sqid, command, 0)?;
            if let Some(slot) = self.slots.get(index) {
                slot.work = RemainingWork::FlushAll(0);
                slot.kind = Kind::Flush;
            }
            self.flush_next(index);
            return Ok(());
        }
        let ns = self.namespaces.index_of(command.nsid.get())?;
        let index = self.slot_for(sqid, command, ns)?;
        let extent = Extent {
            ns,
            slba: 0,
            offset: 0,
            len: 0,
        };
        self.start(index, extent, Op::Flush, Kind::Flush);
        Ok(())
    }

    /// Submits the next flush of a command that flushes all namespaces. They are flushed one by
    /// one, because a tag identifies only one request at any time.
    pub(super) fn flush_next(&mut self, index: u16) {
        loop {
            let Some(slot) = self.slots.get(index) else {
                return self.broken("a flush goes on without its slot");
            };
            let RemainingWork::FlushAll(next) = &mut slot.work else {
                return self.broken("a flush goes on in another command's slot");
            };
            let ns = *next;
            *next += 1;
            let tag = self.slots.tag(index);
            let Some(namespace) = self.namespaces.get_mut(ns) else {
                return self.end(index);
            };
            if let Some(slot) = self.slots.get(index) {
                slot.ns = ns;
            }
            let request = Request::flush(tag);
            match namespace.queue.submit(request) {
                None => return,
                Some(mut completion) => {
                    if self.waits_for_table(index, &mut completion) {
                        return;
                    }
                    self.flush_done(index, completion.result);
                }
            }
        }
    }

    pub(super) fn write_zeroes(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        let cdw12 = WriteZeroesCdw12::from_bits(command.cdw12.get());
        let blocks = cdw12.nlb().into();
        let extent = self.extent(command, blocks, true)?;
        let again = self.slots.is_reserved();
        let index = self.slot_for(sqid, command, extent.ns)?;
        self.place(
            extent.ns,
            command,
            cdw12.dtype(),
            blocks,
            Writer::Host,
            again,
        )?;
        let op = Op::WriteZeroes {
            deallocate: cdw12.deac(),
            fua: cdw12.fua() || !self.settings.features.write_cache,
        };
        if let Some(slot) = self.slots.get(index) {
            slot.work = RemainingWork::Zeroes(extent.len);
        }
        self.start(index, extent, op, Kind::Other);
        Ok(())
    }
}
