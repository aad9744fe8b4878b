//! Controller properties (registers) and doorbells (NVMe Base 2.1, 3.1.4; NVMe over PCIe Transport
//! 1.1, 3.1).
//!
//! The values are as a CPU sees them. On the bus they are little endian.

use bitfield_struct::bitfield;

use crate::macros::open_values;

/// Offset of the Controller Capabilities register, 64 bits, read only.
pub const CAP: u64 = 0x00;
/// Offset of the Version register, 32 bits, read only.
pub const VS: u64 = 0x08;
/// Offset of the Interrupt Mask Set register, 32 bits; undefined under MSI-X.
pub const INTMS: u64 = 0x0c;
/// Offset of the Interrupt Mask Clear register, 32 bits; undefined under MSI-X.
pub const INTMC: u64 = 0x10;
/// Offset of the Controller Configuration register, 32 bits.
pub const CC: u64 = 0x14;
/// Offset of the Controller Status register, 32 bits.
pub const CSTS: u64 = 0x1c;
/// Offset of the NVM Subsystem Reset register, 32 bits; see [`NSSR_MAGIC`].
pub const NSSR: u64 = 0x20;
/// Offset of the Admin Queue Attributes register, 32 bits.
pub const AQA: u64 = 0x24;
/// Offset of the Admin Submission Queue Base Address register, 64 bits; bits 11:0 are reserved.
pub const ASQ: u64 = 0x28;
/// Offset of the Admin Completion Queue Base Address register, 64 bits; bits 11:0 are reserved.
pub const ACQ: u64 = 0x30;
/// Offset of the Controller Memory Buffer Location register, 32 bits.
pub const CMBLOC: u64 = 0x38;
/// Offset of the Controller Memory Buffer Size register, 32 bits.
pub const CMBSZ: u64 = 0x3c;
/// Offset of the Boot Partition Information register, 32 bits.
pub const BPINFO: u64 = 0x40;
/// Offset of the Boot Partition Read Select register, 32 bits.
pub const BPRSEL: u64 = 0x44;
/// Offset of the Boot Partition Memory Buffer Location register, 64 bits.
pub const BPMBL: u64 = 0x48;
/// Offset of the Controller Memory Buffer Memory Space Control register, 64 bits.
pub const CMBMSC: u64 = 0x50;
/// Offset of the Controller Memory Buffer Status register, 32 bits.
pub const CMBSTS: u64 = 0x58;
/// Offset of the Controller Memory Buffer Elasticity Buffer Size register, 32 bits.
pub const CMBEBS: u64 = 0x5c;
/// Offset of the Controller Memory Buffer Sustained Write Throughput register, 32 bits.
pub const CMBSWTP: u64 = 0x60;
/// Offset of the NVM Subsystem Shutdown register, 32 bits.
pub const NSSD: u64 = 0x64;
/// Offset of the Controller Ready Timeouts register, 32 bits, read only.
pub const CRTO: u64 = 0x68;
/// Offset of the Persistent Memory Region Capabilities register, 32 bits.
pub const PMRCAP: u64 = 0xe00;
/// Offset of the Persistent Memory Region Memory Space Control Upper register, 32 bits.
pub const PMRMSCU: u64 = 0xe18;
/// Offset of the first doorbell: the tail of the Admin Submission Queue (NVMe over PCIe Transport
/// 1.1, 3.1.2).
pub const DOORBELLS: u64 = 0x1000;

/// Value ("NVMe") that starts an NVM Subsystem Reset when written to NSSR (NVMe Base 2.1, 3.1.4.7).
pub const NSSR_MAGIC: u32 = 0x4e56_4d65;
/// Value ("Nrml") that starts a normal NVM Subsystem Shutdown when written to NSSD (NVMe Base 2.1,
/// 3.1.4.20).
pub const NSSD_NORMAL: u32 = 0x4e72_6d6c;
/// Value ("Abpt") that starts an abrupt NVM Subsystem Shutdown when written to NSSD.
pub const NSSD_ABRUPT: u32 = 0x4162_7074;

