//! Directive Receive and Directive Send: NVMe Base 2.1, 5.1.6, 5.1.7 and 8.1.8.

use bitfield_struct::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::cmd::io::DirectiveType;
use crate::macros::{wire_layout, zeroed_default};

/// Dword 11 of Directive Receive and Directive Send. Dword 10 of Directive Receive is the number of
/// dwords, zero-based.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct DirectiveCdw11 {
    /// Directive Operation.
    pub doper: u8,
    /// Directive Type.
    #[bits(8)]
    pub dtype: DirectiveType,
    /// Directive Specific.
    pub dspec: u16,
}

impl DirectiveCdw11 {
    /// Directive Operation of Directive Receive for the Identify directive: Return Parameters.
    pub const RETURN_PARAMETERS: u8 = 1;
    /// Directive Operation of Directive Send for the Identify directive: Enable Directive.
    pub const ENABLE: u8 = 1;
}

/// Dword 12 of Enable Directive.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct EnableDirectiveCdw12 {
    /// Enable Directive: set to enable the directive, clear to disable it.
    pub endir: bool,
    #[bits(7)]
    __: u8,
    /// Type of the directive to enable or disable.
    #[bits(8)]
    pub dtype: DirectiveType,
    __: u16,
}

/// Data of Return Parameters (Identify directive), 4096 bytes: bit masks of Directive Types.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DirectiveParameters {
    /// Directives Supported by the controller.
    pub supported: [u8; 32],
    /// Directives Enabled for the namespace.
    pub enabled: [u8; 32],
    /// Directives whose enabled state is Persistent Across Controller Level Resets.
    pub persistent: [u8; 32],
    #[doc(hidden)]
    pub reserved96: [u8; 4000],
}

wire_layout!(DirectiveParameters, 4096, supported @ 0, enabled @ 32, persistent @ 64, reserved96 @ 96);
zeroed_default!(DirectiveParameters);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directive_dwords_encode() {
        let enable = EnableDirectiveCdw12::new()
            .with_endir(true)
            .with_dtype(DirectiveType::DATA_PLACEMENT);
        assert_eq!(enable.into_bits(), 0x201);
        let cdw11 = DirectiveCdw11::new().with_doper(DirectiveCdw11::ENABLE);
        assert_eq!(cdw11.into_bits(), 1);
    }
}
