//! Bit fields of the Identify Controller data structure: NVMe Base 2.1, figure 312.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::open_values;

open_values! {
    /// Controller Type (CNTRLTYPE).
    #[derive(Unaligned)]
    pub ControllerType: u8 {
        NOT_REPORTED = 0, "Controller type not reported";
        IO = 1, "I/O controller";
        DISCOVERY = 2, "Discovery controller";
        ADMINISTRATIVE = 3, "Administrative controller";
    }
}

/// CMIC, Controller Multi-Path I/O and Namespace Sharing Capabilities.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Cmic {
    /// The NVM subsystem may have more than one port.
    pub mports: bool,
    /// The NVM subsystem may have more than one controller.
    pub mctrs: bool,
    /// Function Type: the controller belongs to an SR-IOV virtual function.
    pub ft: bool,
    /// Asymmetric Namespace Access Reporting Support.
    pub anars: bool,
    #[bits(4)]
    __: u8,
}

/// OAES, Optional Asynchronous Events Supported.
#[bitfield(u32, repr = U32, from = U32::new, into = U32::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Oaes {
    __: u8,
    /// Attached Namespace Attribute Notices.
    pub nsan: bool,
    /// Firmware Activation Notices.
    pub fan: bool,
    #[bits(1)]
    __: u8,
    /// Asymmetric Namespace Access Change Notices.
    pub anacn: bool,
    /// Predictable Latency Event Aggregate Log Change Notices.
    pub pleacn: bool,
    /// LBA Status Information Alert Notices.
    pub lsian: bool,
    /// Endurance Group Event Aggregate Log Page Change Notices.
    pub egealcn: bool,
    /// Normal NVM Subsystem Shutdown event.
    pub nnsshdn: bool,
    /// Temperature Threshold Hysteresis Recovery event.
    pub tthr: bool,
    /// Reachability Groups Change Notices.
    pub rgcns: bool,
    #[bits(1)]
    __: u8,
    /// Allocated Namespace Attribute Notices.
    pub ansan: bool,
    #[bits(7)]
    __: u8,
    /// Zone Descriptor Changed Notices.
    pub zdcn: bool,
    #[bits(3)]
    __: u8,
    /// Discovery Log Page Change Notifications.
    pub dlpcn: bool,
}

/// CTRATT, Controller Attributes.
#[bitfield(u32, repr = U32, from = U32::new, into = U32::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Ctratt {
    /// Host Identifier Support: 128-bit host identifiers.
    pub hids: bool,
    /// Non-Operational Power State Permissive Mode.
    pub nopspm: bool,
    /// NVM Sets.
    pub nsets: bool,
    /// Read Recovery Levels.
    pub rrlvls: bool,
    /// Endurance Groups.
    pub egs: bool,
    /// Predictable Latency Mode.
    pub plm: bool,
    /// Traffic Based Keep Alive Support.
    pub tbkas: bool,
    /// Namespace Granularity.
    pub ng: bool,
    /// SQ Associations.
    pub sqa: bool,
    /// UUID List.
    pub ulist: bool,
    /// Multi-Domain Subsystem.
    pub mds: bool,
    /// Fixed Capacity Management.
    pub fcm: bool,
    /// Variable Capacity Management.
    pub vcm: bool,
    /// Delete Endurance Group.
    pub deg: bool,
    /// Delete NVM Set.
    pub dnvms: bool,
    /// Extended LBA Formats Supported.
    pub elbas: bool,
    /// MDTS and Size Limits Exclude Metadata.
    pub mem: bool,
    /// HMB Restrict Non-Operational Power State Access.
    pub hmbr: bool,
    /// Reservations and Host Identifier Interaction.
    pub rhii: bool,
    /// Flexible Data Placement Support.
    pub fdps: bool,
    #[bits(12)]
    __: u16,
}

/// OACS, Optional Admin Command Support.
#[bitfield(u16, repr = U16, from = U16::new, into = U16::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Oacs {
    /// Security Send and Security Receive.
    pub ssrs: bool,
    /// Format NVM.
    pub fnvms: bool,
    /// Firmware Commit and Firmware Image Download.
    pub fwds: bool,
    /// Namespace Management.
    pub nms: bool,
    /// Device Self-test.
    pub dsts: bool,
    /// Directives.
    pub dirs: bool,
    /// NVMe-MI Send and NVMe-MI Receive.
    pub nsrs: bool,
    /// Virtualization Management.
    pub vms: bool,
    /// Doorbell Buffer Config.
    pub dbcs: bool,
    /// Get LBA Status.
    pub glss: bool,
    /// Command and Feature Lockdown.
    pub cfls: bool,
    /// Host Managed Live Migration.
    pub hmlms: bool,
    #[bits(4)]
    __: u8,
}

