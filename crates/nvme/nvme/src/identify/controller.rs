//! Identify Controller data structure (CNS 01h): NVMe Base 2.1, 5.1.13.2.1, figure 312.

use zerocopy::little_endian::{U16, U32, U128};

use super::controller_bits::{
    Anacap, Cmic, ControllerType, Ctratt, Fna, Frmw, Fuses, Lpa, Oacs, Oaes, Oncs, PowerStateFlags,
    QueueEntrySize, Sanicap, Sgls, Vwc,
};
use super::text::{Ascii, Nqn};
use crate::macros::wire_struct;

wire_struct! {
    /// Properties and capabilities of a controller, 4096 bytes.
    ///
    /// Capacities are in bytes. `default()` is all zeroes, including the text fields.
    pub struct IdentifyController(4096, zeroed) {
        /// PCI Vendor ID.
        pub vid @ 0: U16,
        /// PCI Subsystem Vendor ID.
        pub ssvid @ 2: U16,
        /// Serial Number.
        pub sn @ 4: Ascii<20>,
        /// Model Number.
        pub mn @ 24: Ascii<40>,
        /// Firmware Revision.
        pub fr @ 64: Ascii<8>,
        /// Recommended Arbitration Burst as a power of two.
        pub rab @ 72: u8,
        /// IEEE OUI Identifier, least significant byte first.
        pub ieee @ 73: [u8; 3],
        /// Controller Multi-Path I/O and Namespace Sharing Capabilities.
        pub cmic @ 76: Cmic,
        /// Maximum Data Transfer Size: a power of two of pages of CAP.MPSMIN; 0 for no limit. See
        /// [`Self::mdts_bytes`].
        pub mdts @ 77: u8,
        /// Controller ID, unique in the NVM subsystem.
        pub cntlid @ 78: U16,
        /// Version, with the layout of the VS register ([`crate::regs::Vs`]).
        pub ver @ 80: U32,
        /// RTD3 Resume Latency, in microseconds.
        pub rtd3r @ 84: U32,
        /// RTD3 Entry Latency, in microseconds: time that a host waits for a shutdown to complete.
        pub rtd3e @ 88: U32,
        /// Optional Asynchronous Events Supported.
        pub oaes @ 92: Oaes,
        /// Controller Attributes.
        pub ctratt @ 96: Ctratt,
        /// Read Recovery Levels Supported.
        pub rrls @ 100: U16,
        /// Boot Partition Capabilities.
        pub bpcap @ 102: u8,
        #[doc(hidden)]
        pub reserved103 @ 103: u8,
        /// NVM Subsystem Shutdown Latency, in microseconds.
        pub nssl @ 104: U32,
        #[doc(hidden)]
        pub reserved108 @ 108: [u8; 2],
        /// Power Loss Signaling Information.
        pub plsi @ 110: u8,
        /// Controller Type.
        pub cntrltype @ 111: ControllerType,
        /// FRU Globally Unique Identifier, big endian.
        pub fguid @ 112: [u8; 16],
        /// Command Retry Delay Times 1 to 3, in units of 100 ms.
        pub crdt @ 128: [U16; 3],
        /// Controller Reachability Capabilities.
        pub crcap @ 134: u8,
        #[doc(hidden)]
        pub reserved135 @ 135: [u8; 118],
        /// NVM Subsystem Report.
        pub nvmsr @ 253: u8,
        /// VPD Write Cycle Information.
        pub vwci @ 254: u8,
        /// Management Endpoint Capabilities.
        pub mec @ 255: u8,
        /// Optional Admin Command Support.
        pub oacs @ 256: Oacs,
        /// Abort Command Limit, zero-based.
        pub acl_z @ 258: u8,
        /// Asynchronous Event Request Limit, zero-based.
        pub aerl_z @ 259: u8,
        /// Firmware Updates.
        pub frmw @ 260: Frmw,
        /// Log Page Attributes.
        pub lpa @ 261: Lpa,
        /// Error Log Page Entries, zero-based.
        pub elpe_z @ 262: u8,
        /// Number of Power States Support, zero-based.
        pub npss_z @ 263: u8,
        /// Admin Vendor Specific Command Configuration: bit 0, standard command format.
        pub avscc @ 264: u8,
        /// Autonomous Power State Transition Attributes: bit 0 is set when supported.
        pub apsta @ 265: u8,
        /// Warning Composite Temperature Threshold, in kelvins.
        pub wctemp @ 266: U16,
        /// Critical Composite Temperature Threshold, in kelvins.
        pub cctemp @ 268: U16,
        /// Maximum Time for Firmware Activation, in units of 100 ms.
        pub mtfa @ 270: U16,
        /// Host Memory Buffer Preferred Size, in units of 4 KiB.
        pub hmpre @ 272: U32,
        /// Host Memory Buffer Minimum Size, in units of 4 KiB.
        pub hmmin @ 276: U32,
        /// Total NVM Capacity.
        pub tnvmcap @ 280: U128,
        /// Unallocated NVM Capacity.
        pub unvmcap @ 296: U128,
        /// Replay Protected Memory Block Support.
        pub rpmbs @ 312: U32,
        /// Extended Device Self-test Time, in minutes.
        pub edstt @ 316: U16,
        /// Device Self-test Options.
        pub dsto @ 318: u8,
        /// Firmware Update Granularity, in units of 4 KiB.
        pub fwug @ 319: u8,
        /// Keep Alive Support: granularity of the timer in units of 100 ms; 0 when not supported.
        pub kas @ 320: U16,
        /// Host Controlled Thermal Management Attributes.
        pub hctma @ 322: U16,
        /// Minimum Thermal Management Temperature, in kelvins.
        pub mntmt @ 324: U16,
        /// Maximum Thermal Management Temperature, in kelvins.
        pub mxtmt @ 326: U16,
        /// Sanitize Capabilities.
        pub sanicap @ 328: Sanicap,
        /// Host Memory Buffer Minimum Descriptor Entry Size, in units of 4 KiB.
        pub hmminds @ 332: U32,
        /// Host Memory Maximum Descriptors Entries.
        pub hmmaxd @ 336: U16,
        /// NVM Set Identifier Maximum.
        pub nsetidmax @ 338: U16,
        /// Endurance Group Identifier Maximum.
        pub endgidmax @ 340: U16,
        /// ANA Transition Time, in seconds.
        pub anatt @ 342: u8,
        /// Asymmetric Namespace Access Capabilities.
        pub anacap @ 343: Anacap,
        /// ANA Group Identifier Maximum.
        pub anagrpmax @ 344: U32,
        /// Number of ANA Group Identifiers.
        pub nanagrpid @ 348: U32,
        /// Persistent Event Log Size, in units of 64 KiB.
        pub pels @ 352: U32,
        /// Domain Identifier.
        pub did @ 356: U16,
        /// Key Per I/O Capabilities.
        pub kpioc @ 358: u8,
        #[doc(hidden)]
        pub reserved359 @ 359: u8,
        /// Maximum Processing Time for Firmware Activation Without Reset, in units of 100 ms.
        pub mptfawr @ 360: U16,
        #[doc(hidden)]
        pub reserved362 @ 362: [u8; 6],
        /// Max Endurance Group Capacity.
        pub megcap @ 368: U128,
        /// Temperature Threshold Hysteresis Attributes.
        pub tmpthha @ 384: u8,
        #[doc(hidden)]
        pub reserved385 @ 385: u8,
        /// Command Quiesce Time, in milliseconds.
        pub cqt @ 386: U16,
        #[doc(hidden)]
        pub reserved388 @ 388: [u8; 124],
        /// Submission Queue Entry Size.
        pub sqes @ 512: QueueEntrySize,
        /// Completion Queue Entry Size.
        pub cqes @ 513: QueueEntrySize,
        /// Maximum Outstanding Commands; 0 when no limit is reported.
        pub maxcmd @ 514: U16,
        /// Number of Namespaces, which is the largest valid NSID.
        pub nn @ 516: U32,
        /// Optional NVM Command Support.
        pub oncs @ 520: Oncs,
        /// Fused Operation Support.
        pub fuses @ 522: Fuses,
        /// Format NVM Attributes.
        pub fna @ 524: Fna,
        /// Volatile Write Cache.
        pub vwc @ 525: Vwc,
        /// Atomic Write Unit Normal, in logical blocks, zero-based.
        pub awun_z @ 526: U16,
        /// Atomic Write Unit Power Fail, in logical blocks, zero-based.
        pub awupf_z @ 528: U16,
        /// I/O Command Set Vendor Specific Command Configuration: bit 0, standard command format.
        pub icsvscc @ 530: u8,
        /// Namespace Write Protection Capabilities.
        pub nwpc @ 531: u8,
        /// Atomic Compare and Write Unit, in logical blocks, zero-based.
        pub acwu_z @ 532: U16,
        /// Copy Descriptor Formats Supported: one bit per format.
        pub cdfs @ 534: U16,
        /// SGL Support.
        pub sgls @ 536: Sgls,
        /// Maximum Number of Allowed Namespaces; 0 when `nn` is the limit.
        pub mnan @ 540: U32,
        /// Maximum Domain Namespace Attachments.
        pub maxdna @ 544: U128,
        /// Maximum I/O Controller Namespace Attachments.
        pub maxcna @ 560: U32,
        /// Optimal Aggregated Queue Depth.
        pub oaqd @ 564: U32,
        /// Recommended Host-Initiated Refresh Interval, in days.
        pub rhiri @ 568: u8,
        /// Host-Initiated Refresh Time, in units of 10 minutes.
        pub hirt @ 569: u8,
        /// Controller Maximum Memory Range Tracking Descriptors.
        pub cmmrtd @ 570: U16,
        /// NVM Subsystem Maximum Memory Range Tracking Descriptors.
        pub nmmrtd @ 572: U16,
        /// Minimum Memory Range Tracking Granularity.
        pub minmrtg @ 574: u8,
        /// Maximum Memory Range Tracking Granularity.
        pub maxmrtg @ 575: u8,
        /// Tracking Attributes.
        pub trattr @ 576: u8,
        #[doc(hidden)]
        pub reserved577 @ 577: u8,
        /// Maximum Controller User Data Migration Queues.
        pub mcudmq @ 578: U16,
        /// Maximum NVM Subsystem User Data Migration Queues.
        pub mnsudmq @ 580: U16,
        /// Maximum CDQ Memory Ranges.
        pub mcmr @ 582: U16,
        /// NVM Subsystem Maximum CDQ Memory Ranges.
        pub nmcmr @ 584: U16,
        /// Maximum Controller Data Queue PRP Count.
        pub mcdqpc @ 586: U16,
        #[doc(hidden)]
        pub reserved588 @ 588: [u8; 180],
        /// NVM Subsystem NVMe Qualified Name.
        pub subnqn @ 768: Nqn,
        #[doc(hidden)]
        pub reserved1024 @ 1024: [u8; 768],
        /// I/O Queue Command Capsule Supported Size, in units of 16 bytes (Fabrics).
        pub ioccsz @ 1792: U32,
        /// I/O Queue Response Capsule Supported Size, in units of 16 bytes (Fabrics).
        pub iorcsz @ 1796: U32,
        /// In Capsule Data Offset, in units of 16 bytes (Fabrics).
        pub icdoff @ 1800: U16,
        /// Fabrics Controller Attributes.
        pub fcatt @ 1802: u8,
        /// Maximum SGL Data Block Descriptors in a capsule (Fabrics).
        pub msdbd @ 1803: u8,
        /// Optional Fabrics Commands Support.
        pub ofcs @ 1804: U16,
        /// Discovery Controller Type (Fabrics).
        pub dctype @ 1806: u8,
        #[doc(hidden)]
        pub reserved1807 @ 1807: [u8; 241],
        /// Power State Descriptors, of which the first `npss_z + 1` are valid.
        pub psd @ 2048: [PowerState; 32],
        /// Vendor specific.
        pub vs @ 3072: [u8; 1024],
    }
}

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

