//! Header of a GUID partition table (UEFI 2.10, 5.3.2).

use super::{ENTRY, TABLE_MAX};

/// Error text for a block that has no GPT signature.
pub(super) const NO_SIGNATURE: &str = "there is no header";

/// Size in bytes of the fields that the UEFI standard defines in a GPT header.
const HEADER: usize = 92;

/// Selects one of the two copies of a GUID partition table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TableCopy {
    /// Primary table, from block 1 on.
    First,
    /// Backup table, with its header in the last block.
    Last,
}

/// Fields of a GPT header that has passed its checks. Block numbers count from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// Block size of the partition table in bytes.
    pub sector: u64,
    /// First and last block that partitions may use.
    pub first_usable: u64,
    pub last_usable: u64,
    /// Number of the first block of the partition entries.
    pub table: u64,
    pub entries: u32,
    /// Size of one partition entry in bytes.
    pub entry_size: u32,
    pub table_crc: u32,
}

pub(super) fn u64_at(raw: &[u8], at: usize) -> Option<u64> {
    let bytes = raw.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

fn u32_at(raw: &[u8], at: usize) -> Option<u32> {
    let bytes = raw.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

impl Header {
    /// Parses and checks the header in the block `raw`, which is block `lba` of a device of
    /// `blocks` blocks.
    pub(super) fn parse(
        raw: &[u8],
        lba: u64,
        blocks: u64,
        place: TableCopy,
    ) -> Result<Self, &'static str> {
        const SHORT: &str = "the header is cut short";
        if raw.get(..8) != Some(b"EFI PART") {
            return Err(NO_SIGNATURE);
        }
        let u32_at = |at| u32_at(raw, at).ok_or(SHORT);
        let u64_at = |at| u64_at(raw, at).ok_or(SHORT);
        if u32_at(8)? >> 16 != 1 {
            return Err("the header is of an unknown revision");
        }
        let len = u32_at(12)? as usize;
        let mut covered = raw
            .get(..len)
            .filter(|_| len >= HEADER)
            .ok_or("the header has an impossible size")?
            .to_vec();
        // The checksum is made with itself as zero.
        covered.get_mut(16..20).ok_or(SHORT)?.fill(0);
        if crc32fast::hash(&covered) != u32_at(16)? {
            return Err("the header's checksum is wrong");
        }
        if u64_at(24)? != lba {
            return Err("the header belongs to another block");
        }
        let header = Self {
            sector: raw.len() as u64,
            first_usable: u64_at(40)?,
            last_usable: u64_at(48)?,
            table: u64_at(72)?,
            entries: u32_at(80)?,
            entry_size: u32_at(84)?,
            table_crc: u32_at(88)?,
        };
        header.check(lba, blocks, place)?;
        Ok(header)
    }

    fn check(&self, lba: u64, blocks: u64, place: TableCopy) -> Result<(), &'static str> {
        if !self.entry_size.is_power_of_two() || !ENTRY.contains(&self.entry_size) {
            return Err("the entries have an impossible size");
        }
        if self.entries == 0 {
            return Err("the table has no entries");
        }
        if u64::from(self.entries) * u64::from(self.entry_size) > TABLE_MAX {
            return Err("the table is too large");
        }
        if self.first_usable > self.last_usable {
            return Err("the usable part ends before it begins");
        }
        if self.last_usable >= blocks {
            return Err("the usable part lies outside of the device (has it been cut short?)");
        }
        let end = self
            .table
            .checked_add(self.table_bytes() / self.sector)
            .ok_or("the table lies outside of the device")?;
        if self.first_usable < 2 + self.table_bytes() / self.sector {
            return Err("the usable part begins where the first copy is");
        }
        let (least, most) = match place {
            TableCopy::First => (lba + 1, self.first_usable),
            TableCopy::Last => (self.last_usable + 1, lba),
        };
        if self.table < least || end > most {
            return Err("the table lies where it must not");
        }
        Ok(())
    }

    /// Returns the size of the partition entries in bytes, rounded up to whole blocks.
    pub(super) fn table_bytes(&self) -> u64 {
        let bytes = u64::from(self.entries) * u64::from(self.entry_size);
        bytes.div_ceil(self.sector) * self.sector
    }
}
