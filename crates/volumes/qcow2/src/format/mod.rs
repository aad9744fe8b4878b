//! On-disk structures of an image, decoded and checked without I/O.
//!
//! Comments name the section of "qcow2.txt" (`docs/interop/qcow2.rst` of QEMU) that defines a rule.

mod entry;
mod header;

pub use entry::{COPIED, L2Entry, Mapping, ZERO, table_entry, without_reserved};
pub use header::{
    DIRTY, FormatError, Geometry, HEADER_ROOM, Header, OFFSET_FEATURES, OFFSET_L1,
    OFFSET_REFCOUNTS, OFFSET_SIZE,
};
