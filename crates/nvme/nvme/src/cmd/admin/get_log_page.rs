//! Get Log Page: NVMe Base 2.1, 5.1.12.

use bitfield_struct::bitfield;

use super::Csi;
use crate::Command;
use crate::log::Lid;

/// Dword 10 of Get Log Page (NVMe Base 2.1, 5.1.12).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GetLogPageCdw10 {
    /// Log Page Identifier.
    #[bits(8)]
    pub lid: Lid,
    /// Log Specific Parameter.
    #[bits(7)]
    pub lsp: u8,
    /// Retain Asynchronous Event: reading the page does not clear its event.
    pub rae: bool,
    /// Number of Dwords Lower: bits 15:0 of the length, see [`GetLogPage::bytes`].
    pub numdl: u16,
}

/// Dword 11 of Get Log Page.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GetLogPageCdw11 {
    /// Number of Dwords Upper: bits 31:16 of the length, see [`GetLogPage::bytes`].
    pub numdu: u16,
    /// Log Specific Identifier.
    pub lsi: u16,
}

/// Dword 14 of Get Log Page.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GetLogPageCdw14 {
    /// UUID Index; 0 for none.
    #[bits(7)]
    pub uidx: u8,
    #[bits(16)]
    __: u16,
    /// Offset Type: set when the offset counts entries instead of bytes.
    pub ot: bool,
    /// Command Set Identifier.
    #[bits(8)]
    pub csi: Csi,
}

/// All arguments of Get Log Page, collected from the command's dwords.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct GetLogPage {
    /// Log Page Identifier.
    pub lid: Lid,
    /// Log Specific Parameter, 7 bits.
    pub lsp: u8,
    /// Retain Asynchronous Event: reading the page does not clear its event.
    pub rae: bool,
    /// Number of dwords to return, zero-based.
    pub numd_z: u32,
    /// Log Specific Identifier.
    pub lsi: u16,
    /// Log Page Offset in bytes, or in entries if `ot` is set.
    pub lpo: u64,
    /// UUID Index, 7 bits.
    pub uidx: u8,
    /// Offset Type: set when the offset counts entries instead of bytes.
    pub ot: bool,
    /// Command Set Identifier.
    pub csi: Csi,
}

impl GetLogPage {
    /// Returns the arguments from a command's dwords.
    pub fn from_command(command: &Command) -> Self {
        let cdw10 = GetLogPageCdw10::from_bits(command.cdw10.get());
        let cdw11 = GetLogPageCdw11::from_bits(command.cdw11.get());
        let cdw14 = GetLogPageCdw14::from_bits(command.cdw14.get());
        Self {
            lid: cdw10.lid(),
            lsp: cdw10.lsp(),
            rae: cdw10.rae(),
            numd_z: u32::from(cdw11.numdu()) << 16 | u32::from(cdw10.numdl()),
            lsi: cdw11.lsi(),
            lpo: u64::from(command.cdw13.get()) << 32 | u64::from(command.cdw12.get()),
            uidx: cdw14.uidx(),
            ot: cdw14.ot(),
            csi: cdw14.csi(),
        }
    }

    /// Stores the arguments in a command's dwords.
    pub fn apply(&self, command: &mut Command) {
        command.cdw10 = GetLogPageCdw10::new()
            .with_lid(self.lid)
            .with_lsp(self.lsp & 0x7f)
            .with_rae(self.rae)
            .with_numdl(self.numd_z as u16)
            .into_bits()
            .into();
        command.cdw11 = GetLogPageCdw11::new()
            .with_numdu((self.numd_z >> 16) as u16)
            .with_lsi(self.lsi)
            .into_bits()
            .into();
        command.cdw12 = (self.lpo as u32).into();
        command.cdw13 = ((self.lpo >> 32) as u32).into();
        command.cdw14 = GetLogPageCdw14::new()
            .with_uidx(self.uidx & 0x7f)
            .with_ot(self.ot)
            .with_csi(self.csi)
            .into_bits()
            .into();
    }

    /// Returns the number of bytes to return, 4 to 16 GiB.
    #[inline]
    pub const fn bytes(&self) -> u64 {
        (self.numd_z as u64 + 1) * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn get_log_page_round_trips() {
        let arguments = GetLogPage {
            lid: Lid::COMMANDS_SUPPORTED,
            lsp: 0x55,
            rae: true,
            numd_z: 0x0001_03ff,
            lsi: 0x77,
            lpo: 0x1_0000_0200,
            uidx: 3,
            ot: true,
            csi: Csi::ZONED,
        };
        let mut command = Command::default();
        arguments.apply(&mut command);
        assert_eq!(command.cdw10.get(), 0x03ff_0000 | 1 << 15 | 0x55 << 8 | 5);
        assert_eq!(command.cdw11.get(), 0x0077_0001);
        assert_eq!(command.cdw14.get(), 2 << 24 | 1 << 23 | 3);
        assert_eq!(GetLogPage::from_command(&command), arguments);
        assert_eq!(arguments.bytes(), 0x0001_0400 * 4);
        let most = GetLogPage {
            numd_z: u32::MAX,
            ..arguments
        };
        assert_eq!(most.bytes(), 1 << 34);
    }
}
