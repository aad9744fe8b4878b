//! Tuples of protection information: "NVM Command Set 1.1", 5.3.1.
//!
//! ```text
//! guard of 16 bits   guard 2   application tag 2   storage and reference tag 4
//! guard of 32 bits   guard 4   application tag 2   storage and reference tag 10
//! guard of 64 bits   guard 8   application tag 2   storage and reference tag 6
//! ```
//!
//! All fields are big-endian. The storage tag is the upper bits of the last field, with the size in
//! the namespace's [`StorageTag`], and the reference tag is the lower ones ("NVM Command Set 1.1",
//! 5.3.1.4).

use crc::{Crc, Table};

static T10_DIF: Crc<u16, Table<16>> = Crc::<u16, Table<16>>::new(&crc::CRC_16_T10_DIF);
static NVME: Crc<u64, Table<16>> = Crc::<u64, Table<16>>::new(&crc::CRC_64_NVME);

/// Type of protection information, which determines the meaning of the reference tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// Type 1: the reference tag is the low part of the block number.
    One = 1,
    /// Type 2: the reference tag begins with the value in the command.
    Two = 2,
    /// Type 3: the reference tag belongs to the application, and is not checked.
    Three = 3,
}

impl Type {
    /// Returns the protection information type with this number, 1 to 3.
    pub fn of(number: u8) -> Option<Self> {
        [Self::One, Self::Two, Self::Three]
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }
}

/// Size and algorithm of the guard in protection information.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// 16-bit guard, CRC-16/T10-DIF.
    Bits16,
    /// 32-bit guard, CRC-32C.
    Bits32,
    /// 64-bit guard, CRC-64/NVME.
    Bits64,
}

impl Guard {
    /// Returns the guard with this number of bits: 16, 32 or 64.
    pub fn of(bits: u8) -> Option<Self> {
        [Self::Bits16, Self::Bits32, Self::Bits64]
            .into_iter()
            .find(|guard| guard.bits() == bits)
    }

    /// Returns the size of the guard in bits.
    pub const fn bits(self) -> u8 {
        match self {
            Self::Bits16 => 16,
            Self::Bits32 => 32,
            Self::Bits64 => 64,
        }
    }

    /// Returns the size of the protection information in bytes.
    pub const fn tuple(self) -> usize {
        match self {
            Self::Bits16 => 8,
            Self::Bits32 | Self::Bits64 => 16,
        }
    }

    /// Returns the minimum and maximum size of the storage tag in bits (STS): "NVM Command Set
    /// 1.1", 4.1.5.3.
    pub const fn storage_bits(self) -> (u8, u8) {
        match self {
            Self::Bits16 => (0, 32),
            Self::Bits32 => (16, 64),
            Self::Bits64 => (0, 48),
        }
    }

    /// Returns the total size in bits of storage tag and reference tag.
    const fn tag_bits(self) -> u32 {
        match self {
            Self::Bits16 => 32,
            Self::Bits32 => 80,
            Self::Bits64 => 48,
        }
    }

    /// Returns the combined storage and reference tag of a command, from its dwords 2, 3 and 14
    /// ("NVM Command Set 1.1", 3.3.2: LBTU, LBTL).
    pub const fn command_tags(self, cdw2: u32, cdw3: u32, cdw14: u32) -> u128 {
        let all = (cdw2 as u128) << 64 | (cdw3 as u128) << 32 | cdw14 as u128;
        all & ((1 << self.tag_bits()) - 1)
    }

    /// Computes the guard of `parts` and stores it at the beginning of `field`. Returns its size in
    /// bytes.
    fn of_bytes(self, parts: [&[u8]; 2], field: &mut [u8; 8]) -> usize {
        let [data, metadata] = parts;
        let mut put = |bytes: &[u8]| {
            field
                .iter_mut()
                .zip(bytes)
                .for_each(|(to, from)| *to = *from);
            bytes.len()
        };
        match self {
            Self::Bits16 => {
                let mut digest = T10_DIF.digest();
                digest.update(data);
                digest.update(metadata);
                put(&digest.finalize().to_be_bytes())
            }
            Self::Bits32 => {
                let crc = crc32c::crc32c_append(crc32c::crc32c(data), metadata);
                put(&crc.to_be_bytes())
            }
            Self::Bits64 => {
                let mut digest = NVME.digest();
                digest.update(data);
                digest.update(metadata);
                put(&digest.finalize().to_be_bytes())
            }
        }
    }
}

