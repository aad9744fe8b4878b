//! Files beside a volume that hold state of its namespace: zones, placement handles, the metadata
//! of blocks, and the LBA format that the host has chosen.
//!
//! Each module opens the file that the options of a namespace name (crate `config`), checks that it
//! belongs to the namespace and its geometry, and returns the state that crate `controller` works
//! on.
#![forbid(unsafe_code)]

pub mod formats;
pub mod metadata;
pub mod placement;
mod table_file;
pub mod zones;
