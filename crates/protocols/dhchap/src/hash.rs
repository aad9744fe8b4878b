//! Hash functions, and HMAC with them.

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256, Sha384, Sha512};
use zeroize::Zeroizing;

/// A hash function identifier ("NVMe Base 2.1", 8.3.5.5.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hash {
    /// SHA-256.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
}

/// Evaluates an expression with the hash's implementation as the type `$of`.
macro_rules! each {
    ($hash:expr, $of:ident => $value:expr) => {
        match $hash {
            Hash::Sha256 => {
                type $of = Sha256;
                $value
            }
            Hash::Sha384 => {
                type $of = Sha384;
                $value
            }
            Hash::Sha512 => {
                type $of = Sha512;
                $value
            }
        }
    };
}

impl Hash {
    /// All hash functions in order of preference.
    pub const ALL: [Hash; 3] = [Hash::Sha512, Hash::Sha384, Hash::Sha256];

    /// Returns the hash function with this identifier.
    pub const fn of(id: u8) -> Option<Self> {
        Some(match id {
            1 => Self::Sha256,
            2 => Self::Sha384,
            3 => Self::Sha512,
            _ => return None,
        })
    }

    /// Returns the identifier.
    pub const fn id(self) -> u8 {
        match self {
            Self::Sha256 => 1,
            Self::Sha384 => 2,
            Self::Sha512 => 3,
        }
    }

    /// Returns the size of a hash in bytes.
    pub(crate) const fn len(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    /// Returns the hash of some bytes.
    pub(crate) fn digest(self, bytes: &[u8]) -> Zeroizing<Vec<u8>> {
        Zeroizing::new(each!(self, H => H::digest(bytes).to_vec()))
    }

    /// Returns the HMAC of the concatenation of `parts`.
    pub(crate) fn hmac(self, key: &[u8], parts: &[&[u8]]) -> Zeroizing<Vec<u8>> {
        Zeroizing::new(each!(self, H => match Hmac::<H>::new_from_slice(key) {
            Ok(mac) => sum(mac, parts).finalize().into_bytes().to_vec(),
            // HMAC accepts a key of any length.
            Err(_) => Vec::new(),
        }))
    }

    /// Returns whether `found` is the HMAC of `parts`, in constant time.
    pub(crate) fn is_hmac(self, key: &[u8], parts: &[&[u8]], found: &[u8]) -> bool {
        each!(self, H => match Hmac::<H>::new_from_slice(key) {
            Ok(mac) => sum(mac, parts).verify_slice(found).is_ok(),
            Err(_) => false,
        })
    }
}

fn sum<M: Mac>(mac: M, parts: &[&[u8]]) -> M {
    parts.iter().fold(mac, |mac, part| mac.chain_update(part))
}
