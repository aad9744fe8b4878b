//! Encoding of commands and of the data that they send to the controller.

use dma::SegmentList;
use nvme::cmd::io::{DsmCdw10, DsmCdw11, DsmRange, RwCdw12, WriteZeroesCdw12};
use nvme::{Command, NvmOpcode};
use nvme_tcp::{Writer, digest};
use volume::{Op, Outgoing};

/// Maximum number of unused segment lists that a connection keeps for reuse.
const SPARE_LISTS: usize = 64;
/// Number of bytes that one step copies and adds to the data digest.
const CHUNK: usize = 4096;
/// Bit in the name of a sent list: it holds a piece of a command's memory, not all of it.
pub(super) const PIECE: u64 = 1 << 32;

/// Command of a connection's queue.
pub(super) type Subrequest = remote::queue::Subrequest<super::session::Answered>;

/// Returns the number of data bytes that the controller sends for this command.
pub(super) fn data_in(subrequest: &Subrequest) -> u32 {
    match subrequest.op {
        Op::Read => subrequest.len,
        _ => 0,
    }
}

/// Returns the number of bytes of the command's memory that are sent to the controller.
pub(super) fn data_out(subrequest: &Subrequest) -> u32 {
    match subrequest.op {
        Op::Write { .. } => subrequest.len,
        _ => 0,
    }
}

/// Encodes a command for namespace `nsid` with blocks of 2^`shift` bytes, without identifier and
/// data pointer; for Dataset Management also the range, which is its data.
pub(super) fn command(
    subrequest: &Subrequest,
    nsid: u32,
    shift: u8,
) -> (Command, Option<DsmRange>) {
    let (slba, blocks) = (subrequest.offset >> shift, subrequest.len >> shift);
    // Only commands with ranges in their data exceed 65,536 blocks.
    let nlb_z = (blocks.max(1) - 1).min(0xffff) as u16;
    let opcode = match subrequest.op {
        Op::Read => NvmOpcode::READ,
        Op::Write { .. } => NvmOpcode::WRITE,
        Op::Flush => NvmOpcode::FLUSH,
        Op::WriteZeroes { .. } => NvmOpcode::WRITE_ZEROES,
        Op::Deallocate => NvmOpcode::DATASET_MANAGEMENT,
    };
    let mut command = Command::new(opcode.0, 0, nsid);
    match subrequest.op {
        Op::Flush => {}
        Op::Read => {
            command.set_slba(slba);
            command.cdw12 = RwCdw12::new().with_nlb_z(nlb_z).into_bits().into();
        }
        Op::Write { fua } => {
            command.set_slba(slba);
            let cdw12 = RwCdw12::new().with_nlb_z(nlb_z).with_fua(fua);
            command.cdw12 = cdw12.into_bits().into();
        }
        Op::WriteZeroes { fua, deallocate } => {
            command.set_slba(slba);
            let cdw12 = WriteZeroesCdw12::new().with_nlb_z(nlb_z).with_fua(fua);
            command.cdw12 = cdw12.with_deac(deallocate).into_bits().into();
        }
        Op::Deallocate => {
            command.cdw10 = DsmCdw10::new().with_nr_z(0).into_bits().into();
            command.cdw11 = DsmCdw11::new().with_ad(true).into_bits().into();
            let range = DsmRange {
                cattr: 0.into(),
                nlb: blocks.into(),
                slba: slba.into(),
            };
            return (command, Some(range));
        }
    }
    (command, None)
}

/// Writer of PDUs with the data of commands.
pub(super) struct DataWriter {
    pub(super) pdus: Writer,
    /// Unused segment lists that are kept for reuse.
    lists: Vec<SegmentList>,
    chunk: Box<[u8; CHUNK]>,
}

impl DataWriter {
    pub(super) fn new(pdus: Writer) -> Self {
        Self {
            pdus,
            lists: Vec::new(),
            chunk: Box::new([0; CHUNK]),
        }
    }

    /// Keeps an unused segment list for reuse.
    pub(super) fn keep(&mut self, mut list: SegmentList) {
        if self.lists.len() < SPARE_LISTS {
            list.clear();
            self.lists.push(list);
        }
    }

    /// Adds bytes of a PDU to the message, and to the data digest.
    pub(super) fn bytes(&self, message: &mut Outgoing, bytes: &[u8]) {
        message.bytes(bytes);
        if self.pdus.data_digest() {
            message.bytes(&digest::crc32c(bytes).to_le_bytes());
        }
    }

    /// Adds `len` bytes of a write's data to the message, after their PDU header.
    pub(super) fn data(
        &mut self,
        message: &mut Outgoing,
        cid: u16,
        subrequest: &mut Subrequest,
        at: u32,
        len: u32,
    ) {
        if self.pdus.data_digest() {
            // The sent bytes must be those of the digest. A guest that changes its memory meanwhile
            // would break the connection otherwise.
            return self.copy(message, subrequest, at, len);
        }
        if at == 0 && len == subrequest.len && subrequest.lent == 0 {
            subrequest.lent += 1;
            message.data(cid.into(), std::mem::take(&mut subrequest.list));
            return;
        }
        let mut piece = self.lists.pop().unwrap_or_default();
        if subrequest.list.slice(at.into(), len.into(), &mut piece) != u64::from(len) {
            // The memory is shorter than the request's length. Zeroes keep the protocol intact, and
            // the request fails.
            subrequest.unstored = true;
            self.lists.push(piece);
            return self.copy(message, subrequest, at, len);
        }
        subrequest.lent += 1;
        message.data(u64::from(cid) | PIECE, piece);
    }

    fn copy(&mut self, message: &mut Outgoing, subrequest: &mut Subrequest, at: u32, len: u32) {
        let mut sum = digest::RunningDigest::new();
        let mut done = 0;
        while done < len {
            let count = (len - done).min(CHUNK as u32) as usize;
            let chunk = self.chunk.get_mut(..count).unwrap_or_default();
            let from = u64::from(at) + u64::from(done);
            let copied = subrequest.list.copy_to(from, chunk);
            if copied < chunk.len() {
                subrequest.unstored = true;
                chunk.iter_mut().skip(copied).for_each(|byte| *byte = 0);
            }
            sum.update(chunk);
            message.bytes(chunk);
            done += count as u32;
        }
        if self.pdus.data_digest() {
            message.bytes(&sum.value().to_le_bytes());
        }
    }

    /// Adds the part of a write's data that the controller has requested by an R2T PDU.
    pub(super) fn transfer(
        &mut self,
        message: &mut Outgoing,
        cid: u16,
        subrequest: &mut Subrequest,
        tag: u16,
        (at, len): (u32, u32),
    ) {
        let most = self.pdus.limits().h2c_data;
        let mut done = 0;
        while done < len {
            let piece = (len - done).min(most);
            let from = at.saturating_add(done);
            done += piece;
            let header = self.pdus.h2c_data(cid, tag, from, piece, done == len);
            message.bytes(&header);
            self.data(message, cid, subrequest, from, piece);
        }
        subrequest.owed = subrequest.owed.saturating_sub(len);
    }
}
