//! Directive Receive and Directive Send: NVMe Base 2.1, 5.1.6, 5.1.7 and 8.1.8.

use bitfield_struct::bitfield;

use crate::cmd::io::DirectiveType;
use crate::macros::wire_struct;

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

wire_struct! {
    /// Data of Return Parameters (Identify directive), 4096 bytes: bit masks of Directive Types.
    pub struct DirectiveParameters(4096, zeroed) {
        /// Directives Supported by the controller.
        pub supported @ 0: [u8; 32],
        /// Directives Enabled for the namespace.
        pub enabled @ 32: [u8; 32],
        /// Directives whose enabled state is Persistent Across Controller Level Resets.
        pub persistent @ 64: [u8; 32],
        #[doc(hidden)]
        pub reserved96 @ 96: [u8; 4000],
    }
}

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
