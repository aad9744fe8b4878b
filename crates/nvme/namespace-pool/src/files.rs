//! Files of a pool's folder: its lock, the manifest, and the files of namespaces.

use crate::error::PoolError;
use crate::manifest::{MANIFEST, Manifest, Nguid, PoolEntry};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Text before the NGUID in the name of a namespace's file.
const BEFORE: &str = "namespace-";
const AFTER: &str = ".raw";
/// Maximum size in bytes of a manifest that is read.
const MAX_MANIFEST_LEN: u64 = 16 << 20;
/// Interval between attempts to lock the folder.
const LOCK_CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Returns the path of a namespace's file in the pool's folder.
pub fn file_of(folder: &Path, nguid: Nguid) -> PathBuf {
    folder.join(format!("{BEFORE}{nguid}{AFTER}"))
}

/// The folder of a pool, locked by this process.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// Descriptor of the folder, which holds the lock.
    file: File,
}

/// Returns open options that neither block on a FIFO nor follow a link.
fn options() -> OpenOptions {
    let mut options = File::options();
    options
        .mode(0o600)
        .custom_flags((OFlags::NONBLOCK | OFlags::NOFOLLOW).bits() as i32);
    options
}

impl Folder {
    pub fn open(path: &Path, limit: Duration) -> Result<Self, PoolError> {
        let failed = |error| PoolError::io(path, error);
        let until = Instant::now() + limit;
        let flags = (OFlags::NONBLOCK | OFlags::DIRECTORY).bits() as i32;
        let opened = File::options().read(true).custom_flags(flags).open(path);
        let file = opened.map_err(|error| match error.kind() {
            io::ErrorKind::NotADirectory => PoolError::NoFolder(path.into()),
            _ => failed(error),
        })?;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    std::thread::sleep(LOCK_CHECK_INTERVAL);
                }
                Err(TryLockError::WouldBlock) => return Err(PoolError::Locked(path.into())),
                Err(TryLockError::Error(error)) => return Err(failed(error)),
            }
        }
        let path = path.into();
        Ok(Self { path, file })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn manifest_path(&self) -> PathBuf {
        self.path.join(MANIFEST)
    }

    pub fn file(&self, nguid: Nguid) -> PathBuf {
        file_of(&self.path, nguid)
    }

    pub fn sync(&self) -> Result<(), PoolError> {
        let synced = self.file.sync_all();
        synced.map_err(|error| PoolError::io(&self.path, error))
    }

    /// Returns the path of any file that is named like a namespace's; `None` if there is none.
    pub fn any_namespace(&self) -> Result<Option<PathBuf>, PoolError> {
        let failed = |error| PoolError::io(&self.path, error);
        for entry in std::fs::read_dir(&self.path).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let nguid = name.to_str().and_then(|name| {
                let name = name.strip_prefix(BEFORE)?.strip_suffix(AFTER)?;
                Nguid::parse(name)
            });
            if let Some(nguid) = nguid {
                return Ok(Some(self.file(nguid)));
            }
        }
        Ok(None)
    }

    /// Reads the manifest's text, if the manifest exists.
    pub fn read_manifest(&self) -> Result<Option<String>, PoolError> {
        let path = self.manifest_path();
        let failed = |error| PoolError::io(&path, error);
        let file = match options().read(true).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let wrong = |why: &str| PoolError::Manifest {
            path: path.clone(),
            why: why.into(),
        };
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(wrong("not a regular file"));
        }
        let mut bytes = Vec::new();
        let read = file.take(MAX_MANIFEST_LEN + 1).read_to_end(&mut bytes);
        read.map_err(failed)?;
        if bytes.len() as u64 > MAX_MANIFEST_LEN {
            return Err(wrong("it is too long"));
        }
        let text = String::from_utf8(bytes);
        text.map(Some).map_err(|_| wrong("not UTF-8"))
    }

    /// Replaces the manifest atomically.
    pub fn write_manifest(&self, manifest: &Manifest) -> Result<(), PoolError> {
        let path = self.manifest_path();
        let text = manifest.text().ok_or_else(|| PoolError::Manifest {
            path: path.clone(),
            why: "it cannot be written as text".into(),
        })?;
        let new = path.with_extension("toml.new");
        let written = || -> io::Result<()> {
            // The file is created anew, so that a link of this name, or a file left by a killed
            // process, is not written to.
            match std::fs::remove_file(&new) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let mut file = options().write(true).create_new(true).open(&new)?;
            crash::point!("namespace-pool.manifest.begun");
            file.write_all(text.as_bytes())?;
            crash::point!("namespace-pool.manifest.written");
            file.sync_all()
        };
        if let Err(error) = written() {
            let _ = std::fs::remove_file(&new);
            return Err(PoolError::io(&new, error));
        }
        crash::point!("namespace-pool.manifest.durable");
        std::fs::rename(&new, &path).map_err(|error| PoolError::io(&path, error))?;
        crash::point!("namespace-pool.manifest.renamed");
        self.sync()
    }

    /// Creates the file of a namespace, as a hole. Replaces a file left by a killed process.
    pub fn make_file(&self, entry: &PoolEntry) -> Result<(), PoolError> {
        let path = self.file(entry.nguid());
        let made = || -> io::Result<()> {
            let file = options().write(true).create_new(true).open(&path)?;
            crash::point!("namespace-pool.file.made");
            file.set_len(entry.bytes())?;
            file.sync_all()
        };
        made().map_err(|error| PoolError::io(&path, error))?;
        self.sync()
    }

    /// Removes the file of a namespace, if it exists.
    pub fn remove_file(&self, nguid: Nguid) -> Result<(), PoolError> {
        let path = self.file(nguid);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(PoolError::io(&path, error))
            }
            _ => Ok(()),
        }
    }

    /// Checks that the file of a namespace matches the manifest.
    pub fn check_file(&self, entry: &PoolEntry) -> Result<(), PoolError> {
        let path = self.file(entry.nguid());
        let found = std::fs::symlink_metadata(&path);
        let why = match found {
            Ok(found) if !found.is_file() => "is not a regular file".into(),
            Ok(found) if found.len() != entry.bytes() => {
                let (found, wanted) = (found.len(), entry.bytes());
                format!("has {found} bytes instead of the manifest's {wanted}")
            }
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => "is not there".into(),
            Err(error) => return Err(PoolError::io(&path, error)),
        };
        let nsid = entry.nsid();
        Err(PoolError::File { path, nsid, why })
    }
}
