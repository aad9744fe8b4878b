//! AES-XTS over whole sectors (IEEE 1619-2018) with plain64 tweaks.
//!
//! Blocks of several sectors are passed to the block cipher together, so that the processor's AES
//! instructions work on eight blocks at a time. Tweaks are encrypted in the same way.

use crate::error::LuksError;
use aes::cipher::consts::U16;
use aes::cipher::generic_array::GenericArray;
use aes::cipher::inout::InOutBuf;
use aes::cipher::{BlockDecrypt, BlockEncrypt, BlockSizeUser, KeyInit};
use aes::{Aes128, Aes256};
use std::fmt;

/// Block size of AES in bytes.
const BLOCK: usize = 16;
/// Bytes that are processed together. They stay in the first-level cache, with their tweaks.
const BATCH: usize = 4096;
/// Smallest sector in bytes.
pub(crate) const MIN_SECTOR: usize = 512;
/// Largest sector in bytes.
pub const MAX_SECTOR: usize = 4096;

/// Name of the only supported cipher, with mode and tweak, as headers write it.
pub(crate) const NAME: &str = "aes-xts-plain64";
/// Supported ciphers, for error messages.
pub(crate) const SUPPORTED: &str = "aes-xts-plain64 with keys of 256 and 512 bits is";

/// Expanded keys of AES-XTS. The memory is zeroed when dropped and excluded from core dumps.
pub struct Xts(Keys);

enum Keys {
    Aes128(Box<Pair<Aes128>>),
    Aes256(Box<Pair<Aes256>>),
}

/// Round keys for data and for tweaks, on pages of their own.
#[repr(align(4096))]
struct Pair<C> {
    data: C,
    tweak: C,
}

#[derive(Clone, Copy)]
enum Direction {
    Encrypt,
    Decrypt,
}

impl Xts {
    /// Expands a key of 32 (AES-128) or 64 bytes (AES-256): the key for data, then that for tweaks.
    ///
    /// # Errors
    /// [`LuksError::Unsupported`] for another length.
    pub fn new(key: &[u8]) -> Result<Self, LuksError> {
        let (data, tweak) = key.split_at(key.len() / 2);
        let keys = match key.len() {
            32 => Pair::new(data, tweak).map(Keys::Aes128),
            64 => Pair::new(data, tweak).map(Keys::Aes256),
            _ => None,
        };
        let bits = || format!("{} bits", key.len() * 8);
        keys.map(Self)
            .ok_or_else(|| LuksError::unsupported("key length", &bits(), SUPPORTED))
    }

    /// Encrypts whole sectors of `sector` bytes in place. `iv` is the plain64 tweak of the first
    /// one, which counts in units of 512 bytes whatever the size of a sector.
    pub fn encrypt(&self, data: &mut [u8], sector: usize, iv: u64) {
        self.run(data, sector, iv, Direction::Encrypt);
    }

    /// Decrypts whole sectors in place, see [`Xts::encrypt`].
    pub fn decrypt(&self, data: &mut [u8], sector: usize, iv: u64) {
        self.run(data, sector, iv, Direction::Decrypt);
    }

    fn run(&self, data: &mut [u8], sector: usize, iv: u64, direction: Direction) {
        debug_assert!(data.len().is_multiple_of(sector));
        match &self.0 {
            Keys::Aes128(keys) => keys.run(data, sector, iv, direction),
            Keys::Aes256(keys) => keys.run(data, sector, iv, direction),
        }
    }
}

impl fmt::Debug for Xts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Xts(..)")
    }
}

impl<C: KeyInit> Pair<C> {
    fn new(data: &[u8], tweak: &[u8]) -> Option<Box<Self>> {
        let pair = Box::new(Self {
            data: C::new_from_slice(data).ok()?,
            tweak: C::new_from_slice(tweak).ok()?,
        });
        dma::dumps::exclude(&*pair);
        Some(pair)
    }
}

impl<C> Drop for Pair<C> {
    /// Ends the exclusion of the pages. The ciphers zero their round keys themselves.
    fn drop(&mut self) {
        dma::dumps::include(self);
    }
}

