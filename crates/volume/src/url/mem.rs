//! `mem://SIZE`.

use super::{OpenError, OpenOptions, READ_ONLY, Scheme, VolumeKind, VolumeUrl, Whole, size};
use crate::MemVolume;
use std::sync::Arc;

const SCHEME: Scheme = Scheme {
    name: "mem",
    form: "SIZE",
    example: "mem://1G",
    help: "memory of this process, gone when it ends",
    options: &[READ_ONLY],
};

pub(super) fn kind<X: 'static>() -> VolumeKind<X> {
    VolumeKind::new(SCHEME, open)
}

fn open<X>(url: &mut VolumeUrl<'_>, open: OpenOptions) -> Result<Whole<X>, OpenError> {
    let volume = MemVolume::new(size(SCHEME.name, url.name)?)?;
    let volume = if url.options.read_only(open)? {
        volume.read_only()
    } else {
        volume
    };
    Ok(Whole::new(Arc::new(volume)))
}
