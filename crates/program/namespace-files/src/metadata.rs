//! Metadata of a namespace's blocks: its options, and the file that stores it.

use crate::table_file;
use anyhow::{Context, Result, ensure};
use config::identity;
use config::options::Bits;
use config::spec::NamespaceSpec;
use controller::{BlockFormat, MetadataState};
use dma::SharedPages;
use protection::table::{self, Identity};
use protection::{Guard, Layout, Protection, StorageTag, Type};
use rustix::fs::OFlags;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use volume::{FileVolume, PreviousProcess, Volume};

/// Opens the metadata of a namespace with a single LBA format; returns `None` if its blocks have
/// none.
///
/// # Errors
/// A message for the user when the options conflict or the file cannot be opened.
pub fn open(
    spec: &NamespaceSpec,
    volume: &Arc<dyn Volume>,
    previous: PreviousProcess,
) -> Result<Option<Arc<MetadataState>>> {
    if spec.format_file.is_some() {
        return Ok(None);
    }
    let Some(layout) = configured(spec, &**volume)?.layout() else {
        return Ok(None);
    };
    let url = &*spec.volume;
    let blocks = volume.info().size / u64::from(layout.block);
    let state = match &spec.metadata {
        Some(path) => {
            let identity = Identity {
                namespace: identity::nguid("metadata", 1, &volume.id()),
                blocks,
            };
            kept(path, layout, identity, previous).with_context(|| format!("{url}: metadata"))?
        }
        None => {
            ensure!(
                url.starts_with("mem://") && volume.kept_memory().is_none(),
                "{url}: metadata-size needs the key metadata, the file of the blocks' metadata \
                 (optional only for mem://)"
            );
            MetadataState::in_memory(layout, blocks)?
        }
    };
    Ok(Some(Arc::new(state)))
}

/// Returns the block format that the options of a namespace on this volume configure.
///
/// # Errors
/// A message for the user when the options conflict.
pub fn configured(spec: &NamespaceSpec, volume: &dyn Volume) -> Result<BlockFormat> {
    let block = spec.block_size;
    let block = block.unwrap_or_else(|| volume.info().block_size.max(512));
    let Some(size) = spec.metadata_size else {
        return Ok(BlockFormat::plain(block));
    };
    let layout = layout(spec, block, size);
    let layout = layout.with_context(|| format!("{}: metadata", &*spec.volume))?;
    Ok(BlockFormat::of(&layout))
}

fn layout(spec: &NamespaceSpec, block: u32, metadata: u16) -> Result<Layout> {
    let protection = match spec.protection {
        None | Some(0) => None,
        Some(number) => {
            let kind = Type::of(number)
                .with_context(|| format!("protection is {number}: 0 to 3 are allowed"))?;
            let bits = spec.guard.unwrap_or(16);
            let guard = Guard::of(bits);
            let guard = guard
                .with_context(|| format!("guard is {bits} bits: 16, 32 and 64 are allowed"))?;
            let first = spec.protection_first.unwrap_or_default();
            let mut storage = spec
                .storage_tag
                .map_or_else(|| StorageTag::least(guard), StorageTag::of);
            if let Some(Bits(mask)) = spec.storage_tag_mask {
                storage.mask = mask;
            }
            Some(Protection {
                kind,
                guard,
                storage,
                first,
            })
        }
    };
    let layout = Layout {
        block,
        metadata,
        extended: spec.metadata_extended.unwrap_or_default(),
        protection,
    };
    layout.check()?;
    Ok(layout)
}

/// Opens the metadata file, which is created if it does not exist.
fn kept(
    path: &Path,
    layout: Layout,
    identity: Identity,
    previous: PreviousProcess,
) -> Result<MetadataState> {
    let shown = path.display();
    let size = table::len(identity.blocks, layout.metadata);
    let size = size.with_context(|| format!("{shown}: the volume has too many blocks"))?;
    let fresh = || Ok(table::encode(&layout, identity));
    let (volume, pages) = table_file::open_sized(path, size, fresh, previous)?;
    let bytes = table_file::read(&pages, table::HEADER)?;
    let generation = table::decode(&bytes, pages.len() as u64, &layout, identity);
    let generation = generation
        .with_context(|| format!("{shown}: removing the file loses the metadata of all blocks"))?;
    let blocks = identity.blocks;
    let kept = MetadataState::new(layout, blocks, generation, pages, Some(Arc::new(volume)));
    kept.with_context(|| format!("{shown}: the file is shorter than the metadata of the blocks"))
}

