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
    #[error("{}: this is no folder", .0.display())]
    NoFolder(PathBuf),
    /// Another process has locked the folder.
    #[error("{}: another process has this pool, and has locked it", .0.display())]
    Locked(PathBuf),
    /// The folder contains files of namespaces, but no manifest.
    #[error(
        "{}: it is a namespace's file, and the folder has no manifest (pool.toml) that tells of it: \
         put the manifest back, or take such files away",
        .0.display()
    )]
    NoManifest(PathBuf),
    /// The manifest cannot be parsed, or contradicts itself.
    #[error("{}: this is no manifest of a pool: {why}", path.display())]
    Manifest {
        /// Path of the manifest.
        path: PathBuf,
        /// Description of the error.
        why: String,
    },
    /// The manifest was written by a newer program.
    #[error(
        "{}: its format is version {version}, which a newer program has written; this one does not \
         know it",
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
    #[error("there is no namespace {0} in the pool")]
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
