//! Names of queues, and the matrix of adapters and domains that defines a guest's queues.

use core::fmt;

/// An AP queue number: adapter (card) and domain (queue index on the card), eight bits each.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Apqn(u16);

impl Apqn {
    /// Creates the number of the queue of `domain` on `adapter`.
    pub const fn new(adapter: u8, domain: u8) -> Apqn {
        Apqn((adapter as u16) << 8 | domain as u16)
    }

    /// Decodes the low half-word of general register 0.
    pub const fn from_register(gr0: u64) -> Apqn {
        Apqn((gr0 & 0xffff) as u16)
    }

    /// Returns the queue number as registers hold it: adapter in the high byte, domain in the low
    /// one.
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Returns the number of the queue's adapter (APID).
    pub const fn adapter(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Returns the number of the queue's domain (APQI).
    pub const fn domain(self) -> u8 {
        (self.0 & 0xff) as u8
    }
}

/// Formats a queue as Linux names it: `01.0006`.
impl fmt::Display for Apqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}.{:04x}", self.adapter(), self.domain())
    }
}

impl fmt::Debug for Apqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A mask of 256 bits; bit 0 is the leftmost one, as in z/Architecture.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Mask([u64; 4]);

impl Mask {
    /// Mask with all bits zero.
    pub const EMPTY: Mask = Mask([0; 4]);

    /// Returns whether the bit with this number is one.
    pub fn contains(&self, bit: u8) -> bool {
        self.word(bit) & place(bit) != 0
    }

    /// Sets the bit with this number to one.
    pub fn insert(&mut self, bit: u8) {
        if let Some(word) = self.0.get_mut(usize::from(bit / 64)) {
            *word |= place(bit);
        }
    }

    /// Sets the bit with this number to zero.
    pub fn remove(&mut self, bit: u8) {
        if let Some(word) = self.0.get_mut(usize::from(bit / 64)) {
            *word &= !place(bit);
        }
    }

    /// Returns the numbers of the bits that are one, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u8> + use<> {
        let mask = *self;
        (0..=u8::MAX).filter(move |bit| mask.contains(*bit))
    }

    /// Encodes the mask as the 32 bytes that PQAP(QCI) stores.
    pub fn to_bytes(self) -> [u8; 32] {
        let mut bytes = [0; 32];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(self.0) {
            chunk.copy_from_slice(&word.to_be_bytes());
        }
        bytes
    }

    fn word(&self, bit: u8) -> u64 {
        self.0.get(usize::from(bit / 64)).copied().unwrap_or(0)
    }
}

const fn place(bit: u8) -> u64 {
    1 << (63 - bit % 64)
}

impl fmt::Debug for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl FromIterator<u8> for Mask {
    fn from_iter<I: IntoIterator<Item = u8>>(bits: I) -> Mask {
        let mut mask = Mask::EMPTY;
        for bit in bits {
            mask.insert(bit);
        }
        mask
    }
}

/// AP resources of a guest: its queues are all pairs of an adapter and a domain. It may
/// administrate the control domains, whether or not it may also use them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Matrix {
    /// Adapter mask (APM): the adapters that the guest may use.
    pub adapters: Mask,
    /// Usage domain mask (AQM): the domains that the guest may use on its adapters.
    pub domains: Mask,
    /// Control domain mask (ADM): the domains that the guest may administer.
    pub control_domains: Mask,
}

impl Matrix {
    /// Returns whether a queue belongs to the matrix.
    pub fn contains(&self, apqn: Apqn) -> bool {
        self.adapters.contains(apqn.adapter()) && self.domains.contains(apqn.domain())
    }

    /// Returns all queues of the matrix.
    pub fn queues(&self) -> impl Iterator<Item = Apqn> + use<> {
        let domains = self.domains;
        let of = move |adapter| domains.iter().map(move |domain| Apqn::new(adapter, domain));
        self.adapters.iter().flat_map(of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn mask_bits_count_from_left() {
        let mask = Mask::from_iter([0, 6, 64, 255]);
        let bytes = mask.to_bytes();
        assert_eq!((bytes[0], bytes[8], bytes[31]), (0x82, 0x80, 0x01));
        assert_eq!(mask.iter().collect::<Vec<_>>(), [0, 6, 64, 255]);
        let mut less = mask;
        less.remove(64);
        assert!(!less.contains(64) && less.contains(255));
    }

    #[test]
    fn matrix_queues_are_product_of_masks() {
        let matrix = Matrix {
            adapters: Mask::from_iter([1, 255]),
            domains: Mask::from_iter([6, 0x47]),
            control_domains: Mask::EMPTY,
        };
        let names: Vec<_> = matrix.queues().map(Apqn::get).collect();
        assert_eq!(names, [0x0106, 0x0147, 0xff06, 0xff47]);
        assert!(matrix.contains(Apqn::new(255, 6)) && !matrix.contains(Apqn::new(2, 6)));
        assert_eq!(alloc::format!("{}", Apqn::new(1, 0x47)), "01.0047");
    }
}
