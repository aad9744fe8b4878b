//! Submission queue entry (NVMe Base 2.1, 4.1).
//!
//! [`Command`] is the common form. The command-specific dwords are bitfields in [`admin`] and
//! [`io`], which convert from and to the plain dword:
//!
//! ```
//! use nvme::cmd::{Command, NvmOpcode, io::RwCdw12};
//!
//! let mut read = Command::new(NvmOpcode::READ.0, 7, 1);
//! read.set_slba(0x1_0000_0000);
//! read.cdw12 = RwCdw12::new().with_nlb_z(7).with_fua(true).into_bits().into();
//!
//! let rw = RwCdw12::from_bits(read.cdw12.get());
//! assert_eq!((read.slba(), rw.nlb_z(), rw.fua()), (0x1_0000_0000, 7, true));
//! ```

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute};

use crate::macros::{open_values, wire_struct};
use crate::sgl::SglDescriptor;

pub mod admin;
pub mod io;
pub mod namespace;
mod opcode;
pub mod placement;
pub mod reservation;
pub mod zone;

pub use opcode::{AdminOpcode, DataTransfer, NvmOpcode};

/// Broadcast value of the NSID field, which selects all namespaces (NVMe Base 2.1, 3.2.1).
pub const NSID_BROADCAST: u32 = 0xffff_ffff;

open_values! {
    /// Fused Operation field of a command (2 bits).
    pub Fuse: u8 {
        NORMAL = 0, "Normal operation";
        FIRST = 1, "Fused operation, first command";
        SECOND = 2, "Fused operation, second command";
    }
}

open_values! {
    /// PRP or SGL for Data Transfer (PSDT) field of a command (2 bits).
    pub Psdt: u8 {
        PRP = 0, "PRPs";
        SGL_MPTR_BUFFER = 1, "SGLs, MPTR is the address of one contiguous buffer";
        SGL_MPTR_SGL = 2, "SGLs, MPTR is the address of an SGL segment of one descriptor";
    }
}

/// Flags of a command: bits 15:8 of command dword 0.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Flags {
    /// Fused Operation.
    #[bits(2)]
    pub fuse: Fuse,
    #[bits(4)]
    __: u8,
    /// PRP or SGL for Data Transfer.
    #[bits(2)]
    pub psdt: Psdt,
}

/// Data Pointer: two PRPs or one SGL descriptor, selected by [`Flags::psdt`].
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(transparent)]
pub struct DataPointer(pub [u8; 16]);

impl DataPointer {
    /// Creates a data pointer with two PRP entries.
    #[inline]
    pub fn prp(prp1: u64, prp2: u64) -> Self {
        transmute!([U64::new(prp1), U64::new(prp2)])
    }

    /// Creates a data pointer with one SGL descriptor.
    #[inline]
    pub fn sgl(sgl1: SglDescriptor) -> Self {
        transmute!(sgl1)
    }

    /// Returns PRP Entry 1.
    #[inline]
    pub fn prp1(&self) -> u64 {
        let [prp1, _]: [U64; 2] = transmute!(*self);
        prp1.get()
    }

    /// Returns PRP Entry 2.
    #[inline]
    pub fn prp2(&self) -> u64 {
        let [_, prp2]: [U64; 2] = transmute!(*self);
        prp2.get()
    }

    /// Returns the first SGL descriptor.
    #[inline]
    pub fn sgl1(&self) -> SglDescriptor {
        transmute!(*self)
    }
}

wire_struct! {
    /// A submission queue entry, 64 bytes (NVMe Base 2.1, 4.1.1).
    pub struct Command(64) {
        /// Opcode: an [`AdminOpcode`] or [`NvmOpcode`], depending on the queue.
        pub opcode @ 0: u8,
        /// Flags: Fused Operation (FUSE), and PRP or SGL for Data Transfer (PSDT).
        pub flags @ 1: Flags,
        /// Command Identifier.
        pub cid @ 2: U16,
        /// Namespace Identifier: 0 if the command uses none, [`NSID_BROADCAST`] for all namespaces.
        pub nsid @ 4: U32,
        /// Command dword 2.
        pub cdw2 @ 8: U32,
        /// Command dword 3.
        pub cdw3 @ 12: U32,
        /// Metadata Pointer.
        pub mptr @ 16: U64,
        /// Data Pointer.
        pub dptr @ 24: DataPointer,
        /// Command dword 10.
        pub cdw10 @ 40: U32,
        /// Command dword 11.
        pub cdw11 @ 44: U32,
        /// Command dword 12.
        pub cdw12 @ 48: U32,
        /// Command dword 13.
        pub cdw13 @ 52: U32,
        /// Command dword 14.
        pub cdw14 @ 56: U32,
        /// Command dword 15.
        pub cdw15 @ 60: U32,
    }
}

