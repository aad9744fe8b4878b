//! Storage pool for namespaces that a host creates: a folder with a file for each namespace, and a
//! manifest, `pool.toml`, that lists them.
//!
//! A namespace exists if the manifest lists it. The manifest is replaced as a whole (written under
//! another name, made durable, renamed, and the folder made durable). Before a namespace is created
//! or deleted, the manifest records it as `pending`. After a kill or power loss, the process that
//! opens the folder next therefore knows the files without a namespace, and removes exactly these.
//! All other files in the folder are ignored.
//!
//! | step | create | delete |
//! |---|---|---|
//! | 1 | manifest: pending | manifest: pending, and not listed any more |
//! | 2 | the file, durable, and its name | the file's name removed, durable |
//! | 3 | manifest: listed, and not pending | manifest: not pending |
//!
//! The folder belongs to the process that has locked it. Every call here may block. This crate
//! handles only the identifiers of namespaces, and never reads their content.
#![forbid(unsafe_code)]

mod error;
mod files;
mod manifest;

pub use error::PoolError;
pub use files::file_of;
pub use manifest::{MANIFEST, Nguid, PoolEntry};

use files::Folder;
use manifest::Manifest;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Parameters of a namespace to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct New {
    /// Namespace ID, 1 to 1024, which must be unused in the pool.
    pub nsid: u32,
    /// Globally unique identifier, which no namespace has ever had ([`Nguid::random`]).
    pub nguid: Nguid,
    /// Size in logical blocks.
    pub blocks: u64,
    /// Logical block size in bytes: 512 or 4096.
    pub block_size: u32,
    /// Whether several controllers may attach the namespace.
    pub shared: bool,
}

/// The folder of a pool, locked for this process.
#[derive(Debug)]
pub struct PoolFolder {
    folder: Folder,
    manifest: Manifest,
}