/// Metadata file of a namespace with several formats. It contains the metadata of the current
/// format, or none if that format has no metadata; the format file records which. Every call may
/// block.
pub struct MetadataFile {
    path: PathBuf,
    file: File,
    /// Volume that also protects this file by its lock, and makes the metadata durable by its
    /// flush.
    volume: Arc<FileVolume>,
    namespace: [u8; 16],
}

/// Header of the metadata file for the previous format, by which a failed change is undone.
pub struct SavedHeader {
    header: Vec<u8>,
    len: u64,
}

impl MetadataFile {
    /// Opens the metadata file of a namespace of `size` bytes on this volume. A missing file is
    /// created for this format.
    ///
    /// # Errors
    /// A message for the user when the file cannot be opened, or belongs to another namespace.
    pub fn open(
        path: &Path,
        format: BlockFormat,
        (volume, size): (&dyn Volume, u64),
        previous: PreviousProcess,
    ) -> Result<Self> {
        let namespace = identity::nguid("metadata", 1, &volume.id());
        let (layout, identity, len) = content(path, format, namespace, size)?;
        let fresh = || Ok(table::encode(&layout, identity));
        let (volume, _) = table_file::open_sized(path, len, fresh, previous)?;
        let file = File::options()
            .read(true)
            .write(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(path)
            .with_context(|| path.display().to_string())?;
        Ok(Self {
            path: path.into(),
            file,
            volume: Arc::new(volume),
            namespace,
        })
    }

    /// Replaces the open metadata file, and returns the previous one.
    #[cfg(test)]
    pub fn exchange(&mut self, file: File) -> File {
        std::mem::replace(&mut self.file, file)
    }

    /// Returns the volume that makes the metadata durable by its flush.
    pub fn volume(&self) -> Arc<dyn Volume> {
        self.volume.clone()
    }

    fn content(&self, format: BlockFormat, size: u64) -> Result<(Layout, Identity, u64)> {
        content(&self.path, format, self.namespace, size)
    }

    /// Checks whether the file may be initialized again: every valid part of its header must name
    /// this namespace.
    ///
    /// # Errors
    /// A message for the user when the file belongs to another namespace.
    pub fn check_owner(&self) -> Result<()> {
        let (header, _) = self.header()?;
        table::check_owner(&header, self.namespace).with_context(|| self.advice())
    }

    fn advice(&self) -> String {
        let shown = self.path.display();
        format!("{shown}: removing the file loses the metadata of all blocks")
    }

    /// Returns the header of the metadata file, as far as it exists, and the length of the file.
    fn header(&self) -> Result<(Vec<u8>, u64)> {
        let found = self.file.metadata()?.len();
        let mut header = vec![0; table::HEADER.min(usize::try_from(found)?)];
        self.file.read_exact_at(&mut header, 0)?;
        Ok((header, found))
    }

    /// Returns the metadata of blocks of this format from the file; `None` if the format has no
    /// metadata.
    ///
    /// # Errors
    /// A message for the user when the file has another format or cannot be read.
    pub fn state(&self, format: BlockFormat, size: u64) -> Result<Option<Arc<MetadataState>>> {
        let shown = self.path.display();
        let (layout, identity, len) = self.content(format, size)?;
        let (header, found) = self.header()?;
        // The file may be longer, because of an earlier format or a failed change.
        let generation = table::decode(&header, found.min(len), &layout, identity);
        let generation = generation.with_context(|| self.advice())?;
        let Some(layout) = format.layout() else {
            return Ok(None);
        };
        let pages = SharedPages::of_file(self.file.try_clone()?.into());
        let pages = pages.with_context(|| shown.to_string())?;
        let volume: Arc<dyn Volume> = self.volume.clone();
        let state = MetadataState::new(layout, identity.blocks, generation, pages, Some(volume));
        let state = state.with_context(|| format!("{shown}: the file is shorter than that"))?;
        Ok(Some(Arc::new(state)))
    }

    /// Returns the present header for [`MetadataFile::restore`]; `None` if the file does not have
    /// this format.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn before(&self, format: BlockFormat, size: u64) -> Result<Option<SavedHeader>> {
        let (layout, identity, len) = self.content(format, size)?;
        let (header, found) = self.header()?;
        let is_of = table::decode(&header, found.min(len), &layout, identity).is_ok();
        Ok(is_of.then_some(SavedHeader { header, len }))
    }

