//! URLs of volumes in memory, `mem://SIZE`.

use super::{
    BareVolume, MemoryPlace, OpenError, OpenOptions, READ_ONLY, Scheme, UrlOption, VolumeKind,
    VolumeUrl, size,
};
use crate::{MemVolume, VolumeError};
use std::sync::Arc;

const SCHEME: Scheme = Scheme {
    name: "mem",
    form: "SIZE",
    example: "mem://1G",
    help: "memory of the process, lost when it ends",
    options: &[
        READ_ONLY,
        UrlOption::new(
            "huge",
            "2M",
            "allocate all of it at once, in huge pages of the host's pool (vm.nr_hugepages) \
             [default: when it is written, in huge pages where the kernel makes them]",
        ),
    ],
};

pub(super) fn kind<X: 'static>() -> VolumeKind<X> {
    VolumeKind::new(SCHEME, open)
}

fn open<X>(url: &mut VolumeUrl<'_>, open: OpenOptions) -> Result<BareVolume<X>, OpenError> {
    let size = size(SCHEME.name, url.name)?;
    let huge = url.options.take("huge", huge)?.is_some();
    let (file, kept) = match &open.memory {
        MemoryPlace::Process => (None, false),
        MemoryPlace::New => (None, true),
        MemoryPlace::Kept(file) => {
            let file = file.try_clone().map_err(|error| VolumeError::Memory {
                what: "a memory volume",
                error,
            })?;
            (Some(file), true)
        }
    };
    let volume = match (huge, kept) {
        (true, _) => MemVolume::reserved(size, file, kept)?,
        (false, true) => MemVolume::kept(size, file)?,
        (false, false) => MemVolume::new(size)?,
    };
    let volume = if url.options.read_only(&open)? {
        volume.read_only()
    } else {
        volume
    };
    Ok(BareVolume::new(Arc::new(volume)))
}

fn huge(text: &str) -> Result<(), &'static str> {
    match text {
        "2M" => Ok(()),
        _ => Err("huge pages have 2M"),
    }
}
