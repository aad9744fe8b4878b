//! Options of a virtual queue pair on the device.

use crate::slice::Slice;

/// Options of the path from a virtual queue pair to the device.
#[derive(Clone, Copy, Debug)]
pub struct DirectOptions {
    /// Namespace ID that the guest uses. Commands for other namespaces are refused.
    pub nsid: u32,
    /// Slice of the device that the guest may access.
    pub slice: Slice,
    /// Memory page size of the guest's controller in bytes (CC.MPS).
    pub page_size: u64,
    /// Maximum data size of a guest command in bytes (its MDTS); larger commands are refused.
    /// Commands that exceed the device's own maximum are split.
    pub max_transfer: u64,
    /// Maximum number of outstanding commands on the physical queue pair, if one is created.
    pub depth: u32,
    /// Whether the device sends interrupts, so that the worker can sleep
    /// ([`DirectQueue::waker`](crate::DirectQueue::waker)).
    pub interrupts: bool,
    /// Whether processor cycles are measured from the start.
    pub measure: bool,
}

impl DirectOptions {
    /// Returns the usual options, for a guest with memory pages of 4 KiB.
    pub fn new(nsid: u32, slice: Slice) -> Self {
        Self {
            nsid,
            slice,
            page_size: 4096,
            max_transfer: 1 << 20,
            depth: 1023,
            interrupts: true,
            measure: true,
        }
    }
}
