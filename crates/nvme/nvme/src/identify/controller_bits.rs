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
    /// Whether the NVM subsystem may have more than one port.
    pub mports: bool,
    /// Whether the NVM subsystem may have more than one controller.
    pub mctrs: bool,
    /// Function Type: set when the controller belongs to an SR-IOV virtual function.
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
    /// Support of Attached Namespace Attribute Notices.
    pub nsan: bool,
    /// Support of Firmware Activation Notices.
    pub fan: bool,
    #[bits(1)]
    __: u8,
    /// Support of Asymmetric Namespace Access Change Notices.
    pub anacn: bool,
    /// Support of Predictable Latency Event Aggregate Log Change Notices.
    pub pleacn: bool,
    /// Support of LBA Status Information Alert Notices.
    pub lsian: bool,
    /// Support of Endurance Group Event Aggregate Log Page Change Notices.
    pub egealcn: bool,
    /// Support of the Normal NVM Subsystem Shutdown event.
    pub nnsshdn: bool,
    /// Support of the Temperature Threshold Hysteresis Recovery event.
    pub tthr: bool,
    /// Support of Reachability Groups Change Notices.
    pub rgcns: bool,
    #[bits(1)]
    __: u8,
    /// Support of Allocated Namespace Attribute Notices.
    pub ansan: bool,
    #[bits(7)]
    __: u8,
    /// Support of Zone Descriptor Changed Notices.
    pub zdcn: bool,
    #[bits(3)]
    __: u8,
    /// Support of Discovery Log Page Change Notifications.
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
    /// Support of NVM Sets.
    pub nsets: bool,
    /// Support of Read Recovery Levels.
    pub rrlvls: bool,
    /// Support of Endurance Groups.
    pub egs: bool,
    /// Support of Predictable Latency Mode.
    pub plm: bool,
    /// Traffic Based Keep Alive Support.
    pub tbkas: bool,
    /// Support of Namespace Granularity.
    pub ng: bool,
    /// Support of SQ Associations.
    pub sqa: bool,
    /// Support of the UUID List.
    pub ulist: bool,
    /// Support of multiple domains in the NVM subsystem.
    pub mds: bool,
    /// Support of Fixed Capacity Management.
    pub fcm: bool,
    /// Support of Variable Capacity Management.
    pub vcm: bool,
    /// Support of Delete Endurance Group.
    pub deg: bool,
    /// Support of Delete NVM Set.
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
    /// Support of Security Send and Security Receive.
    pub ssrs: bool,
    /// Support of Format NVM.
    pub fnvms: bool,
    /// Support of Firmware Commit and Firmware Image Download.
    pub fwds: bool,
    /// Support of Namespace Management.
    pub nms: bool,
    /// Support of Device Self-test.
    pub dsts: bool,
    /// Support of Directives.
    pub dirs: bool,
    /// Support of NVMe-MI Send and NVMe-MI Receive.
    pub nsrs: bool,
    /// Support of Virtualization Management.
    pub vms: bool,
    /// Support of Doorbell Buffer Config.
    pub dbcs: bool,
    /// Support of Get LBA Status.
    pub glss: bool,
    /// Support of Command and Feature Lockdown.
    pub cfls: bool,
    /// Support of Host Managed Live Migration.
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
    /// Number of Firmware Slots, 1 to 7.
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
    /// Support of the SMART log page per namespace.
    pub smarts: bool,
    /// Support of the Commands Supported and Effects log page.
    pub cses: bool,
    /// Support of Log Page Extended Data: 32-bit length and the offset of Get Log Page.
    pub lpeds: bool,
    /// Support of the Telemetry log pages and notices.
    pub ts: bool,
    /// Support of the Persistent Event log page.
    pub pes: bool,
    /// Miscellaneous Log Page Support: support of the log pages that list supported log pages,
    /// features and commands.
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
    /// Whether the ANA Optimized state is reported.
    pub ros: bool,
    /// Whether the ANA Non-Optimized state is reported.
    pub rnos: bool,
    /// Whether the ANA Inaccessible state is reported.
    pub ris: bool,
    /// Whether the ANA Persistent Loss state is reported.
    pub rpls: bool,
    /// Whether the ANA Change state is reported.
    pub rcs: bool,
    #[bits(1)]
    __: u8,
    /// Whether ANAGRPID stays the same while a namespace is attached.
    pub agids: bool,
    /// Whether Namespace Management accepts an ANAGRPID other than zero.
    pub nagids: bool,
}

/// SQES and CQES: minimum and maximum queue entry size, each as a power of two.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct QueueEntrySize {
    /// Required (minimum) entry size, as a power of two.
    #[bits(4)]
    pub min: u8,
    /// Maximum entry size, as a power of two.
    #[bits(4)]
    pub max: u8,
}

