//! Key derivation: passphrases to keys (PBKDF2, Argon2), and the anti-forensic splitter.

use crate::error::LuksError;
use crate::secret::SecretBytes;
use argon2::{Algorithm, Argon2, Block, Params, Version};
use pbkdf2::pbkdf2_hmac;
use sha1::Sha1;
use sha2::digest::Digest;
use sha2::{Sha224, Sha256, Sha384, Sha512};
use zeroize::Zeroize;

/// Largest number of PBKDF2 iterations of a slot or digest: some seconds to a minute.
pub(crate) const MAX_ITERATIONS: u32 = 50_000_000;
/// Largest memory of Argon2 in KiB, which is also the largest that cryptsetup chooses by itself.
const MAX_MEMORY_KIB: u32 = 1 << 20;
/// Largest product of memory in KiB and passes of Argon2: some tens of seconds.
const MAX_ARGON2_WORK: u64 = 32 << 20;
/// Largest number of lanes of Argon2.
const MAX_LANES: u32 = 16;
/// Largest number of stripes of a slot; both formats use 4000.
pub(crate) const MAX_STRIPES: u32 = 8000;

/// Hash function of PBKDF2 and of the anti-forensic splitter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hash {
    Sha1,
    Sha224,
    Sha256,
    Sha384,
    Sha512,
}

impl Hash {
    pub(crate) fn parse(name: &str) -> Result<Self, LuksError> {
        Ok(match name {
            "sha1" => Self::Sha1,
            "sha224" => Self::Sha224,
            "sha256" => Self::Sha256,
            "sha384" => Self::Sha384,
            "sha512" => Self::Sha512,
            _ => {
                let supported = "sha1, sha224, sha256, sha384 and sha512 are";
                return Err(LuksError::unsupported("hash", name, supported));
            }
        })
    }

    /// Derives `out.len()` bytes by PBKDF2 (RFC 8018, 5.2). The iterations are bounded by
    /// [`check_iterations`].
    pub(crate) fn pbkdf2(self, secret: &[u8], salt: &[u8], iterations: u32, out: &mut [u8]) {
        match self {
            Self::Sha1 => pbkdf2_hmac::<Sha1>(secret, salt, iterations, out),
            Self::Sha224 => pbkdf2_hmac::<Sha224>(secret, salt, iterations, out),
            Self::Sha256 => pbkdf2_hmac::<Sha256>(secret, salt, iterations, out),
            Self::Sha384 => pbkdf2_hmac::<Sha384>(secret, salt, iterations, out),
            Self::Sha512 => pbkdf2_hmac::<Sha512>(secret, salt, iterations, out),
        }
    }

    /// Diffuses a stripe: replaces each part of the hash's length by the hash of its number and
    /// itself (LUKS1, 2.4).
    fn diffuse(self, stripe: &mut [u8]) {
        match self {
            Self::Sha1 => diffuse::<Sha1>(stripe),
            Self::Sha224 => diffuse::<Sha224>(stripe),
            Self::Sha256 => diffuse::<Sha256>(stripe),
            Self::Sha384 => diffuse::<Sha384>(stripe),
            Self::Sha512 => diffuse::<Sha512>(stripe),
        }
    }
}

fn diffuse<D: Digest>(stripe: &mut [u8]) {
    for (part, number) in stripe.chunks_mut(<D as Digest>::output_size()).zip(0u32..) {
        let mut hash = D::new();
        hash.update(number.to_be_bytes());
        hash.update(&*part);
        let mut hash = hash.finalize();
        for (to, from) in part.iter_mut().zip(&hash) {
            *to = *from;
        }
        hash.as_mut_slice().zeroize();
    }
}

/// Merges the stripes of a key slot into the volume key (LUKS1, 2.4). `material` has a whole
/// number of stripes of `key_len` bytes.
pub(crate) fn merge(hash: Hash, material: &[u8], key_len: usize) -> SecretBytes {
    let mut key = SecretBytes::new(key_len);
    let mut stripes = material.chunks_exact(key_len).peekable();
    while let Some(stripe) = stripes.next() {
        for (to, from) in key.iter_mut().zip(stripe) {
            *to ^= from;
        }
        if stripes.peek().is_some() {
            hash.diffuse(&mut key);
        }
    }
    key
}