    /// Allocates space for the metadata of a further format, without changing the file's current
    /// format.
    ///
    /// # Errors
    /// The error when no space is available; the file then has its previous length.
    pub fn grow(&self, format: BlockFormat, size: u64, before: Option<&SavedHeader>) -> Result<()> {
        let (_, _, len) = self.content(format, size)?;
        let old = before.map_or(0, |before| before.len);
        let grown = table_file::allocate(&self.file, len.max(old));
        if grown.is_err() && before.is_some() {
            self.file.set_len(old)?;
        }
        grown
    }

    /// Changes the file to this format, with the metadata of blocks that were never written. On
    /// success the change survives a power loss; if the process dies earlier, the file may be
    /// invalid. The file may be longer than the format needs, to keep space for the previous one
    /// until the change is final ([`MetadataFile::shorten`]).
    ///
    /// # Errors
    /// The error of the failed write; the file may be invalid.
    pub fn remake(&self, format: BlockFormat, size: u64) -> Result<()> {
        let (layout, identity, len) = self.content(format, size)?;
        // Old content behind the header is never read again.
        table_file::zero(&self.file, table::HEADER as u64, len)?;
        crash::point!("vnvme.metadata.zeroed");
        self.file
            .write_all_at(&table::encode(&layout, identity), 0)?;
        crash::point!("vnvme.metadata.written");
        Ok(self.file.sync_all()?)
    }

    /// Truncates the file to the length that its current format needs.
    ///
    /// # Errors
    /// The error of the system. The file may remain longer, which is harmless.
    pub fn shorten(&self, format: BlockFormat, size: u64) -> Result<()> {
        let (_, _, len) = self.content(format, size)?;
        if self.file.metadata()?.len() > len {
            self.file.set_len(len)?;
        }
        Ok(())
    }

    /// Changes the file back to its previous format, with the metadata of blocks that were never
    /// written.
    ///
    /// # Errors
    /// The error of the failed write; the file may be invalid.
    pub fn restore(&self, before: &SavedHeader) -> Result<()> {
        table_file::zero(&self.file, table::HEADER as u64, before.len)?;
        self.file.write_all_at(&before.header, 0)?;
        self.file.set_len(before.len)?;
        Ok(self.file.sync_all()?)
    }
}

