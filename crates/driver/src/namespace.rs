//! A namespace as the driver uses it.

use nvme::identify::IdentifyNamespace;

/// One namespace of the NVM command set, as Identify described it last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Namespace ID.
    pub nsid: u32,
    /// log2 of the logical block size in bytes.
    pub block_shift: u8,
    /// Size in logical blocks (NSZE).
    pub blocks: u64,
    /// Deallocated blocks read as zeroes (DLFEAT).
    pub zeroes_after_deallocate: bool,
    /// Writes are refused (NSATTR).
    pub write_protected: bool,
    /// Preferred granularity of deallocation in blocks; 0 if none is stated.
    pub deallocate_granularity: u32,
    /// IEEE Extended Unique Identifier; zeroes if there is none.
    pub eui64: [u8; 8],
    /// Namespace Globally Unique Identifier; zeroes if there is none.
    pub nguid: [u8; 16],
}

impl Namespace {
    /// What the driver needs of an Identify Namespace structure.
    ///
    /// # Errors
    /// A few words on why the namespace cannot be used.
    pub fn parse(nsid: u32, id: &IdentifyNamespace) -> Result<Self, &'static str> {
        if id.nsze.get() == 0 {
            return Err("not active");
        }
        let format = id.formatted().ok_or("its format does not exist")?;
        if !(9..=16).contains(&format.lbads) {
            return Err("its block size is neither 512 bytes nor up to 64 KiB");
        }
        if format.ms.get() != 0 {
            return Err("its blocks carry metadata");
        }
        Ok(Self {
            nsid,
            block_shift: format.lbads,
            blocks: id.nsze.get(),
            zeroes_after_deallocate: id.dlfeat.into_bits() & 7 == 1,
            write_protected: id.nsattr.into_bits() & 1 != 0,
            deallocate_granularity: if id.nsfeat.optperf() & 1 != 0 {
                u32::from(id.npdg_z.get()) + 1
            } else {
                0
            },
            eui64: id.eui64,
            nguid: id.nguid,
        })
    }

    /// Logical block size in bytes.
    pub fn block_size(&self) -> u32 {
        1 << self.block_shift
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(u64::from(self.block_size()))
    }
}