/// Storage tag in the protection information of a namespace. Hosts choose its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageTag {
    /// Size in bits (STS), within [`Guard::storage_bits`]; 0 for no storage tag.
    pub bits: u8,
    /// Mask of the storage tag's bits that are compared (LBSTM).
    pub mask: u64,
}

impl StorageTag {
    /// Creates a storage tag of `bits` bits (at most 64), all of which are compared.
    pub const fn of(bits: u8) -> Self {
        let mask = match u64::MAX.checked_shr(64_u32.saturating_sub(bits as u32)) {
            Some(mask) => mask,
            None => 0,
        };
        Self { bits, mask }
    }

    /// Returns the storage tag with the minimum size that the guard allows.
    pub const fn least(guard: Guard) -> Self {
        Self::of(guard.storage_bits().0)
    }
}

/// Expected tags in the protection information of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tags {
    /// Expected application tag (LBAT).
    pub application: u16,
    /// Mask of the application tag's bits that are compared (LBATM).
    pub mask: u16,
    /// Storage tag and reference tag, combined as in protection information; see
    /// [`Protection::tags_of`].
    pub block: u128,
}

/// Checks of protection information that a command enables (PRCHK).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checks {
    /// Whether the guard is compared with the data.
    pub guard: bool,
    /// Whether the application tag is checked.
    pub application: bool,
    /// Whether the storage tag is checked (STC), if there is one.
    pub storage: bool,
    /// Whether the reference tag is checked, if there is one. For Type 3 it never is.
    pub reference: bool,
}

impl Checks {
    /// All checks of protection information.
    pub const ALL: Self = Self {
        guard: true,
        application: true,
        storage: true,
        reference: true,
    };
}

/// Field of protection information that has failed its check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// The guard does not match the data.
    #[error("the guard is not that of the data")]
    Guard,
    /// The application tag does not match.
    #[error("the application tag is another")]
    Application,
    /// The storage tag does not match.
    #[error("the storage tag is another")]
    Storage,
    /// The reference tag does not match.
    #[error("the reference tag is another")]
    Reference,
}

/// Format of the protection information of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protection {
    /// Type of protection information.
    pub kind: Type,
    /// Size and algorithm of the guard.
    pub guard: Guard,
    /// Size and mask of the storage tag.
    pub storage: StorageTag,
    /// Whether the tuple is at the beginning of the metadata, instead of at the end.
    pub first: bool,
}

impl Protection {
    /// Returns whether the protection information format is an extended one, that is any but a
    /// guard of 16 bits without a storage tag. Only hosts that have enabled it use it (LBA Format
    /// Extension Enable, "NVM Command Set 1.1", 4.1.3.6.1).
    pub fn is_extended_format(&self) -> bool {
        self.guard != Guard::Bits16 || self.storage.bits > 0
    }

    /// Returns the size of the reference tag in bits; 0 when the storage tag takes all bits.
    fn reference_bits(&self) -> u32 {
        let bits = u32::from(self.storage.bits);
        self.guard.tag_bits().saturating_sub(bits)
    }

    /// Returns the mask of the bits that the reference tag has.
    pub fn reference_mask(&self) -> u64 {
        let unused = 64_u32.saturating_sub(self.reference_bits());
        u64::MAX.checked_shr(unused).unwrap_or_default()
    }

    /// Returns the tags of the block at `index` of a command with the tags `initial`
    /// ([`Guard::command_tags`]). The reference tag grows by one with each block, except for Type
    /// 3, where it is the same for all blocks.
    pub fn tags_of(&self, initial: u128, index: u64) -> u128 {
        let mask = u128::from(self.reference_mask());
        match self.kind {
            Type::Three => initial,
            _ => initial & !mask | initial.wrapping_add(index.into()) & mask,
        }
    }

