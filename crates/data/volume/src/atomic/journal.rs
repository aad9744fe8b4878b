//! Format of the journal's bytes.
//!
//! A journal is a head, which names its volume, and slots. A slot is a head of its own and the data
//! of one write. A slot holds an entry from just before the write is done in place until it is
//! complete. Otherwise the slot's head is zeroes, or does not fit its data: then the power was cut
//! before anything was done in place.
//!
//! All numbers are little-endian. Heads lie in the first 512 bytes of 4096, and so in one sector.

use crate::AtomicWrites;

/// Number of slots, which is the maximum number of writes in the journal at one time.
pub(super) const SLOTS: u32 = 64;
/// Size of a head in bytes, which is at least the block size of every disk.
pub(super) const HEAD: u64 = 4096;
const HEAD_MAGIC: [u8; 8] = *b"vnvmeAtJ";
const ENTRY_MAGIC: [u8; 8] = *b"vnvmeAtE";
const VERSION: u32 = 1;

/// Returns the size of a slot in bytes: its head and the data of the longest write.
pub(super) const fn slot_len(unit: u32) -> u64 {
    HEAD + unit as u64
}

/// Returns the byte offset of slot number `slot` in a journal for write units of `unit` bytes.
pub(super) const fn slot_at(unit: u32, slot: u32) -> u64 {
    HEAD + slot as u64 * slot_len(unit)
}

/// Returns the size in bytes of a journal for write units of `unit` bytes.
pub(super) const fn journal_len(unit: u32) -> u64 {
    slot_at(unit, SLOTS)
}

/// Contents of the journal's first bytes, which identify the volume and the write unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) unit: u32,
    /// Name of the volume that the journal belongs to ([`name`]).
    pub(super) volume: [u8; 16],
}

impl Head {
    pub(super) fn to_bytes(self) -> [u8; 40] {
        let mut bytes = [0; 40];
        let parts: [&[u8]; 5] = [
            &HEAD_MAGIC,
            &VERSION.to_le_bytes(),
            &self.unit.to_le_bytes(),
            &SLOTS.to_le_bytes(),
            &self.volume,
        ];
        seal(&mut bytes, &parts);
        bytes
    }

    /// Parses a journal's head. Returns `None` when the bytes are not a valid head.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; 40] = bytes.first_chunk()?;
        let unit = u32::from_le_bytes(*bytes.get(12..)?.first_chunk()?);
        let volume = *bytes.get(20..)?.first_chunk()?;
        let head = Self { unit, volume };
        (head.to_bytes() == *bytes).then_some(head)
    }
}

/// Derives a 16-byte name from a volume's identifier (FNV-1a).
pub(super) fn name(id: &[u8]) -> [u8; 16] {
    let mut hash = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128;
    for byte in id {
        hash = (hash ^ u128::from(*byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b);
    }
    hash.to_le_bytes()
}

/// Description of a journaled write, stored before its data in a slot of the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct JournalEntry {
    /// Byte offset of the write in the volume.
    pub(super) offset: u64,
    pub(super) len: u32,
    /// CRC-32 of the write's data, by which recovery recognises a complete entry.
    pub(super) crc: u32,
}

impl JournalEntry {
    pub(super) fn new(offset: u64, data: &[u8]) -> Self {
        Self {
            offset,
            len: data.len() as u32,
            crc: crc32fast::hash(data),
        }
    }

    pub(super) fn to_bytes(self) -> [u8; 28] {
        let mut bytes = [0; 28];
        let parts: [&[u8]; 4] = [
            &ENTRY_MAGIC,
            &self.offset.to_le_bytes(),
            &self.len.to_le_bytes(),
            &self.crc.to_le_bytes(),
        ];
        seal(&mut bytes, &parts);
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; 28] = bytes.first_chunk()?;
        let entry = Self {
            offset: u64::from_le_bytes(*bytes.get(8..)?.first_chunk()?),
            len: u32::from_le_bytes(*bytes.get(16..)?.first_chunk()?),
            crc: u32::from_le_bytes(*bytes.get(20..)?.first_chunk()?),
        };
        (entry.to_bytes() == *bytes).then_some(entry)
    }

    /// Parses the entry that a slot holds. Returns `None` when the slot is empty or was only partly
    /// written.
    pub(super) fn of_slot(slot: &[u8], unit: u32) -> Option<Self> {
        let entry = Self::parse(slot)?;
        let within = AtomicWrites::within(unit.into(), 0, 0);
        let data = slot.get(HEAD as usize..)?.get(..entry.len as usize)?;
        let whole = entry.crc == crc32fast::hash(data);
        (whole && within.covers(entry.offset, entry.len.into())).then_some(entry)
    }
}

/// Stores `parts` in `bytes` one after the other, followed by their checksum.
fn seal(bytes: &mut [u8], parts: &[&[u8]]) {
    let all = parts.concat();
    let sum = crc32fast::hash(&all).to_le_bytes();
    for (to, from) in bytes.iter_mut().zip(all.iter().chain(&sum)) {
        *to = *from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journal_records_round_trip() {
        let head = Head {
            unit: 16 << 10,
            volume: name(b"disk"),
        };
        assert_eq!(Head::parse(&head.to_bytes()), Some(head));
        assert_ne!(name(b"disk"), name(b"disk2"));
        let data: Vec<u8> = (0..8192u32).map(|n| n as u8 ^ 0x5a).collect();
        let entry = JournalEntry::new(3 * 4096 + (16 << 10), &data[..4096]);
        let mut slot = vec![0; slot_len(16 << 10) as usize];
        slot[..28].copy_from_slice(&entry.to_bytes());
        slot[4096..8192].copy_from_slice(&data[..4096]);
        assert_eq!(JournalEntry::of_slot(&slot, 16 << 10), Some(entry));
        // Each bit counts, of the head and of the data.
        for at in (0..28).chain([4096, 6000, 8191]) {
            slot[at] ^= 1;
            assert_eq!(JournalEntry::of_slot(&slot, 16 << 10), None, "{at}");
            slot[at] ^= 1;
        }
        slot[8192] ^= 1;
        assert!(
            JournalEntry::of_slot(&slot, 16 << 10).is_some(),
            "behind the data"
        );
        // An entry larger than the unit.
        assert_eq!(JournalEntry::of_slot(&slot, 2048), None);
        assert_eq!(JournalEntry::of_slot(&[], 16 << 10), None);
        assert_eq!(JournalEntry::of_slot(&vec![0; 8192], 16 << 10), None);
        assert_eq!(Head::parse(&[0; 4096]), None);
        for at in 0..40 {
            let mut bytes = head.to_bytes();
            bytes[at] ^= 0x80;
            assert_eq!(Head::parse(&bytes), None, "{at}");
        }
    }
}
