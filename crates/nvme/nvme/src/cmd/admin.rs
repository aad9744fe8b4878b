//! Command dwords and results of Admin commands (NVMe Base 2.1, 5.1 and 5.2), including Format NVM
//! and Get LBA Status of the NVM command set (NVM Command Set 1.1, 4.1.2 and 4.2.1).
//!
//! Commands with only addresses as arguments have no type here. Doorbell Buffer Config (NVMe Base
//! 2.1, 5.2.5), for example, takes the shadow doorbell page in PRP1 and the EventIdx page in PRP2.

use bitfield_struct::bitfield;
use zerocopy::Unaligned;

use crate::macros::open_values;

mod directive;
mod get_log_page;

pub use directive::{DirectiveCdw11, DirectiveParameters, EnableDirectiveCdw12};
pub use get_log_page::{GetLogPage, GetLogPageCdw10, GetLogPageCdw11, GetLogPageCdw14};

/// Dword 10 of Create I/O Completion Queue and Create I/O Submission Queue (NVMe
/// Base 2.1, 5.2.1 and 5.2.2).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct CreateQueueCdw10 {
    /// Queue Identifier.
    pub qid: u16,
    /// Queue Size in entries, zero-based.
    pub qsize_z: u16,
}

impl CreateQueueCdw10 {
    /// Returns the queue size in entries, 1 to 65,536.
    #[inline]
    pub const fn qsize(self) -> u32 {
        self.qsize_z() as u32 + 1
    }
}

/// Dword 11 of Create I/O Completion Queue (NVMe Base 2.1, 5.2.1).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct CreateCqCdw11 {
    /// Physically Contiguous: PRP1 is the address of the queue, not of a PRP list.
    pub pc: bool,
    /// Interrupts Enabled for the completion queue.
    pub ien: bool,
    #[bits(14)]
    __: u16,
    /// Interrupt Vector: index of the MSI-X table entry or of the MSI message.
    pub iv: u16,
}

/// Dword 11 of Create I/O Submission Queue (NVMe Base 2.1, 5.2.2).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct CreateSqCdw11 {
    /// Physically Contiguous: PRP1 is the address of the queue, not of a PRP list.
    pub pc: bool,
    /// Queue Priority, used with weighted round robin arbitration.
    #[bits(2)]
    pub qprio: QueuePriority,
    #[bits(13)]
    __: u16,
    /// Identifier of the completion queue that the submission queue uses.
    pub cqid: u16,
}

open_values! {
    /// Queue Priority of a submission queue (2 bits).
    pub QueuePriority: u8 {
        URGENT = 0, "Urgent";
        HIGH = 1, "High";
        MEDIUM = 2, "Medium";
        LOW = 3, "Low";
    }
}

/// Dword 10 of Delete I/O Submission Queue and Delete I/O Completion Queue (NVMe
/// Base 2.1, 5.2.3 and 5.2.4).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct DeleteQueueCdw10 {
    /// Queue Identifier.
    pub qid: u16,
    __: u16,
}

/// Dword 10 of Identify (NVMe Base 2.1, 5.1.13).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct IdentifyCdw10 {
    /// Controller or Namespace Structure.
    #[bits(8)]
    pub cns: Cns,
    __: u8,
    /// Controller Identifier, if the CNS value uses it.
    pub cntid: u16,
}

/// Dword 11 of Identify.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct IdentifyCdw11 {
    /// CNS Specific Identifier, for example of an NVM Set, an Endurance Group or a domain.
    pub cnssid: u16,
    __: u8,
    /// Command Set Identifier, if the CNS value uses it.
    #[bits(8)]
    pub csi: Csi,
}

