//! A command of a request: its operation, progress, and encoding.

use crate::connect::NamespaceProperties;
use dma::{Buffer, SegmentList};
use nvme::cmd::io::{DsmCdw10, DsmCdw11, DsmRange, RwCdw12, WriteZeroesCdw12};
use nvme::{Command, NvmOpcode};
use std::time::Instant;
use zerocopy::IntoBytes;

/// Operation of a command to the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CommandKind {
    Read,
    Write { fua: bool },
    Flush,
    WriteZeroes { fua: bool, deallocate: bool },
    Deallocate,
}

impl CommandKind {
    /// Returns whether the command changes data of the namespace.
    pub(crate) const fn changes(self) -> bool {
        matches!(
            self,
            Self::Write { .. } | Self::WriteZeroes { .. } | Self::Deallocate
        )
    }

    /// Returns whether the command transfers the request's data.
    pub(crate) const fn has_data(self) -> bool {
        matches!(self, Self::Read | Self::Write { .. })
    }
}

/// Command to a controller that executes a request or a part of it.
#[derive(Debug)]
pub(crate) struct Subrequest {
    /// Index of the request that the command belongs to.
    pub parent: usize,
    pub what: CommandKind,
    /// Byte offset of the command in the volume.
    pub offset: u64,
    pub len: u32,
    /// Memory of the command's data; empty while the kernel uses it.
    pub list: SegmentList,
    /// Whether `list` is all of the request's memory, not only a part.
    pub whole: bool,
    /// Time at which the command was sent to the controller.
    pub since: Instant,
    /// Time at which the command was created.
    pub made: Instant,
    /// Number of pieces of the command's memory that the kernel uses.
    pub lent: u32,
    /// Whether the request was cancelled, so that the completion is discarded.
    pub given_up: bool,
    /// Whether received data could not be stored, because the request's memory is inaccessible.
    pub unstored: bool,
    /// Number of the message on the connection that contains the command.
    pub batch: u64,
    /// Number of data bytes of a write that the controller has not requested yet.
    pub owed: u32,
    /// Whether the connection has ended before the command was sent.
    pub unsent: bool,
    /// Number of connections that failed, other than by being closed, while the command was
    /// outstanding.
    pub violations: u8,
    /// Number of times that the command failed with a retryable error and was sent again.
    pub tries: u8,
    /// Completion that arrived while the kernel used the command's memory.
    pub answer: Option<Answered>,
}

/// Completion that a controller has sent for a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Answered {
    pub status: nvme::Status,
    /// Whether the digest of the command's data did not match.
    pub corrupt: bool,
}

impl Subrequest {
    pub(crate) fn new(parent: usize, what: CommandKind, now: Instant) -> Self {
        Self {
            parent,
            what,
            offset: 0,
            len: 0,
            list: SegmentList::new(),
            whole: false,
            since: now,
            made: now,
            lent: 0,
            given_up: false,
            unstored: false,
            batch: 0,
            owed: 0,
            unsent: true,
            violations: 0,
            tries: 0,
            answer: None,
        }
    }

    /// Returns the number of data bytes that the controller sends for this command.
    pub(crate) fn data_in(&self) -> u32 {
        match self.what {
            CommandKind::Read => self.len,
            _ => 0,
        }
    }

    /// Returns the number of bytes of the command's memory that are sent to the controller.
    pub(crate) fn data_out(&self) -> u32 {
        match self.what {
            CommandKind::Write { .. } => self.len,
            _ => 0,
        }
    }

    /// Encodes the command, without identifier and data pointer; for Dataset Management also the
    /// range, which is its data.
    pub(crate) fn command(&self, facts: &NamespaceProperties) -> (Command, Option<DsmRange>) {
        let shift = facts.namespace.block_shift;
        let (slba, blocks) = (self.offset >> shift, self.len >> shift);
        // Only commands with ranges in their data exceed 65,536 blocks.
        let nlb_z = (blocks.max(1) - 1).min(0xffff) as u16;
        let opcode = match self.what {
            CommandKind::Read => NvmOpcode::READ,
            CommandKind::Write { .. } => NvmOpcode::WRITE,
            CommandKind::Flush => NvmOpcode::FLUSH,
            CommandKind::WriteZeroes { .. } => NvmOpcode::WRITE_ZEROES,
            CommandKind::Deallocate => NvmOpcode::DATASET_MANAGEMENT,
        };
        let mut command = Command::new(opcode.0, 0, facts.namespace.nsid);
        match self.what {
            CommandKind::Flush => {}
            CommandKind::Read => {
                command.set_slba(slba);
                command.cdw12 = RwCdw12::new().with_nlb_z(nlb_z).into_bits().into();
            }
            CommandKind::Write { fua } => {
                command.set_slba(slba);
                let cdw12 = RwCdw12::new().with_nlb_z(nlb_z).with_fua(fua);
                command.cdw12 = cdw12.into_bits().into();
            }
            CommandKind::WriteZeroes { fua, deallocate } => {
                command.set_slba(slba);
                let cdw12 = WriteZeroesCdw12::new().with_nlb_z(nlb_z).with_fua(fua);
                command.cdw12 = cdw12.with_deac(deallocate).into_bits().into();
            }
            CommandKind::Deallocate => {
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

    /// Returns the memory of the command for sending, and keeps a copy if the controller may still
    /// request data.
    pub(crate) fn keep_copy(&mut self) -> SegmentList {
        let list = std::mem::take(&mut self.list);
        if self.owed > 0 {
            let mut copy = Buffer::new(self.len as usize);
            list.copy_to(0, &mut copy);
            self.list = SegmentList::owned(copy);
        }
        list
    }

    /// Copies received data into the command's memory, at byte offset `at` of the command.
    pub(crate) fn store(&mut self, at: u32, bytes: &[u8]) {
        if !self.given_up {
            self.unstored |= self.list.copy_from(at.into(), bytes) != bytes.len();
        }
    }
}

/// Returns the bytes of a Dataset Management range, as the command sends them.
pub(crate) fn range_bytes(range: &DsmRange) -> &[u8] {
    range.as_bytes()
}
