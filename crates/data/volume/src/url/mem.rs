//! URLs of volumes in memory, `mem://SIZE`.

use super::{
    BareVolume, MemoryPlace, OpenError, OpenOptions, READ_ONLY, Scheme, VolumeKind, VolumeUrl, size,
};
use crate::{MemVolume, VolumeError};
use std::sync::Arc;

const SCHEME: Scheme = Scheme {
    name: "mem",
    form: "SIZE",
    example: "mem://1G",
    help: "memory of the process, lost when it ends",
    options: &[READ_ONLY],
};

pub(super) fn kind<X: 'static>() -> VolumeKind<X> {
    VolumeKind::new(SCHEME, open)
}

fn open<X>(url: &mut VolumeUrl<'_>, open: OpenOptions) -> Result<BareVolume<X>, OpenError> {
    let size = size(SCHEME.name, url.name)?;
    let volume = match &open.memory {
        MemoryPlace::Process => MemVolume::new(size)?,
        MemoryPlace::New => MemVolume::kept(size, None)?,
        MemoryPlace::Kept(file) => {
            let file = file.try_clone().map_err(|error| VolumeError::Memory {
                what: "a memory volume",
                error,
            })?;
            MemVolume::kept(size, Some(file))?
        }
    };
    let volume = if url.options.read_only(&open)? {
        volume.read_only()
    } else {
        volume
    };
    Ok(BareVolume::new(Arc::new(volume)))
}