open_values! {
    /// Controller or Namespace Structure (CNS): data structure that Identify returns (NVMe Base
    /// 2.1, 5.1.13.1).
    pub Cns: u8 {
        NAMESPACE = 0x00, "Identify Namespace data structure";
        CONTROLLER = 0x01, "Identify Controller data structure";
        ACTIVE_NSID_LIST = 0x02, "Active Namespace ID list";
        NAMESPACE_DESCRIPTORS = 0x03, "Namespace Identification Descriptor list";
        NVM_SET_LIST = 0x04, "NVM Set List";
        IOCS_NAMESPACE = 0x05, "I/O Command Set specific Identify Namespace data structure";
        IOCS_CONTROLLER = 0x06, "I/O Command Set specific Identify Controller data structure";
        IOCS_ACTIVE_NSID_LIST = 0x07, "I/O Command Set specific Active Namespace ID list";
        IOCS_INDEPENDENT_NAMESPACE = 0x08, "I/O Command Set Independent Identify Namespace data structure";
        NAMESPACE_USER_DATA_FORMAT = 0x09, "Identify Namespace data structure by User Data Format";
        IOCS_NAMESPACE_USER_DATA_FORMAT = 0x0a,
            "I/O Command Set specific Identify Namespace data structure by User Data Format";
        ALLOCATED_NSID_LIST = 0x10, "Allocated Namespace ID list";
        ALLOCATED_NAMESPACE = 0x11, "Identify Namespace data structure of an allocated namespace";
        NAMESPACE_CONTROLLER_LIST = 0x12, "Controller list of the controllers attached to the namespace";
        CONTROLLER_LIST = 0x13, "Controller list of the controllers in the NVM subsystem";
        PRIMARY_CONTROLLER_CAPABILITIES = 0x14, "Primary Controller Capabilities data structure";
        SECONDARY_CONTROLLER_LIST = 0x15, "Secondary Controller list";
        NAMESPACE_GRANULARITY_LIST = 0x16, "Namespace Granularity List";
        UUID_LIST = 0x17, "UUID List";
        DOMAIN_LIST = 0x18, "Domain List";
        ENDURANCE_GROUP_LIST = 0x19, "Endurance Group List";
        IOCS_ALLOCATED_NSID_LIST = 0x1a, "I/O Command Set specific Allocated Namespace ID list";
        IOCS_ALLOCATED_NAMESPACE = 0x1b,
            "I/O Command Set specific Identify Namespace data structure of an allocated namespace";
        IO_COMMAND_SETS = 0x1c, "Identify I/O Command Set data structure";
        UNDERLYING_NAMESPACE_LIST = 0x1d, "Underlying Namespace List";
        PORTS_LIST = 0x1e, "Ports List";
        IOCS_INDEPENDENT_ALLOCATED_NAMESPACE = 0x1f,
            "I/O Command Set Independent Identify Namespace data structure of an allocated namespace";
        SUPPORTED_CONTROLLER_STATE_FORMATS = 0x20, "Supported Controller State Formats";
    }
}

open_values! {
    /// Command Set Identifier (NVMe Base 2.1, 5.1.13.1).
    pub Csi: u8 {
        NVM = 0x00, "NVM Command Set";
        KEY_VALUE = 0x01, "Key Value Command Set";
        ZONED = 0x02, "Zoned Namespace Command Set";
        SUBSYSTEM_LOCAL_MEMORY = 0x03, "Subsystem Local Memory Command Set";
        COMPUTATIONAL_PROGRAMS = 0x04, "Computational Programs Command Set";
    }
}

/// Dword 10 of Get Features (NVMe Base 2.1, 5.1.11).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GetFeaturesCdw10 {
    /// Feature Identifier.
    #[bits(8)]
    pub fid: crate::feature::Fid,
    /// Select: current, default or saved value, or the feature's capabilities.
    #[bits(3)]
    pub sel: FeatureSelect,
    #[bits(21)]
    __: u32,
}

