//! Identify Controller data structure (CNS 01h): NVMe Base 2.1, 5.1.13.2.1, figure 312.

use zerocopy::little_endian::{U16, U32, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::controller_bits::{
    Anacap, Cmic, ControllerType, Ctratt, Fna, Frmw, Fuses, Lpa, Oacs, Oaes, Oncs, PowerStateFlags,
    QueueEntrySize, Sanicap, Sgls, Vwc,
};
use super::text::{Ascii, Nqn};
use crate::macros::{wire_layout, zeroed_default};

/// Properties and capabilities of a controller, 4096 bytes.
///
/// Capacities are in bytes. `default()` is all zeroes, including the text fields.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IdentifyController {
    /// PCI Vendor ID.
    pub vid: U16,
    /// PCI Subsystem Vendor ID.
    pub ssvid: U16,
    /// Serial Number.
    pub sn: Ascii<20>,
    /// Model Number.
    pub mn: Ascii<40>,
    /// Firmware Revision.
    pub fr: Ascii<8>,
    /// Recommended Arbitration Burst as a power of two.
    pub rab: u8,
    /// IEEE OUI Identifier, least significant byte first.
    pub ieee: [u8; 3],
    /// Controller Multi-Path I/O and Namespace Sharing Capabilities.
    pub cmic: Cmic,
    /// Maximum Data Transfer Size: a power of two of pages of CAP.MPSMIN; 0 for no limit. See
    /// [`Self::mdts_bytes`].
    pub mdts: u8,
    /// Controller ID, unique in the NVM subsystem.
    pub cntlid: U16,
    /// Version, with the layout of the VS register ([`crate::regs::Vs`]).
    pub ver: U32,
    /// RTD3 Resume Latency, in microseconds.
    pub rtd3r: U32,
    /// RTD3 Entry Latency, in microseconds: time that a host waits for a shutdown to complete.
    pub rtd3e: U32,
    /// Optional Asynchronous Events Supported.
    pub oaes: Oaes,
    /// Controller Attributes.
    pub ctratt: Ctratt,
    /// Read Recovery Levels Supported.
    pub rrls: U16,
    /// Boot Partition Capabilities.
    pub bpcap: u8,
    #[doc(hidden)]
    pub reserved103: u8,
    /// NVM Subsystem Shutdown Latency, in microseconds.
    pub nssl: U32,
    #[doc(hidden)]
    pub reserved108: [u8; 2],
    /// Power Loss Signaling Information.
    pub plsi: u8,
    /// Controller Type.
    pub cntrltype: ControllerType,
    /// FRU Globally Unique Identifier, big endian.
    pub fguid: [u8; 16],
    /// Command Retry Delay Times 1 to 3, in units of 100 ms.
    pub crdt: [U16; 3],
    /// Controller Reachability Capabilities.
    pub crcap: u8,
    #[doc(hidden)]
    pub reserved135: [u8; 118],
    /// NVM Subsystem Report.
    pub nvmsr: u8,
    /// VPD Write Cycle Information.
    pub vwci: u8,
    /// Management Endpoint Capabilities.
    pub mec: u8,
    /// Optional Admin Command Support.
    pub oacs: Oacs,
    /// Abort Command Limit, zero-based.
    pub acl_z: u8,
    /// Asynchronous Event Request Limit, zero-based.
    pub aerl_z: u8,
    /// Firmware Updates.
    pub frmw: Frmw,
    /// Log Page Attributes.
    pub lpa: Lpa,
    /// Error Log Page Entries, zero-based.
    pub elpe_z: u8,
    /// Number of Power States Support, zero-based.
    pub npss_z: u8,
    /// Admin Vendor Specific Command Configuration: bit 0, standard command format.
    pub avscc: u8,
    /// Autonomous Power State Transition Attributes: bit 0 is set when supported.
    pub apsta: u8,
    /// Warning Composite Temperature Threshold, in kelvins.
    pub wctemp: U16,
    /// Critical Composite Temperature Threshold, in kelvins.
    pub cctemp: U16,
    /// Maximum Time for Firmware Activation, in units of 100 ms.
    pub mtfa: U16,
    /// Host Memory Buffer Preferred Size, in units of 4 KiB.
    pub hmpre: U32,
    /// Host Memory Buffer Minimum Size, in units of 4 KiB.
    pub hmmin: U32,
    /// Total NVM Capacity.
    pub tnvmcap: U128,
    /// Unallocated NVM Capacity.
    pub unvmcap: U128,
    /// Replay Protected Memory Block Support.
    pub rpmbs: U32,
    /// Extended Device Self-test Time, in minutes.
    pub edstt: U16,
    /// Device Self-test Options.
    pub dsto: u8,
    /// Firmware Update Granularity, in units of 4 KiB.
    pub fwug: u8,
    /// Keep Alive Support: granularity of the timer in units of 100 ms; 0 when not supported.
    pub kas: U16,
    /// Host Controlled Thermal Management Attributes.
    pub hctma: U16,
    /// Minimum Thermal Management Temperature, in kelvins.
    pub mntmt: U16,
    /// Maximum Thermal Management Temperature, in kelvins.
    pub mxtmt: U16,
    /// Sanitize Capabilities.
    pub sanicap: Sanicap,
    /// Host Memory Buffer Minimum Descriptor Entry Size, in units of 4 KiB.
    pub hmminds: U32,
    /// Host Memory Maximum Descriptors Entries.
    pub hmmaxd: U16,
    /// NVM Set Identifier Maximum.
    pub nsetidmax: U16,
    /// Endurance Group Identifier Maximum.
    pub endgidmax: U16,
    /// ANA Transition Time, in seconds.
    pub anatt: u8,
    /// Asymmetric Namespace Access Capabilities.
    pub anacap: Anacap,
    /// ANA Group Identifier Maximum.
    pub anagrpmax: U32,
    /// Number of ANA Group Identifiers.
    pub nanagrpid: U32,
    /// Persistent Event Log Size, in units of 64 KiB.
    pub pels: U32,
    /// Domain Identifier.
    pub did: U16,
    /// Key Per I/O Capabilities.
    pub kpioc: u8,
    #[doc(hidden)]
    pub reserved359: u8,
    /// Maximum Processing Time for Firmware Activation Without Reset, in units of 100 ms.
    pub mptfawr: U16,
    #[doc(hidden)]
    pub reserved362: [u8; 6],
    /// Max Endurance Group Capacity.
    pub megcap: U128,
    /// Temperature Threshold Hysteresis Attributes.
    pub tmpthha: u8,
    #[doc(hidden)]
    pub reserved385: u8,
    /// Command Quiesce Time, in milliseconds.
    pub cqt: U16,
    #[doc(hidden)]
    pub reserved388: [u8; 124],
    /// Submission Queue Entry Size.
    pub sqes: QueueEntrySize,
    /// Completion Queue Entry Size.
    pub cqes: QueueEntrySize,
    /// Maximum Outstanding Commands; 0 when no limit is reported.
    pub maxcmd: U16,
    /// Number of Namespaces, which is the largest valid NSID.
    pub nn: U32,
    /// Optional NVM Command Support.
    pub oncs: Oncs,
    /// Fused Operation Support.
    pub fuses: Fuses,
    /// Format NVM Attributes.
    pub fna: Fna,
    /// Volatile Write Cache.
    pub vwc: Vwc,
    /// Atomic Write Unit Normal, in logical blocks, zero-based.
    pub awun_z: U16,
    /// Atomic Write Unit Power Fail, in logical blocks, zero-based.
    pub awupf_z: U16,
    /// I/O Command Set Vendor Specific Command Configuration: bit 0, standard command format.
    pub icsvscc: u8,
    /// Namespace Write Protection Capabilities.
    pub nwpc: u8,
    /// Atomic Compare and Write Unit, in logical blocks, zero-based.
    pub acwu_z: U16,
    /// Copy Descriptor Formats Supported: one bit per format.
    pub cdfs: U16,
    /// SGL Support.
    pub sgls: Sgls,
    /// Maximum Number of Allowed Namespaces; 0 when `nn` is the limit.
    pub mnan: U32,
    /// Maximum Domain Namespace Attachments.
    pub maxdna: U128,
    /// Maximum I/O Controller Namespace Attachments.
    pub maxcna: U32,
    /// Optimal Aggregated Queue Depth.
    pub oaqd: U32,
    /// Recommended Host-Initiated Refresh Interval, in days.
    pub rhiri: u8,
    /// Host-Initiated Refresh Time, in units of 10 minutes.
    pub hirt: u8,
    /// Controller Maximum Memory Range Tracking Descriptors.
    pub cmmrtd: U16,
    /// NVM Subsystem Maximum Memory Range Tracking Descriptors.
    pub nmmrtd: U16,
    /// Minimum Memory Range Tracking Granularity.
    pub minmrtg: u8,
    /// Maximum Memory Range Tracking Granularity.
    pub maxmrtg: u8,
    /// Tracking Attributes.
    pub trattr: u8,
    #[doc(hidden)]
    pub reserved577: u8,
    /// Maximum Controller User Data Migration Queues.
    pub mcudmq: U16,
    /// Maximum NVM Subsystem User Data Migration Queues.
    pub mnsudmq: U16,
    /// Maximum CDQ Memory Ranges.
    pub mcmr: U16,
    /// NVM Subsystem Maximum CDQ Memory Ranges.
    pub nmcmr: U16,
    /// Maximum Controller Data Queue PRP Count.
    pub mcdqpc: U16,
    #[doc(hidden)]
    pub reserved588: [u8; 180],
    /// NVM Subsystem NVMe Qualified Name.
    pub subnqn: Nqn,
    #[doc(hidden)]
    pub reserved1024: [u8; 768],
    /// I/O Queue Command Capsule Supported Size, in units of 16 bytes (Fabrics).
    pub ioccsz: U32,
    /// I/O Queue Response Capsule Supported Size, in units of 16 bytes (Fabrics).
    pub iorcsz: U32,
    /// In Capsule Data Offset, in units of 16 bytes (Fabrics).
    pub icdoff: U16,
    /// Fabrics Controller Attributes.
    pub fcatt: u8,
    /// Maximum SGL Data Block Descriptors in a capsule (Fabrics).
    pub msdbd: u8,
    /// Optional Fabrics Commands Support.
    pub ofcs: U16,
    /// Discovery Controller Type (Fabrics).
    pub dctype: u8,
    #[doc(hidden)]
    pub reserved1807: [u8; 241],
    /// Power State Descriptors, of which the first `npss_z + 1` are valid.
    pub psd: [PowerState; 32],
    /// Vendor specific.
    pub vs: [u8; 1024],
}

