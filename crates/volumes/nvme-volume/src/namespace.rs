//! Properties of a namespace that a volume uses, from Identify Namespace.

use nvme::identify::{IdentifyController, IdentifyNamespace};
use volume::AtomicWrites;

/// Namespace of the NVM command set, as the latest Identify command describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Namespace ID (NSID).
    pub nsid: u32,
    /// Logical block size in bytes, as a power of two.
    pub block_shift: u8,
    /// Size of the namespace in logical blocks (NSZE).
    pub blocks: u64,
    /// Whether deallocated blocks read as zeroes (DLFEAT).
    pub zeroes_after_deallocate: bool,
    /// Whether the namespace is write protected (NSATTR).
    pub write_protected: bool,
    /// Preferred granularity of deallocation in blocks; 0 if the controller states none.
    pub deallocate_granularity: u32,
    /// IEEE Extended Unique Identifier; zeroes if there is none.
    pub eui64: [u8; 8],
    /// Namespace Globally Unique Identifier; zeroes if there is none.
    pub nguid: [u8; 16],
    /// Sizes of writes that the controller promises to be atomic.
    pub atomicity: Atomicity,
}

/// Atomic write units of a namespace in blocks, all zeroes when the namespace reports none ("NVM
/// Command Set 1.1", 2.1.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Atomicity {
    /// Namespace Atomic Write Unit Normal, zero-based; 0 means that the controller's value applies.
    nawun_z: u16,
    nawupf_z: u16,
    /// Namespace Atomic Boundary Size Normal, zero-based; 0 means no boundaries.
    nabsn_z: u16,
    nabspf_z: u16,
    nabo: u16,
}

impl Atomicity {
    fn parse(id: &IdentifyNamespace) -> Self {
        if !id.nsfeat.nsabpns() {
            return Self::default();
        }
        Self {
            nawun_z: id.nawun_z.get(),
            nawupf_z: id.nawupf_z.get(),
            nabsn_z: id.nabsn_z.get(),
            nabspf_z: id.nabspf_z.get(),
            nabo: id.nabo.get(),
        }
    }
}

impl Namespace {
    /// Extracts the fields that a volume uses from an Identify Namespace structure.
    ///
    /// # Errors
    /// A short reason why the namespace cannot be used.
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
            atomicity: Atomicity::parse(id),
        })
    }

    /// Returns which writes are atomic, both to other commands and across a power loss. Writes
    /// longer than `max_transfer` bytes are split into several commands, so only the parts are
    /// atomic.
    pub fn atomic_writes(&self, id: &IdentifyController, max_transfer: u64) -> AtomicWrites {
        let Atomicity {
            nawun_z,
            nawupf_z,
            nabsn_z,
            nabspf_z,
            nabo,
        } = self.atomicity;
        let own = |of_namespace: u16, of_controller: u16| match of_namespace {
            0 => of_controller,
            own => own,
        };
        let normal = own(nawun_z, id.awun_z.get());
        let power = own(nawupf_z, id.awupf_z.get());
        let bytes = |blocks: u64| blocks << self.block_shift;
        let boundary = |z: u16| match z {
            0 => 0,
            z => bytes(u64::from(z) + 1),
        };
        let most = bytes(u64::from(normal.min(power)) + 1).min(max_transfer);
        let offset = bytes(nabo.into());
        let normal = AtomicWrites::within(most, boundary(nabsn_z), offset);
        AtomicWrites::within(normal.unit().into(), boundary(nabspf_z), offset)
    }

    /// Returns the logical block size in bytes.
    pub fn block_size(&self) -> u32 {
        1 << self.block_shift
    }

    /// Returns the size of the namespace in bytes.
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(u64::from(self.block_size()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    /// Computes the atomic write unit in bytes. `fields` are AWUN and AWUPF of the controller, then
    /// NAWUN, NAWUPF, NABSN, NABSPF and NABO of a namespace with 512-byte blocks.
    fn unit(fields: [u16; 7], own: bool, max_transfer: u64) -> u32 {
        let [awun, awupf, nawun, nawupf, nabsn, nabspf, nabo] = fields.map(Into::into);
        let mut controller = IdentifyController::new_zeroed();
        (controller.awun_z, controller.awupf_z) = (awun, awupf);
        let mut id = IdentifyNamespace::new_zeroed();
        id.nsze = 100.into();
        id.lbaf[0] = nvme::identify::LbaFormat::new(9);
        id.nsfeat = nvme::identify::Nsfeat::new().with_nsabpns(own);
        (id.nawun_z, id.nawupf_z) = (nawun, nawupf);
        (id.nabsn_z, id.nabspf_z, id.nabo) = (nabsn, nabspf, nabo);
        let namespace = Namespace::parse(1, &id).unwrap();
        namespace.atomic_writes(&controller, max_transfer).unit()
    }

    #[test]
    fn device_atomicity_needs_both_units() {
        let large = 1 << 20;
        for (fields, own, max_transfer, expected) in [
            // Every device guarantees single blocks.
            ([0; 7], false, large, 512),
            ([31, 31, 0, 0, 0, 0, 0], false, large, 16 << 10),
            // A concurrent read may see half of the write.
            ([0, 31, 0, 0, 0, 0, 0], false, large, 512),
            ([31, 7, 0, 0, 0, 0, 0], false, large, 4 << 10),
            // The namespace's own fields are valid only with its flag.
            ([7, 7, 31, 31, 31, 31, 0], false, large, 4 << 10),
            ([7, 7, 31, 31, 31, 31, 0], true, large, 16 << 10),
            ([7, 7, 31, 0, 0, 0, 0], true, large, 4 << 10),
            // Boundaries and their offset.
            ([0, 0, 31, 31, 0, 15, 0], true, large, 8 << 10),
            ([0, 0, 31, 31, 15, 0, 0], true, large, 8 << 10),
            ([0, 0, 31, 31, 31, 31, 8], true, large, 4 << 10),
            ([0, 0, 31, 31, 31, 31, 3], true, large, 512),
            // Writes longer than a command's maximum are several commands.
            ([31, 31, 0, 0, 0, 0, 0], false, 8 << 10, 8 << 10),
            (
                [0xffff, 0xffff, 0, 0, 0, 0, 0],
                false,
                large,
                volume::MAX_ATOMIC_UNIT,
            ),
        ] {
            assert_eq!(
                unit(fields, own, max_transfer),
                expected,
                "{fields:?} {own}"
            );
        }
    }
}
