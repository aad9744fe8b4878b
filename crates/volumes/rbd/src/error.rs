//! Errors of opening an image.

use crate::ffi::LibraryError;
use std::io;

/// Reason why an image of a Ceph cluster cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum RbdError {
    /// The Ceph libraries cannot be loaded.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The cluster's configuration is invalid or cannot be read.
    #[error("{conf}: {what}: {error}")]
    Settings {
        /// Path of the configuration file.
        conf: String,
        /// Mistake in the configuration, or the operation that has failed.
        what: &'static str,
        /// Error that librados has returned.
        error: io::Error,
    },
    /// The cluster requires authentication, and no key was found.
    #[error(
        "client.{client} has no key in {places}; name it by keyring=, or another client by id= (ceph auth get client.NAME shows them)"
    )]
    NoKey {
        /// Name of the Ceph client without a key.
        client: String,
        /// Paths of the files that were searched for the key.
        places: String,
    },
    /// The image does not exist, or may not be opened.
    #[error("{name}: {what}: {error}{}", hint(.what, error))]
    Image {
        /// Name of the image that cannot be opened.
        name: String,
        /// Operation that has failed.
        what: &'static str,
        /// Error that the cluster has returned.
        error: io::Error,
    },
    /// The cluster did not answer in time, and no size is configured for the image.
    #[error(
        "{name}: its cluster did not answer in {wait:?} (wait=); give the image's size with size= \
         to serve the disk all the same, with requests waiting for the cluster"
    )]
    Away {
        /// Name of the image.
        name: String,
        /// Time limit within which the cluster did not answer.
        wait: std::time::Duration,
    },
    /// The size of the image is not a multiple of the block size.
    #[error(
        "{name}: its size of {size} bytes is not a multiple of the block size of {block} bytes; \
         change it with: rbd resize"
    )]
    Size {
        /// Name of the image.
        name: String,
        /// Size of the image in bytes.
        size: u64,
        /// Block size in bytes that the size must be a multiple of.
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
