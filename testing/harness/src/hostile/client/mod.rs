//! Clients that break any rule, on both protocols, and the descriptors that they pass on.

pub(super) mod fuse;
pub(super) mod nvme;
pub(super) mod poison;
pub(super) mod virtio;