/// Refuses an iteration count of 0, and one whose computation would take minutes.
pub(crate) fn check_iterations(iterations: u32) -> Result<(), LuksError> {
    match iterations {
        0 => Err(LuksError::Damaged("a number of iterations is 0")),
        1..=MAX_ITERATIONS => Ok(()),
        _ => Err(LuksError::TooExpensive {
            what: "PBKDF2 iterations",
            most: MAX_ITERATIONS.into(),
        }),
    }
}

/// Key derivation function of a slot, with bounded parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kdf {
    Pbkdf2 {
        hash: Hash,
        iterations: u32,
        salt: Vec<u8>,
    },
    Argon2 {
        /// Argon2id, not Argon2i.
        is_id: bool,
        passes: u32,
        memory_kib: u32,
        lanes: u32,
        salt: Vec<u8>,
    },
}

impl Kdf {
    /// Checks the parameters against the bounds.
    pub(crate) fn check(&self) -> Result<(), LuksError> {
        let (passes, memory_kib, lanes) = match *self {
            Self::Pbkdf2 { iterations, .. } => return check_iterations(iterations),
            Self::Argon2 {
                passes,
                memory_kib,
                lanes,
                ..
            } => (passes, memory_kib, lanes),
        };
        let expensive = |what, most| Err(LuksError::TooExpensive { what, most });
        if memory_kib > MAX_MEMORY_KIB {
            return expensive("KiB of memory for Argon2", MAX_MEMORY_KIB.into());
        }
        if lanes > MAX_LANES {
            return expensive("lanes of Argon2", MAX_LANES.into());
        }
        if u64::from(passes) * u64::from(memory_kib) > MAX_ARGON2_WORK {
            return expensive("passes of Argon2 times KiB of memory", MAX_ARGON2_WORK);
        }
        Ok(())
    }

    /// Returns the work of one derivation, relative to that of the most expensive one, in
    /// thousandths.
    pub(crate) fn work(&self) -> u64 {
        match *self {
            Self::Pbkdf2 { iterations, .. } => {
                u64::from(iterations) * 1000 / u64::from(MAX_ITERATIONS)
            }
            Self::Argon2 {
                passes, memory_kib, ..
            } => u64::from(passes) * u64::from(memory_kib) * 1000 / MAX_ARGON2_WORK,
        }
    }

    /// Derives `len` bytes from a passphrase.
    ///
    /// # Errors
    /// [`LuksError::Damaged`] for parameters that Argon2 does not allow, [`LuksError::Memory`].
    pub(crate) fn derive(&self, passphrase: &[u8], len: usize) -> Result<SecretBytes, LuksError> {
        let mut out = SecretBytes::new(len);
        match self {
            Self::Pbkdf2 {
                hash,
                iterations,
                salt,
            } => hash.pbkdf2(passphrase, salt, *iterations, &mut out),
            Self::Argon2 {
                is_id,
                passes,
                memory_kib,
                lanes,
                salt,
            } => {
                let invalid = |_| LuksError::Damaged("the parameters of Argon2 are invalid");
                let params = Params::new(*memory_kib, *passes, *lanes, Some(len));
                let params = params.map_err(invalid)?;
                let algorithm = if *is_id {
                    Algorithm::Argon2id
                } else {
                    Algorithm::Argon2i
                };
                let mut blocks = Vec::new();
                let count = params.block_count();
                let room = blocks.try_reserve_exact(count);
                room.map_err(|_| LuksError::Memory { kib: *memory_kib })?;
                blocks.resize(count, Block::default());
                let argon2 = Argon2::new(algorithm, Version::V0x13, params);
                let derived =
                    argon2.hash_password_into_with_memory(passphrase, salt, &mut out, &mut blocks);
                for block in &mut blocks {
                    block.zeroize();
                }
                derived.map_err(invalid)?;
            }
        }
        Ok(out)
    }
}