impl PoolFolder {
    /// Opens and locks an existing folder, after waiting for a previous process for at most
    /// `limit`. A folder without a manifest and without a namespace's file is an empty pool. Files
    /// left by a killed process are removed.
    ///
    /// # Errors
    /// [`PoolError`] when the folder cannot be locked, or the manifest or a file is invalid.
    pub fn open(path: &Path, limit: Duration) -> Result<Self, PoolError> {
        let folder = Folder::open(path, limit)?;
        let manifest = match folder.read_manifest()? {
            Some(text) => Manifest::parse(&folder.manifest_path(), &text)?,
            None => {
                if let Some(file) = folder.any_namespace()? {
                    return Err(PoolError::NoManifest(file));
                }
                folder.write_manifest(&Manifest::default())?;
                Manifest::default()
            }
        };
        let mut pool = PoolFolder { folder, manifest };
        // Remaining files are removed with the next deletion; no namespace depends on them.
        let _ = pool.remove_pending();
        for entry in pool.manifest.namespaces() {
            pool.folder.check_file(entry)?;
        }
        Ok(pool)
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the namespaces that the manifest lists.
    pub fn namespaces(&self) -> &[PoolEntry] {
        self.manifest.namespaces()
    }

    /// Returns the path of a namespace's file.
    pub fn file(&self, nguid: Nguid) -> PathBuf {
        self.folder.file(nguid)
    }

    /// Creates a namespace, which reads as zeroes. A namespace that already has this NGUID is left
    /// unchanged. On success the namespace survives a kill and a power loss.
    ///
    /// # Errors
    /// [`PoolError`] when the manifest or the file cannot be written. The next process that opens
    /// the folder may find the namespace nevertheless.
    pub fn create(&mut self, new: &New) -> Result<(), PoolError> {
        if self.manifest.find(new.nguid).is_some() {
            return Ok(());
        }
        let with = self.manifest.with(PoolEntry::new(new));
        with.check(&self.folder.manifest_path())?;
        let entry = PoolEntry::new(new);
        self.replace(self.manifest.with_pending(new.nguid))?;
        crash::point!("namespace-pool.create.pending");
        let made = self.folder.make_file(&entry).and_then(|()| {
            crash::point!("namespace-pool.create.made");
            self.folder.write_manifest(&with)
        });
        if let Err(error) = made {
            // The manifest on the disk may list the namespace by now. The file is removed only
            // after a manifest without it is durable.
            if self.folder.write_manifest(&self.manifest).is_ok() {
                let _ = self.remove_pending();
            }
            return Err(error);
        }
        self.manifest = with;
        crash::point!("namespace-pool.create.done");
        Ok(())
    }

    /// Deletes a namespace and its file. A missing namespace is no error.
    ///
    /// # Errors
    /// [`PoolError`] when the manifest cannot be written. The namespace still exists then, but the
    /// next process that opens the folder may find it deleted.
    pub fn delete(&mut self, nguid: Nguid) -> Result<(), PoolError> {
        if self.manifest.find(nguid).is_none() {
            return Ok(());
        }
        self.replace(self.manifest.without(nguid))?;
        crash::point!("namespace-pool.delete.pending");
        // The namespace is removed, even if its file is not: that is retried with the next
        // deletion, and by the next process.
        let _ = self.remove_pending();
        Ok(())
    }

    /// Records whether a namespace is attached to a controller.
    ///
    /// # Errors
    /// [`PoolError::Unknown`] when no namespace has this NGUID and it should be attached.
    /// [`PoolError::File`] when its file does not match the manifest and it should be attached,
    /// because the folder could not be opened any more then. [`PoolError::Io`] when writing fails;
    /// the next process may find either state.
    /// fails; the next process may find either state.
    pub fn set_attached(
        &mut self,
        nguid: Nguid,
        cntlid: u16,
        attached: bool,
    ) -> Result<(), PoolError> {
        let Some(entry) = self.manifest.find(nguid) else {
            return if attached {
                Err(PoolError::Unknown(nguid))
            } else {
                Ok(())
            };
        };
        if entry.attached().contains(&cntlid) == attached {
            return Ok(());
        }
        if attached {
            self.folder.check_file(entry)?;
        }
        self.replace(self.manifest.with_attached(nguid, cntlid, attached))?;
        crash::point!("namespace-pool.attached");
        Ok(())
    }

    /// Records a new block size of a namespace (512 or 4096 bytes); the number of blocks follows
    /// from its size. On success the change survives a kill and a power loss.
    ///
    /// # Errors
    /// [`PoolError`] when no namespace has this NGUID, its size is not a multiple of the block
    /// size, or writing fails; after a failed write the next process may find either state.
    pub fn set_block_size(&mut self, nguid: Nguid, block_size: u32) -> Result<(), PoolError> {
        let Some(entry) = self.manifest.find(nguid) else {
            return Err(PoolError::Unknown(nguid));
        };
        if entry.block_size() == block_size {
            return Ok(());
        }
        let next = self.manifest.with_block_size(nguid, block_size);
        let next = next.ok_or_else(|| PoolError::File {
            path: self.file(nguid),
            nsid: entry.nsid(),
            why: format!("does not divide into blocks of {block_size} bytes"),
        })?;
        next.check(&self.folder.manifest_path())?;
        self.replace(next)?;
        crash::point!("namespace-pool.formatted");
        Ok(())
    }

    fn replace(&mut self, manifest: Manifest) -> Result<(), PoolError> {
        if let Err(error) = self.folder.write_manifest(&manifest) {
            // The failed write may nevertheless have replaced the manifest.
            let _ = self.folder.write_manifest(&self.manifest);
            return Err(error);
        }
        self.manifest = manifest;
        Ok(())
    }

    /// Removes the files without a namespace. If one cannot be removed the others still are,
    /// because deleted data must not fill the disk.
    fn remove_pending(&mut self) -> Result<(), PoolError> {
        let (mut removed, mut result) = (BTreeSet::new(), Ok(()));
        for nguid in self.manifest.pending() {
            match self.folder.remove_file(*nguid) {
                Ok(()) => {
                    removed.insert(*nguid);
                }
                Err(error) => result = result.and(Err(error)),
            }
        }
        if !removed.is_empty() {
            self.folder.sync()?;
            crash::point!("namespace-pool.removed");
            self.replace(self.manifest.without_pending(&removed))?;
        }
        result
    }
}
