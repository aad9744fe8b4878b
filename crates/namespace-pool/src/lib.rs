//! A pool of capacity for namespaces that a host makes: a folder with a file for each namespace,
//! and a manifest, `pool.toml`, of what is there.
//!
//! A namespace is there when the manifest says so: that is replaced as a whole (written under
//! another name, made durable, renamed, and the folder made durable). What is about to be made or
//! removed stands in it beforehand, as `pending`; so who opens the folder after a kill or a loss
//! of power knows which files nobody has, and removes them, and no others: what else is in the
//! folder is not looked at.
//!
//! | step | create | delete |
//! |---|---|---|
//! | 1 | manifest: pending | manifest: pending, and not there any more |
//! | 2 | the file, durable, and its name | the file's name goes, durable |
//! | 3 | manifest: there, and not pending | manifest: not pending |
//!
//! The folder belongs to the process that has locked it. Every call here may block. Nothing here
//! knows NVMe beyond the numbers that a namespace has, or reads what is in a namespace.
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
    /// Opens the folder, which has to be there; one that has no manifest and no namespace's file is
    /// an empty pool. What a process has left behind that died is removed. A previous process is
    /// waited for, at most for `limit`.
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
        // What stays is tried again with the next deletion: it keeps no namespace from its host.
        let _ = pool.remove_pending();
        for entry in pool.manifest.namespaces() {
            pool.folder.check_file(entry)?;
        }
        Ok(pool)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The namespaces, as they are kept.
    pub fn namespaces(&self) -> &[Entry] {
        self.manifest.namespaces()
    }

    /// The file of a namespace.
    pub fn file(&self, nguid: Nguid) -> PathBuf {
        self.folder.file(nguid)
    }

    /// Makes a namespace, which reads as zeroes. One with this NGUID that is there already stays as
    /// it is. When this returns, it outlasts the process and a loss of power.
    ///
    /// # Errors
    /// Nothing is there then, or what is there is found by who opens the folder next.
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
            // It may be in the manifest by now, as far as the disk knows: not before that says
            // something else is the file removed.
            if self.folder.write_manifest(&self.manifest).is_ok() {
                let _ = self.remove_pending();
            }
            return Err(error);
        }
        self.manifest = with;
        crash::point!("namespace-pool.create.done");
        Ok(())
    }

    /// Removes a namespace, and its file. One that is not there is no error.
    ///
    /// # Errors
    /// It is there as before, or who opens the folder next finds that it is not.
    pub fn delete(&mut self, nguid: Nguid) -> Result<(), PoolError> {
        if self.manifest.find(nguid).is_none() {
            return Ok(());
        }
        self.replace(self.manifest.without(nguid))?;
        crash::point!("namespace-pool.delete.pending");
        // It is gone, whatever becomes of its file: that is tried again with the next deletion, and
        // by the next process.
        let _ = self.remove_pending();
        Ok(())
    }

    /// Keeps that a controller has a namespace, or has it no more.
    ///
    /// # Errors
    /// There is none of this NGUID, unless it is to be detached; its file is not what the manifest
    /// says, if it is to be attached: nobody could open the folder then. Or it is not known what
    /// the next process finds.
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

    /// Keeps that a namespace has blocks of so many bytes (512 or 4096) from now on, as many as it
    /// has bytes for. When this returns, that outlasts the process and a loss of power.
    ///
    /// # Errors
    /// There is none of this NGUID, or its size is not a whole number of these. Or it is not known
    /// what the next process finds.
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

    /// Removes the files that nobody has. One that cannot be removed holds up no other: what a host
    /// has deleted must not fill the disk because of it.
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
