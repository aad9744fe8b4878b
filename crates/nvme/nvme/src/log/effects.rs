//! Log pages that list the supported commands, log pages and features, and their effects.

use bitfield_struct::bitfield;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::wire_struct;

wire_struct! {
    /// Commands Supported and Effects log, 4096 bytes (NVMe Base 2.1, 5.1.12.1.6).
    pub struct CommandsSupported(4096, zeroed) {
        /// Effects of Admin commands, by opcode.
        pub acs @ 0: [CommandEffects; 256],
        /// Effects of I/O commands of the requested command set, by opcode.
        pub iocs @ 1024: [CommandEffects; 256],
        #[doc(hidden)]
        pub reserved2048 @ 2048: [u8; 2048],
    }
}

/// Effects of a command, and whether it is supported.
#[bitfield(u32, repr = U32, from = U32::new, into = U32::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct CommandEffects {
    /// Command Supported.
    pub csupp: bool,
    /// Logical Block Content Change.
    pub lbcc: bool,
    /// Namespace Capability Change.
    pub ncc: bool,
    /// Namespace Inventory Change.
    pub nic: bool,
    /// Controller Capability Change.
    pub ccc: bool,
    #[bits(9)]
    __: u16,
    /// Command Submission and Execution Relaxations.
    #[bits(2)]
    pub cser: u8,
    /// Command Submission and Execution: 0 no restriction, 1 no other command for the namespace, 2
    /// no other command for any namespace.
    #[bits(3)]
    pub cse: u8,
    /// UUID Selection Supported.
    pub uss: bool,
    /// Command Scope: bit 0 namespace, 1 controller, 2 NVM Set, 3 Endurance Group,
    /// 4 Domain, 5 NVM subsystem.
    #[bits(12)]
    pub csp: u16,
}

wire_struct! {
    /// Supported Log Pages log, 1024 bytes (NVMe Base 2.1, 5.1.12.1.1).
    pub struct SupportedLogPages(1024, zeroed) {
        /// Support of log pages, by log page identifier.
        pub lids @ 0: [LidSupported; 256],
    }
}

/// LID Supported and Effects data structure, for one log page.
#[bitfield(u32, repr = U32, from = U32::new, into = U32::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct LidSupported {
    /// LID Supported.
    pub lsupp: bool,
    /// Index Offset Supported.
    pub ios: bool,
    #[bits(14)]
    __: u16,
    /// LID Specific Parameter.
    pub lidsp: u16,
}

wire_struct! {
    /// Feature Identifiers Supported and Effects log, 1024 bytes (NVMe Base 2.1, 5.1.12.1.18).
    pub struct FeaturesSupported(1024, zeroed) {
        /// Support of features and effects of setting them, by feature identifier.
        pub fids @ 0: [FeatureEffects; 256],
    }
}

/// FID Supported and Effects data structure, for one feature.
#[bitfield(u32, repr = U32, from = U32::new, into = U32::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct FeatureEffects {
    /// FID Supported.
    pub fsupp: bool,
    /// User Data Content Change.
    pub udcc: bool,
    /// Namespace Capability Change.
    pub ncc: bool,
    /// Namespace Inventory Change.
    pub nic: bool,
    /// Controller Capability Change.
    pub ccc: bool,
    #[bits(14)]
    __: u16,
    /// UUID Selection Supported.
    pub uss: bool,
    /// FID Scope: bit 0 namespace, 1 controller, 2 NVM Set, 3 Endurance Group,
    /// 4 Domain, 5 NVM subsystem.
    #[bits(12)]
    pub fsp: u16,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::AdminOpcode;

    #[test]
    fn command_effects_encode() {
        let mut log = CommandsSupported::default();
        log.acs[usize::from(AdminOpcode::FORMAT_NVM.0)] = CommandEffects::new()
            .with_csupp(true)
            .with_lbcc(true)
            .with_ncc(true)
            .with_cse(1);
        assert_eq!(log.as_bytes()[0x80 * 4..][..4], [7, 0, 1, 0]);
        assert_eq!(
            CommandEffects::new().with_cser(3).as_bytes(),
            [0, 0xc0, 0, 0]
        );
        assert_eq!(
            CommandEffects::new().with_uss(true).as_bytes(),
            [0, 0, 8, 0]
        );
        assert_eq!(
            CommandEffects::new().with_csp(1).as_bytes(),
            [0, 0, 0x10, 0]
        );
        assert_eq!(
            FeatureEffects::new().with_uss(true).as_bytes(),
            [0, 0, 8, 0]
        );
        assert_eq!(LidSupported::new().with_lidsp(1).as_bytes(), [0, 0, 1, 0]);
    }
}
