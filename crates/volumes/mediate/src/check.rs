//! Checks of a guest's command: opcode, namespace, blocks (NVM Command Set 1.1, 3.3).
//!
//! The device's command is built from zeroes: a field that is not set on purpose is zero,
//! regardless of the guest's value. Hints, directives and protection information, which the slice
//! does not offer, therefore never reach the device.

use dma::Access;
use driver::DeviceLimits;
use nvme::cmd::Fuse;
use nvme::cmd::io::{DsmCdw10, DsmCdw11, RwCdw12, WriteZeroesCdw12};
use nvme::{Command, NvmOpcode, Status};

use crate::slice::Slice;

/// Memory that a guest's command refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataRequirement {
    Nothing,
    /// Guest memory of this number of bytes.
    Data {
        len: u64,
        access: Access,
    },
    /// List of this number of Dataset Management ranges.
    Ranges(usize),
}

/// Command that was checked and translated for the device, without its data pointer.
#[derive(Debug)]
pub(crate) struct Plan {
    pub command: Command,
    pub wants: DataRequirement,
}

/// Rules by which all commands of a virtual queue pair are checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub nsid: u32,
    pub slice: Slice,
    /// Whether every write must be durable on completion, because the guest has disabled its write
    /// cache.
    pub force_fua: bool,
    pub compare: bool,
    pub dataset_management: bool,
    pub write_zeroes: bool,
    pub verify: bool,
}

impl Rules {
    pub fn new(nsid: u32, slice: Slice, limits: &DeviceLimits) -> Self {
        Self {
            nsid,
            slice,
            force_fua: false,
            compare: limits.compare,
            dataset_management: limits.dataset_management,
            write_zeroes: limits.write_zeroes,
            verify: limits.verify,
        }
    }

    /// Returns whether the device supports the command with this opcode.
    pub fn supports(&self, opcode: NvmOpcode) -> bool {
        match opcode {
            NvmOpcode::READ | NvmOpcode::WRITE | NvmOpcode::FLUSH => true,
            NvmOpcode::COMPARE => self.compare,
            NvmOpcode::WRITE_ZEROES => self.write_zeroes,
            NvmOpcode::DATASET_MANAGEMENT => self.dataset_management,
            NvmOpcode::VERIFY => self.verify,
            _ => false,
        }
    }

    /// Checks a guest's command, except for its memory, and translates it for the device.
    #[inline]
    pub fn check(&self, guest: &Command) -> Result<Plan, Status> {
        // Fused operations are not offered.
        if guest.flags.fuse() != Fuse::NORMAL {
            return Err(Status::INVALID_FIELD.with_dnr(true));
        }
        if guest.nsid.get() != self.nsid {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(true));
        }
        let opcode = guest.nvm_opcode();
        if !self.supports(opcode) {
            return Err(Status::INVALID_OPCODE.with_dnr(true));
        }
        let mut command = Command::new(opcode.0, 0, self.slice.nsid());
        let cdw12 = RwCdw12::from_bits(guest.cdw12.get());
        let wants = match opcode {
            NvmOpcode::READ | NvmOpcode::WRITE | NvmOpcode::COMPARE => {
                let write = opcode == NvmOpcode::WRITE;
                let len = self.extent(guest, &mut command, cdw12.nlb(), write)?;
                let made = RwCdw12::new()
                    .with_nlb_z(cdw12.nlb_z())
                    .with_fua(cdw12.fua() || (write && self.force_fua))
                    .with_lr(cdw12.lr());
                command.cdw12 = made.into_bits().into();
                let access = if opcode == NvmOpcode::READ {
                    Access::Write
                } else {
                    Access::Read
                };
                DataRequirement::Data { len, access }
            }
            NvmOpcode::VERIFY => {
                self.extent(guest, &mut command, cdw12.nlb(), false)?;
                let made = RwCdw12::new()
                    .with_nlb_z(cdw12.nlb_z())
                    .with_fua(cdw12.fua())
                    .with_lr(cdw12.lr());
                command.cdw12 = made.into_bits().into();
                DataRequirement::Nothing
            }
            NvmOpcode::WRITE_ZEROES => {
                let cdw12 = WriteZeroesCdw12::from_bits(guest.cdw12.get());
                self.extent(guest, &mut command, cdw12.nlb(), true)?;
                let made = WriteZeroesCdw12::new()
                    .with_nlb_z(cdw12.nlb_z())
                    .with_deac(cdw12.deac())
                    .with_fua(cdw12.fua() || self.force_fua)
                    .with_lr(cdw12.lr());
                command.cdw12 = made.into_bits().into();
                DataRequirement::Nothing
            }
            NvmOpcode::DATASET_MANAGEMENT => {
                let count = DsmCdw10::from_bits(guest.cdw10.get()).nr();
                let hints = DsmCdw11::from_bits(guest.cdw11.get());
                if hints.ad() && self.slice.read_only() {
                    return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr(true));
                }
                let made = DsmCdw10::new().with_nr_z((count - 1) as u8);
                command.cdw10 = made.into_bits().into();
                let made = DsmCdw11::new()
                    .with_idr(hints.idr())
                    .with_idw(hints.idw())
                    .with_ad(hints.ad());
                command.cdw11 = made.into_bits().into();
                DataRequirement::Ranges(usize::from(count))
            }
            _ => DataRequirement::Nothing,
        };
        Ok(Plan { command, wants })
    }

    /// Checks the blocks of a command, and stores the device's block numbers into `command`.
    /// Returns their bytes.
    #[inline]
    fn extent(
        &self,
        guest: &Command,
        command: &mut Command,
        blocks: u32,
        write: bool,
    ) -> Result<u64, Status> {
        if write && self.slice.read_only() {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr(true));
        }
        let blocks = u64::from(blocks);
        let lba = self.slice.lba(guest.slba(), blocks);
        command.set_slba(lba.ok_or(Status::LBA_OUT_OF_RANGE.with_dnr(true))?);
        Ok(blocks << self.slice.block_shift())
    }

    /// Checks the ranges of Dataset Management, and converts them to the device's block numbers:
    /// two words each.
    pub fn ranges<'w>(&self, bytes: &[u8], words: &'w mut [u64]) -> Result<&'w [u64], Status> {
        let (ranges, _) = bytes.as_chunks::<16>();
        let mut count = 0;
        for (range, made) in ranges.iter().zip(words.chunks_exact_mut(2)) {
            let range = u128::from_le_bytes(*range);
            // Context attributes, which are hints, are bits 31:0.
            let (blocks, lba) = ((range >> 32) as u32, (range >> 64) as u64);
            let lba = self.slice.lba(lba, u64::from(blocks));
            let lba = lba.ok_or(Status::LBA_OUT_OF_RANGE.with_dnr(true))?;
            if let [low, high] = made {
                (*low, *high) = (u64::from(blocks) << 32, lba);
            }
            count += 2;
        }
        Ok(words.get(..count).unwrap_or_default())
    }
}
