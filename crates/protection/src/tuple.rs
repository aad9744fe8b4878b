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

/// The type of protection, of which the reference tag's meaning depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// The reference tag is of the block's number.
    One = 1,
    /// The reference tag begins at the value in the command.
    Two = 2,
    /// The reference tag is the application's, and is not checked.
    Three = 3,
}

impl Type {
    /// Returns the type of a number, 1 to 3.
    pub fn of(number: u8) -> Option<Self> {
        [Self::One, Self::Two, Self::Three]
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }
}

/// Size and algorithm of the guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// CRC-16/T10-DIF.
    Bits16,
    /// CRC-32C.
    Bits32,
    /// CRC-64/NVME.
    Bits64,
}

impl Guard {
    /// Returns the guard of 16, 32 or 64 bits.
    pub fn of(bits: u8) -> Option<Self> {
        [Self::Bits16, Self::Bits32, Self::Bits64]
            .into_iter()
            .find(|guard| guard.bits() == bits)
    }

    /// Returns the number of bits.
    pub const fn bits(self) -> u8 {
        match self {
            Self::Bits16 => 16,
            Self::Bits32 => 32,
            Self::Bits64 => 64,
        }
    }

    /// Returns the size of the whole tuple in bytes.
    pub const fn tuple(self) -> usize {
        match self {
            Self::Bits16 => 8,
            Self::Bits32 | Self::Bits64 => 16,
        }
    }

    /// Returns the minimum and maximum number of bits of the storage tag (STS): "NVM Command Set
    /// 1.1", 4.1.5.3.
    pub const fn storage_bits(self) -> (u8, u8) {
        match self {
            Self::Bits16 => (0, 32),
            Self::Bits32 => (16, 64),
            Self::Bits64 => (0, 48),
        }
    }

    /// Bits of storage tag and reference tag together.
    const fn tag_bits(self) -> u32 {
        match self {
            Self::Bits16 => 32,
            Self::Bits32 => 80,
            Self::Bits64 => 48,
        }
    }

    /// Returns the storage tag and reference tag of a command, from its dwords 2, 3 and 14 ("NVM
    /// Command Set 1.1", 3.3.2: LBTU, LBTL).
    pub const fn command_tags(self, cdw2: u32, cdw3: u32, cdw14: u32) -> u128 {
        let all = (cdw2 as u128) << 64 | (cdw3 as u128) << 32 | cdw14 as u128;
        all & ((1 << self.tag_bits()) - 1)
    }

    /// Bytes of the guard, at the beginning of `field`.
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

/// Storage tag of a namespace's tuples, whose value is chosen by hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageTag {
    /// Number of bits (STS), within [`Guard::storage_bits`]; with 0 there is none.
    pub bits: u8,
    /// Bits of the tag that are compared (LBSTM).
    pub mask: u64,
}

impl StorageTag {
    /// Returns a storage tag of so many bits (64 at most), all of which are compared.
    pub const fn of(bits: u8) -> Self {
        let mask = match u64::MAX.checked_shr(64_u32.saturating_sub(bits as u32)) {
            Some(mask) => mask,
            None => 0,
        };
        Self { bits, mask }
    }

    /// Returns the smallest storage tag of a guard.
    pub const fn least(guard: Guard) -> Self {
        Self::of(guard.storage_bits().0)
    }
}

/// Expected tags of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tags {
    /// Application tag (LBAT).
    pub application: u16,
    /// The bits of it that are compared (LBATM).
    pub mask: u16,
    /// Storage tag and reference tag, as they stand in the tuple: [`Protection::tags_of`].
    pub block: u128,
}

/// Enabled checks of a block (PRCHK).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checks {
    /// The guard.
    pub guard: bool,
    /// The application tag.
    pub application: bool,
    /// The storage tag (STC), if there is one.
    pub storage: bool,
    /// The reference tag, if there is one; of Type 3 never.
    pub reference: bool,
}

