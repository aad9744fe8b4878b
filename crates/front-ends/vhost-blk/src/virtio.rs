//! Guest-visible interface: virtio feature bits, the block device's configuration space, request
//! types (virtio 1.2, sections 2.7, 5.2, 6).

use zerocopy::{Immutable, IntoBytes};

/// Size in bytes of a sector, the unit of request offsets and of the capacity (virtio 1.2, 5.2.4).
pub(crate) const SECTOR: u64 = 512;

/// Feature bits of virtio, virtio-blk and vhost-user.
#[allow(missing_docs)] // Names and meanings are the standard's.
pub mod feature {
    pub const SIZE_MAX: u64 = 1 << 1;
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Feature bit VHOST_F_LOG_ALL, which only the front-end uses: written pages are logged.
    pub const LOG_ALL: u64 = 1 << 26;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    /// Feature bit VHOST_USER_F_PROTOCOL_FEATURES, which only the front-end uses.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
}

/// Types of virtio-blk requests (virtio 1.2, 5.2.6).
#[allow(missing_docs)] // Names and meanings are the standard's.
pub mod kind {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
}

/// Flag VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP: the device may deallocate the range.
pub(crate) const FLAG_UNMAP: u32 = 1;

/// Length in bytes of the serial number in the answer to GET_ID.
pub(crate) const ID_BYTES: usize = 20;

/// Value of a virtio-blk request's status byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BlkStatus {
    /// Status VIRTIO_BLK_S_OK: the request has succeeded.
    Ok = 0,
    /// Status VIRTIO_BLK_S_IOERR: the request has failed.
    IoErr = 1,
    /// Status VIRTIO_BLK_S_UNSUPP: the device does not support the request.
    Unsupported = 2,
}

/// Maximum length in bytes of a request's segment (`size_max`).
pub(crate) const MAX_SEGMENT: u32 = 1 << 20;
/// Maximum number of segments of a discard or write-zeroes request.
pub(crate) const MAX_RANGES: u32 = 16;
/// Maximum number of sectors in a segment of a discard or write-zeroes request: 2 GiB.
const MAX_RANGE_SECTORS: u32 = 4 << 20;
/// Maximum number of sectors in a write-zeroes segment if zeroes are written as data: 16 MiB.
const MAX_SLOW_ZERO_SECTORS: u32 = 32 << 10;

/// Offset of `writeback` in the configuration space, the one field that a driver may write.
pub(crate) const WRITEBACK_OFFSET: u32 = 32;

/// Configuration space of virtio-blk up to the fields of write-zeroes (`struct virtio_blk_config`),
/// little-endian.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Config {
    capacity: [u8; 8],
    size_max: [u8; 4],
    seg_max: [u8; 4],
    geometry: [u8; 4],
    blk_size: [u8; 4],
    physical_block_exp: u8,
    alignment_offset: u8,
    min_io_size: [u8; 2],
    opt_io_size: [u8; 4],
    writeback: u8,
    unused0: u8,
    num_queues: [u8; 2],
    max_discard_sectors: [u8; 4],
    max_discard_seg: [u8; 4],
    discard_sector_alignment: [u8; 4],
    max_write_zeroes_sectors: [u8; 4],
    max_write_zeroes_seg: [u8; 4],
    write_zeroes_may_unmap: u8,
    unused1: [u8; 3],
}

const _: () = {
    assert!(size_of::<Config>() == 60);
    assert!(std::mem::offset_of!(Config, writeback) == WRITEBACK_OFFSET as usize);
};

/// Properties of an export from which features and configuration space follow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) queues: u16,
    /// Maximum number of segments of a request.
    pub(crate) seg_max: u32,
    /// Logical block size in bytes.
    pub(crate) block_size: u32,
}

impl Shape {
    /// Returns the virtio features that the device offers for a volume.
    pub(crate) fn features(&self, info: &volume::Info) -> u64 {
        use feature::*;
        let mut features = SIZE_MAX
            | SEG_MAX
            | BLK_SIZE
            | FLUSH
            | TOPOLOGY
            | INDIRECT_DESC
            | EVENT_IDX
            | PROTOCOL_FEATURES
            | VERSION_1;
        if self.queues > 1 {
            features |= MQ;
        }
        if info.read_only {
            return features | RO;
        }
        features |= CONFIG_WCE | WRITE_ZEROES;
        if info.deallocate {
            features |= DISCARD;
        }
        features
    }

