//! Metadata of a namespace's blocks: what a user says of it, and the file that it is kept in.

use crate::identity;
use crate::options::Bits;
use crate::spec::NamespaceSpec;
use crate::table_file;
use anyhow::{Context, Result, ensure};
use controller::MetadataState;
use protection::table::{self, Identity};
use protection::{Guard, Layout, Protection, StorageTag, Type};
use std::path::Path;
use std::sync::Arc;
use volume::{PreviousProcess, Volume};

/// The metadata of a namespace on this volume, if its blocks are to have any.
///
/// # Errors
/// A sentence for the user.
pub fn open(
    spec: &NamespaceSpec,
    volume: &Arc<dyn Volume>,
    previous: PreviousProcess,
) -> Result<Option<Arc<MetadataState>>> {
    let Some(size) = spec.metadata_size else {
        return Ok(None);
    };
    let url = &*spec.volume;
    let layout = layout(spec, size, &**volume).with_context(|| format!("{url}: metadata"))?;
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
                "{url}: metadata-size needs metadata, a file that keeps it: the volume is there \
                 when this process has ended, or keeps no data"
            );
            MetadataState::in_memory(layout, blocks)?
        }
    };
    Ok(Some(Arc::new(state)))
}

fn layout(spec: &NamespaceSpec, metadata: u16, volume: &dyn Volume) -> Result<Layout> {
    let block = spec.block_size;
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
        block: block.unwrap_or_else(|| volume.info().block_size.max(512)),
        metadata,
        extended: spec.metadata_extended.unwrap_or_default(),
        protection,
    };
    layout.check()?;
    Ok(layout)
}

/// The metadata in a file, which is made if it is not there.
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
    let generation = generation.with_context(|| {
        format!("{shown}: to remove the file is to have all blocks without what was kept for them")
    })?;
    let blocks = identity.blocks;
    let kept = MetadataState::new(layout, blocks, generation, pages, Some(Arc::new(volume)));
    kept.with_context(|| format!("{shown}: the file is shorter than the metadata of the blocks"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::url::parse;

    fn metadata(url: &str) -> Result<Option<Arc<MetadataState>>> {
        let volume: Arc<dyn Volume> = Arc::new(volume::MemVolume::new(1 << 20).unwrap());
        open(&parse(url).unwrap(), &volume, PreviousProcess::default())
    }

    fn error(url: &str) -> String {
        format!("{:#}", metadata(url).err().unwrap())
    }

    #[test]
    fn what_cannot_be_is_said_in_words() {
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
            assert!(error(url).contains("needs metadata"), "{url}");
        }
    }

    #[test]
    fn the_file_is_made_and_is_another_volumes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metadata");
        let url = format!(
            "mem://1M?metadata-size=8&protection=1&metadata={}",
            path.display()
        );
        drop(metadata(&url).unwrap().unwrap());
        let size = 4096 + 2048 * 32;
        assert_eq!(std::fs::metadata(&path).unwrap().len(), size);
        // In use it is locked.
        let held = metadata(&url).unwrap().unwrap();
        assert!(error(&url).contains("in use"), "{}", error(&url));
        drop(held);
        assert!(error(&url.replace("protection=1", "protection=2")).contains("protection 1"));
        // The file has the tag's size; what of it is compared may change.
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
        assert!(error(&url).contains("no file of metadata"));
    }
}
