//! What can be wrong with a pool's folder.

use crate::Nguid;
use std::io;
use std::path::{Path, PathBuf};

/// Why a pool cannot be opened or changed.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The system says so.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What it says.
        error: io::Error,
    },
    /// A file, a device, a FIFO.
    #[error("{}: this is no folder", .0.display())]
    NoFolder(PathBuf),
    /// Another process has it.
    #[error("{}: another process has this pool, and has locked it", .0.display())]
    Locked(PathBuf),
    /// There are files of namespaces, and nothing that tells of them.
    #[error(
        "{}: it is a namespace's file, and the folder has no manifest (pool.toml) that tells of it: \
         put the manifest back, or take such files away",
        .0.display()
    )]
    NoManifest(PathBuf),
    /// The manifest cannot be read as one.
    #[error("{}: this is no manifest of a pool: {why}", path.display())]
    Manifest {
        /// It.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A newer program has written it.
    #[error(
        "{}: its format is version {version}, which a newer program has written; this one does not \
         know it",
        path.display()
    )]
    TooNew {
        /// The manifest.
        path: PathBuf,
        /// Of the format.
        version: u32,
    },
    /// The file of a namespace is not what the manifest says.
    #[error("{}: the file of namespace {nsid} {why}", path.display())]
    File {
        /// It.
        path: PathBuf,
        /// The namespace.
        nsid: u32,
        /// What is wrong.
        why: String,
    },
    /// There is no such namespace.
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

    /// What the folder lies on is full, or its user may have no more.
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
