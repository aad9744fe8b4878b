//! Errors of a namespace pool's folder.

use crate::Nguid;
use std::io;
use std::path::{Path, PathBuf};

/// Error of opening or changing a pool.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// An operation on a file has failed.
    #[error("{}: {error}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// I/O error of the operation.
        error: io::Error,
    },
    /// The path is not a folder.
    #[error("{}: not a folder", .0.display())]
    NoFolder(PathBuf),
    /// Another process has locked the folder.
    #[error("{}: another process uses this pool and holds its lock", .0.display())]
    Locked(PathBuf),
    /// The folder contains files of namespaces, but no manifest.
    #[error(
        "{}: the file of a namespace without manifest (pool.toml) in the folder: restore the \
         manifest, or remove such files",
        .0.display()
    )]
    NoManifest(PathBuf),
    /// The manifest cannot be parsed, or contradicts itself.
    #[error("{}: not a valid manifest of a pool: {why}", path.display())]
    Manifest {
        /// Path of the manifest.
        path: PathBuf,
        /// Description of the error.
        why: String,
    },
    /// The manifest was written by a newer program.
    #[error(
        "{}: format version {version} of a newer program; this one does not know it",
        path.display()
    )]
    TooNew {
        /// Path of the manifest.
        path: PathBuf,
        /// Version of the manifest's format.
        version: u32,
    },
    /// The file of a namespace does not match the manifest.
    #[error("{}: the file of namespace {nsid} {why}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// ID of the namespace.
        nsid: u32,
        /// Description of the contradiction.
        why: String,
    },
    /// No namespace has this NGUID.
    #[error("the pool has no namespace {0}")]
    Unknown(Nguid),
}

impl PoolError {
    pub(crate) fn io(path: &Path, error: io::Error) -> Self {
        Self::Io {
            path: path.into(),
            error,
        }
    }

    /// Returns whether the file system is full, or its quota is exhausted.
    pub fn is_full(&self) -> bool {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        match self {
            Self::Io { error, .. } => {
                matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
            }
            _ => false,
        }
    }
}