impl Checks {
    /// All checks.
    pub const ALL: Self = Self {
        guard: true,
        application: true,
        storage: true,
        reference: true,
    };
}

/// Field that fails its check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// The guard.
    #[error("the guard is not that of the data")]
    Guard,
    /// The application tag.
    #[error("the application tag is another")]
    Application,
    /// The storage tag.
    #[error("the storage tag is another")]
    Storage,
    /// The reference tag.
    #[error("the reference tag is another")]
    Reference,
}

/// Protection information of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protection {
    /// Type.
    pub kind: Type,
    /// Guard.
    pub guard: Guard,
    /// Storage tag.
    pub storage: StorageTag,
    /// The tuple is the first bytes of the metadata, not the last ones.
    pub first: bool,
}

impl Protection {
    /// Returns whether the protection information format is an extended one, that is any but a
    /// guard of 16 bits without a storage tag. Only hosts that have enabled it use it (LBA Format
    /// Extension Enable, "NVM Command Set 1.1", 4.1.3.6.1).
    pub fn is_extended_format(&self) -> bool {
        self.guard != Guard::Bits16 || self.storage.bits > 0
    }

    /// Bits of the reference tag: 0 where the storage tag is all there is.
    fn reference_bits(&self) -> u32 {
        let bits = u32::from(self.storage.bits);
        self.guard.tag_bits().saturating_sub(bits)
    }

    /// Returns the mask of the reference tag's bits.
    pub fn reference_mask(&self) -> u64 {
        let unused = 64_u32.saturating_sub(self.reference_bits());
        u64::MAX.checked_shr(unused).unwrap_or_default()
    }

    /// Returns the tags of the block at `index` of a command whose tags are `initial`
    /// ([`Guard::command_tags`]). The reference tag grows by one with each block, except for Type
    /// 3, where it is the same for all blocks.
    pub fn tags_of(&self, initial: u128, index: u64) -> u128 {
        let mask = u128::from(self.reference_mask());
        match self.kind {
            Type::Three => initial,
            _ => initial & !mask | initial.wrapping_add(index.into()) & mask,
        }
    }

    /// The initial tags are such that a block of this number may have them: of Type 1 the reference
    /// tag is the number's low bits.
    pub fn is_initial(&self, initial: u128, slba: u64) -> bool {
        let mask = self.reference_mask();
        self.kind != Type::One || initial as u64 & mask == slba & mask
    }

    /// Returns the offset of the tuple in metadata of so many bytes.
    fn start(&self, metadata: usize) -> Option<usize> {
        let last = metadata.checked_sub(self.guard.tuple())?;
        Some(if self.first { 0 } else { last })
    }

    /// The tuple in the metadata of a block; none if that is shorter.
    pub fn tuple_in_mut<'a>(&self, metadata: &'a mut [u8]) -> Option<&'a mut [u8]> {
        let start = self.start(metadata.len())?;
        metadata.get_mut(start..start + self.guard.tuple())
    }

    /// Guard of the data, and of the metadata before the tuple.
    fn guard_of(&self, data: &[u8], metadata: &[u8]) -> Option<([u8; 8], usize)> {
        let before = metadata.get(..self.start(metadata.len())?)?;
        let mut field = [0; 8];
        let len = self.guard.of_bytes([data, before], &mut field);
        Some((field, len))
    }

    /// Makes the tuple of a block. Metadata that is shorter than a tuple stays as it is.
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

    /// Checks the tuple of a block. An application tag of FFFFh has nothing checked, of Type 3 with
    /// a reference tag of ones, if there is one ("NVM Command Set 1.1", 5.3.3).
    ///
    /// # Errors
    /// The first check that fails, in this order: guard, application tag, storage tag, reference
    /// tag. Metadata that is shorter than a tuple is [`Mismatch::Guard`].
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
        match compared && differs & mask != 0 {
            true => Err(Mismatch::Reference),
            false => Ok(()),
        }
    }
}
