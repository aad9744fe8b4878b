//! Parameters of a disk for the block layer.

use crate::uapi::*;
use crate::{MAX_IO, UblkError};
use volume::Info;

/// Maximum length of a discard or of writing zeroes, in sectors of 512 bytes: 1 GiB.
const MAX_RANGE: u32 = 1 << 21;
/// Logical block sizes in bytes that a ublk device may have.
const BLOCKS: std::ops::RangeInclusive<u32> = 512..=4096;

/// Returns the block size in bytes of a disk on a volume; `wanted` is the requested one, if any.
pub(crate) fn block_size(info: &Info, wanted: Option<u32>) -> Result<u32, UblkError> {
    let block_size = wanted.unwrap_or_else(|| info.block_size.max(512));
    let wrong = |why: String| UblkError::Options {
        what: format!("blocks of {block_size} bytes are not possible for a ublk device: {why}"),
    };
    if !block_size.is_power_of_two() || !BLOCKS.contains(&block_size) {
        return Err(wrong("they are powers of two from 512 to 4096".into()));
    }
    if block_size < info.block_size {
        return Err(wrong(format!(
            "the volume has blocks of {}",
            info.block_size
        )));
    }
    if info.size < u64::from(block_size) || !info.size.is_multiple_of(block_size.into()) {
        return Err(wrong(format!("the volume has {} bytes", info.size)));
    }
    Ok(block_size)
}

/// Returns the kernel's parameters for a disk with this block size.
pub(crate) fn params(info: &Info, block_size: u32) -> Params {
    let shift = |bytes: u32| bytes.max(block_size).ilog2() as u8;
    let mut attrs = 0;
    if info.read_only {
        attrs |= ATTR_READ_ONLY;
    }
    if info.volatile_cache {
        attrs |= ATTR_VOLATILE_CACHE | ATTR_FUA;
    }
    // Every writable volume supports zeroing; discards are supported if they release space.
    let (mut discard, mut zeroes) = (0, 0);
    if !info.read_only {
        zeroes = MAX_RANGE;
        if info.deallocate {
            discard = MAX_RANGE;
        }
    }
    Params {
        len: size_of::<Params>() as u32,
        types: PARAM_BASIC | PARAM_DISCARD,
        attrs,
        logical_bs_shift: shift(block_size),
        physical_bs_shift: shift(info.optimal_io.min(64 << 10)),
        io_opt_shift: shift(info.optimal_io),
        io_min_shift: shift(block_size),
        max_sectors: (MAX_IO / 512) as u32,
        dev_sectors: info.size / 512,
        discard_granularity: info.deallocate_granularity.max(block_size),
        max_discard_sectors: discard,
        max_write_zeroes_sectors: zeroes,
        max_discard_segments: 1,
        ..Params::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use volume::{MemVolume, Volume};

    #[test]
    fn params_match_volume_capabilities() {
        let volume = MemVolume::new(1 << 20).unwrap();
        let info = volume.info();
        let told = params(&info, block_size(&info, None).unwrap());
        assert_eq!((told.logical_bs_shift, told.physical_bs_shift), (9, 12));
        assert_eq!(told.dev_sectors, 2048);
        assert_eq!(told.attrs, 0);
        assert_eq!(
            (told.max_discard_sectors, told.discard_granularity),
            (MAX_RANGE, 4096)
        );
        let info = Info {
            read_only: true,
            volatile_cache: true,
            block_size: 4096,
            ..info
        };
        let told = params(&info, block_size(&info, None).unwrap());
        assert_eq!(told.attrs, ATTR_READ_ONLY | ATTR_VOLATILE_CACHE | ATTR_FUA);
        assert_eq!(
            (told.logical_bs_shift, told.max_write_zeroes_sectors),
            (12, 0)
        );
    }

    #[test]
    fn invalid_block_sizes_are_refused() {
        let info = MemVolume::new(1 << 20).unwrap().info();
        for wanted in [256, 1000, 8192] {
            assert!(block_size(&info, Some(wanted)).is_err(), "{wanted}");
        }
        let large = Info {
            block_size: 4096,
            ..info.clone()
        };
        assert!(
            block_size(&large, Some(512))
                .unwrap_err()
                .to_string()
                .contains("4096")
        );
        let odd = Info {
            size: (1 << 20) + 512,
            ..info
        };
        assert_eq!(block_size(&odd, None).unwrap(), 512);
        assert!(block_size(&odd, Some(4096)).is_err());
    }
}