    /// Returns the configuration space for a volume; `writeback` is the state of the write cache.
    pub(crate) fn config(&self, info: &volume::Info, writeback: bool) -> Config {
        let physical = info.optimal_io.max(self.block_size);
        let blocks = physical / self.block_size.max(1);
        let sectors = |bytes: u32| (u64::from(bytes) / SECTOR) as u32;
        let zeroes = if info.write_zeroes {
            MAX_RANGE_SECTORS
        } else {
            MAX_SLOW_ZERO_SECTORS
        };
        // Ranges are multiples of the block size, so the maximum is rounded down to one.
        let whole = |max: u32| max - max % sectors(self.block_size).max(1);
        Config {
            capacity: (info.size / SECTOR).to_le_bytes(),
            size_max: MAX_SEGMENT.to_le_bytes(),
            seg_max: self.seg_max.to_le_bytes(),
            blk_size: self.block_size.to_le_bytes(),
            physical_block_exp: blocks.checked_ilog2().unwrap_or(0).min(8) as u8,
            min_io_size: u16::try_from(blocks).unwrap_or(1).to_le_bytes(),
            writeback: writeback.into(),
            num_queues: self.queues.to_le_bytes(),
            max_discard_sectors: whole(MAX_RANGE_SECTORS).to_le_bytes(),
            max_discard_seg: MAX_RANGES.to_le_bytes(),
            discard_sector_alignment: sectors(info.deallocate_granularity.max(self.block_size))
                .to_le_bytes(),
            max_write_zeroes_sectors: whole(zeroes).to_le_bytes(),
            max_write_zeroes_seg: MAX_RANGES.to_le_bytes(),
            write_zeroes_may_unmap: (info.deallocate && info.zeroes_after_deallocate).into(),
            ..Config::default()
        }
    }

    /// Returns the maximum number of data bytes of a request.
    pub(crate) fn max_transfer(&self) -> u64 {
        u64::from(self.seg_max) * u64::from(MAX_SEGMENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use volume::Volume;

    const SHAPE: Shape = Shape {
        queues: 4,
        seg_max: 126,
        block_size: 512,
    };

    fn at(config: &Config, offset: usize, len: usize) -> u64 {
        config.as_bytes()[offset..offset + len]
            .iter()
            .rev()
            .fold(0, |value, byte| value << 8 | u64::from(*byte))
    }

    #[test]
    fn config_space_follows_virtio_layout() {
        let volume = volume::MemVolume::new(1 << 20).unwrap();
        let config = SHAPE.config(&volume.info(), true);
        assert_eq!(at(&config, 0, 8), 2048, "capacity");
        assert_eq!(at(&config, 8, 4), u64::from(MAX_SEGMENT));
        assert_eq!(at(&config, 12, 4), 126);
        assert_eq!(at(&config, 20, 4), 512, "blk_size");
        assert_eq!(at(&config, 24, 1), 3, "physical_block_exp: 4096");
        assert_eq!(at(&config, 26, 2), 8, "min_io_size");
        assert_eq!(at(&config, 32, 1), 1, "writeback");
        assert_eq!(at(&config, 34, 2), 4, "num_queues");
        assert_eq!(at(&config, 36, 4), 4 << 20, "max_discard_sectors");
        assert_eq!(at(&config, 44, 4), 8, "discard_sector_alignment");
        assert_eq!(at(&config, 56, 1), 1, "write_zeroes_may_unmap");
        assert_eq!(at(&SHAPE.config(&volume.info(), false), 32, 1), 0);
    }

    #[test]
    fn unsupported_volume_features_are_not_offered() {
        let mut info = volume::MemVolume::new(1 << 20).unwrap().info();
        let features = SHAPE.features(&info);
        assert_ne!(features & feature::DISCARD, 0);
        assert_ne!(features & feature::MQ, 0);
        assert_eq!(features & feature::RO, 0);
        info.deallocate = false;
        assert_eq!(SHAPE.features(&info) & feature::DISCARD, 0);
        info.read_only = true;
        let features = SHAPE.features(&info);
        assert_ne!(features & feature::RO, 0);
        let writing = feature::WRITE_ZEROES | feature::DISCARD | feature::CONFIG_WCE;
        assert_eq!(features & writing, 0);
        assert_eq!(
            Shape { queues: 1, ..SHAPE }.features(&info) & feature::MQ,
            0
        );
    }
}
