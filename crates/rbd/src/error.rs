//! Errors of opening an image.

use crate::ffi::LibraryError;
use std::io;

/// Error of opening an image.
#[derive(Debug, thiserror::Error)]
pub enum RbdError {
    /// The libraries are not there.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The cluster's configuration.
    #[error("{conf}: {what}: {error}")]
    Settings {
        /// The file.
        conf: String,
        /// Error in the configuration, or the operation that failed.
        what: &'static str,
        /// Error of the library.
        error: io::Error,
    },
    /// The cluster asks for a key.
    #[error(
        "client.{client} has no key in {places}; name it by keyring=, or another client by id= (ceph auth get client.NAME shows them)"
    )]
    NoKey {
        /// The client.
        client: String,
        /// Places that were searched.
        places: String,
    },
    /// The cluster has answered, and there is no such image, or it may not be used.
    #[error("{name}: {what}: {error}{}", hint(.what, error))]
    Image {
        /// The image.
        name: String,
        /// Operation that failed.
        what: &'static str,
        /// Error of the cluster.
        error: io::Error,
    },
    /// The cluster did not answer in time, and no size is configured for the image.
    #[error(
        "{name}: its cluster did not answer in {wait:?} (wait=); give the image's size with size= \
         to serve the disk all the same, with requests waiting for the cluster"
    )]
    Away {
        /// The image.
        name: String,
        /// Time limit that was exceeded.
        wait: std::time::Duration,
    },
    /// A size that is none of a disk.
    #[error(
        "{name}: its size of {size} bytes is not a multiple of the block size of {block} bytes; \
         change it with: rbd resize"
    )]
    Size {
        /// The image.
        name: String,
        /// Size of the image.
        size: u64,
        /// The block.
        block: u32,
    },
}

fn hint(what: &str, error: &io::Error) -> &'static str {
    match (what, error.kind()) {
        ("its pool", io::ErrorKind::NotFound) => " (ceph osd pool ls shows the pools)",
        (_, io::ErrorKind::NotFound) => " (rbd ls POOL shows a pool's images)",
        (_, io::ErrorKind::PermissionDenied) => {
            " (the client may not: caps mon 'profile rbd' osd 'profile rbd pool=POOL')"
        }
        _ => "",
    }
}