wire_layout!(
    IdentifyController, 4096, vid @ 0, ssvid @ 2, sn @ 4, mn @ 24, fr @ 64, rab @ 72, ieee @ 73, cmic @ 76, mdts @ 77,
    cntlid @ 78, ver @ 80, rtd3r @ 84, rtd3e @ 88, oaes @ 92, ctratt @ 96, rrls @ 100, bpcap @ 102, nssl @ 104,
    plsi @ 110, cntrltype @ 111, fguid @ 112, crdt @ 128, crcap @ 134, nvmsr @ 253, vwci @ 254, mec @ 255, oacs @ 256,
    acl_z @ 258, aerl_z @ 259, frmw @ 260, lpa @ 261, elpe_z @ 262, npss_z @ 263, avscc @ 264, apsta @ 265,
    wctemp @ 266, cctemp @ 268, mtfa @ 270, hmpre @ 272, hmmin @ 276, tnvmcap @ 280, unvmcap @ 296, rpmbs @ 312,
    edstt @ 316, dsto @ 318, fwug @ 319, kas @ 320, hctma @ 322, mntmt @ 324, mxtmt @ 326, sanicap @ 328,
    hmminds @ 332, hmmaxd @ 336, nsetidmax @ 338, endgidmax @ 340, anatt @ 342, anacap @ 343, anagrpmax @ 344,
    nanagrpid @ 348, pels @ 352, did @ 356, kpioc @ 358, mptfawr @ 360, megcap @ 368, tmpthha @ 384, cqt @ 386,
    sqes @ 512, cqes @ 513, maxcmd @ 514, nn @ 516, oncs @ 520, fuses @ 522, fna @ 524, vwc @ 525, awun_z @ 526,
    awupf_z @ 528, icsvscc @ 530, nwpc @ 531, acwu_z @ 532, cdfs @ 534, sgls @ 536, mnan @ 540, maxdna @ 544,
    maxcna @ 560, oaqd @ 564, rhiri @ 568, hirt @ 569, cmmrtd @ 570, nmmrtd @ 572, minmrtg @ 574, maxmrtg @ 575,
    trattr @ 576, mcudmq @ 578, mnsudmq @ 580, mcmr @ 582, nmcmr @ 584, mcdqpc @ 586, subnqn @ 768, ioccsz @ 1792,
    iorcsz @ 1796, icdoff @ 1800, fcatt @ 1802, msdbd @ 1803, ofcs @ 1804, dctype @ 1806, psd @ 2048, vs @ 3072,
);
zeroed_default!(IdentifyController);