/// Returns the distance of consecutive doorbells in bytes, `4 << CAP.DSTRD`.
#[inline]
pub const fn doorbell_stride(dstrd: u8) -> u64 {
    4 << (dstrd & 0xf)
}

/// Returns the offset in BAR0 of a queue's doorbell: the tail of a submission queue, or the head of
/// a completion queue (NVMe over PCIe Transport 1.1, 3.1.2.1 and 3.1.2.2).
#[inline]
pub const fn doorbell_offset(qid: u16, is_cq: bool, dstrd: u8) -> u64 {
    DOORBELLS + (2 * qid as u64 + is_cq as u64) * doorbell_stride(dstrd)
}

/// Doorbell, identified by its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Doorbell {
    /// Queue identifier; 0 is the Admin queue pair.
    pub qid: u16,
    /// Whether the doorbell is a completion queue head; otherwise it is a submission queue tail.
    pub is_cq: bool,
}

impl Doorbell {
    /// Returns the doorbell at an offset in BAR0; `None` for an offset below the doorbells, between
    /// two of them, or beyond the last possible queue identifier.
    pub const fn at(offset: u64, dstrd: u8) -> Option<Self> {
        let Some(relative) = offset.checked_sub(DOORBELLS) else {
            return None;
        };
        let stride = doorbell_stride(dstrd);
        let index = relative / stride;
        if relative % stride != 0 || index / 2 > u16::MAX as u64 {
            return None;
        }
        Some(Self {
            qid: (index / 2) as u16,
            is_cq: index % 2 == 1,
        })
    }

    /// Returns the offset of the doorbell in BAR0.
    pub const fn offset(self, dstrd: u8) -> u64 {
        doorbell_offset(self.qid, self.is_cq, dstrd)
    }
}

/// Register CAP: Controller Capabilities (NVMe Base 2.1, 3.1.4.1).
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Cap {
    /// Maximum Queue Entries Supported, zero-based; at least 1 (two entries).
    pub mqes_z: u16,
    /// Contiguous Queues Required.
    pub cqr: bool,
    /// Arbitration Mechanism Supported: bit 0 for weighted round robin with urgent priority class,
    /// bit 1 for vendor specific.
    #[bits(2)]
    pub ams: u8,
    #[bits(5)]
    __: u8,
    /// Timeout: maximum time from a change of CC.EN until CSTS.RDY follows, in units of 500 ms.
    pub to: u8,
    /// Doorbell Stride: consecutive doorbells are `4 << dstrd` bytes apart.
    #[bits(4)]
    pub dstrd: u8,
    /// NVM Subsystem Reset Supported.
    pub nssrs: bool,
    /// Command Sets Supported.
    #[bits(8)]
    pub css: CapCss,
    /// Boot Partition Support.
    pub bps: bool,
    /// Controller Power Scope.
    #[bits(2)]
    pub cps: u8,
    /// Memory Page Size Minimum: `4096 << mpsmin` bytes.
    #[bits(4)]
    pub mpsmin: u8,
    /// Memory Page Size Maximum: `4096 << mpsmax` bytes.
    #[bits(4)]
    pub mpsmax: u8,
    /// Persistent Memory Region Supported.
    pub pmrs: bool,
    /// Controller Memory Buffer Supported.
    pub cmbs: bool,
    /// NVM Subsystem Shutdown Supported.
    pub nsss: bool,
    /// Controller Ready With Media Support (CRMS bit 0).
    pub crwms: bool,
    /// Controller Ready Independent of Media Support (CRMS bit 1).
    pub crims: bool,
    /// NVM Subsystem Shutdown Enhancements Supported.
    pub nsses: bool,
    #[bits(2)]
    __: u8,
}

/// Field CAP.CSS: Command Sets Supported.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct CapCss {
    /// NVM Command Set Support.
    pub ncss: bool,
    #[bits(5)]
    __: u8,
    /// I/O Command Set Support: Identify CNS 1Ch reports one or more I/O command sets.
    pub iocss: bool,
    /// No I/O Command Set Support: only Admin commands are supported.
    pub noiocss: bool,
}

