//! Host Identifiers.

use std::fmt;

/// A Host Identifier of 64 or 128 bits ("NVMe Base 2.1", 5.1.25.1.28). Identifiers of different
/// lengths never identify the same host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId {
    extended: bool,
    /// Identifier in memory order. A short one occupies the first eight bytes, followed by zeroes.
    bytes: [u8; 16],
}

impl HostId {
    /// Creates a Host Identifier of 64 bits from a number.
    pub const fn short(id: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = id.to_le_bytes();
        HostId {
            extended: false,
            bytes: [a, b, c, d, e, f, g, h, 0, 0, 0, 0, 0, 0, 0, 0],
        }
    }

    /// Creates a Host Identifier of 128 bits; `bytes` are in memory order.
    pub const fn extended(bytes: [u8; 16]) -> Self {
        HostId {
            extended: true,
            bytes,
        }
    }

    /// Returns whether the Host Identifier has 128 bits.
    pub const fn is_extended(&self) -> bool {
        self.extended
    }

    /// Returns whether the Host Identifier is zero, because the host has set none.
    pub const fn is_zero(&self) -> bool {
        u128::from_le_bytes(self.bytes) == 0
    }

    /// Returns the bytes of the Host Identifier in memory order; eight zeroes follow a 64-bit
    /// identifier.
    pub const fn bytes(&self) -> &[u8; 16] {
        &self.bytes
    }

    /// Returns the low 64 bits of the Host Identifier, which are all of a short one.
    pub const fn low(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.bytes;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.extended {
            return write!(f, "{:#018x}", self.low());
        }
        for (i, byte) in self.bytes.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostId({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_and_extended_host_ids_differ() {
        let short = HostId::short(0x0102_0304_0506_0708);
        let long = HostId::extended(*short.bytes());
        assert_ne!(short, long);
        assert_eq!(short.low(), long.low());
        assert_eq!(short.to_string(), "0x0102030405060708");
        assert_eq!(long.to_string(), "08070605-0403-0201-0000-000000000000");
        assert!(HostId::short(0).is_zero() && !short.is_zero());
    }
}
