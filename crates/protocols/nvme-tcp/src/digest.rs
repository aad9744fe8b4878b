//! Header and data digests: CRC-32C ("NVMe over TCP Transport 1.1", 3.3.1.1), computed by processor
//! instructions where available.

/// Returns the CRC-32C of `bytes`, the digest of NVMe over TCP.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}

/// CRC-32C of bytes that are added piece by piece.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunningDigest(u32);

impl RunningDigest {
    /// Creates the digest of an empty sequence of bytes.
    pub const fn new() -> Self {
        Self(0)
    }

    /// Adds further bytes to the digest.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0 = crc32c::crc32c_append(self.0, bytes);
    }

    /// Returns the digest of all bytes that were added.
    pub const fn value(self) -> u32 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test vectors of RFC 3720, B.4.
    #[test]
    fn crc32c_matches_known_values() {
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        let up: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&up), 0x46dd_794e);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn crc32c_of_pieces_matches_whole() {
        let bytes: Vec<u8> = (0..1000u32).map(|i| (i * 7) as u8).collect();
        for piece in [1, 3, 16, 77, 1000] {
            let mut running = RunningDigest::new();
            bytes.chunks(piece).for_each(|piece| running.update(piece));
            assert_eq!(running.value(), crc32c(&bytes));
        }
    }
}