/// Register VS: Version (NVMe Base 2.1, 3.1.4.2).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Vs {
    /// Tertiary version number.
    pub ter: u8,
    /// Minor version number.
    pub mnr: u8,
    /// Major version number.
    pub mjr: u16,
}

impl Vs {
    /// Version 1.4 of the NVMe specification.
    pub const V1_4: Self = Self::version(1, 4, 0);
    /// Version 2.1 of the NVMe specification.
    pub const V2_1: Self = Self::version(2, 1, 0);

    /// Creates a version from its major, minor and tertiary number.
    pub const fn version(mjr: u16, mnr: u8, ter: u8) -> Self {
        Self::new().with_mjr(mjr).with_mnr(mnr).with_ter(ter)
    }
}

/// Register CC: Controller Configuration (NVMe Base 2.1, 3.1.4.5).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Cc {
    /// Enable: a change to 1 enables the controller, and a change to 0 resets it.
    pub en: bool,
    #[bits(3)]
    __: u8,
    /// I/O Command Set Selected.
    #[bits(3)]
    pub css: CcCss,
    /// Memory Page Size: `4096 << mps` bytes.
    #[bits(4)]
    pub mps: u8,
    /// Arbitration Mechanism Selected.
    #[bits(3)]
    pub ams: Ams,
    /// Shutdown Notification.
    #[bits(2)]
    pub shn: Shn,
    /// I/O Submission Queue Entry Size: `1 << iosqes` bytes.
    #[bits(4)]
    pub iosqes: u8,
    /// I/O Completion Queue Entry Size: `1 << iocqes` bytes.
    #[bits(4)]
    pub iocqes: u8,
    /// Controller Ready Independent of Media Enable.
    pub crime: bool,
    #[bits(7)]
    __: u8,
}

open_values! {
    /// Field CC.CSS: I/O Command Set Selected (3 bits).
    pub CcCss: u8 {
        NVM = 0, "NVM Command Set";
        ALL_SUPPORTED = 6, "All Supported I/O Command Sets";
        ADMIN_ONLY = 7, "Admin Command Set only";
    }
}

open_values! {
    /// Field CC.AMS: Arbitration Mechanism Selected (3 bits).
    pub Ams: u8 {
        ROUND_ROBIN = 0, "Round Robin";
        WEIGHTED_ROUND_ROBIN = 1, "Weighted Round Robin with Urgent Priority Class";
        VENDOR_SPECIFIC = 7, "Vendor Specific";
    }
}

open_values! {
    /// Field CC.SHN: Shutdown Notification (2 bits).
    pub Shn: u8 {
        NONE = 0, "No notification";
        NORMAL = 1, "Normal shutdown notification";
        ABRUPT = 2, "Abrupt shutdown notification";
    }
}

/// Register CSTS: Controller Status (NVMe Base 2.1, 3.1.4.6).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Csts {
    /// Ready: the controller processes commands.
    pub rdy: bool,
    /// Controller Fatal Status: the controller has failed, and has to be reset.
    pub cfs: bool,
    /// Shutdown Status.
    #[bits(2)]
    pub shst: Shst,
    /// NVM Subsystem Reset Occurred; cleared by writing 1.
    pub nssro: bool,
    /// Processing Paused.
    pub pp: bool,
    /// Shutdown Type: set when `shst` reports a shutdown of the NVM subsystem.
    pub st: bool,
    #[bits(25)]
    __: u32,
}

open_values! {
    /// Field CSTS.SHST: Shutdown Status (2 bits).
    pub Shst: u8 {
        NORMAL = 0, "Normal operation";
        OCCURRING = 1, "Shutdown processing occurring";
        COMPLETE = 2, "Shutdown processing complete";
    }
}

/// Register AQA: Admin Queue Attributes (NVMe Base 2.1, 3.1.4.8).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Aqa {
    /// Admin Submission Queue Size in entries, zero-based.
    #[bits(12)]
    pub asqs_z: u16,
    #[bits(4)]
    __: u8,
    /// Admin Completion Queue Size in entries, zero-based.
    #[bits(12)]
    pub acqs_z: u16,
    #[bits(4)]
    __: u8,
}

