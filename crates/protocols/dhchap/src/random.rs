//! Random numbers for one authentication transaction.

use zeroize::Zeroize;

/// Size of the longest challenge in bytes.
pub(crate) const CHALLENGE: usize = 64;
/// Size of an exponent in bytes, above the minimum for the largest group (RFC 7919, 5.2).
pub(crate) const EXPONENT: usize = 56;

/// Random numbers for one side of an authentication transaction.
pub struct Random {
    /// Challenge; shorter hashes use only its first bytes.
    pub challenge: [u8; CHALLENGE],
    /// Exponent, big-endian.
    pub exponent: [u8; EXPONENT],
    /// Sequence number; never 0, which means no challenge.
    pub sequence: u32,
    /// Transaction identifier, which the host chooses.
    pub transaction: u16,
}

impl std::fmt::Debug for Random {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Random").finish_non_exhaustive()
    }
}

impl Random {
    /// Reads random numbers from the kernel.
    ///
    /// # Errors
    /// The I/O error when the kernel provides no random numbers.
    pub fn new() -> std::io::Result<Self> {
        let mut random = Self {
            challenge: [0; CHALLENGE],
            exponent: [0; EXPONENT],
            sequence: 0,
            transaction: 0,
        };
        let (mut sequence, mut transaction) = ([0; 4], [0; 2]);
        for bytes in [
            &mut random.challenge[..],
            &mut random.exponent,
            &mut sequence,
            &mut transaction,
        ] {
            getrandom::fill(bytes).map_err(std::io::Error::other)?;
        }
        random.sequence = u32::from_le_bytes(sequence).max(1);
        random.transaction = u16::from_le_bytes(transaction);
        Ok(random)
    }
}

impl Drop for Random {
    fn drop(&mut self) {
        self.exponent.zeroize();
    }
}