impl<C> Pair<C>
where
    C: BlockSizeUser<BlockSize = U16> + BlockEncrypt + BlockDecrypt,
{
    fn run(&self, data: &mut [u8], sector: usize, mut iv: u64, direction: Direction) {
        let sector = sector.clamp(MIN_SECTOR, MAX_SECTOR);
        let ivs = (sector / MIN_SECTOR) as u64;
        let mut tweaks = [0u128; BATCH / BLOCK];
        let mut heads = [GenericArray::default(); BATCH / MIN_SECTOR];
        for batch in data.chunks_mut(BATCH) {
            let sectors = batch.len().div_ceil(sector);
            for head in heads.iter_mut().take(sectors) {
                *head = u128::from(iv).to_le_bytes().into();
                iv = iv.wrapping_add(ivs);
            }
            self.tweak
                .encrypt_blocks(heads.get_mut(..sectors).unwrap_or_default());
            for (tweaks, head) in tweaks.chunks_mut(sector / BLOCK).zip(&heads) {
                let mut tweak = u128::from_le_bytes((*head).into());
                for place in tweaks {
                    *place = tweak;
                    tweak = double(tweak);
                }
            }
            whiten(batch, &tweaks);
            let (blocks, _) = InOutBuf::from(&mut *batch).into_chunks::<U16>();
            match direction {
                Direction::Encrypt => self.data.encrypt_blocks_inout(blocks),
                Direction::Decrypt => self.data.decrypt_blocks_inout(blocks),
            }
            whiten(batch, &tweaks);
        }
    }
}

/// Multiplies a tweak by the primitive element of GF(2^128) (IEEE 1619-2018, 5.2).
#[inline]
fn double(tweak: u128) -> u128 {
    (tweak << 1) ^ ((tweak >> 127) * 0x87)
}

/// Combines each block with its tweak.
#[inline]
fn whiten(data: &mut [u8], tweaks: &[u128]) {
    let (blocks, _) = data.as_chunks_mut::<BLOCK>();
    for (block, tweak) in blocks.iter_mut().zip(tweaks) {
        *block = (u128::from_le_bytes(*block) ^ tweak).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Vec<u8> {
        let digits: Vec<char> = text.chars().filter(|c| c.is_ascii_hexdigit()).collect();
        let pairs = digits.chunks(2).map(|pair| pair.iter().collect::<String>());
        pairs
            .map(|pair| u8::from_str_radix(&pair, 16).unwrap())
            .collect()
    }

    /// IEEE 1619-2018, annex B, vectors 4 (AES-128) and 10 (AES-256): 512 bytes 00 01 .. ff, twice.
    #[test]
    fn standard_vectors_are_reproduced() {
        let e = "27182818284590452353602874713526";
        let pi = "31415926535897932384626433832795";
        let e256 = format!("{e}6249775724709369995957496696 7627");
        let pi256 = format!("{pi}0288419716939937510582097494 4592");
        for (key, iv, first, last) in [
            (
                format!("{e}{pi}"),
                0,
                "27a7479befa1d476489f308cd4cfa6e2",
                "0a282df920147beabe421ee5319d0568",
            ),
            (
                format!("{e256}{pi256}"),
                0xff,
                "1c3b3a102f770386e4836c99e370cf9b",
                "c4f36ffda9fcea70b9c6e693e148c151",
            ),
        ] {
            let plain: Vec<u8> = (0..512).map(|n| n as u8).collect();
            let mut data = plain.clone();
            let xts = Xts::new(&bytes(&key)).unwrap();
            xts.encrypt(&mut data, 512, iv);
            assert_eq!(data[..16], bytes(first), "{key}");
            assert_eq!(data[496..], bytes(last), "{key}");
            xts.decrypt(&mut data, 512, iv);
            assert_eq!(data, plain);
        }
    }

    #[test]
    fn sectors_do_not_depend_on_their_neighbours() {
        let xts = Xts::new(&std::array::from_fn::<u8, 64, _>(|n| n as u8)).unwrap();
        let plain: Vec<u8> = (0..64 << 10).map(|n| (n / 7) as u8).collect();
        for sector in [512, 1024, 2048, 4096] {
            let mut all = plain.clone();
            xts.encrypt(&mut all, sector, 5);
            let mut each = plain.clone();
            for (n, part) in each.chunks_mut(sector).enumerate() {
                xts.encrypt(part, sector, 5 + (n * sector / 512) as u64);
            }
            assert!(all == each, "{sector}");
            xts.decrypt(&mut all, sector, 5);
            assert!(all == plain, "{sector}");
        }
    }

    #[test]
    fn other_key_lengths_are_refused() {
        for len in [0, 16, 31, 33, 48, 65, 128] {
            assert!(Xts::new(&vec![0; len]).is_err(), "{len}");
        }
    }
}