wire_struct! {
    /// Power State Descriptor, 32 bytes (NVMe Base 2.1, figure 313).
    pub struct PowerState(32) {
        /// Maximum Power, in units of 0.01 W, or of 0.0001 W if MXPS is set.
        pub mp @ 0: U16,
        #[doc(hidden)]
        pub reserved2 @ 2: u8,
        /// Flags: Max Power Scale (MXPS) and Non-Operational State (NOPS).
        pub flags @ 3: PowerStateFlags,
        /// Entry Latency, in microseconds.
        pub enlat @ 4: U32,
        /// Exit Latency, in microseconds.
        pub exlat @ 8: U32,
        /// Relative Read Throughput; 0 is best.
        pub rrt @ 12: u8,
        /// Relative Read Latency; 0 is best.
        pub rrl @ 13: u8,
        /// Relative Write Throughput; 0 is best.
        pub rwt @ 14: u8,
        /// Relative Write Latency; 0 is best.
        pub rwl @ 15: u8,
        /// Idle Power, scaled by `ips`.
        pub idlp @ 16: U16,
        /// Idle Power Scale in bits 7:6.
        pub ips @ 18: u8,
        #[doc(hidden)]
        pub reserved19 @ 19: u8,
        /// Active Power, scaled by `apws`.
        pub actp @ 20: U16,
        /// Active Power Workload in bits 2:0, Active Power Scale in bits 7:6.
        pub apws @ 22: u8,
        #[doc(hidden)]
        pub reserved23 @ 23: [u8; 9],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::{FromBytes, IntoBytes};

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