open_values! {
    /// Select field of Get Features (3 bits).
    pub FeatureSelect: u8 {
        CURRENT = 0, "Current";
        DEFAULT = 1, "Default";
        SAVED = 2, "Saved";
        SUPPORTED_CAPABILITIES = 3, "Supported Capabilities";
    }
}

/// Dword 0 of the completion of Get Features with [`FeatureSelect::SUPPORTED_CAPABILITIES`].
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct FeatureCapabilities {
    /// Whether the value can be saved.
    pub saveable: bool,
    /// Whether the feature is namespace specific.
    pub namespace_specific: bool,
    /// Whether the value can be changed.
    pub changeable: bool,
    #[bits(29)]
    __: u32,
}

/// Dword 10 of Set Features (NVMe Base 2.1, 5.1.25).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct SetFeaturesCdw10 {
    /// Feature Identifier.
    #[bits(8)]
    pub fid: crate::feature::Fid,
    #[bits(23)]
    __: u32,
    /// Save: the value has to survive power cycles and resets.
    pub sv: bool,
}

/// Dword 10 of Abort (NVMe Base 2.1, 5.1.1).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AbortCdw10 {
    /// Submission Queue Identifier of the command to abort.
    pub sqid: u16,
    /// Command Identifier of the command to abort.
    pub cid: u16,
}

/// Dword 0 of the completion of Abort.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AbortResult {
    /// Immediate Abort Not Performed: the command was not aborted.
    pub ianp: bool,
    #[bits(31)]
    __: u32,
}

open_values! {
    /// Action Type of Get LBA Status (NVM Command Set 1.1, 4.2.1).
    #[derive(Unaligned)]
    pub LbaStatusAction: u8 {
        ALLOCATED = 0x02, "Return tracked allocated LBAs";
        SCAN = 0x10, "Perform a scan and return Untracked LBAs and Tracked LBAs";
        TRACKED = 0x11, "Return Tracked LBAs";
    }
}

/// Dword 13 of Get LBA Status (NVM Command Set 1.1, 4.2.1). Dwords 10 and 11 contain the starting
/// LBA; dword 12 contains the Maximum Number of Dwords, zero-based.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GetLbaStatusCdw13 {
    /// Range Length in logical blocks; 0 for all blocks from the starting LBA on.
    pub rl: u16,
    __: u8,
    /// Action Type: reported blocks, and whether the device scans for them.
    #[bits(8)]
    pub atype: LbaStatusAction,
}

/// Dword 10 of Format NVM (NVMe Base 2.1, 5.1.10; NVM Command Set 1.1, 4.1.2).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct FormatCdw10 {
    /// LBA Format Lower: bits 3:0 of the format index.
    #[bits(4)]
    pub lbafl: u8,
    /// Metadata Settings: set for metadata interleaved with the data (extended LBA).
    pub mset: bool,
    /// Protection Information type; 0 for none.
    #[bits(3)]
    pub pi: u8,
    /// Protection Information Location: set when it is in the first bytes of the metadata.
    pub pil: bool,
    /// Secure Erase Settings.
    #[bits(3)]
    pub ses: SecureErase,
    /// LBA Format Upper: bits 5:4 of the format index.
    #[bits(2)]
    pub lbafu: u8,
    #[bits(18)]
    __: u32,
}

impl FormatCdw10 {
    /// Returns the index of the LBA format, 0 to 63.
    pub const fn lbaf(self) -> u8 {
        self.lbafu() << 4 | self.lbafl()
    }
}

open_values! {
    /// Secure Erase Settings (3 bits).
    pub SecureErase: u8 {
        NONE = 0, "No secure erase operation requested";
        USER_DATA = 1, "User Data Erase";
        CRYPTOGRAPHIC = 2, "Cryptographic Erase";
    }
}

