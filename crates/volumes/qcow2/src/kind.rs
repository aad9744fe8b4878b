//! The kind of volume that a URL names: `qcow2://`.

use crate::chain::Qcow2Options;
use crate::volume::Qcow2Volume;
use std::path::PathBuf;
use std::sync::Arc;
use volume::{
    BareVolume, Direct, OpenError, OpenOptions, READ_ONLY, Scheme, UrlOption, VolumeKind,
    VolumeUrl, parse_duration, parse_size, path_of_name,
};

/// URL scheme `qcow2` of qcow2 images, with its options.
pub const QCOW2: Scheme = Scheme {
    name: "qcow2",
    form: "PATH",
    example: "qcow2:///disks/vm0.qcow2",
    help: "qcow2 image; create one with: qemu-img create -f qcow2 disk.qcow2 10G",
    options: &[READ_ONLY, BACKING, DIRECT, L2_CACHE, TIMEOUT],
};

const BACKING: UrlOption = UrlOption::new(
    "backing",
    "PATH",
    "permitted backing file, or folder of permitted backing files [default: none]",
);

const DIRECT: UrlOption = UrlOption::new(
    "direct",
    "auto|on|off",
    "bypass the page cache (direct I/O) [default: auto, if the file supports it]",
);

const L2_CACHE: UrlOption = UrlOption::new(
    "l2-cache",
    "SIZE",
    "L2 tables to cache in memory, for each image of the chain [default: 32M, for 256 GiB]",
);

const TIMEOUT: UrlOption = UrlOption::new(
    "timeout",
    "DURATION",
    "time limit of an access to a file on FUSE or a network, which then fails [default: none]",
);

/// Smallest and largest size in bytes of the option `l2-cache=`.
const L2_CACHES: std::ops::RangeInclusive<u64> = 64 << 10..=4 << 30;

/// Returns the kind of volume that opens qcow2 images from URLs.
pub fn kind<X: 'static>() -> VolumeKind<X> {
    VolumeKind::new(QCOW2, open)
}

fn open<X>(url: &mut VolumeUrl<'_>, open: OpenOptions) -> Result<BareVolume<X>, OpenError> {
    let path = path_of_name(url)?;
    let direct = |text: &str| match text {
        "auto" => Ok(Direct::Auto),
        "on" => Ok(Direct::On),
        "off" => Ok(Direct::Off),
        _ => Err("it is auto, on or off"),
    };
    let cache = |text: &str| match parse_size(text)? {
        size if L2_CACHES.contains(&size) => Ok(size),
        _ => Err("it is from 64K to 4G"),
    };
    let backing = |text: &str| Ok(PathBuf::from(text));
    let default = Qcow2Options::default();
    let options = Qcow2Options {
        // An image that is open for writing is marked as such in its header.
        read_only: url.options.read_only(&open)? || open.is_check,
        block_size: open.block_size,
        direct: url
            .options
            .take("direct", direct)?
            .unwrap_or(default.direct),
        backing: url.options.take("backing", backing)?,
        l2_cache: url
            .options
            .take("l2-cache", cache)?
            .unwrap_or(default.l2_cache),
        previous: open.previous,
        timeout: url.options.take("timeout", parse_duration)?,
        journals: open.journals,
        journal_slots: default.journal_slots,
    };
    let volume = Qcow2Volume::open(&path, &options);
    let volume = volume.map_err(|error| OpenError::Other(error.into()))?;
    Ok(BareVolume::new(Arc::new(volume)))
}