impl Command {
    /// Size of an entry as a power of two, for CC.IOSQES and the SQES field of Identify.
    pub const SIZE_LOG2: u8 = 6;

    /// Creates a command in which all other fields are zero.
    pub fn new(opcode: u8, cid: u16, nsid: u32) -> Self {
        Self {
            opcode,
            cid: U16::new(cid),
            nsid: U32::new(nsid),
            ..Self::default()
        }
    }

    /// Returns the opcode of a command on the Admin queue.
    #[inline]
    pub const fn admin_opcode(&self) -> AdminOpcode {
        AdminOpcode(self.opcode)
    }

    /// Returns the opcode of a command on an I/O queue.
    #[inline]
    pub const fn nvm_opcode(&self) -> NvmOpcode {
        NvmOpcode(self.opcode)
    }

    /// Returns PRP Entry 1 of the data pointer.
    #[inline]
    pub fn prp1(&self) -> u64 {
        self.dptr.prp1()
    }

    /// Returns PRP Entry 2 of the data pointer.
    #[inline]
    pub fn prp2(&self) -> u64 {
        self.dptr.prp2()
    }

    /// Returns the first SGL descriptor of the data pointer.
    #[inline]
    pub fn sgl1(&self) -> SglDescriptor {
        self.dptr.sgl1()
    }

    /// Sets the data pointer to two PRP entries, and PSDT accordingly.
    pub fn set_prps(&mut self, prp1: u64, prp2: u64) {
        self.flags.set_psdt(Psdt::PRP);
        self.dptr = DataPointer::prp(prp1, prp2);
    }

    /// Sets the data pointer to an SGL, and PSDT accordingly. Metadata, if any, is in one
    /// contiguous buffer.
    pub fn set_sgl(&mut self, sgl1: SglDescriptor) {
        self.flags.set_psdt(Psdt::SGL_MPTR_BUFFER);
        self.dptr = DataPointer::sgl(sgl1);
    }

    /// Returns the starting LBA (dword 10: lower half, dword 11: upper half) of a command that has
    /// one.
    #[inline]
    pub const fn slba(&self) -> u64 {
        (self.cdw11.get() as u64) << 32 | self.cdw10.get() as u64
    }

    /// Sets the starting LBA in dwords 10 and 11.
    #[inline]
    pub const fn set_slba(&mut self, slba: u64) {
        self.cdw10 = U32::new(slba as u32);
        self.cdw11 = U32::new((slba >> 32) as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_flags_are_bits_8_to_15_of_dword_0() {
        let mut command = Command::new(0xab, 0x1234, 0x5566_7788);
        command.flags.set_fuse(Fuse::SECOND);
        assert_eq!(
            command.as_bytes()[..8],
            [0xab, 2, 0x34, 0x12, 0x88, 0x77, 0x66, 0x55]
        );
        command.set_sgl(SglDescriptor::data_block(1, 2));
        assert_eq!(command.as_bytes()[1], 0x42);
        command.set_prps(1, 2);
        assert_eq!(command.as_bytes()[1], 0x02);
    }

    #[test]
    fn data_pointer_is_prps_or_sgl() {
        let mut command = Command::default();
        command.set_prps(0x1111_0000_0000_1000, 0x2222_0000_0000_2000);
        assert_eq!(command.prp1(), 0x1111_0000_0000_1000);
        assert_eq!(command.prp2(), 0x2222_0000_0000_2000);
        assert_eq!(
            command.as_bytes()[24..32],
            0x1111_0000_0000_1000u64.to_le_bytes()
        );
        let sgl = SglDescriptor::segment(0x3000, 64);
        command.set_sgl(sgl);
        assert_eq!(command.sgl1(), sgl);
        assert_eq!(command.as_bytes()[39], 0x20);
    }

    #[test]
    fn unknown_opcode_is_preserved() {
        let mut bytes = [0u8; 64];
        bytes[0] = 0xee;
        bytes[1] = 0xff;
        let command = Command::read_from_bytes(&bytes).unwrap();
        assert_eq!(command.nvm_opcode(), NvmOpcode(0xee));
        assert_eq!(command.admin_opcode().name(), None);
        assert_eq!(command.flags.psdt(), Psdt(3));
        assert_eq!(command.as_bytes(), bytes);
    }
}
