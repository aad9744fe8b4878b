//! The random numbers of one transaction.

use zeroize::Zeroize;

/// Bytes of the longest challenge.
pub(crate) const CHALLENGE: usize = 64;
/// Bytes of an exponent: as many as the largest group needs at least (RFC 7919, 5.2), and more.
pub(crate) const EXPONENT: usize = 56;

/// The random numbers of one side of one transaction.
pub struct Random {
    /// Challenge; shorter hashes use its first bytes.
    pub challenge: [u8; CHALLENGE],
    /// Exponent, big-endian.
    pub exponent: [u8; EXPONENT],
    /// Sequence number; not 0, which stands for no challenge.
    pub sequence: u32,
    /// A host's number of the transaction.
    pub transaction: u16,
}

impl std::fmt::Debug for Random {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Random").finish_non_exhaustive()
    }
}

impl Random {
    /// Reads the numbers from the kernel.
    ///
    /// # Errors
    /// The kernel's, if it has no random numbers.
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
