//! Clients that break any rule, on both protocols, and what they pass on.

pub(super) mod fuse;
pub(super) mod nvme;
pub(super) mod poison;
pub(super) mod virtio;