impl IdentifyController {
    /// Returns the maximum data transfer size of a command in bytes, where `page_min` is the page
    /// size of CAP.MPSMIN. Returns `None` when there is no limit, or it exceeds 64 bits.
    pub fn mdts_bytes(&self, page_min: u32) -> Option<u64> {
        match self.mdts {
            0 => None,
            mdts => u64::from(page_min).checked_mul(1u64.checked_shl(mdts.into())?),
        }
    }
}

/// Power State Descriptor, 32 bytes (NVMe Base 2.1, figure 313).
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
#[repr(C)]
pub struct PowerState {
    /// Maximum Power, in units of 0.01 W, or of 0.0001 W if MXPS is set.
    pub mp: U16,
    #[doc(hidden)]
    pub reserved2: u8,
    /// Flags: Max Power Scale (MXPS) and Non-Operational State (NOPS).
    pub flags: PowerStateFlags,
    /// Entry Latency, in microseconds.
    pub enlat: U32,
    /// Exit Latency, in microseconds.
    pub exlat: U32,
    /// Relative Read Throughput; 0 is best.
    pub rrt: u8,
    /// Relative Read Latency; 0 is best.
    pub rrl: u8,
    /// Relative Write Throughput; 0 is best.
    pub rwt: u8,
    /// Relative Write Latency; 0 is best.
    pub rwl: u8,
    /// Idle Power, scaled by `ips`.
    pub idlp: U16,
    /// Idle Power Scale in bits 7:6.
    pub ips: u8,
    #[doc(hidden)]
    pub reserved19: u8,
    /// Active Power, scaled by `apws`.
    pub actp: U16,
    /// Active Power Workload in bits 2:0, Active Power Scale in bits 7:6.
    pub apws: u8,
    #[doc(hidden)]
    pub reserved23: [u8; 9],
}

