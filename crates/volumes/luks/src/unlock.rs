//! From a passphrase to the volume key.

use crate::cipher::Xts;
use crate::error::LuksError;
use crate::header::{Header, KeyDigest, Slot};
use crate::kdf::merge;
use crate::secret::SecretBytes;
use crate::source::HeaderSource;

/// Sector size in bytes of the encryption of key slots.
const SLOT_SECTOR: usize = 512;
/// Returns the volume key that a passphrase opens: of the first slot whose key has the header's
/// digest.
///
/// May take seconds for each slot, and up to a gibibyte of memory, as the header demands within
/// bounds.
///
/// # Errors
/// [`LuksError::WrongKey`] when no slot opens; errors of reading `source`, or of a derivation.
pub fn unlock(
    header: &Header,
    source: &(impl HeaderSource + ?Sized),
    passphrase: &[u8],
) -> Result<SecretBytes, LuksError> {
    for slot in &header.slots {
        let key = open(slot, header.key_len, source, passphrase)?;
        if header.digest.matches(&key) {
            return Ok(key);
        }
    }
    Err(LuksError::WrongKey)
}

/// Returns whether a key is the volume key of the container with this header.
pub fn verify(header: &Header, key: &[u8]) -> bool {
    key.len() == header.key_len && header.digest.matches(key)
}

/// Returns the content of a slot: the volume key if the passphrase is right, else noise.
fn open(
    slot: &Slot,
    key_len: usize,
    source: &(impl HeaderSource + ?Sized),
    passphrase: &[u8],
) -> Result<SecretBytes, LuksError> {
    let len = key_len * slot.stripes as usize;
    let mut material = SecretBytes::new(len.next_multiple_of(SLOT_SECTOR));
    source.read(slot.offset, &mut material)?;
    let derived = slot.kdf.derive(passphrase, slot.area_key_len)?;
    Xts::new(&derived)?.decrypt(&mut material, SLOT_SECTOR, 0);
    material.truncate(len);
    Ok(merge(slot.hash, &material, key_len))
}

impl KeyDigest {
    fn matches(&self, key: &[u8]) -> bool {
        let mut digest = SecretBytes::new(self.digest.len());
        self.hash
            .pbkdf2(key, &self.salt, self.iterations, &mut digest);
        *digest == *self.digest
    }
}