/// Register BPINFO: Boot Partition Information (NVMe Base 2.1, 3.1.4.13).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Bpinfo {
    /// Boot Partition Size, in units of 128 KiB.
    #[bits(15)]
    pub bpsz: u16,
    #[bits(9)]
    __: u16,
    /// Boot Read Status.
    #[bits(2)]
    pub brs: BootReadStatus,
    #[bits(5)]
    __: u8,
    /// Active Boot Partition ID.
    pub abpid: bool,
}

open_values! {
    /// Field BPINFO.BRS: Boot Read Status (2 bits).
    pub BootReadStatus: u8 {
        NONE = 0, "No read was requested";
        IN_PROGRESS = 1, "Boot Partition read in progress";
        SUCCESS = 2, "Boot Partition read completed successfully";
        ERROR = 3, "Boot Partition read completed with an error";
    }
}

/// Register BPRSEL: Boot Partition Read Select (NVMe Base 2.1, 3.1.4.14).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Bprsel {
    /// Boot Partition Read Size, in units of 4 KiB.
    #[bits(10)]
    pub bprsz: u16,
    /// Boot Partition Read Offset, in units of 4 KiB.
    #[bits(20)]
    pub bprof: u32,
    __: bool,
    /// Boot Partition Identifier of the partition to read.
    pub bpid: bool,
}

/// Register CMBLOC: Controller Memory Buffer Location (NVMe Base 2.1, 3.1.4.11).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Cmbloc {
    /// Base Indicator Register: index of the BAR, 0 or 2 to 5; the lower half of a 64-bit BAR.
    #[bits(3)]
    pub bir: u8,
    /// CMB Queue Mixed Memory Support: a queue may be partly in the buffer.
    pub cqmms: bool,
    /// CMB Queue Physically Discontiguous Support.
    pub cqpds: bool,
    /// CMB Data Pointer Mixed Locations Support: a PRP list or SGL may be partly in the buffer.
    pub cdpmls: bool,
    /// CMB Data Pointer and Command Independent Locations Support: a PRP list or SGL may be in the
    /// buffer when its command is not.
    pub cdpcils: bool,
    /// CMB Data Metadata Mixed Memory Support: the data and metadata of a command may be partly in
    /// the buffer.
    pub cdmmms: bool,
    /// CMB Queue Dword Alignment.
    pub cqda: bool,
    #[bits(3)]
    __: u8,
    /// Offset of the buffer in the BAR, in units of [`Cmbsz::szu`].
    #[bits(20)]
    pub ofst: u32,
}

/// Register CMBSZ: Controller Memory Buffer Size (NVMe Base 2.1, 3.1.4.12).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Cmbsz {
    /// Submission Queue Support: submission queues may be in the buffer.
    pub sqs: bool,
    /// Completion Queue Support: completion queues may be in the buffer.
    pub cqs: bool,
    /// PRP SGL List Support: PRP lists and SGL segments may be in the buffer.
    pub lists: bool,
    /// Read Data Support: the controller may transfer data to the buffer.
    pub rds: bool,
    /// Write Data Support: the controller may transfer data from the buffer.
    pub wds: bool,
    #[bits(3)]
    __: u8,
    /// Size Units: a unit has `4096 << (4 * szu)` bytes.
    #[bits(4)]
    pub szu: u8,
    /// Size in units of `szu`; 0 when there is no buffer.
    #[bits(20)]
    pub sz: u32,
}

impl Cmbsz {
    /// Returns the size of the buffer in bytes.
    pub const fn bytes(self) -> u64 {
        (self.sz() as u64) << (12 + 4 * self.szu() as u32)
    }
}

/// Register CMBMSC: Controller Memory Buffer Memory Space Control (NVMe Base 2.1, 3.1.4.16).
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Cmbmsc {
    /// Capabilities Registers Enabled: CMBLOC and CMBSZ contain the properties of the buffer.
    pub cre: bool,
    /// Controller Memory Space Enable: commands may use addresses in the buffer.
    pub cmse: bool,
    #[bits(10)]
    __: u16,
    /// Controller Base Address: bits 63:12 of the buffer's first address in commands.
    #[bits(52)]
    pub cba: u64,
}

