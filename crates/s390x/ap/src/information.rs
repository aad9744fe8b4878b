//! Results of TAPQ and QCI: properties of a queue and of the machine.

use crate::matrix::Matrix;

/// Hardware information of TAPQ, in general register 2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hardware {
    /// Bits 0-31: facility bits, see the constants.
    pub facilities: u32,
    /// Bits 32-39: adapter type; 14 is CEX8.
    pub kind: u8,
    /// Bits 40-47: the highest domain number.
    pub domains_0based: u8,
    /// Bits 60-63: queue depth minus one.
    pub depth_0based: u8,
}

impl Hardware {
    /// Facility bit: the card computes modular exponentiation of up to 4096 bits.
    pub const MEX_4K: u32 = 1 << 30;
    /// Facility bit: the card computes with the Chinese remainder theorem (CRT) of up to 4096 bits.
    pub const CRT_4K: u32 = 1 << 29;
    /// Facility bit: the card is in accelerator mode.
    pub const ACCELERATOR: u32 = 1 << 27;
    /// Facility bit: extended addressing (APXA) is installed.
    pub const APXA: u32 = 1 << 25;
    /// Adapter type of the Crypto Express8S card (CEX8).
    pub const CEX8: u8 = 14;

    /// Returns general register 2. The facility bits are included only if the program has set the T
    /// bit.
    pub const fn register(self, facilities: bool) -> u64 {
        let high = if facilities { self.facilities } else { 0 };
        (high as u64) << 32
            | (self.kind as u64) << 24
            | (self.domains_0based as u64) << 16
            | (self.depth_0based & 15) as u64
    }
}

/// Data of PQAP(QCI): 128 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Configuration {
    /// Highest adapter number that the machine supports.
    pub adapters_0based: u8,
    /// Highest domain number that the machine supports.
    pub domains_0based: u8,
    /// The guest's matrix.
    pub matrix: Matrix,
}

impl Configuration {
    /// Size of the configuration block of PQAP(QCI) in bytes.
    pub const SIZE: usize = 128;
    /// Byte 0: extended addressing is installed.
    const APXA: u8 = 0x40;

    /// Encodes the block: flags, maxima at offsets 4 and 5, masks at 16, 48 and 80.
    pub fn to_bytes(self) -> [u8; Configuration::SIZE] {
        let mut block = [0; Configuration::SIZE];
        block[0] = Self::APXA;
        block[4] = self.adapters_0based;
        block[5] = self.domains_0based;
        block[16..48].copy_from_slice(&self.matrix.adapters.to_bytes());
        block[48..80].copy_from_slice(&self.matrix.domains.to_bytes());
        block[80..112].copy_from_slice(&self.matrix.control_domains.to_bytes());
        block
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::Mask;

    #[test]
    fn hardware_encodes_as_register() {
        let cex8a = Hardware {
            facilities: Hardware::MEX_4K
                | Hardware::CRT_4K
                | Hardware::ACCELERATOR
                | Hardware::APXA,
            kind: Hardware::CEX8,
            domains_0based: 15,
            depth_0based: 7,
        };
        assert_eq!(cex8a.register(true), 0x6a00_0000_0e0f_0007);
        assert_eq!(cex8a.register(false), 0x0e0f_0007);
    }

    #[test]
    fn configuration_encodes_as_block() {
        let block = Configuration {
            adapters_0based: 3,
            domains_0based: 15,
            matrix: Matrix {
                adapters: Mask::from_iter([0, 1]),
                domains: Mask::from_iter([6]),
                control_domains: Mask::from_iter([255]),
            },
        }
        .to_bytes();
        assert_eq!((block[0], block[4], block[5]), (0x40, 3, 15));
        assert_eq!((block[16], block[48], block[111]), (0xc0, 0x02, 0x01));
        assert_eq!(block.iter().filter(|b| **b != 0).count(), 6);
    }
}
