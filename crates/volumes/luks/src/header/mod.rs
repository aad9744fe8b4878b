//! Headers of both versions, as one description of a container.

mod luks1;
mod luks2;

use crate::cipher::{MAX_SECTOR, MIN_SECTOR, NAME, SUPPORTED};
use crate::error::LuksError;
use crate::kdf::{Hash, Kdf, MAX_ITERATIONS, MAX_STRIPES, check_iterations};
use crate::source::HeaderSource;

/// Magic bytes of a LUKS1 header, and of the first LUKS2 header.
const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
/// Magic bytes of the second LUKS2 header.
const SECOND_MAGIC: [u8; 6] = *b"SKUL\xba\xbe";
/// Size in bytes of the part of a header that both versions have in binary form.
const BINARY: usize = 4096;
/// Largest number of key slots: LUKS2 has 32, LUKS1 has 8.
pub const MAX_SLOTS: usize = 32;
/// Range of the lengths of a digest of the volume key, in bytes.
const DIGEST_LENGTHS: std::ops::RangeInclusive<usize> = 20..=64;
/// Largest work of all key slots together, in thousandths of that of the most expensive one. A
/// wrong key is tried on all of them.
const MAX_WORK: u64 = 8000;
/// Largest salt in bytes.
const MAX_SALT: usize = 1024;

/// Parsed header of a container: where the payload is, and how its key is obtained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub(crate) version: u16,
    pub(crate) payload: Payload,
    /// Length in bytes of the volume key: 32 or 64.
    pub(crate) key_len: usize,
    /// Usable key slots, in the order in which they are tried.
    pub(crate) slots: Vec<Slot>,
    pub(crate) digest: KeyDigest,
}

/// Place and form of a container's encrypted data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload {
    /// Offset in bytes of the payload in its volume.
    pub offset: u64,
    /// Length in bytes; `None` for a payload up to the end of the volume.
    pub len: Option<u64>,
    /// Size of an encryption sector in bytes: a power of two from 512 to 4096.
    pub sector: u32,
    /// Number that is added to the tweak of each sector.
    pub iv_offset: u64,
}

/// Key slot: the volume key, split into stripes and encrypted under a derived key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) kdf: Kdf,
    /// Length in bytes of the key that encrypts the stripes: 32 or 64.
    pub(crate) area_key_len: usize,
    /// Offset in bytes of the stripes in the header's storage.
    pub(crate) offset: u64,
    pub(crate) stripes: u32,
    pub(crate) hash: Hash,
}

/// Digest of the volume key, by which the right key is recognised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyDigest {
    pub(crate) hash: Hash,
    pub(crate) iterations: u32,
    pub(crate) salt: Vec<u8>,
    pub(crate) digest: Vec<u8>,
}

impl Header {
    /// Reads and parses a header of either version. `is_detached`: the header's storage holds no
    /// payload.
    ///
    /// A LUKS2 header is stored twice. The newer valid copy is used.
    ///
    /// # Errors
    /// [`LuksError`] when there is no header, it is damaged, or it uses or demands something that
    /// is not supported.
    pub fn read(
        source: &(impl HeaderSource + ?Sized),
        is_detached: bool,
    ) -> Result<Self, LuksError> {
        let mut start = [0; BINARY];
        // A LUKS1 header is shorter, and a file with nothing but a header ends behind its slots.
        let whole = source.read(0, &mut start);
        let (magic, version) = (field(&start, 0), u16::from_be_bytes(field(&start, 6)));
        match (whole, magic, version) {
            (Ok(()), MAGIC, 1) => luks1::parse(&start, is_detached),
            (Ok(()), MAGIC, version) if version != 2 => Err(LuksError::Version(version)),
            (Err(error @ (LuksError::ReadVolume(_) | LuksError::OpenVolume(_))), ..) => Err(error),
            _ => luks2::read(source),
        }
    }

    /// Returns the version of the format: 1 or 2.
    pub fn version(&self) -> u16 {
        self.version
    }

    /// Returns the place and form of the encrypted data.
    pub fn payload(&self) -> Payload {
        self.payload
    }

    /// Returns the work of trying a key on all slots, relative to that of the most expensive slot,
    /// in thousandths. A thousandth takes some milliseconds.
    pub fn work(&self) -> u64 {
        let digest = u64::from(self.digest.iterations) * 1000 / u64::from(MAX_ITERATIONS);
        self.slots.iter().map(|slot| slot.kdf.work() + digest).sum()
    }

    /// Returns the length of the volume key in bits: 256 or 512.
    pub fn key_bits(&self) -> usize {
        self.key_len * 8
    }
}

/// Checks the cipher and key length of a payload or of a key slot's stripes.
fn check_cipher(name: &str, key_len: usize) -> Result<(), LuksError> {
    if name != NAME {
        return Err(LuksError::unsupported("cipher", name, SUPPORTED));
    }
    if ![32, 64].contains(&key_len) {
        let bits = format!("{} bits", key_len.saturating_mul(8));
        return Err(LuksError::unsupported("key length", &bits, SUPPORTED));
    }
    Ok(())
}

/// Checks what both versions bound in the same way.
fn checked(header: Header) -> Result<Header, LuksError> {
    let Header {
        payload,
        slots,
        digest,
        ..
    } = &header;
    let sector = payload.sector as usize;
    if !sector.is_power_of_two() || !(MIN_SECTOR..=MAX_SECTOR).contains(&sector) {
        return Err(LuksError::Damaged(
            "the sector size is no power of two from 512 to 4096",
        ));
    }
    if !payload.offset.is_multiple_of(MIN_SECTOR as u64) {
        return Err(LuksError::Damaged("the payload does not begin on a sector"));
    }
    check_iterations(digest.iterations)?;
    if !DIGEST_LENGTHS.contains(&digest.digest.len()) || digest.salt.len() > MAX_SALT {
        return Err(LuksError::Damaged("the key digest has a wrong length"));
    }
    if slots.len() > MAX_SLOTS {
        return Err(LuksError::Damaged("there are too many key slots"));
    }
    if header.work() > MAX_WORK {
        return Err(LuksError::TooExpensive {
            what: "work of all key slots, in thousandths of the most expensive one",
            most: MAX_WORK,
        });
    }
    if slots.is_empty() {
        return Err(LuksError::NoSlot);
    }
    Ok(header)
}

impl Slot {
    /// Checks a slot before any of its parameters is used.
    fn check(&self) -> Result<(), LuksError> {
        self.kdf.check()?;
        let (Kdf::Pbkdf2 { salt, .. } | Kdf::Argon2 { salt, .. }) = &self.kdf;
        if salt.len() > MAX_SALT {
            return Err(LuksError::Damaged("the salt of a key slot is too long"));
        }
        if self.stripes == 0 || self.stripes > MAX_STRIPES {
            return Err(LuksError::Damaged(
                "a key slot has an impossible number of stripes",
            ));
        }
        Ok(())
    }
}

/// Returns `N` bytes of the binary header from `offset` on. All callers' fields lie within it.
fn field<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    let found = bytes.get(offset..).and_then(|rest| rest.first_chunk());
    found.copied().unwrap_or([0; N])
}

/// Returns the text of a field that NUL bytes fill.
fn text(field: &[u8]) -> Result<&str, LuksError> {
    let text = field.split(|byte| *byte == 0).next().unwrap_or_default();
    std::str::from_utf8(text).map_err(|_| LuksError::Damaged("a name is no text"))
}