/// FRMW, Firmware Updates.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Frmw {
    /// First Firmware Slot Read Only.
    pub ffsro: bool,
    /// Number Of Firmware Slots, 1 to 7.
    #[bits(3)]
    pub nofs: u8,
    /// Firmware Activation Without Reset.
    pub fawr: bool,
    /// Support Multiple Update Detection.
    pub smud: bool,
    #[bits(2)]
    __: u8,
}

/// LPA, Log Page Attributes.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Lpa {
    /// SMART log page per namespace.
    pub smarts: bool,
    /// Commands Supported and Effects log page.
    pub cses: bool,
    /// Log Page Extended Data: 32-bit length and the offset of Get Log Page.
    pub lpeds: bool,
    /// Telemetry log pages and notices.
    pub ts: bool,
    /// Persistent Event log page.
    pub pes: bool,
    /// Miscellaneous Log Page Support: the pages that list supported log
    /// pages, features and commands.
    pub mlps: bool,
    /// Telemetry Data Area 4 Support.
    pub da4s: bool,
    #[bits(1)]
    __: u8,
}

/// ANACAP, Asymmetric Namespace Access Capabilities.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Anacap {
    /// Reports ANA Optimized state.
    pub ros: bool,
    /// Reports ANA Non-Optimized state.
    pub rnos: bool,
    /// Reports ANA Inaccessible state.
    pub ris: bool,
    /// Reports ANA Persistent Loss state.
    pub rpls: bool,
    /// Reports ANA Change state.
    pub rcs: bool,
    #[bits(1)]
    __: u8,
    /// ANAGRPID does not change while a namespace is attached.
    pub agids: bool,
    /// A non-zero ANAGRPID is accepted by Namespace Management.
    pub nagids: bool,
}

/// SQES and CQES: required and maximum queue entry size, each as log2 of bytes.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct QueueEntrySize {
    /// Required (minimum) entry size.
    #[bits(4)]
    pub min: u8,
    /// Maximum entry size.
    #[bits(4)]
    pub max: u8,
}

impl QueueEntrySize {
    /// Minimum and maximum the same; `log2` below 16.
    pub const fn exactly(log2: u8) -> Self {
        Self::from_bits((log2 & 0xf) << 4 | (log2 & 0xf))
    }
}

/// ONCS, Optional NVM Command Support.
#[bitfield(u16, repr = U16, from = U16::new, into = U16::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Oncs {
    /// Compare.
    pub nvmcmps: bool,
    /// Write Uncorrectable.
    pub nvmwusv: bool,
    /// Dataset Management.
    pub nvmdsmsv: bool,
    /// Write Zeroes.
    pub nvmwzsv: bool,
    /// Save in Set Features and Select in Get Features.
    pub ssfs: bool,
    /// Reservations.
    pub reservs: bool,
    /// Timestamp feature.
    pub tss: bool,
    /// Verify.
    pub nvmvfys: bool,
    /// Copy.
    pub nvmcpys: bool,
    /// Copy Single Atomicity.
    pub nvmcsa: bool,
    /// All Fast Copy.
    pub nvmafc: bool,
    /// Maximum Write Zeroes with Deallocate: WZDSL applies.
    pub maxwzd: bool,
    /// Namespace Zeroes.
    pub nszs: bool,
    #[bits(3)]
    __: u8,
}

/// FUSES, Fused Operation Support.
#[bitfield(u16, repr = U16, from = U16::new, into = U16::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Fuses {
    /// Fused Compare and Write.
    pub fcws: bool,
    #[bits(15)]
    __: u16,
}

/// SANICAP, Sanitize Capabilities.
#[bitfield(u32, repr = U32, from = U32::new, into = U32::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Sanicap {
    /// Crypto Erase Support.
    pub ces: bool,
    /// Block Erase Support.
    pub bes: bool,
    /// Overwrite Support.
    pub ows: bool,
    /// Verification Support.
    pub vers: bool,
    #[bits(25)]
    __: u32,
    /// No-Deallocate Inhibited: No-Deallocate After Sanitize is refused, or passed over.
    pub ndi: bool,
    /// No-Deallocate Modifies Media After Sanitize: 0 not defined, 1 it does not, 2 it does.
    #[bits(2)]
    pub nodmmas: u8,
}

/// FNA, Format NVM Attributes.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Fna {
    /// A format applies to all namespaces.
    pub fns: bool,
    /// A secure erase applies to all namespaces.
    pub sens: bool,
    /// Cryptographic Erase Support.
    pub cryes: bool,
    /// Format NVM Broadcast: set when NSID FFFFFFFFh is not supported.
    pub fnvmbs: bool,
    #[bits(4)]
    __: u8,
}

/// VWC, Volatile Write Cache.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Vwc {
    /// Volatile Write Cache Present.
    pub vwcp: bool,
    /// Flush Behavior with NSID FFFFFFFFh: 0 not indicated, 2 not supported,
    /// 3 flushes every namespace.
    #[bits(2)]
    pub fb: u8,
    #[bits(5)]
    __: u8,
}