    /// Returns whether a command for block `slba` may have these initial tags. For Type 1, the
    /// reference tag must equal the low bits of the block number.
    pub fn is_initial(&self, initial: u128, slba: u64) -> bool {
        let mask = self.reference_mask();
        self.kind != Type::One || initial as u64 & mask == slba & mask
    }

    /// Returns the byte offset of the protection information in metadata of `metadata` bytes.
    fn start(&self, metadata: usize) -> Option<usize> {
        let last = metadata.checked_sub(self.guard.tuple())?;
        Some(if self.first { 0 } else { last })
    }

    /// Returns the tuple in the metadata of a block; `None` when the metadata is too short.
    pub fn tuple_in_mut<'a>(&self, metadata: &'a mut [u8]) -> Option<&'a mut [u8]> {
        let start = self.start(metadata.len())?;
        metadata.get_mut(start..start + self.guard.tuple())
    }

    /// Computes the guard of the data and of the metadata before the tuple. Returns the guard and
    /// its size.
    fn guard_of(&self, data: &[u8], metadata: &[u8]) -> Option<([u8; 8], usize)> {
        let before = metadata.get(..self.start(metadata.len())?)?;
        let mut field = [0; 8];
        let len = self.guard.of_bytes([data, before], &mut field);
        Some((field, len))
    }

    /// Generates the tuple of a block. Metadata that is too short for a tuple is not changed.
    pub fn generate(&self, data: &[u8], metadata: &mut [u8], tags: Tags) {
        let Some((guard, len)) = self.guard_of(data, metadata) else {
            return;
        };
        let block = tags.block.to_be_bytes();
        let skipped = block.len() - self.guard.tag_bits() as usize / 8;
        let application = tags.application.to_be_bytes();
        let fields = guard.iter().take(len).chain(&application);
        let fields = fields.chain(block.iter().skip(skipped));
        if let Some(tuple) = self.tuple_in_mut(metadata) {
            tuple
                .iter_mut()
                .zip(fields)
                .for_each(|(to, from)| *to = *from);
        }
    }

    /// Checks the tuple of a block. Nothing is checked when the application tag is FFFFh and, for
    /// Type 3, the reference tag (if any) is all ones ("NVM Command Set 1.1", 5.3.3).
    ///
    /// # Errors
    /// The first check that fails, in this order: guard, application tag, storage tag, reference
    /// tag. [`Mismatch::Guard`] for metadata that is too short for a tuple.
    pub fn check(
        &self,
        data: &[u8],
        metadata: &[u8],
        tags: Tags,
        checks: Checks,
    ) -> Result<(), Mismatch> {
        let start = self.start(metadata.len()).ok_or(Mismatch::Guard)?;
        let guard_len = usize::from(self.guard.bits()) / 8;
        let mut fields = metadata.iter().skip(start).copied();
        let mut take = |len: usize| {
            let bytes = fields.by_ref().take(len);
            bytes.fold(0, |all: u128, byte| all << 8 | u128::from(byte))
        };
        let guard = take(guard_len);
        let application = take(2) as u16;
        let block = take(self.guard.tag_bits() as usize / 8);
        let mask = u128::from(self.reference_mask());
        let escaped = application == 0xffff && (self.kind != Type::Three || block & mask == mask);
        if escaped {
            return Ok(());
        }
        if checks.guard {
            let (found, len) = self.guard_of(data, metadata).ok_or(Mismatch::Guard)?;
            let found = found.iter().take(len);
            let found = found.fold(0, |all, byte| all << 8 | u128::from(*byte));
            if found != guard {
                return Err(Mismatch::Guard);
            }
        }
        if checks.application && (application ^ tags.application) & tags.mask != 0 {
            return Err(Mismatch::Application);
        }
        let differs = block ^ tags.block;
        let stored = u128::from(self.storage.mask) << self.reference_bits();
        if checks.storage && differs & stored != 0 {
            return Err(Mismatch::Storage);
        }
        let compared = checks.reference && self.kind != Type::Three;
        if compared && differs & mask != 0 {
            Err(Mismatch::Reference)
        } else {
            Ok(())
        }
    }
}