/// Register CMBSTS: Controller Memory Buffer Status (NVMe Base 2.1, 3.1.4.17).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Cmbsts {
    /// Controller Base Address Invalid, so that CMBMSC.CMSE has no effect.
    pub cbai: bool,
    #[bits(31)]
    __: u32,
}

/// Register CRTO: Controller Ready Timeouts (NVMe Base 2.1, 3.1.4.21).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Crto {
    /// Controller Ready With Media Timeout, in units of 500 ms.
    pub crwmt: u16,
    /// Controller Ready Independent of Media Timeout, in units of 500 ms.
    pub crimt: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cap_bits_have_standard_positions() {
        assert_eq!(Cap::new().with_mqes_z(0xffff).into_bits(), 0xffff);
        assert_eq!(Cap::new().with_cqr(true).into_bits(), 1 << 16);
        assert_eq!(Cap::new().with_ams(3).into_bits(), 3 << 17);
        assert_eq!(Cap::new().with_to(0xff).into_bits(), 0xff << 24);
        assert_eq!(Cap::new().with_dstrd(0xf).into_bits(), 0xf << 32);
        assert_eq!(Cap::new().with_nssrs(true).into_bits(), 1 << 36);
        let css = CapCss::new().with_ncss(true);
        assert_eq!(Cap::new().with_css(css).into_bits(), 1 << 37);
        let css = CapCss::new().with_iocss(true);
        assert_eq!(Cap::new().with_css(css).into_bits(), 1 << 43);
        let css = CapCss::new().with_noiocss(true);
        assert_eq!(Cap::new().with_css(css).into_bits(), 1 << 44);
        assert_eq!(Cap::new().with_bps(true).into_bits(), 1 << 45);
        assert_eq!(Cap::new().with_cps(3).into_bits(), 3 << 46);
        assert_eq!(Cap::new().with_mpsmin(0xf).into_bits(), 0xf << 48);
        assert_eq!(Cap::new().with_mpsmax(0xf).into_bits(), 0xf << 52);
        assert_eq!(Cap::new().with_pmrs(true).into_bits(), 1 << 56);
        assert_eq!(Cap::new().with_cmbs(true).into_bits(), 1 << 57);
        assert_eq!(Cap::new().with_nsss(true).into_bits(), 1 << 58);
        assert_eq!(Cap::new().with_crwms(true).into_bits(), 1 << 59);
        assert_eq!(Cap::new().with_crims(true).into_bits(), 1 << 60);
        assert_eq!(Cap::new().with_nsses(true).into_bits(), 1 << 61);
    }

    #[test]
    fn cc_of_linux_decodes() {
        // 4 KiB pages, 64-byte and 16-byte entries, enabled: the value that a host with
        // the NVM command set writes.
        let cc = Cc::from_bits(0x0046_0001);
        assert!(cc.en());
        assert_eq!(cc.css(), CcCss::NVM);
        assert_eq!((cc.mps(), cc.iosqes(), cc.iocqes()), (0, 6, 4));
        assert_eq!(Cc::new().with_css(CcCss::ALL_SUPPORTED).into_bits(), 6 << 4);
        assert_eq!(Cc::new().with_mps(0xf).into_bits(), 0xf << 7);
        assert_eq!(Cc::new().with_ams(Ams(7)).into_bits(), 7 << 11);
        assert_eq!(Cc::new().with_shn(Shn::NORMAL).into_bits(), 1 << 14);
        assert_eq!(Cc::new().with_crime(true).into_bits(), 1 << 24);
    }

    #[test]
    fn csts_aqa_vs_crto_bits_have_standard_positions() {
        assert_eq!(Csts::new().with_rdy(true).into_bits(), 1);
        assert_eq!(Csts::new().with_cfs(true).into_bits(), 2);
        assert_eq!(Csts::new().with_shst(Shst::COMPLETE).into_bits(), 2 << 2);
        assert_eq!(Csts::new().with_nssro(true).into_bits(), 1 << 4);
        assert_eq!(Csts::new().with_pp(true).into_bits(), 1 << 5);
        assert_eq!(Csts::new().with_st(true).into_bits(), 1 << 6);
        let aqa = Aqa::from_bits(0x001f_003f);
        assert_eq!((aqa.asqs_z(), aqa.acqs_z()), (63, 31));
        assert_eq!(Vs::V2_1.into_bits(), 0x0002_0100);
        assert_eq!(Vs::V1_4.into_bits(), 0x0001_0400);
        assert_eq!(Crto::new().with_crimt(1).into_bits(), 1 << 16);
    }

    #[test]
    fn cmb_bits_have_standard_positions() {
        assert_eq!(Cmbloc::new().with_bir(7).into_bits(), 7);
        assert_eq!(Cmbloc::new().with_cqmms(true).into_bits(), 1 << 3);
        assert_eq!(Cmbloc::new().with_cqpds(true).into_bits(), 1 << 4);
        assert_eq!(Cmbloc::new().with_cdpmls(true).into_bits(), 1 << 5);
        assert_eq!(Cmbloc::new().with_cdpcils(true).into_bits(), 1 << 6);
        assert_eq!(Cmbloc::new().with_cdmmms(true).into_bits(), 1 << 7);
        assert_eq!(Cmbloc::new().with_cqda(true).into_bits(), 1 << 8);
        assert_eq!(Cmbloc::new().with_ofst(1).into_bits(), 1 << 12);
        assert_eq!(Cmbsz::new().with_sqs(true).into_bits(), 1);
        assert_eq!(Cmbsz::new().with_cqs(true).into_bits(), 2);
        assert_eq!(Cmbsz::new().with_lists(true).into_bits(), 4);
        assert_eq!(Cmbsz::new().with_rds(true).into_bits(), 8);
        assert_eq!(Cmbsz::new().with_wds(true).into_bits(), 16);
        assert_eq!(Cmbsz::new().with_szu(1).into_bits(), 1 << 8);
        assert_eq!(Cmbsz::new().with_sz(1).into_bits(), 1 << 12);
        assert_eq!(Cmbsz::new().with_sz(3).with_szu(2).bytes(), 3 << 20);
        // Value as written by Linux: an address with two bits.
        let cmbmsc = Cmbmsc::from_bits(0xfeb0_0003);
        assert!(cmbmsc.cre() && cmbmsc.cmse());
        assert_eq!(cmbmsc.cba() << 12, 0xfeb0_0000);
        assert_eq!(Cmbsts::new().with_cbai(true).into_bits(), 1);
    }

    #[test]
    fn magic_register_values_are_ascii() {
        assert_eq!(NSSR_MAGIC.to_be_bytes(), *b"NVMe");
        assert_eq!(NSSD_NORMAL.to_be_bytes(), *b"Nrml");
        assert_eq!(NSSD_ABRUPT.to_be_bytes(), *b"Abpt");
    }

    #[test]
    fn doorbell_offsets_round_trip() {
        assert_eq!(doorbell_offset(0, false, 0), 0x1000);
        assert_eq!(doorbell_offset(0, true, 0), 0x1004);
        assert_eq!(doorbell_offset(3, true, 0), 0x101c);
        assert_eq!(doorbell_offset(1, false, 4), 0x1000 + 2 * 64);
        for dstrd in 0..16 {
            for qid in [0, 1, 2, 64, u16::MAX] {
                for is_cq in [false, true] {
                    let doorbell = Doorbell { qid, is_cq };
                    assert_eq!(Doorbell::at(doorbell.offset(dstrd), dstrd), Some(doorbell));
                    assert_eq!(Doorbell::at(doorbell.offset(dstrd) + 1, dstrd), None);
                }
            }
        }
        assert_eq!(Doorbell::at(0xffc, 0), None);
        assert_eq!(
            Doorbell::at(doorbell_offset(u16::MAX, true, 0) + 4, 0),
            None
        );
        assert_eq!(Doorbell::at(u64::MAX, 0), None);
    }
}