impl QueueEntrySize {
    /// Creates a field with `log2` as minimum and maximum; `log2` must be below 16.
    pub const fn exactly(log2: u8) -> Self {
        Self::from_bits((log2 & 0xf) << 4 | (log2 & 0xf))
    }
}

/// ONCS, Optional NVM Command Support.
#[bitfield(u16, repr = U16, from = U16::new, into = U16::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Oncs {
    /// Support of the Compare command.
    pub nvmcmps: bool,
    /// Support of Write Uncorrectable.
    pub nvmwusv: bool,
    /// Support of Dataset Management.
    pub nvmdsmsv: bool,
    /// Support of Write Zeroes.
    pub nvmwzsv: bool,
    /// Support of the fields Save in Set Features and Select in Get Features.
    pub ssfs: bool,
    /// Support of reservations.
    pub reservs: bool,
    /// Support of the Timestamp feature.
    pub tss: bool,
    /// Support of the Verify command.
    pub nvmvfys: bool,
    /// Support of the Copy command.
    pub nvmcpys: bool,
    /// Copy Single Atomicity: the atomicity of a Copy command.
    pub nvmcsa: bool,
    /// All Fast Copy: all Copy commands are fast copy operations.
    pub nvmafc: bool,
    /// Maximum Write Zeroes with Deallocate: the limit WZDSL applies.
    pub maxwzd: bool,
    /// Namespace Zeroes: support of zeroing a whole namespace by Write Zeroes.
    pub nszs: bool,
    #[bits(3)]
    __: u8,
}

/// FUSES, Fused Operation Support.
#[bitfield(u16, repr = U16, from = U16::new, into = U16::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Fuses {
    /// Support of Compare and Write as fused operation.
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
    /// No-Deallocate Inhibited: commands with No-Deallocate After Sanitize fail, or the bit is
    /// ignored.
    pub ndi: bool,
    /// No-Deallocate Modifies Media After Sanitize: 0 not defined, 1 not modified, 2 modified.
    #[bits(2)]
    pub nodmmas: u8,
}

/// FNA, Format NVM Attributes.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Fna {
    /// Whether a format applies to all namespaces.
    pub fns: bool,
    /// Whether a secure erase applies to all namespaces.
    pub sens: bool,
    /// Cryptographic Erase Support.
    pub cryes: bool,
    /// Format NVM Broadcast Support: set when NSID FFFFFFFFh is not supported.
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
    /// Flush Behavior for NSID FFFFFFFFh: 0 not indicated, 2 not supported, 3 flushes all
    /// namespaces.
    #[bits(2)]
    pub fb: u8,
    #[bits(5)]
    __: u8,
}

/// SGLS, SGL Support.
#[bitfield(u32, repr = U32, from = U32::new, into = U32::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Sgls {
    /// SGL Support: 0 none, 1 without alignment or granularity requirement, 2 with dword alignment
    /// and granularity of data blocks.
    #[bits(2)]
    pub sgls: u8,
    /// Support of the Keyed SGL Data Block descriptor.
    pub ksdbds: bool,
    #[bits(5)]
    __: u8,
    /// SGL Descriptor Threshold: recommended maximum number of descriptors per command; 0 for no
    /// recommendation.
    pub sdt: u8,
    /// Support of the SGL Bit Bucket descriptor.
    pub sbbds: bool,
    /// Whether MPTR of a contiguous buffer may have any byte alignment.
    pub mbba: bool,
    /// Whether an SGL may be longer than the data.
    pub sllldts: bool,
    /// Whether MPTR may be the address of one SGL descriptor.
    pub mpcsd: bool,
    /// Whether the address field of descriptors may be an offset.
    pub ofs: bool,
    /// Support of the Transport SGL Data Block descriptor.
    pub tsdbd: bool,
    #[bits(10)]
    __: u16,
}

/// Byte 3 of a power state descriptor: scale and type of the state.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct PowerStateFlags {
    /// Max Power Scale: MP is in units of 0.0001 W instead of 0.01 W.
    pub mxps: bool,
    /// Non-Operational State: the controller processes no I/O commands in this state.
    pub nops: bool,
    #[bits(6)]
    __: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identify_controller_bits_have_standard_positions() {
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
    fn bit_fields_are_little_endian() {
        let oncs = Oncs::new().with_nvmcpys(true).with_nvmcmps(true);
        assert_eq!(oncs.as_bytes(), [1, 1]);
        assert_eq!(Oncs::read_from_bytes(&[1, 1]).unwrap(), oncs);
    }
}