/// Returns the contents of the file at `path` for a format: layout, identity, and size in bytes. A
/// file for a format without metadata reserves space for more and larger blocks of later formats.
fn content(
    path: &Path,
    format: BlockFormat,
    namespace: [u8; 16],
    size: u64,
) -> Result<(Layout, Identity, u64)> {
    let none = Layout {
        block: 0,
        metadata: 0,
        extended: false,
        protection: None,
    };
    let layout = format.layout();
    let blocks = layout.map_or(0, |layout| size / u64::from(layout.block));
    let layout = layout.unwrap_or(none);
    let identity = Identity { namespace, blocks };
    let len = table::len(blocks, layout.metadata);
    let len = len.with_context(|| format!("{}: the volume has too many blocks", path.display()))?;
    Ok((layout, identity, len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::options::url::parse;

    fn metadata(url: &str) -> Result<Option<Arc<MetadataState>>> {
        let volume: Arc<dyn Volume> = Arc::new(volume::MemVolume::new(1 << 20).unwrap());
        open(&parse(url).unwrap(), &volume, PreviousProcess::default())
    }

    fn error(url: &str) -> String {
        format!("{:#}", metadata(url).err().unwrap())
    }

    #[test]
    fn invalid_metadata_options_are_refused_with_reason() {
        assert!(metadata("mem://1M").unwrap().is_none());
        let there = metadata("mem://1M?metadata-size=64&protection=1&protection-first=on");
        let layout = *there.unwrap().unwrap().layout();
        assert_eq!((layout.block, layout.metadata), (512, 64));
        assert!(layout.protection.is_some_and(|protection| protection.first));
        let storage = |options: &str| {
            let there = metadata(&format!("mem://1M?protection=1&{options}"));
            let layout = *there.unwrap().unwrap().layout();
            layout.protection.map(|protection| protection.storage)
        };
        let tag = "metadata-size=8&storage-tag=16";
        assert_eq!(storage(tag), Some(StorageTag::of(16)));
        let masked = StorageTag {
            bits: 16,
            mask: 0xff00,
        };
        let mask = format!("{tag}&storage-tag-mask=0xff00");
        assert_eq!(storage(&mask), Some(masked));
        let long = "metadata-size=16&block-size=4096&guard";
        let guard = |bits| storage(&format!("{long}={bits}"));
        assert_eq!(guard(16), Some(StorageTag::of(0)));
        assert_eq!(guard(32), Some(StorageTag::of(16)));
        assert_eq!(guard(64), Some(StorageTag::of(0)));
        for (options, said) in [
            ("metadata-size=8&protection=4", "0 to 3 are allowed"),
            ("metadata-size=9", "8, 16 and 64 are allowed"),
            (
                "metadata-size=16&protection=1&guard=17",
                "16, 32 and 64 are allowed",
            ),
            (
                "metadata-size=16&protection=1&guard=32",
                "for blocks of 4096 bytes",
            ),
            (
                "block-size=4096&metadata-size=8&protection=1&guard=64",
                "in a tuple of 16 bytes",
            ),
            (
                "metadata-size=8&protection=1&storage-tag=33",
                "a storage tag of 33 bits: a guard of 16 bits has one of 0 to 32",
            ),
            (
                "block-size=4096&metadata-size=16&protection=1&guard=32&storage-tag=8",
                "a guard of 32 bits has one of 16 to 64",
            ),
            (
                "metadata-size=8&protection=1&storage-tag=8&storage-tag-mask=0x100",
                "a mask of 0x100 for a storage tag of 8 bits",
            ),
            (
                "metadata-size=8&protection=1&storage-tag-mask=1",
                "a mask of 0x1 for a storage tag of 0 bits",
            ),
        ] {
            let text = error(&format!("mem://1M?{options}"));
            assert!(text.contains(said), "{options}: {text}");
        }
        for url in ["disk.raw?metadata-size=8", "null://1M?metadata-size=8"] {
            assert!(error(url).contains("needs the key metadata"), "{url}");
        }
    }

    #[test]
    fn metadata_file_is_created_and_bound_to_volume() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metadata");
        let url = format!(
            "mem://1M?metadata-size=8&protection=1&metadata={}",
            path.display()
        );
        drop(metadata(&url).unwrap().unwrap());
        let size = 4096 + 2048 * 32;
        assert_eq!(std::fs::metadata(&path).unwrap().len(), size);
        // The file is locked while in use.
        let held = metadata(&url).unwrap().unwrap();
        assert!(error(&url).contains("in use"), "{}", error(&url));
        drop(held);
        assert!(error(&url.replace("protection=1", "protection=2")).contains("protection 1"));
        // The file records the size of the storage tag; the mask of compared bits may change.
        let tagged = format!("{url}&storage-tag=12");
        let text = error(&tagged);
        assert!(text.contains("storage tag of 0"), "{text}");
        std::fs::remove_file(&path).unwrap();
        drop(metadata(&tagged).unwrap().unwrap());
        drop(
            metadata(&format!("{tagged}&storage-tag-mask=0xf0"))
                .unwrap()
                .unwrap(),
        );
        assert!(error(&url).contains("storage tag of 12"));
        std::fs::remove_file(&path).unwrap();
        drop(metadata(&url).unwrap().unwrap());
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        for other in [4096, 1000, 0, size + 4096] {
            file.set_len(other).unwrap();
            error(&url);
        }
        file.set_len(size).unwrap();
        std::fs::write(&path, vec![7; size as usize]).unwrap();
        assert!(error(&url).contains("not a metadata file"));
    }
}
