//! A pool of capacity for namespaces that a host makes: a folder with a file for each namespace,
//! and a manifest, `pool.toml`, that lists them.
//!
//! A namespace exists if the manifest lists it. The manifest is replaced as a whole (written under
//! another name, made durable, renamed, and the folder made durable). A namespace that is about to
//! be made or removed is entered beforehand, as `pending`. So the process that opens the folder
//! after a kill or a loss of power knows the files without a namespace, and removes exactly these.
//! All other files in the folder are ignored.
//!
//! | step | create | delete |
//! |---|---|---|
//! | 1 | manifest: pending | manifest: pending, and not listed any more |
//! | 2 | the file, durable, and its name | the file's name removed, durable |
//! | 3 | manifest: listed, and not pending | manifest: not pending |
//!
//! The folder belongs to the process that has locked it. Every call here may block. This crate
//! knows no NVMe beyond the numbers of a namespace, and does not read the content of a namespace.
#![forbid(unsafe_code)]

mod error;
mod files;
mod manifest;

pub use error::PoolError;
pub use files::file_of;
pub use manifest::{Entry, MANIFEST, Nguid};

use files::Folder;
use manifest::Manifest;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A namespace that is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct New {
    /// Namespace ID, 1 to 1024, which no other one of the pool has.
    pub nsid: u32,
    /// Names it: no namespace has had it before ([`Nguid::random`]).
    pub nguid: Nguid,
    /// Size in logical blocks.
    pub blocks: u64,
    /// Logical block size in bytes: 512 or 4096.
    pub block_size: u32,
    /// Several controllers may have it.
    pub shared: bool,
}

/// The folder of a pool, which no other process has.
#[derive(Debug)]
pub struct PoolFolder {
    folder: Folder,
    manifest: Manifest,
}

impl PoolFolder {
    /// Opens the folder, which has to exist. A folder without a manifest and without a namespace's
    /// file is an empty pool. Files left by a dead process are removed. Waits at most `limit` for a
    /// previous process.
    ///
    /// # Errors
    /// [`PoolError`].
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
        // Files that remain are removed with the next deletion: they keep no namespace from its
        // host.
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

    /// Returns the namespaces of the manifest.
    pub fn namespaces(&self) -> &[Entry] {
        self.manifest.namespaces()
    }

    /// Returns the path of a namespace's file.
    pub fn file(&self, nguid: Nguid) -> PathBuf {
        self.folder.file(nguid)
    }

    /// Makes a namespace, which reads as zeroes. An existing namespace with this NGUID stays as it
    /// is. When this returns, the namespace survives the end of the process and a loss of power.
    ///
    /// # Errors
    /// The namespace does not exist then, or the next process that opens the folder finds it.
    pub fn create(&mut self, new: &New) -> Result<(), PoolError> {
        if self.manifest.find(new.nguid).is_some() {
            return Ok(());
        }
        let with = self.manifest.with(Entry::new(new));
        with.check(&self.folder.manifest_path())?;
        let entry = Entry::new(new);
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

    /// Removes a namespace, and its file. A missing namespace is no error.
    ///
    /// # Errors
    /// The namespace exists as before, or the next process that opens the folder finds it removed.
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

    /// Saves whether a namespace is attached to a controller.
    ///
    /// # Errors
    /// If there is no namespace of this NGUID, unless it is to be detached. If its file contradicts
    /// the manifest and it is to be attached, because nobody could open the folder then. If saving
    /// fails; the next process may find either state.
    pub fn set_attached(
        &mut self,
        nguid: Nguid,
        cntlid: u16,
        attached: bool,
    ) -> Result<(), PoolError> {
        let Some(entry) = self.manifest.find(nguid) else {
            return match attached {
                true => Err(PoolError::Unknown(nguid)),
                false => Ok(()),
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

    /// Saves a new block size of a namespace (512 or 4096 bytes); the number of blocks follows from
    /// its size. When this returns, the change survives the end of the process and a loss of power.
    ///
    /// # Errors
    /// If there is no namespace of this NGUID, or its size is not a multiple of the block size. If
    /// saving fails; the next process may find either state.
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
            // The new one may be there for all that.
            let _ = self.folder.write_manifest(&self.manifest);
            return Err(error);
        }
        self.manifest = manifest;
        Ok(())
    }

    /// Removes the files without a namespace. A file that cannot be removed does not stop the rest:
    /// data that a host has deleted must not fill the disk because of it.
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
