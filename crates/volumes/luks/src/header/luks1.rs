//! Version 1: a binary header of 592 bytes, all numbers in big-endian order ("LUKS1 On-Disk Format
//! Specification", 2.2).

use super::{Header, KeyDigest, Payload, Slot, check_cipher, checked, field, text};
use crate::error::LuksError;
use crate::kdf::{Hash, Kdf};

/// Unit of all offsets in bytes.
const SECTOR: u64 = 512;
/// State of a key slot in use.
const ENABLED: u32 = 0x00AC_71F3;
/// Offset in bytes of the key slots, their size, and their number.
const SLOTS: (usize, usize, usize) = (208, 48, 8);

/// Parses a header of version 1.
pub(super) fn parse(bytes: &[u8], is_detached: bool) -> Result<Header, LuksError> {
    let number = |offset| u32::from_be_bytes(field(bytes, offset));
    let (name, mode): ([u8; 32], [u8; 32]) = (field(bytes, 8), field(bytes, 40));
    let hash: [u8; 32] = field(bytes, 72);
    let hash = Hash::parse(text(&hash)?)?;
    let key_len = number(108) as usize;
    check_cipher(&format!("{}-{}", text(&name)?, text(&mode)?), key_len)?;
    let offset = u64::from(number(104)) * SECTOR;
    if offset == 0 && !is_detached {
        return Err(LuksError::Damaged("the payload overlaps the header"));
    }
    let (first, size, count) = SLOTS;
    let mut slots = Vec::new();
    for at in (0..count).map(|index| first + index * size) {
        if number(at) != ENABLED {
            continue;
        }
        let slot = Slot {
            kdf: Kdf::Pbkdf2 {
                hash,
                iterations: number(at + 4),
                salt: field::<32>(bytes, at + 8).to_vec(),
            },
            area_key_len: key_len,
            offset: u64::from(number(at + 40)) * SECTOR,
            stripes: number(at + 44),
            hash,
        };
        slot.check()?;
        slots.push(slot);
    }
    checked(Header {
        version: 1,
        payload: Payload {
            offset,
            len: None,
            sector: SECTOR as u32,
            iv_offset: 0,
        },
        key_len,
        slots,
        digest: KeyDigest {
            hash,
            iterations: number(164),
            salt: field::<32>(bytes, 132).to_vec(),
            digest: field::<20>(bytes, 112).to_vec(),
        },
    })
}