/// Dword 10 of Sanitize (NVMe Base 2.1, 5.1.22).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct SanitizeCdw10 {
    /// Sanitize Action.
    #[bits(3)]
    pub sanact: SanitizeAction,
    /// Allow Unrestricted Sanitize Exit: the host may exit the failure mode without a successful
    /// sanitize operation.
    pub ause: bool,
    /// Overwrite Pass Count; 0 means 16, see [`Self::passes`].
    #[bits(4)]
    pub owpass: u8,
    /// Overwrite Invert Pattern Between Passes.
    pub oipbp: bool,
    /// No-Deallocate After Sanitize: the controller should not deallocate blocks after the
    /// operation.
    pub ndas: bool,
    /// Enter Media Verification State after a successful operation.
    pub emvs: bool,
    #[bits(21)]
    __: u32,
}

impl SanitizeCdw10 {
    /// Returns the number of overwrite passes, 1 to 16.
    pub const fn passes(self) -> u8 {
        match self.owpass() {
            0 => 16,
            passes => passes,
        }
    }
}

open_values! {
    /// Sanitize Action (3 bits).
    pub SanitizeAction: u8 {
        EXIT_FAILURE_MODE = 1, "Exit Failure Mode";
        BLOCK_ERASE = 2, "Start a Block Erase sanitize operation";
        OVERWRITE = 3, "Start an Overwrite sanitize operation";
        CRYPTO_ERASE = 4, "Start a Crypto Erase sanitize operation";
        EXIT_MEDIA_VERIFICATION = 5, "Exit Media Verification State";
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::feature::Fid;

    #[test]
    fn queue_command_dwords_encode() {
        let cdw10 = CreateQueueCdw10::from_bits(0x03ff_0002);
        assert_eq!(
            (cdw10.qid(), cdw10.qsize_z(), cdw10.qsize()),
            (2, 1023, 1024)
        );
        let cq = CreateCqCdw11::from_bits(0x0005_0003);
        assert_eq!((cq.pc(), cq.ien(), cq.iv()), (true, true, 5));
        let sq = CreateSqCdw11::from_bits(0x0002_0005);
        assert_eq!(
            (sq.pc(), sq.qprio(), sq.cqid()),
            (true, QueuePriority::MEDIUM, 2)
        );
        assert_eq!(DeleteQueueCdw10::from_bits(0xffff_0007).qid(), 7);
    }

    #[test]
    fn identify_dwords_encode() {
        let cdw10 = IdentifyCdw10::from_bits(0x0009_0013);
        assert_eq!((cdw10.cns(), cdw10.cntid()), (Cns::CONTROLLER_LIST, 9));
        let cdw11 = IdentifyCdw11::from_bits(0x0200_0004);
        assert_eq!((cdw11.csi(), cdw11.cnssid()), (Csi::ZONED, 4));
    }

    #[test]
    fn feature_dwords_encode() {
        let get = GetFeaturesCdw10::from_bits(0x307);
        assert_eq!(get.fid(), Fid::NUMBER_OF_QUEUES);
        assert_eq!(get.sel(), FeatureSelect::SUPPORTED_CAPABILITIES);
        assert!(SetFeaturesCdw10::from_bits(1 << 31).sv());
    }

    #[test]
    fn format_index_has_six_bits() {
        assert_eq!(FormatCdw10::from_bits(3 << 12 | 0xf).lbaf(), 63);
        let format = FormatCdw10::from_bits(1 << 9);
        assert_eq!(format.ses(), SecureErase::USER_DATA);
    }

    #[test]
    fn sanitize_dword_10_decodes_zero_passes_as_sixteen() {
        let cdw10 = SanitizeCdw10::from_bits(0x3 | 1 << 3 | 5 << 4 | 1 << 8 | 1 << 9);
        assert_eq!(
            (cdw10.sanact(), cdw10.passes()),
            (SanitizeAction::OVERWRITE, 5)
        );
        assert!(cdw10.ause() && cdw10.oipbp() && cdw10.ndas() && !cdw10.emvs());
        assert_eq!(SanitizeCdw10::from_bits(3).passes(), 16);
    }
}