wire_layout!(
    PowerState, 32, mp @ 0, flags @ 3, enlat @ 4, exlat @ 8, rrt @ 12, rrl @ 13, rwt @ 14, rwl @ 15, idlp @ 16,
    ips @ 18, actp @ 20, apws @ 22,
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identify_controller_fields_have_standard_offsets() {
        let controller = IdentifyController {
            sn: Ascii::new("S").unwrap(),
            cntrltype: ControllerType::IO,
            oacs: Oacs::new().with_dbcs(true),
            nn: 0x0102_0304.into(),
            subnqn: Nqn::new("nqn").unwrap(),
            tnvmcap: (1u128 << 64 | 5).into(),
            ..Default::default()
        };
        let page = controller.as_bytes();
        assert_eq!(page[4..6], *b"S ");
        assert_eq!(page[111], 1);
        assert_eq!(page[256..258], [0, 1]);
        assert_eq!(page[280], 5);
        assert_eq!(page[288], 1);
        assert_eq!(page[516..520], [4, 3, 2, 1]);
        assert_eq!(page[768..772], *b"nqn\0");
        assert_eq!(
            IdentifyController::read_from_bytes(page).unwrap(),
            controller
        );
    }

    #[test]
    fn default_identify_controller_is_zeroed() {
        assert_eq!(IdentifyController::default().as_bytes(), [0; 4096]);
    }

    #[test]
    fn mdts_converts_to_bytes() {
        let with = |mdts| IdentifyController {
            mdts,
            ..Default::default()
        };
        assert_eq!(with(0).mdts_bytes(4096), None);
        assert_eq!(with(8).mdts_bytes(4096), Some(1 << 20));
        assert_eq!(with(51).mdts_bytes(4096), Some(1 << 63));
        assert_eq!(with(52).mdts_bytes(4096), None);
        assert_eq!(with(255).mdts_bytes(4096), None);
        assert_eq!(with(63).mdts_bytes(u32::MAX), None);
    }
}
