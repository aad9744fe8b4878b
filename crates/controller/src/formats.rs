//! LBA formats that a host may give a namespace (Format NVM), and where the one that it has chosen
//! is kept.

use crate::config::NamespaceConfig;
use crate::subsystem::Saved;
use std::fmt::Debug;
use std::sync::Arc;

/// Block sizes in bytes that there are.
const SIZES: [u32; 2] = [512, 4096];

/// Where a namespace's format is kept, so that the next process has it so.
pub trait FormatStore: Send + Sync + Debug {
    /// Keeps the format: logical blocks of so many bytes. Must not block, and calls `done`, on
    /// whatever thread: `true` when it outlasts the process and a loss of power, `false` when the
    /// one before is kept. One call at a time. A store that drops `done` without a call leaves the
    /// host's command without an end.
    fn save(&self, block_size: u32, done: Saved);
}

/// The LBA formats of a namespace: blocks of 512 and of 4096 bytes, as far as its volume can have
/// them.
#[derive(Clone, Debug)]
pub struct Formats {
    /// In bytes, in the order of the formats' indices.
    sizes: [u32; 2],
    store: Arc<dyn FormatStore>,
}

impl Formats {
    /// Format 0 has blocks of `first` bytes (512 or 4096), format 1 of the other size.
    pub fn new(first: u32, store: Arc<dyn FormatStore>) -> Self {
        Self {
            sizes: sizes_from(first),
            store,
        }
    }

    /// Where the choice is kept.
    pub(crate) fn store(&self) -> &Arc<dyn FormatStore> {
        &self.store
    }
}

/// Block sizes by the indices of formats, of which format 0 has this one.
pub(crate) fn sizes_from(first: u32) -> [u32; 2] {
    let other = SIZES.into_iter().find(|size| *size != first);
    [first, other.unwrap_or(first)]
}

/// Those that a namespace can have whose blocks are of `current` bytes; `None`: that one is not
/// available.
pub(crate) fn available(
    sizes: [u32; 2],
    current: u32,
    fits: impl Fn(u32) -> bool,
) -> Vec<Option<u32>> {
    let found = sizes.map(|size| (size == current || fits(size)).then_some(size));
    let last = found.iter().rposition(Option::is_some);
    let count = last.map_or(0, |last| last + 1);
    found.into_iter().take(count).collect()
}

impl NamespaceConfig {
    /// Bytes of a block by the indices of its LBA formats; `None`: that one is not available.
    pub(crate) fn lba_formats(&self) -> Vec<Option<u32>> {
        let Some(formats) = &self.formats else {
            return vec![Some(self.block_size)];
        };
        let info = self.volume.info();
        let fits = |size: u32| info.block_size <= size && info.size.is_multiple_of(size.into());
        available(formats.sizes, self.block_size, fits)
    }

    /// The index of the one that it has.
    pub(crate) fn lba_format(&self) -> u8 {
        let formats = self.formats.as_ref();
        let sizes = formats.map(|formats| formats.sizes);
        let place = |sizes: [u32; 2]| sizes.iter().position(|size| *size == self.block_size);
        sizes.and_then(place).unwrap_or(0) as u8
    }
}