/// SGLS, SGL Support.
#[bitfield(u32, repr = U32, from = U32::new, into = U32::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Sgls {
    /// SGL Support: 0 none, 1 without alignment or granularity, 2 with data blocks of dword
    /// alignment and granularity.
    #[bits(2)]
    pub sgls: u8,
    /// Keyed SGL Data Block descriptor.
    pub ksdbds: bool,
    #[bits(5)]
    __: u8,
    /// SGL Descriptor Threshold: recommended most descriptors in a
    /// command, 0 for no recommendation.
    pub sdt: u8,
    /// SGL Bit Bucket descriptor.
    pub sbbds: bool,
    /// MPTR of one contiguous buffer may have any byte alignment.
    pub mbba: bool,
    /// The SGL may be longer than the data.
    pub sllldts: bool,
    /// MPTR may be the address of one SGL descriptor.
    pub mpcsd: bool,
    /// Address field of descriptors may be an offset.
    pub ofs: bool,
    /// Transport SGL Data Block descriptor.
    pub tsdbd: bool,
    #[bits(10)]
    __: u16,
}

/// Byte 3 of a power state descriptor.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct PowerStateFlags {
    /// Max Power Scale: MP is in 0.0001 W rather than in 0.01 W.
    pub mxps: bool,
    /// Non-Operational State.
    pub nops: bool,
    #[bits(6)]
    __: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_that_hosts_test() {
        assert_eq!(Oacs::new().with_dbcs(true).into_bits().get(), 1 << 8);
        assert_eq!(Oacs::new().with_fnvms(true).into_bits().get(), 1 << 1);
        assert_eq!(Oacs::new().with_hmlms(true).into_bits().get(), 1 << 11);
        assert_eq!(Oncs::new().with_nvmcmps(true).into_bits().get(), 1);
        assert_eq!(Oncs::new().with_nvmdsmsv(true).into_bits().get(), 1 << 2);
        assert_eq!(Oncs::new().with_nvmwzsv(true).into_bits().get(), 1 << 3);
        assert_eq!(Oncs::new().with_ssfs(true).into_bits().get(), 1 << 4);
        assert_eq!(Oncs::new().with_tss(true).into_bits().get(), 1 << 6);
        assert_eq!(Oncs::new().with_nvmvfys(true).into_bits().get(), 1 << 7);
        assert_eq!(Oncs::new().with_nvmcpys(true).into_bits().get(), 1 << 8);
        assert_eq!(Oncs::new().with_nszs(true).into_bits().get(), 1 << 12);
        assert_eq!(Oaes::new().with_nsan(true).into_bits().get(), 1 << 8);
        assert_eq!(Oaes::new().with_anacn(true).into_bits().get(), 1 << 11);
        assert_eq!(Oaes::new().with_nnsshdn(true).into_bits().get(), 1 << 15);
        assert_eq!(Oaes::new().with_ansan(true).into_bits().get(), 1 << 19);
        assert_eq!(Oaes::new().with_zdcn(true).into_bits().get(), 1 << 27);
        assert_eq!(Oaes::new().with_dlpcn(true).into_bits().get(), 1 << 31);
        assert_eq!(Ctratt::new().with_hids(true).into_bits().get(), 1);
        assert_eq!(Ctratt::new().with_tbkas(true).into_bits().get(), 1 << 6);
        assert_eq!(Ctratt::new().with_elbas(true).into_bits().get(), 1 << 15);
        assert_eq!(Ctratt::new().with_fdps(true).into_bits().get(), 1 << 19);
        assert_eq!(Sgls::new().with_sgls(1).into_bits().get(), 1);
        assert_eq!(Sgls::new().with_sbbds(true).into_bits().get(), 1 << 16);
        assert_eq!(Sgls::new().with_tsdbd(true).into_bits().get(), 1 << 21);
        assert_eq!(Lpa::new().with_lpeds(true).into_bits(), 1 << 2);
        assert_eq!(Frmw::new().with_nofs(7).into_bits(), 7 << 1);
        assert_eq!(Vwc::new().with_fb(3).into_bits(), 3 << 1);
        assert_eq!(Cmic::new().with_anars(true).into_bits(), 1 << 3);
        assert_eq!(Fna::new().with_fnvmbs(true).into_bits(), 1 << 3);
        assert_eq!(Anacap::new().with_nagids(true).into_bits(), 1 << 7);
        assert_eq!(QueueEntrySize::exactly(6).into_bits(), 0x66);
    }

    #[test]
    fn little_endian_on_the_wire() {
        let oncs = Oncs::new().with_nvmcpys(true).with_nvmcmps(true);
        assert_eq!(oncs.as_bytes(), [1, 1]);
        assert_eq!(Oncs::read_from_bytes(&[1, 1]).unwrap(), oncs);
    }
}
